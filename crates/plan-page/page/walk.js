// A walk through a memory, drawn frame by frame.

import { byId, make } from "./dom.js";
import { plural } from "./words.js";

export class WalkView {
  #walk = null;
  #at = 0;

  constructor() {
    byId("back").addEventListener("click", () => this.go(this.#at - 1));
    byId("next").addEventListener("click", () => this.go(this.#at + 1));
    document.addEventListener("keydown", (event) => {
      if (byId("walk").hidden || event.target.matches("input, select, textarea")) return;
      if (event.key === "ArrowLeft") this.go(this.#at - 1);
      if (event.key === "ArrowRight") this.go(this.#at + 1);
    });
  }

  show(walk) {
    this.#walk = walk;
    byId("walk-title").textContent = walk.title;
    byId("walk-about").textContent = walk.about;
    for (const button of byId("walks").children) button.setAttribute("aria-pressed", button.dataset.name === walk.name);
    this.go(0);
  }

  go(to) {
    const frames = this.#walk?.frames;
    if (!frames || to < 0 || to >= frames.length) return;
    this.#at = to;
    const frame = frames[to];
    byId("walk-step").textContent = `${to} of ${frames.length - 1}`;
    byId("back").disabled = to === 0;
    byId("next").disabled = to === frames.length - 1;
    byId("dots").replaceChildren(...frames.map((_, i) => make("li", { class: i <= to ? "past" : "" })));
    byId("does").textContent = frame.does;
    byId("says").textContent = [frame.says, work(frame)].filter(Boolean).join(" ");
    byId("refused").hidden = frame.refused === null;
    byId("refused").textContent = frame.refused === null ? "" : `Refused: ${frame.refused}`;
    drawCells(frame);
    drawSights(frame);
    byId("walk-legend").replaceChildren(...legend(frame));
  }
}

/** What is left to do for a backend. */
function work({ n_copied, n_rotated }) {
  const parts = [];
  if (n_copied > 0) parts.push(`${plural(n_copied, "row")} to copy`);
  if (n_rotated > 0) parts.push(`the keys of ${plural(n_rotated, "cell")} to rotate`);
  return parts.length > 0 ? `For the backend: ${parts.join(", ")}.` : "";
}

function drawn(frame) {
  return frame.states.length > 0 ? { all: frame.states, written: frame.stored, what: "state" } : { all: frame.cells, written: frame.written, what: "cell" };
}

function drawCells(frame) {
  const { all, written, what } = drawn(frame);
  byId("cells").replaceChildren(...all.map((cell, at) => {
    const kinds = ["cell"];
    if (cell) kinds.push("used", cell.seqs.length > 1 ? "seq-both" : `seq-${cell.seqs[0]}`);
    if (written.includes(at)) kinds.push("written");
    const owner = cell ? `sequence${cell.seqs.length > 1 ? "s" : ""} ${cell.seqs.join(" and ")}, position ${cell.pos}` : "free";
    const name = make("span", { class: "word" }, cell ? (what === "state" ? `…${cell.word}` : cell.word) : "");
    const small = make("span", { class: "small" }, make("span", {}, cell ? `pos ${cell.pos}` : "free"), make("span", {}, `${at}`));
    return make("div", { class: kinds.join(" "), "data-at": at, title: `${what} ${at}: ${owner}` }, name, small);
  }));
}

/** A line for each token that was computed: what it saw. */
function drawSights(frame) {
  const { all, what } = drawn(frame);
  const table = byId("sights");
  table.hidden = frame.sights.length === 0;
  const seen = (sight) => (what === "state" ? (sight.state === null ? [] : [sight.state]) : sight.cells);
  const head = make("tr", {}, make("th", {}, what === "state" ? "went on from state" : "saw cell"), ...all.map((_, at) => make("th", {}, `${at}`)));
  const lines = frame.sights.map((sight) => {
    const marks = all.map((_, at) => {
      const is = seen(sight).includes(at);
      return make("td", {}, make("span", { class: `mark ${is ? `seq-${sight.seq}` : ""}`, title: is ? "seen" : "not seen" }));
    });
    const light = (on) => () => {
      for (const cell of byId("cells").children) cell.classList.toggle("seen", on && seen(sight).includes(Number(cell.dataset.at)));
    };
    const on = { mouseenter: light(true), mouseleave: light(false), focus: light(true), blur: light(false) };
    return make("tr", { tabindex: "0", on }, make("th", {}, `${sight.word} (${sight.pos})`), ...marks);
  });
  table.replaceChildren(make("thead", {}, head), make("tbody", {}, ...lines));
}

function legend(frame) {
  const { all, what } = drawn(frame);
  const seqs = new Set(all.flatMap((cell) => cell?.seqs ?? []));
  const items = [...seqs].sort().map((seq) => [`seq-${seq}`, `sequence ${seq}`]);
  if (all.some((cell) => cell?.seqs.length > 1)) items.push(["seq-both", "both"]);
  items.push(["", `free ${what}`]);
  return items.map(([style, text]) => make("li", {}, make("span", { class: `key ${style}` }), text));
}
