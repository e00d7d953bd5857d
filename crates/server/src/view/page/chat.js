// Conversations with the model: sends, stops, goes on, and keeps them in this browser. Several can
// be answered at once, to see what they share. Models without a chat template continue a text.

import { fillBody, tell, turnElement } from "./messages.js";
import { element } from "./panels.js";
import { Files, Settings } from "./settings.js";
import { forgetTalk, keepTalk, keptTalks, watchTalks } from "./store.js";
import { blocks } from "./stream.js";
import { addTurn, asMarkdown, fork, hasAllTurns, lastAnswered, messagesTo, newTalk, parametersOf, pathTo, promptToGoOn, showBranch, takeTurns, talkTitle, textTo } from "./tree.js";

/** An answer that grows is drawn at most so often, in milliseconds. */
const DRAW_EVERY = 80;

export class Chat {
  /** `headers()` gives the key; `events()` what the memory told, with the reasons of reuse;
   * `showCells(request)` shows the cells of a request. */
  constructor(byId, { headers, events, showCells }) {
    this.byId = byId;
    this.headers = headers;
    this.events = events;
    this.layouts = new Map();
    /** Models that are not watched, and are known to have no chat template. */
    this.untemplated = new Set();
    this.model = undefined;
    this.loaded = [];
    this.listed = [];
    this.running = new Map();
    this.unexplained = new Set();
    /** Conversations that are gone, of which an answer may still end. */
    this.forgotten = new Set();
    this.editing = null;
    this.talks = keptTalks();
    this.settings = new Settings(byId, (name, value) => this.set(name, value));
    this.files = new Files(byId, (text) => this.problem(text));
    this.on = {
      edit: (turn) => this.edit(turn),
      regenerate: (turn) => this.answer(this.current, turn.parent),
      fork: (turn) => this.add(fork(this.current, turn.id)),
      // Requests of another run of the server have other numbers.
      showCells: (turn) => this.isWatched(turn) ? () => showCells(turn.request) : null,
      goOn: (turn) => this.answer(this.current, turn.parent, turn),
      showBranch: (turn) => {
        showBranch(this.current, turn.id);
        this.keep(this.current);
        this.draw();
      },
    };
    this.listen();
    this.choose(this.talks[0] ?? newTalk());
  }

  listen() {
    const { byId } = this;
    byId("chat-new").addEventListener("click", () => this.add(newTalk(this.current.settings)));
    byId("chat-stop").addEventListener("click", () => this.running.get(this.current)?.abort());
    byId("chat-delete").addEventListener("click", () => this.remove(this.current));
    byId("chat-export").addEventListener("click", () => save(`${talkTitle(this.current)}.md`, asMarkdown(this.current)));
    byId("chat-cancel").addEventListener("click", () => this.endEdit(true));
    byId("chat-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    byId("chat-input").addEventListener("input", () => fit(byId("chat-input")));
    byId("chat-input").addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.editing) this.endEdit(true);
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
    // The end stays in sight where the box becomes smaller.
    let isAtEnd = true;
    const log = byId("chat-log");
    log.addEventListener("scroll", () => (isAtEnd = isNearEnd(log)));
    new ResizeObserver(() => this.scroll(isAtEnd)).observe(log);
    watchTalks({ kept: (talk) => this.take(talk), forgotten: (id) => this.drop(this.talks.find((talk) => talk.id === id)) });
    // What has arrived of an answer is kept, too.
    addEventListener("pagehide", () => {
      for (const talk of this.running.keys()) keepTalk(talk);
    });
  }

  /** The model that is watched is another one, or is known only now. */
  configure(layout) {
    this.model = layout.model;
    this.layouts.set(layout.model, layout);
    this.showModels(layout.models);
    this.draw();
  }

  showModels(loaded) {
    this.loaded = loaded;
    const names = [...new Set([...loaded, ...this.listed])];
    this.settings.showModels(names, this.current.settings.model);
  }

  /** Asks for the models that could be loaded. */
  async listModels() {
    try {
      const answer = await fetch("v1/models", { headers: this.headers() });
      const { data } = await answer.json();
      this.listed = data.map((model) => model.id);
      this.showModels(this.loaded);
    } catch {
      // The models that are watched can be chosen.
    }
  }

