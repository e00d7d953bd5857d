//! A store of prefixes next to a simulated scheduler: it answers late, or not at all, loses groups,
//! and has them restored a few at a time.

use std::collections::BTreeMap;

use cellar_scheduler::{
    Event, Micros, Missed, PrefixUse, Request, RequestId, Salt, StoredCuts, StoredPrefix,
    StoredRows, StoredTokens,
};
use kv_core::memory::{Memory, Refusal, RestoreInto, Seqs, Snapshot};
use kv_core::{Pos, PosRange, SeqId, TokenId};
use rand_chacha::ChaCha8Rng;

use super::fake::SavedRows;
use super::simulator::{Simulator, below};

/// Tokens of the smallest group.
const GROUP: usize = 16;

/// Groups, by salt and by all tokens up to their end.
type Groups = BTreeMap<(Salt, Vec<TokenId>), Group>;

#[derive(Debug)]
struct Group {
    snapshot: Snapshot,
    rows: SavedRows,
    seq: SeqId,
}

/// A store, and what it is asked.
#[derive(Debug)]
pub struct Store {
    rng: ChaCha8Rng,
    /// So many of 8 answers are that it is down.
    n_bad: u32,
    groups: Groups,
    asked: BTreeMap<RequestId, (Salt, Vec<TokenId>)>,
    fetching: BTreeMap<RequestId, (Salt, Vec<TokenId>)>,
    found: BTreeMap<RequestId, StoredTokens>,
    /// Groups that were restored.
    pub n_restored: usize,
}

impl Store {
    pub fn new(rng: ChaCha8Rng, n_bad: u32) -> Self {
        Self {
            rng,
            n_bad,
            groups: Groups::new(),
            asked: BTreeMap::new(),
            fetching: BTreeMap::new(),
            found: BTreeMap::new(),
            n_restored: 0,
        }
    }

    /// True if an answer is to come.
    pub fn is_asked(&self) -> bool {
        !self.asked.is_empty() || !self.fetching.is_empty()
    }

    /// The most of these tokens that it has, of all but the last.
    fn find(&self, cuts: StoredCuts, salt: Salt, tokens: &[TokenId]) -> Option<StoredTokens> {
        let has = |n: usize| self.groups.contains_key(&(salt, tokens[..n].to_vec()));
        let most = tokens.len() - 1;
        let n_tokens = match cuts {
            StoredCuts::Groups => {
                let ends = (GROUP..=most).step_by(GROUP);
                ends.take_while(|&end| has(end)).last()?
            }
            StoredCuts::Nowhere => (1..=most).rev().find(|&end| has(end))?,
        };
        Some(StoredTokens {
            first: 0,
            n_tokens,
            cuts,
        })
    }
}

/// The answers of a store that come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    /// Some, at random.
    Some,
    /// All, as nothing else happens.
    All,
}

impl Simulator {
    /// The same with a store of prefixes.
    pub fn with_store(mut self, store: Store) -> Self {
        self.scheduler = self.scheduler.with_store();
        self.store = Some(store);
        self
    }

    fn cuts(&self) -> StoredCuts {
        let snapshot = self.memory.snapshot(Seqs::One(SeqId(0))).unwrap();
        match snapshot.within(PosRange::ALL) {
            Ok(_) => StoredCuts::Groups,
            Err(_) => StoredCuts::Nowhere,
        }
    }

    /// Asks the store for a request that came, most of the time.
    pub(super) fn ask_store(&mut self, request: &Request) {
        let Some(store) = &mut self.store else {
            return;
        };
        let PrefixUse::Within(salt) = request.prefix else {
            return;
        };
        if below(&mut store.rng, 8) == 0 {
            return;
        }
        let asked = (salt, request.prompt.clone());
        store.asked.insert(request.id, asked);
        let event = Event::Asked(request.id);
        assert!(self.scheduler.handle(Micros(self.now), event).is_empty());
    }

    /// Gives answers that are due.
    pub(super) fn answer_store(&mut self, due: Due) {
        let is_idle = due == Due::All;
        let cuts = self.cuts();
        let Some(store) = &mut self.store else {
            return;
        };
        let mut events = Vec::new();
        for (request, (salt, tokens)) in std::mem::take(&mut store.asked) {
            if !is_idle && below(&mut store.rng, 3) > 0 {
                store.asked.insert(request, (salt, tokens));
                continue;
            }
            let result = if below(&mut store.rng, 8) < store.n_bad {
                Err(Missed::TierDown)
            } else {
                let found = store.find(cuts, salt, &tokens);
                found.ok_or(Missed::TierMiss)
            };
            if let Ok(stored) = result {
                store.found.insert(request, stored);
                store.fetching.insert(request, (salt, tokens));
            }
            events.push(Event::Probed { request, result });
        }
        // Fetches that did not begin stay, and have an answer that nobody waits for.
        for (request, (salt, tokens)) in std::mem::take(&mut store.fetching) {
            let stored = store.found[&request];
            if !is_idle && below(&mut store.rng, 3) > 0 {
                store.fetching.insert(request, (salt, tokens));
                continue;
            }
            let n_lost = GROUP * below(&mut store.rng, 3) as usize;
            let result = match cuts {
                _ if below(&mut store.rng, 8) < store.n_bad => Err(Missed::TierDown),
                StoredCuts::Groups if stored.n_tokens > n_lost => Ok(StoredTokens {
                    n_tokens: stored.n_tokens - n_lost,
                    ..stored
                }),
                StoredCuts::Groups => Err(Missed::TierMiss),
                StoredCuts::Nowhere => Ok(stored),
            };
            events.push(Event::Fetched { request, result });
        }
        for event in events {
            assert!(self.scheduler.handle(Micros(self.now), event).is_empty());
        }
    }

