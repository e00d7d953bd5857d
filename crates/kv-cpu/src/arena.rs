//! [`Arena`]: first-fit allocation of a program's intermediate buffers in one block of memory.
//!
//! Invariant: two buffers that are live at the same step do not overlap. Buffers are `f32` and
//! start on cache lines. Knows nothing of what is in them.

/// Values of a cache line, on whose boundaries buffers start.
const LINE_VALUES: usize = 16;

/// A buffer's location, in values from the arena's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// Allocates buffers in the order of the steps.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    /// Live buffers, by start.
    live: Vec<Slot>,
    len: usize,
    total: usize,
}

impl Arena {
    /// Allocates `len` values in the first gap that is large enough.
    pub(crate) fn take(&mut self, len: usize) -> Slot {
        let size = len.next_multiple_of(LINE_VALUES);
        let mut start = 0;
        let mut at = 0;
        for slot in &self.live {
            if slot.start - start >= size {
                break;
            }
            start = slot.start + slot.len.next_multiple_of(LINE_VALUES);
            at += 1;
        }
        let slot = Slot { start, len };
        self.live.insert(at, slot);
        self.len = self.len.max(start + size);
        self.total += size;
        slot
    }

    /// Frees a buffer.
    pub(crate) fn give_back(&mut self, slot: Slot) {
        // Empty buffers may share a start with others, so the whole slot is compared.
        if let Some(at) = self.live.iter().position(|s| *s == slot) {
            self.live.remove(at);
        }
    }

    /// Values that the arena must hold.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Values of all buffers together, as if memory were never reused.
    pub(crate) fn total(&self) -> usize {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_reused_and_live_buffers_never_overlap() {
        let mut arena = Arena::default();
        let mut live: Vec<Slot> = Vec::new();
        let mut random = 12345u64;
        let mut below = |n: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            ((random >> 33) % n) as usize
        };
        for _ in 0..2000 {
            if live.len() > 6 || (!live.is_empty() && below(2) == 0) {
                let slot = live.swap_remove(below(live.len() as u64));
                arena.give_back(slot);
            } else {
                let slot = arena.take(below(200));
                let is_apart =
                    |s: &Slot| s.start + s.len <= slot.start || slot.start + slot.len <= s.start;
                assert!(live.iter().all(is_apart), "{slot:?} in {live:?}");
                assert!(
                    slot.start.is_multiple_of(LINE_VALUES) && slot.start + slot.len <= arena.len()
                );
                live.push(slot);
            }
        }
        assert!(arena.len() < 4000 && arena.total() > 50_000);
    }
}
