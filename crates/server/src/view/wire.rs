//! A frame as JSON: whole for a viewer that has none, else the cells that changed.
//!
//! Invariant: a viewer that applies each update in order has the cells of the last frame. Text is
//! in an update only where the frame has excerpts.

use std::sync::Arc;

use cellar_engine::serve::{
    CachedText, DropReason, End, EventKind, Excerpt, ExpertFrame, Frame, MemoryLayout, Missed,
    Note, Priority, Reuse, RunningText, ServiceEvent, Update, WaitingText,
};
use kv_backend::{ExpertCell, ExpertMap};
use kv_core::memory::{OwnedRun, Streams};
use kv_core::{TokenId, Window};
use model_core::tokenizer::{SpecialPieces, Tokenizer};
use serde_json::{Value, json};

use crate::metrics::missed_name;

/// The last frame that a viewer was sent.
#[derive(Debug, Default)]
pub(super) struct Sent {
    frame: Option<Arc<Frame>>,
}

/// What does not change: parts, and the bytes of each layer.
pub(super) fn layout(layout: &MemoryLayout) -> Value {
    let parts = layout.parts.iter().map(|part| {
        json!({
            "part": part.part.as_usize(),
            "window": window(part.window),
            "own": part.streams == Streams::PerSequence,
        })
    });
    let rows = layout.plan.rows().iter().map(|rows| {
        json!({
            "layer": rows.layer.as_usize(),
            "part": rows.part.map(|part| part.as_usize()),
            "kind": rows.kind,
            "type": rows.kv_type.to_string(),
            "n_rows": rows.n_rows,
            "row_bytes": rows.row_bytes,
        })
    });
    json!({
        "n_seqs": layout.n_seqs,
        "parts": parts.collect::<Vec<_>>(),
        "rows": rows.collect::<Vec<_>>(),
        "bytes": layout.plan.bytes(),
    })
}

fn window(window: Window) -> Value {
    match window {
        Window::Full => json!("full"),
        Window::Sliding(n) => json!(format!("sliding window of {n}")),
        Window::Chunked(n) => json!(format!("chunks of {n}")),
        Window::Older { by, from: 0 } => json!(format!("all but the last {by}")),
        Window::Older { by, from } => {
            json!(format!("all but the first {from} and the last {by}"))
        }
        Window::Ends { first, last } => json!(format!("the first {first} and the last {last}")),
        Window::First { n, .. } => json!(format!("the first {n}")),
        other => json!(format!("{other:?}").to_lowercase()),
    }
}

impl Sent {
    /// An update for the viewer that has the frame before.
    pub(super) fn update(&mut self, update: &Update, tokenizer: &Tokenizer) -> Value {
        let Frame {
            occupancy,
            running,
            waiting,
            cached,
            counters,
            ..
        } = &*update.frame;
        let sent = self.frame.replace(Arc::clone(&update.frame));
        let before = sent.as_ref().map(|frame| &frame.occupancy);
        let none: &[OwnedRun] = &[];
        let parts = occupancy.parts.iter().enumerate().map(|(n, part)| {
            let before = before.and_then(|before| before.parts.get(n));
            let mut cells = changes(before.map_or(none, |part| &part.runs), &part.runs);
            cells["part"] = json!(part.part.as_usize());
            cells["n_cells"] = json!(part.n_cells);
            cells
        });
        let parts: Vec<Value> = parts.collect();
        let states = occupancy.states.as_ref().map(|states| {
            let before = before.and_then(|before| before.states.as_ref());
            let mut rows = changes(before.map_or(none, |states| &states.rows), &states.rows);
            rows["n_cells"] = json!(states.n_rows);
            rows
        });
        json!({
            "frame": update.frame.number,
            "at": millis(update.frame.at),
            "whole": before.is_none(),
            "parts": parts,
            "states": states,
            "experts": update.frame.experts.as_ref().map(|now| {
                experts(sent.as_ref().and_then(|sent| sent.experts.as_ref()), now)
            }),
            "running": each(running, |text| running_text(text, tokenizer)),
            "waiting": each(waiting, waiting_text),
            "cached": each(cached, |text| cached_text(text, tokenizer)),
            "counters": {
                "steps": counters.n_steps,
                "tokens": counters.n_tokens,
                "preemptions": counters.n_preemptions,
                "prompt_tokens": counters.n_prompt_tokens,
                "reused_tokens": counters.n_reused_tokens,
                "evicted": counters.n_evicted,
            },
            "events": each(&update.events, event),
            "lost": update.n_lost,
        })
    }
}

