// The settings of a conversation, and the files of its next message.

import { element } from "./panels.js";
import { bytes } from "./words.js";

const FIELDS = ["model", "system", "temperature", "top_p", "max_tokens", "seed"];
const MOST_BYTES = 1 << 20;

export class Settings {
  /** `onChange(settings)` is called with what a person has set. */
  constructor(byId, onChange) {
    this.byId = byId;
    for (const name of FIELDS) {
      this.field(name).addEventListener("change", () => {
        if (this.field(name).checkValidity()) onChange(name, this.field(name).value.trim());
        else this.field(name).reportValidity();
      });
    }
  }

  field(name) {
    return this.byId(`set-${name}`);
  }

  show(settings) {
    for (const name of FIELDS) this.field(name).value = settings[name];
    const set = FIELDS.filter((name) => name !== "model" && settings[name] !== "");
    this.byId("settings-sum").textContent = set.length ? `${set.length} set` : "";
  }

  /** The models that can be chosen; one that was chosen stays in the list. */
  showModels(names, chosen) {
    const all = chosen && !names.includes(chosen) ? [...names, chosen] : names;
    const options = ["", ...all].map((name) => {
      const option = element("option", "", name || "the one that is watched");
      option.value = name;
      return option;
    });
    this.field("model").replaceChildren(...options);
    this.field("model").value = chosen;
    this.byId("set-model-row").hidden = all.length < 2;
  }
}

/** The text files that go with the next message. */
export class Files {
  constructor(byId, onProblem) {
    this.byId = byId;
    this.onProblem = onProblem;
    this.files = [];
    const input = byId("chat-files");
    byId("chat-attach").addEventListener("click", () => input.click());
    input.addEventListener("change", async () => {
      await this.add(input.files);
      input.value = "";
    });
    const chat = byId("chat");
    chat.addEventListener("dragover", (event) => event.preventDefault());
    chat.addEventListener("drop", (event) => {
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
  }

  async add(files) {
    for (const file of files) {
      const text = file.size <= MOST_BYTES ? readText(await file.arrayBuffer()) : null;
      if (text !== null) this.files.push({ name: file.name, text });
      else this.onProblem(file.size > MOST_BYTES
        ? `${file.name} has ${bytes(file.size)}; at most ${bytes(MOST_BYTES)}. Paste the part that matters.`
        : `${file.name} is no text in UTF-8. Only text files can be attached.`);
    }
    this.show();
  }

  /** Gives the files to the message, and has none. */
  take() {
    return this.put([]);
  }

  /** Has these files from now on; gives those before. */
  put(files) {
    const before = this.files;
    this.files = files;
    this.show();
    return before;
  }

  show() {
    const nodes = this.files.map((file) => {
      const item = element("li");
      const button = element("button", "quiet", "×");
      button.type = "button";
      button.setAttribute("aria-label", `Remove ${file.name}`);
      button.addEventListener("click", () => {
        this.files = this.files.filter((one) => one !== file);
        this.show();
        this.byId("chat-attach").focus();
      });
      item.append(`${file.name}, ${bytes(file.text.length)}`, button);
      return item;
    });
    this.byId("chat-attached").replaceChildren(...nodes);
  }
}

/** The text of bytes, or null where they are none. */
export function readText(buffer) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(buffer);
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}
