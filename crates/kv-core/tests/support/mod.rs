//! What the worked examples share: memories of three sequences, the next tokens of sequences, and a
//! drawing of who is in which cell.

// A panic is how a test fails.
#![allow(clippy::unwrap_used)]

use kv_core::batch::{Batch, BatchRules, ValidBatch, validate};
use kv_core::memory::{Memory, Streams, Unified, UnifiedConfig};
use kv_core::{Causality, CellIdx, PartIdx, SeqId, SeqSet, TokenId, Window};

pub(crate) const N_SEQS: u32 = 3;

/// A causal part with so many cells in a stream.
pub(crate) fn part(number: u32, n_cells: u32, window: Window, streams: Streams) -> Unified {
    Unified::new(UnifiedConfig {
        part: PartIdx(number),
        n_seqs: N_SEQS,
        n_cells,
        streams,
        window,
        causality: Causality::Causal,
    })
    .unwrap()
}

/// The next `n` tokens of each of these sequence sets, one set after the other.
pub(crate) fn next_tokens(memory: &impl Memory, sets: &[(&[u32], u32)]) -> ValidBatch {
    let mut batch = Batch::new();
    for &(seqs, n) in sets {
        let seqs: SeqSet = seqs.iter().copied().map(SeqId).collect();
        for _ in 0..n {
            batch.push_token(TokenId(0)).in_sequences(&seqs);
        }
    }
    let rules = BatchRules {
        n_batch: 1 << 14,
        n_seqs: memory.n_seqs(),
        n_vocab: 1,
        n_embd: 1,
    };
    validate(&batch, &rules, |seq| memory.positions(seq)).unwrap()
}

/// Positions and sequences of all cells.
pub(crate) fn draw(memory: &Unified) -> String {
    let cell = |i| match memory.cell(CellIdx(i)) {
        Some(held) => {
            let seqs: Vec<String> = held.seqs.iter().map(|s| s.to_string()).collect();
            format!("{}:{}", held.pos, seqs.join("+"))
        }
        None => ".".to_owned(),
    };
    let cells: Vec<String> = (0..memory.n_cells()).map(cell).collect();
    cells.join(" ")
}
