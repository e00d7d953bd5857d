// Elements, made and found.

export const byId = (id) => document.getElementById(id);

/** An element with attributes and children; texts are texts, never HTML. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") element.className = value;
    else if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** A row of a table; numbers and sizes are to the right. */
export const row = (kind, cells) => make("tr", {}, ...cells.map((cell) => {
  const { text, number } = typeof cell === "object" && "text" in cell ? cell : { text: cell, number: false };
  return make(kind, number ? { class: "n" } : {}, text);
}));

export const number = (text) => ({ text, number: true });