  modelOf(talk) {
    return talk.settings.model || this.model || this.listed[0];
  }

  canChat(talk) {
    const model = this.modelOf(talk);
    return this.layouts.get(model)?.can_chat ?? !this.untemplated.has(model);
  }

  isWatched(turn) {
    return turn.instance !== undefined && turn.instance === this.layouts.get(this.model)?.instance;
  }

  set(name, value) {
    const talk = this.current;
    talk.settings[name] = value;
    if (talk.leaf !== null) this.keep(talk);
    this.settings.show(talk.settings);
    this.draw();
  }

  keep(talk) {
    if (!this.forgotten.has(talk)) this.problem(keepTalk(talk));
  }

  problem(text) {
    this.byId("chat-problem").textContent = text;
    this.byId("chat-problem").hidden = !text;
  }

  /** Opens a new conversation. */
  add(talk) {
    if (talk.leaf !== null) {
      this.talks.unshift(talk);
      this.keep(talk);
    }
    this.choose(talk);
    this.byId("chat-input").focus();
  }

  remove(talk) {
    if (talk.leaf !== null && !confirm(`Delete “${talkTitle(talk)}” from this browser?`)) return;
    this.drop(talk);
    forgetTalk(talk);
    this.byId("chat-input").focus();
  }

  /** A conversation goes, here or in another window. */
  drop(talk) {
    if (!talk) return;
    this.forgotten.add(talk);
    this.running.get(talk)?.abort();
    this.talks = this.talks.filter((one) => one !== talk);
    if (talk === this.current) this.choose(this.talks[0] ?? newTalk(talk.settings));
    else this.drawList();
  }

  /** Another window has kept a conversation. */
  take(copy) {
    const talk = this.talks.find((one) => one.id === copy.id);
    if (!talk) {
      this.talks.unshift(copy);
      this.drawList();
      return;
    }
    talk.settings = copy.settings;
    takeTurns(talk, copy, !this.running.has(talk));
    // It has not seen what this window has added.
    if (!hasAllTurns(copy, talk)) this.keep(talk);
    if (talk !== this.current) return this.drawList();
    this.settings.show(talk.settings);
    this.draw();
  }

  choose(talk) {
    this.endEdit(false);
    this.current = talk;
    this.settings.show(talk.settings);
    this.showModels(this.loaded);
    this.draw();
    this.scroll(true);
  }

  /** Draws the conversation and the list of all. */
  draw() {
    const talk = this.current;
    const isBusy = this.running.has(talk);
    const canChat = this.canChat(talk);
    const log = this.byId("chat-log");
    const isAtEnd = isNearEnd(log);
    const hasFocus = log.contains(document.activeElement);
    log.replaceChildren(...pathTo(talk, talk.leaf).map((turn) => this.element(talk, turn)));
    if (hasFocus) log.focus();
    log.dataset.hint = canChat
      ? "Write a message. Conversations stay in this browser; branches and conversations that begin alike share their cells."
      : "This model has no chat template: it continues what you write.";
    this.byId("chat-title").textContent = talkTitle(talk);
    this.byId("set-system-row").hidden = !canChat;
    this.byId("chat-stop").hidden = !isBusy;
    this.byId("chat-send").hidden = isBusy;
    this.byId("chat-export").disabled = talk.leaf === null;
    this.scroll(isAtEnd);
    this.drawList();
  }

  element(talk, turn) {
    const [canChat, isBusy] = [this.canChat(talk), this.running.has(talk)];
    return turnElement(talk, turn, { canChat, isBusy, isLast: turn.id === talk.leaf, on: this.on });
  }

  drawList() {
    const all = this.talks.includes(this.current) ? this.talks : [this.current, ...this.talks];
    const nodes = all.map((talk) => {
      const item = element("li");
      const button = element("button", "talk", talkTitle(talk));
      button.type = "button";
      if (talk === this.current) button.setAttribute("aria-current", "true");
      if (this.running.has(talk)) button.append(element("span", "small", " writes…"));
      button.addEventListener("click", () => {
        this.choose(talk);
        this.byId("chats").querySelector("[aria-current]").focus();
      });
      item.append(button);
      return item;
    });
    this.byId("chats").replaceChildren(...nodes);
    this.byId("chats-sum").textContent = `${all.length}`;
  }

