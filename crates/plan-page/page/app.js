// The page: its parts, and what a person does with them.

import { byId, make } from "./dom.js";
import { fromFile, open, openAddress } from "./files.js";
import { drawPlan } from "./plan.js";
import { Planner } from "./planner.js";
import { WalkView } from "./walk.js";

const TYPES = ["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"];
const STATES = ["f32", "f16", "bf16"];
const GIB = 1 << 30;

const fill = (id, names, chosen) => byId(id).replaceChildren(...names.map((name) => {
  const option = make("option", { value: name }, name);
  option.selected = name === chosen;
  return option;
}));
fill("k", TYPES, "f16");
fill("v", TYPES, "f16");
fill("state", STATES, "f32");

function complain(text) {
  byId("problem").hidden = !text;
  byId("problem").textContent = text ?? "";
}

const say = (text) => { byId("reading").textContent = text; };

let planner = null;
let hasModel = false;

/** The choices; null where one of them is none. */
function choices() {
  const form = byId("options");
  if (!form.reportValidity()) return null;
  const value = (id) => byId(id).value;
  const room = value("room") === "" ? null : Math.floor(Number(value("room")) * GIB);
  return {
    n_ctx: value("n_ctx") === "" ? null : Number(value("n_ctx")),
    n_seqs: Number(value("n_seqs")),
    streams: value("streams"),
    k: value("k"),
    v: value("v"),
    state: value("state"),
    room,
  };
}

async function plan() {
  const options = choices();
  if (!hasModel || !options) return;
  try {
    const answer = await planner.ask({ plan: options });
    complain(null);
    drawPlan(answer.plan, options.room, (n_ctx) => { byId("n_ctx").value = n_ctx; plan(); });
    page.plan = answer.plan;
  } catch (failure) {
    complain(failure.message);
  }
}

/** Reads a model, and plans it. */
async function read(name, opening) {
  complain(null);
  page.plan = null;
  try {
    const answer = await opening();
    hasModel = true;
    byId("name").textContent = answer.opened.name || name;
    say(answer.isBeginning ? "This is the beginning of a file: what its header says is believed." : `${name}: read`);
    await plan();
  } catch (failure) {
    say("\u00a0");
    complain(failure.message);
  }
}

const readFiles = (list) => {
  const files = [...list];
  if (files.length > 0) read(files.map((file) => file.name).join(", "), () => open(planner, files.map(fromFile), say));
};

const drop = byId("drop");
for (const kind of ["dragenter", "dragover"]) {
  document.addEventListener(kind, (event) => { event.preventDefault(); drop.classList.add("over"); });
}
document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) drop.classList.remove("over"); });
document.addEventListener("drop", (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  readFiles(event.dataTransfer.files);
});
byId("files").addEventListener("change", (event) => readFiles(event.target.files));
byId("address").addEventListener("submit", (event) => {
  event.preventDefault();
  const address = byId("url").value;
  read(address.split("/").pop() || address, () => openAddress(planner, address, say));
});
byId("options").addEventListener("submit", (event) => event.preventDefault());
byId("options").addEventListener("change", plan);

function view(name) {
  for (const one of ["plan", "walk"]) {
    byId(one).hidden = one !== name;
    byId(`view-${one}`).setAttribute("aria-pressed", one === name);
  }
}
byId("view-plan").addEventListener("click", () => view("plan"));
byId("view-walk").addEventListener("click", () => view("walk"));

const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const theme = (is_dark) => { document.documentElement.dataset.theme = is_dark ? "dark" : "light"; };
theme(prefersDark.matches);
prefersDark.addEventListener("change", () => theme(prefersDark.matches));
byId("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "light"));

/** For tests: what is shown. */
const page = { plan: null, isReady: false };
globalThis.planPage = page;

try {
  planner = await Planner.load("plan_page.wasm.gz");
  const walks = new WalkView();
  const { walks: names } = await planner.ask("walks");
  for (const name of names) {
    const { walk } = await planner.ask({ walk: { name } });
    const button = make("button", { type: "button", "data-name": name, on: { click: () => walks.show(walk) } }, walk.title);
    byId("walks").append(button);
    if (name === names[0]) walks.show(walk);
  }
  page.isReady = true;
} catch (failure) {
  complain(`The planner could not be loaded: ${failure.message}`);
}
