//! [`PrefixTree`]: a radix tree of token sequences for each salt.
//!
//! Invariant: exact to the token, so sequences may part anywhere; every node but a root is the end
//! of an entry, or two or more nodes follow. An entry is found by walking along its tokens,
//! whatever else is in the tree. Knows nothing of what entries are, and of memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kv_core::TokenId;

use crate::data::ids::Salt;
use crate::data::reuse::n_common;

/// Token sequences, by salt and tokens.
#[derive(Clone, Debug)]
pub(crate) struct PrefixTree<T> {
    roots: BTreeMap<Salt, Node<T>>,
}

/// The entries that begin with the same tokens.
#[derive(Clone, Debug)]
struct Node<T> {
    /// The tokens that lead to it from the node above.
    edge: Edge,
    /// The entries that end here.
    ends: Vec<T>,
    /// By the first token of their edges.
    children: BTreeMap<TokenId, Node<T>>,
}

/// Some tokens of an entry.
#[derive(Clone, Debug)]
struct Edge {
    of: Arc<[TokenId]>,
    range: Range<usize>,
}

impl Edge {
    fn tokens(&self) -> &[TokenId] {
        self.of.get(self.range.clone()).unwrap_or_default()
    }

    /// The first `n` tokens, and the others.
    fn split(&self, n: usize) -> (Self, Self) {
        let at = self.range.start + n;
        let of = |range| Self {
            of: Arc::clone(&self.of),
            range,
        };
        (of(self.range.start..at), of(at..self.range.end))
    }
}

/// The places where sequences can be cut that begin with the tokens of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// After any token.
    Anywhere,
    /// Only where an entry ends: with windows and recurrent states.
    AtEnds,
}

/// An entry that begins with some of the tokens that were looked up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TreeMatch<T> {
    pub(crate) entry: T,
    /// Number of tokens that both begin with.
    pub(crate) n_common: usize,
    /// Tokens of the entry.
    pub(crate) n_tokens: usize,
}

impl<T> Default for PrefixTree<T> {
    fn default() -> Self {
        let roots = BTreeMap::new();
        Self { roots }
    }
}

impl<T> Node<T> {
    fn new(edge: Edge) -> Self {
        Self {
            edge,
            ends: Vec::new(),
            children: BTreeMap::new(),
        }
    }

    fn is_empty(&self) -> bool {
        self.ends.is_empty() && self.children.is_empty()
    }

    /// Number of these tokens that its edge has, from the first on.
    fn n_common(&self, tokens: &[TokenId]) -> usize {
        n_common(self.edge.tokens(), tokens)
    }
}

impl<T: Copy + Eq> PrefixTree<T> {
    pub(crate) fn insert(&mut self, salt: Salt, tokens: &Arc<[TokenId]>, entry: T) {
        let edge = |range| Edge {
            of: Arc::clone(tokens),
            range,
        };
        let root = self.roots.entry(salt);
        let mut node = root.or_insert_with(|| Node::new(edge(0..0)));
        let mut at = 0;
        while let Some(&first) = tokens.get(at) {
            let rest = edge(at..tokens.len());
            let child = node.children.entry(first);
            let child = child.or_insert_with(|| Node::new(rest));
            let n = child.n_common(&tokens[at..]);
            if n < child.edge.tokens().len() {
                child.split(n);
            }
            at += n;
            node = child;
        }
        node.ends.push(entry);
    }

    /// Takes an entry out. Returns whether it was there.
    pub(crate) fn remove(&mut self, salt: Salt, tokens: &[TokenId], entry: T) -> bool {
        let Some(root) = self.roots.get_mut(&salt) else {
            return false;
        };
        let was_there = root.remove(tokens, entry);
        if root.is_empty() {
            self.roots.remove(&salt);
        }
        was_there
    }

    /// The entries that have tokens in common with these, those with the most first.
    pub(crate) fn matches(&self, salt: Salt, tokens: &[TokenId]) -> Vec<TreeMatch<T>> {
        let mut found = Vec::new();
        let mut below: Option<&Node<T>> = None;
        for PathNode {
            node,
            n_common,
            end,
        } in self.path(salt, tokens).into_iter().rev()
        {
            node.collect(end, below, &mut |entry, n_tokens| {
                found.push(TreeMatch {
                    entry,
                    n_common,
                    n_tokens,
                });
            });
            below = Some(node);
        }
        found
    }

