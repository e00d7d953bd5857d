//! Scratch memory: [`ScratchPlan`] gives the values of a program their places, [`RunMemory`] is
//! what all programs of a backend run in.
//!
//! Invariant: places of values that are needed at the same time do not overlap; an arena is as
//! large as the program needs that needs most. Knows nothing of graphs.

use kv_backend::BackendError;

use crate::device::Device;

/// Places begin at multiples of this many bytes.
const ALIGN: usize = 256;

/// A piece of scratch memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scratch {
    /// Its first byte.
    pub(crate) at: usize,
    /// Its bytes, a multiple of the alignment.
    pub(crate) len: usize,
}

/// Hands out and takes back places, the lowest that fits first.
#[derive(Clone, Debug, Default)]
pub(crate) struct ScratchPlan {
    /// By place; never two that touch.
    free: Vec<Scratch>,
    end: usize,
}

impl ScratchPlan {
    /// A place of `bytes` bytes.
    pub(crate) fn take(&mut self, bytes: usize) -> Scratch {
        let len = bytes.max(1).next_multiple_of(ALIGN);
        if let Some(i) = self.free.iter().position(|hole| hole.len >= len) {
            let hole = self.free[i];
            if hole.len == len {
                self.free.remove(i);
            } else {
                self.free[i] = Scratch {
                    at: hole.at + len,
                    len: hole.len - len,
                }
            }
            return Scratch { at: hole.at, len };
        }
        // The last hole may be enlarged.
        let at = match self.free.last() {
            Some(hole) if hole.at + hole.len == self.end => hole.at,
            _ => self.end,
        };
        if at < self.end {
            self.free.pop();
        }
        self.end = at + len;
        Scratch { at, len }
    }

    /// Takes a place back.
    pub(crate) fn give_back(&mut self, place: Scratch) {
        let i = self.free.partition_point(|hole| hole.at < place.at);
        self.free.insert(i, place);
        for i in [i, i.wrapping_sub(1)] {
            if let Some(&[left, right]) = self.free.get(i..).and_then(|rest| rest.first_chunk())
                && left.at + left.len == right.at
            {
                self.free[i].len += right.len;
                self.free.remove(i + 1);
            }
        }
    }

    /// Bytes that all places ever taken need, and some where there are none.
    pub(crate) fn bytes(&self) -> usize {
        self.end.max(ALIGN)
    }
}

/// The memory of all programs of a backend, which run one after the other.
#[derive(Debug)]
pub(crate) struct RunMemory<D: Device> {
    pub(crate) scratch: Arena<D>,
    /// The inputs of a run: a device writes those of the next after what reads them.
    pub(crate) inputs: Arena<D>,
}

impl<D: Device> Default for RunMemory<D> {
    fn default() -> Self {
        Self {
            scratch: Arena::new("scratch memory"),
            inputs: Arena::new("the inputs of a run"),
        }
    }
}

/// A buffer that grows.
#[derive(Debug)]
pub(crate) struct Arena<D: Device> {
    /// For errors.
    what: &'static str,
    buffer: Option<D::Buffer>,
    bytes: usize,
    /// Counts allocations: what was recorded with an earlier buffer is void.
    generation: u64,
}

impl<D: Device> Arena<D> {
    fn new(what: &'static str) -> Self {
        Self {
            what,
            buffer: None,
            bytes: 0,
            generation: 0,
        }
    }

    /// Makes room for `bytes` bytes.
    pub(crate) fn reserve(&mut self, device: &D, bytes: usize) -> Result<(), BackendError> {
        if bytes > self.bytes || self.buffer.is_none() {
            device.wait()?;
            // The old buffer first, so that both need not fit.
            self.buffer = None;
            self.bytes = 0;
            self.generation += 1;
            self.buffer = Some(device.allocate(bytes, self.what)?);
            self.bytes = bytes;
        }
        Ok(())
    }

    /// The buffer, once something was reserved.
    pub(crate) fn buffer(&self) -> Option<&D::Buffer> {
        self.buffer.as_ref()
    }

    /// The number of the buffer.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_that_were_given_back_are_taken_again() {
        let mut plan = ScratchPlan::default();
        let [a, b, c] = [100, 300, 256].map(|bytes| plan.take(bytes));
        assert_eq!([a.at, b.at, c.at, plan.bytes()], [0, 256, 768, 1024]);
        plan.give_back(a);
        plan.give_back(b);
        assert_eq!(plan.take(700), Scratch { at: 0, len: 768 });
        plan.give_back(c);
        assert_eq!(plan.take(2000), Scratch { at: 768, len: 2048 });
        assert_eq!(plan.bytes(), 2816);
    }

    #[test]
    fn random_places_never_overlap() {
        let (mut plan, mut taken) = (ScratchPlan::default(), Vec::<Scratch>::new());
        let mut state = 7u64;
        for _ in 0..2000 {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
            let random = (state >> 33) as usize;
            if random.is_multiple_of(3) && !taken.is_empty() {
                plan.give_back(taken.swap_remove(random % taken.len()));
                continue;
            }
            let new = plan.take(random % 5000);
            for other in &taken {
                assert!(new.at + new.len <= other.at || other.at + other.len <= new.at);
            }
            taken.push(new);
        }
        taken.into_iter().for_each(|place| plan.give_back(place));
        let end = plan.bytes();
        assert_eq!(plan.free, [Scratch { at: 0, len: end }]);
    }
}
