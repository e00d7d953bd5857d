//! The memory of contexts: functions that edit sequences.
//!
//! Invariant: an edit is done whole, or refused with a log line and nothing changed. Positions
//! below 0 are the ends that `llama.h` gives them.

use cellar_engine::with_reasons;
use kv_core::memory::{Division, Edit, Memory, PosChange, Seqs};
use kv_core::{Pos, PosDelta, PosRange, SeqId};

use crate::context::{Context, context};
use crate::ffi::{Handle, c_api};
use crate::log;
use crate::meta::has_states;

/// The positions from `p0` to before `p1`.
fn range(p0: i32, p1: i32) -> PosRange {
    let first = Pos(u32::try_from(p0).unwrap_or(0));
    match u32::try_from(p1) {
        Ok(end) => PosRange::from(first..Pos(end)),
        Err(_) => PosRange::from(first..),
    }
}

/// A sequence that the memory has, or a line.
fn seq(name: &str, context: &Context, seq: i32) -> Option<SeqId> {
    let n_seqs = context.lock().engine.memory().n_seqs();
    let id = u32::try_from(seq).ok().filter(|&seq| seq < n_seqs);
    if id.is_none() {
        log::error(&format!(
            "{name}: there is no sequence {seq}: the memory has {n_seqs}"
        ));
    }
    id.map(SeqId)
}

/// Does an edit; false and a line where it is refused.
fn edit(name: &str, context: &Context, edit: Edit) -> bool {
    let result = context.lock().engine.edit(edit);
    let done = result.map_err(|error| with_reasons(&error));
    log::or_line(name, done).is_some()
}

/// A memory, or `None`: a model without one has the null pointer, which is no mistake.
fn memory<'a>(name: &str, handle: Handle<Context>) -> Option<&'a Context> {
    if handle.is_null() {
        return None;
    }
    context(name, handle)
}

fn moved(name: &str, context: &Context, seq: SeqId, range: PosRange, change: PosChange) {
    edit(name, context, Edit::Reposition { seq, range, change });
}

c_api! {
    fn llama_memory_clear(handle: Handle<Context>, _data: bool); {
        if let Some(context) = memory("llama_memory_clear", handle) {
            context.lock().engine.clear();
        }
    }

    fn llama_memory_seq_rm(handle: Handle<Context>, seq_id: i32, p0: i32, p1: i32) -> bool = false; {
        let name = "llama_memory_seq_rm";
        // Nothing is remembered, so all of it is removed.
        let Some(context) = memory(name, handle) else {
            return handle.is_null();
        };
        let range = range(p0, p1);
        let seqs = match seq_id {
            ..0 => Seqs::All,
            _ => match seq(name, context, seq_id) {
                Some(seq) => Seqs::One(seq),
                None => return false,
            },
        };
        // A refusal is an answer here: a state that cannot be cut.
        range.is_empty() || context.lock().engine.remove(seqs, range).is_ok()
    }

    fn llama_memory_seq_cp(handle: Handle<Context>, from: i32, to: i32, p0: i32, p1: i32); {
        let name = "llama_memory_seq_cp";
        let Some(context) = memory(name, handle) else {
            return;
        };
        let (Some(from), Some(to)) = (seq(name, context, from), seq(name, context, to)) else {
            return;
        };
        if from == to {
            return;
        }
        for range in copied(context, from, to, range(p0, p1)) {
            if !edit(name, context, Edit::Copy { from, to, range }) {
                return;
            }
        }
    }

    fn llama_memory_seq_keep(handle: Handle<Context>, seq_id: i32); {
        let name = "llama_memory_seq_keep";
        if let Some(context) = memory(name, handle)
            && let Some(seq) = seq(name, context, seq_id)
        {
            edit(name, context, Edit::KeepOnly(seq));
        }
    }

    fn llama_memory_seq_add(handle: Handle<Context>, seq_id: i32, p0: i32, p1: i32, delta: i32); {
        let name = "llama_memory_seq_add";
        let Some(context) = memory(name, handle) else {
            return;
        };
        let Some(seq) = seq(name, context, seq_id) else {
            return;
        };
        let mut range = range(p0, p1);
        if delta == 0 || range.is_empty() {
            return;
        }
        // Tokens that would get before the first position are lost.
        let lost = range.intersection(range_before(delta));
        if !lost.is_empty() {
            let seqs = Seqs::One(seq);
            if !edit(name, context, Edit::Remove { seqs, range: lost }) {
                return;
            }
            range.first = lost.last.next();
        }
        if !range.is_empty() {
            moved(name, context, seq, range, PosChange::Shift(PosDelta(delta)));
        }
    }

    fn llama_memory_seq_div(handle: Handle<Context>, seq_id: i32, p0: i32, p1: i32, d: i32); {
        let name = "llama_memory_seq_div";
        let Some(context) = memory(name, handle) else {
            return;
        };
        let Some(seq) = seq(name, context, seq_id) else {
            return;
        };
        match u32::try_from(d) {
            Ok(1) => {}
            Ok(by) if by > 1 => {
                let change = PosChange::Divide(Division::by(by));
                moved(name, context, seq, range(p0, p1), change);
            }
            _ => log::error(&format!("{name}: positions cannot be divided by {d}")),
        }
    }

    fn llama_memory_seq_pos_min(handle: Handle<Context>, seq_id: i32) -> i32 = -1; {
        let Some(has) = positions("llama_memory_seq_pos_min", handle, seq_id) else {
            return -1;
        };
        // A state is of one position: programs cannot go back to those before it.
        let is_state = handle.get().is_some_and(|context| has_states(&context.shared)[0]);
        if is_state { has.last.0 as i32 } else { has.first.0 as i32 }
    }

    fn llama_memory_seq_pos_max(handle: Handle<Context>, seq_id: i32) -> i32 = -1; {
        positions("llama_memory_seq_pos_max", handle, seq_id).map_or(-1, |has| has.last.0 as i32)
    }

    fn llama_memory_can_shift(handle: Handle<Context>) -> bool = false; {
        let context = memory("llama_memory_can_shift", handle);
        context.is_some_and(|context| context.lock().engine.check_shift().is_ok())
    }
}

/// The positions of a copy onto a sequence. Where it has tokens, those stay that have no
/// counterpart at their positions; a state, or a sequence with cells of its own, is replaced whole.
fn copied(context: &Context, from: SeqId, to: SeqId, range: PosRange) -> Vec<PosRange> {
    let state = context.lock();
    let memory = state.engine.memory();
    let is_shared = context.sizes.n_ctx_seq == context.sizes.n_ctx;
    if !is_shared || has_states(&context.shared)[0] || memory.positions(to).is_none() {
        return vec![range];
    }
    let mut ranges = memory.token_ranges(from);
    ranges.sort_by_key(|range| range.first);
    let mut merged: Vec<PosRange> = Vec::new();
    for range in ranges.into_iter().map(|held| held.intersection(range)) {
        match merged.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if range.first <= last.last.next() => *last = last.hull(range),
            _ => merged.push(range),
        }
    }
    merged
}

/// The positions that `delta` takes below 0.
fn range_before(delta: i32) -> PosRange {
    if delta < 0 {
        PosRange::from(Pos(0)..Pos(delta.unsigned_abs()))
    } else {
        PosRange::EMPTY
    }
}

fn positions(name: &str, handle: Handle<Context>, seq_id: i32) -> Option<PosRange> {
    let context = memory(name, handle)?;
    let seq = seq(name, context, seq_id)?;
    let state = context.lock();
    state.engine.memory().positions(seq)
}
