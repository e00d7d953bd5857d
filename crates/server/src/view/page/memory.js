// The memory as the stream tells it: updates in, snapshots out. A snapshot is never changed again,
// so that it can be looked at later; what did not change is shared with the one before.

/** Sets of sequences by number; 0 is that of free cells. */
export class Sets {
  constructor() {
    this.members = [[]];
    this.numbers = new Map();
  }

  number(seqs) {
    const name = seqs.join();
    let number = this.numbers.get(name);
    if (number === undefined) {
      number = this.members.length;
      this.members.push(seqs);
      this.numbers.set(name, number);
    }
    return number;
  }
}

export class Memory {
  constructor() {
    this.sets = new Sets();
    this.areas = [];
    this.experts = null;
    this.origins = new Map();
  }

  /** The snapshot after an update. */
  apply(update) {
    const parts = update.parts.map((part) => ({ ...part, name: `part ${part.part}` }));
    const states = update.states ? [{ ...update.states, name: "states" }] : [];
    const isFirst = this.areas.length === 0;
    const before = update.whole ? [] : this.areas;
    this.areas = [...parts, ...states].map((area, n) => this.area(area, before[n]));
    this.experts = update.experts ? expertsAfter(update.experts, this.experts) : null;
    const roles = new Map();
    for (const text of update.cached) {
      roles.set(text.seq, { role: "cached", request: text.request });
    }
    for (const text of update.running) {
      roles.set(text.seq, { role: "running", request: text.request });
    }
    for (const [seq, role] of roles) this.origins.set(seq, role.request);
    const snapshot = {
      ...update,
      areas: this.areas,
      experts: this.experts,
      roles,
      sets: this.sets,
      // What was evicted before the first snapshot does not flash.
      evicted: isFirst ? new Set() : this.evicted(update.events),
    };
    snapshot.totals = totals(snapshot);
    return snapshot;
  }

  area(area, before) {
    const fits = before && before.n_cells === area.n_cells;
    if (fits && area.set.length === 0 && area.free.length === 0) return before;
    const sets = fits ? before.sets.slice() : new Uint16Array(area.n_cells);
    const positions = fits ? before.positions.slice() : new Uint32Array(area.n_cells);
    for (const [first, n] of area.free) sets.fill(0, first, first + n);
    for (const [first, n, position, ...seqs] of area.set) {
      sets.fill(this.sets.number(seqs), first, first + n);
      for (let i = 0; i < n; i++) positions[first + i] = position + i;
    }
    return { name: area.name, part: area.part ?? null, n_cells: area.n_cells, sets, positions };
  }

  /** Sequences of prefixes that were evicted with this update, with whose tokens they were. */
  evicted(events) {
    const gone = events.filter((event) => event.kind === "dropped" && event.why === "evicted");
    for (const event of gone) event.request = this.origins.get(event.seq);
    return new Set(gone.map((event) => event.seq));
  }
}

/** The experts after an update: those of all layers one after the other, each layer from `starts` on. */
function expertsAfter(update, before) {
  if (!update.whole && before && update.set.length === 0) return { ...before, used: update.used };
  const starts = [];
  let n = 0;
  for (const n_experts of update.n_experts) {
    starts.push(n);
    n += n_experts;
  }
  const keeps = !update.whole && before;
  const resident = keeps ? before.resident.slice() : new Uint8Array(n);
  const uses = keeps ? before.uses.slice() : new Uint32Array(n);
  const hits = keeps ? before.hits.slice() : new Uint32Array(n);
  for (const [layer, expert, ...state] of update.set) {
    const at = starts[layer] + expert;
    [resident[at], uses[at], hits[at]] = state;
  }
  return { n_experts: update.n_experts, n_matrices: update.n_matrices, used: update.used, starts, resident, uses, hits };
}

/** Cells by use, in all parts; states where there are no cells. */
function totals(snapshot) {
  const cells = snapshot.areas.filter((area) => area.part !== null);
  const counted = cells.length ? cells : snapshot.areas;
  const sum = { unit: cells.length ? "cells" : "states", n_cells: 0, running: 0, cached: 0, shared: 0, kept: 0 };
  const uses = snapshot.sets.members.map((seqs) => ({
    isRunning: seqs.some((seq) => snapshot.roles.get(seq)?.role === "running"),
    isKept: seqs.some((seq) => snapshot.roles.get(seq)?.role === "cached"),
    isShared: seqs.length > 1,
  }));
  for (const area of counted) {
    sum.n_cells += area.n_cells;
    for (const set of area.sets) {
      if (set === 0) continue;
      sum[uses[set].isRunning ? "running" : "cached"] += 1;
      if (uses[set].isShared) sum.shared += 1;
      if (uses[set].isKept) sum.kept += 1;
    }
  }
  return sum;
}

/** How many cells a sequence has in the first area, and how many of them with others. */
export function cellsOf(snapshot, seq) {
  snapshot.counts ??= countCells(snapshot);
  return snapshot.counts.get(seq) ?? { n_cells: 0, n_shared: 0 };
}

/** That of all sequences, in one pass. */
function countCells(snapshot) {
  const members = snapshot.sets.members;
  const ofSets = new Uint32Array(members.length);
  for (const set of snapshot.areas[0]?.sets ?? []) ofSets[set] += 1;
  const counts = new Map();
  ofSets.forEach((n, set) => {
    if (n === 0) return;
    for (const seq of members[set]) {
      const count = counts.get(seq) ?? { n_cells: 0, n_shared: 0 };
      count.n_cells += n;
      if (members[set].length > 1) count.n_shared += n;
      counts.set(seq, count);
    }
  });
  return counts;
}
