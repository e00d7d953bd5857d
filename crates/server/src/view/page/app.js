// The live view: connects the stream to the history, the maps and the lists.

import { Chat } from "./chat.js";
import { ExpertMap } from "./experts.js";
import { History } from "./history.js";
import { CellMap, readLook } from "./map.js";
import { Memory } from "./memory.js";
import { Panels, describeArea, showLayers } from "./panels.js";
import { Stream } from "./stream.js";
import { showsMemory, watchViews } from "./views.js";
import { count, percent, plural, time } from "./words.js";

/** More sets than this, and the view begins anew: a number of a set has 16 bits. */
const MOST_SETS = 60000;

const byId = (id) => document.getElementById(id);

const state = {
  layout: null,
  memory: new Memory(),
  history: new History(),
  /** The index of the snapshot that is shown; `null` follows the newest. */
  paused: null,
  shown: null,
  selected: undefined,
  maps: new Map(),
  expertMap: null,
  connection: ["connecting", "connecting"],
};

const stream = new Stream("view/events", {
  layout(layout) {
    // Sequences and events of another process are other ones.
    if (state.layout && state.layout.instance !== layout.instance) reset();
    state.layout = layout;
    byId("model").textContent = `${layout.model} (${layout.architecture})`;
    document.title = `${layout.model}: Cellar`;
    showLayers(byId("layers"), byId("layers-sum"), layout);
    chat.configure(layout);
    showModels(layout.models);
  },
  models({ models }) {
    showModels(models);
    chat.showModels(models);
  },
  update(update) {
    if (state.memory.sets.members.length > MOST_SETS) {
      reset();
      stream.lastId = "";
      stream.start();
      return;
    }
    const n_gone = state.history.push(state.memory.apply(update));
    if (state.paused !== null) state.paused = Math.max(0, state.paused - n_gone);
    render();
    chat.explain();
  },
  state(name, text, problem) {
    state.connection = [name, text];
    byId("problem").hidden = !problem || name === "live";
    const isDenied = name === "denied";
    byId("problem").textContent = !problem ? "" : isDenied ? `The memory is not shown: ${problem} The chat works.` : `No connection: ${problem}. Trying again.`;
    if (name === "live" || isDenied) byId("key-form").hidden = true;
    showStatus();
  },
  needsKey() {
    byId("key-form").hidden = false;
    byId("problem").hidden = !stream.key;
    byId("problem").textContent = "The server does not know this key.";
    byId("key").focus();
  },
});

const chat = new Chat(byId, {
  headers: () => stream.headers(),
  events: () => state.history.events,
  showCells(request) {
    if (!showsMemory()) byId("view-both").click();
    select(request);
    byId("memory").focus();
  },
});
const panels = new Panels(byId, (request) => select(request === state.selected ? undefined : request));

function reset() {
  state.memory = new Memory();
  state.history.clear();
  state.paused = null;
  state.shown = null;
  select(undefined);
}

/** The models that can be watched, where there is a choice; one that was chosen stays in the list. */
function showModels(loaded) {
  const current = stream.model || state.layout?.model;
  const names = current && !loaded.includes(current) ? [...loaded, current] : loaded;
  const choice = byId("model-choice");
  choice.replaceChildren(...names.map((name) => {
    const option = document.createElement("option");
    option.value = name;
    option.textContent = loaded.includes(name) ? name : `${name} (not loaded)`;
    option.selected = name === current;
    return option;
  }));
  choice.hidden = names.length < 2;
  choice.title = state.layout?.architecture ?? "";
  byId("model").hidden = !choice.hidden;
}

/** Watches another model, also after the page is loaded again. */
function chooseModel(name) {
  const address = new URL(location.href);
  address.searchParams.set("model", name);
  globalThis.history.replaceState(null, "", address);
  stream.choose(name);
}

function showStatus() {
  const [name, text] = state.connection;
  const isPaused = state.paused !== null && name === "live";
  byId("status").dataset.state = isPaused ? "paused" : name;
  byId("status-text").textContent = isPaused ? "paused" : text;
}

function select(request) {
  state.selected = request;
  for (const map of state.maps.values()) map.select(request);
  render();
}

/** Shows the snapshot of this index; `null` is the newest, from now on. */
function pause(index) {
  const last = state.history.snapshots.length - 1;
  state.paused = index === null ? null : Math.max(0, Math.min(last, index));
  render();
}

const index = () => state.paused ?? state.history.snapshots.length - 1;

let isDue = false;

/** Draws once for all changes before the next frame of the screen. */
function render() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}

function draw() {
  showStatus();
  const { history, layout } = state;
  const at = index();
  const snapshot = history.snapshots[at];
  if (!snapshot || !layout) return;
  if (showsMemory()) drawMaps(snapshot, evictedSince(snapshot));
  state.shown = snapshot;
  const { totals, counters } = snapshot;
  const used = totals.running + totals.cached;
  const part = (n) => (totals.n_cells ? percent(n, totals.n_cells) : "–");
  byId("n-running").textContent = part(totals.running);
  byId("n-cached").textContent = part(totals.cached);
  byId("n-free").textContent = part(totals.n_cells - used);
  byId("n-shared").textContent = count(totals.shared);
  const rate = snapshot.running.length ? history.rate(at) : 0;
  byId("n-rate").textContent = rate ? count(Math.round(rate)) : "0";
  byId("n-reused").textContent = percent(counters.reused_tokens, counters.prompt_tokens);
  byId("n-evicted").textContent = count(counters.evicted);
  byId("memory-sum").textContent = totals.n_cells
    ? `${count(totals.running)} ${totals.unit} running, ${count(totals.cached)} cached, ${count(totals.n_cells - used)} free`
    : "";
  if (!showsMemory()) return;
  drawExperts(snapshot);
  panels.show(snapshot, history, at, state.selected);
  drawTime(snapshot, at);
}

