// The experts of a mixture as a map: a row for each layer, a square for each expert. What is in memory is
// coloured, the stronger the more often it was chosen.

import { Grid, LARGEST, right, strong } from "./grid.js";
import { colour, edgeColour } from "./map.js";
import { bytes, count, percent, plural } from "./words.js";

const HUE = 1;
const FAINTEST = 0.3;

export class ExpertMap extends Grid {
  constructor(tip) {
    super(tip);
    this.canvas.dataset.experts = "";
  }

  show(experts) {
    this.experts = experts;
    const { used, n_experts } = experts;
    let there = 0;
    for (const n of experts.resident) there += n > 0 ? 1 : 0;
    const all = experts.resident.length;
    const what = `${plural(n_experts.length, "layer")}, ${bytes(used.resident)} of ${bytes(used.total)} in memory, at most ${bytes(used.budget)}`;
    const hits = `${percent(used.hits, used.hits + used.misses)} hits`;
    this.caption.replaceChildren(strong("Experts"), ` ${what}`, right(`${count(there)} of ${plural(all, "expert")}, ${hits}`));
    const label = `Experts: ${count(there)} of ${plural(all, "expert")} in memory. Arrow keys move over the experts.`;
    if (this.canvas.getAttribute("aria-label") !== label) this.canvas.setAttribute("aria-label", label);
    this.canvas.dataset.resident = there;
    this.resize();
  }

  resize() {
    if (!this.experts) return;
    const width = Math.floor(this.figure.clientWidth);
    if (width < 10) return;
    const columns = Math.max(1, ...this.experts.n_experts);
    this.fit({ n: columns * this.experts.n_experts.length, columns, pitch: Math.min(LARGEST, width / columns) });
    this.draw();
  }

  draw() {
    if (!this.pitch || !this.experts) return;
    const { context, columns, pitch, experts } = this;
    const size = this.clear();
    let most = 1;
    for (const n of experts.uses) most = Math.max(most, n);
    for (let n = 0; n < this.n; n++) {
      const at = this.index(n);
      if (at < 0) continue;
      const part = experts.resident[at] / experts.n_matrices[Math.floor(n / columns)];
      const strength = FAINTEST + (1 - FAINTEST) * Math.sqrt(experts.uses[at] / most);
      context.fillStyle = part > 0 ? colour(HUE, strength * Math.min(1, part)) : colour(undefined);
      context.fillRect(Math.round((n % columns) * pitch), Math.round(Math.floor(n / columns) * pitch), size, size);
    }
    this.drawCursor(size, edgeColour());
  }

  /** The place of a square's expert; -1 where its layer has fewer. */
  index(n) {
    const [layer, expert] = [Math.floor(n / this.columns), n % this.columns];
    return expert < this.experts.n_experts[layer] ? this.experts.starts[layer] + expert : -1;
  }

  /** What a square is, in words. */
  tell(n) {
    const at = this.index(n);
    const layer = Math.floor(n / this.columns);
    if (at < 0) return `Mixture ${layer} has ${plural(this.experts.n_experts[layer], "expert")}`;
    const { resident, uses, hits, n_matrices } = this.experts;
    const all = n_matrices[layer];
    const where = resident[at] === 0 ? "in the file" : resident[at] >= all ? "in memory" : `${resident[at]} of ${all} matrices in memory`;
    return `Mixture ${layer}, expert ${n % this.columns}: ${where}; chosen in ${plural(uses[at], "step")}, found in memory in ${count(hits[at])}`;
  }

  pick() {
    // An expert belongs to no request.
  }
}
