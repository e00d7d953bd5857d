//! Finds rows for the states of a plan's ubatches, without changing the memory.
//!
//! Invariant: a ubatch reads states that the ubatches before it left, and writes rows that no
//! sequence can be at when it begins. Knows nothing of edits.

use std::collections::HashMap;

use super::Recurrent;
use super::chain::{Chain, KeptState};
use crate::batch::UBatch;
use crate::ids::{CellIdx, Pos, SeqId};
use crate::memory::{NeededFor, NoStateRoom, Refusal};
use crate::memory::{StateGroup, StateStore};
use crate::seq_set::SeqSet;

/// Finds rows for the states of ubatches that are committed one after the other: the groups of each
/// ubatch, in the order in which they are computed.
pub(super) fn find_slots(
    memory: &Recurrent,
    ubatches: &[UBatch],
) -> Result<Vec<Vec<StateGroup>>, Refusal> {
    let mut slots = Vec::with_capacity(ubatches.len());
    // The memory as the ubatches so far will leave it.
    let mut shadow: Option<Recurrent> = None;
    for (step, ubatch) in ubatches.iter().enumerate() {
        let groups = groups_of(shadow.as_ref().unwrap_or(memory), ubatch, step)?;
        if step + 1 < ubatches.len() {
            let after = shadow.get_or_insert_with(|| memory.clone());
            extend(after, ubatch, &groups);
        }
        slots.push(groups);
    }
    Ok(slots)
}

/// Takes a ubatch into the chains of its sequences. Returns what those were.
pub(super) fn extend(
    memory: &mut Recurrent,
    ubatch: &UBatch,
    groups: &[StateGroup],
) -> Vec<(SeqId, Option<Chain>)> {
    let mut before: Vec<(SeqId, Option<Chain>)> = Vec::new();
    let mut met = SeqSet::EMPTY;
    let n_kept = memory.config.n_kept();
    for group in groups {
        let Some((set, first)) = group.rows.first().and_then(|&row| row_of(ubatch, row)) else {
            continue;
        };
        let old = set.first().and_then(|seq| memory.chain(seq)).cloned();
        let n_before = old
            .as_ref()
            .and_then(Chain::current)
            .map_or(0, |s| s.n_tokens);
        let new = group.stores.iter().map(|store| {
            let row = group.rows.get((store.n_rows - 1) as usize);
            let pos = row.and_then(|&row| row_of(ubatch, row)).map(|(_, pos)| pos);
            KeptState {
                row: store.to,
                pos: pos.unwrap_or(first),
                n_tokens: n_before + store.n_rows,
            }
        });
        let chain = Chain::extended(old.as_ref(), new, first, n_kept);
        for seq in &set {
            let was = memory.set_chain(seq, Some(chain.clone()));
            if !met.contains(seq) {
                met.insert(seq);
                before.push((seq, was));
            }
        }
    }
    before
}

fn row_of(ubatch: &UBatch, row: u32) -> Option<(SeqSet, Pos)> {
    let seqs = ubatch.seqs.get(row as usize)?;
    let pos = ubatch.positions.get(row as usize)?;
    Some((seqs.clone(), Pos(*pos)))
}

/// A group under way.
struct OpenGroup {
    set: SeqSet,
    rows: Vec<u32>,
    source: Source,
}

/// The origin of a group's first state.
#[derive(Clone, Copy)]
enum Source {
    Zeros,
    Row(CellIdx),
    /// The last state of the group with this number.
    Group(usize),
}

fn groups_of(memory: &Recurrent, ubatch: &UBatch, step: usize) -> Result<Vec<StateGroup>, Refusal> {
    let open = open_groups(memory, ubatch)?;
    let n_kept = memory.config.n_kept();
    let n_stores = |group: &OpenGroup| group.rows.len().min(n_kept);
    let n_wanted = open.iter().map(n_stores).sum::<usize>() as u32;
    let n_free = memory.free.n_free();
    let mut free = memory.free_rows();
    let mut groups: Vec<StateGroup> = Vec::with_capacity(open.len());
    for group in open {
        let n_rows = group.rows.len() as u32;
        let first = n_rows - n_stores(&group) as u32 + 1;
        let stores: Vec<StateStore> = (first..=n_rows)
            .zip(&mut free)
            .map(|(n_rows, to)| StateStore { n_rows, to })
            .collect();
        if stores.len() < n_stores(&group) {
            let n_rows = memory.config.n_rows;
            return Err(Refusal::NoStateRoom(NoStateRoom {
                needed_for: NeededFor::Ubatch(step),
                n_wanted,
                n_free,
                n_rows,
            }));
        }
        let source = match group.source {
            Source::Zeros => None,
            Source::Row(row) => Some(row),
            Source::Group(at) => groups
                .get(at)
                .and_then(|g| g.stores.last())
                .map(|store| store.to),
        };
        groups.push(StateGroup {
            rows: group.rows,
            source,
            stores,
        });
    }
    Ok(groups)
}

/// Rows by what state they continue, in the order of their first rows. Where sequences that were
/// together part, each goes on in a group of its own.
fn open_groups(memory: &Recurrent, ubatch: &UBatch) -> Result<Vec<OpenGroup>, Refusal> {
    let mut open: Vec<OpenGroup> = Vec::new();
    let mut group_of: HashMap<SeqId, usize> = HashMap::new();
    for (number, row) in (0u32..).zip(ubatch.rows()) {
        if let Some(beyond) = row.seqs.iter().find(|s| s.0 >= memory.config.n_seqs) {
            memory.check_seq(beyond)?;
        }
        let known = group_of.get(&row.first_seq).copied();
        if let Some(group) = known.and_then(|at| open.get_mut(at))
            && group.set == row.seqs
        {
            group.rows.push(number);
            continue;
        }
        let source = match known {
            Some(at) => Source::Group(at),
            None => {
                check_coupling(memory, ubatch, number, &row.seqs)?;
                let current = memory.chain(row.first_seq).and_then(Chain::current);
                current.map_or(Source::Zeros, |state| Source::Row(state.row))
            }
        };
        for seq in &row.seqs {
            group_of.insert(seq, open.len());
        }
        open.push(OpenGroup {
            set: row.seqs,
            rows: vec![number],
            source,
        });
    }
    Ok(open)
}

/// Sequences that share a token must be at the same state, since they share the next one.
fn check_coupling(
    memory: &Recurrent,
    ubatch: &UBatch,
    row: u32,
    set: &SeqSet,
) -> Result<(), Refusal> {
    let current = |seq| Some(memory.chain(seq)?.current()?.row);
    let Some(a) = set.first() else {
        return Ok(());
    };
    match set.iter().find(|&b| current(b) != current(a)) {
        None => Ok(()),
        Some(b) => {
            let entry = ubatch.entries.get(row as usize).copied().unwrap_or(row);
            Err(Refusal::CoupledStates { entry, a, b })
        }
    }
}
