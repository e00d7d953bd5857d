//! [`EvictionDuel`]: which cached prefix is evicted, by recency or by value, whichever loses less.
//!
//! Recency is right for conversations that come back after a while, value for scans over documents
//! and where bytes differ. Neither is right for all services, so one rule evicts and the other one
//! is simulated: of the lines that are there, some would be gone by now (*marked*), and of those
//! that are gone some would be there (*ghosts*). Tokens that only marked lines save count for the
//! rule that evicts, tokens of a ghost that is asked for again for the other one. When the other
//! one leads, it takes over.
//!
//! Invariant: the same calls give the same choices. Knows no tokens and no memory: whose tokens are
//! found is the caller's to say.

use std::collections::{BTreeMap, BTreeSet};

/// What is left of both scores after each eviction: services change.
const KEPT: f64 = 0.999;

/// A rule that takes over begins with a lead of this part of the tokens that are cached: it needs
/// some time to show what it is worth.
const LEAD: f64 = 0.01;

/// What chooses the line that is evicted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictionRule {
    /// The line that was not used for the longest time.
    Recency,
    /// The line that is worth least; of lines that were never used again, while there are enough
    /// of them.
    Value,
}

/// A cached prefix as the rules see it.
#[derive(Clone, Copy, Debug)]
pub struct Candidate<K> {
    /// Its name.
    pub key: K,
    /// When it was used last, in any unit.
    pub last_used: u64,
    /// What it is worth.
    pub value: f64,
    /// How often it was used again.
    pub n_hits: u32,
    /// Tokens that no other line would save.
    pub n_saved: u64,
}

/// The choice of the line that goes.
#[derive(Clone, Debug)]
pub struct EvictionDuel<K> {
    active: EvictionRule,
    /// Lines that the other rule would have evicted.
    marked: BTreeSet<K>,
    /// Evicted lines that the other rule would have kept, by their number.
    ghosts: BTreeMap<u64, Candidate<K>>,
    n_evicted: u64,
    /// Tokens that the active rule saved and the other would not have, and the other way round.
    saved: f64,
    lost: f64,
}

/// The line that goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Eviction<K> {
    /// Its name.
    pub key: K,
    /// The number by which [`EvictionDuel::ghost_asked`] knows it.
    pub number: u64,
}

impl<K: Copy + Ord> EvictionDuel<K> {
    /// A duel that begins with the rule that evicts no conversation for a scan.
    pub fn new() -> Self {
        Self {
            active: EvictionRule::Value,
            marked: BTreeSet::new(),
            ghosts: BTreeMap::new(),
            n_evicted: 0,
            saved: 0.0,
            lost: 0.0,
        }
    }

    /// The rule that evicts now.
    pub fn active(&self) -> EvictionRule {
        self.active
    }

    /// True if the other rule would have evicted this line: what it saves counts for the active
    /// one.
    pub fn is_marked(&self, key: K) -> bool {
        self.marked.contains(&key)
    }

    /// True if the other rule would have kept this evicted line.
    pub fn is_ghost(&self, number: u64) -> bool {
        self.ghosts.contains_key(&number)
    }

    /// Chooses the line that goes.
    pub fn evict(&mut self, lines: &[Candidate<K>]) -> Option<Eviction<K>> {
        let all: Vec<(Option<u64>, &Candidate<K>)> =
            lines.iter().map(|line| (None, line)).collect();
        let (_, &gone) = choose(self.active, &all)?;
        let number = self.n_evicted;
        self.n_evicted += 1;
        if !self.marked.remove(&gone.key) && gone.n_saved > 0 {
            self.ghosts.insert(number, gone);
        }
        self.evict_other(lines, gone.key);
        self.saved *= KEPT;
        self.lost *= KEPT;
        if self.lost > self.saved {
            self.change_rule(lines);
        }
        let key = gone.key;
        Some(Eviction { key, number })
    }

