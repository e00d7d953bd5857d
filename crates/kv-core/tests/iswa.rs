//! Worked examples of memories with several parts: what is placed together, what is remembered
//! after a window slid, and what is refused in both parts because one refuses it.

#![allow(clippy::unwrap_used)] // a test

mod hybrids;

use kv_core::{
    Causality, CellIdx, LayerIdx, PartIdx, Pos, PosDelta, PosRange, SeqId, TokenId, Window,
    batch::{Batch, BatchRules, SplitPolicy, validate},
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::{
        Composite, Division, Edit, Memory, MemoryConfig, MemoryConfigError, MemoryInputs,
        Recurrent, RecurrentConfig, Refusal, RestoreInto, RowCopy, RowShift, RowsWritten, Seqs,
        Streams, SwaSize, Unified, UnifiedConfig, WindowForgotten, invariants,
    },
};
use kv_rows::{KvType, RowLayout};

use crate::support::{N_SEQS, next_tokens, part};

/// Part 0 sees everything and has `n_cells[0]` cells, part 1 sees `window` and has `n_cells[1]`.
fn iswa(n_cells: [u32; 2], window: Window, streams: Streams) -> Composite {
    let full = part(0, n_cells[0], Window::Full, streams);
    let windowed = part(1, n_cells[1], window, streams);
    Composite::from_parts(vec![full, windowed], None).unwrap()
}

fn shared(n_cells: [u32; 2], window: Window) -> Composite {
    iswa(n_cells, window, Streams::Shared)
}

/// Evaluates the next `n` tokens of each of these sequence sets; the cells in each part.
fn decode<M: Memory>(memory: &mut M, sets: &[(&[u32], u32)]) -> Result<Vec<Vec<u32>>, Refusal> {
    let batch = next_tokens(memory, sets);
    let mut inputs = MemoryInputs::default();
    let mut cells: Vec<Vec<u32>> = Vec::new();
    let mut steps = memory.begin(&batch, 64)?;
    while steps.next(&mut inputs).is_some() {
        cells.resize(inputs.parts.len(), Vec::new());
        for (cells, part) in cells.iter_mut().zip(&inputs.parts) {
            cells.extend(part.cells.iter().map(|c| c.0));
        }
    }
    Ok(cells)
}

fn has(memory: &impl Memory, seq: u32) -> Option<(u32, u32)> {
    let has = memory.positions(SeqId(seq))?;
    Some((has.first.0, has.last.0))
}

fn remove(
    memory: &mut impl Memory,
    seq: u32,
    range: impl Into<PosRange>,
) -> Result<(u32, u32), Refusal> {
    let removed = memory.remove(Seqs::One(SeqId(seq)), range.into())?;
    Ok((removed.n_tokens, removed.n_cells))
}

#[test]
fn w5_both_parts_take_the_same_tokens_each_in_its_cells() {
    let mut memory = shared([16, 8], Window::Sliding(4));
    let cells = decode(&mut memory, &[(&[0], 6)]).unwrap();
    assert_eq!(cells, [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5]]);
    let cells = decode(&mut memory, &[(&[0], 4)]).unwrap();
    assert_eq!(cells, [[6, 7, 8, 9], [6, 7, 0, 1]]);
    for part in memory.parts() {
        invariants::check(part).unwrap();
    }
    let removed = memory.clear();
    assert_eq!((removed.n_tokens, removed.n_cells), (10, 18));
    assert_eq!(memory, shared([16, 8], Window::Sliding(4)));
}

#[test]
fn w6_positions_are_those_to_which_one_can_return() {
    let mut memory = shared([64, 8], Window::Sliding(4));
    decode(&mut memory, &[(&[0], 8)]).unwrap();
    assert_eq!(has(&memory, 0), Some((0, 7)));
    decode(&mut memory, &[(&[0], 4)]).unwrap();
    assert_eq!(memory.parts()[0].positions(SeqId(0)).unwrap().first, Pos(0));
    assert_eq!(
        has(&memory, 0),
        Some((4, 11)),
        "the windowed part has no more"
    );
    // Position 7 sees 4 to 7; position 6 would see 3, which is gone.
    let at = |from| {
        memory.check(&Edit::Remove {
            seqs: Seqs::One(SeqId(0)),
            range: PosRange::from(Pos(from)..),
        })
    };
    assert!(at(7).is_ok() && at(6).is_err());
}

