//! Who may see whom: the only definition of windows and causality.
//!
//! Invariant: what a query may see is one interval of positions, and its lower end never moves
//! back when the query's position grows. That makes visibility a slice of a sorted list and
//! "no token will ever see this again" a comparison. Knows nothing of cells or sequences.

use std::fmt;
use std::ops::{Range, RangeFrom, RangeInclusive, RangeTo};

use serde::{Deserialize, Serialize};

use crate::ids::Pos;

/// The reach of a layer's attention.
///
/// A width of 0 counts as 1: a token sees itself, but where only older ones are shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Window {
    /// Every position.
    #[default]
    Full,
    /// The last `n` positions, the query's own included.
    Sliding(u32),
    /// Positions from the start of the query's chunk of `n` on.
    Chunked(u32),
    /// `n / 2` positions to either side.
    Symmetric(u32),
    /// The positions from `from` on that are at least `by` before the query's, which
    /// [`Window::Sliding`] of `by` does not show.
    Older {
        /// The distance before the query's.
        by: u32,
        /// The smallest position.
        from: u32,
    },
    /// Both ends of a sequence: the last `last` positions, as [`Window::Sliding`], while what is
    /// below position `first` is kept for [`Window::first`], which shows it.
    Ends {
        /// Positions at the beginning.
        first: u32,
        /// Positions at the end, the query's own included.
        last: u32,
    },
    /// The positions below `n` that are at least `by` before the query's.
    First {
        /// Their number.
        n: u32,
        /// The distance before the query's.
        by: u32,
    },
    /// Every token of the source that the sequence was given, and none of its own: cross attention
    /// (Vaswani et al., arXiv 1706.03762).
    Source,
}

/// The visibility of tokens at later positions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Causality {
    /// Only its own and earlier positions.
    #[default]
    Causal,
    /// The same, and where a token of a picture is shown later ones of it, it sees them in windows
    /// alone: with [`Window::Full`] it does not (Gemma 4).
    CausalInFull,
    /// Later positions too, as in encoders.
    NonCausal,
}

impl Causality {
    /// True if no token of text sees later positions.
    pub fn is_causal(self) -> bool {
        match self {
            Self::Causal | Self::CausalInFull => true,
            Self::NonCausal => false,
        }
    }
}

/// An inclusive interval of positions; empty where `first > last`.
///
/// ```
/// use kv_core::{Pos, PosRange};
///
/// let tail = PosRange::from(Pos(5)..);
/// assert!(tail.contains(Pos(5)) && !tail.contains(Pos(4)));
/// assert!(PosRange::from(Pos(3)..Pos(3)).is_empty());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PosRange {
    /// The smallest position in it.
    pub first: Pos,
    /// The largest position in it.
    pub last: Pos,
}

impl Window {
    /// The positions that a token at `query` may see.
    #[inline]
    pub fn visible_keys(self, query: Pos, causality: Causality) -> PosRange {
        let newest = match self {
            // Positions in a source are others than those of the sequence.
            Self::Source => return PosRange::ALL,
            Self::Older { by, from } => {
                return PosRange::new(Pos(from), PosRange::ALL.last).intersection(old(query, by));
            }
            Self::First { n, by } => {
                return PosRange::from(..Pos(n)).intersection(old(query, by));
            }
            Self::Symmetric(n) => Pos(query.0.saturating_add(n / 2)),
            Self::Full | Self::Sliding(_) | Self::Chunked(_) | Self::Ends { .. } => {
                PosRange::ALL.last
            }
        };
        let last = match causality {
            Causality::Causal | Causality::CausalInFull => query,
            Causality::NonCausal => newest,
        };
        PosRange {
            first: self.oldest_key(query),
            last,
        }
    }

    /// True if a token at `query` may see one at `key`.
    #[inline]
    pub fn sees(self, query: Pos, key: Pos, causality: Causality) -> bool {
        self.visible_keys(query, causality).contains(key)
    }

    /// The oldest position that a token at `query` may see. Never moves back as `query` grows.
    #[inline]
    pub fn oldest_key(self, query: Pos) -> Pos {
        match self {
            Self::Full | Self::First { .. } | Self::Source => Pos(0),
            Self::Older { from, .. } => Pos(from),
            Self::Sliding(n) | Self::Ends { last: n, .. } => {
                Pos(query.0.saturating_sub(n.saturating_sub(1)))
            }
            Self::Chunked(n) => Pos(query.0 - query.0 % n.max(1)),
            Self::Symmetric(n) => Pos(query.0.saturating_sub(n / 2)),
        }
    }

