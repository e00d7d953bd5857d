//! [`ExpertCache`]: which experts are in memory within a budget of bytes.
//!
//! What is given up is what will be needed last: an expert that a router chooses in a part `p` of
//! steps is needed after about `1 / p` of them, and within a step layers come in their order.
//!
//! Invariant: the bytes of what is in memory or being read never exceed the budget, what is in use
//! is not given up, and nothing is read that is there or being read. Knows no files.

use serde::{Deserialize, Serialize};

use crate::rates::UseRates;

/// The smallest rate that counts: below it, experts that were never chosen are all alike.
const MIN_RATE: f32 = 1e-4;

/// Experts to be given up are looked for so many at a time.
const CANDIDATES: usize = 32;

/// The matrices of a layer's experts that are one weight: all have as many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stack {
    /// The layer, counted from 0 through those with experts: all stacks that one router chooses
    /// from.
    pub layer: u32,
    /// Number of experts.
    pub n_experts: u32,
    /// Bytes that the matrix of one takes in memory.
    pub n_bytes: u64,
}

/// The matrix of one expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId {
    /// The number of the stack, in the order in which a step uses them.
    pub stack: u32,
    /// The number of the expert in it.
    pub expert: u32,
}

/// An expert that a router chose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The expert.
    pub expert: u32,
    /// The rows of the step that go through it.
    pub n_rows: u32,
}

/// How many of the matrices that a router chose were there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RouterHits {
    /// In memory, or being read.
    pub n_hits: u64,
    /// Absent.
    pub n_misses: u64,
}

/// What becomes of a matrix that is needed now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acquisition {
    /// It is in memory, and stays until it is released.
    Ready,
    /// It is being read: ask again when a read has ended.
    Reading,
    /// It is to be read. Its place is that of those, which are gone.
    Read {
        /// What is given up.
        evicted: Vec<ExpertId>,
    },
    /// Everything is in use or being read: ask again when something was released or read.
    NoRoom,
}

/// How a read ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadEnd {
    /// The matrix is in memory.
    Done,
    /// There is nothing.
    Failed,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Place {
    #[default]
    Absent,
    Reading,
    /// With its index among all that are in memory.
    Resident {
        at: usize,
    },
}

#[derive(Clone, Copy, Debug, Default)]
struct Slot {
    place: Place,
    n_users: u32,
    /// True if the step that is computed will use it.
    is_wanted: bool,
}

/// What is known of a layer.
#[derive(Clone, Debug)]
struct Layer {
    rates: UseRates,
    /// Its stacks.
    stacks: Vec<u32>,
}

/// The bytes of the largest matrix: a smaller budget holds nothing to compute with.
pub fn smallest_budget(stacks: &[Stack]) -> u64 {
    stacks.iter().map(|s| s.n_bytes).max().unwrap_or(0)
}

/// Which experts are in memory.
#[derive(Clone, Debug)]
pub struct ExpertCache {
    budget: u64,
    /// Of what is in memory or being read.
    n_bytes: u64,
    /// Of those, what cannot be given up: in use, or being read.
    n_held: u64,
    stacks: Vec<Stack>,
    /// `[stacks][experts]`.
    slots: Vec<Vec<Slot>>,
    layers: Vec<Layer>,
    resident: Vec<ExpertId>,
    /// What may go, the first to go last; found anew after each choice of a router.
    candidates: Vec<ExpertId>,
    /// The last stack of the layer whose router chose last.
    present: u32,
}

impl ExpertCache {
    /// Nothing in memory, and no stacks yet.
    pub fn new(budget: u64) -> Self {
        Self {
            budget,
            n_bytes: 0,
            n_held: 0,
            slots: Vec::new(),
            layers: Vec::new(),
            stacks: Vec::new(),
            resident: Vec::new(),
            candidates: Vec::new(),
            present: 0,
        }
    }

