//! Checks the memory's size against a [`MemoryBudget`] before anything is allocated.
//!
//! Invariant: an error over the budget reports the numbers and the largest context that would fit.
//! Knows nothing of the machine: the caller or the backend sets the budget.

use cellar_scheduler::RowBytes;
use kv_backend::DeviceMemory;
use kv_core::{
    MAX_SEQS,
    memory::{BYTES_PER_CELL, Streams},
};
use kv_rows::{MemoryPlan, largest_n_ctx, largest_that_fits};
use model_core::architecture::Model;

use crate::config::{ConfigError, EngineConfig, MemoryBudget, Settings};

impl Settings {
    /// What the rows take, line by line.
    pub fn memory_plan(&self) -> MemoryPlan {
        MemoryPlan::with_snapshots(&self.layout, self.n_snapshot_rows())
    }

    /// What a row of each kind takes, over all layers.
    pub fn row_bytes(&self) -> RowBytes {
        let mut cells = Vec::new();
        let mut of_states = 0;
        for rows in self.memory_plan().rows() {
            let Some(part) = rows.part else {
                of_states += rows.bytes();
                continue;
            };
            let part = part.as_usize();
            if cells.len() <= part {
                cells.resize(part + 1, 0);
            }
            cells[part] += rows.row_bytes as u64;
        }
        let (_, memory) = self.memory_config();
        let n_rows = memory.n_state_rows() as u64;
        RowBytes {
            cells,
            state: Some(of_states / n_rows.max(1)),
        }
    }

    /// Cells of all parts.
    pub fn n_cells(&self) -> u64 {
        let mut parts: Vec<_> = self.layout.layers().iter().collect();
        parts.sort_by_key(|layer| layer.part);
        parts.dedup_by_key(|layer| layer.part);
        parts.iter().map(|layer| layer.n_rows as u64).sum()
    }

    /// Bytes of all rows and of what is kept of the cells.
    pub fn memory_bytes(&self) -> u64 {
        let of_cells = self.n_cells().saturating_mul(BYTES_PER_CELL);
        of_cells.saturating_add(self.layout.bytes())
    }
}

impl EngineConfig {
    /// The settings, whatever the budget is.
    ///
    /// # Errors
    /// As [`EngineConfig::settings`].
    pub fn sizes(&self, model: &dyn Model) -> Result<Settings, ConfigError> {
        let sizes = self.sizes_with_room(model, 0)?;
        if self.idle_bytes == 0 {
            return Ok(sizes);
        }
        let bytes = |n_more| {
            let sizes = self.sizes_with_room(model, n_more);
            sizes.map_or(u64::MAX, |sizes| sizes.memory_bytes())
        };
        let n_seqs = self.n_seqs;
        let most = match self.streams {
            Streams::Shared => n_seqs.saturating_sub(sizes.n_active()),
            Streams::PerSequence => (MAX_SEQS as u32).saturating_sub(n_seqs),
        };
        let limit = sizes.memory_bytes().saturating_add(self.idle_bytes);
        let largest = largest_that_fits(most, |n_more| bytes(n_more) <= limit);
        // What costs nothing brings nothing.
        let largest_bytes = bytes(largest);
        let n_more = largest_that_fits(largest, |n_more| bytes(n_more) < largest_bytes);
        let is_less = bytes(n_more) < largest_bytes;
        self.sizes_with_room(model, n_more + u32::from(is_less))
    }

    /// The largest context length whose memory takes at most `n_bytes`, with all else as it is;
    /// `None` where none does.
    pub fn largest_n_ctx(&self, model: &dyn Model, n_bytes: u64) -> Option<u32> {
        let fits = |n_ctx| {
            let config = Self {
                n_ctx: Some(n_ctx),
                ..self.clone()
            };
            let settings = config.sizes(model);
            settings.is_ok_and(|settings| settings.memory_bytes() <= n_bytes)
        };
        largest_n_ctx(fits)
    }

    /// The same with what the device has free as the budget, where that is the budget and is known.
    pub(crate) fn within(&self, device: Option<DeviceMemory>) -> Self {
        let budget = match (self.budget, device) {
            (MemoryBudget::Device, Some(device)) => MemoryBudget::Bytes(device.free),
            (budget, _) => budget,
        };
        Self {
            budget,
            ..self.clone()
        }
    }

    /// Whether these settings stay within the budget.
    pub(crate) fn check_budget(
        &self,
        model: &dyn Model,
        settings: &Settings,
    ) -> Result<(), ConfigError> {
        let (MemoryBudget::Bytes(available), wanted) = (self.budget, settings.memory_bytes())
        else {
            return Ok(());
        };
        if wanted <= available {
            return Ok(());
        }
        Err(ConfigError::OverBudget {
            n_ctx: settings.n_ctx,
            n_cells: settings.n_cells(),
            wanted,
            available,
            largest_n_ctx: self.largest_n_ctx(model, available),
        })
    }
}
