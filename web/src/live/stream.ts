/** One message of a stream of server-sent events. Without `data` it only tells how far the stream has come. */
export interface StreamMessage {
  id: string;
  data: string;
}

/** The messages of a stream, as they come; it ends when the stream does. Of the format's fields it reads `id` and `data`:
 * the service says everything in those. */
export async function* messagesOf(body: ReadableStream<Uint8Array>): AsyncGenerator<StreamMessage> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let [rest, id, data] = ["", "", [] as string[]];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop() ?? "";
      for (const each of lines) {
        const line = each.replace(/\r$/, "");
        if (line === "") {
          if (id !== "") yield { id, data: data.join("\n") };
          [id, data] = ["", []];
        } else if (line.startsWith("id: ")) id = line.slice(4);
        else if (line.startsWith("data: ")) data.push(line.slice(6));
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}
