//! [`Room`]: how many tokens a memory can hold, counted without planning.
//!
//! Decides whether a waiting request is admitted, so that a step of all admitted requests fits for
//! a while. Invariant: a request within [`Room::capacity`] can be computed alone to its end. What
//! really fits is decided by [`Memory::plan`](kv_core::memory::Memory::plan) for each step.

use kv_core::memory::{Memory, Streams};

use crate::data::active::{ActiveRequest, SharedPrefix};
use crate::data::config::{RowBytes, SchedulerConfig};

/// The cells and states of a memory, to count by.
#[derive(Clone, Debug)]
pub(crate) struct Room {
    parts: Vec<PartRoom>,
    /// Number of requests that can have recurrent states and be computed.
    n_with_states: usize,
    has_states: bool,
    is_endless: bool,
}

/// The cells that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Demand {
    /// Tokens that it has.
    n_tokens: usize,
    /// Number of these in cells of another request, where nothing is behind a window.
    n_shared: usize,
}

/// The tokens of a request that runs, or is to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Need {
    /// Tokens that it has.
    pub(crate) n_tokens: usize,
    /// The cells of the first ones, where they are of others.
    pub(crate) shared: Option<SharedPrefix>,
}

impl Need {
    fn of(active: &ActiveRequest) -> Self {
        Self {
            n_tokens: active.request.tokens.len(),
            shared: Some(active.shared),
        }
    }
}

/// The demand that each adds to the ones before it: the first that has cells of a root counts for
/// those that the others share with it.
fn demands(needs: impl IntoIterator<Item = Need>) -> Vec<Demand> {
    let mut first: Vec<SharedPrefix> = Vec::new();
    let of = |need: Need| {
        let n_tokens = need.n_tokens;
        let n_shared = need.shared.map_or(0, |shared| {
            match first.iter().find(|first| first.root == shared.root) {
                // Both have this much of the root's cells.
                Some(first) => first.n_tokens.min(shared.n_tokens).min(n_tokens),
                None => {
                    first.push(shared);
                    0
                }
            }
        });
        Demand { n_tokens, n_shared }
    };
    needs.into_iter().map(of).collect()
}

/// The cells of a part of the memory.
#[derive(Clone, Copy, Debug)]
struct PartRoom {
    /// Cells that all requests share, or that each has.
    n_cells: u64,
    streams: Streams,
    /// Tokens that one request keeps at most.
    width: Option<u64>,
}

impl PartRoom {
    /// Cells of a request that is to grow by so many tokens.
    fn n_needed(&self, demand: Demand, headroom: u64) -> u64 {
        let n_tokens = demand.n_tokens as u64 + headroom;
        match self.width {
            Some(width) => n_tokens.min(width),
            None => n_tokens.saturating_sub(demand.n_shared as u64),
        }
    }
}

impl Room {
    pub(crate) fn of<M: Memory>(memory: &M) -> Self {
        let capacity = memory.capacity();
        let parts = capacity.parts.iter().map(|part| PartRoom {
            n_cells: u64::from(part.n_cells),
            streams: part.streams,
            width: part.width.map(u64::from),
        });
        let n_seqs = memory.n_seqs() as usize;
        let n_with_states = capacity.states.map_or(n_seqs, |states| {
            // One request at a time needs as many rows again, for the states that it stores.
            let n_kept = states.n_rows_per_seq.max(1);
            ((states.n_rows / n_kept) as usize).saturating_sub(1).max(1)
        });
        Self {
            parts: parts.collect(),
            n_with_states,
            has_states: capacity.states.is_some(),
            is_endless: capacity.is_endless,
        }
    }

    /// True if the memory evicts tokens of a text that does not fit.
    pub(crate) fn is_endless(&self) -> bool {
        self.is_endless
    }

    /// True if a copy of a sequence cannot be cut anywhere: with windows and recurrent states.
    pub(crate) fn is_cut_only_at_ends(&self) -> bool {
        self.has_states || self.parts.iter().any(|part| part.width.is_some())
    }

    /// True if sequences have cells of their own.
    pub(crate) fn has_streams(&self) -> bool {
        let mut parts = self.parts.iter();
        parts.any(|part| part.streams == Streams::PerSequence)
    }