    /// The most positions of a sequence that are kept for a token, itself included, at least 1;
    /// `None` where all are.
    #[inline]
    pub const fn width(self) -> Option<u32> {
        match self {
            Self::Full | Self::Older { .. } | Self::First { .. } | Self::Source => None,
            Self::Sliding(n) | Self::Chunked(n) | Self::Symmetric(n) => Some(at_least_1(n)),
            Self::Ends { first, last } => Some(at_least_1(last).saturating_add(first)),
        }
    }

    /// The window through which tokens see the first positions that [`Window::Ends`] keeps.
    pub const fn first(self) -> Option<Self> {
        match self {
            Self::Ends { first: n, last: by } => Some(Self::First { n, by }),
            _ => None,
        }
    }

    /// Positions at the beginning of a sequence that are always kept.
    pub const fn n_first(self) -> u32 {
        match self {
            Self::Ends { first, .. } => first,
            _ => 0,
        }
    }

    /// The positions for which neither a token at `next_query` nor any later one has a use.
    #[inline]
    pub fn expired(self, next_query: Pos) -> PosRange {
        match self.width() {
            None => PosRange::EMPTY,
            Some(_) => PosRange::from(Pos(self.n_first())..self.oldest_key(next_query)),
        }
    }

    /// True if neither a token at `next_query` nor any later one has a use for `key`.
    #[inline]
    pub fn is_expired(self, key: Pos, next_query: Pos) -> bool {
        self.expired(next_query).contains(key)
    }
}

/// The positions at least `by` before `query`.
fn old(query: Pos, by: u32) -> PosRange {
    let last = query.0.checked_sub(at_least_1(by));
    last.map_or(PosRange::EMPTY, |last| PosRange::new(Pos(0), Pos(last)))
}

const fn at_least_1(n: u32) -> u32 {
    match n {
        0 => 1,
        n => n,
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("full"),
            Self::Sliding(n) => write!(f, "sliding({n})"),
            Self::Chunked(n) => write!(f, "chunked({n})"),
            Self::Symmetric(n) => write!(f, "symmetric({n})"),
            Self::Older { by, from: 0 } => write!(f, "older({by})"),
            Self::Older { by, from } => write!(f, "older({by}, from {from})"),
            Self::Ends { first, last } => write!(f, "ends({first}, {last})"),
            Self::First { n, by } => write!(f, "first({n}, older({by}))"),
            Self::Source => f.write_str("source"),
        }
    }
}

impl fmt::Display for Causality {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Causal => "causal",
            Self::CausalInFull => "causal in full layers",
            Self::NonCausal => "non-causal",
        })
    }
}

impl PosRange {
    /// Every position.
    pub const ALL: Self = Self {
        first: Pos(0),
        last: Pos(u32::MAX),
    };
    /// No position.
    pub const EMPTY: Self = Self {
        first: Pos(1),
        last: Pos(0),
    };

    /// The positions from `first` to `last`, both included.
    pub const fn new(first: Pos, last: Pos) -> Self {
        Self { first, last }
    }

    /// True if the position is in the interval.
    #[inline]
    pub fn contains(self, pos: Pos) -> bool {
        self.first <= pos && pos <= self.last
    }

    /// Number of positions.
    pub fn len(self) -> u64 {
        if self.is_empty() {
            0
        } else {
            u64::from(self.last.0) - u64::from(self.first.0) + 1
        }
    }

    /// True if it has no position.
    #[inline]
    pub fn is_empty(self) -> bool {
        self.last < self.first
    }

    /// The positions in both.
    #[inline]
    pub fn intersection(self, other: Self) -> Self {
        Self {
            first: self.first.max(other.first),
            last: self.last.min(other.last),
        }
    }

    /// The smallest interval that covers both.
    #[inline]
    pub fn hull(self, other: Self) -> Self {
        match (self.is_empty(), other.is_empty()) {
            (true, _) => other,
            (_, true) => self,
            _ => Self {
                first: self.first.min(other.first),
                last: self.last.max(other.last),
            },
        }
    }
}

impl From<Range<Pos>> for PosRange {
    fn from(range: Range<Pos>) -> Self {
        match range.end.0.checked_sub(1) {
            Some(last) => Self {
                first: range.start,
                last: Pos(last),
            },
            None => Self::EMPTY,
        }
    }
}

impl From<RangeInclusive<Pos>> for PosRange {
    fn from(range: RangeInclusive<Pos>) -> Self {
        Self {
            first: *range.start(),
            last: *range.end(),
        }
    }
}

impl From<RangeFrom<Pos>> for PosRange {
    fn from(range: RangeFrom<Pos>) -> Self {
        Self {
            first: range.start,
            last: Self::ALL.last,
        }
    }
}

impl From<RangeTo<Pos>> for PosRange {
    fn from(range: RangeTo<Pos>) -> Self {
        Self::from(Pos(0)..range.end)
    }
}

