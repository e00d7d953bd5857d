//! The sequence sets of the cells of one stream, each stored once.
//!
//! Invariant: equal sets have equal ids, and every set in the table is that of as many cells as are
//! counted, at least one. Sets of one sequence are encoded in the id itself, so they need no entry.
//! Knows nothing of positions.

use std::collections::HashMap;
use std::fmt;

use crate::ids::{MAX_SEQS, SeqId};
use crate::seq_set::SeqSet;

/// The id of a sequence set: 0 for the empty one, then the sets of one sequence, then the entries
/// of the table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SetId(u32);

/// The first id of a table entry.
const FIRST_ENTRY: u32 = MAX_SEQS as u32 + 1;

/// The sets of two or more sequences that cells belong to.
#[derive(Clone, Default)]
pub(super) struct SetTable {
    entries: Vec<Entry>,
    id_of: HashMap<SeqSet, SetId>,
    /// Entries that can be used again.
    unused: Vec<u32>,
}

/// Without the index, whose order differs from run to run.
impl fmt::Debug for SetTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SetTable")
            .field("entries", &self.entries)
            .field("unused", &self.unused)
            .finish_non_exhaustive()
    }
}

#[derive(Clone, Debug, Default)]
struct Entry {
    set: SeqSet,
    n_cells: u32,
}

impl SetId {
    /// The id of the set without members.
    pub(super) const EMPTY: Self = Self(0);

    fn one(seq: SeqId) -> Self {
        Self(seq.0 + 1)
    }

    /// The only member of the set, or an index into the table.
    #[inline]
    fn decode(self) -> SetKey {
        match self.0 {
            0 => SetKey::Empty,
            id if id < FIRST_ENTRY => SetKey::One(SeqId(id - 1)),
            id => SetKey::Entry((id - FIRST_ENTRY) as usize),
        }
    }
}

enum SetKey {
    Empty,
    One(SeqId),
    Entry(usize),
}

impl SetTable {
    /// The set with this id.
    pub(super) fn get(&self, id: SetId) -> SeqSet {
        match id.decode() {
            SetKey::Empty => SeqSet::EMPTY,
            SetKey::One(seq) => SeqSet::one(seq),
            SetKey::Entry(at) => self
                .entries
                .get(at)
                .map_or(SeqSet::EMPTY, |e| e.set.clone()),
        }
    }

    /// The smallest member of a set.
    pub(super) fn first(&self, id: SetId) -> Option<SeqId> {
        match id.decode() {
            SetKey::Empty => None,
            SetKey::One(seq) => Some(seq),
            SetKey::Entry(at) => self.entries.get(at)?.set.first(),
        }
    }

    /// True if all members of a set have a property.
    #[inline]
    pub(super) fn all(&self, id: SetId, is_so: impl Fn(SeqId) -> bool) -> bool {
        match id.decode() {
            SetKey::Empty => true,
            SetKey::One(seq) => is_so(seq),
            SetKey::Entry(at) => self.entries.get(at).is_none_or(|e| e.set.iter().all(is_so)),
        }
    }

    /// The sets of two or more sequences, and how many cells are of each.
    pub(super) fn shared(&self) -> impl Iterator<Item = (&SeqSet, u32)> {
        let used = self.entries.iter().filter(|entry| entry.n_cells > 0);
        used.map(|entry| (&entry.set, entry.n_cells))
    }

    /// True if a set has two or more members.
    #[inline]
    pub(super) fn is_shared(&self, id: SetId) -> bool {
        matches!(id.decode(), SetKey::Entry(_))
    }

    /// The id of a set for one more cell.
    pub(super) fn acquire(&mut self, set: &SeqSet) -> SetId {
        match (set.first(), set.len()) {
            (None, _) => SetId::EMPTY,
            (Some(seq), 1) => SetId::one(seq),
            _ => match self.id_of.get(set) {
                Some(&id) => {
                    self.retain(id);
                    id
                }
                None => self.add(set.clone()),
            },
        }
    }

    /// Counts one more cell of a set that has cells.
    #[inline]
    pub(super) fn retain(&mut self, id: SetId) {
        if let SetKey::Entry(at) = id.decode()
            && let Some(entry) = self.entries.get_mut(at)
        {
            entry.n_cells += 1;
        }
    }

    /// Counts one cell of a set less, and forgets the set with its last cell.
    #[inline]
    pub(super) fn release(&mut self, id: SetId) {
        if let SetKey::Entry(at) = id.decode()
            && let Some(entry) = self.entries.get_mut(at)
        {
            entry.n_cells -= 1;
            if entry.n_cells == 0 {
                let set = std::mem::take(&mut entry.set);
                self.id_of.remove(&set);
                self.unused.push(at as u32);
            }
        }
    }

    /// Bytes on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        let sets: usize = self.entries.iter().map(|e| e.set.heap_bytes()).sum();
        // A hash map keeps one byte of control for each slot.
        let n_slots = self.id_of.capacity() * 8 / 7;
        sets + self.entries.capacity() * size_of::<Entry>()
            + n_slots * (size_of::<(SeqSet, SetId)>() + 1)
            + self.unused.capacity() * size_of::<u32>()
    }

    fn add(&mut self, set: SeqSet) -> SetId {
        let entry = Entry {
            set: set.clone(),
            n_cells: 1,
        };
        let at = match self.unused.pop() {
            Some(at) => {
                if let Some(unused) = self.entries.get_mut(at as usize) {
                    *unused = entry;
                }
                at
            }
            None => {
                self.entries.push(entry);
                self.entries.len() as u32 - 1
            }
        };
        let id = SetId(FIRST_ENTRY + at);
        self.id_of.insert(set, id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ids: &[u32]) -> SeqSet {
        ids.iter().copied().map(SeqId).collect()
    }

    #[test]
    fn equal_sets_have_one_id_and_go_with_their_last_cell() {
        let mut table = SetTable::default();
        let (a, b) = (
            table.acquire(&set(&[0, 4095])),
            table.acquire(&set(&[1, 2])),
        );
        assert_eq!(table.acquire(&set(&[0, 4095])), a);
        assert_eq!(table.get(a), set(&[0, 4095]));
        table.release(a);
        assert_eq!(table.get(a), set(&[0, 4095]));
        table.release(a);
        assert_eq!(table.id_of.len(), 1);
        // The entry is used again.
        assert_eq!(table.acquire(&set(&[7, 8])), a);
        assert_eq!((table.get(a), table.get(b)), (set(&[7, 8]), set(&[1, 2])));
    }

    #[test]
    fn entries_that_can_be_used_again_take_room() {
        let mut table = SetTable::default();
        let ids: Vec<SetId> = (0..9).map(|i| table.acquire(&set(&[i, i + 1]))).collect();
        ids.into_iter().for_each(|id| table.release(id));
        assert_eq!((table.unused.len(), table.shared().count()), (9, 0));
        let (bytes, room) = (table.heap_bytes(), table.unused.capacity() * 4);
        table.unused = Vec::new();
        assert_eq!(table.heap_bytes() + room, bytes);
    }

    #[test]
    fn sets_of_one_sequence_need_no_entry() {
        let mut table = SetTable::default();
        for seq in [0, 63, 4095] {
            let id = table.acquire(&set(&[seq]));
            assert_eq!(table.get(id), set(&[seq]));
            assert!(!table.is_shared(id));
            table.release(id);
        }
        assert_eq!(table.acquire(&SeqSet::EMPTY), SetId::EMPTY);
        assert_eq!(table.heap_bytes(), 0);
    }
}
