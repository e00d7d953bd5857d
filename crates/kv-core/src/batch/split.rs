//! Cuts a batch into ubatches.
//!
//! Invariant: every entry is in exactly one ubatch, none has more than `n_ubatch` rows, and the
//! entries of a sequence keep their order. Knows nothing of what memories do with the pieces.

use serde::{Deserialize, Serialize};

use super::{BatchError, UBatch, UBatchShape, ValidBatch};
use crate::ids::SeqId;
use crate::seq_set::SeqSet;

/// How a memory wants its batches cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SplitPolicy {
    /// In the caller's order.
    #[default]
    InOrder,
    /// As many tokens of each sequence set in a ubatch as of the others.
    EqualLength(EqualLength),
    /// Tokens of one sequence set at a time; a set may shrink on the way.
    PerSequence,
    /// In the caller's order, and all tokens of a sequence in one ubatch: for tokens that see
    /// later ones.
    WholeSequences,
}

/// Options of [`SplitPolicy::EqualLength`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EqualLength {
    /// Which sets may be together in a ubatch.
    pub order: SetOrder,
    /// A sequence's last tokens that stay together in one ubatch, where it has that many.
    pub keep_tail: u32,
}

/// Which sequence sets [`SplitPolicy::EqualLength`] puts together; the stricter is the greater.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub enum SetOrder {
    /// Any that have no sequence in common.
    #[default]
    Any,
    /// Only single sequences with consecutive ids.
    Consecutive,
}

impl SplitPolicy {
    /// The policy whose ubatches suit two memories, of which one wants these and the other those;
    /// `None` where no policy suits both.
    pub fn and(self, other: Self) -> Option<Self> {
        match (self, other) {
            (Self::InOrder, policy) | (policy, Self::InOrder) => Some(policy),
            (Self::EqualLength(a), Self::EqualLength(b)) => Some(Self::EqualLength(EqualLength {
                order: a.order.max(b.order),
                keep_tail: a.keep_tail.max(b.keep_tail),
            })),
            (Self::PerSequence, Self::PerSequence) => Some(Self::PerSequence),
            (Self::WholeSequences, Self::WholeSequences) => Some(Self::WholeSequences),
            // Whole sequences differ in length, and nothing keeps them from being together.
            (Self::WholeSequences, _) | (_, Self::WholeSequences) => None,
            // One set alone is as long as all others and consecutive, but its tail may be cut.
            (Self::PerSequence, Self::EqualLength(options))
            | (Self::EqualLength(options), Self::PerSequence) => {
                (options.keep_tail == 0).then_some(Self::PerSequence)
            }
        }
    }

    /// Cuts `batch` into ubatches of at most `n_ubatch` rows.
    ///
    /// # Errors
    /// [`BatchError`] where the batch cannot be cut this way.
    pub fn split(self, batch: &ValidBatch, n_ubatch: u32) -> Result<Vec<UBatch>, BatchError> {
        if n_ubatch == 0 {
            return Err(BatchError::NoRows);
        }
        match self {
            Self::InOrder => Ok(in_order(batch, n_ubatch as usize)),
            Self::EqualLength(options) => equal_length(batch, n_ubatch, options),
            Self::PerSequence => Ok(per_sequence(batch, n_ubatch as usize)),
            Self::WholeSequences => whole_sequences(batch, n_ubatch),
        }
    }
}

fn in_order(batch: &ValidBatch, n_ubatch: usize) -> Vec<UBatch> {
    let numbers: Vec<u32> = (0..batch.n_tokens() as u32).collect();
    let pieces = numbers.chunks(n_ubatch);
    pieces
        .map(|piece| UBatch::gather(batch, piece, UBatchShape::InOrder))
        .collect()
}

/// Fills ubatches with sequences, those that share tokens together, in the order in which they begin.
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
        UBatch::gather(batch, &numbers, UBatchShape::InOrder)
    };
    Ok(ubatches.into_iter().map(gather).collect())
}

fn per_sequence(batch: &ValidBatch, n_ubatch: usize) -> Vec<UBatch> {
    let entries = batch.entries();
    let mut left: Vec<u32> = (0..entries.len() as u32).collect();
    let mut ubatches = Vec::new();
    while let Some(&first) = left.first() {
        let mut set = &entries[first as usize].seqs;
        let mut piece = Vec::new();
        left.retain(|&i| {
            let next = &entries[i as usize].seqs;
            let taken = piece.len() < n_ubatch && next.is_subset(set);
            if taken {
                piece.push(i);
                set = next;
            }
            !taken
        });
        let tokens_per_set = piece.len() as u32;
        let shape = UBatchShape::Equal {
            n_sets: 1,
            tokens_per_set,
        };
        ubatches.push(UBatch::gather(batch, &piece, shape));
    }
    ubatches
}

/// The entries of one sequence set: how many were taken in ubatches before, and in this one.
struct SetQueue {
    set: SeqSet,
    entries: Vec<u32>,
    n_done: usize,
    n_taken: usize,
}

impl SetQueue {
    fn n_left(&self) -> usize {
        self.entries.len() - self.n_done - self.n_taken
    }

