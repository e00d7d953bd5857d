//! A set of sequences, as a copyable bit set.
//!
//! Invariant: holds only ids below [`MAX_SEQS`]. Knows nothing of what the sequences contain.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::ids::{MAX_SEQS, SeqId};

const N_WORDS: usize = MAX_SEQS / u64::BITS as usize;

/// Which sequences a token, a cell or an operation belongs to.
///
/// ```
/// use kv_core::{SeqId, SeqSet};
///
/// let set = SeqSet::from_iter([SeqId(2), SeqId(0)]);
/// assert_eq!(set.first(), Some(SeqId(0)));
/// assert_eq!(set.to_string(), "{0,2}");
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "Vec<SeqId>", try_from = "Vec<SeqId>")]
pub struct SeqSet {
    words: [u64; N_WORDS],
}

/// A sequence id that no memory can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("sequence {seq} is out of range: ids are below {MAX_SEQS}")]
pub struct SeqOutOfRange {
    /// The id.
    pub seq: SeqId,
}

impl SeqSet {
    /// The set without members.
    pub const EMPTY: Self = Self {
        words: [0; N_WORDS],
    };

    /// The set of one sequence. Empty where the id is not below [`MAX_SEQS`].
    pub fn one(seq: SeqId) -> Self {
        let mut set = Self::EMPTY;
        set.insert(seq);
        set
    }

    /// Adds a sequence. Says whether it is a member now: an id not below [`MAX_SEQS`] never is.
    pub fn insert(&mut self, seq: SeqId) -> bool {
        let (word, bit) = place(seq);
        self.words.get_mut(word).map(|w| *w |= bit).is_some()
    }

    /// Takes a sequence out. Says whether it was a member.
    pub fn remove(&mut self, seq: SeqId) -> bool {
        let (word, bit) = place(seq);
        let Some(word) = self.words.get_mut(word) else {
            return false;
        };
        let had = *word & bit != 0;
        *word &= !bit;
        had
    }

    /// Whether the sequence is a member.
    #[inline]
    pub fn contains(&self, seq: SeqId) -> bool {
        let (word, bit) = place(seq);
        self.words.get(word).is_some_and(|w| w & bit != 0)
    }

    /// The member with the smallest id: the one that stands for the whole set where only one can.
    #[inline]
    pub fn first(&self) -> Option<SeqId> {
        self.iter().next()
    }

    /// Number of members.
    #[inline]
    pub fn len(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// Whether there are no members.
    #[inline]
    pub fn is_empty(&self) -> bool {
        *self == Self::EMPTY
    }

    /// Members of either set.
    pub fn union(self, other: Self) -> Self {
        self.combine(other, |a, b| a | b)
    }

    /// Members of both sets.
    pub fn intersection(self, other: Self) -> Self {
        self.combine(other, |a, b| a & b)
    }

    /// Whether the sets have a member in common.
    pub fn intersects(&self, other: &Self) -> bool {
        self.words.iter().zip(&other.words).any(|(a, b)| a & b != 0)
    }

    /// Whether every member of this set is in the other.
    pub fn is_subset(&self, other: &Self) -> bool {
        self.words
            .iter()
            .zip(&other.words)
            .all(|(a, b)| a & !b == 0)
    }

    /// The members, smallest id first.
    pub fn iter(&self) -> Iter {
        Iter {
            words: self.words,
            word: 0,
        }
    }

    fn combine(mut self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        for (a, b) in self.words.iter_mut().zip(other.words) {
            *a = f(*a, b);
        }
        self
    }
}

/// The word of a sequence and its bit in there.
#[inline]
fn place(seq: SeqId) -> (usize, u64) {
    (
        seq.as_usize() / u64::BITS as usize,
        1 << (seq.0 % u64::BITS),
    )
}

/// The members of a [`SeqSet`], smallest id first.
#[derive(Clone, Debug)]
pub struct Iter {
    words: [u64; N_WORDS],
    word: usize,
}

impl Iterator for Iter {
    type Item = SeqId;

