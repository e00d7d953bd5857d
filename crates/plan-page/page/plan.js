// A plan, drawn: the bar of bytes, what layers remember, and the memory by context.

import { byId, make, number, row } from "./dom.js";
import { bytes, count, plural } from "./words.js";

const KINDS = { k: "keys", v: "values", conv: "convolutions", state: "states", snapshots: "snapshots" };

/** Windows in words. */
function sight(window) {
  if (typeof window === "string") return window === "full" ? "everything" : window;
  const [kind, n] = Object.entries(window)[0];
  if (kind === "sliding") return `the last ${count(n)}`;
  if (kind === "chunked") return `chunks of ${count(n)}`;
  return kind;
}

export function drawPlan(plan, room, choose) {
  byId("hint").hidden = true;
  byId("planned").hidden = byId("tables").hidden = false;
  byId("kind").textContent = `${plan.architecture}, ${plan.quantization || "no weights"}`;
  const figures = [
    ["context", count(plan.n_ctx)],
    ["trained with", count(plan.trained_n_ctx)],
    ["weights", scaled(plan.n_weights)],
    ["memory", bytes(plan.memory)],
    ["a token more", bytes(perToken(plan))],
    ["memory and weights", bytes(plan.memory + plan.weights)],
  ];
  byId("numbers").replaceChildren(...figures.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
  drawBar(plan, room);
  drawFit(plan, room);
  drawLayers(plan);
  drawContexts(plan, room, choose);
}

/** A number of weights as people say it. */
function scaled(n) {
  for (const [unit, size] of [["T", 1e12], ["B", 1e9], ["M", 1e6]]) if (n >= size) return `${(n / size).toFixed(1)} ${unit}`;
  return count(n);
}

/** What the memory of twice the longest context takes more of, by token. */
function perToken(plan) {
  const [before, last] = plan.by_context.slice(-2);
  return (last.memory - before.memory) / (last.n_ctx - before.n_ctx);
}

function drawBar(plan, room) {
  const parts = [["weights", plan.weights, "part-weights"]];
  for (const { kind, n_bytes } of plan.by_kind) if (n_bytes > 0) parts.push([KINDS[kind], n_bytes, `kind-${kind}`]);
  parts.push(["what is kept of cells", plan.memory - plan.n_bytes, "part-cells"]);
  const total = plan.weights + plan.memory;
  const whole = Math.max(total, room ?? 0);
  const bar = byId("bar");
  bar.classList.toggle("over-room", room !== null && total > room);
  bar.replaceChildren(...parts.map(([name, n, style]) => {
    const part = make("i", { class: style, title: `${name}: ${bytes(n)}` });
    part.style.width = `${(100 * n) / whole}%`;
    return part;
  }));
  const legend = parts.map(([name, n, style]) => make("li", {}, make("span", { class: `key ${style}` }), `${name} `, make("b", {}, bytes(n))));
  if (room !== null && room > total) legend.push(make("li", {}, make("span", { class: "key" }), "free ", make("b", {}, bytes(room - total))));
  byId("bar-legend").replaceChildren(...legend);
  bar.setAttribute("aria-label", parts.map(([name, n]) => `${name} ${bytes(n)}`).join(", "));
}

function drawFit(plan, room) {
  const fits = byId("fits");
  const total = plan.weights + plan.memory;
  fits.dataset.fits = room === null || total <= room ? "yes" : "no";
  if (room === null) {
    fits.textContent = "Say how much memory the machine has, to see the largest context that fits.";
  } else if (plan.largest_n_ctx === null) {
    fits.textContent = plan.weights > room
      ? `The weights alone take ${bytes(plan.weights)}: more than ${bytes(room)}.`
      : `No context fits into the ${bytes(room - plan.weights)} that the weights leave.`;
  } else {
    const largest = plan.rows.length === 0 ? "Any context fits: the model remembers nothing." : `The largest context that fits is ${count(plan.largest_n_ctx)} tokens.`;
    fits.textContent = total <= room ? largest : `${bytes(total)} do not fit into ${bytes(room)}. ${largest}`;
  }
}

/** Layers that remember the same, as one line. */
function grouped(plan) {
  const groups = new Map();
  for (const { layer, remembers } of plan.layers) {
    const rows = plan.rows.filter((of) => of.layer === layer);
    const part = rows.find((of) => of.part !== null)?.part ?? null;
    const key = JSON.stringify([remembers, part, rows.map((of) => [of.kind, of.kv_type, of.n_rows, of.row_bytes])]);
    const group = groups.get(key) ?? { remembers, part, rows, layers: [], n_bytes: 0 };
    group.layers.push(layer);
    group.n_bytes += rows.reduce((sum, of) => sum + of.n_bytes, 0);
    groups.set(key, group);
  }
  return [...groups.values()];
}

/** Numbers as ranges: 0–4, 6. */
function ranges(numbers) {
  const found = [];
  for (const n of numbers) {
    const last = found.at(-1);
    if (last && last[1] === n - 1) last[1] = n;
    else found.push([n, n]);
  }
  return found.map(([from, to]) => (from === to ? `${from}` : `${from}–${to}`)).join(", ");
}

function drawLayers(plan) {
  const kinds = plan.by_kind.filter((of) => of.n_bytes > 0).map((of) => of.kind);
  const head = row("th", ["layers", "remember", "see", number("cells"), ...kinds.map((kind) => number(`${KINDS[kind]} of a layer`)), number("all")]);
  const lines = grouped(plan).map((group) => {
    const part = plan.parts.find((of) => of.part === group.part);
    const each = kinds.map((kind) => {
      const rows = group.rows.find((of) => of.kind === kind);
      return number(rows ? `${rows.kv_type} ${bytes(rows.n_bytes)}` : "");
    });
    const name = `${ranges(group.layers)}${group.layers.length > 1 ? ` (${group.layers.length})` : ""}`;
    return row("td", [name, group.remembers, part ? sight(part.window) : "", number(part ? count(part.n_cells) : ""), ...each, number(bytes(group.n_bytes))]);
  });
  if (lines.length === 0) lines.push(row("td", ["an encoder: it remembers nothing"]));
  const foot = row("td", ["all", "", "", "", ...kinds.map((kind) => number(bytes(plan.by_kind.find((of) => of.kind === kind).n_bytes))), number(bytes(plan.n_bytes))]);
  byId("layers-table").replaceChildren(make("thead", {}, head), make("tbody", {}, ...lines), make("tfoot", {}, foot));
}

function drawContexts(plan, room, choose) {
  const largest = plan.by_context.at(-1).memory || 1;
  const lines = plan.by_context.map(({ n_ctx, memory }) => {
    const button = make("button", { type: "button", on: { click: () => choose(n_ctx) } }, count(n_ctx));
    const bar = make("i");
    bar.style.width = `${(100 * memory) / largest}%`;
    const line = row("td", [button, number(bytes(memory)), make("div", { class: "bar", "aria-hidden": "true" }, bar)]);
    if (n_ctx === plan.n_ctx) line.setAttribute("aria-current", "true");
    if (room !== null && memory + plan.weights > room) {
      line.classList.add("too-large");
      line.title = `with the weights more than ${bytes(room)}`;
    }
    return line;
  });
  const seqs = plan.n_seqs === 1 ? "" : plan.streams === "shared" ? `, shared by ${plural(plan.n_seqs, "sequence")}` : `, for each of ${plural(plan.n_seqs, "sequence")}`;
  const head = row("th", [`tokens${seqs}`, number("memory"), ""]);
  byId("contexts").replaceChildren(make("thead", {}, head), make("tbody", {}, ...lines));
}
