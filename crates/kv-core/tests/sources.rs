//! Sources of sequences: given once, shared by copies, left by shifts, freed with the sequence,
//! saved and restored.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use kv_core::batch::{Batch, BatchError, BatchRules, TokensOf, UBatch, ValidBatch, validate};
use kv_core::cells::Cell;
use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory};
use kv_core::memory::{
    CellRecord, Composite, Memory, MemoryConfig, MemoryInputs, PartSnapshot, Refusal, RestoreInto,
    RowsWritten, Seqs, Snapshot, SnapshotError, Streams, SwaSize, invariants,
};
use kv_core::{Causality, CellIdx, PartIdx, Pos, PosRange, SeqId, SeqSet, TokenId, Window};

const A: SeqId = SeqId(0);
const B: SeqId = SeqId(1);
const C: SeqId = SeqId(2);

fn memory(n_ctx: u32, streams: Streams) -> Composite {
    let attention = |window| {
        LayerMemory::Attention(AttentionMemory {
            kv_heads: 1,
            k_dim: 4,
            v_dim: 4,
            window,
        })
    };
    let map = LayerMap::new(vec![attention(Window::Full), attention(Window::Source)]);
    assert_eq!(map.parts().len(), 2);
    let config = MemoryConfig {
        n_ctx,
        n_seqs: 3,
        streams,
        n_ubatch: 8,
        causality: Causality::Causal,
        swa: SwaSize::Window,
        n_snapshots: 0,
        n_active: None,
    };
    let memory = Composite::new(&map, &config).unwrap();
    assert_eq!(memory.n_rows().cells.len(), 2);
    memory
}

fn valid(memory: &Composite, batch: &Batch) -> Result<ValidBatch, BatchError> {
    let rules = BatchRules {
        n_batch: 64,
        n_seqs: 3,
        n_vocab: 100,
        n_embd: 4,
    };
    validate(batch, &rules, |seq| match batch.tokens_of() {
        TokensOf::Sequence => memory.positions(seq),
        TokensOf::Source => memory.source_positions(seq),
    })
}

/// Takes a batch in and gives the inputs of its ubatches.
fn take(memory: &mut Composite, batch: &Batch) -> Result<Vec<(UBatch, MemoryInputs)>, Refusal> {
    let batch = valid(memory, batch).unwrap();
    let mut steps = memory.begin(&batch, 8)?;
    let mut all = Vec::new();
    let mut inputs = MemoryInputs::default();
    while let Some(ubatch) = steps.next(&mut inputs) {
        all.push((ubatch.clone(), inputs.clone()));
    }
    check(memory);
    Ok(all)
}

fn check(memory: &Composite) {
    for part in memory.parts().iter().chain(memory.source()) {
        invariants::check(part).unwrap();
    }
}

fn source(memory: &mut Composite, seq: SeqId, n: u32) {
    for (_, inputs) in take(memory, &Batch::source(seq, (0..n).map(TokenId))).unwrap() {
        // They have cells in their own part alone.
        assert_eq!(
            (inputs.parts[0].cells.len(), inputs.parts[1].cells.len()),
            (0, n as usize)
        );
    }
}

fn text(memory: &mut Composite, seq: SeqId, n: u32) -> Vec<(UBatch, MemoryInputs)> {
    take(memory, &Batch::prompt(seq, (0..n).map(TokenId))).unwrap()
}

/// The positions of a source that a row sees, by part 1.
fn seen(inputs: &MemoryInputs, row: u32) -> Vec<u32> {
    inputs.parts[1]
        .visibility
        .row(row)
        .map(|(_, pos)| pos.0)
        .collect()
}

#[test]
fn every_token_sees_its_source_whole_and_its_own_past() {
    let mut memory = memory(32, Streams::Shared);
    source(&mut memory, A, 5);
    source(&mut memory, B, 3);
    let mut batch = Batch::new();
    for seq in [A, B, A] {
        batch.push_token(TokenId(1)).in_sequence(seq);
    }
    let steps = take(&mut memory, &batch).unwrap();
    let [(_, inputs)] = steps.as_slice() else {
        panic!("one step")
    };
    assert_eq!(inputs.parts[1].cells, []);
    assert_eq!(seen(inputs, 0), [0, 1, 2, 3, 4]);
    assert_eq!(seen(inputs, 1), [0, 1, 2]);
    assert_eq!(seen(inputs, 2), [0, 1, 2, 3, 4]);
    let own: Vec<u32> = inputs.parts[0]
        .visibility
        .row(2)
        .map(|(_, pos)| pos.0)
        .collect();
    assert_eq!(own, [0, 1]);
    assert_eq!(memory.n_tokens(A), 2, "its own tokens count");
    assert_eq!(memory.token_ranges(A), [PosRange::new(Pos(0), Pos(1))]);
}