    fn next(&mut self) -> Option<SeqId> {
        loop {
            let bits = self.words.get_mut(self.word)?;
            if *bits != 0 {
                let bit = bits.trailing_zeros();
                *bits &= *bits - 1;
                return Some(SeqId(self.word as u32 * u64::BITS + bit));
            }
            self.word += 1;
        }
    }
}

impl IntoIterator for SeqSet {
    type Item = SeqId;
    type IntoIter = Iter;

    fn into_iter(self) -> Iter {
        self.iter()
    }
}

impl IntoIterator for &SeqSet {
    type Item = SeqId;
    type IntoIter = Iter;

    fn into_iter(self) -> Iter {
        self.iter()
    }
}

impl From<SeqId> for SeqSet {
    fn from(seq: SeqId) -> Self {
        Self::one(seq)
    }
}

impl FromIterator<SeqId> for SeqSet {
    fn from_iter<I: IntoIterator<Item = SeqId>>(seqs: I) -> Self {
        let mut set = Self::EMPTY;
        for seq in seqs {
            set.insert(seq);
        }
        set
    }
}

impl TryFrom<Vec<SeqId>> for SeqSet {
    type Error = SeqOutOfRange;

    fn try_from(seqs: Vec<SeqId>) -> Result<Self, SeqOutOfRange> {
        let mut set = Self::EMPTY;
        for seq in seqs {
            if !set.insert(seq) {
                return Err(SeqOutOfRange { seq });
            }
        }
        Ok(set)
    }
}

impl From<SeqSet> for Vec<SeqId> {
    fn from(set: SeqSet) -> Self {
        set.iter().collect()
    }
}

impl fmt::Display for SeqSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("{")?;
        for (i, seq) in self.iter().enumerate() {
            if i > 0 {
                f.write_str(",")?;
            }
            write!(f, "{seq}")?;
        }
        f.write_str("}")
    }
}

impl fmt::Debug for SeqSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SeqSet{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ids: &[u32]) -> SeqSet {
        ids.iter().copied().map(SeqId).collect()
    }

    #[test]
    fn d9_the_first_member_is_the_smallest_id_whatever_the_order_of_insertion() {
        assert_eq!(set(&[200, 7, 64]).first(), Some(SeqId(7)));
        assert_eq!(SeqSet::EMPTY.first(), None);
    }

    #[test]
    fn members_are_listed_across_words() {
        let s = set(&[255, 0, 63, 64, 128]);
        assert_eq!(
            s.iter().map(|s| s.0).collect::<Vec<_>>(),
            [0, 63, 64, 128, 255]
        );
        assert_eq!(s.len(), 5);
        assert_eq!(s.to_string(), "{0,63,64,128,255}");
        assert_eq!(SeqSet::EMPTY.to_string(), "{}");
    }

    #[test]
    fn insert_and_remove_say_what_they_did() {
        let mut s = SeqSet::EMPTY;
        assert!(s.insert(SeqId(3)));
        assert!(!s.insert(SeqId(256)));
        assert!(s.contains(SeqId(3)) && !s.contains(SeqId(256)));
        assert!(s.remove(SeqId(3)));
        assert!(!s.remove(SeqId(3)) && !s.remove(SeqId(256)));
        assert!(s.is_empty());
    }

    #[test]
    fn set_algebra() {
        let (a, b) = (set(&[0, 100]), set(&[100, 101]));
        assert_eq!(a.union(b), set(&[0, 100, 101]));
        assert_eq!(a.intersection(b), set(&[100]));
        assert!(a.intersects(&b) && !set(&[0]).intersects(&b));
        assert!(set(&[100]).is_subset(&a) && !b.is_subset(&a));
    }

    #[test]
    fn serde_lists_the_members_and_refuses_ids_out_of_range() {
        let json = serde_json::to_string(&set(&[2, 1])).unwrap();
        assert_eq!(json, "[1,2]");
        assert_eq!(serde_json::from_str::<SeqSet>(&json).unwrap(), set(&[1, 2]));
        let err = serde_json::from_str::<SeqSet>("[256]").unwrap_err();
        assert!(err.to_string().contains("256"), "{err}");
    }
}
