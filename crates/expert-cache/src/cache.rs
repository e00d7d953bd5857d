//! [`ExpertCache`]: which experts of the models of a process are in memory within a budget of
//! bytes.
//!
//! What is given up is what will be needed last: an expert that a router chooses in a part `p` of
//! steps is needed after about `1 / p` of them, and within a step layers come in their order.
//! Models take their steps at different times: a clock that counts the choices of all routers tells
//! how far apart those of each model are, and so whose experts are needed last.
//!
//! Invariant: the bytes of what is in memory or being read never exceed the budget, what is in use
//! is not given up, and nothing is read that is there or being read. Knows no files.

use serde::{Deserialize, Serialize};

use crate::mixture::{ExpertState, Mixture, Place};

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
    /// The number of the model: see [`ExpertCache::add_mixture`].
    pub mixture: u32,
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
    /// Everything is in use or being read, or another model waits for it: ask again when something
    /// was released or read.
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
    /// By their numbers; those of models that are gone are free.
    mixtures: Vec<Option<Mixture>>,
    /// Choices of all routers.
    clock: u64,
}

impl ExpertCache {
    /// Nothing in memory, and no models yet.
    pub fn new(budget: u64) -> Self {
        Self {
            budget,
            n_bytes: 0,
            n_held: 0,
            mixtures: Vec::new(),
            clock: 0,
        }
    }

    /// With one model, number 0, that has these stacks, in the order in which a step uses them.
    pub fn with_stacks(budget: u64, stacks: &[Stack]) -> Self {
        let mut cache = Self::new(budget);
        let mixture = cache.add_mixture();
        for &stack in stacks {
            cache.add(mixture, stack);
        }
        cache
    }

    /// Adds a model without stacks, and returns its number.
    pub fn add_mixture(&mut self) -> u32 {
        let free = self.mixtures.iter().position(Option::is_none);
        let at = free.unwrap_or(self.mixtures.len());
        let number = u32::try_from(at).unwrap_or(u32::MAX);
        let mixture = Some(Mixture::new(number));
        match self.mixtures.get_mut(at) {
            Some(place) => *place = mixture,
            None => self.mixtures.push(mixture),
        }
        number
    }

    /// Removes a model: its bytes are the others'. No read of its experts may end after that.
    pub fn remove_mixture(&mut self, mixture: u32) {
        let place = self.mixtures.get_mut(mixture as usize);
        if let Some(gone) = place.and_then(Option::take) {
            self.n_bytes -= gone.n_bytes;
            self.n_held -= gone.held_bytes();
        }
    }

    /// Adds a stack to a model, whose steps use it after those that are there, and returns its
    /// number. Matrices that are larger than the budget never get a place: see
    /// [`smallest_budget`].
    pub fn add(&mut self, mixture: u32, stack: Stack) -> u32 {
        self.mixture_mut(mixture).map_or(0, |m| m.add(stack))
    }

    /// The most bytes that are in memory.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Bytes of what is in memory or being read.
    pub fn n_bytes(&self) -> u64 {
        self.n_bytes
    }

    /// Those of a model.
    pub fn bytes_of_mixture(&self, mixture: u32) -> u64 {
        self.mixture(mixture).map_or(0, |m| m.n_bytes)
    }

    /// Each expert of each layer of a model.
    pub fn states(&self, mixture: u32) -> Vec<Vec<ExpertState>> {
        self.mixture(mixture).map_or(Vec::new(), Mixture::states)
    }

    /// Takes what a layer's router chose for the rows of a step.
    pub fn routed(
        &mut self,
        mixture: u32,
        layer: u32,
        choices: &[Choice],
        n_rows: u32,
    ) -> RouterHits {
        self.clock += 1;
        let now = self.clock;
        let Some(mixture) = self.mixture_mut(mixture) else {
            return RouterHits::default();
        };
        mixture.count_step(layer, now);
        mixture.routed(layer, choices, n_rows)
    }

    /// A step of a model waits for a matrix: until the wait ends, no other model takes what its
    /// step still needs.
    pub fn wait_begins(&mut self, mixture: u32) {
        if let Some(mixture) = self.mixture_mut(mixture) {
            mixture.n_waiting += 1;
        }
    }

    /// The end of [`ExpertCache::wait_begins`].
    pub fn wait_ends(&mut self, mixture: u32) {
        if let Some(mixture) = self.mixture_mut(mixture) {
            mixture.n_waiting = mixture.n_waiting.saturating_sub(1);
        }
    }

    /// Asks for a matrix to compute with. Each [`Acquisition::Ready`] is released once.
    pub fn acquire(&mut self, id: ExpertId) -> Acquisition {
        let n_bytes = self.bytes_of(id);
        match self.slot_place(id) {
            Some(Place::Resident { .. }) => {
                let slot = self.mixture_mut(id.mixture).and_then(|m| m.slot_mut(id));
                if let Some(slot) = slot {
                    slot.n_users += 1;
                    if slot.n_users == 1 {
                        self.n_held += n_bytes;
                    }
                }
                Acquisition::Ready
            }
            Some(Place::Reading) => Acquisition::Reading,
            Some(Place::Absent) => match self.make_room(id, None) {
                Some(evicted) => Acquisition::Read { evicted },
                None => Acquisition::NoRoom,
            },
            None => Acquisition::NoRoom,
        }
    }

