// The cells of one part as a map: a square each, or for several where there are too many.

import { Grid, LARGEST, right, strong } from "./grid.js";
import { count, plural } from "./words.js";

const HUES = [255, 55, 150, 330, 95, 200, 20, 290, 125, 230, 75, 175];
const FADE = 800;
const MOST_HEIGHT = 430;
const MOST_BANDS = 4;
const SMALLEST = 3;

const still = matchMedia("(prefers-reduced-motion: reduce)");

let look = null;

/** Reads the colours of the theme. */
export function readLook() {
  const style = getComputedStyle(document.documentElement);
  const value = (name) => style.getPropertyValue(name).trim();
  look = {
    light: Number(value("--cell-light")),
    chroma: Number(value("--cell-chroma")),
    ground: value("--panel"),
    free: value("--free"),
    edge: value("--edge"),
    evicted: value("--evicted"),
    fresh: value("--fresh"),
    cachedAlpha: Number(value("--cached-alpha")),
  };
}

/** The colour of a request. */
export function colour(request, alpha = 1) {
  if (request === undefined) return look.free;
  const hue = HUES[request % HUES.length];
  const turn = Math.floor(request / HUES.length) % 3;
  const light = look.light + (turn === 1 ? 0.07 : turn === 2 ? -0.07 : 0);
  return `oklch(${light} ${look.chroma} ${hue} / ${alpha})`;
}

/** The colour of what is pointed at. */
export const edgeColour = () => look.edge;

/** The owners of a set as the map shows them: those that run first. */
export function owners(snapshot, set) {
  const known = snapshot.sets.members[set].map((seq) => ({
    seq,
    ...(snapshot.roles.get(seq) ?? { role: "leaving", request: undefined }),
  }));
  const rank = { running: 0, cached: 1, leaving: 2 };
  return known.sort((a, b) => rank[a.role] - rank[b.role]);
}

export class CellMap extends Grid {
  /** `onPick(request)` is called with the request of a cell that is chosen. */
  constructor(name, { tip, onPick }) {
    super(tip);
    this.canvas.dataset.part = name;
    this.onPick = onPick;
    this.selected = undefined;
    this.flashes = new Map();
  }

  /** Shows an area of a snapshot. `evicted` are the sequences that were evicted since what was shown;
   * `null` where the snapshot does not follow it. */
  show(snapshot, area, layout, evicted) {
    const before = this.area;
    this.snapshot = snapshot;
    this.area = area;
    this.describe(layout);
    if (evicted && before && before.n_cells === area.n_cells && before !== area) this.flash(before, evicted);
    if (!evicted) this.flashes.clear();
    this.resize();
    this.draw();
  }

  describe(layout) {
    const { area } = this;
    let used = 0;
    for (const set of area.sets) used += set === 0 ? 0 : 1;
    const what = area.part === null ? "state" : "cell";
    this.caption.replaceChildren(strong(layout.title), ` ${layout.what}`, right(`${count(used)} of ${plural(area.n_cells, what)}`));
    const label = `${layout.title}: ${count(used)} of ${plural(area.n_cells, what)} used. Arrow keys move over the cells, Enter selects a request.`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    this.canvas.dataset.used = used;
  }

  /** Cells that came, or went. */
  flash(before, evicted) {
    const now = performance.now();
    const members = this.snapshot.sets.members;
    for (let cell = 0; cell < this.area.n_cells; cell++) {
      const [old, set] = [before.sets[cell], this.area.sets[cell]];
      if (old === set) continue;
      if (set === 0) {
        const isEvicted = members[old].some((seq) => evicted.has(seq));
        this.flashes.set(cell, { at: now, kind: isEvicted ? "evicted" : "freed" });
      } else if (old === 0) {
        this.flashes.set(cell, { at: now, kind: "fresh" });
      } else if (members[set].length > members[old].length) {
        this.flashes.set(cell, { at: now, kind: "fresh" });
      } else if (evicted.size && members[old].some((seq) => evicted.has(seq))) {
        this.flashes.set(cell, { at: now, kind: "evicted" });
      }
    }
    if (evicted.size) this.canvas.dataset.evictions = Number(this.canvas.dataset.evictions ?? 0) + 1;
  }

