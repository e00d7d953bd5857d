//! Evictions over traces of conversations: the duel against recency and value alone.
//!
//! `CELLAR_MOONCAKE=FOLDER cargo test -p cellar-prefix-store --test eviction -- --nocapture` also
//! replays the public traces of Mooncake (FAST'25) in that folder, `mooncake-*.jsonl`, and prints
//! the table of hits.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::collections::{BTreeMap, BTreeSet, HashMap};

use cellar_prefix_store::{Candidate, EvictionDuel, EvictionRule};

/// Tokens of a block of a trace.
const BLOCK: u64 = 512;

/// A prompt: its blocks, equal where prompts begin with the same tokens, and its tokens.
struct Prompt {
    blocks: Vec<u32>,
    n_tokens: u64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Policy {
    Lru,
    Value,
    Duel,
}

/// A cached prompt. Its weights are those of the scheduler's values.
struct Line {
    /// Its nodes in the tree of blocks.
    nodes: Vec<usize>,
    n_hits: u32,
    last_used: u64,
    n_expected: u32,
    n_used: u32,
    base: f64,
}

/// A cache of prompts that share blocks, of so many blocks.
struct Cache {
    policy: Policy,
    capacity: usize,
    lines: BTreeMap<u32, Line>,
    /// A tree of blocks: the node behind a node and a block, and the lines through each node.
    children: HashMap<(usize, u32), usize>,
    holders: Vec<BTreeSet<u32>>,
    /// By node: the evicted lines that alone had it, and the other way round.
    evicted_at: HashMap<usize, BTreeSet<u64>>,
    evicted: HashMap<u64, Vec<usize>>,
    n_blocks: usize,
    n_lines: u32,
    now: u64,
    inflation: f64,
    duel: EvictionDuel<u32>,
}

impl Cache {
    fn new(policy: Policy, n_tokens: u64) -> Self {
        Self {
            policy,
            capacity: (n_tokens / BLOCK) as usize,
            lines: BTreeMap::new(),
            children: HashMap::new(),
            holders: vec![BTreeSet::new()],
            evicted_at: HashMap::new(),
            evicted: HashMap::new(),
            n_blocks: 0,
            n_lines: 0,
            now: 0,
            inflation: 0.0,
            duel: EvictionDuel::new(),
        }
    }

    /// The nodes of blocks, made where there are none.
    fn nodes(&mut self, blocks: &[u32]) -> Vec<usize> {
        let mut at = 0;
        let nodes = blocks.iter().map(|&block| {
            at = *self.children.entry((at, block)).or_insert_with(|| {
                self.holders.push(BTreeSet::new());
                self.holders.len() - 1
            });
            at
        });
        nodes.collect()
    }

    /// The blocks that a line alone has: its last ones.
    fn n_alone(&self, line: &Line) -> usize {
        let nodes = line.nodes.iter().rev();
        nodes
            .take_while(|&&node| self.holders[node].len() == 1)
            .count()
    }

    fn candidate(&self, key: u32, line: &Line) -> Candidate<u32> {
        let n_alone = self.n_alone(line);
        let frequency =
            0.125 + f64::from(line.n_expected) + f64::from(line.n_used.saturating_sub(1));
        Candidate {
            key,
            last_used: line.last_used,
            // All blocks have as many bytes.
            value: line.base + if n_alone > 0 { frequency } else { 0.0 },
            n_hits: line.n_hits,
            n_saved: n_alone as u64,
        }
    }

    fn evict(&mut self, but: u32) {
        let others = self.lines.iter().filter(|(key, _)| **key != but);
        let lines: Vec<_> = others
            .map(|(&key, line)| self.candidate(key, line))
            .collect();
        let rule = self.duel.active();
        let (key, rule) = match self.policy {
            Policy::Lru => {
                let oldest = lines.iter().min_by_key(|line| (line.last_used, line.key));
                (oldest.unwrap().key, EvictionRule::Recency)
            }
            // A duel without a past evicts by value.
            Policy::Value => {
                let gone = EvictionDuel::new().evict(&lines).unwrap();
                (gone.key, EvictionRule::Value)
            }
            Policy::Duel => {
                let gone = self.duel.evict(&lines).unwrap();
                let line = &self.lines[&gone.key];
                let alone = line.nodes[line.nodes.len() - self.n_alone(line)..].to_vec();
                for node in &alone {
                    self.evicted_at
                        .entry(*node)
                        .or_default()
                        .insert(gone.number);
                }
                self.evicted.insert(gone.number, alone);
                (gone.key, rule)
            }
        };
        if rule == EvictionRule::Value {
            let gone = lines.iter().find(|line| line.key == key).unwrap();
            self.inflation = self.inflation.max(gone.value);
        }
        for node in self.lines.remove(&key).unwrap().nodes {
            self.holders[node].remove(&key);
            self.n_blocks -= usize::from(self.holders[node].is_empty());
        }
    }