  scroll(isWanted) {
    const log = this.byId("chat-log");
    if (isWanted) log.scrollTop = log.scrollHeight;
  }

  edit(turn) {
    this.editing = turn;
    this.byId("chat-cancel").hidden = false;
    this.byId("chat-input").value = turn.text;
    this.files.put(turn.files ?? []);
    this.byId("chat-input").focus();
    fit(this.byId("chat-input"));
  }

  endEdit(isDropped) {
    if (this.editing && isDropped) {
      this.byId("chat-input").value = "";
      this.files.take();
    }
    this.editing = null;
    this.byId("chat-cancel").hidden = true;
    fit(this.byId("chat-input"));
  }

  send() {
    const talk = this.current;
    const box = this.byId("chat-input");
    const canChat = this.canChat(talk);
    const text = canChat ? box.value.trim() : box.value;
    const hasText = text !== "" || this.files.files.length > 0;
    if (this.running.has(talk) || (!hasText && (canChat || talk.leaf === null))) return;
    const parent = this.editing ? this.editing.parent : lastAnswered(talk);
    box.value = "";
    const files = this.files.take();
    this.endEdit(false);
    const asked = hasText ? addTurn(talk, parent, { role: "user", text, files }).id : talk.leaf;
    box.focus();
    this.answer(talk, asked);
  }

  /** The request for an answer below a turn; one that `goesOn` is taken up where it ended. */
  async request(talk, parent, goesOn, signal) {
    const body = { model: this.modelOf(talk), stream: true, stream_options: { include_usage: true }, priority: "interactive", ...parametersOf(talk.settings) };
    // Without a limit, as in chats.
    const story = { max_tokens: -1, ...body };
    if (!this.canChat(talk)) return this.post("v1/completions", { ...story, prompt: textTo(talk, parent) + (goesOn?.text ?? "") }, signal);
    const messages = messagesTo(talk, parent);
    try {
      if (!goesOn) return await this.post("v1/chat/completions", { ...body, messages }, signal);
      const rendered = await this.post("apply-template", { model: body.model, messages }, signal);
      const { prompt } = await rendered.json();
      return await this.post("v1/completions", { ...story, prompt: promptToGoOn(prompt, goesOn) }, signal);
    } catch (error) {
      if (error.code !== "no_chat_template" || this.untemplated.has(body.model)) throw error;
      this.untemplated.add(body.model);
      if (talk === this.current) this.draw();
      return this.request(talk, parent, goesOn, signal);
    }
  }

  async post(url, body, signal) {
    const answer = await fetch(url, {
      method: "POST",
      headers: { "content-type": "application/json", ...this.headers() },
      body: JSON.stringify(body),
      signal,
    });
    if (answer.ok) return answer;
    const { error } = await answer.json().catch(() => ({}));
    throw Object.assign(new Error(error?.message ?? `The server answered ${answer.status}.`), { code: error?.code });
  }

  /** Lets the model answer below a turn, or go on with an answer. */
  async answer(talk, parent, goesOn) {
    if (this.running.has(talk)) return;
    const abort = new AbortController();
    const turn = goesOn ?? addTurn(talk, parent, { role: "assistant", text: "", thought: "" });
    if (!this.talks.includes(talk)) this.talks.unshift(talk);
    Object.assign(turn, { end: "broken", error: "", usage: null, reuse: null, limit: Number(talk.settings.max_tokens) || 0 });
    this.running.set(talk, abort);
    this.keep(talk);
    this.draw();
    this.scroll(true);
    this.say("The model writes.");
    const since = this.events().at(-1)?.n ?? -1;
    try {
      const answer = await this.request(talk, parent, goesOn, abort.signal);
      await this.receive(talk, turn, answer.body);
    } catch (error) {
      if (abort.signal.aborted) turn.end = "stopped";
      else turn.error = turn.text ? `The answer broke off: ${error.message}` : error.message;
    }
    this.running.delete(talk);
    if (turn.usage) this.unexplained.add({ talk, turn, since, until: performance.now() + 5000 });
    this.keep(talk);
    if (document.activeElement === this.byId("chat-stop")) this.byId("chat-input").focus();
    if (talk === this.current) this.draw();
    else this.drawList();
    this.explain();
    this.say(turn.error || `The model said: ${turn.text.slice(0, 500)} ${tell({ ...turn, usage: null }, talk)}`);
  }

