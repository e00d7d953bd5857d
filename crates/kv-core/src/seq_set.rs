//! [`SeqSet`]: a set of sequences.
//!
//! Invariant: holds only ids below [`MAX_SEQS`], and equal sets have equal representations: a set
//! whose members share one word of the bit set is stored inline, any other one as a shared
//! bit set. Knows nothing of what the sequences contain.

use std::fmt;
use std::sync::Arc;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::ids::{MAX_SEQS, SeqId};

const N_WORDS: usize = MAX_SEQS / u64::BITS as usize;

type Words = [u64; N_WORDS];

/// The sequences that a token, a cell or an operation belongs to.
///
/// Cloning is cheap: 16 bytes inline, and at most a shared allocation.
///
/// ```
/// use kv_core::{SeqId, SeqSet};
///
/// let set = SeqSet::from_iter([SeqId(2), SeqId(0)]);
/// assert_eq!(set.first(), Some(SeqId(0)));
/// assert_eq!(set.to_string(), "{0,2}");
/// ```
#[derive(Clone, Default, PartialEq, Eq, Hash)]
pub struct SeqSet(Repr);

#[derive(Clone, PartialEq, Eq, Hash)]
enum Repr {
    /// All members are in one word of the bit set. The empty set has word 0 and no bits.
    Word { word: u32, bits: u64 },
    /// Members in two words or more.
    Words(Arc<Words>),
}

impl Default for Repr {
    fn default() -> Self {
        Self::Word { word: 0, bits: 0 }
    }
}

impl SeqSet {
    /// The set without members.
    pub const EMPTY: Self = Self(Repr::Word { word: 0, bits: 0 });

    /// The set of one sequence. Empty where the id is not below [`MAX_SEQS`].
    pub fn one(seq: SeqId) -> Self {
        if seq.as_usize() >= MAX_SEQS {
            return Self::EMPTY;
        }
        let (word, bits) = word_and_bit(seq);
        Self(Repr::Word {
            word: word as u32,
            bits,
        })
    }

    /// The sequences with ids below `n`, or below [`MAX_SEQS`].
    pub fn first_n(n: u32) -> Self {
        let mut words = [0; N_WORDS];
        for (word, start) in words.iter_mut().zip((0u32..).step_by(u64::BITS as usize)) {
            *word = match n.saturating_sub(start) {
                0 => 0,
                some => u64::MAX >> u64::BITS.saturating_sub(some),
            };
        }
        Self::from_words(words)
    }

    /// Adds a sequence. Returns whether it is a member now: an id not below [`MAX_SEQS`] never is.
    pub fn insert(&mut self, seq: SeqId) -> bool {
        if seq.as_usize() >= MAX_SEQS {
            return false;
        }
        let (at, bit) = word_and_bit(seq);
        match &mut self.0 {
            Repr::Word { word, bits } if *bits == 0 => {
                (*word, *bits) = (at as u32, bit);
            }
            Repr::Word { word, bits } if *word as usize == at => *bits |= bit,
            Repr::Word { word, bits } => {
                let mut words = [0; N_WORDS];
                if let Some(own) = words.get_mut(*word as usize) {
                    *own = *bits;
                }
                words[at] = bit;
                self.0 = Repr::Words(Arc::new(words));
            }
            Repr::Words(words) if words[at] & bit != 0 => {}
            Repr::Words(words) => Arc::make_mut(words)[at] |= bit,
        }
        true
    }

    /// Removes a sequence. Returns whether it was a member.
    pub fn remove(&mut self, seq: SeqId) -> bool {
        if !self.contains(seq) {
            return false;
        }
        let (at, bit) = word_and_bit(seq);
        match &mut self.0 {
            Repr::Word { bits, .. } => {
                *bits &= !bit;
                if *bits == 0 {
                    *self = Self::EMPTY;
                }
            }
            Repr::Words(words) => {
                let mut words = **words;
                words[at] &= !bit;
                *self = Self::from_words(words);
            }
        }
        true
    }

    /// True if the sequence is a member.
    #[inline]
    pub fn contains(&self, seq: SeqId) -> bool {
        let (at, bit) = word_and_bit(seq);
        self.word(at) & bit != 0
    }

    /// The member with the smallest id: the one that stands for the whole set where only one can.
    #[inline]
    pub fn first(&self) -> Option<SeqId> {
        self.iter().next()
    }

    /// Number of members.
    #[inline]
    pub fn len(&self) -> usize {
        match &self.0 {
            Repr::Word { bits, .. } => bits.count_ones() as usize,
            Repr::Words(words) => words.iter().map(|w| w.count_ones() as usize).sum(),
        }
    }