#[test]
fn a_source_is_taken_whole_and_once() {
    let mut memory = memory(32, Streams::Shared);
    let steps = take(&mut memory, &Batch::source(A, (0..7).map(TokenId))).unwrap();
    assert_eq!(steps.len(), 1);
    assert_eq!(steps[0].1.parts[1].cells.len(), 7);
    assert_eq!(steps[0].0.tokens_of, TokensOf::Source);
    assert_eq!(memory.positions(A), None);
    assert_eq!(
        memory.source_positions(A),
        Some(PosRange::new(Pos(0), Pos(6)))
    );
    let again = valid(&memory, &Batch::source(A, [TokenId(1)])).unwrap_err();
    let n_tokens = 7;
    assert_eq!(
        again,
        BatchError::HasSource {
            entry: 0,
            seq: A,
            n_tokens
        }
    );
    // More than a ubatch.
    let long = valid(&memory, &Batch::source(B, (0..9).map(TokenId))).unwrap();
    let refused = memory.plan(&long, 8).unwrap_err();
    assert!(
        matches!(refused, Refusal::Split(BatchError::SequenceTooLong { .. })),
        "{refused:?}"
    );
    // More than there is room for.
    for seq in [B, C] {
        source(&mut memory, seq, 8);
    }
    memory.remove(Seqs::One(A), PosRange::ALL).unwrap();
    source(&mut memory, A, 8);
    let full = memory.source().unwrap().n_used();
    assert_eq!(full, 24);
}

#[test]
fn what_has_no_source_is_refused() {
    let mut memory = memory(32, Streams::Shared);
    let batch = Batch::prompt(B, [TokenId(1)]);
    let valid_batch = valid(&memory, &batch).unwrap();
    assert_eq!(
        memory.plan(&valid_batch, 8).unwrap_err(),
        Refusal::NoSource { seq: B }
    );
    source(&mut memory, A, 4);
    let both: SeqSet = [A, B].into_iter().collect();
    let mut batch = Batch::new();
    batch.push_token(TokenId(1)).in_sequences(&both);
    let coupled = valid(&memory, &batch).unwrap();
    assert_eq!(
        memory.plan(&coupled, 8).unwrap_err(),
        Refusal::NoSource { seq: B }
    );
    source(&mut memory, B, 4);
    let other = Refusal::OtherSource { seq: A, other: B };
    assert_eq!(memory.plan(&coupled, 8).unwrap_err(), other);
    // Copies can share tokens.
    memory.remove(Seqs::One(B), PosRange::ALL).unwrap();
    let copied = memory.copy(A, B, PosRange::ALL).unwrap();
    assert_eq!((copied.n_tokens, copied.row_copies.len()), (0, 0));
    assert!(memory.plan(&coupled, 8).is_ok());
    // No layer attends over a source.
    let full = Composite::unified(*memory.parts()[0].config()).unwrap();
    let batch = valid(&full, &Batch::source(C, [TokenId(1)])).unwrap();
    assert_eq!(
        full.plan(&batch, 8).unwrap_err(),
        Refusal::TakesNoSources { seq: C }
    );
    assert!(!full.takes_sources() && memory.takes_sources());
}

#[test]
fn edits_of_a_sequence_do_what_they_should_to_its_source() {
    for streams in [Streams::Shared, Streams::PerSequence] {
        let mut memory = memory(32, streams);
        source(&mut memory, A, 6);
        let _steps = text(&mut memory, A, 7);
        let runs = |memory: &Composite, seq| memory.source().unwrap().runs(seq).to_vec();
        let before = runs(&memory, A);
        // Shifts and cuts leave it.
        memory
            .remove(Seqs::One(A), PosRange::from(Pos(5)..))
            .unwrap();
        let _edited = memory
            .shift(A, PosRange::ALL, kv_core::PosDelta(3))
            .unwrap();
        memory
            .remove(Seqs::One(A), PosRange::from(..Pos(20)))
            .unwrap();
        assert_eq!(
            (memory.positions(A), runs(&memory, A)),
            (None, before.clone())
        );
        let _steps = text(&mut memory, A, 4);
        // A copy of a part of the text has the source whole.
        let copied = memory.copy(A, B, PosRange::new(Pos(0), Pos(1))).unwrap();
        assert_eq!(copied.n_tokens, 2);
        assert_eq!(memory.source_positions(B), memory.source_positions(A));
        let n_rows: u32 = copied.row_copies.iter().map(|c| c.len).sum();
        match streams {
            Streams::Shared => {
                assert_eq!(n_rows, 0);
                assert_eq!(runs(&memory, B), before);
            }
            Streams::PerSequence => {
                assert_eq!(n_rows, 2 + 6);
                let of_source = copied.row_copies.iter().filter(|c| c.part == PartIdx(1));
                assert_eq!(of_source.map(|c| c.len).sum::<u32>(), 6);
            }
        }
        // A part of a text over another source is none of this one.
        source(&mut memory, C, 6);
        let _steps = text(&mut memory, C, 4);
        let (before, range) = (memory.clone(), PosRange::new(Pos(0), Pos(1)));
        let refused = memory.copy(A, C, range).unwrap_err();
        assert_eq!(refused, Refusal::OtherSource { seq: A, other: C });
        assert_eq!(memory, before);
        let _copied = memory.copy(A, C, PosRange::ALL).unwrap();
        assert_eq!(memory.source_positions(C), memory.source_positions(A));
        check(&memory);
        memory.keep_only(B).unwrap();
        assert_eq!(memory.source_positions(A), None);
        assert_eq!(memory.source().unwrap().n_used(), 6);
        memory.remove(Seqs::All, PosRange::ALL).unwrap();
        assert_eq!(memory.n_used(), 0);
        check(&memory);
    }
}

