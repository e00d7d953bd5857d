// Numbers and reasons in words.

const COUNT = new Intl.NumberFormat("en");

export const count = (n) => COUNT.format(n);

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

export function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (n >= 1024 && unit < units.length - 1) {
    n /= 1024;
    unit += 1;
  }
  return `${n >= 100 || unit === 0 ? Math.round(n) : n.toFixed(1)} ${units[unit]}`;
}

export function time(ms) {
  if (ms < 1000) return `${Math.round(ms)} ms`;
  if (ms < 60_000) return `${(ms / 1000).toFixed(1)} s`;
  if (ms < 3_600_000) return `${Math.floor(ms / 60_000)} min ${Math.round((ms % 60_000) / 1000)} s`;
  return `${(ms / 3_600_000).toFixed(1)} h`;
}

export const percent = (part, whole) => (whole > 0 ? `${Math.round((100 * part) / whole)} %` : "–");

/** Why not more of a prompt was reused. */
export function missed(reuse) {
  const common = () => plural(reuse.common, "token");
  switch (reuse.why) {
    case null:
    case undefined:
      return reuse.n_tokens > 0 ? "everything cached that begins so was taken" : "";
    case "differs":
      return `differs from what is cached at token ${count(reuse.at)}`;
    case "never_seen":
      return "nothing that is cached begins so";
    case "tier_miss":
      return "nothing that is cached or stored begins so";
    case "tier_slow":
      return `computing it takes ${time(reuse.needed)}, fetching it ${time(reuse.would_take)}`;
    case "tier_down":
      return "the store of prefixes gave no answer";
    case "evicted":
      return `it was cached and evicted ${time(reuse.age)} ago (${common()} in common)`;
    case "window_forgotten":
      return `${common()} in common, but the window has forgotten position ${count(reuse.from)}`;
    case "state_gone":
      return `${common()} in common, but the nearest state that is kept is after ${count(reuse.nearest)}`;
    case "too_short":
      return `${plural(reuse.n_prompt, "token")}: prompts this short are computed again`;
    case "disabled":
      return "prefixes are not cached for it";
    default:
      return `${common()} in common, but the memory refused`;
  }
}

/** The same in two or three words. */
export function missedShortly(reuse) {
  switch (reuse.why) {
    case "differs":
      return `differs at token ${count(reuse.at)}`;
    case "never_seen":
      return "never seen";
    case "tier_miss":
      return "not stored";
    case "tier_slow":
      return "computed sooner";
    case "tier_down":
      return "store is down";
    case "evicted":
      return `evicted ${time(reuse.age)} before`;
    case "window_forgotten":
      return "window has forgotten more";
    case "state_gone":
      return "state is not kept";
    case "too_short":
      return "too short";
    case "disabled":
      return "not cached";
    default:
      return "refused";
  }
}

/** An event as a short sentence without its subject. */
export function happened(event) {
  switch (event.kind) {
    case "submitted":
      return `came with ${plural(event.n_tokens, "token")}` + (event.n_texts > 1 ? `, for ${event.n_texts} texts` : "");
    case "refused":
      return "was refused";
    case "admitted":
      return event.reuse.n_tokens > 0
        ? `began, ${plural(event.reuse.n_tokens, "token")} reused` + reason(event.reuse)
        : `began, nothing reused${reason(event.reuse)}`;
    case "resumed":
      return `goes on, ${plural(event.reuse.n_tokens, "token")} reused`;
    case "shared":
      return event.from === event.seq
        ? `took over ${plural(event.n_tokens, "cell")} of a cached prefix`
        : `shares ${plural(event.n_tokens, "cell")}`;
    case "first_token":
      return "has its first token";
    case "preempted":
      return `gave its place back and waits, ${plural(event.n_tokens, "token")} to take up again`;
    case "swapped_out":
      return `${plural(event.n_tokens, "token")} went to the host's memory`;
    case "spilled":
      return `${plural(event.n_tokens, "token")} went on to the disk`;
    case "swapped_in":
      return `${plural(event.n_tokens, "saved token")} came back`;
    case "cached":
      return `left ${plural(event.n_tokens, "token")} in the cache`;
    case "dropped":
      return `cached prefix of ${plural(event.n_tokens, "token")} ${dropped(event)}`;
    case "ended":
      return `${ENDS[event.end]} after ${plural(event.n_tokens, "token")}`;
    default:
      return "changed";
  }
}

const ENDS = {
  complete: "is complete",
  context_full: "filled its context",
  cancelled: "was cancelled",
  failed: "failed",
};

function reason(reuse) {
  const why = missed(reuse);
  return why ? `: ${why}` : "";
}

function dropped(event) {
  const used = event.hits ? `, used ${plural(event.hits, "time")}` : ", never used";
  switch (event.why) {
    case "evicted":
      return `evicted for others${used}, idle for ${time(event.idle)}`;
    case "covered":
      return "replaced by a longer one";
    case "broken":
      return "lost with a step that failed";
    default:
      return "cleared";
  }
}
