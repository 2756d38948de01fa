/** 1 -> "1 chunk", 2 -> "2 chunks". `many`: where an s does not make the plural. */
export function plural(count: number, one: string, many = `${one}s`): string {
  return `${count.toLocaleString()} ${count === 1 ? one : many}`;
}