    /// With these stacks, in the order in which a step uses them.
    pub fn with_stacks(budget: u64, stacks: &[Stack]) -> Self {
        let mut cache = Self::new(budget);
        for &stack in stacks {
            cache.add(stack);
        }
        cache
    }

    /// Adds a stack, which steps use after those that are there, and returns its number. Matrices
    /// that are larger than the budget never get a place: see [`smallest_budget`].
    pub fn add(&mut self, stack: Stack) -> u32 {
        let number = u32::try_from(self.stacks.len()).unwrap_or(u32::MAX);
        let n_experts = stack.n_experts as usize;
        let n_layers = self.layers.len().max(stack.layer as usize + 1);
        self.layers.resize_with(n_layers, || Layer {
            rates: UseRates::new(n_experts),
            stacks: Vec::new(),
        });
        if let Some(layer) = self.layers.get_mut(stack.layer as usize) {
            layer.stacks.push(number);
        }
        self.stacks.push(stack);
        self.slots.push(vec![Slot::default(); n_experts]);
        number
    }

    /// The most bytes that are in memory.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes of what is in memory or being read.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Takes what a layer's router chose for the rows of a step.
    pub fn routed(&mut self, layer: u32, choices: &[Choice], n_rows: u32) -> RouterHits {
        let mut routed = RouterHits::default();
        let Some(of_layer) = self.layers.get_mut(layer as usize) else {
            return routed;
        };
        self.candidates.clear();
        self.present = of_layer.stacks.last().copied().unwrap_or(0);
        for &stack in &of_layer.stacks {
            let Some(slots) = self.slots.get_mut(stack as usize) else {
                continue;
            };
            slots.iter_mut().for_each(|slot| slot.is_wanted = false);
            for choice in choices {
                let Some(slot) = slots.get_mut(choice.expert as usize) else {
                    continue;
                };
                slot.is_wanted = true;
                match slot.place {
                    Place::Absent => routed.n_misses += 1,
                    _ => routed.n_hits += 1,
                }
            }
        }
        let n_experts = of_layer
            .stacks
            .first()
            .and_then(|&s| self.stacks.get(s as usize));
        let mut parts = vec![0.0; n_experts.map_or(0, |s| s.n_experts as usize)];
        for choice in choices {
            if let Some(part) = parts.get_mut(choice.expert as usize) {
                *part = choice.n_rows as f32 / n_rows.max(1) as f32;
            }
        }
        of_layer.rates.learn(&parts);
        routed
    }

    /// Asks for a matrix to compute with. Each [`Acquisition::Ready`] is released once.
    pub fn acquire(&mut self, id: ExpertId) -> Acquisition {
        let n_bytes = self.bytes_of(id);
        match self.slot(id).map(|slot| slot.place) {
            Some(Place::Resident { .. }) => {
                if let Some(slot) = self.slot_mut(id) {
                    slot.n_users += 1;
                    if slot.n_users == 1 {
                        self.n_held += n_bytes;
                    }
                }
                Acquisition::Ready
            }
            Some(Place::Reading) => Acquisition::Reading,
            Some(Place::Absent) => match self.make_room(n_bytes, None) {
                Some(evicted) => {
                    self.begin(id, n_bytes);
                    Acquisition::Read { evicted }
                }
                None => Acquisition::NoRoom,
            },
            None => Acquisition::NoRoom,
        }
    }

    /// Ends a use: the matrix may be given up.
    pub fn release(&mut self, id: ExpertId) {
        let n_bytes = self.bytes_of(id);
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        slot.is_wanted = false;
        if slot.n_users > 0 {
            slot.n_users -= 1;
            if slot.n_users == 0 {
                self.n_held -= n_bytes;
            }
        }
    }