    /// Ends a use: the matrix may be given up.
    pub fn release(&mut self, id: ExpertId) {
        let n_bytes = self.bytes_of(id);
        let slot = self.mixture_mut(id.mixture).and_then(|m| m.slot_mut(id));
        let Some(slot) = slot else {
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
        let mixture = self.mixture(id.mixture)?;
        let slot = mixture.slot(id)?;
        if slot.place != Place::Absent {
            return None;
        }
        let time = if slot.is_wanted {
            0.0
        } else {
            mixture.time_until(id, self.clock)
        };
        self.make_room(id, Some(time))
    }

    /// The absent matrices that a step will use of a layer whose router has chosen, those first
    /// that it uses first.
    pub fn wanted(&self, mixture: u32, layer: u32) -> Vec<ExpertId> {
        let mixture = self.mixture(mixture);
        mixture.map_or(Vec::new(), |m| m.absent_of(layer, |slot| slot.is_wanted))
    }

    /// True if the step that is computed will use a matrix that is absent.
    pub fn needs(&self, id: ExpertId) -> bool {
        let slot = self.mixture(id.mixture).and_then(|m| m.slot(id));
        slot.is_some_and(|slot| slot.is_wanted && slot.place == Place::Absent)
    }

    /// The layer that comes after this one, in the next step after the last.
    pub fn layer_after(&self, mixture: u32, layer: u32) -> u32 {
        let n_layers = self.mixture(mixture).map_or(0, Mixture::n_layers);
        (layer + 1) % n_layers.max(1)
    }

    /// The absent experts of a layer that it will rather use than not, the likeliest first. A
    /// read of any other would be for nothing more often than not.
    pub fn likely(&self, mixture: u32, layer: u32) -> Vec<ExpertId> {
        let Some(mixture) = self.mixture(mixture) else {
            return Vec::new();
        };
        let rate = |id: &ExpertId| mixture.rate(layer, id.expert);
        let mut absent = mixture.absent_of(layer, |_| true);
        absent.retain(|id| rate(id) > 0.5);
        absent.sort_by(|a, b| rate(b).total_cmp(&rate(a)).then(a.cmp(b)));
        absent
    }

    /// Takes the end of a read.
    pub fn read_ended(&mut self, id: ExpertId, end: ReadEnd) {
        if self.slot_place(id) != Some(Place::Reading) {
            return;
        }
        let n_bytes = self.bytes_of(id);
        self.n_held -= n_bytes;
        let Some(mixture) = self.mixture_mut(id.mixture) else {
            return;
        };
        match end {
            ReadEnd::Done => mixture.set_resident(id),
            ReadEnd::Failed => {
                mixture.set_absent(id);
                self.n_bytes -= n_bytes;
            }
        }
    }

    fn mixture(&self, number: u32) -> Option<&Mixture> {
        self.mixtures.get(number as usize)?.as_ref()
    }

    fn mixture_mut(&mut self, number: u32) -> Option<&mut Mixture> {
        self.mixtures.get_mut(number as usize)?.as_mut()
    }

    fn slot_place(&self, id: ExpertId) -> Option<Place> {
        let slot = self.mixture(id.mixture)?.slot(id);
        slot.map(|slot| slot.place)
    }

    fn bytes_of(&self, id: ExpertId) -> u64 {
        self.mixture(id.mixture).map_or(0, |m| m.bytes_of(id))
    }

    /// Begins a read in the place of what is needed last, of any model; where there is a time, only
    /// of what is needed after it. `None`, with nothing given up, where it cannot fit.
    fn make_room(&mut self, id: ExpertId, sooner_than: Option<f32>) -> Option<Vec<ExpertId>> {
        let n_bytes = self.bytes_of(id);
        if self.n_held.checked_add(n_bytes)? > self.budget {
            return None;
        }
        let mut freed = 0;
        let mut evicted = Vec::new();
        while self.n_bytes - freed + n_bytes > self.budget {
            let Some(victim) = self.next_victim(id.mixture, sooner_than, &evicted) else {
                if !evicted.is_empty() {
                    let all = self.mixtures.iter_mut().flatten();
                    all.for_each(Mixture::forget_chosen);
                }
                return None;
            };
            freed += self.bytes_of(victim);
            evicted.push(victim);
        }
        for &gone in &evicted {
            if let Some(mixture) = self.mixture_mut(gone.mixture) {
                mixture.evict(gone);
            }
        }
        self.n_bytes = self.n_bytes - freed + n_bytes;
        self.n_held += n_bytes;
        self.mixture_mut(id.mixture)?.begin(id);
        Some(evicted)
    }

    /// The matrix that goes next for this model, of those that are not chosen to go already.
    fn next_victim(
        &mut self,
        mixture: u32,
        sooner_than: Option<f32>,
        chosen: &[ExpertId],
    ) -> Option<ExpertId> {
        let now = self.clock;
        let of_each = self.mixtures.iter_mut().flatten().filter_map(|mixture| {
            let id = mixture.last_needed(chosen)?;
            Some((mixture.time_until(id, now), id))
        });
        let last = of_each.max_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
        match (last, sooner_than) {
            (Some((time, _)), Some(limit)) if time <= limit => None,
            (Some((_, id)), _) => {
                self.mixture_mut(id.mixture)?.choose_last();
                Some(id)
            }
            (None, Some(_)) => None,
            // What this step will use after what is needed now, only for that; then what steps of
            // others would use that do not wait, and may have been given up.
            (None, None) => {
                let own = self.mixture(mixture)?.last_unused(chosen);
                own.or_else(|| {
                    let others = self.mixtures.iter().flatten();
                    let others = others.filter(|other| other.n_waiting == 0);
                    others.filter_map(|other| other.last_unused(chosen)).max()
                })
            }
        }
    }
}
