//! [`Mixture`]: where the experts of one model are, how often its routers choose them, and which of
//! them it needs last.
//!
//! Invariant: what is in use, being read, or needed by the step that is computed is no candidate to
//! go. Knows no budget, and no other model.

use crate::cache::{Choice, ExpertId, RouterHits, Stack};
use crate::rates::UseRates;

/// The smallest rate that counts: below it, experts that were never chosen are all alike.
const MIN_RATE: f32 = 1e-4;

/// Experts to be given up are looked for so many at a time.
const CANDIDATES: usize = 32;

/// Steps that the rate of steps reaches back over.
const PACE_STEPS: u32 = 16;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Place {
    #[default]
    Absent,
    Reading,
    /// With its index among all of the model that are in memory.
    Resident {
        at: usize,
    },
}

#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slot {
    pub(crate) place: Place,
    pub(crate) n_users: u32,
    /// True if the step that is computed will use it.
    pub(crate) is_wanted: bool,
}

impl Slot {
    /// True if it is in memory and no step computes with it.
    fn is_unused(&self) -> bool {
        matches!(self.place, Place::Resident { .. }) && self.n_users == 0
    }
}

/// A layer: its stacks, and its router's choices so far.
#[derive(Clone, Debug)]
struct Layer {
    rates: UseRates,
    /// Its stacks.
    stacks: Vec<u32>,
    /// The choices of each expert.
    uses: Vec<ExpertCounts>,
}

/// The choices of an expert by a router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertCounts {
    /// Steps in which it was chosen.
    pub n_uses: u64,
    /// Those of them at which all its matrices were in memory, or being read.
    pub n_hits: u64,
}

/// An expert of a layer, with all its matrices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertState {
    /// Its matrices that are in memory.
    pub n_resident: u32,
    /// All of its matrices.
    pub n_matrices: u32,
    /// The times that it was chosen.
    pub counts: ExpertCounts,
}

/// The frequency of a model's steps, on the clock of all models.
#[derive(Clone, Copy, Debug, Default)]
struct Pace {
    /// When its last step began.
    last: u64,
    n_steps: u32,
    /// Steps for each tick, on average over the last steps.
    rate: f32,
}

impl Pace {
    fn step(&mut self, now: u64) {
        if self.n_steps > 0 {
            // Rates are averaged, not times: a pause that is over tells little of what comes.
            let gap = now.saturating_sub(self.last).max(1) as f32;
            self.rate += (1.0 / gap - self.rate) / self.n_steps.min(PACE_STEPS) as f32;
        }
        self.n_steps = self.n_steps.saturating_add(1);
        self.last = now;
    }

    /// The time that a step takes to come: one that has been away for long stays so for as long.
    fn of_step(&self, now: u64) -> f32 {
        let since = now.saturating_sub(self.last) as f32;
        let mean = if self.rate > 0.0 {
            1.0 / self.rate
        } else {
            1.0
        };
        mean.max(since)
    }
}

/// The experts of a model.
#[derive(Clone, Debug, Default)]
pub(crate) struct Mixture {
    number: u32,
    stacks: Vec<Stack>,
    /// `[stacks][experts]`.
    slots: Vec<Vec<Slot>>,
    layers: Vec<Layer>,
    resident: Vec<ExpertId>,
    /// The matrices that may go, the first to go last; found anew after each choice of a router.
    candidates: Vec<ExpertId>,
    /// The last stack of the layer whose router chose last.
    present: u32,
    /// That layer.
    layer: u32,
    pace: Pace,
    /// Of what is in memory or being read.
    pub(crate) n_bytes: u64,
    /// Steps that wait for one of its matrices.
    pub(crate) n_waiting: u32,
}

impl Mixture {
    pub(crate) fn new(number: u32) -> Self {
        Self {
            number,
            ..Self::default()
        }
    }

    pub(crate) fn add(&mut self, stack: Stack) -> u32 {
        let number = u32::try_from(self.stacks.len()).unwrap_or(u32::MAX);
        let n_experts = stack.n_experts as usize;
        let n_layers = self.layers.len().max(stack.layer as usize + 1);
        self.layers.resize_with(n_layers, || Layer {
            rates: UseRates::new(n_experts),
            stacks: Vec::new(),
            uses: vec![ExpertCounts::default(); n_experts],
        });
        if let Some(layer) = self.layers.get_mut(stack.layer as usize) {
            layer.stacks.push(number);
        }
        self.stacks.push(stack);
        self.slots.push(vec![Slot::default(); n_experts]);
        number
    }

