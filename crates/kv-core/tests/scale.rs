//! Memories of a million cells and of 4,096 sequences: what they cost, and that they work.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::batch::{Batch, BatchRules, ValidBatch, validate};
use kv_core::cells::{Cell, KvCells};
use kv_core::memory::{Memory, MemoryInputs, Seqs, Streams, Unified, UnifiedConfig, invariants};
use kv_core::{
    Causality, CellIdx, MAX_SEQS, PartIdx, Pos, PosRange, SeqId, SeqSet, TokenId, Window,
};

const MILLION: u32 = 1 << 20;
const MAX_BYTES_PER_CELL: usize = 24;

fn memory(n_cells: u32, n_seqs: u32) -> Unified {
    Unified::new(UnifiedConfig {
        part: PartIdx(0),
        n_seqs,
        n_cells,
        streams: Streams::Shared,
        window: Window::Full,
        causality: Causality::Causal,
    })
    .unwrap()
}

/// The next `n` tokens of every sequence, one of each after the other.
fn next_tokens(memory: &Unified, n: u32) -> ValidBatch {
    let mut batch = Batch::new();
    for _ in 0..n {
        for seq in 0..memory.n_seqs() {
            batch.push_token(TokenId(0)).in_sequence(SeqId(seq));
        }
    }
    let rules = BatchRules {
        n_batch: 1 << 20,
        n_seqs: memory.n_seqs(),
        n_vocab: 1,
        n_embd: 1,
    };
    validate(&batch, &rules, |seq| memory.positions(seq)).unwrap()
}

fn decode(memory: &mut Unified, n: u32, inputs: &mut MemoryInputs) {
    let batch = next_tokens(memory, n);
    let mut steps = memory.begin(&batch, u32::MAX).unwrap();
    while steps.next(inputs).is_some() {}
}

#[test]
fn a_million_cells_of_4096_sequences_cost_24_bytes_each_and_none_is_lost() {
    let n_seqs = MAX_SEQS as u32;
    assert_eq!(n_seqs, 4096);
    let mut memory = memory(MILLION, n_seqs);
    let empty = memory.bookkeeping_bytes();
    assert!(empty <= 9 * MILLION as usize, "{empty} bytes when empty");
    let mut inputs = MemoryInputs::default();
    for _ in 0..16 {
        decode(&mut memory, 16, &mut inputs);
    }
    assert_eq!(memory.n_used(), MILLION);
    let bytes = memory.bookkeeping_bytes();
    assert!(
        bytes <= MAX_BYTES_PER_CELL * MILLION as usize,
        "{bytes} bytes"
    );
    // In blocks of 64 cells, though all sequences grew together.
    for seq in [0, 1, 2047, 4095].map(SeqId) {
        assert_eq!(memory.runs(seq).len(), 4, "sequence {seq}");
    }
    assert_eq!(inputs.parts[0].visibility.groups.len(), 4096);
    assert!(memory.plan(&next_tokens(&memory, 1), u32::MAX).is_err());
}

#[test]
fn cells_cost_no_more_where_each_is_a_run_of_its_own() {
    let mut cells = KvCells::new(0..MILLION, 0..16);
    for i in 0..MILLION {
        let (seq, pos) = (SeqId(i % 16), Pos(i / 16));
        cells.insert(CellIdx(i), &Cell::new(pos, SeqSet::one(seq)));
    }
    assert_eq!(cells.runs(SeqId(3)).unwrap().as_slice().len(), 1 << 16);
    let bytes = cells.heap_bytes();
    assert!(
        bytes <= MAX_BYTES_PER_CELL * MILLION as usize,
        "{bytes} bytes"
    );
    // What is removed gives its runs back.
    for seq in (0..16).map(SeqId) {
        cells.remove(seq, PosRange::ALL);
    }
    let bytes = cells.heap_bytes();
    assert!(
        bytes <= 9 * MILLION as usize,
        "{bytes} bytes when empty again"
    );
}

#[test]
fn a_prompt_can_be_shared_by_4096_sequences() {
    let mut memory = memory(1 << 14, MAX_SEQS as u32);
    let prompt = Batch::prompt(SeqId(0), (0..40).map(TokenId));
    let rules = BatchRules {
        n_batch: 40,
        n_seqs: 4096,
        n_vocab: 40,
        n_embd: 1,
    };
    let prompt = validate(&prompt, &rules, |seq| memory.positions(seq)).unwrap();
    let mut inputs = MemoryInputs::default();
    let mut steps = memory.begin(&prompt, 64).unwrap();
    while steps.next(&mut inputs).is_some() {}
    for seq in (1..4096).map(SeqId) {
        let copied = memory.copy(SeqId(0), seq, PosRange::ALL).unwrap();
        assert_eq!((copied.n_tokens, copied.row_copies.len()), (40, 0));
    }
    assert_eq!(memory.n_used(), 40);
    decode(&mut memory, 2, &mut inputs);
    let visibility = &inputs.parts[0].visibility;
    let seen = |row| {
        visibility
            .row(row)
            .map(|(_, pos)| pos.0)
            .collect::<Vec<_>>()
    };
    for row in [0, 4095, 4096, 8191] {
        assert_eq!(seen(row), (0..=40 + row / 4096).collect::<Vec<_>>());
    }
    assert_eq!(memory.cell(CellIdx(7)).unwrap().seqs.len(), 4096);
    let saved = memory.snapshot(Seqs::One(SeqId(4095))).unwrap();
    assert_eq!(saved.n_tokens(SeqId(4095)), Some(42));
    memory.keep_only(SeqId(4095)).unwrap();
    assert_eq!(memory.n_used(), 42);
    invariants::check(&memory).unwrap();
}