    /// The nodes that have tokens in common with these, the first of the tree first.
    fn path(&self, salt: Salt, tokens: &[TokenId]) -> Vec<PathNode<'_, T>> {
        let mut path: Vec<PathNode<'_, T>> = Vec::new();
        let Some(mut node) = self.roots.get(&salt) else {
            return path;
        };
        let mut at = 0;
        while let Some(child) = tokens.get(at).and_then(|first| node.children.get(first)) {
            let end = at + child.edge.tokens().len();
            let n_common = at + child.n_common(&tokens[at..]);
            path.push(PathNode {
                node: child,
                n_common,
                end,
            });
            if n_common < end {
                break;
            }
            (node, at) = (child, end);
        }
        path
    }

    /// The entries that these tokens begin with, the shortest first.
    pub(crate) fn ends_within(&self, salt: Salt, tokens: &[TokenId]) -> Vec<TreeMatch<T>> {
        let path = self.path(salt, tokens).into_iter();
        let whole = path.filter(|step| step.n_common == step.end);
        let ends = whole.flat_map(|PathNode { node, end, .. }| {
            let found = move |&entry| TreeMatch {
                entry,
                n_common: end,
                n_tokens: end,
            };
            node.ends.iter().map(found)
        });
        ends.collect()
    }

    /// For each entry how many of its tokens a lookup would not find without it.
    pub(crate) fn for_each_saved(&self, cut: Cut, mut each: impl FnMut(T, usize)) {
        for root in self.roots.values() {
            root.for_each_saved(cut, Depth::default(), &mut each);
        }
    }

    /// True if an entry begins with these tokens.
    pub(crate) fn covers(&self, salt: Salt, tokens: &[TokenId]) -> bool {
        match self.path(salt, tokens).last() {
            Some(last) => last.n_common == tokens.len(),
            None => tokens.is_empty() && self.roots.contains_key(&salt),
        }
    }
}

/// A node on the path of some tokens.
struct PathNode<'a, T> {
    node: &'a Node<T>,
    /// Number of tokens that are common up to here.
    n_common: usize,
    /// Number of tokens that lead to the node.
    end: usize,
}

/// The tokens that lead to a node, by number.
#[derive(Clone, Copy, Debug, Default)]
struct Depth {
    /// To the node above.
    end: usize,
    /// To the last node above where others would be found.
    other: usize,
}

impl<T: Copy + Eq> Node<T> {
    fn for_each_saved(&self, cut: Cut, above: Depth, each: &mut impl FnMut(T, usize)) {
        let end = above.end + self.edge.tokens().len();
        let is_found_otherwise = match cut {
            Cut::Anywhere => self.ends.len() > 1 || !self.children.is_empty(),
            Cut::AtEnds => self.ends.len() > 1,
        };
        let n_saved = if is_found_otherwise {
            0
        } else {
            end - above.other
        };
        self.ends.iter().for_each(|&entry| each(entry, n_saved));
        // A node from which several go on is where others can be cut, too.
        let other = match cut {
            Cut::AtEnds if self.ends.is_empty() => above.other,
            _ => end,
        };
        let depth = Depth { end, other };
        let children = self.children.values();
        children.for_each(|child| child.for_each_saved(cut, depth, each));
    }

    /// The entries that end here or below, but for those of one child, with their numbers of
    /// tokens.
    fn collect(&self, end: usize, without: Option<&Self>, each: &mut impl FnMut(T, usize)) {
        self.ends.iter().for_each(|&entry| each(entry, end));
        for child in self.children.values() {
            if !without.is_some_and(|without| std::ptr::eq(without, child)) {
                child.collect(end + child.edge.tokens().len(), None, each);
            }
        }
    }

    /// Takes an entry with these tokens after its edge out, and the nodes that nothing needs any
    /// more.
    fn remove(&mut self, tokens: &[TokenId], entry: T) -> bool {
        let Some(first) = tokens.first() else {
            let n_before = self.ends.len();
            self.ends.retain(|&end| end != entry);
            return self.ends.len() < n_before;
        };
        let Some(child) = self.children.get_mut(first) else {
            return false;
        };
        let n = child.edge.tokens().len();
        if child.n_common(tokens) < n || !child.remove(&tokens[n..], entry) {
            return false;
        }
        if child.is_empty() {
            self.children.remove(first);
        } else if child.ends.is_empty() {
            child.join_only_child();
        }
        true
    }

    /// Parts its edge after `n` tokens: a new node takes all that it has.
    fn split(&mut self, n: usize) {
        let (edge, rest) = self.edge.split(n);
        let mut below = Self::new(rest);
        std::mem::swap(&mut below.ends, &mut self.ends);
        std::mem::swap(&mut below.children, &mut self.children);
        self.edge = edge;
        if let Some(&first) = below.edge.tokens().first() {
            self.children.insert(first, below);
        }
    }

