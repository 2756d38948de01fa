const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"] as const;

/** As the CLI has it: 1536 -> "1.5 KiB". */
export function formatBytes(bytes: number): string {
  let value = Math.abs(bytes);
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  const text = unit === 0 ? String(value) : value.toFixed(1);
  return `${bytes < 0 ? "-" : ""}${text} ${UNITS[unit]}`;
}

/** Of 0.9234: "92.3 %". */
export function formatShare(share: number): string {
  return `${(share * 100).toFixed(1)} %`;
}

export function formatCount(count: number): string {
  return count.toLocaleString();
}

/** 1, "checkpoint" -> "1 checkpoint"; 1200, "checkpoint" -> "1,200 checkpoints". */
export function plural(count: number, noun: string): string {
  return `${formatCount(count)} ${noun}${count === 1 ? "" : "s"}`;
}

/** Two digits below 100, none above. `currency`: as the price list has it, for example USD. */
export function formatMoney(amount: number, currency: string): string {
  const digits = Math.abs(amount) < 100 ? 2 : 0;
  const text = amount.toLocaleString(undefined, { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return `${text} ${currency}`;
}
