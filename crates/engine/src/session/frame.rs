//! [`Frame`]: the memory and the requests of a service at one moment, and [`ServiceEvent`]: what
//! happened between two of them. Plain data, without text.
//!
//! Invariant: a frame is of one moment between two steps, so its cells belong to the sequences of
//! its requests and cached prefixes. Tokens are in it only where
//! [`ServiceConfig::excerpts`](super::ServiceConfig::excerpts) asks for them.

use std::time::Duration;

use cellar_scheduler::{Counters, End, Micros, Note, Priority, RequestId, Reuse, Scheduler};
use kv_backend::{Backend, ExpertMap, ExpertUse};
use kv_core::memory::{Memory, Occupancy};
use kv_core::{SeqId, TokenId};

use super::config::ExcerptLen;

/// The memory and the requests of a service at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Frame {
    /// Frames before it.
    pub number: u64,
    /// Time since the service started.
    pub at: Duration,
    /// Which cells belong to which sequences.
    pub occupancy: Occupancy,
    /// Requests that have a sequence, what goes first first.
    pub running: Vec<RunningText>,
    /// Requests that wait for one.
    pub waiting: Vec<WaitingText>,
    /// Cached prefixes.
    pub cached: Vec<CachedText>,
    /// What the scheduler has done so far.
    pub counters: Counters,
    /// The experts of its mixtures, where they are read as they are needed.
    pub experts: Option<ExpertFrame>,
}

/// The experts of mixtures at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExpertFrame {
    /// Their hits and reads.
    pub used: ExpertUse,
    /// Each of them.
    pub map: ExpertMap,
}

/// A request that has a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunningText {
    /// The request.
    pub request: RequestId,
    /// Its sequence.
    pub seq: SeqId,
    /// Tokens of its prompt.
    pub n_prompt: usize,
    /// Tokens, of prompt and text, that the memory holds.
    pub n_done: usize,
    /// Tokens of prompt and text.
    pub n_tokens: usize,
    /// The same for texts of one prompt.
    pub group: RequestId,
    /// Its tokens, where they are wanted.
    pub excerpt: Option<Excerpt>,
}

/// A request that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingText {
    /// The request.
    pub request: RequestId,
    /// Which requests go before it.
    pub priority: Priority,
    /// Tokens of prompt and text.
    pub n_tokens: usize,
    /// How long it has waited.
    pub waited: Duration,
    /// Whether it ran before, and was preempted.
    pub was_admitted: bool,
}

/// A cached prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedText {
    /// The sequence that holds it.
    pub seq: SeqId,
    /// The request whose tokens they were.
    pub request: RequestId,
    /// Its tokens.
    pub n_tokens: usize,
    /// Requests that it was used for.
    pub n_hits: u32,
    /// For how long it was not used.
    pub idle: Duration,
    /// Its tokens, where they are wanted.
    pub excerpt: Option<Excerpt>,
}

/// Tokens from the beginning and the end of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Excerpt {
    /// The first tokens.
    pub head: Vec<TokenId>,
    /// Tokens between, which are left out.
    pub n_omitted: usize,
    /// The last tokens.
    pub tail: Vec<TokenId>,
}

/// Something that happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceEvent {
    /// Events before it.
    pub number: u64,
    /// Time since the service started.
    pub at: Duration,
    /// What it was.
    pub kind: EventKind,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// A request came.
    Submitted {
        /// The request: the first of its texts.
        request: RequestId,
        /// Texts of the prompt.
        n_texts: usize,
        /// Tokens of the prompt.
        n_prompt: usize,
    },
    /// The scheduler did not take it.
    Refused {
        /// The request.
        request: RequestId,
    },
    /// It was given a sequence for the first time.
    Admitted {
        /// The request.
        request: RequestId,
        /// Its sequence.
        seq: SeqId,
        /// How much of it was cached, and why not more.
        reuse: Reuse,
    },
    /// It was given a sequence again after a preemption.
    Resumed {
        /// The request.
        request: RequestId,
        /// Its sequence.
        seq: SeqId,
        /// How much of it was cached, and why not more.
        reuse: Reuse,
    },
    /// Its first token was chosen.
    FirstToken {
        /// The request.
        request: RequestId,
    },
    /// Its sequence was taken from it.
    Preempted {
        /// The request.
        request: RequestId,
        /// Tokens that have to be computed again.
        n_tokens: usize,
    },
    /// Something happened to cached prefixes.
    Cache(Note),
    /// It has ended.
    Ended {
        /// The request.
        request: RequestId,
        /// Why.
        end: End,
        /// Tokens of its text.
        n_tokens: usize,
    },
}

