//! Worked examples of visibility, windows and streams, by the rules and defects they are about.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::memory::{Memory, MemoryInputs, Refusal, Seqs, Streams, Unified, invariants};
use kv_core::{Causality, CellIdx, Pos, PosRange, SeqId, Window};

use crate::support::next_tokens as batch;

fn memory(n_cells: u32, window: Window, streams: Streams) -> Unified {
    crate::support::part(0, n_cells, window, streams)
}

fn decode(memory: &mut Unified, sets: &[(&[u32], u32)], n_ubatch: u32) -> MemoryInputs {
    let batch = batch(memory, sets);
    let mut inputs = MemoryInputs::default();
    let mut steps = memory.begin(&batch, n_ubatch).unwrap();
    while steps.next(&mut inputs).is_some() {}
    invariants::check(memory).unwrap();
    inputs
}

/// The first cells that a query of `seq` at `pos` sees, by the memory's runs and the window.
fn sees(
    memory: &Unified,
    (seq, pos): (u32, u32),
    (window, causality): (Window, Causality),
) -> String {
    let limits = window.visible_keys(Pos(pos), causality);
    let clipped = memory
        .runs(SeqId(seq))
        .iter()
        .filter_map(|run| run.clip(limits));
    let cells: Vec<CellIdx> = clipped
        .flat_map(|run| run.iter())
        .map(|(cell, _)| cell)
        .collect();
    let draw = |cell| {
        if cells.contains(&CellIdx(cell)) {
            'x'
        } else {
            '.'
        }
    };
    (0..5).map(draw).collect()
}

#[test]
fn k44_the_worked_masks() {
    use Causality::{Causal, NonCausal};
    let mut m = memory(5, Window::Full, Streams::Shared);
    decode(&mut m, &[(&[0], 2), (&[1], 1), (&[0], 1)], 8);
    // A token of both: that of sequence 0 at position 2.
    let copied = m
        .copy(SeqId(0), SeqId(1), PosRange::from(Pos(2)..))
        .unwrap();
    assert!(copied.row_copies.is_empty());
    let cases = [
        ((0, 2), (Window::Full, Causal), "xx.x."),
        ((0, 1), (Window::Full, Causal), "xx..."),
        ((0, 1), (Window::Full, NonCausal), "xx.x."),
        ((1, 2), (Window::Full, Causal), "..xx."),
        ((0, 2), (Window::Sliding(2), Causal), ".x.x."),
        ((0, 2), (Window::Sliding(1), Causal), "...x."),
        ((0, 2), (Window::Chunked(2), Causal), "...x."),
        ((0, 0), (Window::Symmetric(2), NonCausal), "xx..."),
    ];
    for (query, rule, wanted) in cases {
        assert_eq!(sees(&m, query, rule), wanted, "{query:?}, {rule:?}");
    }
}

#[test]
fn w6_w13_returning_to_where_the_window_still_reaches() {
    let n_swa = 1024;
    let tokens = |n| -> Unified {
        let mut m = memory(1536, Window::Sliding(n_swa), Streams::Shared);
        decode(&mut m, &[(&[0], n)], 512);
        m
    };
    let mut m = tokens(8000);
    let first = m.positions(SeqId(0)).unwrap().first;
    assert!((6464..=6464 + 512).contains(&first.0), "{first}");
    let from = |n: u32| PosRange::from(Pos(n)..);
    // The window of 7000 begins at 5977, which is recycled.
    let before = m.clone();
    let refused = m.remove(Seqs::One(SeqId(0)), from(7000)).unwrap_err();
    let Refusal::WindowForgotten(forgotten) = refused else {
        panic!("{refused}");
    };
    assert_eq!(
        (forgotten.next, forgotten.needed_from),
        (Pos(7000), Pos(5977))
    );
    assert_eq!(m, before);
    // That of 7900 at 6877, which is there where the last ubatch recycled no more than it had to.
    let reachable = first.0 + n_swa - 1;
    assert!(reachable <= 7900 + 512, "{reachable}");
    m.remove(Seqs::One(SeqId(0)), from(reachable)).unwrap();
    assert_eq!(m.positions(SeqId(0)).unwrap().last, Pos(reachable - 1));
    // A prompt shorter than the window is all there: it can be cut anywhere.
    let mut short = tokens(500);
    short.remove(Seqs::One(SeqId(0)), from(1)).unwrap();
    assert_eq!(
        short.positions(SeqId(0)),
        Some(PosRange::new(Pos(0), Pos(0)))
    );
}

#[test]
fn d11_a_plan_leaves_the_heads_of_all_streams_alone() {
    let mut m = memory(8, Window::Full, Streams::PerSequence);
    decode(&mut m, &[(&[0], 1), (&[1], 3), (&[2], 5)], 64);
    let before = m.clone();
    for sets in [
        &[(&[1][..], 2), (&[2], 3)][..],
        &[(&[2], 4)],
        &[(&[2], 1), (&[0], 7)],
    ] {
        for n_ubatch in [1, 2, 64] {
            let planned = m.plan(&batch(&m, sets), n_ubatch).is_ok();
            assert_eq!(planned, sets != [(&[2][..], 4)]);
            assert_eq!(m, before);
        }
    }
    let inputs = decode(&mut m, &[(&[2], 1), (&[0], 1), (&[1], 1)], 64);
    let cells: Vec<u32> = inputs.parts[0].cells.iter().map(|c| c.0).collect();
    assert_eq!(cells, [21, 1, 11]);
}

#[test]
fn d21_d43_a_row_is_shown_its_own_sequence_s_runs_and_nothing_else() {
    let mut m = memory(4096, Window::Full, Streams::Shared);
    decode(&mut m, &[(&[0], 1500), (&[1], 10), (&[0], 1500)], 512);
    let inputs = decode(&mut m, &[(&[1], 1)], 512);
    let visibility = &inputs.parts[0].visibility;
    let [group] = &visibility.groups[..] else {
        panic!("{visibility:?}");
    };
    // Eleven cells of three thousand, and one run for them: they had a block to themselves.
    let n_cells: u32 = group.runs.iter().map(|run| run.len).sum();
    assert_eq!((n_cells, group.runs.len()), (11, 1));
    // Rows of one prompt share what they see: intervals, not rows of a mask.
    let inputs = decode(&mut m, &[(&[1], 500)], 512);
    let [group] = &inputs.parts[0].visibility.groups[..] else {
        panic!("one group");
    };
    assert_eq!((group.runs.len(), group.limits.len()), (2, 500));
}

#[test]
fn d44_a_text_is_one_run_however_long_it_gets() {
    let mut m = memory(8192, Window::Full, Streams::Shared);
    for _ in 0..15 {
        decode(&mut m, &[(&[0], 500)], 512);
        assert_eq!(m.runs(SeqId(0)).len(), 1);
    }
    assert_eq!(m.positions(SeqId(0)).unwrap().last, Pos(7499));
}
