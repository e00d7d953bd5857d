//! [`PartsView`]: the parts of a scheduler, to look at.

use kv_core::SeqId;

use super::room::Room;
use crate::data::config::SchedulerConfig;
use crate::data::ids::Micros;
use crate::data::state::RequestState;
use crate::parts::parked::ParkedSet;
use crate::parts::prefix::PrefixCache;
use crate::parts::queue::Queue;
use crate::parts::running::RunningSet;
use crate::parts::swap::Swaps;

/// The parts that decisions look at, and the memory.
#[derive(Debug)]
pub(crate) struct PartsView<'a, M> {
    pub(crate) now: Micros,
    pub(crate) memory: &'a M,
    pub(crate) config: &'a SchedulerConfig,
    pub(crate) room: &'a Room,
    pub(crate) queue: &'a Queue,
    pub(crate) running: &'a RunningSet,
    pub(crate) prefix: &'a PrefixCache,
    pub(crate) parked: &'a ParkedSet,
    pub(crate) swaps: &'a Swaps,
    /// The free sequence that is given next.
    pub(crate) free: Option<SeqId>,
}

/// True if a cached prefix or a parked request can give its sequence up.
pub(crate) fn can_evict(prefix: &PrefixCache, parked: &ParkedSet) -> bool {
    !prefix.is_empty() || !parked.has_no_sequence()
}

impl<M> Clone for PartsView<'_, M> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<M> Copy for PartsView<'_, M> {}

impl<'a, M> PartsView<'a, M> {
    /// The most tokens that one request can have.
    pub(crate) fn capacity(&self) -> usize {
        self.room.capacity(self.config.n_ctx)
    }

    /// True if something makes room for requests without one of them being preempted.
    pub(crate) fn can_evict(&self) -> bool {
        can_evict(self.prefix, self.parked)
    }

    /// All requests, those that run first.
    pub(crate) fn requests(&self) -> impl Iterator<Item = &'a RequestState> + use<'a, M> {
        self.running.requests().chain(self.queue.iter())
    }
}