    /// Takes what a layer's router chose at this time.
    pub(crate) fn routed(&mut self, layer: u32, choices: &[Choice], n_rows: u32) -> RouterHits {
        let mut routed = RouterHits::default();
        let Some(of_layer) = self.layers.get_mut(layer as usize) else {
            return routed;
        };
        self.candidates.clear();
        self.present = of_layer.stacks.last().copied().unwrap_or(0);
        for &stack in &of_layer.stacks {
            if let Some(slots) = self.slots.get_mut(stack as usize) {
                slots.iter_mut().for_each(|slot| slot.is_wanted = false);
            }
        }
        let n_experts = of_layer.uses.len();
        let mut parts = vec![0.0; n_experts];
        for choice in choices {
            let expert = choice.expert as usize;
            let before = routed.n_misses;
            for &stack in &of_layer.stacks {
                let slots = self.slots.get_mut(stack as usize);
                let Some(slot) = slots.and_then(|slots| slots.get_mut(expert)) else {
                    continue;
                };
                slot.is_wanted = true;
                match slot.place {
                    Place::Absent => routed.n_misses += 1,
                    _ => routed.n_hits += 1,
                }
            }
            if let (Some(part), Some(uses)) = (parts.get_mut(expert), of_layer.uses.get_mut(expert))
            {
                *part = choice.n_rows as f32 / n_rows.max(1) as f32;
                uses.n_uses += 1;
                uses.n_hits += u64::from(routed.n_misses == before);
            }
        }
        of_layer.rates.learn(&parts);
        routed
    }

    /// Takes the time at which a layer's router chose: its step began with the first layer.
    pub(crate) fn count_step(&mut self, layer: u32, now: u64) {
        if layer <= self.layer {
            self.pace.step(now);
        }
        self.layer = layer;
    }

    /// Each expert of each layer.
    pub(crate) fn states(&self) -> Vec<Vec<ExpertState>> {
        let of_layer = |layer: &Layer| {
            let state = |(expert, counts): (usize, &ExpertCounts)| {
                let slots = layer.stacks.iter();
                let slots = slots.filter_map(|&stack| self.slots.get(stack as usize)?.get(expert));
                let is_there = |slot: &&Slot| matches!(slot.place, Place::Resident { .. });
                let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
                ExpertState {
                    n_resident: number(slots.clone().filter(is_there).count()),
                    n_matrices: number(slots.count()),
                    counts: *counts,
                }
            };
            layer.uses.iter().enumerate().map(state).collect()
        };
        self.layers.iter().map(of_layer).collect()
    }

    pub(crate) fn n_layers(&self) -> u32 {
        u32::try_from(self.layers.len()).unwrap_or(u32::MAX)
    }

    /// The part of a layer's rows that will go through an expert.
    pub(crate) fn rate(&self, layer: u32, expert: u32) -> f32 {
        let layer = self.layers.get(layer as usize);
        layer.map_or(0.0, |layer| layer.rates.of(expert as usize))
    }

    pub(crate) fn absent_of(&self, layer: u32, is_one: impl Fn(&Slot) -> bool) -> Vec<ExpertId> {
        let stacks = self.layers.get(layer as usize).map(|l| l.stacks.as_slice());
        let of_stack = |&stack: &u32| {
            let slots = self.slots.get(stack as usize).into_iter().flatten();
            let id = move |expert| self.id(stack, expert);
            (0..).zip(slots).map(move |(e, slot)| (id(e), slot))
        };
        let all = stacks.into_iter().flatten().flat_map(of_stack);
        let absent = all.filter(|(_, slot)| slot.place == Place::Absent && is_one(slot));
        absent.map(|(id, _)| id).collect()
    }

    fn id(&self, stack: u32, expert: u32) -> ExpertId {
        ExpertId {
            mixture: self.number,
            stack,
            expert,
        }
    }

    pub(crate) fn slot(&self, id: ExpertId) -> Option<&Slot> {
        self.slots.get(id.stack as usize)?.get(id.expert as usize)
    }