    /// True if there are no members.
    #[inline]
    pub fn is_empty(&self) -> bool {
        matches!(self.0, Repr::Word { bits: 0, .. })
    }

    /// Members of either set.
    pub fn union(&self, other: &Self) -> Self {
        if other.is_subset(self) {
            return self.clone();
        }
        self.combine(other, |a, b| a | b)
    }

    /// Members of both sets.
    pub fn intersection(&self, other: &Self) -> Self {
        if self.is_subset(other) {
            return self.clone();
        }
        self.combine(other, |a, b| a & b)
    }

    /// True if the sets have a member in common.
    pub fn intersects(&self, other: &Self) -> bool {
        self.any_word(|at, bits| bits & other.word(at) != 0)
    }

    /// True if every member of this set is in the other.
    pub fn is_subset(&self, other: &Self) -> bool {
        !self.any_word(|at, bits| bits & !other.word(at) != 0)
    }

    /// The members, smallest id first.
    pub fn iter(&self) -> Iter<'_> {
        Iter {
            set: self,
            word: match self.0 {
                Repr::Word { word, .. } => word as usize,
                Repr::Words(_) => 0,
            },
            bits: match &self.0 {
                Repr::Word { bits, .. } => *bits,
                Repr::Words(words) => words[0],
            },
        }
    }

    /// Bytes of the heap that this set shares with its clones.
    pub(crate) fn heap_bytes(&self) -> usize {
        match self.0 {
            Repr::Word { .. } => 0,
            Repr::Words(_) => size_of::<Words>() + 2 * size_of::<usize>(),
        }
    }

    #[inline]
    fn word(&self, at: usize) -> u64 {
        match &self.0 {
            Repr::Word { word, bits } if *word as usize == at => *bits,
            Repr::Word { .. } => 0,
            Repr::Words(words) => words.get(at).copied().unwrap_or(0),
        }
    }

    fn any_word(&self, is_so: impl Fn(usize, u64) -> bool) -> bool {
        match &self.0 {
            Repr::Word { word, bits } => is_so(*word as usize, *bits),
            Repr::Words(words) => words.iter().enumerate().any(|(at, &bits)| is_so(at, bits)),
        }
    }

    fn combine(&self, other: &Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self::from_words(std::array::from_fn(|at| f(self.word(at), other.word(at))))
    }

    fn from_words(words: Words) -> Self {
        let mut used = words.iter().enumerate().filter(|(_, bits)| **bits != 0);
        match (used.next(), used.next()) {
            (None, _) => Self::EMPTY,
            (Some((word, &bits)), None) => Self(Repr::Word {
                word: word as u32,
                bits,
            }),
            _ => Self(Repr::Words(Arc::new(words))),
        }
    }
}

/// The word of a sequence and its bit in that word.
#[inline]
fn word_and_bit(seq: SeqId) -> (usize, u64) {
    (
        seq.as_usize() / u64::BITS as usize,
        1 << (seq.0 % u64::BITS),
    )
}

/// The members of a [`SeqSet`], smallest id first.
#[derive(Clone, Debug)]
pub struct Iter<'a> {
    set: &'a SeqSet,
    word: usize,
    /// The rest of that word.
    bits: u64,
}

impl Iterator for Iter<'_> {
    type Item = SeqId;

    #[inline]
    fn next(&mut self) -> Option<SeqId> {
        while self.bits == 0 {
            let Repr::Words(words) = &self.set.0 else {
                return None;
            };
            self.word += 1;
            self.bits = *words.get(self.word)?;
        }
        let bit = self.bits.trailing_zeros();
        self.bits &= self.bits - 1;
        Some(SeqId(self.word as u32 * u64::BITS + bit))
    }
}

impl<'a> IntoIterator for &'a SeqSet {
    type Item = SeqId;
    type IntoIter = Iter<'a>;

    fn into_iter(self) -> Iter<'a> {
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

impl Serialize for SeqSet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self)
    }
}