  resize() {
    if (!this.area) return;
    const width = Math.floor(this.figure.clientWidth);
    if (width < 10) return;
    // Squares of several cells each where those of one would be too small, and rows of whole blocks of
    // 16, so that cells that were given together are seen together.
    let [each, columns] = [1, 16];
    const n_rows = () => Math.ceil(this.area.n_cells / each / columns);
    const isTooHigh = () => (n_rows() * width) / columns > MOST_HEIGHT || width / columns > LARGEST;
    while (isTooHigh() && n_rows() > 1) {
      if (width / (columns + 16) >= SMALLEST) columns += 16;
      else [each, columns] = [each * 2, 16];
    }
    const pitch = Math.min(LARGEST, width / columns);
    this.each = each;
    this.fit({ n: Math.ceil(this.area.n_cells / each), columns, pitch });
    if (this.frame === undefined) this.draw();
  }

  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = undefined;
    if (!this.pitch) return;
    const { context, columns, pitch } = this;
    const size = this.clear();
    const styles = new Map();
    for (let n = 0; n < this.n; n++) {
      const set = this.set(n);
      let style = styles.get(set);
      if (style === undefined) styles.set(set, (style = this.style(set)));
      square(context, Math.round((n % columns) * pitch), Math.round(Math.floor(n / columns) * pitch), size, style);
    }
    this.drawFlashes(size);
    this.drawCursor(size, look.edge);
    if (this.flashes.size) this.frame = requestAnimationFrame(() => this.draw());
  }

  /** The set of most of the cells of a square. */
  set(n) {
    if (this.each === 1) return this.area.sets[n];
    const votes = new Map();
    const end = Math.min(this.area.n_cells, (n + 1) * this.each);
    for (let cell = n * this.each; cell < end; cell++) {
      const set = this.area.sets[cell];
      votes.set(set, (votes.get(set) ?? 0) + 1);
    }
    let best = 0;
    for (const [set, n_votes] of votes) if (n_votes > (votes.get(best) ?? 0)) best = set;
    return best;
  }

  style(set) {
    if (set === 0) return { fill: look.free, alpha: this.selected === undefined ? 1 : 0.5 };
    const own = owners(this.snapshot, set);
    const isRunning = own[0].role === "running";
    const isSelected = this.selected !== undefined && own.some((one) => one.request === this.selected);
    const style = {
      fill: colour(own[0].request),
      alpha: isRunning ? 1 : look.cachedAlpha,
      isSelected,
    };
    if (own[0].role === "leaving") style.fill = look.edge;
    if (own.length > 1) {
      const colours = [...new Set(own.map((one) => (one.role === "leaving" ? look.edge : colour(one.request))))];
      style.bands = colours.slice(0, MOST_BANDS);
      style.edge = look.edge;
    }
    if (this.selected !== undefined && !isSelected) style.alpha *= 0.22;
    if (isSelected) style.alpha = 1;
    return style;
  }

  drawFlashes(size) {
    const now = performance.now();
    for (const [cell, { at, kind }] of this.flashes) {
      const age = (now - at) / FADE;
      if (age >= 1 || (still.matches && kind !== "evicted")) {
        this.flashes.delete(cell);
        continue;
      }
      const n = Math.floor(cell / this.each);
      const x = Math.round((n % this.columns) * this.pitch);
      const y = Math.round(Math.floor(n / this.columns) * this.pitch);
      this.context.globalAlpha = (kind === "evicted" ? 1 : 0.6) * (1 - age) ** 1.5;
      this.context.fillStyle = kind === "evicted" ? look.evicted : kind === "fresh" ? look.fresh : look.edge;
      this.context.fillRect(x, y, size, size);
    }
    this.context.globalAlpha = 1;
  }

  /** What a square is, in words. */
  tell(n) {
    const first = n * this.each;
    const cell = this.area.part === null ? "State" : "Cell";
    const name = this.each === 1 ? `${cell} ${first}` : `${cell}s ${first} to ${first + this.each - 1}, most`;
    const set = this.set(n);
    if (set === 0) return `${name}: free`;
    const own = owners(this.snapshot, set).map((one) => {
      const request = one.request === undefined ? `sequence ${one.seq}` : `request ${one.request}`;
      return one.role === "cached" ? `the prefix that ${request} left` : request;
    });
    return `${name}: position ${this.area.positions[first]} of ${own.join(" and ")}`;
  }

  pick(n) {
    if (n < 0) return;
    const set = this.set(n);
    this.onPick(set === 0 ? undefined : owners(this.snapshot, set)[0].request);
  }

  select(request) {
    this.selected = request;
    this.draw();
  }
}

function square(context, x, y, size, style) {
  context.globalAlpha = style.alpha;
  context.fillStyle = style.fill;
  context.fillRect(x, y, size, size);
  if (style.bands) {
    style.bands.forEach((fill, n) => {
      const from = Math.round((n * size) / style.bands.length);
      context.fillStyle = fill;
      context.fillRect(x + from, y, size - from, size);
    });
    if (size > 4) {
      context.globalAlpha = Math.min(1, style.alpha + 0.2);
      context.strokeStyle = style.edge;
      context.lineWidth = 1;
      context.strokeRect(x + 0.5, y + 0.5, size - 1, size - 1);
    }
  }
  context.globalAlpha = 1;
}