fn each<T>(all: &[T], one: impl Fn(&T) -> Value) -> Vec<Value> {
    all.iter().map(one).collect()
}

fn millis(time: std::time::Duration) -> Value {
    json!(time.as_millis() as u64)
}

/// Runs that are new, each as `[cell, cells, position, sequences…]`, and cells that became free, as
/// `[cell, cells]`.
fn changes(before: &[OwnedRun], now: &[OwnedRun]) -> Value {
    let mut old = before.iter().peekable();
    let mut set = Vec::new();
    for run in now {
        while old.next_if(|old| old.first < run.first).is_some() {}
        if old.peek().is_none_or(|old| *old != run) {
            let seqs = run.seqs.iter().map(|seq| seq.0);
            let head = [run.first.0, run.n_cells, run.pos.0];
            set.push(head.into_iter().chain(seqs).collect::<Vec<u32>>());
        }
    }
    let mut free: Vec<[u32; 2]> = Vec::new();
    let mut now = now.iter().peekable();
    for run in before {
        let (mut at, end) = (run.first.0, run.first.0 + run.n_cells);
        while at < end {
            while now.next_if(|new| new.first.0 + new.n_cells <= at).is_some() {}
            let Some(new) = now.peek() else {
                free.push([at, end - at]);
                break;
            };
            let used_from = new.first.0.max(at).min(end);
            if used_from > at {
                free.push([at, used_from - at]);
            }
            at = (new.first.0 + new.n_cells).min(end).max(used_from);
        }
    }
    json!({ "set": set, "free": free })
}

/// The experts that changed: each as `[layer, expert, matrices in memory, uses, hits]`.
fn experts(before: Option<&ExpertFrame>, now: &ExpertFrame) -> Value {
    let map = &now.map;
    // Another map is not compared: layers are added as graphs are compiled.
    let lengths = |map: &ExpertMap| map.iter().map(Vec::len).collect::<Vec<_>>();
    let before = before.map(|before| &before.map);
    let before = before.filter(|before| lengths(before) == lengths(map));
    let mut set: Vec<[u64; 5]> = Vec::new();
    for (layer, experts) in map.iter().enumerate() {
        let before = before.and_then(|before| before.get(layer));
        for (expert, cell) in experts.iter().enumerate() {
            if before.and_then(|before| before.get(expert)) != Some(cell) {
                let resident = u64::from(cell.resident);
                set.push([layer as u64, expert as u64, resident, cell.uses, cell.hits]);
            }
        }
    }
    let first = |layer: &Vec<ExpertCell>| layer.first().map_or(0, |cell| cell.matrices);
    json!({
        "whole": before.is_none(),
        "n_experts": lengths(map),
        "n_matrices": map.iter().map(first).collect::<Vec<_>>(),
        "set": set,
        "used": now.used,
    })
}

fn running_text(text: &RunningText, tokenizer: &Tokenizer) -> Value {
    json!({
        "request": text.request.0,
        "seq": text.seq.0,
        "n_prompt": text.n_prompt,
        "n_done": text.n_done,
        "n_tokens": text.n_tokens,
        "group": text.group.0,
        "text": excerpt(text.excerpt.as_ref(), tokenizer),
    })
}

fn waiting_text(text: &WaitingText) -> Value {
    json!({
        "request": text.request.0,
        "priority": match text.priority {
            Priority::Batch => "batch",
            Priority::Normal => "normal",
            Priority::Interactive => "interactive",
        },
        "n_tokens": text.n_tokens,
        "waited": millis(text.waited),
        "preempted": text.was_admitted,
    })
}