impl<'de> Deserialize<'de> for SeqSet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut set = Self::EMPTY;
        for seq in Vec::<SeqId>::deserialize(deserializer)? {
            if !set.insert(seq) {
                let text = format!("sequence {seq} is out of range: ids are below {MAX_SEQS}");
                return Err(D::Error::custom(text));
            }
        }
        Ok(set)
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
    use std::collections::BTreeSet;
    use std::hash::{DefaultHasher, Hash, Hasher};

    use proptest::prelude::*;

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
        let s = set(&[4095, 0, 63, 64, 128]);
        assert_eq!(
            s.iter().map(|s| s.0).collect::<Vec<_>>(),
            [0, 63, 64, 128, 4095]
        );
        assert_eq!(s.len(), 5);
        assert_eq!(s.to_string(), "{0,63,64,128,4095}");
        assert_eq!(SeqSet::EMPTY.to_string(), "{}");
    }

    #[test]
    fn insert_and_remove_return_what_they_did() {
        let mut s = SeqSet::EMPTY;
        assert!(s.insert(SeqId(3)));
        assert!(!s.insert(SeqId(4096)) && !s.insert(SeqId(u32::MAX)));
        assert!(s.contains(SeqId(3)) && !s.contains(SeqId(4096)) && !s.contains(SeqId(67)));
        assert!(s.remove(SeqId(3)));
        assert!(!s.remove(SeqId(3)) && !s.remove(SeqId(4096)));
        assert!(s.is_empty());
        assert_eq!(SeqSet::one(SeqId(4096)), SeqSet::EMPTY);
    }

    #[test]
    fn set_algebra() {
        let (a, b) = (set(&[0, 100]), set(&[100, 101]));
        assert_eq!(a.union(&b), set(&[0, 100, 101]));
        assert_eq!(a.intersection(&b), set(&[100]));
        assert!(a.intersects(&b) && !set(&[0]).intersects(&b));
        assert!(set(&[100]).is_subset(&a) && !b.is_subset(&a));
        assert_eq!(SeqSet::first_n(65).len(), 65);
        assert_eq!(SeqSet::first_n(3), set(&[0, 1, 2]));
        assert_eq!(SeqSet::first_n(0), SeqSet::EMPTY);
        assert_eq!(SeqSet::first_n(u32::MAX).len(), MAX_SEQS);
    }

    #[test]
    fn a_set_takes_sixteen_bytes_wherever_it_is_stored() {
        assert_eq!(size_of::<SeqSet>(), 16);
        assert_eq!(set(&[4094, 4095]).heap_bytes(), 0);
        assert!(set(&[0, 4095]).heap_bytes() > 512);
    }

    proptest! {
        #[test]
        fn agrees_with_an_ordered_set(
            edits in prop::collection::vec((any::<bool>(), 0usize..6), 0..24),
            other in prop::collection::btree_set(0usize..6, 0..6),
        ) {
            let ids = [0, 1, 63, 64, 130, 4095];
            let (mut s, mut model) = (SeqSet::EMPTY, BTreeSet::new());
            let other_set = other.iter().map(|&i| SeqId(ids[i])).collect::<SeqSet>();
            let other: BTreeSet<u32> = other.iter().map(|&i| ids[i]).collect();
            for (insert, i) in edits {
                let id = ids[i];
                if insert {
                    model.insert(id);
                    prop_assert!(s.insert(SeqId(id)));
                } else {
                    prop_assert_eq!(s.remove(SeqId(id)), model.remove(&id));
                }
                let again: SeqSet = model.iter().rev().copied().map(SeqId).collect();
                prop_assert_eq!(&s, &again, "one representation of each set");
                let hash = |set: &SeqSet| {
                    let mut hasher = DefaultHasher::new();
                    set.hash(&mut hasher);
                    hasher.finish()
                };
                prop_assert_eq!(hash(&s), hash(&again));
                let members: Vec<u32> = s.iter().map(|seq| seq.0).collect();
                prop_assert_eq!(members, model.iter().copied().collect::<Vec<_>>());
                let ids_of = |set: SeqSet| set.iter().map(|seq| seq.0).collect::<BTreeSet<_>>();
                prop_assert_eq!(ids_of(s.union(&other_set)), &model | &other);
                prop_assert_eq!(ids_of(s.intersection(&other_set)), &model & &other);
                prop_assert_eq!(s.intersects(&other_set), !model.is_disjoint(&other));
                prop_assert_eq!(s.is_subset(&other_set), model.is_subset(&other));
            }
        }
    }

    #[test]
    fn serde_lists_the_members_and_refuses_ids_out_of_range() {
        let json = serde_json::to_string(&set(&[2, 1])).unwrap();
        assert_eq!(json, "[1,2]");
        assert_eq!(serde_json::from_str::<SeqSet>(&json).unwrap(), set(&[1, 2]));
        let err = serde_json::from_str::<SeqSet>("[4096]").unwrap_err();
        assert!(err.to_string().contains("4096"), "{err}");
    }
}
