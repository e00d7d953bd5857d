//! Memory of models with interleaved windows (iSWA): most layers see a sliding window and some see
//! everything, or layers have windows of any number of kinds.
//!
//! A [`Composite`] of one [`Unified`] part for each window, with the same streams. A windowed part
//! needs only the cells that its window can show, and recycles them. Invariant: since a windowed
//! part remembers no token that a full one does not, its positions are those of the whole: full
//! layers see what lies before them, but a sequence can no longer return to it.

use serde::{Deserialize, Serialize};

use super::composite::Composite;
use super::config::{MemoryConfig, MemoryConfigError};
use super::unified::{Streams, Unified, UnifiedConfig};
use crate::window::Window;

/// Cells of a windowed part are a multiple of this.
const CELL_STEP: u32 = 256;

/// The number of cells a windowed part has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SwaSize {
    /// As many as windows and a ubatch need.
    #[default]
    Window,
    /// As many as a full part: costs memory, but sequences can return to any position.
    Full,
}

impl Composite {
    /// An empty memory with these parts.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where a part could hold nothing, or more than can be counted, or parts
    /// do not suit each other.
    pub fn iswa(parts: &[UnifiedConfig]) -> Result<Self, MemoryConfigError> {
        let parts: Result<Vec<Unified>, _> = parts.iter().map(|&part| Unified::new(part)).collect();
        Self::from_parts(parts?, None)
    }
}

impl MemoryConfig {
    /// Cells of each stream of the part for layers with this window: the windows of all active
    /// sequences that share them and the tokens of one ubatch, in steps of 256, and never more
    /// than a full part has.
    pub fn n_cells(&self, window: Window) -> u32 {
        let (Some(width), SwaSize::Window) = (window.width(), self.swa) else {
            return self.n_ctx;
        };
        let n_sharing = match self.streams {
            Streams::Shared => self.n_active(),
            Streams::PerSequence => 1,
        };
        let n_needed = width
            .saturating_mul(n_sharing)
            .saturating_add(self.n_ubatch);
        n_needed
            .checked_next_multiple_of(CELL_STEP)
            .map_or(self.n_ctx, |n| n.min(self.n_ctx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::Causality;

    fn config(n_ctx: u32, n_ubatch: u32, streams: Streams, n_seqs: u32) -> MemoryConfig {
        MemoryConfig {
            n_ctx,
            n_seqs,
            streams,
            n_ubatch,
            causality: Causality::Causal,
            swa: SwaSize::Window,
            n_snapshots: 0,
            n_active: None,
        }
    }

    #[test]
    fn w2_cells_of_the_windowed_part() {
        use Streams::{PerSequence, Shared};
        let table = [
            (4096, 1024, 512, Shared, 1, 1536),
            (4096, 512, 512, Shared, 1, 1024),
            (4096, 128, 512, Shared, 1, 768),
            (512, 1024, 512, Shared, 1, 512),
            (32768, 1024, 512, Shared, 4, 4608),
            (32768, 1024, 512, PerSequence, 4, 1536),
            (8192, 4096, 512, Shared, 4, 8192),
            (131_072, 512, 2048, Shared, 4, 4096),
        ];
        for (n_ctx, n_swa, n_ubatch, streams, n_seqs, n_cells) in table {
            let config = config(n_ctx, n_ubatch, streams, n_seqs);
            for window in [Window::Sliding(n_swa), Window::Chunked(n_swa)] {
                assert_eq!(config.n_cells(window), n_cells, "{config:?}, {window}");
            }
            assert_eq!(config.n_cells(Window::Full), n_ctx);
            let full = MemoryConfig {
                swa: SwaSize::Full,
                ..config
            };
            assert_eq!(full.n_cells(Window::Sliding(n_swa)), n_ctx);
        }
    }

    #[test]
    fn w2_a_windowed_part_is_never_larger_than_a_full_one() {
        let small = config(100, 8, Streams::Shared, 1);
        assert_eq!(small.n_cells(Window::Sliding(8)), 100);
        let extreme = config(u32::MAX, 512, Streams::Shared, 256);
        assert_eq!(extreme.n_cells(Window::Sliding(u32::MAX)), u32::MAX);
        let config = config(4096, 1, Streams::Shared, 1);
        assert_eq!(config.n_cells(Window::Sliding(0)), 256);
    }
}