impl Excerpt {
    fn new(tokens: &[TokenId], len: ExcerptLen) -> Option<Self> {
        let len = match len {
            ExcerptLen::None => return None,
            ExcerptLen::Tokens(n) => n.get() as usize,
        };
        let n_head = tokens.len().min(len);
        let (head, rest) = tokens.split_at(n_head);
        let n_omitted = rest.len().saturating_sub(len);
        Some(Self {
            head: head.to_vec(),
            n_omitted,
            tail: rest[n_omitted..].to_vec(),
        })
    }
}

impl ExpertFrame {
    /// Those of a backend.
    pub(crate) fn of(backend: &impl Backend) -> Option<Self> {
        let meter = backend.expert_meter()?;
        let (used, map) = (meter.get(), meter.map()?);
        Some(Self { used, map })
    }
}

impl Frame {
    /// What is there between two steps.
    pub(crate) fn new(
        now: Micros,
        memory: &impl Memory,
        scheduler: &Scheduler,
        excerpts: ExcerptLen,
    ) -> Self {
        let since = |then: Micros| Duration::from_micros(now.0.saturating_sub(then.0));
        let running = scheduler.running().map(|request| RunningText {
            request: request.id,
            seq: request.seq,
            n_prompt: request.n_prompt,
            n_done: request.n_done,
            n_tokens: request.tokens.len(),
            group: request.group,
            excerpt: Excerpt::new(request.tokens, excerpts),
        });
        let waiting = scheduler.waiting().map(|request| WaitingText {
            request: request.id,
            priority: request.priority,
            n_tokens: request.tokens.len(),
            waited: since(request.since),
            was_admitted: request.was_admitted,
        });
        let cached = scheduler.cached().map(|prefix| CachedText {
            seq: prefix.seq,
            request: prefix.request,
            n_tokens: prefix.tokens.len(),
            n_hits: prefix.n_hits,
            idle: since(prefix.last_used),
            excerpt: Excerpt::new(prefix.tokens, excerpts),
        });
        Self {
            number: 0,
            at: Duration::from_micros(now.0),
            occupancy: memory.occupancy().unwrap_or_default(),
            running: running.collect(),
            waiting: waiting.collect(),
            cached: cached.collect(),
            counters: scheduler.counters(),
            experts: None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::num::NonZeroU32;

    use super::*;

    #[test]
    fn excerpts_have_both_ends_once() {
        let two = ExcerptLen::Tokens(NonZeroU32::new(2).unwrap());
        let excerpt = |n| {
            let tokens: Vec<TokenId> = (0..n).map(TokenId).collect();
            let Excerpt {
                head,
                n_omitted,
                tail,
            } = Excerpt::new(&tokens, two).unwrap();
            let ids = |tokens: Vec<TokenId>| tokens.into_iter().map(|t| t.0).collect::<Vec<_>>();
            (ids(head), n_omitted, ids(tail))
        };
        assert_eq!(excerpt(0), (vec![], 0, vec![]));
        assert_eq!(excerpt(3), (vec![0, 1], 0, vec![2]));
        assert_eq!(excerpt(4), (vec![0, 1], 0, vec![2, 3]));
        assert_eq!(excerpt(7), (vec![0, 1], 3, vec![5, 6]));
        assert!(Excerpt::new(&[TokenId(1)], ExcerptLen::None).is_none());
    }
}
