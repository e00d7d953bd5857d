//! Who has which cells and states: `Composite::owned_rows`, for weighing what a removal frees, and
//! `Memory::occupancy`, for a live view.

#![allow(clippy::unwrap_used)] // a test

use kv_core::cells::OwnedRun;
use kv_core::memory::{
    Composite, Memory, MemoryInputs, OwnedRows, PartOccupancy, Recurrent, RecurrentConfig, RowsOf,
    StateOccupancy, Streams,
};
use kv_core::{CellIdx, PartIdx, Pos, PosRange, SeqId, SeqSet, Window};

use crate::support::{N_SEQS, next_tokens, part};

fn set(ids: &[u32]) -> SeqSet {
    ids.iter().copied().map(SeqId).collect()
}

/// A full part, one with a window of 3 tokens, and states. Sequences 0 and 1 share five tokens;
/// then sequence 0 gets two more, and sequence 2 one of its own.
fn filled(streams: Streams) -> Composite {
    let parts = vec![
        part(0, 16, Window::Full, streams),
        part(1, 16, Window::Sliding(3), streams),
    ];
    let states = Recurrent::new(RecurrentConfig::new(N_SEQS)).unwrap();
    let mut memory = Composite::from_parts(parts, Some(states)).unwrap();
    let prefix: &[(&[u32], u32)] = match streams {
        Streams::Shared => &[(&[0, 1], 5)],
        Streams::PerSequence => &[(&[0], 5), (&[1], 5)],
    };
    for sets in [prefix, &[(&[0], 2), (&[2], 1)]] {
        let batch = next_tokens(&memory, sets);
        let mut inputs = MemoryInputs::default();
        let mut steps = memory.begin(&batch, 16).unwrap();
        while steps.next(&mut inputs).is_some() {}
    }
    memory
}

/// The rows of each kind by owners, sorted.
fn rows(memory: &Composite, of: RowsOf) -> Vec<(String, u32)> {
    let owned = memory.owned_rows().into_iter();
    let mut rows: Vec<_> = owned
        .filter(|owned| owned.rows == of)
        .map(|OwnedRows { seqs, n_rows, .. }| (seqs.to_string(), n_rows))
        .collect();
    rows.sort();
    rows
}

fn expected(rows: &[(&str, u32)]) -> Vec<(String, u32)> {
    let owned = rows.iter().map(|&(seqs, n)| (seqs.to_owned(), n));
    owned.collect()
}

#[test]
fn rows_are_counted_once_by_who_shares_them() {
    let memory = filled(Streams::Shared);
    let full = rows(&memory, RowsOf::Part(PartIdx(0)));
    assert_eq!(full, expected(&[("{0,1}", 5), ("{0}", 2), ("{2}", 1)]));
    // A window hides all but three of the five.
    let sliding = rows(&memory, RowsOf::Part(PartIdx(1)));
    assert_eq!(sliding, expected(&[("{0,1}", 3), ("{0}", 2), ("{2}", 1)]));
    let states = rows(&memory, RowsOf::States);
    assert_eq!(states, expected(&[("{0}", 1), ("{1}", 1), ("{2}", 1)]));
}

#[test]
fn sequences_in_streams_of_their_own_share_no_rows() {
    let memory = filled(Streams::PerSequence);
    let full = rows(&memory, RowsOf::Part(PartIdx(0)));
    assert_eq!(full, expected(&[("{0}", 7), ("{1}", 5), ("{2}", 1)]));
}

#[test]
fn a_state_that_two_sequences_share_is_one_row() {
    let mut memory = filled(Streams::Shared);
    let copied = memory.copy(SeqId(2), SeqId(1), PosRange::ALL).unwrap();
    assert_eq!(copied.n_tokens, 1);
    let states = rows(&memory, RowsOf::States);
    assert_eq!(states, expected(&[("{0}", 1), ("{1,2}", 1)]));
}

#[test]
fn occupancy_shows_runs_of_cells_with_the_same_owners() {
    let memory = filled(Streams::Shared);
    let shown = memory.occupancy().unwrap();
    let run = |first, n_cells, pos, seqs: &[u32]| OwnedRun {
        first: CellIdx(first),
        n_cells,
        pos: Pos(pos),
        seqs: set(seqs),
    };
    let full = &shown.parts[0];
    assert_eq!((full.part, full.n_cells), (PartIdx(0), 16));
    assert_eq!((full.n_used(), full.n_shared()), (8, 5));
    assert_eq!(full.runs[0], run(0, 5, 0, &[0, 1]));
    assert_eq!(full.runs.len(), 3, "{:?}", full.runs);
    let PartOccupancy { part, .. } = shown.parts[1];
    assert_eq!((part, shown.parts.len()), (PartIdx(1), 2));
    // Parts and states tell the same by themselves.
    let alone = memory.parts()[0].occupancy().unwrap();
    assert_eq!(alone.parts, shown.parts[..1]);
    let alone = memory.states().unwrap().occupancy().unwrap();
    assert_eq!(alone.states, shown.states);
    let StateOccupancy { n_rows, rows } = shown.states.unwrap();
    assert_eq!(n_rows, memory.n_rows().states as u32);
    let owners: Vec<_> = rows.iter().map(|row| (row.seqs.clone(), row.pos)).collect();
    assert_eq!(owners.len(), 3);
    assert!(rows.iter().all(|row| row.n_cells == 1));
    for (seq, last) in [(0, 6), (1, 4), (2, 0)] {
        assert!(owners.contains(&(set(&[seq]), Pos(last))), "{owners:?}");
    }
}