impl fmt::Display for PosRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_empty() {
            f.write_str("no positions")
        } else if self.last == Self::ALL.last {
            write!(f, "{}..", self.first)
        } else {
            write!(f, "{}..={}", self.first, self.last)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_count_their_positions() {
        assert_eq!(PosRange::new(Pos(3), Pos(5)).len(), 3);
        assert_eq!(PosRange::EMPTY.len(), 0);
        assert_eq!(PosRange::new(Pos(0), Pos(u32::MAX)).len(), 1 << 32);
    }

    #[test]
    fn k46_masked_positions() {
        let causal = |w: Window, q| w.visible_keys(Pos(q), Causality::Causal).to_string();
        assert_eq!(causal(Window::Full, 9), "0..=9");
        assert_eq!(causal(Window::Sliding(4), 9), "6..=9");
        assert_eq!(causal(Window::Sliding(4), 2), "0..=2");
        assert_eq!(causal(Window::Chunked(4), 7), "4..=7");
        assert_eq!(causal(Window::Chunked(4), 8), "8..=8");
        assert_eq!(causal(Window::Symmetric(5), 9), "7..=9");
        let both = |w: Window, q| w.visible_keys(Pos(q), Causality::NonCausal).to_string();
        assert_eq!(both(Window::Full, 9), "0..");
        assert_eq!(both(Window::Sliding(4), 9), "6..");
        assert_eq!(both(Window::Chunked(4), 9), "8..");
        assert_eq!(both(Window::Symmetric(5), 9), "7..=11");
    }

    #[test]
    fn a_token_sees_itself_through_every_window() {
        for n in [0, 1, 2, 7, u32::MAX] {
            for w in [
                Window::Full,
                Window::Sliding(n),
                Window::Chunked(n),
                Window::Symmetric(n),
            ] {
                for q in [0, 1, 6, 7, 8, u32::MAX] {
                    for c in [Causality::Causal, Causality::NonCausal] {
                        assert!(w.sees(Pos(q), Pos(q), c), "{w} {c} at {q}");
                    }
                }
            }
        }
    }

    #[test]
    fn what_both_ends_do_not_show_is_older() {
        let sizes = (0..6).flat_map(|n| (0..6).map(move |n_first| (n, n_first)));
        for (n, n_first) in sizes {
            let ends = Window::Ends {
                first: n_first,
                last: n,
            };
            let older = Window::Older {
                by: n,
                from: n_first,
            };
            for causality in [Causality::Causal, Causality::NonCausal] {
                for (query, key) in (0..20).flat_map(|q| (0..20).map(move |k| (Pos(q), Pos(k)))) {
                    let sees = |w: Window| w.sees(query, key, causality);
                    assert_eq!(sees(ends), sees(Window::Sliding(n)));
                    let shown = [ends, ends.first().unwrap(), older].map(sees);
                    let n_shown = shown.into_iter().filter(|shown| *shown).count();
                    let wanted = usize::from(sees(Window::Full));
                    assert_eq!(n_shown, wanted, "{ends}, {causality}: {query} and {key}");
                }
            }
        }
        let older = Window::Older { by: 3, from: 2 };
        let seen = older.visible_keys(Pos(9), Causality::Causal);
        assert_eq!(seen.to_string(), "2..=6");
        assert_eq!(older.width(), None);
        assert!(!older.is_expired(Pos(0), Pos(u32::MAX)));
    }

    #[test]
    fn expired_means_invisible_now_and_forever() {
        for n in 0..6 {
            for w in [
                Window::Full,
                Window::Sliding(n),
                Window::Chunked(n),
                Window::Symmetric(n),
                Window::Ends { first: 3, last: n },
            ] {
                for key in 0..24 {
                    for next in 0..24 {
                        let sees = |w: Window, q| w.sees(Pos(q), Pos(key), Causality::Causal);
                        let shows = |q| sees(w, q) || w.first().is_some_and(|w| sees(w, q));
                        let later_sees = (next..64).any(shows);
                        // A key ahead of the query is seen once the query gets there.
                        assert_eq!(
                            w.is_expired(Pos(key), Pos(next)),
                            !later_sees,
                            "{w}: key {key}, next query {next}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn ranges_convert_and_combine() {
        assert!(PosRange::from(Pos(0)..Pos(0)).is_empty());
        assert_eq!(PosRange::from(..Pos(3)), PosRange::new(Pos(0), Pos(2)));
        assert_eq!(PosRange::from(Pos(2)..=Pos(4)).to_string(), "2..=4");
        assert_eq!(PosRange::EMPTY.to_string(), "no positions");
        let (a, b) = (PosRange::from(Pos(2)..Pos(5)), PosRange::from(Pos(8)..));
        assert!(a.intersection(b).is_empty());
        assert_eq!(a.hull(b), PosRange::from(Pos(2)..));
        assert_eq!(PosRange::EMPTY.hull(a), a);
    }
}
