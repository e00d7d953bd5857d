// Several conversations with the model at once, to see what they share. Models without a
// chat template continue a text instead.

import { element } from "./panels.js";
import { blocks } from "./stream.js";
import { plural } from "./words.js";

export class Chat {
  constructor(byId, headers) {
    this.byId = byId;
    this.headers = headers;
    this.canChat = true;
    this.talks = [];
    this.current = null;
    byId("chat-new").addEventListener("click", () => {
      this.open();
      byId("chat-input").focus();
    });
    byId("chat-stop").addEventListener("click", () => this.current.abort?.abort());
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    byId("chat-tabs").addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (step === undefined) return;
      event.stopPropagation();
      const at = this.talks.indexOf(this.current) + step;
      this.choose(this.talks[(at + this.talks.length) % this.talks.length]);
      this.current.tab.focus();
    });
    this.open();
  }

  configure(layout) {
    this.model = layout.model;
    this.canChat = layout.can_chat;
    const { byId } = this;
    byId("chat-title").textContent = this.canChat ? "Try the model" : "Continue a text";
    byId("chat-system-box").hidden = !this.canChat;
    byId("chat-input").placeholder = this.canChat ? "Message (Enter sends)" : "Once upon a time (Enter sends)";
    byId("chat-input").setAttribute("aria-label", this.canChat ? "Message" : "Text to continue");
    byId("chat-log").dataset.hint = this.canChat
      ? "Ask something, and watch the cells fill. A second conversation with the same beginning shares them."
      : "This model has no chat template: it continues what you write. Begin two texts alike, and watch them share cells.";
  }

  open() {
    const talk = { number: this.talks.length + 1, messages: [], text: "", log: [], abort: null };
    const tab = element("button", "", `${talk.number}`);
    tab.type = "button";
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", "chat-log");
    tab.setAttribute("aria-label", `Conversation ${talk.number}`);
    tab.addEventListener("click", () => this.choose(talk));
    talk.tab = tab;
    this.talks.push(talk);
    this.byId("chat-tabs").append(tab);
    this.byId("chat-tabs").hidden = this.talks.length < 2;
    this.choose(talk);
  }

  choose(talk) {
    this.current = talk;
    for (const one of this.talks) {
      one.tab.setAttribute("aria-selected", String(one === talk));
      one.tab.tabIndex = one === talk ? 0 : -1;
    }
    this.byId("chat-log").replaceChildren(...talk.log);
    this.scroll();
    this.refresh();
  }

  refresh() {
    const isBusy = this.current.abort !== null;
    this.byId("chat-stop").hidden = !isBusy;
    this.byId("chat-send").hidden = isBusy;
  }

  scroll() {
    const log = this.byId("chat-log");
    log.scrollTop = log.scrollHeight;
  }

  add(talk, node) {
    talk.log.push(node);
    if (talk === this.current) {
      this.byId("chat-log").append(node);
      this.scroll();
    }
    return node;
  }

  request(talk, input) {
    const max_tokens = Number(this.byId("chat-max").value);
    const common = { model: this.model, max_tokens, stream: true, stream_options: { include_usage: true }, priority: "interactive" };
    if (!this.canChat) {
      talk.text += input;
      return ["v1/completions", { ...common, prompt: talk.text }];
    }
    const system = this.byId("chat-system").value.trim();
    if (talk.messages.length === 0 && system) talk.messages.push({ role: "system", content: system });
    talk.messages.push({ role: "user", content: input });
    return ["v1/chat/completions", { ...common, messages: talk.messages }];
  }

  async send() {
    const talk = this.current;
    const box = this.byId("chat-input");
    const input = this.canChat ? box.value.trim() : box.value;
    if (talk.abort || (!input && !talk.text)) return;
    box.value = "";
    const [url, body] = this.request(talk, input);
    const out = this.show(talk, input);
    talk.abort = new AbortController();
    this.refresh();
    const began = performance.now();
    let text = "";
    let usage = null;
    try {
      const answer = await fetch(url, {
        method: "POST",
        headers: { "content-type": "application/json", ...this.headers() },
        body: JSON.stringify(body),
        signal: talk.abort.signal,
      });
      if (!answer.ok) {
        const { error } = await answer.json().catch(() => ({}));
        throw new Error(error?.message ?? `the server answered ${answer.status}`);
      }
      for await (const data of events(answer.body)) {
        if (data.error) throw new Error(data.error.message);
        const choice = data.choices?.[0];
        const thought = choice?.delta?.reasoning_content;
        if (thought) out.append(element("span", "thought", thought));
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        // The answer begins below what was thought.
        if (piece && !text && out.lastChild?.className === "thought") out.append("\n\n");
        text += piece;
        if (piece) out.append(piece);
        usage = data.usage ?? usage;
        if (talk === this.current) this.scroll();
      }
    } catch (error) {
      if (error.name !== "AbortError") this.add(talk, element("p", "say failed", error.message));
    }
    talk.abort = null;
    talk.text += text;
    if (this.canChat && text) talk.messages.push({ role: "assistant", content: text });
    if (this.canChat && !text) talk.messages.pop();
    if (usage) this.add(talk, element("p", "usage", told(usage, performance.now() - began)));
    this.refresh();
  }

  /** Shows what was said, and where the answer comes. */
  show(talk, input) {
    if (this.canChat) {
      this.add(talk, element("p", "say user", input));
      return this.add(talk, element("p", "say assistant"));
    }
    const last = talk.log.findLast((node) => node.classList.contains("story"));
    const story = last ?? this.add(talk, element("p", "say assistant story"));
    story.append(element("span", "typed", input));
    return story;
  }
}

function told(usage, time) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  const rate = (1000 * usage.completion_tokens) / Math.max(1, time);
  return `${plural(usage.prompt_tokens, "prompt token")}, ${cached} of them cached; ${plural(usage.completion_tokens, "token")} of text, ${rate.toFixed(rate < 10 ? 1 : 0)}/s`;
}

/** The data of server-sent events, up to `[DONE]`. */
async function* events(body) {
  for await (const block of blocks(body)) {
    for (const line of block.split("\n")) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
