// Markdown to elements. Invariant: what a model writes loads nothing and runs nothing: its HTML is
// shown as text, its pictures are links, and what is made of the rest is sanitized.

import { Marked } from "./marked.js";
import "./purify.js";
import { element } from "./panels.js";

const ESCAPES = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

export const escaped = (text) => text.replace(/[&<>"']/g, (sign) => ESCAPES[sign]);

/** Formulas stay as they are written: markdown would read their underscores and backslashes. */
const FORMULA = /^(?:\$\$[\s\S]+?\$\$|\\\[[\s\S]+?\\\]|\\\([\s\S]+?\\\)|\$(?![\s$])[^$\n]*?[^\s$\\]\$(?!\d))/;

const formula = {
  name: "formula",
  level: "inline",
  start(text) {
    const at = text.search(/\$|\\\(|\\\[/);
    return at < 0 ? undefined : at;
  },
  tokenizer(text) {
    const found = FORMULA.exec(text);
    return found ? { type: "formula", raw: found[0], text: found[0] } : undefined;
  },
  renderer: ({ text }) => `<code class="formula">${escaped(text)}</code>`,
};

const block = {
  name: "formulaBlock",
  level: "block",
  start(text) {
    const at = text.search(/(?:^|\n)(?:\$\$|\\\[)/);
    return at < 0 ? undefined : at;
  },
  tokenizer(text) {
    const found = /^(?:\$\$[\s\S]+?\$\$|\\\[[\s\S]+?\\\])[ \t]*(?:\n+|$)/.exec(text);
    return found ? { type: "formulaBlock", raw: found[0], text: found[0].trim() } : undefined;
  },
  renderer: ({ text }) => `<p><code class="formula">${escaped(text)}</code></p>`,
};

const renderer = {
  // Tables have no other way to break a line.
  html: ({ text, block }) => (/^<br\s*\/?>\s*$/i.test(text) ? "<br>" : block ? `<p>${escaped(text.trim())}</p>` : escaped(text)),
  image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || "picture")}</a>`,
};

const marked = new Marked({ gfm: true, breaks: true, extensions: [block, formula], renderer });

/** The HTML of a text, before it is sanitized. */
export const toHtml = (text) => marked.parse(text, { async: false });

const ALLOWED = {
  ALLOWED_TAGS: ["p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "em", "strong", "del", "code", "pre", "blockquote",
    "ul", "ol", "li", "a", "table", "thead", "tbody", "tr", "th", "td", "input"],
  ALLOWED_ATTR: ["href", "class", "start", "align", "type", "checked", "disabled"],
  // These are no addresses, so that they need not look like one.
  ADD_URI_SAFE_ATTR: ["start", "align", "type", "checked", "disabled"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  RETURN_DOM_FRAGMENT: true,
};

/** The elements of a text. */
export function toElements(text) {
  const shown = globalThis.DOMPurify.sanitize(toHtml(text), ALLOWED);
  for (const link of shown.querySelectorAll("a")) {
    link.target = "_blank";
    link.rel = "noopener noreferrer";
  }
  for (const box of shown.querySelectorAll("input")) {
    if (box.type === "checkbox") box.disabled = true;
    else box.remove();
  }
  for (const pre of shown.querySelectorAll("pre")) frame(pre);
  for (const table of shown.querySelectorAll("table")) {
    const box = element("div", "table");
    box.tabIndex = 0;
    box.setAttribute("role", "region");
    box.setAttribute("aria-label", "Table");
    table.replaceWith(box);
    box.append(table);
  }
  return shown;
}

/** Code with its language and a button that copies it. */
function frame(pre) {
  const code = pre.querySelector("code") ?? pre;
  const language = /language-(\S+)/.exec(code.className)?.[1] ?? "code";
  const box = element("div", "code");
  const head = element("div", "code-head");
  head.append(element("span", "", language), copyButton("Copy the code", () => code.textContent));
  pre.replaceWith(box);
  pre.tabIndex = 0;
  pre.setAttribute("role", "region");
  pre.setAttribute("aria-label", `Code, ${language}`);
  box.append(head, pre);
}

/** A button that copies a text, and says whether it could. */
export function copyButton(label, text) {
  const button = element("button", "quiet", "Copy");
  button.type = "button";
  button.setAttribute("aria-label", label);
  button.addEventListener("click", async () => {
    button.textContent = (await copy(text())) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  return button;
}

/** Copies a text. Browsers have no clipboard for pages of other machines without TLS. */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const box = element("textarea", "aside", text);
    document.body.append(box);
    box.select();
    const isCopied = document.execCommand("copy");
    box.remove();
    return isCopied;
  }
}