#[test]
fn d41_a_cut_below_the_window_is_refused_in_both_parts() {
    let mut memory = shared([64, 8], Window::Sliding(4));
    decode(&mut memory, &[(&[0], 12), (&[1], 1)]).unwrap();
    let before = memory.clone();
    let (seq, window) = (SeqId(0), Window::Sliding(4));
    let forgotten_to = Pos(has(&memory, 0).unwrap().0 - 1);
    for from in [1, 4, forgotten_to.0 + 2] {
        let refused = remove(&mut memory, 0, Pos(from)..).unwrap_err();
        let Refusal::WindowForgotten(forgotten) = refused else {
            unreachable!("{refused}")
        };
        assert_eq!((forgotten.seq, forgotten.window), (seq, window));
        assert!(
            memory
                .remove(Seqs::All, PosRange::from(Pos(from)..))
                .is_err()
        );
        assert!(
            memory
                .copy(seq, SeqId(2), PosRange::from(..Pos(from)))
                .is_err()
        );
        assert_eq!(memory, before);
    }
    // The whole sequence can always go, and starts again from nothing.
    assert_eq!(remove(&mut memory, 0, PosRange::ALL).unwrap().0, 12);
    assert_eq!((has(&memory, 0), has(&memory, 1)), (None, Some((0, 0))));
    decode(&mut memory, &[(&[0], 1)]).unwrap();
    assert_eq!(has(&memory, 0), Some((0, 0)));
}

#[test]
fn d17_cells_of_several_sequences_are_recycled_in_the_windowed_part() {
    let mut memory = shared([64, 8], Window::Sliding(4));
    decode(&mut memory, &[(&[0, 1, 2], 8)]).unwrap();
    for _ in 0..4 {
        decode(&mut memory, &[(&[0, 1, 2], 2)]).unwrap();
    }
    assert_eq!(has(&memory, 2), Some((8, 15)));
    assert_eq!(memory.parts()[0].n_used(), 16);
    assert_eq!(memory.parts()[1].n_used(), 8);
}

#[test]
fn d17_a_shared_prompt_serves_sequences_that_have_left_it() {
    let mut memory = shared([64, 12], Window::Sliding(4));
    decode(&mut memory, &[(&[0], 8)]).unwrap();
    for seq in [1, 2] {
        let copied = memory.copy(SeqId(0), SeqId(seq), PosRange::ALL).unwrap();
        assert_eq!((copied.n_tokens, copied.row_copies.len()), (8, 0));
    }
    for _ in 0..16 {
        decode(&mut memory, &[(&[0], 1), (&[1], 1), (&[2], 1)]).unwrap();
    }
    assert_eq!(memory.parts()[0].n_used(), 8 + 3 * 16);
    for seq in 0..3 {
        assert_eq!(has(&memory, seq).unwrap().1, 23);
    }
}

#[test]
fn d6_w8_a_plan_that_one_part_refuses_changes_neither() {
    // The windowed part could take more, the full one cannot; and the other way round.
    for (mut memory, window) in [
        (shared([10, 8], Window::Sliding(2)), Window::Full),
        (shared([64, 3], Window::Chunked(4)), Window::Chunked(4)),
    ] {
        decode(&mut memory, &[(&[0], 3)]).unwrap();
        let before = memory.clone();
        let error = decode(&mut memory, &[(&[0], 8)]).unwrap_err();
        let Refusal::NoRoom(no_room) = error else {
            unreachable!("{error}")
        };
        assert_eq!(no_room.window, window);
        assert_eq!(memory, before);
    }
}

