//! The view of a session from outside: its parts, and where it stands after a step.
//!
//! Invariant: looking changes nothing.

use std::sync::Arc;

use cellar_prefix_store::TierCounts;
use cellar_scheduler::{Counters, Scheduler};
use kv_backend::{Backend, ExpertMeter, ExpertUse};
use kv_core::memory::{Memory, PartCapacity};
use kv_rows::MemoryPlan;

use super::Session;
use super::store::SessionStore;
use crate::decode::Engine;
use crate::pictures::Tower;

/// The parts and rows of a session's memory.
#[derive(Clone, Debug)]
pub struct MemoryLayout {
    /// Its parts, without that of sources.
    pub parts: Vec<PartCapacity>,
    /// Rows of each layer and kind, in bytes.
    pub plan: MemoryPlan,
    /// Requests and cached prefixes that can be in it.
    pub n_seqs: u32,
}

/// The state of a session after its last step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceStatus {
    /// What the scheduler has done.
    pub counters: Counters,
    /// Requests that were admitted and have not ended.
    pub n_running: usize,
    /// KV cells of the memory's largest part; 0 where no layer has attention.
    pub n_cells: u32,
    /// Of these, the cells that hold tokens: of running requests and of cached prefixes.
    pub n_cells_used: u32,
    /// Bytes that preempted requests have in the memory of the host.
    pub swapped_bytes: u64,
    /// Bytes that they have in files.
    pub spilled_bytes: u64,
    /// The counts of the tiers of the store of prefixes.
    pub tiers: TierCounts,
    /// What reading experts took, where they are read as they are needed.
    pub experts: Option<ExpertUse>,
    /// Whether the engine's device is lost
    /// ([`BackendError::DeviceLost`](kv_backend::BackendError::DeviceLost)): no later step
    /// can be computed.
    pub has_lost_device: bool,
}

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// The encoder of pictures, to look at.
    pub fn tower(&self) -> Option<&Tower> {
        self.tower.as_ref()
    }

    /// The engine, to look at.
    pub fn engine(&self) -> &Engine<B, M> {
        &self.engine
    }

    /// The scheduler, to look at.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// The counter of reads of experts, where they are read as they are needed.
    pub(crate) fn expert_meter(&self) -> Option<Arc<ExpertMeter>> {
        self.engine.backend().expert_meter()
    }

    /// The running requests, and the use of the memory.
    pub fn status(&self) -> ServiceStatus {
        let cells = self.engine.memory().cell_use();
        let running = self.texts.values().filter(|live| live.was_admitted());
        ServiceStatus {
            counters: self.scheduler.counters(),
            n_running: running.count(),
            n_cells: cells.n_cells,
            n_cells_used: cells.n_used,
            swapped_bytes: self.scheduler.swapped_bytes(),
            spilled_bytes: self.scheduler.spilled_bytes(),
            tiers: self
                .store
                .as_ref()
                .map_or(TierCounts::default(), SessionStore::counts),
            experts: self.expert_meter().map(|meter| meter.get()),
            has_lost_device: self.intake.has_lost_device(),
        }
    }

    /// The parts and rows of the memory.
    pub fn memory_layout(&self) -> MemoryLayout {
        let memory = self.engine.memory();
        MemoryLayout {
            parts: memory.capacity().parts,
            plan: self.engine.settings().memory_plan(),
            n_seqs: memory.n_seqs(),
        }
    }
}