    /// The other rule evicts until what it would have, ghosts and lines that are not marked, has
    /// no more tokens than what is there.
    fn evict_other(&mut self, lines: &[Candidate<K>], gone: K) {
        let other = self.active.other();
        let is_marked = |line: &&Candidate<K>| self.marked.contains(&line.key);
        let of_marked: u64 = lines
            .iter()
            .filter(is_marked)
            .map(|line| line.n_saved)
            .sum();
        let of_ghosts: u64 = self.ghosts.values().map(|ghost| ghost.n_saved).sum();
        let mut too_many = of_ghosts.saturating_sub(of_marked);
        while too_many > 0 {
            let is_unmarked =
                |line: &&Candidate<K>| line.key != gone && !self.marked.contains(&line.key);
            let unmarked = lines.iter().filter(is_unmarked).map(|line| (None, line));
            let ghosts = self.ghosts.iter();
            let ghosts = ghosts.map(|(&number, ghost)| (Some(number), ghost));
            let kept: Vec<(Option<u64>, &Candidate<K>)> = unmarked.chain(ghosts).collect();
            let Some((number, least)) = choose(other, &kept) else {
                return;
            };
            let (key, n_saved) = (least.key, least.n_saved);
            too_many = too_many.saturating_sub(n_saved);
            match number {
                Some(number) => {
                    self.ghosts.remove(&number);
                }
                None => {
                    self.marked.insert(key);
                }
            }
        }
    }

    fn change_rule(&mut self, lines: &[Candidate<K>]) {
        let n_tokens: u64 = lines.iter().map(|line| line.n_saved).sum();
        self.active = self.active.other();
        self.marked.clear();
        self.ghosts.clear();
        self.saved = n_tokens as f64 * LEAD;
        self.lost = 0.0;
    }

    /// A request used a line, of which it found so many tokens more than lines have that are not
    /// marked.
    pub fn line_used(&mut self, key: K, n_more: u64) {
        if self.marked.contains(&key) {
            self.saved += n_more as f64;
            self.marked.remove(&key);
        }
    }

    /// A request asked for so many tokens more than it found, which an evicted line had.
    pub fn ghost_asked(&mut self, number: u64, n_more: u64) {
        if self.ghosts.remove(&number).is_some() {
            self.lost += n_more as f64;
        }
    }

    /// A line went for another reason.
    pub fn line_gone(&mut self, key: K) {
        self.marked.remove(&key);
    }
}

impl<K: Copy + Ord> Default for EvictionDuel<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl EvictionRule {
    fn other(self) -> Self {
        match self {
            Self::Recency => Self::Value,
            Self::Value => Self::Recency,
        }
    }
}