#[test]
fn where_both_parts_refuse_the_incurable_reason_counts() {
    let windowed = || part(0, 4, Window::Sliding(2), Streams::Shared);
    let full = || part(1, 4, Window::Full, Streams::Shared);
    for parts in [[windowed(), full()], [full(), windowed()]] {
        let mut memory = Composite::from_parts(parts.to_vec(), None).unwrap();
        let error = decode(&mut memory, &[(&[0], 6)]).unwrap_err();
        assert!(!error.smaller_may_fit(), "{error}");
    }
}

#[test]
fn w8_ubatches_that_a_window_has_no_room_for_are_cut_smaller_for_both() {
    let mut memory = shared([64, 8], Window::Sliding(4));
    let cells = decode(&mut memory, &[(&[0], 20)]).unwrap();
    assert_eq!(cells[0], (0..20).collect::<Vec<_>>());
    assert_eq!(cells[1].len(), 20);
    assert!(cells[1].iter().all(|&cell| cell < 8));
}

#[test]
fn d13_a_copy_between_streams_copies_the_rows_of_both_parts() {
    let mut memory = iswa([16, 8], Window::Sliding(4), Streams::PerSequence);
    decode(&mut memory, &[(&[0], 8)]).unwrap();
    decode(&mut memory, &[(&[0], 3)]).unwrap();
    let copied = memory.copy(SeqId(0), SeqId(2), PosRange::ALL).unwrap();
    let copy = |part, from, to, len| RowCopy {
        part: PartIdx(part),
        from: CellIdx(from),
        to: CellIdx(to),
        len,
    };
    // Of the windowed part positions 3 to 7 lie behind the wrapped 8 to 10.
    assert_eq!(
        copied.row_copies,
        [copy(0, 0, 32, 11), copy(1, 3, 16, 5), copy(1, 0, 21, 3)]
    );
    assert_eq!(copied.n_tokens, 11);
    assert_eq!(has(&memory, 2), has(&memory, 0));
    let refused = remove(&mut memory, 2, Pos(4)..).unwrap_err();
    assert!(matches!(refused, Refusal::WindowForgotten(_)));
}

#[test]
fn w5_a_shift_moves_the_tokens_of_both_parts_and_returns_the_rows_of_both() {
    let mut memory = shared([32, 8], Window::Sliding(4));
    decode(&mut memory, &[(&[0], 8)]).unwrap();
    decode(&mut memory, &[(&[0], 4)]).unwrap();
    // The windowed part holds 4 to 7 in cells 4 to 7, and 8 to 11 in cells 0 to 3.
    let held: Vec<u32> = memory.parts()[1]
        .runs(SeqId(0))
        .iter()
        .map(|run| run.len)
        .collect();
    assert_eq!(held, [4, 4]);
    remove(&mut memory, 0, Pos(2)..Pos(6)).unwrap();
    let behind = PosRange::from(Pos(6)..);
    let shifted = memory.shift(SeqId(0), behind, PosDelta(-4)).unwrap();
    assert_eq!(shifted.n_tokens, 6);
    assert_eq!(shifted.row_copies, []);
    let row_shift = |part, first, len| RowShift {
        part: PartIdx(part),
        first: CellIdx(first),
        len,
        delta: PosDelta(-4),
    };
    assert_eq!(
        shifted.row_shifts,
        [row_shift(0, 6, 6), row_shift(1, 6, 2), row_shift(1, 0, 4)]
    );
    assert_eq!(
        memory.parts()[0].positions(SeqId(0)),
        Some(PosRange::new(Pos(0), Pos(7)))
    );
    assert_eq!(has(&memory, 0), Some((2, 7)));
    // All tokens behind the removal move up in one part, all move in the other, which was a ring.
    assert_eq!(memory.n_holes(), 12);
    let passes = [(); 3].map(|()| memory.compact().unwrap());
    assert_eq!(passes.each_ref().map(|pass| pass.n_cells), [6, 4, 2]);
    let row_copy = |part, from, to, len| RowCopy {
        part: PartIdx(part),
        from: CellIdx(from),
        to: CellIdx(to),
        len,
    };
    let copies = passes.into_iter().flat_map(|pass| pass.row_copies);
    assert_eq!(
        copies.collect::<Vec<_>>(),
        [
            row_copy(0, 6, 2, 4),
            row_copy(1, 2, 4, 2),
            row_copy(0, 10, 6, 2),
            row_copy(1, 0, 2, 2),
            row_copy(1, 6, 0, 2),
        ]
    );
    assert_eq!(memory.n_holes(), 0);
}

