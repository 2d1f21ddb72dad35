// Server-sent events out of a fetched body, however the network cuts it.

/**
 * Yields {event, data} of each event. `onBytes` hears of everything that arrives, comments too.
 * @param {ReadableStream<Uint8Array>} body
 */
export async function* eventsOf(body, onBytes = () => {}) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      onBytes();
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(5).trimStart());
        } else if (line.startsWith("event:")) {
          event = line.slice(6).trim();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
