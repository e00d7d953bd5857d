// Conversations in this browser: one entry of its local storage for each. Where two windows have the
// same one, each takes in what the other adds. Keys of the API are never kept.

import { readTalk, takeTurns } from "./tree.js";

const TALK = "cellar.talk.";
const VIEW = "cellar.view";

/** The storage, or null where the browser has none for this page. */
function storage() {
  try {
    return globalThis.localStorage ?? null;
  } catch {
    return null;
  }
}

/** The conversations that were kept, the newest first. */
export function keptTalks() {
  const store = storage();
  const names = store ? Object.keys(store).filter((name) => name.startsWith(TALK)) : [];
  const talks = names.map((name) => readTalk(store.getItem(name))).filter(Boolean);
  return talks.toSorted((a, b) => b.at - a.at);
}

/** Keeps a conversation, with what another window has added to it; gives what went wrong, or an empty text. */
export function keepTalk(talk) {
  try {
    const store = storage();
    const kept = readTalk(store?.getItem(TALK + talk.id));
    if (kept) takeTurns(talk, kept, false);
    store?.setItem(TALK + talk.id, JSON.stringify(talk));
    return "";
  } catch {
    return "This browser has no room for the conversation: it is lost when the page is closed. Delete others, or export it.";
  }
}

/** Tells what other windows keep (`kept`, a conversation) and forget (`forgotten`, its id). */
export function watchTalks({ kept, forgotten }) {
  addEventListener("storage", ({ key, newValue }) => {
    if (!key?.startsWith(TALK)) return;
    const talk = readTalk(newValue);
    if (talk) kept(talk);
    else if (newValue === null) forgotten(key.slice(TALK.length));
  });
}

export function forgetTalk(talk) {
  storage()?.removeItem(TALK + talk.id);
}

export const keptView = () => storage()?.getItem(VIEW) ?? "";

export function keepView(view) {
  try {
    storage()?.setItem(VIEW, view);
  } catch {
    // The view is as by default next time.
  }
}
