//! The lines of a trace as types: [`TraceHeader`], then one [`TraceLine`] for each event.
//!
//! Invariant: a line is complete in itself, and what was written by an older version with the same
//! [`TRACE_VERSION`] is read. Holds no token ids: [`PrefixHashes`].

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;

use cellar_scheduler::{DropReason, End, Note, Priority, Reuse, Tenant, TenantId, TenantLimits};
use kv_core::TokenId;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::layout::{MemoryShape, TraceLimits};

/// The version of the format that is written and read.
pub const TRACE_VERSION: u32 = 1;

/// The first line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TraceHeader {
    /// The version of the format; the key tells a trace from other files.
    pub(crate) cellar_trace: u32,
    pub(crate) memory: MemoryShape,
    pub(crate) limits: TraceLimits,
}

/// A line after the header.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct TraceLine {
    /// Microseconds since the service started.
    pub(crate) at: u64,
    pub(crate) event: TraceEvent,
}

/// What happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TraceEvent {
    /// A request came.
    Submit(SubmittedRequest),
    /// The scheduler did not take it.
    Refuse { request: u64 },
    /// It was given a sequence for the first time.
    Admit(AdmittedRequest),
    /// The same after a preemption.
    Resume(AdmittedRequest),
    /// Its first tokens are those of another sequence.
    Share {
        request: u64,
        seq: u32,
        from: u32,
        n_tokens: usize,
    },
    /// Its tokens stay for others.
    Cache {
        request: u64,
        seq: u32,
        n_tokens: usize,
    },
    /// A cached prefix was dropped.
    Drop {
        seq: u32,
        n_tokens: usize,
        n_hits: u32,
        why: TracedDrop,
    },
    /// What the memory held of it went to the host, from there to the disk, or came back.
    Swap {
        request: u64,
        way: TracedWay,
        n_tokens: usize,
        n_bytes: u64,
    },
    /// Its sequence was taken from it.
    Preempt { request: u64, n_tokens: usize },
    /// A step was computed.
    Step(ComputedStep),
    /// It has ended.
    End { request: u64, end: TracedEnd },
    /// The service has ended: nothing follows.
    Stop,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct SubmittedRequest {
    /// The first of its texts; the others follow.
    pub(crate) request: u64,
    pub(crate) n_texts: u64,
    pub(crate) priority: TracedPriority,
    /// The salt of the prefixes that it may share, numbered as they came; `None` where it shares
    /// none.
    pub(crate) salt: Option<u64>,
    /// The rows of all its tokens are wanted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) has_all_rows: bool,
    /// Where messages of the prompt end.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) checkpoints: Vec<usize>,
    /// Where its last picture ends.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parting: Option<usize>,
    /// Whose it is; `None` where there is one tenant without limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) tenant: Option<TracedTenant>,
    pub(crate) prompt: PrefixHashes,
}

/// A tenant. How many of its requests may wait is left out: what was refused is not in a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TracedTenant {
    /// Its number, in the order in which they came, from 1 on.
    id: u64,
    weight: NonZeroU32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_running: Option<NonZeroU32>,
}

impl TracedTenant {
    /// That of a request; `numbers` are those of the tenants that came before.
    pub(crate) fn new(tenant: Tenant, numbers: &mut BTreeMap<TenantId, u64>) -> Option<Self> {
        if tenant == Tenant::default() {
            return None;
        }
        let next = numbers.len() as u64 + 1;
        Some(Self {
            id: *numbers.entry(tenant.id).or_insert(next),
            weight: tenant.limits.weight,
            max_running: tenant.limits.max_running,
        })
    }
}

