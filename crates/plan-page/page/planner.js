// The answers of plan_page.wasm.gz: a question is a line of JSON, with the first bytes of files behind it.

const encoder = new TextEncoder();
const decoder = new TextDecoder();

/** Unpacks what is gzip; a server that says so of the file has had it unpacked before. */
async function unpacked(bytes) {
  const [first, second] = new Uint8Array(bytes);
  if (first !== 0x1f || second !== 0x8b) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

export class Planner {
  #module;
  #exports;

  static async load(address) {
    const planner = new Planner();
    const response = await fetch(address);
    if (!response.ok) throw new Error(`${address}: HTTP status ${response.status}`);
    planner.#module = await WebAssembly.compile(await unpacked(await response.arrayBuffer()));
    await planner.#start();
    return planner;
  }

  async #start() {
    const instance = await WebAssembly.instantiate(this.#module, {});
    this.#exports = instance.exports;
  }

  /** The answer to a question; an error that Rust gives is thrown. */
  async ask(question, parts = []) {
    const line = encoder.encode(`${JSON.stringify(question)}\n`);
    const all = [line, ...parts];
    const length = all.reduce((sum, part) => sum + part.length, 0);
    let text;
    try {
      const { memory, input, ask, output } = this.#exports;
      let at = input(length) >>> 0;
      for (const part of all) {
        new Uint8Array(memory.buffer, at, part.length).set(part);
        at += part.length;
      }
      const n = ask() >>> 0;
      text = decoder.decode(new Uint8Array(memory.buffer, output() >>> 0, n));
    } catch (failure) {
      // What has trapped is in no known state: the next question gets a new one.
      await this.#start();
      throw new Error(`the planner has failed, and forgot its model: ${failure.message}`);
    }
    const answer = JSON.parse(text);
    if (answer.error !== undefined) throw new Error(answer.error);
    return answer;
  }
}