    /// Becomes one with its child, where it has one only.
    fn join_only_child(&mut self) {
        if self.children.len() > 1 {
            return;
        }
        if let Some((_, child)) = self.children.pop_first() {
            // An entry below has the tokens of both edges one after the other.
            let range = child.edge.range.start - self.edge.range.len()..child.edge.range.end;
            let of = child.edge.of;
            *self = Self {
                edge: Edge { of, range },
                ..child
            };
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn tokens(text: &str) -> Arc<[TokenId]> {
        text.bytes().map(|byte| TokenId(byte.into())).collect()
    }

    fn check(node: &Node<usize>) {
        for (first, child) in &node.children {
            assert_eq!(child.edge.tokens().first(), Some(first));
            assert!(!child.ends.is_empty() || child.children.len() > 1);
            check(child);
        }
    }

    /// A number below `n` of a linear congruential generator.
    fn below(state: &mut u64, n: u64) -> u64 {
        *state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
        (*state >> 33) % n
    }

    /// Against a list that is searched from end to end.
    #[test]
    fn lookups_are_those_of_a_list() {
        let mut state = 7;
        for _ in 0..200 {
            let mut tree = PrefixTree::default();
            let mut list: Vec<(Salt, Arc<[TokenId]>, usize)> = Vec::new();
            for number in 0..40 {
                let n = 1 + below(&mut state, 8);
                let text = (0..n).map(|_| TokenId(below(&mut state, 2) as u32));
                let (text, salt): (Arc<[TokenId]>, _) =
                    (text.collect(), Salt(below(&mut state, 2)));
                match below(&mut state, 3) {
                    0 if !list.is_empty() => {
                        let at = below(&mut state, list.len() as u64) as usize;
                        let (salt, text, entry) = list.swap_remove(at);
                        assert!(tree.remove(salt, &text, entry));
                        assert!(!tree.remove(salt, &text, entry));
                    }
                    _ => {
                        tree.insert(salt, &text, number);
                        list.push((salt, Arc::clone(&text), number));
                    }
                }
                tree.roots.values().for_each(check);
                let own = list.iter().filter(|(of, ..)| *of == salt);
                let found = own.map(|(_, other, entry)| TreeMatch {
                    entry: *entry,
                    n_common: n_common(other, &text),
                    n_tokens: other.len(),
                });
                let mut expected: Vec<_> = found.filter(|found| found.n_common > 0).collect();
                let mut got = tree.matches(salt, &text);
                assert!(got.is_sorted_by_key(|found| std::cmp::Reverse(found.n_common)));
                got.sort_by_key(|found| found.entry);
                expected.sort_by_key(|found| found.entry);
                assert_eq!(got, expected);
                let covers = expected.iter().any(|found| found.n_common == text.len());
                assert_eq!(tree.covers(salt, &text), covers);
            }
        }
    }

    /// What an entry alone saves: nothing where another one has all its tokens.
    #[test]
    fn an_entry_saves_what_no_other_one_has() {
        let mut tree = PrefixTree::default();
        for (entry, text) in ["abcdef", "abcxyz", "abc", "q", "q"]
            .into_iter()
            .enumerate()
        {
            tree.insert(Salt(0), &tokens(text), entry);
        }
        for (cut, expected) in [
            (Cut::Anywhere, [3, 3, 0, 0, 0]),
            (Cut::AtEnds, [3, 3, 3, 0, 0]),
        ] {
            let mut saved = [usize::MAX; 5];
            tree.for_each_saved(cut, |entry, n| saved[entry] = n);
            assert_eq!(saved, expected, "{cut:?}");
        }
    }

    #[test]
    fn entries_part_anywhere() {
        let mut tree = PrefixTree::default();
        for (entry, text) in ["abcdef", "abcxyz", "abc", "q"].into_iter().enumerate() {
            tree.insert(Salt(0), &tokens(text), entry);
        }
        let found = |text: &str| -> Vec<(usize, usize)> {
            let found = tree.matches(Salt(0), &tokens(text));
            found.iter().map(|f| (f.entry, f.n_common)).collect()
        };
        assert_eq!(found("abcdex"), [(0, 5), (2, 3), (1, 3)]);
        assert_eq!(found("abz"), [(2, 2), (0, 2), (1, 2)]);
        assert_eq!(found("z"), []);
        assert_eq!(tree.matches(Salt(1), &tokens("abc")), []);
        let ends = tree.ends_within(Salt(0), &tokens("abcdefg"));
        let ends: Vec<usize> = ends.iter().map(|found| found.entry).collect();
        assert_eq!(ends, [2, 0]);
    }
}
