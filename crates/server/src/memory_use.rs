//! [`MemoryUse`]: how many cells and states running requests hold, how many only cached prefixes
//! hold, and how many are free.
//!
//! Invariant: what a running request shares with a cached prefix is the request's. Counts one
//! frame; knows no request.

use std::future::poll_fn;
use std::time::Duration;

use cellar_engine::serve::{Frame, Service};
use kv_backend::BoxedBackend;
use kv_core::SeqSet;
use kv_core::cells::OwnedRun;

/// How long a frame may take to come: steps of long prompts last.
const WAIT: Duration = Duration::from_secs(1);

/// Cells of a part, or rows of states.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Use {
    pub(crate) running: u32,
    pub(crate) cached: u32,
    pub(crate) free: u32,
}

/// What the memory of a service is used for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryUse {
    /// Of each part.
    pub(crate) parts: Vec<Use>,
    /// Of recurrent states, where there are any.
    pub(crate) states: Option<Use>,
}

impl MemoryUse {
    /// As of now, or of the end of the step that is computed; `None` where that takes too long.
    pub(crate) async fn of(service: &Service<BoxedBackend>) -> Option<Self> {
        let mut watcher = service.watch();
        let update = tokio::time::timeout(WAIT, poll_fn(|cx| watcher.poll_update(cx))).await;
        update
            .ok()
            .flatten()
            .map(|update| Self::count(&update.frame))
    }

    fn count(frame: &Frame) -> Self {
        let mut running = SeqSet::EMPTY;
        for text in &frame.running {
            running.insert(text.seq);
        }
        let parts = frame.occupancy.parts.iter();
        let states = frame.occupancy.states.as_ref();
        Self {
            parts: parts
                .map(|part| Use::count(&part.runs, part.n_cells, &running))
                .collect(),
            states: states.map(|states| Use::count(&states.rows, states.n_rows, &running)),
        }
    }

    /// The share of the largest part that running requests have, from 0 to 1.
    pub(crate) fn running_share(&self) -> f64 {
        let largest = self.parts.iter().max_by_key(|part| part.total());
        match largest.map(|part| (part.running, part.total())) {
            None | Some((_, 0)) => 0.0,
            Some((running, total)) => f64::from(running) / f64::from(total),
        }
    }
}

impl Use {
    fn count(runs: &[OwnedRun], total: u32, running: &SeqSet) -> Self {
        let mut found = Self::default();
        for run in runs {
            if run.seqs.intersects(running) {
                found.running += run.n_cells;
            } else {
                found.cached += run.n_cells;
            }
        }
        Self {
            free: total.saturating_sub(found.running + found.cached),
            ..found
        }
    }

    fn total(self) -> u32 {
        self.running + self.cached + self.free
    }
}

#[cfg(test)]
mod tests {
    use kv_core::{CellIdx, Pos, SeqId};

    use super::*;

    #[test]
    fn shared_cells_are_those_of_running_requests() {
        let run = |first: u32, n_cells: u32, seqs: &[u32]| {
            let mut set = SeqSet::EMPTY;
            for seq in seqs {
                set.insert(SeqId(*seq));
            }
            OwnedRun {
                first: CellIdx(first),
                n_cells,
                pos: Pos(0),
                seqs: set,
            }
        };
        let runs = [run(0, 4, &[0, 1]), run(4, 3, &[1]), run(8, 2, &[0])];
        let part = Use::count(&runs, 16, &SeqSet::one(SeqId(0)));
        let expected = Use {
            running: 6,
            cached: 3,
            free: 7,
        };
        assert_eq!(part, expected);
        let small = Use {
            free: 8,
            ..Use::default()
        };
        let both = MemoryUse {
            parts: vec![small, part],
            states: None,
        };
        assert_eq!(both.running_share(), 6.0 / 16.0);
        assert_eq!(MemoryUse::default().running_share(), 0.0);
    }
}
