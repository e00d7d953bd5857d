// The stream of updates: server-sent events over fetch, because EventSource cannot send a key.
// Reconnects with the id of the last update, so that no event is missed.

const LONGEST_WAIT = 5000;

/** The blocks of lines of server-sent events, as they arrive. */
export async function* blocks(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    buffer += decoder.decode(value, { stream: true });
    let end;
    while ((end = buffer.indexOf("\n\n")) >= 0) {
      yield buffer.slice(0, end);
      buffer = buffer.slice(end + 2);
    }
  }
}

export class Stream {
  /** `on` has `layout(data)`, `models(data)`, `update(data)`, `state(name, text)` and `needsKey()`. */
  constructor(url, on) {
    this.url = url;
    this.on = on;
    /** The model that is watched; empty leaves it to the server. */
    this.model = "";
    this.key = "";
    this.lastId = "";
    this.attempt = 0;
    /** Whether the server ended the stream only to see who is still there. */
    this.isRenewed = false;
    this.abort = null;
    this.timer = 0;
  }

  headers() {
    return this.key ? { authorization: `Bearer ${this.key}` } : {};
  }

  start() {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = new AbortController();
    this.run(this.abort.signal);
  }

  /** Watches another model from now on. */
  choose(model) {
    this.model = model;
    this.lastId = "";
    this.start();
  }

  /** Breaks the connection, as a network does. */
  cut() {
    this.abort?.abort();
    this.retry();
  }

  async run(signal) {
    try {
      const headers = { accept: "text/event-stream", ...this.headers() };
      if (this.lastId) headers["last-event-id"] = this.lastId;
      const query = this.model ? `?model=${encodeURIComponent(this.model)}` : "";
      const answer = await fetch(this.url + query, { headers, signal, cache: "no-store" });
      if (answer.status === 401) {
        this.on.state("key", "needs a key");
        this.on.needsKey();
        return;
      }
      if (!answer.ok) {
        const body = await answer.json().catch(() => ({}));
        const problem = body.error?.message ?? `the server answered ${answer.status}`;
        // Trying again would not help: the key may chat, but not watch.
        if (answer.status === 403) return this.on.state("denied", "chat only", problem);
        throw new Error(problem);
      }
      this.attempt = 0;
      this.isRenewed = false;
      this.on.state("live", "live");
      for await (const block of blocks(answer.body)) this.dispatch(block);
      if (this.isRenewed) return this.start();
      throw new Error("the connection has ended");
    } catch (error) {
      if (!signal.aborted) this.retry(error);
    }
  }

  dispatch(block) {
    let name = "message";
    let data = "";
    for (const line of block.split("\n")) {
      if (line.startsWith("event: ")) name = line.slice(7);
      else if (line.startsWith("data: ")) data += line.slice(6);
      else if (line.startsWith("id: ")) this.lastId = line.slice(4);
    }
    if (name === "renew") this.isRenewed = true;
    else if (data) this.on[name]?.(JSON.parse(data));
  }

  retry(error) {
    const wait = Math.min(LONGEST_WAIT, 250 * 2 ** this.attempt);
    this.attempt += 1;
    this.on.state("lost", "reconnecting", error?.message);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.start(), wait);
  }
}