    fn next(&self) -> Option<u32> {
        self.entries.get(self.n_done).copied()
    }

    fn taken(&self) -> &[u32] {
        &self.entries[self.n_done..self.n_done + self.n_taken]
    }
}

fn equal_length(
    batch: &ValidBatch,
    n_ubatch: u32,
    options: EqualLength,
) -> Result<Vec<UBatch>, BatchError> {
    let EqualLength { order, keep_tail } = options;
    if keep_tail >= n_ubatch {
        return Err(BatchError::TailTooLong {
            keep_tail,
            n_ubatch,
        });
    }
    if order == SetOrder::Consecutive {
        let mut entries = batch.entries().iter();
        if let Some(entry) = entries.position(|e| e.seqs.len() > 1) {
            let set = batch.entries()[entry].seqs.clone();
            return Err(BatchError::Coupled { entry, set });
        }
    }
    let (n_ubatch, keep_tail) = (n_ubatch as usize, keep_tail as usize);
    let mut queues = queues_of(batch);
    let mut ubatches = Vec::new();
    loop {
        let mut chosen = choose_sets(&queues, order, n_ubatch);
        if chosen.is_empty() {
            return Ok(ubatches);
        }
        let shortest = chosen
            .iter()
            .map(|&q| queues[q].n_left())
            .min()
            .unwrap_or(0);
        let each = shortest.min(n_ubatch / chosen.len());
        for &q in &chosen {
            queues[q].n_taken = each;
        }
        if keep_tail > 0 {
            let n_kept = keep_tails(
                &mut queues,
                &chosen,
                Tail {
                    n_ubatch,
                    keep_tail,
                },
            );
            chosen.truncate(n_kept);
        }
        let numbers: Vec<u32> = chosen
            .iter()
            .flat_map(|&q| queues[q].taken().iter().copied())
            .collect();
        let n_sets = chosen.len() as u32;
        let shape = UBatchShape::Equal {
            n_sets,
            tokens_per_set: numbers.len() as u32 / n_sets,
        };
        ubatches.push(UBatch::gather(batch, &numbers, shape));
        for &q in &chosen {
            queues[q].n_done += queues[q].n_taken;
            queues[q].n_taken = 0;
        }
    }
}

/// The entries of each sequence set, sets in the order of their first entry.
fn queues_of(batch: &ValidBatch) -> Vec<SetQueue> {
    let mut queues: Vec<SetQueue> = Vec::new();
    let mut number_of = std::collections::HashMap::new();
    for (i, entry) in (0u32..).zip(batch.entries()) {
        let q = *number_of.entry(&entry.seqs).or_insert_with(|| {
            let (entries, n_done, n_taken) = (Vec::new(), 0, 0);
            queues.push(SetQueue {
                set: entry.seqs.clone(),
                entries,
                n_done,
                n_taken,
            });
            queues.len() - 1
        });
        queues[q].entries.push(i);
    }
    queues
}

/// At most `n_ubatch` sets with tokens left and no sequence in common, in the order of their next
/// entries.
fn choose_sets(queues: &[SetQueue], order: SetOrder, n_ubatch: usize) -> Vec<usize> {
    let mut waiting: Vec<(u32, usize)> = (0..queues.len())
        .filter_map(|q| queues[q].next().map(|entry| (entry, q)))
        .collect();
    waiting.sort_unstable();
    let mut chosen = Vec::new();
    let mut taken = SeqSet::EMPTY;
    let mut last: Option<SeqId> = None;
    for (_, q) in waiting {
        let set = &queues[q].set;
        let follows = match (order, last) {
            (SetOrder::Any, _) | (SetOrder::Consecutive, None) => true,
            (SetOrder::Consecutive, Some(last)) => set.first() == Some(SeqId(last.0 + 1)),
        };
        // A set that shares a sequence with a skipped one waits for it too.
        if follows && !set.intersects(&taken) && chosen.len() < n_ubatch {
            chosen.push(q);
            last = set.first();
        }
        taken = taken.union(set);
    }
    chosen
}

#[derive(Clone, Copy)]
struct Tail {
    n_ubatch: usize,
    keep_tail: usize,
}

/// Gives tokens back so that no chosen set is left with fewer than `keep_tail` but some. Returns
/// how many of the chosen sets stay in this ubatch.
fn keep_tails(queues: &mut [SetQueue], chosen: &[usize], tail: Tail) -> usize {
    let is_whole = |q: &SetQueue| q.n_left() == 0 || q.n_left() >= tail.keep_tail;
    let mut n_kept = chosen.iter().take_while(|&&q| is_whole(&queues[q])).count();
    if let (0, Some(&first)) = (n_kept, chosen.first()) {
        let queue = &mut queues[first];
        let n_all = queue.n_taken + queue.n_left();
        // Either all at once, or so many that the tail stays together. Since keep_tail is below
        // n_ubatch, at least one is taken.
        queue.n_taken = if n_all <= tail.n_ubatch {
            n_all
        } else {
            n_all - tail.keep_tail
        };
        n_kept = 1;
    }
    for &q in chosen.iter().skip(n_kept) {
        queues[q].n_taken = 0;
    }
    n_kept
}
