//! The loop that both BPE algorithms share: join the two neighbours of the lowest rank, again and
//! again, until no neighbours can be joined.
//!
//! Invariant: the symbols cover the text without gaps; of equal ranks the leftmost joins first.
//! O(n log n): every join queues at most two new candidates. Knows nothing of vocabularies.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// A piece of the text, in a chain of its neighbours.
#[derive(Clone, Debug)]
pub(super) struct Symbol {
    /// Where it starts, in bytes.
    pub(super) start: usize,
    /// How long it is, in bytes; 0 once it was joined to its left neighbour.
    pub(super) len: usize,
    /// What it is, where the vocabulary knows it.
    pub(super) id: Option<u32>,
    prev: Option<usize>,
    next: Option<usize>,
}

impl Symbol {
    /// Where it ends, in bytes.
    pub(super) fn end(&self) -> usize {
        self.start + self.len
    }
}

/// What two neighbours become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Join {
    /// Lower ranks join first.
    pub(super) rank: u32,
    /// What the joined symbol is.
    pub(super) id: u32,
}

/// A possible join. The order of the fields is the order in which joins happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: usize,
    right: usize,
    len: usize,
    id: u32,
}

/// Joins symbols; kept between texts for its allocations.
#[derive(Debug, Default)]
pub(super) struct Merger {
    symbols: Vec<Symbol>,
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
        self.symbols.clear();
        self.queue.clear();
        let mut start = 0;
        for (index, (len, id)) in pieces.enumerate() {
            let prev = index.checked_sub(1);
            self.symbols.push(Symbol {
                start,
                len,
                id,
                prev,
                next: Some(index + 1),
            });
            start += len;
        }
        match self.symbols.last_mut() {
            Some(last) => last.next = None,
            None => return,
        }
        for right in 1..self.symbols.len() {
            self.offer(right - 1, right, &join);
        }
        while let Some(Reverse(best)) = self.queue.pop() {
            let (left, right) = (&self.symbols[best.left], &self.symbols[best.right]);
            // Stale: one of the two has since been joined to something else.
            if left.len == 0 || right.len == 0 || left.len + right.len != best.len {
                continue;
            }
            let (prev, next) = (left.prev, right.next);
            let joined = &mut self.symbols[best.left];
            joined.len = best.len;
            joined.id = Some(best.id);
            joined.next = next;
            self.symbols[best.right].len = 0;
            if let Some(next) = next {
                self.symbols[next].prev = Some(best.left);
                self.offer(best.left, next, &join);
            }
            if let Some(prev) = prev {
                self.offer(prev, best.left, &join);
            }
        }
        let mut at = Some(0);
        while let Some(index) = at {
            emit(&self.symbols[index]);
            at = self.symbols[index].next;
        }
    }

    fn offer(
        &mut self,
        left: usize,
        right: usize,
        join: &impl Fn(&Symbol, &Symbol) -> Option<Join>,
    ) {
        let (l, r) = (&self.symbols[left], &self.symbols[right]);
        if let Some(Join { rank, id }) = join(l, r) {
            let len = l.len + r.len;
            self.queue.push(Reverse(Candidate {
                rank,
                left,
                right,
                len,
                id,
            }));
        }
    }
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
}