impl From<TracedTenant> for Tenant {
    fn from(traced: TracedTenant) -> Self {
        Self {
            id: TenantId(traced.id),
            limits: TenantLimits {
                weight: traced.weight,
                max_running: traced.max_running,
                max_queued: None,
            },
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AdmittedRequest {
    pub(crate) request: u64,
    pub(crate) seq: u32,
    /// Tokens that were there already.
    pub(crate) n_reused: usize,
    /// Why not more, in one word.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) missed: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ComputedStep {
    /// Microseconds that it took.
    pub(crate) took: u64,
    /// Its tokens.
    pub(crate) n_tokens: usize,
    /// How many of these were drafted.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) n_drafted: usize,
    /// What was chosen for each text that goes on.
    pub(crate) chosen: Vec<ChosenTokens>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ChosenTokens {
    pub(crate) request: u64,
    pub(crate) tokens: PrefixHashes,
}

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TracedEnd {
    Complete,
    ContextFull,
    Cancelled,
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TracedPriority {
    Batch,
    Normal,
    Interactive,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TracedDrop {
    Evicted,
    Covered,
    Cleared,
    Broken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TracedWay {
    Out,
    Disk,
    In,
}

/// For each token a hash of it and all tokens before it, written as eight hexadecimal digits each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct PrefixHashes(pub(crate) Vec<u32>);

impl PrefixHashes {
    /// As ids that no vocabulary has, but that are equal where the hashes are.
    pub(crate) fn as_tokens(&self) -> impl Iterator<Item = TokenId> + '_ {
        self.0.iter().copied().map(TokenId)
    }
}

impl Serialize for PrefixHashes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Display for PrefixHashes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|hash| write!(f, "{hash:08x}"))
    }
}

impl<'de> Deserialize<'de> for PrefixHashes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let (digits, rest) = text.as_bytes().as_chunks::<8>();
        if !rest.is_empty() {
            return Err(D::Error::custom(format_args!(
                "{} hexadecimal digits are no hashes of eight each",
                text.len()
            )));
        }
        let hash = |digits: &[u8; 8]| {
            let is_hex = digits.iter().all(u8::is_ascii_hexdigit);
            let text = std::str::from_utf8(digits).ok().filter(|_| is_hex);
            let hash = text.and_then(|text| u32::from_str_radix(text, 16).ok());
            hash.filter(|&hash| hash <= MAX_HASH)
                .ok_or_else(|| D::Error::custom("a hash of a token is no hexadecimal number"))
        };
        digits.iter().map(hash).collect::<Result<_, _>>().map(Self)
    }
}

/// The largest hash: positive as a signed number.
pub(crate) const MAX_HASH: u32 = u32::MAX >> 1;

impl TraceEvent {
    pub(crate) fn of_cache(note: Note) -> Self {
        match note {
            Note::Shared {
                request,
                seq,
                from,
                n_tokens,
            } => Self::Share {
                request: request.0,
                seq: seq.0,
                from: from.0,
                n_tokens,
            },
            Note::Cached {
                seq,
                request,
                n_tokens,
            } => Self::Cache {
                request: request.0,
                seq: seq.0,
                n_tokens,
            },
            Note::SwappedOut {
                request,
                n_tokens,
                n_bytes,
            } => Self::Swap {
                request: request.0,
                way: TracedWay::Out,
                n_tokens,
                n_bytes,
            },
            Note::Spilled {
                request,
                n_tokens,
                n_bytes,
            } => Self::Swap {
                request: request.0,
                way: TracedWay::Disk,
                n_tokens,
                n_bytes,
            },
            Note::SwappedIn {
                request,
                n_tokens,
                n_bytes,
            } => Self::Swap {
                request: request.0,
                way: TracedWay::In,
                n_tokens,
                n_bytes,
            },
            Note::Dropped {
                seq,
                n_tokens,
                n_hits,
                why,
                ..
            } => Self::Drop {
                seq: seq.0,
                n_tokens,
                n_hits,
                why: match why {
                    DropReason::Evicted => TracedDrop::Evicted,
                    DropReason::Covered => TracedDrop::Covered,
                    DropReason::Cleared => TracedDrop::Cleared,
                    DropReason::Broken => TracedDrop::Broken,
                },
            },
        }
    }
}

impl AdmittedRequest {
    pub(crate) fn new(request: u64, seq: u32, reuse: &Reuse) -> Self {
        Self {
            request,
            seq,
            n_reused: reuse.n_tokens,
            missed: reuse.missed.map(|missed| missed.name().to_owned()),
        }
    }
}

impl From<End> for TracedEnd {
    fn from(end: End) -> Self {
        match end {
            End::Complete => Self::Complete,
            End::ContextFull => Self::ContextFull,
            End::Cancelled => Self::Cancelled,
            End::Failed => Self::Failed,
        }
    }
}

impl From<Priority> for TracedPriority {
    fn from(priority: Priority) -> Self {
        match priority {
            Priority::Batch => Self::Batch,
            Priority::Normal => Self::Normal,
            Priority::Interactive => Self::Interactive,
        }
    }
}

impl From<TracedPriority> for Priority {
    fn from(priority: TracedPriority) -> Self {
        match priority {
            TracedPriority::Batch => Self::Batch,
            TracedPriority::Normal => Self::Normal,
            TracedPriority::Interactive => Self::Interactive,
        }
    }
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn hashes_are_written_in_eight_digits() {
        let hashes = PrefixHashes(vec![0, 0x12ab, MAX_HASH]);
        let text = serde_json::to_string(&hashes).unwrap();
        assert_eq!(text, "\"00000000000012ab7fffffff\"");
        assert_eq!(serde_json::from_str::<PrefixHashes>(&text).unwrap(), hashes);
        for wrong in [
            "\"123\"",
            "\"0000000g\"",
            "\"+0000001\"",
            "\"ffffffff\"",
            "7",
        ] {
            assert!(
                serde_json::from_str::<PrefixHashes>(wrong).is_err(),
                "{wrong}"
            );
        }
    }
}
