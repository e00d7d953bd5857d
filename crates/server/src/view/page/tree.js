// A conversation as a tree of turns: an edited message or an answer that was made again is a branch
// beside the old one. Invariant: `leaf` is the last turn of the branch that is shown, or null.

/** The settings of a new conversation; an empty one leaves it to the server. */
export const NO_SETTINGS = { model: "", system: "", temperature: "", top_p: "", max_tokens: "", seed: "" };

/** Begins with a letter: numbers would not stay in the order in which they came. */
const newId = () => `t${Array.from(crypto.getRandomValues(new Uint32Array(3)), (n) => n.toString(36)).join("")}`;

export function newTalk(settings = {}) {
  return { id: newId(), at: Date.now(), settings: { ...NO_SETTINGS, ...settings }, turns: {}, leaf: null, from: null };
}

/** A conversation that was kept, or null where it is none. */
export function readTalk(text) {
  try {
    const talk = JSON.parse(text);
    const isTurn = (turn) => ["user", "assistant"].includes(turn.role) && typeof turn.text === "string";
    const isTree = Object.values(talk.turns).every((turn) => isTurn(turn) && (turn.parent === null || talk.turns[turn.parent]));
    if (typeof talk.id !== "string" || !isTree || (talk.leaf !== null && !talk.turns[talk.leaf])) return null;
    return { ...newTalk(), ...talk, settings: { ...NO_SETTINGS, ...talk.settings } };
  } catch {
    return null;
  }
}

/** How far a turn has come. */
const lengthOf = (turn) => turn.text.length + (turn.thought?.length ?? 0);

/** Takes the turns of another copy of a conversation in: those that are new, and answers that have come further
 * there; with `isNewer`, also what else is different. */
export function takeTurns(talk, copy, isNewer) {
  let isChanged = false;
  for (const turn of Object.values(copy.turns)) {
    const own = talk.turns[turn.id];
    const ahead = own ? lengthOf(turn) - lengthOf(own) : 1;
    if (ahead < 0 || (ahead === 0 && (!isNewer || JSON.stringify(own) === JSON.stringify(turn)))) continue;
    talk.turns[turn.id] = Object.assign(own ?? {}, turn);
    isChanged = true;
  }
  // Who has the end in sight sees how it goes on.
  const isEnd = isChanged && pathTo(talk, copy.leaf).some((turn) => turn.id === talk.leaf);
  if (isEnd || talk.leaf === null) talk.leaf = copy.leaf;
}

/** True if a copy has every turn of a conversation. */
export const hasAllTurns = (copy, talk) => Object.keys(talk.turns).every((id) => copy.turns[id]);

/** Adds a turn below another one, and shows it. */
export function addTurn(talk, parent, turn) {
  const id = newId();
  talk.turns[id] = { id, parent, ...turn };
  talk.leaf = id;
  talk.at = Date.now();
  return talk.turns[id];
}

/** The turns from the first to this one. */
export function pathTo(talk, id) {
  const path = [];
  for (let turn = talk.turns[id]; turn; turn = talk.turns[turn.parent]) path.unshift(turn);
  return path;
}

/** The branches where this turn is one, in the order in which they came. */
export function branches(talk, turn) {
  return Object.values(talk.turns).filter((one) => one.parent === turn.parent);
}

/** Shows the branch of a turn, down to its newest end. */
export function showBranch(talk, id) {
  for (;;) {
    const next = Object.values(talk.turns).findLast((turn) => turn.parent === id);
    if (!next) break;
    id = next.id;
  }
  talk.leaf = id;
}

/** A new conversation with the turns up to this one. */
export function fork(talk, id) {
  const copy = newTalk(talk.settings);
  let parent = null;
  for (const turn of pathTo(talk, id)) {
    const { role, text, thought, files } = turn;
    parent = addTurn(copy, parent, { role, text, thought, files }).id;
  }
  copy.from = talkTitle(talk);
  return copy;
}

/** The last turn that a next message can follow: a question without an answer is left aside. */
export function lastAnswered(talk) {
  let turn = talk.turns[talk.leaf];
  while (turn && !(turn.role === "assistant" && turn.text)) turn = talk.turns[turn.parent];
  return turn?.id ?? null;
}

export function talkTitle(talk) {
  const first = Object.values(talk.turns).find((turn) => turn.parent === null);
  const text = (first?.text || first?.files?.[0]?.name || "").trim().replace(/\s+/g, " ");
  return text.length > 60 ? `${text.slice(0, 60)}…` : text || "New conversation";
}

/** What is sent of a message: its files, each in a fence that is longer than those in it, and its text. */
export function contentOf(turn) {
  const files = (turn.files ?? []).map(({ name, text }) => {
    const longest = Math.max(2, ...Array.from(text.matchAll(/`+/g), ([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `File ${name}:\n${fence}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...files, turn.text].filter(Boolean).join("\n\n");
}

/** The messages up to a turn, with the system prompt before them. */
export function messagesTo(talk, id) {
  const system = talk.settings.system.trim();
  const messages = pathTo(talk, id).map((turn) => ({ role: turn.role, content: contentOf(turn) }));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

/** The text up to a turn, for models that continue texts. */
export const textTo = (talk, id) => pathTo(talk, id).map(contentOf).join("");

/** The settings that are numbers, as the API names them; empty ones are left out. */
export function parametersOf(settings) {
  const names = ["temperature", "top_p", "max_tokens", "seed"];
  const set = names.filter((name) => String(settings[name]).trim() !== "");
  return Object.fromEntries(set.map((name) => [name, Number(settings[name])]));
}

/** The text from which an answer goes on: the rendered prompt, what was thought, and the answer so far. */
export function promptToGoOn(prompt, turn) {
  const isThinking = /<think>\s*$/.test(prompt);
  if (!isThinking) return prompt + turn.text;
  const thought = turn.thought ?? "";
  return turn.text ? `${prompt}${thought}\n</think>\n\n${turn.text}` : prompt + thought;
}

/** The branch that is shown as a text to keep. */
export function asMarkdown(talk) {
  const names = { user: "You", assistant: "Model" };
  const turns = pathTo(talk, talk.leaf).map((turn) => `## ${names[turn.role]}\n\n${contentOf(turn)}\n`);
  return [`# ${talkTitle(talk)}\n`, ...turns].join("\n");
}