/// The line that a rule evicts, of lines and of ghosts with their numbers.
fn choose<'a, K: Copy + Ord>(
    rule: EvictionRule,
    lines: &[(Option<u64>, &'a Candidate<K>)],
) -> Option<(Option<u64>, &'a Candidate<K>)> {
    let age = |line: &Candidate<K>| (line.last_used, line.key);
    let lines = lines.iter().copied();
    match rule {
        EvictionRule::Recency => lines.min_by_key(|(_, line)| age(line)),
        EvictionRule::Value => {
            // Lines without hits, so that a scan evicts no conversations. Where those with hits are
            // more than three quarters, these: conversations end.
            let n_hit = lines.clone().filter(|(_, line)| line.n_hits > 0).count();
            let is_hit = 4 * n_hit > 3 * lines.len();
            let candidates = lines.filter(|(_, line)| (line.n_hits > 0) == is_hit);
            candidates.min_by(|(_, a), (_, b)| {
                a.value
                    .total_cmp(&b.value)
                    .then_with(|| age(a).cmp(&age(b)))
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(key: u32, last_used: u64, n_hits: u32) -> Candidate<u32> {
        Candidate {
            key,
            last_used,
            value: 1.0 + f64::from(n_hits),
            n_hits,
            n_saved: 10,
        }
    }

    /// A conversation and 32 documents, each read once, in a memory for eight: the conversation
    /// stays, and its next turn counts for the rule that kept it.
    #[test]
    fn a_scan_leaves_the_conversation() {
        let mut duel = EvictionDuel::new();
        let mut lines = vec![line(0, 0, 1)];
        for document in 1..=32 {
            lines.push(line(document, document.into(), 0));
            if lines.len() > 8 {
                let gone = duel.evict(&lines).unwrap().key;
                assert_ne!(gone, 0);
                lines.retain(|line| line.key != gone);
            }
        }
        // Recency alone would have evicted it first.
        assert!(duel.is_marked(0));
        duel.line_used(0, 10);
        assert!(!duel.is_marked(0));
        assert_eq!(duel.active(), EvictionRule::Value);
    }

    /// Lines that come back once, after a while, next to lines that were used before and do not:
    /// value evicts what comes back, until recency takes over. A scan gives it back to value.
    #[test]
    fn the_rule_that_loses_less_takes_over() {
        let mut duel = EvictionDuel::new();
        let mut lines: Vec<Candidate<u32>> = (0..4).map(|key| line(key, key.into(), 2)).collect();
        lines.extend((4..8).map(|key| line(key, key.into(), 0)));
        let mut now = 8;
        let mut asked: std::collections::VecDeque<u32> = (4..8).collect();
        for key in 100..140 {
            let gone = duel.evict(&lines).unwrap();
            lines.retain(|line| line.key != gone.key);
            lines.push(line(key, now, 0));
            now += 1;
            asked.push_back(key);
            // The line of four steps ago is asked for.
            let back = asked.pop_front().unwrap();
            if back == gone.key {
                duel.ghost_asked(gone.number, 10);
            } else if let Some(found) = lines.iter_mut().find(|line| line.key == back) {
                found.last_used = now;
                duel.line_used(back, 10);
            }
            if duel.active() == EvictionRule::Recency {
                break;
            }
        }
        assert_eq!(duel.active(), EvictionRule::Recency);
        // Now only one line is ever used again, and documents come by.
        let mut lines = vec![line(0, now, 9)];
        lines.extend((200..207).map(|key| line(key, now, 0)));
        let mut conversation = None;
        for document in 300..400 {
            now += 1;
            lines.push(line(document, now, 0));
            let gone = duel.evict(&lines).unwrap();
            lines.retain(|line| line.key != gone.key);
            if gone.key == 0 {
                conversation = Some(gone.number);
            }
            if document % 16 == 0 {
                match conversation.take() {
                    Some(number) => {
                        assert!(duel.is_ghost(number));
                        duel.ghost_asked(number, 1000);
                        lines.push(line(0, now, 9));
                    }
                    None => {
                        duel.line_used(0, 1000);
                        for line in lines.iter_mut().filter(|line| line.key == 0) {
                            line.last_used = now;
                        }
                    }
                }
            }
        }
        assert_eq!(duel.active(), EvictionRule::Value);
        assert!(lines.iter().any(|line| line.key == 0));
    }

    /// Both rules free as many tokens; what nobody has any more is forgotten.
    #[test]
    fn marks_and_ghosts_are_bounded() {
        let mut duel = EvictionDuel::new();
        let mut lines: Vec<Candidate<u32>> = Vec::new();
        let mut random: u64 = 1;
        for key in 0..2000_u32 {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            let n_hits = (random >> 60) as u32 / 12;
            let mut new = line(key, key.into(), n_hits);
            new.n_saved = 1 + (random >> 40) % 50;
            lines.push(new);
            if lines.len() > 40 {
                let gone = duel.evict(&lines).unwrap();
                lines.retain(|line| line.key != gone.key);
            }
            let is_there = |key: &u32| lines.iter().any(|line| line.key == *key);
            assert!(duel.marked.iter().all(is_there));
            let of_ghosts: u64 = duel.ghosts.values().map(|ghost| ghost.n_saved).sum();
            let marked = lines.iter().filter(|line| duel.is_marked(line.key));
            let of_marked: u64 = marked.map(|line| line.n_saved).sum();
            assert!(
                of_ghosts.abs_diff(of_marked) <= 50,
                "{of_ghosts} and {of_marked}"
            );
        }
        lines.iter().for_each(|line| duel.line_gone(line.key));
        assert!(duel.marked.is_empty());
        assert!(EvictionDuel::<u32>::new().evict(&[]).is_none());
    }
}