    /// Bytes that so many tokens of a request have at least.
    pub(crate) fn least_bytes(&self, n_tokens: usize, row_bytes: &RowBytes) -> u64 {
        let of_cells = self.parts.iter().enumerate().map(|(number, part)| {
            let n_cells = part.width.unwrap_or(u64::MAX).min(n_tokens as u64);
            let of_cell = row_bytes.cells.get(number).copied().unwrap_or(1);
            n_cells.saturating_mul(of_cell)
        });
        let of_state = if self.has_states {
            row_bytes.state.unwrap_or(1)
        } else {
            0
        };
        of_cells.fold(of_state, u64::saturating_add)
    }

    /// The most tokens that one request can have in the memory, and at most `n_ctx`.
    pub(crate) fn capacity(&self, n_ctx: u32) -> usize {
        if self.is_endless {
            return usize::MAX / 2;
        }
        // A window that is wider than its cells limits as a full one.
        let limits = self
            .parts
            .iter()
            .filter(|part| part.width.is_none_or(|width| width > part.n_cells));
        let cells = limits.map(|part| part.n_cells);
        cells.fold(u64::from(n_ctx), u64::min) as usize
    }

    /// True if requests can run with these, and each can grow by the headroom. The first always
    /// can.
    pub(crate) fn takes(
        &self,
        more: &[Need],
        running: &[ActiveRequest],
        config: &SchedulerConfig,
    ) -> bool {
        if running.is_empty() {
            return true;
        }
        let needs = running.iter().map(Need::of).chain(more.iter().copied());
        let demands = demands(needs);
        let headroom = u64::from(config.headroom.max(1));
        demands.len() <= config.n_slots() && self.fits(&demands, headroom)
    }