    /// Tells the duel what this prompt finds, and what it would find.
    fn tell(&mut self, nodes: &[usize], n_found: usize) {
        let is_marked = |node: &usize| {
            let mut holders = self.holders[*node].iter();
            holders.all(|line| self.duel.is_marked(*line))
        };
        let found = &nodes[..n_found];
        let n_marked = found
            .iter()
            .rev()
            .take_while(|node| is_marked(node))
            .count();
        let users = found.last().map(|node| self.holders[*node].clone());
        let users = users.unwrap_or_default();
        let mut more = n_marked as u64;
        for line in users
            .iter()
            .filter(|line| self.duel.is_marked(**line))
            .collect::<Vec<_>>()
        {
            self.duel.line_used(*line, more);
            more = 0;
        }
        let mut missed = nodes.iter().enumerate().skip(n_found).rev();
        let ghost = missed.find_map(|(at, node)| {
            let ghosts = self.evicted_at.get(node)?;
            let mut ghosts = ghosts.iter().rev();
            let ghost = ghosts.find(|number| self.duel.is_ghost(**number))?;
            Some((*ghost, at + 1 - n_found))
        });
        if let Some((number, n_more)) = ghost {
            self.duel.ghost_asked(number, n_more as u64);
            for node in self.evicted.remove(&number).unwrap() {
                self.evicted_at.get_mut(&node).unwrap().remove(&number);
            }
        }
    }

    /// Computes a prompt and caches it; returns the tokens that were found.
    fn compute(&mut self, prompt: &Prompt) -> u64 {
        self.now += 1;
        let nodes = self.nodes(&prompt.blocks);
        let n_found = nodes
            .iter()
            .take_while(|node| !self.holders[**node].is_empty())
            .count();
        self.tell(&nodes, n_found);
        let source = n_found.checked_sub(1).and_then(|last| {
            let holders = self.holders[nodes[last]].iter().copied();
            holders.min_by_key(|line| (self.lines[line].nodes.len(), *line))
        });
        let mut line = Line {
            nodes,
            n_hits: 0,
            last_used: self.now,
            n_expected: 1,
            n_used: 0,
            base: self.inflation,
        };
        if let Some(source) = source {
            let source = self.lines.get_mut(&source).unwrap();
            source.last_used = self.now;
            source.n_hits += 1;
            source.n_used += 1;
            source.base = self.inflation;
            // The next turn of a conversation is worth what the one before was.
            if 2 * n_found >= line.nodes.len() && n_found + 1 >= source.nodes.len() {
                line.n_hits = source.n_hits;
                line.n_expected += std::mem::take(&mut source.n_expected) + source.n_used.min(1);
            }
        }
        if line.nodes.len() <= self.capacity {
            let key = self.n_lines;
            self.n_lines += 1;
            for node in &line.nodes {
                self.n_blocks += usize::from(self.holders[*node].is_empty());
                self.holders[*node].insert(key);
            }
            self.lines.insert(key, line);
            while self.n_blocks > self.capacity && self.lines.len() > 1 {
                self.evict(key);
            }
        }
        (n_found as u64 * BLOCK).min(prompt.n_tokens - 1)
    }
}

/// The part of all tokens that is found, in percent.
fn hits(policy: Policy, n_tokens: u64, trace: &[Prompt]) -> f64 {
    let mut cache = Cache::new(policy, n_tokens);
    let found: u64 = trace.iter().map(|prompt| cache.compute(prompt)).sum();
    let all: u64 = trace.iter().map(|prompt| prompt.n_tokens).sum();
    100.0 * found as f64 / all as f64
}

/// The duel is as good as the better rule, but for half a point, and for another one in short
/// traces: it has to learn.
fn is_as_good(name: &str, n_tokens: u64, trace: &[Prompt]) -> [f64; 3] {
    let hits =
        [Policy::Lru, Policy::Value, Policy::Duel].map(|policy| hits(policy, n_tokens, trace));
    let [lru, value, duel] = hits;
    println!("{name}, {n_tokens} tokens: lru {lru:.2}, value {value:.2}, duel {duel:.2}");
    assert!(
        duel >= lru.max(value) - 0.5,
        "{name}, {n_tokens} tokens: {hits:?}"
    );
    hits
}

/// Numbers that look random, the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) as usize % n
    }
}

