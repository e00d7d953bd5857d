//! Cuts a batch into ubatches.
//!
//! Invariant: every entry is in exactly one ubatch, none has more than `n_ubatch` rows, and the
//! entries of a sequence keep their order. Knows nothing of what memories do with the pieces.

use serde::{Deserialize, Serialize};

use super::{BatchError, UBatch, ValidBatch};
use crate::seq_set::SeqSet;

/// The way in which batches are cut for a memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SplitPolicy {
    /// In the caller's order. Tokens and names of rows are in ubatches of their own, and what sees
    /// each other in one.
    #[default]
    InOrder,
    /// In the caller's order, and all tokens of a sequence in one ubatch: for tokens that see
    /// later ones.
    WholeSequences,
}

impl SplitPolicy {
    /// Cuts `batch` into ubatches of at most `n_ubatch` rows.
    ///
    /// # Errors
    /// [`BatchError`] where the batch cannot be cut this way.
    pub fn split(self, batch: &ValidBatch, n_ubatch: u32) -> Result<Vec<UBatch>, BatchError> {
        if n_ubatch == 0 {
            return Err(BatchError::NoRows);
        }
        match self {
            Self::InOrder => in_order(batch, n_ubatch),
            Self::WholeSequences => whole_sequences(batch, n_ubatch),
        }
    }
}

fn in_order(batch: &ValidBatch, n_ubatch: u32) -> Result<Vec<UBatch>, BatchError> {
    let numbers: Vec<u32> = (0..batch.n_tokens() as u32).collect();
    let gather = |piece| UBatch::gather(batch, numbers.get(piece).unwrap_or_default());
    Ok(batch.pieces(n_ubatch)?.into_iter().map(gather).collect())
}

/// Fills ubatches with sequences, those that share tokens together, in the order in which they
/// begin.
fn whole_sequences(batch: &ValidBatch, n_ubatch: u32) -> Result<Vec<UBatch>, BatchError> {
    let mut families: Vec<(SeqSet, Vec<u32>)> = Vec::new();
    for (number, entry) in (0u32..).zip(batch.entries()) {
        // In a valid batch sequences part but never join: who meets a family belongs to it whole.
        let family = families
            .iter_mut()
            .find(|(set, _)| set.intersects(&entry.seqs));
        match family {
            Some((_, numbers)) => numbers.push(number),
            None => families.push((entry.seqs.clone(), vec![number])),
        }
    }
    let mut ubatches: Vec<Vec<u32>> = Vec::new();
    for (set, numbers) in families {
        let n_tokens = numbers.len();
        if n_tokens > n_ubatch as usize {
            return Err(BatchError::SequenceTooLong {
                set,
                n_tokens,
                n_ubatch,
            });
        }
        match ubatches.last_mut() {
            Some(last) if last.len() + n_tokens <= n_ubatch as usize => last.extend(numbers),
            _ => ubatches.push(numbers),
        }
    }
    let gather = |mut numbers: Vec<u32>| {
        numbers.sort_unstable();
        UBatch::gather(batch, &numbers)
    };
    Ok(ubatches.into_iter().map(gather).collect())
}
