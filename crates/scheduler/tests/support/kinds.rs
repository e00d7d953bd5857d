//! Memories of every kind, from ample to just enough for one request.

use kv_core::memory::{Composite, RecurrentConfig, Streams, UnifiedConfig};
use kv_core::{Causality, PartIdx, Window};

/// A kind of memory.
#[derive(Clone, Copy, Debug)]
pub enum Kind {
    Unified,
    PerSequence,
    Sliding,
    Chunked,
    Interleaved,
    Recurrent,
    FewStates,
    Hybrid,
    HybridInterleaved,
    Snapshots,
    OldRows,
}

impl Kind {
    pub const ALL: [Self; 11] = [
        Self::Unified,
        Self::PerSequence,
        Self::Sliding,
        Self::Chunked,
        Self::Interleaved,
        Self::Recurrent,
        Self::FewStates,
        Self::Hybrid,
        Self::HybridInterleaved,
        Self::Snapshots,
        Self::OldRows,
    ];

    /// A memory of this kind.
    pub fn memory(self, n_seqs: u32, n_cells: u32) -> Composite {
        let part = |number: u32, window: Window, n_cells: u32| UnifiedConfig {
            part: PartIdx(number),
            n_seqs,
            n_cells,
            streams: match self {
                Self::PerSequence => Streams::PerSequence,
                _ => Streams::Shared,
            },
            window,
            causality: Causality::Causal,
        };
        let full = part(0, Window::Full, n_cells);
        let narrow = part(1, Window::Sliding(8), (n_cells / 2).max(9));
        let states = RecurrentConfig::new(n_seqs);
        let made = match self {
            Self::Unified | Self::PerSequence => Composite::unified(full),
            Self::Sliding => {
                Composite::unified(part(0, Window::Sliding(12), (n_cells / 4).max(13)))
            }
            Self::Chunked => {
                Composite::unified(part(0, Window::Chunked(10), (n_cells / 3).max(11)))
            }
            Self::Interleaved => Composite::iswa(&[full, narrow]),
            Self::Recurrent => Composite::recurrent(states.with_snapshots(1)),
            Self::FewStates => Composite::recurrent(states.with_rows(n_seqs.max(2))),
            Self::Hybrid => Composite::hybrid(&[full], states),
            Self::HybridInterleaved => {
                Composite::hybrid(&[full, narrow], states.with_rows(n_seqs + 2))
            }
            Self::Snapshots => Composite::hybrid(&[full, narrow], states.with_snapshots(3)),
            Self::OldRows => {
                let old = part(0, Window::Older { by: 6, from: 3 }, n_cells);
                let kept = Window::Ends { first: 3, last: 6 };
                Composite::iswa(&[old, part(1, kept, (n_cells / 2).max(10))])
            }
        };
        made.unwrap()
    }
}