    /// A fetch began: it has its answer later.
    pub(super) fn fetch(&mut self, request: RequestId) {
        let prompt = self.tokens_of(request);
        let prefix = self.prefix_of(request);
        let (Some(store), PrefixUse::Within(salt)) = (&mut self.store, prefix) else {
            panic!("there is no store");
        };
        store.fetching.insert(request, (salt, prompt));
    }

    /// Stores what is evicted, and what is cached now and then.
    pub(super) fn publish(&mut self) {
        let evicted = self.scheduler.take_evicted();
        let cuts = self.cuts();
        let Some(store) = &mut self.store else {
            return;
        };
        let mut lines: Vec<(SeqId, Salt, Vec<TokenId>)> = evicted
            .into_iter()
            .map(|line| (line.seq, line.salt, line.tokens.to_vec()))
            .collect();
        if below(&mut store.rng, 2) == 0 {
            let cached = self.scheduler.cached();
            lines.extend(cached.map(|line| (line.seq, line.salt, line.tokens.to_vec())));
        }
        for (seq, salt, tokens) in lines {
            if self.memory.next_pos(seq).as_usize() != tokens.len() {
                continue; // rejected drafts, or a line that a request took over
            }
            let ends: Vec<usize> = match cuts {
                StoredCuts::Groups => (GROUP..=tokens.len()).step_by(GROUP).collect(),
                StoredCuts::Nowhere => vec![tokens.len()],
            };
            for end in ends {
                let whole = self.memory.snapshot(Seqs::One(seq)).unwrap();
                let snapshot = match cuts {
                    StoredCuts::Groups => {
                        let pos = |n: usize| Pos(n as u32);
                        let range = PosRange::from(pos(end - GROUP)..pos(end));
                        whole.within(range).unwrap()
                    }
                    StoredCuts::Nowhere => whole,
                };
                let rows = self.rows.save(&snapshot);
                let group = Group {
                    snapshot,
                    rows,
                    seq,
                };
                store.groups.insert((salt, tokens[..end].to_vec()), group);
            }
        }
    }

    /// Restores some of what was fetched.
    pub(super) fn restore_stored(&mut self, prefix: StoredPrefix) {
        let StoredPrefix {
            request,
            seq,
            copy,
            mut n_held,
            n_tokens,
        } = prefix;
        copy.into_iter().for_each(|edit| self.edit(edit));
        let held = self.memory.positions(seq);
        assert_eq!(held.map_or(0, |held| held.last.as_usize() + 1), n_held);
        let tokens = self.tokens_of(request);
        let PrefixUse::Within(salt) = self.prefix_of(request) else {
            panic!("{request} shares nothing");
        };
        let cuts = self.cuts();
        let mut store = self.store.take().unwrap();
        let mut result = StoredRows::Written;
        while n_held < n_tokens {
            let end = match cuts {
                StoredCuts::Groups => n_held + GROUP,
                StoredCuts::Nowhere => n_tokens,
            };
            let group = store.groups.get(&(salt, tokens[..end].to_vec()));
            let Some(group) = group.filter(|_| below(&mut store.rng, 16) > 0) else {
                result = StoredRows::Failed; // damaged
                break;
            };
            let (from, to) = (group.seq, seq);
            let into = match cuts {
                StoredCuts::Groups => RestoreInto::Behind { from, to },
                StoredCuts::Nowhere => RestoreInto::One { from, to },
            };
            match self.memory.restore(&group.snapshot, into) {
                Ok(restored) => {
                    self.rows.restore(&group.rows, &restored);
                    n_held = end;
                    store.n_restored += 1;
                }
                Err(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => {
                    result = StoredRows::NoRoom;
                    break;
                }
                Err(other) => panic!("{other}: {prefix:?}"),
            }
            if below(&mut store.rng, 2) == 0 {
                break; // the rest after the next step
            }
        }
        self.store = Some(store);
        let event = Event::Restored {
            n_tokens: n_held,
            result,
        };
        assert!(self.scheduler.handle(Micros(self.now), event).is_empty());
    }
}