  async receive(talk, turn, stream) {
    const began = performance.now();
    let first = 0;
    let drawn = 0;
    for await (const data of events(stream)) {
      if (data.error) throw new Error(data.error.message);
      const choice = data.choices?.[0];
      const thought = choice?.delta?.reasoning_content ?? "";
      const text = choice?.delta?.content ?? choice?.text ?? "";
      if (!first && (thought || text)) first = performance.now() - began;
      turn.thought = (turn.thought ?? "") + thought;
      turn.text += text;
      if (choice?.finish_reason) turn.end = choice.finish_reason === "length" ? "length" : "stop";
      if (data.usage) turn.usage = counted(data.usage, first, performance.now() - began);
      if (performance.now() - drawn > DRAW_EVERY) {
        this.grow(talk, turn);
        drawn = performance.now();
      }
    }
    const n_ctx = this.layouts.get(this.modelOf(talk))?.n_ctx;
    const { usage } = turn;
    if (turn.end === "length" && usage && usage.n_prompt + usage.n_tokens >= n_ctx) turn.end = "context";
  }

  /** Draws what has come of an answer. */
  grow(talk, turn) {
    if (talk !== this.current) return;
    const log = this.byId("chat-log");
    const isAtEnd = isNearEnd(log);
    const body = log.querySelector(`[data-turn="${turn.id}"] .body`);
    if (body) fillBody(body, turn, this.canChat(talk));
    this.scroll(isAtEnd);
  }

  /** Looks up why not more of a prompt was cached. The stream of the memory tells it, which may come later. */
  explain() {
    for (const one of this.unexplained) {
      const { talk, turn, since, until } = one;
      const events = this.events().filter((event) => event.n > since);
      const isIts = (event) => event.kind === "submitted" && event.n_tokens === turn.usage.n_prompt;
      const requests = new Set(events.filter(isIts).map((event) => event.request));
      const admitted = events.find((event) => event.kind === "admitted" && requests.has(event.request) && event.reuse.n_tokens === turn.usage.n_cached);
      if (!admitted && performance.now() < until) continue;
      this.unexplained.delete(one);
      if (!admitted) continue;
      const { reuse, request } = admitted;
      Object.assign(turn, { reuse, request, instance: this.layouts.get(this.model)?.instance });
      this.keep(talk);
      const box = this.byId("chat-log").querySelector(`[data-turn="${turn.id}"]`);
      if (talk === this.current && !box?.contains(document.activeElement)) box?.replaceWith(this.element(talk, turn));
    }
  }

  /** Tells readers of screens what an answer is, once it is whole. */
  say(text) {
    this.byId("chat-said").textContent = text;
  }
}

function counted(usage, first, all) {
  return {
    n_prompt: usage.prompt_tokens,
    n_cached: usage.prompt_tokens_details?.cached_tokens ?? 0,
    n_tokens: usage.completion_tokens,
    first: Math.round(first),
    all: Math.round(all),
  };
}

const isNearEnd = (log) => log.scrollHeight - log.scrollTop - log.clientHeight < 60;

/** A box that is as high as its text, up to a third of the window. */
function fit(box) {
  box.style.height = "auto";
  box.style.height = `${Math.min(box.scrollHeight + 2, innerHeight / 3)}px`;
}

/** Saves a text as a file of this person. */
function save(name, text) {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  link.download = name.replace(/[^\p{L}\p{N} ._-]/gu, "");
  link.click();
  URL.revokeObjectURL(link.href);
}

/** The data of server-sent events, up to `[DONE]`. */
async function* events(body) {
  for await (const block of blocks(body)) {
    for (const line of block.split("\n")) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}