#[test]
fn a_source_that_could_not_be_computed_leaves_no_trace() {
    let mut memory = memory(32, Streams::Shared);
    source(&mut memory, A, 4);
    let _steps = text(&mut memory, A, 2);
    let before = memory.clone();
    for rows in [RowsWritten::No, RowsWritten::Perhaps] {
        let batch = valid(&memory, &Batch::source(B, (0..5).map(TokenId))).unwrap();
        let mut steps = memory.begin(&batch, 8).unwrap();
        let mut inputs = MemoryInputs::default();
        assert!(steps.next(&mut inputs).is_some());
        assert!(steps.memory().source_positions(B).is_some());
        steps.undo_all(rows);
        assert_eq!(memory, before);
    }
}

#[test]
fn sources_are_restored_into_other_sizes_and_streams() {
    let mut saved = memory(32, Streams::Shared);
    source(&mut saved, A, 6);
    let _steps = text(&mut saved, A, 2);
    let _copied = saved.copy(A, B, PosRange::ALL).unwrap();
    source(&mut saved, C, 3);
    let snapshot = saved.snapshot(Seqs::All).unwrap();
    assert_eq!(snapshot.positions(A), Some(PosRange::new(Pos(0), Pos(1))));
    assert_eq!(
        (snapshot.n_tokens(A), snapshot.positions(C)),
        (Some(2), None)
    );
    for (n_ctx, streams) in [(64, Streams::Shared), (6, Streams::PerSequence)] {
        let mut other = memory(n_ctx, streams);
        let restored = other.restore(&snapshot, RestoreInto::All).unwrap();
        assert_eq!(restored.n_tokens, 4, "texts count");
        check(&other);
        for seq in [A, B, C] {
            assert_eq!(other.source_positions(seq), saved.source_positions(seq));
            assert_eq!(other.positions(seq), saved.positions(seq));
        }
        let shared = other.source().unwrap().n_used();
        assert_eq!(shared, if streams == Streams::Shared { 9 } else { 15 });
        let (from, to) = (C, A);
        let _restored = other
            .restore(&snapshot, RestoreInto::One { from, to })
            .unwrap();
        assert_eq!(other.source_positions(A), saved.source_positions(C));
        assert_eq!(other.positions(A), None);
        check(&other);
    }
    let mut small = memory(5, Streams::Shared);
    let refused = small.restore(&snapshot, RestoreInto::All).unwrap_err();
    assert!(matches!(refused, Refusal::NoRoom(_)), "{refused:?}");
    // A text over a source that is not there.
    let part = |part, window, seqs: &[SeqId]| PartSnapshot {
        part: PartIdx(part),
        window,
        cells: (0u32..)
            .zip(seqs)
            .map(|(row, &seq)| CellRecord {
                row: CellIdx(row),
                cell: Cell::new(Pos(0), SeqSet::one(seq)),
            })
            .collect(),
        forgotten: Vec::new(),
    };
    let parts = vec![
        part(0, Window::Full, &[A, B]),
        part(1, Window::Source, &[A]),
    ];
    assert_eq!(
        Snapshot::new(parts, None),
        Err(SnapshotError::NoSource { seq: B })
    );
    let parts = vec![
        part(0, Window::Full, &[A]),
        part(1, Window::Source, &[A, B]),
    ];
    assert!(Snapshot::new(parts, None).is_ok());
}