fn cached_text(text: &CachedText, tokenizer: &Tokenizer) -> Value {
    json!({
        "seq": text.seq.0,
        "request": text.request.0,
        "n_tokens": text.n_tokens,
        "hits": text.n_hits,
        "idle": millis(text.idle),
        "text": excerpt(text.excerpt.as_ref(), tokenizer),
    })
}

fn excerpt(excerpt: Option<&Excerpt>, tokenizer: &Tokenizer) -> Value {
    let Some(Excerpt {
        head,
        n_omitted,
        tail,
    }) = excerpt
    else {
        return Value::Null;
    };
    let decode = |tokens: &[TokenId]| {
        // They were computed, so they are in the vocabulary.
        let text = tokenizer.decode(tokens, SpecialPieces::Render);
        text.unwrap_or_default()
    };
    match n_omitted {
        0 => json!({"head": decode(&[head.as_slice(), tail].concat()), "omitted": 0, "tail": ""}),
        _ => json!({"head": decode(head), "omitted": n_omitted, "tail": decode(tail)}),
    }
}

fn event(event: &ServiceEvent) -> Value {
    let mut json = match event.kind {
        EventKind::Submitted {
            request,
            n_texts,
            n_prompt,
        } => json!({"kind": "submitted", "request": request.0, "n_texts": n_texts,
                    "n_tokens": n_prompt}),
        EventKind::Refused { request } => json!({"kind": "refused", "request": request.0}),
        EventKind::Admitted {
            request,
            seq,
            reuse,
        } => json!({"kind": "admitted", "request": request.0, "seq": seq.0,
                    "reuse": reused(&reuse)}),
        EventKind::Resumed {
            request,
            seq,
            reuse,
        } => json!({"kind": "resumed", "request": request.0, "seq": seq.0,
                    "reuse": reused(&reuse)}),
        EventKind::FirstToken { request } => json!({"kind": "first_token", "request": request.0}),
        EventKind::Preempted { request, n_tokens } => {
            json!({"kind": "preempted", "request": request.0, "n_tokens": n_tokens})
        }
        EventKind::Cache(note) => cache_event(note),
        EventKind::Ended {
            request,
            end,
            n_tokens,
        } => json!({"kind": "ended", "request": request.0, "n_tokens": n_tokens, "end": match end {
            End::Complete => "complete",
            End::ContextFull => "context_full",
            End::Cancelled => "cancelled",
            End::Failed => "failed",
        }}),
        _ => json!({"kind": "other"}),
    };
    json["n"] = json!(event.number);
    json["at"] = millis(event.at);
    json
}

fn cache_event(note: Note) -> Value {
    match note {
        Note::Shared {
            request,
            seq,
            from,
            n_tokens,
        } => json!({"kind": "shared", "request": request.0, "seq": seq.0, "from": from.0,
                    "n_tokens": n_tokens}),
        Note::Cached {
            seq,
            request,
            n_tokens,
        } => json!({"kind": "cached", "request": request.0, "seq": seq.0, "n_tokens": n_tokens}),
        Note::SwappedOut {
            request,
            n_tokens,
            n_bytes,
        } => json!({"kind": "swapped_out", "request": request.0, "n_tokens": n_tokens,
                    "bytes": n_bytes}),
        Note::Spilled {
            request,
            n_tokens,
            n_bytes,
        } => json!({"kind": "spilled", "request": request.0, "n_tokens": n_tokens,
                    "bytes": n_bytes}),
        Note::SwappedIn {
            request,
            n_tokens,
            n_bytes,
        } => json!({"kind": "swapped_in", "request": request.0, "n_tokens": n_tokens,
                    "bytes": n_bytes}),
        Note::Dropped {
            seq,
            n_tokens,
            n_hits,
            idle,
            why,
        } => json!({"kind": "dropped", "seq": seq.0, "n_tokens": n_tokens, "hits": n_hits,
        "idle": idle.0 / 1000, "why": match why {
            DropReason::Evicted => "evicted",
            DropReason::Covered => "covered",
            DropReason::Cleared => "cleared",
            DropReason::Broken => "broken",
        }}),
    }
}

