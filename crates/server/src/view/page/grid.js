// A canvas of squares that pointers and arrow keys move over, with a tip that tells what each is.

/** The largest square, in pixels. */
export const LARGEST = 18;

/** What draws it has `tell(n)`, the words for a square; `pick(n)`; `draw()`; and `resize()`, which fits it to
 * the figure. */
export class Grid {
  constructor(tip) {
    this.tip = tip;
    this.figure = document.createElement("figure");
    this.caption = document.createElement("figcaption");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "application");
    this.figure.append(this.caption, this.canvas);
    this.context = this.canvas.getContext("2d");
    this.cursor = -1;
    this.watchPointer();
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(this.figure);
  }

  /** Takes the number of squares, those of a row, and the pixels from one to the next. */
  fit({ n, columns, pitch }) {
    const scale = devicePixelRatio || 1;
    const height = Math.ceil(n / columns) * pitch;
    const pixels = [Math.round(columns * pitch * scale), Math.ceil(height * scale)];
    if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) {
      [this.canvas.width, this.canvas.height] = pixels;
      this.canvas.style.width = `${columns * pitch}px`;
      this.canvas.style.height = `${height}px`;
    }
    Object.assign(this, { n, columns, pitch, scale });
  }

  /** Clears it, and gives the pixels of a square. */
  clear() {
    const { context, columns, pitch } = this;
    context.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    context.clearRect(0, 0, columns * pitch, Math.ceil(this.n / columns) * pitch);
    return Math.max(1, Math.floor(pitch) - (pitch >= 10 ? 2 : pitch >= 4 ? 1 : 0));
  }

  drawCursor(size, edge) {
    if (this.cursor < 0) return;
    const x = Math.round((this.cursor % this.columns) * this.pitch);
    const y = Math.round(Math.floor(this.cursor / this.columns) * this.pitch);
    this.context.strokeStyle = edge;
    this.context.lineWidth = 2;
    this.context.strokeRect(x - 1, y - 1, size + 2, size + 2);
  }

  watchPointer() {
    const at = (event) => {
      const box = this.canvas.getBoundingClientRect();
      const column = Math.floor((event.clientX - box.left) / this.pitch);
      const row = Math.floor((event.clientY - box.top) / this.pitch);
      const n = row * this.columns + column;
      return column < this.columns && n >= 0 && n < this.n ? n : -1;
    };
    this.canvas.addEventListener("pointermove", (event) => this.point(at(event), event));
    this.canvas.addEventListener("pointerleave", () => this.point(-1));
    this.canvas.addEventListener("click", (event) => this.pick(at(event)));
    this.canvas.addEventListener("blur", () => this.point(-1));
    this.canvas.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: this.columns, ArrowUp: -this.columns }[event.key];
    if (step !== undefined) {
      const next = this.cursor < 0 ? 0 : this.cursor + step;
      if (next >= 0 && next < this.n) this.point(next);
    } else if (event.key === "Enter") {
      this.pick(this.cursor);
    } else {
      return;
    }
    event.preventDefault();
    event.stopPropagation();
  }

  point(n, event) {
    if (n === this.cursor) return;
    this.cursor = n;
    this.draw();
    if (n < 0) {
      this.tip.hidden = true;
      return;
    }
    const box = this.canvas.getBoundingClientRect();
    const x = event?.clientX ?? box.left + (n % this.columns) * this.pitch;
    const y = event?.clientY ?? box.top + Math.floor(n / this.columns) * this.pitch;
    this.tip.textContent = this.tell(n);
    this.tip.hidden = false;
    const width = this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - width - 8))}px`;
    this.tip.style.top = `${Math.min(y + 16, innerHeight - this.tip.offsetHeight - 8)}px`;
  }
}

export function strong(text) {
  const node = document.createElement("strong");
  node.textContent = text;
  return node;
}

export function right(text) {
  const node = document.createElement("span");
  node.className = "right";
  node.textContent = text;
  return node;
}
