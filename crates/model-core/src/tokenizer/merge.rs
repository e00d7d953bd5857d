//! The loop that both BPE algorithms share: join the two neighbours of the lowest rank, again and
//! again, until no neighbours can be joined.
//!
//! Invariant: the symbols cover the text without gaps; of equal ranks the leftmost joins first.
//! O(n log n): every join queues at most two new candidates. At most 28 bytes for each byte of the
//! text. Knows nothing of vocabularies.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::num::NonZeroU32;

/// The most bytes that are joined at a time, so that places take 4 bytes. A longer text is cut.
const MAX_BYTES: usize = 1 << 31;

/// A piece of the text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Symbol {
    /// Its start, in bytes.
    pub(super) start: usize,
    /// Its length, in bytes.
    pub(super) len: usize,
    /// Its id, where the vocabulary knows it.
    pub(super) id: Option<u32>,
}

impl Symbol {
    /// Its end, in bytes.
    pub(super) fn end(&self) -> usize {
        self.start + self.len
    }
}

/// The result of joining two neighbours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Join {
    /// Lower ranks join first.
    pub(super) rank: u32,
    /// The joined symbol.
    pub(super) id: u32,
}

/// A join of a symbol with the next one that was possible when it was queued. The order of the
/// fields is the order in which joins happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
}

/// Joins symbols; kept between texts for its allocations.
#[derive(Debug, Default)]
pub(super) struct Merger {
    /// The beginning of the part of the text that is joined now.
    base: usize,
    /// The length of the symbol that starts at a byte; 0 where none does.
    lens: Vec<u32>,
    /// The length of the symbol whose last byte this is; 0 where none ends.
    lens_before: Vec<u32>,
    /// One more than the id of the symbol that starts at a byte.
    ids: Vec<Option<NonZeroU32>>,
    queue: BinaryHeap<Reverse<Candidate>>,
}

impl Merger {
    /// Joins the pieces `(length in bytes, id)` of a text as `join` says and calls `emit` for every
    /// symbol that is left, in the order of the text.
    pub(super) fn run(
        &mut self,
        pieces: impl Iterator<Item = (usize, Option<u32>)>,
        join: impl Fn(&Symbol, &Symbol) -> Option<Join>,
        mut emit: impl FnMut(&Symbol),
    ) {
        let mut pieces = pieces.peekable();
        self.base = 0;
        while pieces.peek().is_some() {
            self.fill(&mut pieces);
            self.join_all(&join);
            let mut next = self.symbol(0);
            while let Some(symbol) = next {
                emit(&symbol);
                next = self.symbol(symbol.end() - self.base);
            }
            self.base += self.lens.len();
        }
    }

    /// Takes the pieces of the next part of the text.
    fn fill(&mut self, pieces: &mut impl Iterator<Item = (usize, Option<u32>)>) {
        self.lens.clear();
        self.lens_before.clear();
        self.ids.clear();
        self.queue.clear();
        while self.lens.len() < MAX_BYTES
            && let Some((len, id)) = pieces.next()
        {
            // A piece is a byte or a character.
            let end = self.lens.len() + len;
            self.lens.push(len as u32);
            self.ids.push(stored(id));
            self.lens.resize(end, 0);
            self.ids.resize(end, None);
            self.lens_before.resize(end - 1, 0);
            self.lens_before.push(len as u32);
        }
    }

    fn join_all(&mut self, join: &impl Fn(&Symbol, &Symbol) -> Option<Join>) {
        let mut next = self.symbol(0);
        while let Some(left) = next {
            next = self.offer(left, join);
        }
        while let Some(Reverse(best)) = self.queue.pop() {
            let Some(left) = self.symbol(best.left as usize) else {
                continue;
            };
            let Some(right) = self.symbol(left.end() - self.base) else {
                continue;
            };
            // Stale: one of the two has since been joined to something else.
            let Some(joined) = join(&left, &right).filter(|joined| joined.rank == best.rank) else {
                continue;
            };
            let (start, middle) = (left.start - self.base, right.start - self.base);
            let last = right.end() - self.base - 1;
            let len = self.lens[start] + self.lens[middle];
            self.lens[middle] = 0;
            self.lens_before[middle - 1] = 0;
            self.lens[start] = len;
            self.lens_before[last] = len;
            self.ids[start] = stored(Some(joined.id));
            if let Some(joined) = self.symbol(start) {
                self.offer(joined, join);
            }
            let before = start.checked_sub(1).map(|last| self.lens_before[last]);
            if let Some(previous) = before.and_then(|len| self.symbol(start - len as usize)) {
                self.offer(previous, join);
            }
        }
    }

