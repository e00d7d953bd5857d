//! [`PosSet`]: positions as ranges, for what a sequence has forgotten.
//!
//! Invariant: ranges are not empty, ascend, and neither overlap nor touch. So equal sets are equal
//! values. Usually there is one range: the beginning of a sequence that a window slid over.

use crate::ids::Pos;
use crate::window::PosRange;

/// A set of positions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct PosSet {
    ranges: Vec<PosRange>,
}

impl PosSet {
    /// The longest ranges that the positions make, ascending.
    pub(super) fn ranges(&self) -> &[PosRange] {
        &self.ranges
    }

    /// Bytes on the heap.
    pub(super) fn heap_bytes(&self) -> usize {
        self.ranges.capacity() * size_of::<PosRange>()
    }

    /// The smallest interval around those that do not lie in `range`.
    pub(super) fn hull_without(&self, range: PosRange) -> PosRange {
        self.without(range).fold(PosRange::EMPTY, PosRange::hull)
    }

    /// The largest position below `pos`.
    pub(super) fn last_before(&self, pos: Pos) -> Option<Pos> {
        let below = self.ranges.iter().rev().find(|range| range.first < pos)?;
        Some(below.last.min(Pos(pos.0.saturating_sub(1))))
    }

    /// The smallest position above `pos`.
    pub(super) fn first_after(&self, pos: Pos) -> Option<Pos> {
        let above = self.ranges.iter().find(|range| range.last > pos)?;
        Some(above.first.max(pos.next()))
    }

    /// The positions that lie in `range` too.
    pub(super) fn within(&self, range: PosRange) -> impl Iterator<Item = PosRange> + '_ {
        let clipped = self.ranges.iter().map(move |own| own.intersection(range));
        clipped.filter(|range| !range.is_empty())
    }

    /// Adds positions.
    pub(super) fn insert(&mut self, range: PosRange) {
        if range.is_empty() {
            return;
        }
        let start = self
            .ranges
            .partition_point(|own| own.last.next() < range.first);
        let end = self
            .ranges
            .partition_point(|own| own.first <= range.last.next());
        let joined = self.ranges.get(start..end).unwrap_or_default();
        let joined = joined.iter().copied().fold(range, PosRange::hull);
        self.ranges.splice(start..end.max(start), [joined]);
    }

    /// Takes positions out.
    pub(super) fn remove(&mut self, range: PosRange) {
        self.ranges = self.without(range).collect();
    }

    /// The set without positions.
    fn without(&self, range: PosRange) -> impl Iterator<Item = PosRange> + '_ {
        let [below, above] = if range.is_empty() {
            [PosRange::ALL, PosRange::EMPTY]
        } else {
            [
                PosRange::from(..range.first),
                if range.last < PosRange::ALL.last {
                    PosRange::from(range.last.next()..)
                } else {
                    PosRange::EMPTY
                },
            ]
        };
        let kept = move |own: &PosRange| [own.intersection(below), own.intersection(above)];
        let kept = self.ranges.iter().flat_map(kept);
        kept.filter(|range| !range.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The only list of ranges for these positions.
    fn longest_ranges(positions: &BTreeSet<u32>) -> Vec<PosRange> {
        let mut ranges: Vec<PosRange> = Vec::new();
        for pos in positions.iter().copied().map(Pos) {
            match ranges.last_mut() {
                Some(range) if range.last.next() == pos => range.last = pos,
                _ => ranges.push(PosRange::new(pos, pos)),
            }
        }
        ranges
    }

    proptest! {
        #[test]
        fn agrees_with_a_set_of_numbers(
            edits in prop::collection::vec((any::<bool>(), 0u32..20, 0u32..6), 0..30),
        ) {
            let (mut set, mut positions) = (PosSet::default(), BTreeSet::new());
            for (insert, first, len) in edits {
                let range = PosRange::from(Pos(first)..Pos(first + len));
                if insert {
                    set.insert(range);
                    positions.extend(first..first + len);
                } else {
                    set.remove(range);
                    positions.retain(|p| !range.contains(Pos(*p)));
                }
                prop_assert_eq!(&set.ranges, &longest_ranges(&positions));
                let outside = positions.iter().filter(|p| !range.contains(Pos(**p)));
                let hull = outside.map(|&p| PosRange::new(Pos(p), Pos(p)));
                let hull = hull.fold(PosRange::EMPTY, PosRange::hull);
                prop_assert_eq!(set.hull_without(range), hull);
                for p in 0..27 {
                    let before = positions.range(..p).next_back().copied().map(Pos);
                    prop_assert_eq!(set.last_before(Pos(p)), before);
                    let after = positions.range(p + 1..).next().copied().map(Pos);
                    prop_assert_eq!(set.first_after(Pos(p)), after);
                }
                let inside = positions.iter().copied().filter(|p| range.contains(Pos(*p))).collect();
                prop_assert_eq!(set.within(range).collect::<Vec<_>>(), longest_ranges(&inside));
            }
        }
    }

    #[test]
    fn the_largest_position_can_be_in_it_and_leave() {
        let mut set = PosSet::default();
        set.insert(PosRange::from(Pos(5)..));
        set.remove(PosRange::from(Pos(7)..));
        assert_eq!(set.ranges, [PosRange::new(Pos(5), Pos(6))]);
    }
}