    /// Asks whether a matrix that is not needed yet is to be read, and what is given up for it:
    /// only what will be needed after it. `None` where it is there, or not worth it.
    pub fn foresee(&mut self, id: ExpertId) -> Option<Vec<ExpertId>> {
        let slot = self.slot(id)?;
        if slot.place != Place::Absent {
            return None;
        }
        let distance = if slot.is_wanted {
            0.0
        } else {
            self.distance(id)
        };
        let n_bytes = self.bytes_of(id);
        let evicted = self.make_room(n_bytes, Some(distance))?;
        self.begin(id, n_bytes);
        Some(evicted)
    }

    /// The absent matrices that a step will use of a layer whose router has chosen, those first
    /// that it uses first.
    pub fn wanted(&self, layer: u32) -> Vec<ExpertId> {
        self.absent_of(layer, |slot| slot.is_wanted)
    }

    /// True if the step that is computed will use a matrix that is absent.
    pub fn needs(&self, id: ExpertId) -> bool {
        self.slot(id)
            .is_some_and(|slot| slot.is_wanted && slot.place == Place::Absent)
    }

    /// The layer that comes after this one, in the next step after the last.
    pub fn layer_after(&self, layer: u32) -> u32 {
        (layer + 1) % u32::try_from(self.layers.len()).unwrap_or(1).max(1)
    }

    /// The absent experts of a layer that it will rather use than not, the likeliest first. A
    /// read of any other would be for nothing more often than not.
    pub fn likely(&self, layer: u32) -> Vec<ExpertId> {
        let Some(rates) = self.layers.get(layer as usize).map(|l| &l.rates) else {
            return Vec::new();
        };
        let rate = |id: &ExpertId| rates.of(id.expert as usize);
        let mut absent = self.absent_of(layer, |_| true);
        absent.retain(|id| rate(id) > 0.5);
        absent.sort_by(|a, b| rate(b).total_cmp(&rate(a)).then(a.cmp(b)));
        absent
    }

    /// Takes the end of a read.
    pub fn read_ended(&mut self, id: ExpertId, end: ReadEnd) {
        let n_bytes = self.bytes_of(id);
        let at = self.resident.len();
        let Some(slot) = self
            .slot_mut(id)
            .filter(|slot| slot.place == Place::Reading)
        else {
            return;
        };
        slot.place = match end {
            ReadEnd::Done => Place::Resident { at },
            ReadEnd::Failed => Place::Absent,
        };
        self.n_held -= n_bytes;
        match end {
            ReadEnd::Done => self.resident.push(id),
            ReadEnd::Failed => self.n_bytes -= n_bytes,
        }
    }

    fn absent_of(&self, layer: u32, is_one: impl Fn(&Slot) -> bool) -> Vec<ExpertId> {
        let stacks = self.layers.get(layer as usize).map(|l| l.stacks.as_slice());
        let of_stack = |&stack: &u32| {
            let slots = self.slots.get(stack as usize).into_iter().flatten();
            (0..)
                .zip(slots)
                .map(move |(expert, slot)| (ExpertId { stack, expert }, slot))
        };
        let all = stacks.into_iter().flatten().flat_map(of_stack);
        let absent = all.filter(|(_, slot)| slot.place == Place::Absent && is_one(slot));
        absent.map(|(id, _)| id).collect()
    }

    fn slot(&self, id: ExpertId) -> Option<&Slot> {
        self.slots.get(id.stack as usize)?.get(id.expert as usize)
    }

    fn slot_mut(&mut self, id: ExpertId) -> Option<&mut Slot> {
        let slots = self.slots.get_mut(id.stack as usize)?;
        slots.get_mut(id.expert as usize)
    }

    fn bytes_of(&self, id: ExpertId) -> u64 {
        self.stacks.get(id.stack as usize).map_or(0, |s| s.n_bytes)
    }

    fn begin(&mut self, id: ExpertId, n_bytes: u64) {
        if let Some(slot) = self.slot_mut(id) {
            slot.place = Place::Reading;
            self.n_bytes += n_bytes;
            self.n_held += n_bytes;
        }
    }