#[test]
fn d41_a_division_into_what_the_window_recycled_changes_neither_part() {
    let mut memory = shared([32, 8], Window::Chunked(8));
    decode(&mut memory, &[(&[0], 8)]).unwrap();
    decode(&mut memory, &[(&[0], 4)]).unwrap();
    let before = memory.clone();
    // The first chunk is recycled in part. Divided, all tokens would be in it.
    let refused = memory.divide(SeqId(0), PosRange::ALL, Division::by(4));
    assert!(
        matches!(refused, Err(Refusal::WindowForgotten(f)) if f.window == Window::Chunked(8)),
        "{refused:?}"
    );
    assert_eq!(memory, before);
}

#[test]
fn k16_keep_only_and_unknown_sequences_concern_both_parts() {
    let mut memory = shared([32, 16], Window::Chunked(4));
    decode(&mut memory, &[(&[0], 2), (&[1], 3), (&[2], 1)]).unwrap();
    let before = memory.clone();
    assert!(memory.keep_only(SeqId(3)).is_err());
    assert!(remove(&mut memory, 3, PosRange::ALL).is_err());
    assert_eq!(memory, before);
    let removed = memory.keep_only(SeqId(1)).unwrap();
    assert_eq!((removed.n_tokens, removed.n_cells), (3, 6));
    assert_eq!((has(&memory, 0), has(&memory, 1)), (None, Some((0, 2))));
}

#[test]
fn d6_steps_are_undone_in_both_parts_as_far_as_the_window_allows() {
    let mut memory = shared([64, 8], Window::Sliding(4));
    decode(&mut memory, &[(&[0], 8)]).unwrap();
    let mut batch = Batch::new();
    for _ in 0..6 {
        batch.push_token(TokenId(0));
    }
    let rules = BatchRules {
        n_batch: 8,
        n_seqs: N_SEQS,
        n_vocab: 1,
        n_embd: 1,
    };
    let valid = validate(&batch, &rules, |seq| memory.positions(seq)).unwrap();
    let plan = memory.plan(&valid, 2).unwrap();
    let before = memory.clone();
    let commit = |memory: &mut Composite| -> Vec<_> {
        plan.iter().map(|planned| memory.commit(planned)).collect()
    };
    for undo in commit(&mut memory).into_iter().rev() {
        assert!(memory.check_rollback(&undo, RowsWritten::No).is_ok());
        memory.rollback(undo, RowsWritten::No);
    }
    assert_eq!(memory, before);

    // 12 and 13 took the cells of 4 and 5; without 10 and 11 they are not missed, but without 8 and
    // 9 they would be.
    let mut steps = commit(&mut memory);
    let third = steps.pop().unwrap();
    memory.rollback(third, RowsWritten::Perhaps);
    let second = steps.pop().unwrap();
    assert!(memory.check_rollback(&second, RowsWritten::Perhaps).is_ok());
    memory.rollback(second, RowsWritten::Perhaps);
    assert_eq!(has(&memory, 0), Some((6, 9)));
    let first = steps.pop().unwrap();
    let refused = memory.check_rollback(&first, RowsWritten::Perhaps);
    let forgotten = WindowForgotten {
        seq: SeqId(0),
        window: Window::Sliding(4),
        next: Pos(8),
        needed_from: Pos(5),
        forgotten: PosRange::new(Pos(0), Pos(5)),
    };
    assert_eq!(refused, Err(Refusal::WindowForgotten(forgotten)));
}

