// How the turns of a conversation look: text, what the memory did for it, and what can be done next.

import { copyButton, toElements } from "./markdown.js";
import { element } from "./panels.js";
import { branches } from "./tree.js";
import { bytes, count, missed, percent, plural, time } from "./words.js";

function action(name, label, act) {
  const button = element("button", "quiet", name);
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", act);
  return button;
}

/** The element of a turn. `on` has what its buttons do; a conversation that is `busy` has none. */
export function turnElement(talk, turn, { canChat, isBusy, isLast, on }) {
  const box = element("article", `say ${turn.role}${canChat ? "" : " plain"}`);
  box.dataset.turn = turn.id;
  box.setAttribute("aria-label", turn.role === "user" ? "You" : "Model");
  const body = element("div", "body");
  box.append(body);
  fillBody(body, turn, canChat);
  if (turn.files?.length) {
    const list = element("ul", "files");
    list.append(...turn.files.map(({ name, text }) => element("li", "", `${name}, ${bytes(text.length)}`)));
    box.append(list);
  }
  if (turn.error) {
    const failed = element("p", "failed", turn.error);
    failed.setAttribute("role", "alert");
    box.append(failed);
  }
  const isWritten = isBusy && isLast;
  const told = turn.role === "assistant" && !isWritten ? tell(turn, talk) : "";
  if (told) box.append(element("p", "usage", told));
  if (!isBusy) box.append(actions(talk, turn, { canChat, isLast, on }));
  return box;
}

/** Shows the text of a turn, also while it grows. */
export function fillBody(body, turn, canChat) {
  const parts = [];
  if (turn.thought) {
    const box = element("details", "thought");
    box.open = body.querySelector(".thought")?.open ?? false;
    box.append(element("summary", "", turn.text ? "What it thought" : "It thinks"), element("p", "", turn.thought));
    parts.push(box);
  }
  if (turn.role === "assistant" && canChat) parts.push(toElements(turn.text));
  else if (turn.text) parts.push(element("p", "verbatim", turn.text));
  body.replaceChildren(...parts);
}

function actions(talk, turn, { canChat, isLast, on }) {
  const row = element("div", "actions");
  const all = branches(talk, turn);
  if (all.length > 1) {
    const at = all.indexOf(turn);
    const back = action("‹", "The branch before", () => on.showBranch(all[at - 1]));
    const forth = action("›", "The next branch", () => on.showBranch(all[at + 1]));
    back.disabled = at === 0;
    forth.disabled = at === all.length - 1;
    row.append(back, element("span", "small num", `${at + 1}/${all.length}`), forth);
  }
  if (turn.text) row.append(copyButton("Copy the message", () => turn.text));
  if (turn.role === "user") {
    row.append(action("Edit", "Edit the message: the old one stays as a branch", () => on.edit(turn)));
  } else {
    row.append(action(turn.error ? "Try again" : "Regenerate", "Make this answer again: the old one stays as a branch", () => on.regenerate(turn)));
    if (turn.text) row.append(action("Branch", "Go on from here in a new conversation, which shares the cells up to here", () => on.fork(turn)));
    const cells = on.showCells(turn);
    if (cells) row.append(action("Cells", "Show the cells of this answer in the memory", cells));
    const isWhole = !turn.end || turn.end === "stop" || turn.end === "context";
    if (isLast && !isWhole && (turn.text || (canChat && turn.thought))) {
      const more = action("Go on", "Let the answer go on where it ended", () => on.goOn(turn));
      more.classList.add("more");
      row.append(more);
    }
  }
  return row;
}

const ENDS = {
  length: (turn) => `Cut at the limit of ${plural(turn.limit || turn.usage?.n_tokens || 0, "token")}.`,
  context: () => "Cut: the context is full. Begin another conversation, or edit an earlier message.",
  stopped: () => "Stopped.",
  // As well while another window writes it.
  broken: (turn) => (turn.text || turn.thought ? "Cut: the connection broke." : "No text has come."),
};

/** What is known of an answer, in words. */
export function tell(turn, talk) {
  const said = [];
  const ended = ENDS[turn.end]?.(turn);
  if (ended) said.push(ended);
  const { usage } = turn;
  if (usage) {
    const { n_prompt, n_cached, n_tokens, first, all } = usage;
    const rate = n_tokens > 1 ? (1000 * (n_tokens - 1)) / Math.max(1, all - first) : 0;
    const speed = rate ? `, ${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s` : "";
    said.push(`${plural(n_tokens, "token")} of text${speed}, the first after ${time(first)}.`);
    const why = turn.reuse ? missed(turn.reuse) : "";
    said.push(`${plural(n_prompt, "prompt token")}, ${count(n_cached)} of them cached (${percent(n_cached, n_prompt)})${why ? `: ${why}` : ""}.`);
    if (n_cached > 0 && branches(talk, turn).length > 1) said.push("The branches share these cells.");
    else if (n_cached > 0 && talk.from) said.push(`Shared with “${talk.from}”, where it was branched.`);
  }
  return said.join(" ");
}
