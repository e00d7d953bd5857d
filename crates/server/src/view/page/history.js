// The last snapshots, to step back through, and what is known of each request.

const MOST_SNAPSHOTS = 600;
const MOST_BYTES = 64 << 20;
const BYTES_PER_CELL = 6;
const BYTES_PER_EXPERT = 9;
const MOST_EVENTS = 400;
const MOST_REQUESTS = 400;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.snapshots = [];
    this.events = [];
    this.requests = new Map();
  }

  push(snapshot) {
    this.snapshots.push(snapshot);
    const ofExperts = (snapshot.experts?.resident.length ?? 0) * BYTES_PER_EXPERT;
    const bytes = snapshot.areas.reduce((sum, area) => sum + area.n_cells * BYTES_PER_CELL, 1 + ofExperts);
    const most = Math.max(20, Math.min(MOST_SNAPSHOTS, Math.floor(MOST_BYTES / bytes)));
    const n_gone = Math.max(0, this.snapshots.length - most);
    this.snapshots.splice(0, n_gone);
    for (const event of snapshot.events) this.note(event);
    this.events.splice(0, this.events.length - MOST_EVENTS);
    return n_gone;
  }

  note(event) {
    this.events.push(event);
    if (event.request === undefined || event.kind === "dropped") return;
    if (!this.requests.has(event.request)) {
      this.requests.set(event.request, []);
      if (this.requests.size > MOST_REQUESTS) {
        this.requests.delete(this.requests.keys().next().value);
      }
    }
    this.requests.get(event.request).push(event);
  }

  /** The first event of a kind of a request. */
  find(request, ...kinds) {
    return this.requests.get(request)?.find((event) => kinds.includes(event.kind));
  }

  /** Tokens that were computed per second up to the snapshot of this index. */
  rate(index, of = (snapshot) => snapshot.counters.tokens) {
    const now = this.snapshots[index];
    if (!now) return 0;
    let first = index;
    while (first > 0 && now.at - this.snapshots[first - 1].at <= 2000) first -= 1;
    const then = this.snapshots[first];
    const before = of(then);
    const time = now.at - then.at;
    return time > 0 && before !== undefined ? (1000 * (of(now) - before)) / time : 0;
  }
}