fn layers(windows: &[Option<Window>]) -> LayerMap {
    let layer = |window: &Option<Window>| match *window {
        Some(window) => LayerMemory::Attention(attention(window)),
        None => LayerMemory::Nothing,
    };
    LayerMap::new(windows.iter().map(layer).collect())
}

fn attention(window: Window) -> AttentionMemory {
    AttentionMemory {
        kv_heads: 2,
        k_dim: 8,
        v_dim: 8,
        window,
    }
}

fn config(n_ctx: u32, streams: Streams) -> MemoryConfig {
    MemoryConfig {
        n_ctx,
        n_seqs: N_SEQS,
        streams,
        n_ubatch: 64,
        causality: Causality::Causal,
        swa: SwaSize::Window,
        n_snapshots: 0,
        n_active: None,
    }
}

#[test]
fn layers_decide_which_memory_and_how_many_cells() {
    let (full, near) = (Some(Window::Full), Some(Window::Sliding(16)));
    let cells = |windows: &[Option<Window>], streams| {
        let (map, config) = (layers(windows), config(1024, streams));
        let cells = config.cells_per_part(&map).unwrap();
        let memory = Composite::new(&map, &config).unwrap();
        let made: Vec<usize> = memory
            .parts()
            .iter()
            .map(|part| part.n_cells() as usize)
            .collect();
        assert_eq!(cells, made);
        for (number, part) in (0..).zip(memory.parts()) {
            let config = part.config();
            assert_eq!(config.part, PartIdx(number));
            assert_eq!(config.window, map.parts()[number as usize].window);
        }
        let layout = RowLayout::new(&map, &cells, KvType::F16).unwrap();
        for rows in layout.layers() {
            assert_eq!(map.part_of(rows.layer), Some(rows.part));
        }
        cells
    };
    use Streams::{PerSequence, Shared};
    assert_eq!(cells(&[full, full, None], Shared), [1024]);
    assert_eq!(cells(&[full, full], PerSequence), [3 * 1024]);
    assert_eq!(cells(&[near, near, full], Shared), [256, 1024]);
    assert_eq!(cells(&[full, None, near], PerSequence), [3 * 1024, 3 * 256]);
    assert_eq!(cells(&[near], Shared), [256]);
    let chunked = Some(Window::Chunked(300));
    assert_eq!(cells(&[near, chunked], Shared), [256, 1024]);
    // As many kinds of windows as a model has.
    assert_eq!(cells(&[near, chunked, full], Shared), [256, 1024, 1024]);
}

#[test]
fn layers_without_a_memory_are_refused_with_what_they_are() {
    let config = config(1024, Streams::Shared);
    let refused = |windows: &[Option<Window>], config: &MemoryConfig| {
        let map = layers(windows);
        let error = Composite::new(&map, config).unwrap_err();
        assert_eq!(config.cells_per_part(&map), Err(error.clone()));
        error.to_string()
    };
    let map = LayerMap::new(vec![
        LayerMemory::Nothing,
        LayerMemory::Custom(attention(Window::Full)),
    ]);
    let custom = Composite::new(&map, &config).unwrap_err();
    let layer = LayerIdx(1);
    assert_eq!(custom, MemoryConfigError::CustomLayer { layer });
    for n_active in [0, 4] {
        let config = MemoryConfig {
            n_active: Some(n_active),
            ..config
        };
        assert_eq!(
            refused(&[Some(Window::Full)], &config),
            format!("{n_active} sequences that grow at the same time: there must be 1 to 3")
        );
    }
    let too_large = MemoryConfig {
        n_ctx: 1 << 30,
        streams: Streams::PerSequence,
        ..config
    };
    assert_eq!(
        refused(&[Some(Window::Sliding(8)), Some(Window::Full)], &too_large),
        "part 1 (full): 3 streams of 1073741824 cells: there must be 1 to 2147483647 in all"
    );
    assert!(matches!(
        Composite::new(
            &layers(&[Some(Window::Full)]),
            &MemoryConfig {
                n_seqs: 0,
                ..config
            }
        ),
        Err(MemoryConfigError::SeqCount { n_seqs: 0 })
    ));
}