    /// True if requests fit together, and `headroom` tokens more for each.
    fn fits(&self, demands: &[Demand], headroom: u64) -> bool {
        demands.len() <= self.n_with_states
            && self.parts.iter().all(|part| {
                let needed = demands
                    .iter()
                    .map(|&demand| part.n_needed(demand, headroom));
                part.streams == Streams::PerSequence || needed.sum::<u64>() <= part.n_cells
            })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::memory::{Composite, RecurrentConfig, UnifiedConfig};
    use kv_core::{Causality, PartIdx, Window};

    use super::*;

    fn part(window: Window, n_cells: u32, streams: Streams) -> UnifiedConfig {
        UnifiedConfig {
            part: PartIdx(0),
            n_seqs: 4,
            n_cells,
            streams,
            window,
            causality: Causality::Causal,
        }
    }

    fn all<const N: usize>(n_tokens: [usize; N]) -> [Demand; N] {
        n_tokens.map(|n_tokens| Demand {
            n_tokens,
            n_shared: 0,
        })
    }

    #[test]
    fn shared_cells_count_once_where_nothing_is_behind_a_window() {
        let demands = [
            Demand {
                n_tokens: 20,
                n_shared: 0,
            },
            Demand {
                n_tokens: 21,
                n_shared: 19,
            },
        ];
        let full = Composite::unified(part(Window::Full, 24, Streams::Shared)).unwrap();
        assert!(Room::of(&full).fits(&demands, 1));
        assert!(!Room::of(&full).fits(&demands, 2));
        let windowed = Composite::unified(part(Window::Sliding(14), 24, Streams::Shared)).unwrap();
        assert!(!Room::of(&windowed).fits(&demands, 1));
    }

    /// Of three that share a root, the first counts in full, whichever it is.
    #[test]
    fn sequences_of_a_root_share_what_all_have_of_it() {
        let root = SharedPrefix::new(7);
        let need = |n_tokens, shared| Need {
            n_tokens,
            shared: Some(shared),
        };
        let shared = |needs: &[Need]| -> Vec<usize> {
            let demands = demands(needs.iter().copied());
            demands.iter().map(|demand| demand.n_shared).collect()
        };
        let (whole, long, short) = (
            need(100, root),
            need(90, root.cut(80)),
            need(95, root.cut(90).cut(60)),
        );
        assert_eq!(shared(&[whole, long, short]), [0, 80, 60]);
        assert_eq!(shared(&[short, long]), [0, 60]);
        let other = need(50, SharedPrefix::new(8));
        let none = Need {
            n_tokens: 9,
            shared: None,
        };
        assert_eq!(shared(&[other, none, long, whole]), [0, 0, 0, 80]);
    }

    #[test]
    fn a_full_window_limits_one_request_and_all_together() {
        let memory = Composite::unified(part(Window::Full, 32, Streams::Shared)).unwrap();
        let room = Room::of(&memory);
        assert_eq!((room.capacity(100), room.capacity(20)), (32, 20));
        assert!(room.fits(&all([10, 20]), 1));
        assert!(!room.fits(&all([10, 20]), 2));
    }

    #[test]
    fn a_sliding_window_limits_only_what_it_shows() {
        let memory = Composite::unified(part(Window::Sliding(8), 20, Streams::Shared)).unwrap();
        let room = Room::of(&memory);
        assert_eq!(room.capacity(100), 100);
        assert!(room.fits(&all([50, 60]), 1));
        assert!(!room.fits(&all([50, 60, 4]), 1));
        let narrow = Composite::unified(part(Window::Sliding(8), 6, Streams::Shared)).unwrap();
        assert_eq!(Room::of(&narrow).capacity(100), 6);
        let whole = Composite::unified(part(Window::Sliding(8), 8, Streams::Shared)).unwrap();
        assert_eq!(Room::of(&whole).capacity(100), 100);
    }

    #[test]
    fn sequences_with_cells_of_their_own_do_not_limit_each_other() {
        let memory = Composite::unified(part(Window::Full, 32, Streams::PerSequence)).unwrap();
        let room = Room::of(&memory);
        assert_eq!(room.capacity(100), 32);
        assert!(room.fits(&all([32, 32, 32]), 1));
    }

    #[test]
    fn states_limit_how_many_requests_run() {
        let few = RecurrentConfig::new(4).with_rows(3);
        let room = Room::of(&Composite::recurrent(few).unwrap());
        assert_eq!(room.capacity(1000), 1000);
        assert!(room.fits(&all([500, 9]), 1));
        assert!(!room.fits(&all([1, 1, 1]), 1));
        let two_states_each = RecurrentConfig::new(4).with_snapshots(1).with_rows(8);
        let room = Room::of(&Composite::recurrent(two_states_each).unwrap());
        assert!(room.fits(&all([1, 1, 1]), 1));
        assert!(!room.fits(&all([1, 1, 1, 1]), 1));
        let fewest = RecurrentConfig::new(4).with_rows(2);
        let room = Room::of(&Composite::recurrent(fewest).unwrap());
        assert!(room.fits(&all([1]), 1));
        assert!(!room.fits(&all([1, 1]), 1));
    }

    #[test]
    fn windows_and_states_are_cut_only_at_ends() {
        let full = part(Window::Full, 32, Streams::Shared);
        let narrow = UnifiedConfig {
            part: PartIdx(1),
            ..part(Window::Sliding(8), 16, Streams::Shared)
        };
        let own = part(Window::Full, 32, Streams::PerSequence);
        for (memory, is_cut_only_at_ends, has_streams) in [
            (Composite::unified(full), false, false),
            (Composite::unified(own), false, true),
            (Composite::iswa(&[full, narrow]), true, false),
            (Composite::recurrent(RecurrentConfig::new(4)), true, false),
        ] {
            let room = Room::of(&memory.unwrap());
            let got = (room.is_cut_only_at_ends(), room.has_streams());
            assert_eq!(got, (is_cut_only_at_ends, has_streams), "{room:?}");
        }
    }

    #[test]
    fn bytes_are_of_what_windows_show_and_of_one_state() {
        let full = part(Window::Full, 32, Streams::Shared);
        let narrow = UnifiedConfig {
            part: PartIdx(1),
            ..part(Window::Sliding(8), 16, Streams::Shared)
        };
        let memory = Composite::hybrid(&[full, narrow], RecurrentConfig::new(4)).unwrap();
        let row_bytes = RowBytes {
            cells: vec![20, 30],
            state: Some(900),
        };
        let least = |n_tokens, row_bytes| Room::of(&memory).least_bytes(n_tokens, row_bytes);
        assert_eq!(least(10, &row_bytes), 10 * 20 + 8 * 30 + 900);
        assert_eq!(least(5, &row_bytes), 5 * 20 + 5 * 30 + 900);
        // A row of unknown size has one.
        assert_eq!(least(10, &RowBytes::default()), 10 + 8 + 1);
        let room = Room::of(&Composite::unified(full).unwrap());
        assert_eq!(room.least_bytes(10, &row_bytes), 10 * 20);
    }
}
