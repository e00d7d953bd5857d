//! Restoring saved states into a recurrent memory with any number of snapshots.
//!
//! Sequences that shared a state share it again. Where fewer snapshots are kept here, the oldest
//! are left out. Invariant: checked whole before anything changes. Knows nothing of bytes.

use std::collections::BTreeMap;

use super::chain::Chain;
use super::{KeptState, Recurrent};
use crate::ids::CellIdx;
use crate::memory::snapshot::{RestoreInto, Snapshot, StateHistory};
use crate::memory::{NeededFor, NoStateRoom, Refusal, Restoration, StateWrite, TargetRows};
use crate::seq_set::SeqSet;

/// The memory as it would be, and what would be left to do.
pub(super) fn after(
    memory: &Recurrent,
    snapshot: &Snapshot,
    into: RestoreInto,
) -> Result<(Recurrent, Restoration), Refusal> {
    let n_rows = memory.config.n_rows;
    if let RestoreInto::Behind { .. } = into {
        let operation = "restore a range of a sequence: only full attention can";
        return Err(Refusal::Unsupported { operation });
    }
    let replaced = into.replaced(snapshot, memory.config.n_seqs)?;
    let saved = snapshot.states().ok_or(Refusal::NoStates)?;
    let mut after = memory.clone();
    for seq in &replaced {
        after.set_chain(seq, None);
    }
    let n_free = after.free.n_free();
    let is_free = |row: &CellIdx| memory.free.is_free(row.0);
    // What is in use until it is replaced comes last.
    let replaced: Vec<CellIdx> = after.free_rows().filter(|row| !is_free(row)).collect();
    let mut free = memory.free_rows().chain(replaced);
    let mut restored = Restoration::default();
    let mut rows: BTreeMap<CellIdx, Option<CellIdx>> = BTreeMap::new();
    for chain in saved {
        let Some(seq) = into.seq(chain.seq) else {
            continue;
        };
        let n_old = chain.states.len().saturating_sub(memory.config.n_kept());
        let kept = chain.states.get(n_old..).unwrap_or_default();
        let mut states = Vec::with_capacity(kept.len());
        for state in kept {
            // Without a row where there is none left: counted below.
            let row = *rows.entry(state.row).or_insert_with(|| free.next());
            let row = row.unwrap_or(state.row);
            states.push(KeptState { row, ..*state });
        }
        restored.n_tokens += states.last().map_or(0, |state| state.n_tokens);
        let n_kept = states.len();
        let chain = Chain::extended(None, states.iter().copied(), chain.first, n_kept);
        after.set_chain(seq, Some(chain));
    }
    if rows.values().any(Option::is_none) {
        let n_wanted = u32::try_from(rows.len()).unwrap_or(u32::MAX);
        return Err(Refusal::NoStateRoom(NoStateRoom {
            needed_for: NeededFor::Restore,
            n_wanted,
            n_free,
            n_rows,
        }));
    }
    // What the rows held is gone, as if a step had stored there.
    after.n_steps += 1;
    for (from, to) in rows {
        let Some(to) = to else { continue };
        if !is_free(&to) {
            restored.rows_taken = TargetRows::InUse;
        }
        after.note_stored(to);
        restored.state_writes.push(StateWrite { from, to });
    }
    Ok((after, restored))
}

/// The states of these sequences.
pub(super) fn histories(memory: &Recurrent, seqs: &SeqSet) -> Vec<StateHistory> {
    let chains = seqs.iter().filter_map(|seq| {
        let chain = memory.chain(seq)?;
        Some(StateHistory {
            seq,
            first: chain.positions().first,
            states: chain.states().to_vec(),
        })
    });
    chains.collect()
}