/** Sequences that were evicted since the snapshot that is shown, which may be several before: a slow
 * browser does not draw them all. `null` where this one does not follow it. */
function evictedSince(snapshot) {
  const { shown, paused, history } = state;
  if (shown === null || snapshot.frame < shown.frame || paused !== null) return null;
  const since = history.snapshots.filter((one) => one.frame > shown.frame && one.frame <= snapshot.frame);
  return new Set(since.flatMap((one) => [...one.evicted]));
}

function drawMaps(snapshot, evicted) {
  const names = new Set(snapshot.areas.map((area) => area.name));
  for (const [name, map] of state.maps) {
    if (!names.has(name)) {
      map.figure.remove();
      state.maps.delete(name);
    }
  }
  for (const area of snapshot.areas) {
    let map = state.maps.get(area.name);
    if (!map) {
      map = new CellMap(area.name, { tip: byId("tip"), onPick: select });
      map.selected = state.selected;
      state.maps.set(area.name, map);
      byId("parts").append(map.figure);
    }
    map.show(snapshot, area, describeArea(state.layout, area, snapshot.areas.length), evicted);
  }
}

/** The experts, where the model reads them as they are needed. */
function drawExperts({ experts }) {
  byId("experts").hidden = !experts;
  if (!experts) return;
  if (!state.expertMap) {
    state.expertMap = new ExpertMap(byId("tip"));
    byId("experts").append(state.expertMap.figure);
  }
  state.expertMap.show(experts);
}

function drawTime(snapshot, at) {
  const { snapshots } = state.history;
  const last = snapshots.length - 1;
  const isPaused = state.paused !== null;
  const button = byId("pause");
  button.setAttribute("aria-pressed", String(isPaused));
  button.textContent = isPaused ? "Go live" : "Pause";
  byId("back").disabled = at <= 0;
  byId("forth").disabled = !isPaused || at >= last;
  const ago = snapshots[last].at - snapshot.at;
  const moment = isPaused ? `${time(ago)} before the newest, snapshot ${at + 1} of ${last + 1}` : `${plural(last + 1, "snapshot")} kept`;
  if (byId("moment").textContent !== moment) byId("moment").textContent = moment;
  const scrub = byId("scrub");
  scrub.max = String(last);
  scrub.value = String(at);
  scrub.setAttribute("aria-valuetext", moment);
  drawSpark(snapshots, at);
}

/** Cells over time: those of requests below, cached ones above. */
function drawSpark(snapshots, at) {
  const canvas = byId("spark");
  const scale = devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  const last = Math.max(1, snapshots.length - 1);
  const x = (n) => (n / last) * width;
  const area = (of, fill) => {
    context.beginPath();
    context.moveTo(0, height);
    let y = height;
    snapshots.forEach((one, n) => {
      y = height - (height - 4) * (one.totals.n_cells ? of(one.totals) / one.totals.n_cells : 0);
      context.lineTo(x(n), y);
    });
    // The first snapshot alone is a level, too.
    context.lineTo(width, y);
    context.lineTo(width, height);
    context.fillStyle = fill;
    context.fill();
  };
  const tone = `${value("--cell-light")} ${value("--cell-chroma")} 20`;
  area((totals) => totals.running + totals.cached, `oklch(${tone} / 0.35)`);
  area((totals) => totals.running, `oklch(${tone} / 0.95)`);
  context.fillStyle = value("--evicted");
  snapshots.forEach((one, n) => {
    if (one.evicted.size) context.fillRect(x(n) - 1, 0, 2, 5);
  });
  context.fillStyle = value("--edge");
  context.fillRect(Math.min(width - 2, x(at)), 0, 2, height);
}

const THEMES = [
  [null, "◐", "as the system"],
  ["light", "☀", "light"],
  ["dark", "☾", "dark"],
];
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
let theme = 0;

function setTheme(n) {
  theme = n % THEMES.length;
  const [name, sign, text] = THEMES[theme];
  document.documentElement.dataset.theme = name ?? (prefersDark.matches ? "dark" : "light");
  const button = byId("theme");
  button.textContent = sign;
  button.title = `Colours: ${text}`;
  button.setAttribute("aria-label", `Colours: ${text}`);
  readLook();
  render();
}

byId("theme").addEventListener("click", () => setTheme(theme + 1));
prefersDark.addEventListener("change", () => setTheme(theme));
addEventListener("resize", render);
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  stream.key = byId("key").value.trim();
  byId("key").value = "";
  stream.start();
  chat.listModels();
});
byId("model-choice").addEventListener("change", (event) => chooseModel(event.target.value));
byId("deselect").addEventListener("click", () => select(undefined));
byId("pause").addEventListener("click", () => pause(state.paused === null ? index() : null));
byId("back").addEventListener("click", () => pause(index() - 1));
byId("forth").addEventListener("click", () => pause(index() + 1));
byId("scrub").addEventListener("input", (event) => pause(Number(event.target.value)));

addEventListener("keydown", (event) => {
  const isTyping = event.target.closest?.("input, textarea, select, button, summary, #chat");
  if (event.key === "Escape" && state.selected !== undefined) return select(undefined);
  if (isTyping || !showsMemory() || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === " ") pause(state.paused === null ? index() : null);
  else if (event.key === "ArrowLeft") pause(index() - 1);
  else if (event.key === "ArrowRight" && state.paused !== null) pause(index() + 1);
  else return;
  event.preventDefault();
});

watchViews(byId, render);
setTheme(0);
stream.model = new URLSearchParams(location.search).get("model") ?? "";
stream.start();
chat.listModels();
// For people who look closer with the tools of their browser, and for tests.
globalThis.cellarView = { state, stream, chat };