    pub(crate) fn slot_mut(&mut self, id: ExpertId) -> Option<&mut Slot> {
        let slots = self.slots.get_mut(id.stack as usize)?;
        slots.get_mut(id.expert as usize)
    }

    pub(crate) fn bytes_of(&self, id: ExpertId) -> u64 {
        self.stacks.get(id.stack as usize).map_or(0, |s| s.n_bytes)
    }

    /// Bytes that cannot be given up: in use, or being read.
    pub(crate) fn held_bytes(&self) -> u64 {
        let of_stack = |(stack, slots): (&Stack, &Vec<Slot>)| {
            let is_held = |s: &&Slot| s.place == Place::Reading || s.n_users > 0;
            stack.n_bytes * slots.iter().filter(is_held).count() as u64
        };
        self.stacks.iter().zip(&self.slots).map(of_stack).sum()
    }

    /// Steps until a matrix is needed, about: whole ones until its expert is chosen, and the part
    /// of one until its layer's turn.
    fn steps_until(&self, id: ExpertId) -> f32 {
        let n = u32::try_from(self.stacks.len()).unwrap_or(u32::MAX).max(1);
        let after = (id.stack % n + n - self.present % n + n - 1) % n + 1;
        let layer = self.stacks.get(id.stack as usize).map(|s| s.layer);
        let rate = layer.map_or(0.0, |layer| self.rate(layer, id.expert));
        after as f32 / n as f32 + 1.0 / rate.max(MIN_RATE) - 1.0
    }

    /// The same on the clock of all models.
    pub(crate) fn time_until(&self, id: ExpertId, now: u64) -> f32 {
        self.steps_until(id) * self.pace.of_step(now)
    }

    /// The matrix that is needed last, of those that are not chosen to go already.
    pub(crate) fn last_needed(&mut self, chosen: &[ExpertId]) -> Option<ExpertId> {
        for is_fresh in [false, true] {
            if is_fresh {
                self.find_candidates(chosen);
            }
            while let Some(&id) = self.candidates.last() {
                if self.may_go(id) {
                    return Some(id);
                }
                self.candidates.pop();
            }
        }
        None
    }

    /// The one that [`Mixture::last_needed`] found goes.
    pub(crate) fn choose_last(&mut self) {
        self.candidates.pop();
    }

    /// The matrices that were chosen stay, and may go another time.
    pub(crate) fn forget_chosen(&mut self) {
        self.candidates.clear();
    }

    /// The last matrix that no step computes with at the moment, though one may need it.
    pub(crate) fn last_unused(&self, chosen: &[ExpertId]) -> Option<ExpertId> {
        let is_unused = |id: &ExpertId| self.slot(*id).is_some_and(Slot::is_unused);
        let rest = self.resident.iter().copied().filter(is_unused);
        rest.filter(|id| !chosen.contains(id)).max()
    }

    fn may_go(&self, id: ExpertId) -> bool {
        self.slot(id)
            .is_some_and(|slot| slot.is_unused() && !slot.is_wanted)
    }

    /// The candidates that are needed last, the last of all at the end.
    fn find_candidates(&mut self, chosen: &[ExpertId]) {
        let all = self.resident.iter().copied();
        let mut all: Vec<_> = all
            .filter(|id| self.may_go(*id) && !chosen.contains(id))
            .map(|id| (self.steps_until(id), id))
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

    /// A read begins.
    pub(crate) fn begin(&mut self, id: ExpertId) {
        let n_bytes = self.bytes_of(id);
        if let Some(slot) = self.slot_mut(id) {
            slot.place = Place::Reading;
            self.n_bytes += n_bytes;
        }
    }

    /// A matrix is in memory.
    pub(crate) fn set_resident(&mut self, id: ExpertId) {
        let at = self.resident.len();
        if let Some(slot) = self.slot_mut(id) {
            slot.place = Place::Resident { at };
            self.resident.push(id);
        }
    }

    /// A read has failed.
    pub(crate) fn set_absent(&mut self, id: ExpertId) {
        let n_bytes = self.bytes_of(id);
        if let Some(slot) = self.slot_mut(id) {
            slot.place = Place::Absent;
            self.n_bytes -= n_bytes;
        }
    }

    /// A matrix is given up.
    pub(crate) fn evict(&mut self, id: ExpertId) {
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