/// Conversations of some turns with a common beginning, of which so many are open at a time, and
/// documents between them, so many for each turn.
fn service(n_open: usize, n_turns: usize, documents_per_turn: usize) -> Vec<Prompt> {
    let mut random = Random(7);
    let mut next_block = 10;
    let mut grow = |blocks: &mut Vec<u32>, n: usize| {
        for _ in 0..n {
            blocks.push(next_block);
            next_block += 1;
        }
    };
    let mut trace = Vec::new();
    let mut push = |blocks: &[u32]| {
        let n_tokens = blocks.len() as u64 * BLOCK;
        let blocks = blocks.to_vec();
        trace.push(Prompt { blocks, n_tokens });
    };
    let mut open: Vec<(Vec<u32>, usize)> = vec![(vec![1, 2], 0); n_open];
    for _ in 0..1500 {
        let at = random.below(n_open);
        let (blocks, turn) = &mut open[at];
        grow(blocks, 3 + random.below(4));
        push(blocks);
        *turn += 1;
        if *turn >= n_turns {
            open[at] = (vec![1, 2], 0);
        }
        for _ in 0..documents_per_turn {
            let mut document = vec![1, 2];
            grow(&mut document, 12);
            push(&document);
        }
    }
    trace
}

#[test]
fn the_duel_is_as_good_as_the_better_rule() {
    let mut n_differ = [0, 0];
    for (n_open, n_turns, documents) in [(40, 2, 0), (40, 6, 0), (12, 10, 2), (60, 3, 1)] {
        let trace = service(n_open, n_turns, documents);
        let name = format!("{n_open} conversations, {n_turns} turns, {documents} documents");
        for n_blocks in [100, 300] {
            let [lru, value, _] = is_as_good(&name, n_blocks * BLOCK, &trace);
            n_differ[0] += usize::from(lru > value + 1.0);
            n_differ[1] += usize::from(value > lru + 1.0);
        }
    }
    // Each rule is the better one somewhere.
    assert!(n_differ[0] > 0 && n_differ[1] > 0, "{n_differ:?}");
}

#[test]
fn mooncakes_traces_are_served_as_by_the_better_rule() {
    let Ok(folder) = std::env::var("CELLAR_MOONCAKE") else {
        println!("SKIPPED: CELLAR_MOONCAKE is not set");
        return;
    };
    for name in ["conversation", "synthetic"] {
        let path = format!("{folder}/mooncake-{name}.jsonl");
        let lines = std::fs::read_to_string(path).unwrap();
        let prompts = lines.lines().map(|line| {
            let line: serde_json::Value = serde_json::from_str(line).unwrap();
            let blocks = line["hash_ids"].as_array().unwrap().iter();
            Prompt {
                blocks: blocks.map(|block| block.as_u64().unwrap() as u32).collect(),
                n_tokens: line["input_length"].as_u64().unwrap(),
            }
        });
        let trace: Vec<Prompt> = prompts.collect();
        for millions in [3, 5, 15, 50] {
            is_as_good(name, millions * 1_000_000, &trace);
        }
    }
}

/// What a line saves counts for the rule that evicts only where the other one would not have it.
#[test]
fn a_line_that_both_rules_keep_counts_for_none() {
    let line = |key: u32, value: f64| Candidate {
        key,
        last_used: u64::from(key),
        value,
        n_hits: 1,
        n_saved: 100,
    };
    // The least recently used line is worth most: value evicts another one, and marks it.
    let lines = [line(0, 9.0), line(1, 5.0), line(2, 1.0)];
    let duel = || {
        let mut duel = EvictionDuel::new();
        assert_eq!(duel.evict(&lines).unwrap().key, 2);
        assert!(duel.is_marked(0) && !duel.is_marked(1));
        duel
    };
    // The ghost of the line that went is asked for: recency leads at the next eviction.
    let rule_after = |used: u32| {
        let mut duel = duel();
        assert!(duel.is_ghost(0));
        duel.line_used(used, 50);
        duel.ghost_asked(0, 20);
        duel.evict(&lines[..2]).unwrap();
        duel.active()
    };
    assert_eq!(rule_after(0), EvictionRule::Value, "it saved 50 tokens");
    assert_eq!(rule_after(1), EvictionRule::Recency, "both have them");
}