    /// Steps until a matrix is needed, about: whole ones until its expert is chosen, and the part
    /// of one until its layer's turn.
    fn distance(&self, id: ExpertId) -> f32 {
        let n = u32::try_from(self.stacks.len()).unwrap_or(u32::MAX).max(1);
        let after = (id.stack % n + n - self.present % n + n - 1) % n + 1;
        let layer = self.stacks.get(id.stack as usize).map(|s| s.layer as usize);
        let layer = layer.and_then(|layer| self.layers.get(layer));
        let rate = layer.map_or(0.0, |layer| layer.rates.of(id.expert as usize));
        after as f32 / n as f32 + 1.0 / rate.max(MIN_RATE) - 1.0
    }

    /// Gives up what is needed last until so many bytes fit; where there is a distance, only what
    /// is further away. `None`, with nothing given up, where they cannot fit.
    fn make_room(&mut self, n_bytes: u64, closer_than: Option<f32>) -> Option<Vec<ExpertId>> {
        if self.n_held.checked_add(n_bytes)? > self.budget {
            return None;
        }
        let mut freed = 0;
        let mut evicted = Vec::new();
        while self.n_bytes - freed + n_bytes > self.budget {
            let Some(victim) = self.next_victim(closer_than, &evicted) else {
                // What was chosen stays, and may go another time.
                if !evicted.is_empty() {
                    self.candidates.clear();
                }
                return None;
            };
            freed += self.bytes_of(victim);
            evicted.push(victim);
        }
        evicted.iter().for_each(|&id| self.evict(id));
        Some(evicted)
    }

    /// What goes next, that is not among those that are chosen to go already.
    fn next_victim(&mut self, closer_than: Option<f32>, chosen: &[ExpertId]) -> Option<ExpertId> {
        for is_fresh in [false, true] {
            if is_fresh {
                self.find_candidates(chosen);
            }
            while let Some(id) = self.candidates.pop() {
                if !self.may_go(id) {
                    continue;
                }
                match closer_than {
                    Some(distance) if self.distance(id) <= distance => {
                        self.candidates.push(id);
                        return None;
                    }
                    _ => return Some(id),
                }
            }
        }
        // What this step will use after what is needed now, only for that.
        let is_unused = |id: &ExpertId| self.slot(*id).is_some_and(|slot| slot.n_users == 0);
        let rest = self.resident.iter().copied().filter(is_unused);
        let rest = rest.filter(|id| closer_than.is_none() && !chosen.contains(id));
        rest.max()
    }

    fn may_go(&self, id: ExpertId) -> bool {
        self.slot(id).is_some_and(|slot| {
            let is_resident = matches!(slot.place, Place::Resident { .. });
            is_resident && slot.n_users == 0 && !slot.is_wanted
        })
    }

    /// The candidates that are needed last, the last of all at the end.
    fn find_candidates(&mut self, chosen: &[ExpertId]) {
        let all = self.resident.iter().copied();
        let mut all: Vec<_> = all
            .filter(|id| self.may_go(*id) && !chosen.contains(id))
            .map(|id| (self.distance(id), id))
            .collect();
        let order =
            |a: &(f32, ExpertId), b: &(f32, ExpertId)| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1));
        if let Some(rest) = all.len().checked_sub(CANDIDATES).filter(|&rest| rest > 0) {
            all.select_nth_unstable_by(rest, order);
            all.drain(..rest);
        }
        all.sort_unstable_by(order);
        self.candidates = all.into_iter().map(|(_, id)| id).collect();
    }

    fn evict(&mut self, id: ExpertId) {
        let n_bytes = self.bytes_of(id);
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        let Place::Resident { at } = std::mem::take(&mut slot.place) else {
            return;
        };
        self.n_bytes -= n_bytes;
        self.resident.swap_remove(at);
        if let Some(&moved) = self.resident.get(at)
            && let Some(slot) = self.slot_mut(moved)
        {
            slot.place = Place::Resident { at };
        }
    }
}