    /// The symbol that starts at a byte of the part.
    fn symbol(&self, start: usize) -> Option<Symbol> {
        let len = self.lens.get(start).filter(|len| **len > 0)?;
        Some(Symbol {
            start: self.base + start,
            len: *len as usize,
            id: self.ids[start].map(|id| id.get() - 1),
        })
    }

    /// Queues the join of a symbol with the next one, which it gives.
    fn offer(
        &mut self,
        left: Symbol,
        join: &impl Fn(&Symbol, &Symbol) -> Option<Join>,
    ) -> Option<Symbol> {
        let right = self.symbol(left.end() - self.base)?;
        if let Some(Join { rank, .. }) = join(&left, &right) {
            let left = (left.start - self.base) as u32;
            self.queue.push(Reverse(Candidate { rank, left }));
        }
        Some(right)
    }
}

fn stored(id: Option<u32>) -> Option<NonZeroU32> {
    id.and_then(|id| NonZeroU32::new(id.checked_add(1)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(text: &str, table: &[(&str, u32)]) -> Vec<String> {
        let mut out = Vec::new();
        Merger::default().run(
            text.chars().map(|c| (c.len_utf8(), None)),
            |l, r| {
                let both = &text[l.start..r.end()];
                table
                    .iter()
                    .find(|(t, _)| *t == both)
                    .map(|&(_, rank)| Join { rank, id: 0 })
            },
            |s| out.push(text[s.start..s.end()].to_owned()),
        );
        out
    }

    #[test]
    fn lower_rank_first_then_leftmost() {
        assert_eq!(joined("abc", &[("ab", 1), ("bc", 0)]), ["a", "bc"]);
        assert_eq!(joined("aaa", &[("aa", 0)]), ["aa", "a"]);
        assert_eq!(joined("aaaa", &[("aa", 0), ("aaaa", 1)]), ["aaaa"]);
        assert_eq!(joined("", &[]), Vec::<String>::new());
        assert_eq!(joined("é", &[]), ["é"]);
    }

    #[test]
    fn a_stale_candidate_is_passed_over() {
        // "bc" is taken by "ab" before its turn comes.
        assert_eq!(
            joined("abcd", &[("ab", 0), ("bc", 1), ("cd", 2)]),
            ["ab", "cd"]
        );
    }

    /// Joins of two symbols by what they are, one after the other: slow, and plainly right.
    fn joined_one_by_one(text: &str, table: &[(&str, u32)]) -> Vec<String> {
        let mut symbols: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let pairs = symbols.windows(2).enumerate();
            let best = pairs.filter_map(|(at, pair)| {
                let both = pair.concat();
                let known = table.iter().find(|(text, _)| *text == both);
                known.map(|(_, rank)| (*rank, at))
            });
            let Some((_, at)) = best.min() else {
                return symbols;
            };
            let right = symbols.remove(at + 1);
            symbols[at].push_str(&right);
        }
    }

    #[test]
    fn the_queue_joins_as_one_by_one() {
        let table = [
            ("aa", 3),
            ("aaa", 1),
            ("ab", 2),
            ("ba", 2),
            ("aba", 0),
            ("bé", 1),
            ("éa", 4),
            ("aab", 5),
            ("ébé", 3),
        ];
        let letters = ["a", "b", "é", "x"];
        let mut state = 7_u64;
        for n in 0..400 {
            let text: String = (0..n % 23)
                .map(|_| {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    letters[(state >> 61) as usize % 4]
                })
                .collect();
            assert_eq!(
                joined(&text, &table),
                joined_one_by_one(&text, &table),
                "{text}"
            );
        }
    }
}
