// Which parts of the page are shown: the chat, the memory, or both side by side.

import { keepView, keptView } from "./store.js";

const VIEWS = ["chat", "both", "memory"];

/** Shows the view that was chosen last; `onChange()` is called after each choice. */
export function watchViews(byId, onChange) {
  const show = (view) => {
    document.body.dataset.view = view;
    for (const name of VIEWS) byId(`view-${name}`).setAttribute("aria-pressed", String(name === view));
    // Beside a chat alone there is room for the list of all.
    byId("chats-box").open = view === "chat" && innerWidth >= 900;
    byId("skip").href = view === "chat" ? "#chat" : "#memory";
    byId("skip").textContent = view === "chat" ? "Skip to the chat" : "Skip to the memory";
  };
  for (const name of VIEWS) {
    byId(`view-${name}`).addEventListener("click", () => {
      show(name);
      keepView(name);
      onChange();
    });
  }
  const kept = keptView();
  show(VIEWS.includes(kept) ? kept : "both");
}

/** True if the memory is on the page. */
export const showsMemory = () => document.body.dataset.view !== "chat";
