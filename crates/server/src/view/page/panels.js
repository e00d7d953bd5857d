// The lists next to the map: requests, cached prefixes, events, the bytes of each layer.
// Elements are kept from update to update, so that the focus stays where it is.

import { cellsOf } from "./memory.js";
import { colour } from "./map.js";
import { bytes, count, happened, missedShortly, percent, plural, time } from "./words.js";

export function element(name, className, text) {
  const node = document.createElement(name);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

function put(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A list whose entries are cards, by a name each. */
class Cards {
  constructor(list, onPick) {
    this.list = list;
    this.onPick = onPick;
    this.cards = new Map();
  }

  show(entries, selected) {
    const names = new Set(entries.map((entry) => entry.name));
    for (const [name, card] of this.cards) {
      if (!names.has(name)) {
        card.item.remove();
        this.cards.delete(name);
      }
    }
    entries.forEach((entry, n) => {
      let card = this.cards.get(entry.name);
      if (!card) this.cards.set(entry.name, (card = this.card(entry)));
      if (this.list.children[n] !== card.item) this.list.insertBefore(card.item, this.list.children[n] ?? null);
      this.fill(card, entry, selected);
    });
  }

  card(entry) {
    const item = element("li");
    const button = element("button", "card");
    button.type = "button";
    const line = element("span", "line");
    const parts = {
      swatch: element("span", "swatch"),
      title: element("strong"),
      right: element("span", "right small"),
      bar: element("span", "bar"),
      what: element("span", "what"),
      text: element("span", "text"),
    };
    line.append(parts.swatch, parts.title, parts.right);
    button.append(line, parts.bar, parts.what, parts.text);
    button.addEventListener("click", () => this.onPick(entry.request));
    item.append(button);
    return { item, button, ...parts };
  }

  fill(card, entry, selected) {
    card.button.setAttribute("aria-pressed", String(selected !== undefined && entry.request === selected));
    card.button.dataset.request = entry.request;
    card.swatch.style.background = colour(entry.request, entry.alpha ?? 1);
    put(card.title, entry.title);
    put(card.right, entry.right);
    put(card.what, entry.what);
    card.what.hidden = !entry.what;
    put(card.text, entry.text ?? "");
    card.text.hidden = !entry.text;
    card.bar.hidden = !entry.bar;
    if (entry.bar) fillBar(card.bar, entry.bar);
  }
}

/** Segments `{ part, className, colour }` of a bar, each as a part of 1. */
function fillBar(bar, { segments, label, now, max }) {
  while (bar.children.length > segments.length) bar.lastChild.remove();
  while (bar.children.length < segments.length) bar.append(element("i"));
  segments.forEach((segment, n) => {
    const node = bar.children[n];
    node.className = segment.className ?? "";
    node.style.width = `${(100 * segment.part).toFixed(2)}%`;
    if (segment.colour) node.style.backgroundColor = segment.colour;
  });
  bar.setAttribute("role", "progressbar");
  bar.setAttribute("aria-label", label);
  bar.setAttribute("aria-valuenow", now);
  bar.setAttribute("aria-valuemax", max);
}

function excerpt(text) {
  if (!text) return "";
  return text.omitted ? `${text.head} … ${text.tail}` : text.head;
}

/** The smallest step of 1, 1.5 times powers of two that is not below. */
function scaleOf(n) {
  let scale = 32;
  while (scale < n) scale *= 2;
  return n <= scale * 0.75 ? scale * 0.75 : scale;
}

export class Panels {
  constructor(byId, onPick) {
    this.byId = byId;
    this.onPick = onPick;
    this.running = new Cards(byId("running"), onPick);
    this.waiting = new Cards(byId("waiting"), onPick);
    this.cached = new Cards(byId("cached"), onPick);
    this.events = new Events(byId("events"), onPick);
    this.ownEvents = null;
  }

  show(snapshot, history, index, selected) {
    const { byId } = this;
    this.running.show(snapshot.running.map((text) => this.runningEntry(text, history, index)), selected);
    this.waiting.show(snapshot.waiting.map((text) => waitingEntry(text)), selected);
    const n_running = snapshot.running.length;
    const n_waiting = snapshot.waiting.length;
    put(byId("requests-sum"), n_running + n_waiting === 0 ? "none: the model is idle" : `${n_running} running, ${n_waiting} waiting`);
    const cached = snapshot.cached.toSorted((a, b) => b.hits - a.hits || b.n_tokens - a.n_tokens);
    this.cached.show(cached.map((text) => cachedEntry(text, snapshot)), selected);
    const n_tokens = cached.reduce((sum, text) => sum + text.n_tokens, 0);
    put(byId("cached-sum"), cached.length ? `${plural(cached.length, "prefix", "prefixes")}, ${plural(n_tokens, "token")} in ${count(snapshot.totals.kept)} ${snapshot.totals.unit}` : "none yet");
    byId("cached-sum").title = "Prefixes that begin alike share cells, so there can be more tokens than cells.";
    this.events.show(history.events.filter((event) => event.at <= snapshot.at));
    put(byId("events-sum"), plural(snapshot.counters.evicted, "eviction"));
    this.showSelected(snapshot, history, index, selected);
  }

  runningEntry(text, history, index) {
    const { request, n_prompt, n_done, n_tokens } = text;
    const admitted = history.find(request, "admitted");
    const n_reused = Math.min(admitted?.reuse.n_tokens ?? 0, n_prompt);
    const isPrompt = n_done < n_prompt;
    const scale = isPrompt ? n_prompt : scaleOf(n_tokens);
    const own = colour(request);
    const segments = [
      { part: n_reused / scale, className: "reused", colour: own },
      { part: Math.max(0, Math.min(n_done, n_prompt) - n_reused) / scale, colour: own },
      { part: Math.max(0, n_done - n_prompt) / scale, className: "text-part", colour: colour(request, 0.62) },
    ];
    const rate = history.rate(index, (snapshot) => snapshot.running.find((one) => one.request === request)?.n_tokens);
    const label = isPrompt ? `Request ${request}: ${n_done} of ${n_prompt} tokens of the prompt` : `Request ${request}: ${n_tokens - n_prompt} tokens of text`;
    const reused = `${count(n_reused)} of ${plural(n_prompt, "prompt token")} reused`;
    return {
      name: request,
      request,
      title: `#${request}`,
      right: isPrompt ? `prompt ${percent(n_done, n_prompt)}` : `${plural(n_tokens - n_prompt, "token")}${rate ? `, ${rate.toFixed(rate < 10 ? 1 : 0)}/s` : ""}`,
      bar: { segments, label, now: n_done, max: scale },
      what: admitted && admitted.reuse.why ? `${reused}, ${missedShortly(admitted.reuse)}` : reused,
      text: excerpt(text.text),
    };
  }

  showSelected(snapshot, history, index, selected) {
    const box = this.byId("selected");
    box.hidden = selected === undefined;
    if (selected === undefined) return;
    put(this.byId("selected-title"), `Request #${selected}`);
    const body = this.byId("selected-body");
    if (body.dataset.request !== String(selected)) {
      body.dataset.request = selected;
      body.replaceChildren();
      this.gantt = element("div", "gantt");
      this.gantt.setAttribute("role", "img");
      this.scale = element("p", "small");
      this.facts = element("dl", "facts");
      const list = element("ol", "events");
      this.ownEvents = new Events(list, () => {});
      body.append(this.gantt, this.scale, this.facts, list);
    }
    const events = (history.requests.get(selected) ?? []).filter((event) => event.at <= snapshot.at);
    this.drawTimeline(events, snapshot, selected);
    this.ownEvents.show(events);
    const running = snapshot.running.find((text) => text.request === selected);
    const kept = snapshot.cached.find((text) => text.request === selected);
    const seq = (running ?? kept)?.seq;
    const facts = [["state", running ? "running" : kept ? "ended; its tokens are cached" : events.length ? "not in the memory" : "from long before this page was opened"]];
    if (seq !== undefined) {
      const { n_cells, n_shared } = cellsOf(snapshot, seq);
      facts.push(["cells", `${count(n_cells)}, of which ${count(n_shared)} are shared`]);
    }
    const admitted = events.find((event) => event.kind === "admitted");
    if (admitted) facts.push(["reuse", happened(admitted).replace(/^began, /, "")]);
    const nodes = facts.flatMap(([name, value]) => [element("dt", "", name), element("dd", "", value)]);
    if (this.facts.textContent !== nodes.map((node) => node.textContent).join("")) this.facts.replaceChildren(...nodes);
  }

  /** Queue, prompt and text on one line. */
  drawTimeline(events, snapshot, request) {
    const own = colour(request);
    const spans = [];
    let state = null;
    let since = 0;
    const end = (at) => {
      if (state && at > since) spans.push({ ...state, time: at - since });
      since = at;
    };
    const states = {
      submitted: { className: "queued", name: "waited" },
      admitted: { className: "", name: "prompt", colour: colour(request, 0.55) },
      resumed: { className: "", name: "computed again", colour: colour(request, 0.55) },
      first_token: { className: "", name: "text", colour: own },
      preempted: { className: "preempted", name: "preempted" },
    };
    for (const event of events) {
      if (event.kind === "ended" || event.kind === "refused") {
        end(event.at);
        state = null;
      } else if (states[event.kind]) {
        end(event.at);
        state = states[event.kind];
      }
    }
    end(snapshot.at);
    const total = spans.reduce((sum, span) => sum + span.time, 0);
    const nodes = spans.map((span) => {
      const node = element("i", span.className);
      node.style.width = `${((100 * span.time) / total).toFixed(2)}%`;
      if (span.colour) node.style.background = span.colour;
      return node;
    });
    this.gantt.replaceChildren(...nodes);
    const text = spans.map((span) => `${span.name} ${time(span.time)}`).join(", ");
    this.gantt.setAttribute("aria-label", text || "no timeline");
    put(this.scale, text || "Nothing is known of its time.");
  }
}

function waitingEntry(text) {
  return {
    name: text.request,
    request: text.request,
    alpha: 0.25,
    title: `#${text.request}`,
    right: `waits ${time(text.waited)}`,
    what: `${plural(text.n_tokens, "token")}${text.preempted ? ", was preempted" : ""}${text.priority === "normal" ? "" : `, ${text.priority}`}`,
  };
}

function cachedEntry(text, snapshot) {
  const { n_cells, n_shared } = cellsOf(snapshot, text.seq);
  const own = colour(text.request, 0.55);
  const segments = [
    { part: n_cells ? n_shared / n_cells : 0, className: "reused", colour: own },
    { part: n_cells ? 1 - n_shared / n_cells : 0, colour: own },
  ];
  const label = `Cached prefix of request ${text.request}: ${n_shared} of ${n_cells} cells shared`;
  return {
    name: text.seq,
    request: text.request,
    alpha: 0.55,
    title: plural(text.n_tokens, "token"),
    right: text.hits ? plural(text.hits, "hit") : "no hit yet",
    bar: { segments, label, now: n_shared, max: n_cells },
    what: `of request #${text.request}${n_shared ? `, ${count(n_shared)} shared` : ""}, idle ${time(text.idle)}`,
    text: excerpt(text.text),
  };
}

class Events {
  constructor(list, onPick) {
    this.list = list;
    this.onPick = onPick;
    this.shown = [];
  }

  show(events) {
    const last = this.shown.at(-1)?.n ?? -1;
    const isMore = events.length >= this.shown.length && events.some((event) => event.n === last);
    if (!isMore) this.list.replaceChildren();
    const fresh = isMore ? events.filter((event) => event.n > last) : events;
    for (const event of fresh) this.list.prepend(this.item(event));
    while (this.list.children.length > events.length) this.list.lastChild.remove();
    this.shown = events;
  }

  item(event) {
    const item = element("li");
    item.dataset.kind = event.kind === "dropped" ? `dropped-${event.why}` : event.kind;
    const at = element("time", "", `${(event.at / 1000).toFixed(1)}`);
    const swatch = element("span", "swatch");
    const what = element("span");
    if (event.request === undefined || event.kind === "dropped") {
      what.textContent = happened(event);
    } else {
      const name = element("button", "", `#${event.request}`);
      name.type = "button";
      name.addEventListener("click", () => this.onPick(event.request));
      what.append(name, ` ${happened(event)}`);
    }
    if (event.request !== undefined) swatch.style.background = colour(event.request);
    item.append(at, swatch, what);
    return item;
  }
}

/** The bytes of each layer, drawn once. */
export function showLayers(box, sum, layout) {
  const layers = new Map();
  for (const rows of layout.rows) {
    if (!layers.has(rows.layer)) layers.set(rows.layer, []);
    layers.get(rows.layer).push(rows);
  }
  const size = (rows) => rows.n_rows * rows.row_bytes;
  const total = (all) => all.reduce((all, rows) => all + size(rows), 0);
  const largest = Math.max(1, ...[...layers.values()].map(total));
  const nodes = [...layers].map(([layer, rows]) => {
    const line = element("div", "layer");
    const bar = element("span", "bar");
    const names = rows.map((one) => `${one.kind.toUpperCase()} ${bytes(size(one))} (${one.type})`);
    bar.title = names.join(", ");
    for (const one of rows) {
      const part = element("i", `kind-${one.kind}`);
      part.style.width = `${(100 * size(one)) / largest}%`;
      bar.append(part);
    }
    line.append(element("span", "num", `${layer}`), bar, element("span", "num", `${bytes(total(rows))}  ${[...new Set(rows.map((one) => one.kind))].join(" + ")}`));
    return line;
  });
  box.replaceChildren(...nodes);
  put(sum, `${bytes(layout.bytes)} in ${plural(layers.size, "layer")}`);
}

/** The title and the text of the caption of a part. */
export function describeArea(layout, area, n_areas) {
  const isOf = (rows) => rows.part === area.part;
  const rows = layout.rows.filter(isOf);
  const n_layers = new Set(rows.map((one) => one.layer)).size;
  const each = rows.reduce((sum, one) => sum + (one.kind === "snapshots" ? 0 : one.row_bytes), 0);
  const all = rows.reduce((sum, one) => sum + one.n_rows * one.row_bytes, 0);
  if (area.part === null) {
    return { title: "Recurrent states", what: `${plural(n_layers, "layer")}, ${bytes(each)} each, ${bytes(all)}` };
  }
  const part = layout.parts.find((one) => one.part === area.part);
  const window = part?.window === "full" ? "full attention" : (part?.window ?? "");
  const name = n_areas > 1 ? `Part ${area.part}` : "Cells";
  return { title: name, what: `${window}, ${plural(n_layers, "layer")}, ${bytes(each)} a cell, ${bytes(all)}${part?.own ? ", a stream for each sequence" : ""}` };
}
