//! [`Fleet`]: the services of a replay behind a router, on one clock.
//!
//! Invariant: the service whose clock is behind goes on, so nobody sees what happens later; one
//! service is replayed as it is without a router. The router knows what each service has and how
//! much it computes, at once and without an error.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use cellar_scheduler::Request;

use crate::error::TraceError;
use crate::reader::Trace;
use crate::replay::{FleetConfig, ReplayConfig, ReplayReport};
use crate::replica::Replica;
use crate::shared_tier::SharedTier;

/// Which of several services a request goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Router {
    /// One after the other.
    RoundRobin,
    /// By consistent hashing of the beginning of its prompt: prompts that begin alike go to the
    /// same one.
    Hash {
        /// Tokens of the beginning. Those that all prompts share are no choice.
        n_tokens: usize,
    },
    /// The one that has to compute least of its prompt, where a lead counts, too: a twentieth of
    /// the tokens that it has computed more than the one that has computed least. So a service
    /// gets ahead of others only by what it saves.
    Longest,
}

/// How many tokens a service may have computed more than others for each token that it saves. With
/// 10, up to half a point less is found in Mooncake's public traces, with 50 the same.
const LEAD_PER_TOKEN: usize = 20;

/// Services of a replay.
pub(crate) struct Fleet<'a> {
    trace: &'a Trace,
    replicas: Vec<Replica<'a>>,
    router: Router,
    tier: Option<SharedTier>,
    n_sent: usize,
    /// Texts that have ended by now, and when those end that have ended later, on services whose
    /// clocks are ahead.
    n_ended: usize,
    later_ends: BinaryHeap<Reverse<u64>>,
}

/// The work of a service that a request may have to wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReplicaRun {
    Something,
    Nothing,
}

impl<'a> Fleet<'a> {
    /// Services with empty memories.
    ///
    /// # Errors
    /// As [`replay_fleet`](crate::replay_fleet).
    pub(crate) fn new(
        trace: &'a Trace,
        config: &ReplayConfig,
        fleet: &FleetConfig,
    ) -> Result<Self, TraceError> {
        let replicas = (0..fleet.n_replicas.get()).map(|_| Replica::new(trace, config));
        let tier = fleet.tier_bytes.map(|bytes| SharedTier::new(trace, bytes));
        Ok(Self {
            trace,
            replicas: replicas.collect::<Result<_, _>>()?,
            router: fleet.router,
            tier: tier.transpose()?,
            n_sent: 0,
            n_ended: 0,
            later_ends: BinaryHeap::new(),
        })
    }

    /// What came of the requests, in each service.
    pub(crate) fn reports(&self) -> impl Iterator<Item = ReplayReport> + '_ {
        self.replicas.iter().map(Replica::report)
    }

    /// Goes on until nothing is left to do.
    pub(crate) fn run(&mut self) -> Result<(), TraceError> {
        loop {
            self.collect();
            let replicas = self.replicas.iter().enumerate();
            let busy = replicas.filter(|(_, replica)| !replica.is_idle());
            let behind = busy.map(|(at, replica)| (replica.now(), at)).min();
            let Some((time, at)) = behind else {
                let Some(time) = self.next_time() else {
                    return Ok(());
                };
                self.replicas.iter_mut().for_each(|one| one.wake(time));
                if !self.send(time, ReplicaRun::Nothing) {
                    self.replicas.iter_mut().for_each(Replica::cancel);
                }
                continue;
            };
            if !self.send(time, ReplicaRun::Something) {
                self.replicas[at].cancel();
                self.replicas[at].step()?;
            }
        }
    }

    /// Takes in what has ended.
    fn collect(&mut self) {
        for replica in &mut self.replicas {
            self.later_ends
                .extend(replica.take_end_times().into_iter().map(Reverse));
            for text in replica.take_ended() {
                if let Some(tier) = &mut self.tier {
                    tier.publish(&text);
                }
            }
        }
    }

    /// When something comes, while nothing runs.
    fn next_time(&self) -> Option<u64> {
        let next = self.trace.requests.get(self.n_sent).map(|next| {
            let end = self.later_ends.peek();
            let end = end.filter(|_| self.n_ended < next.n_ended);
            next.at.0.max(end.map_or(0, |end| end.0))
        });
        let cancels = self.replicas.iter().filter_map(Replica::next_cancel);
        next.into_iter().chain(cancels).min()
    }

    /// Sends the next request, where it is due. Returns whether it did.
    fn send(&mut self, time: u64, running: ReplicaRun) -> bool {
        while self.later_ends.peek().is_some_and(|end| end.0 <= time) {
            self.later_ends.pop();
            self.n_ended += 1;
        }
        let trace = self.trace;
        let Some(next) = trace.requests.get(self.n_sent) else {
            return false;
        };
        // Where nothing runs, nothing more ends.
        let may_end = running == ReplicaRun::Something || !self.later_ends.is_empty();
        if next.at.0 > time || (self.n_ended < next.n_ended && may_end) {
            return false;
        }
        let request = &next.request;
        let n_stored = self.tier.as_mut().map_or(0, |tier| tier.find(request));
        let at = self.choose(request);
        self.replicas[at].submit(time, next, &trace.texts, n_stored);
        self.n_sent += 1;
        true
    }

    /// The service that a request goes to.
    fn choose(&self, request: &Request) -> usize {
        let n = self.replicas.len();
        match self.router {
            _ if n <= 1 => 0,
            Router::RoundRobin => self.n_sent % n,
            Router::Hash { n_tokens } => {
                // The hash of a token is that of all before it, too.
                let n_tokens = (n_tokens / self.trace.unit as usize).max(1);
                let last = request.prompt.len().min(n_tokens).saturating_sub(1);
                let key = request.prompt.get(last).map_or(0, |token| token.0);
                highest_weight(u64::from(key), n)
            }
            Router::Longest => {
                let work = self.replicas.iter().map(Replica::work);
                let least = work.clone().min().unwrap_or(0);
                let costs = self.replicas.iter().zip(work).map(|(replica, work)| {
                    let n_held = replica.n_held(request.prefix, &request.prompt);
                    let n_missing = request.prompt.len().saturating_sub(n_held);
                    (n_missing * LEAD_PER_TOKEN + (work - least), work)
                });
                let costs = costs.enumerate().map(|(at, cost)| (cost, at));
                costs.min().map_or(0, |(_, at)| at)
            }
        }
    }
}

/// The service with the highest weight for a key: with one more service, a key either stays where
/// it is or goes to the new one.
fn highest_weight(key: u64, n: usize) -> usize {
    (0..n)
        .max_by_key(|&at| mixed(mixed(key) ^ at as u64))
        .unwrap_or(0)
}

/// A number all of whose bits depend on all bits of another one (the finalizer of SplitMix64).
fn mixed(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_more_service_takes_its_part_of_the_keys_and_moves_no_others() {
        let chosen = |n| (0..10_000).map(move |key| highest_weight(key, n));
        let mut counts = [0; 8];
        chosen(8).for_each(|at| counts[at] += 1);
        assert!(
            counts.iter().all(|n| (1100..1400).contains(n)),
            "{counts:?}"
        );
        let moved = chosen(7).zip(chosen(8)).filter(|(old, new)| old != new);
        assert!(moved.clone().all(|(_, new)| new == 7));
        assert_eq!(moved.count(), counts[7]);
    }
}