/// How much was reused, and why not more.
fn reused(reuse: &Reuse) -> Value {
    let mut json =
        json!({"n_tokens": reuse.n_tokens, "why": reuse.missed.map(|_| missed_name(reuse.missed))});
    match reuse.missed {
        None | Some(Missed::Disabled | Missed::NeverSeen | Missed::TierMiss | Missed::TierDown) => {
        }
        Some(Missed::TierSlow { needed, would_take }) => {
            json["needed"] = json!(needed.0 / 1000);
            json["would_take"] = json!(would_take.0 / 1000);
        }
        Some(Missed::Differs { at }) => json["at"] = json!(at),
        Some(Missed::WindowForgotten { from, common }) => {
            json["from"] = json!(from.0);
            json["common"] = json!(common);
        }
        Some(Missed::StateGone { nearest, common }) => {
            json["nearest"] = json!(nearest);
            json["common"] = json!(common);
        }
        Some(Missed::Refused { common }) => json["common"] = json!(common),
        Some(Missed::Evicted { age, common }) => {
            json["age"] = json!(age.0 / 1000);
            json["common"] = json!(common);
        }
        Some(Missed::TooShort { n_prompt, least }) => {
            json["n_prompt"] = json!(n_prompt);
            json["least"] = json!(least);
        }
    }
    json
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::{CellIdx, Pos, SeqId, SeqSet};

    use super::*;

    fn run(first: u32, n_cells: u32, pos: u32, seqs: &[u32]) -> OwnedRun {
        OwnedRun {
            first: CellIdx(first),
            n_cells,
            pos: Pos(pos),
            seqs: seqs.iter().map(|&seq| SeqId(seq)).collect::<SeqSet>(),
        }
    }

    /// What a viewer makes of changes.
    fn apply(cells: &mut [Vec<u64>], changes: &Value) {
        let numbers = |run: &Value| -> Vec<u64> { serde_json::from_value(run.clone()).unwrap() };
        for free in changes["free"].as_array().unwrap() {
            let [first, n] = numbers(free)[..] else {
                unreachable!()
            };
            (first..first + n).for_each(|at| cells[at as usize].clear());
        }
        for run in changes["set"].as_array().unwrap() {
            let run = numbers(run);
            for i in 0..run[1] {
                cells[(run[0] + i) as usize] = [&[run[2] + i], &run[3..]].concat();
            }
        }
    }

    fn all(runs: &[OwnedRun]) -> Vec<Vec<u64>> {
        let mut cells = vec![Vec::new(); 32];
        apply(&mut cells, &changes(&[], runs));
        cells
    }

    #[test]
    fn changes_turn_one_occupancy_into_another() {
        let frames = [
            vec![],
            vec![run(0, 8, 0, &[1]), run(8, 4, 0, &[2])],
            vec![
                run(0, 6, 0, &[1, 2]),
                run(6, 3, 6, &[1]),
                run(9, 3, 1, &[2]),
                run(20, 2, 0, &[3]),
            ],
            vec![run(3, 1, 0, &[4]), run(7, 10, 7, &[1])],
            vec![
                run(2, 3, 0, &[4]),
                run(6, 1, 0, &[5]),
                run(8, 1, 8, &[1]),
                run(31, 1, 0, &[1]),
            ],
            vec![run(2, 3, 0, &[4]), run(8, 1, 8, &[1]), run(31, 1, 0, &[1])],
        ];
        for before in &frames {
            for now in &frames {
                let mut cells = all(before);
                let changes = changes(before, now);
                apply(&mut cells, &changes);
                assert_eq!(cells, all(now), "{before:?} {now:?} {changes}");
                if before == now {
                    assert_eq!(changes, json!({"set": [], "free": []}));
                }
            }
        }
    }
}
