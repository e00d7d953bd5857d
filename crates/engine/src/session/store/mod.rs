//! The store of prefixes under a [`Session`]: what was computed once comes back after a restart, a
//! swap of models or an eviction, or from another machine.
//!
//! A prompt that comes is looked up in all tiers while it waits. What one of them has is fetched
//! where that is faster than computing, and restored into a cached prefix when the request could be
//! admitted; the scheduler decides both. What is cached is published between steps, a group at a
//! time: rows are read on this thread, and hashed and written on those of the tiers. Invariant:
//! what is restored is what would be computed here, to the bit; whatever a tier does, no request
//! fails by it, and none waits longer for it than computing would take, but for a moment.

mod lookup;
mod names;
mod publish;
mod restore;

pub(super) use publish::Eagerness;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use cellar_prefix_store::{
    FetchChoice, FetchEstimate, Job, JobId, Outcome, StoreKey, Tier, TierCounts,
};
use cellar_scheduler::{
    Event, Missed, PrefixCaching, PrefixUse, Request, RequestId, Salt, SourceUse, StoredCuts,
    StoredTokens,
};
use kv_backend::Backend;
use kv_core::TokenId;
use kv_core::memory::Memory;

use self::lookup::{Lookup, LookupResult, Question, end, names_of};
use self::names::{Names, Piece};
use self::publish::Publisher;
use self::restore::FetchedPrefix;
use super::Session;
use super::config::micros;
use crate::decode::Engine;

/// Fewer tokens are computed sooner than they are found.
const MIN_FETCHED: usize = cellar_prefix_store::TAIL_TOKENS;

/// The longest time that a lookup may take, and the shortest that it gets.
const LOOKUP_TIME: Duration = Duration::from_millis(500);
const LEAST_LOOKUP_TIME: Duration = Duration::from_millis(20);

/// The time that a fetch may take where the speed of computing is not known yet.
const FETCH_TIME: Duration = Duration::from_secs(10);

/// The time that an idle thread waits for an answer before it looks for commands.
const WAIT: Duration = Duration::from_millis(2);

/// The weight of a new time in an average.
const NEW: f64 = 0.25;

/// Tokens of a step that tells how fast prompts are computed.
const MIN_STEP: usize = 16;

/// When tokens are fetched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FetchPolicy {
    /// Where that is faster than computing them, as far as is known.
    #[default]
    WhereFaster,
    /// Wherever they are.
    Always,
}

/// The store of prefixes of a session.
#[derive(Debug)]
pub struct PrefixTiers {
    /// The secret that names and seals what is stored.
    pub key: StoreKey,
    /// Its tiers, the fastest first.
    pub tiers: Vec<Tier>,
    /// When something is fetched.
    pub fetching: FetchPolicy,
}

/// The store of a session, with what it was asked.
#[derive(Debug)]
pub(super) struct SessionStore {
    names: Names,
    tiers: Vec<Tier>,
    fetching: FetchPolicy,
    cuts: StoredCuts,
    /// Bytes of a token, as far as is known before something is stored.
    token_bytes: u64,
    n_jobs: u64,
    /// The jobs under way, with their tiers.
    jobs: BTreeMap<JobId, (RequestId, usize)>,
    lookups: BTreeMap<RequestId, Lookup>,
    /// The groups that are to be fetched, or are on their way.
    wanted: BTreeMap<RequestId, WantedPrefix>,
    /// The groups that are here, and not restored yet.
    fetched: BTreeMap<RequestId, FetchedPrefix>,
    publisher: Publisher,
    /// Seconds for a token.
    compute_per_token: Option<f64>,
    restore_per_token: f64,
}

/// Groups that a tier has, and how long they may take.
#[derive(Debug)]
struct WantedPrefix {
    tier: usize,
    pieces: Vec<Piece>,
    time: Duration,
}

impl SessionStore {
    /// The store for an engine; `None` where it has no tiers, or the memory cannot be saved.
    pub(super) fn new<B: Backend, M: Memory + Clone>(
        given: Option<PrefixTiers>,
        engine: &Engine<B, M>,
    ) -> Option<Self> {
        let PrefixTiers {
            key,
            tiers,
            fetching,
        } = given?;
        let can_be_saved = engine.memory().snapshot(kv_core::memory::Seqs::All).is_ok();
        if tiers.is_empty() || !can_be_saved {
            return None;
        }
        let cuts = if engine.saves_ranges() {
            StoredCuts::Groups
        } else {
            StoredCuts::Nowhere
        };
        Some(Self {
            names: Names::of(key, engine),
            tiers,
            fetching,
            cuts,
            token_bytes: engine.settings().row_bytes().cells.iter().sum(),
            n_jobs: 0,
            jobs: BTreeMap::new(),
            lookups: BTreeMap::new(),
            wanted: BTreeMap::new(),
            fetched: BTreeMap::new(),
            publisher: Publisher::default(),
            compute_per_token: None,
            restore_per_token: 0.0,
        })
    }

    /// The counts of all tiers.
    pub(super) fn counts(&self) -> TierCounts {
        let all = self.tiers.iter().map(Tier::counts);
        all.fold(TierCounts::default(), |sum, counts| sum + counts)
    }

    /// Learns how long a step of so many tokens took.
    pub(super) fn learn_step(&mut self, n_tokens: usize, took: Duration) {
        if n_tokens >= MIN_STEP {
            let new = took.as_secs_f64() / n_tokens as f64;
            let old = self.compute_per_token.unwrap_or(new);
            self.compute_per_token = Some(old + (new - old) * NEW);
        }
    }

    /// Begins to look a prompt up, of which the memory has the first tokens. Returns whether an
    /// answer will come.
    fn look_up(
        &mut self,
        request: RequestId,
        salt: Salt,
        tokens: &[TokenId],
        n_held: usize,
    ) -> bool {
        if tokens.len() < n_held + MIN_FETCHED || self.tiers.iter().all(Tier::is_down) {
            return false;
        }
        let n_missing = tokens.len() - n_held;
        let computing = self.compute_time(n_missing).unwrap_or(LOOKUP_TIME);
        let deadline = Instant::now() + computing.clamp(LEAST_LOOKUP_TIME, LOOKUP_TIME);
        let mut lookup = Lookup {
            salt,
            tokens: tokens.to_vec(),
            n_held,
            cuts: self.cuts,
            deadline,
            tiers: Vec::new(),
        };
        let question = lookup.begin(&mut self.names, self.tiers.len());
        for tier in 0..self.tiers.len() {
            if !self.ask(request, tier, &question, deadline) {
                lookup.give_up(tier);
            }
        }
        let is_asked = lookup.is_asked();
        if is_asked {
            self.lookups.insert(request, lookup);
        }
        is_asked
    }

    fn compute_time(&self, n_tokens: usize) -> Option<Duration> {
        let seconds = self.compute_per_token? * n_tokens as f64;
        Duration::try_from_secs_f64(seconds).ok()
    }

    fn new_job(&mut self, request: RequestId, tier: usize) -> JobId {
        let id = JobId(self.n_jobs);
        self.n_jobs += 1;
        self.jobs.insert(id, (request, tier));
        id
    }

    /// Asks a tier. Returns whether it took the question.
    fn ask(
        &mut self,
        request: RequestId,
        tier: usize,
        question: &Question,
        deadline: Instant,
    ) -> bool {
        let id = self.new_job(request, tier);
        let job = match question.clone() {
            Question::HowMany(names) => Job::Probe {
                id,
                names,
                deadline,
            },
            Question::Which(names) => Job::Find {
                id,
                names,
                deadline,
            },
        };
        let taken = self.tiers[tier].submit(job).is_ok();
        if !taken {
            self.jobs.remove(&id);
        }
        taken
    }

    /// The next outcome that is there, with its request and tier.
    fn next_outcome(&mut self) -> Option<(RequestId, usize, Outcome)> {
        if self.jobs.is_empty() {
            return None;
        }
        for tier in &self.tiers {
            while let Some(outcome) = tier.next() {
                // A job that was given up may have had its outcome already.
                if let Some((request, tier)) = self.jobs.remove(&outcome.id()) {
                    return Some((request, tier, outcome));
                }
            }
        }
        None
    }

    /// Waits a moment for an outcome. Returns whether one may come.
    fn wait(&self) -> bool {
        let Some((_, (_, tier))) = self.jobs.first_key_value() else {
            return false;
        };
        self.tiers[*tier].wait_for_outcome(WAIT);
        true
    }

    /// Gives up what is under way for a request.
    pub(super) fn forget(&mut self, request: RequestId) {
        self.lookups.remove(&request);
        self.wanted.remove(&request);
        self.fetched.remove(&request);
        let jobs = self.jobs.iter().filter(|(_, (of, _))| *of == request);
        let jobs: Vec<(JobId, usize)> = jobs.map(|(id, (_, tier))| (*id, *tier)).collect();
        for (id, tier) in jobs {
            self.jobs.remove(&id);
            self.tiers[tier].cancel(id);
        }
    }

    /// Takes an answer to a lookup in. Returns what is to be said of its request, once that is
    /// known.
    fn answer_lookup(
        &mut self,
        request: RequestId,
        tier: usize,
        outcome: Outcome,
    ) -> Option<Result<StoredTokens, Missed>> {
        let mut lookup = self.lookups.remove(&request)?;
        if let Some(question) = lookup.answer(tier, outcome, &mut self.names)
            && !self.ask(request, tier, &question, lookup.deadline)
        {
            lookup.give_up(tier);
        }
        let Some(result) = lookup.result() else {
            self.lookups.insert(request, lookup);
            return None;
        };
        self.forget(request);
        Some(self.choose(request, &lookup, result))
    }

    /// The policy that says if what was found is fetched.
    fn choose(
        &mut self,
        request: RequestId,
        lookup: &Lookup,
        result: LookupResult,
    ) -> Result<StoredTokens, Missed> {
        let nothing = if result.is_down {
            Missed::TierDown
        } else {
            Missed::TierMiss
        };
        let Some((tier, mut pieces)) = result.found else {
            return Err(nothing);
        };
        let n_tokens = end(&pieces);
        if n_tokens < lookup.n_held + MIN_FETCHED {
            return Err(nothing);
        }
        // What the memory has of a group is not enough for it.
        pieces.retain(|piece| piece.end > lookup.n_held);
        let first = pieces.first().map_or(0, |piece| piece.first);
        let n_new = (n_tokens - lookup.n_held) as u64;
        let n_fetched = (n_tokens - first) as u64;
        let time = match (self.fetching, self.compute_per_token) {
            (FetchPolicy::WhereFaster, Some(compute_per_token)) => {
                let estimate = FetchEstimate {
                    n_tokens: n_new,
                    n_bytes: n_fetched * self.token_bytes,
                    rates: self.tiers[tier].rates(),
                    restore_per_token: self.restore_per_token * n_fetched as f64 / n_new as f64,
                    compute_per_token,
                };
                match estimate.choose() {
                    FetchChoice::Fetch { deadline, .. } => deadline,
                    FetchChoice::Compute { needed, would_take } => {
                        return Err(Missed::TierSlow {
                            needed: micros(needed),
                            would_take: micros(would_take),
                        });
                    }
                }
            }
            _ => FETCH_TIME,
        };
        self.wanted
            .insert(request, WantedPrefix { tier, pieces, time });
        Ok(StoredTokens {
            first,
            n_tokens,
            cuts: lookup.cuts,
        })
    }

    /// Begins to fetch what was chosen. Returns whether an answer will come.
    fn fetch(&mut self, request: RequestId) -> bool {
        let Some(wanted) = self.wanted.get(&request) else {
            return false;
        };
        let (tier, names) = (wanted.tier, names_of(&wanted.pieces));
        let deadline = Instant::now() + wanted.time;
        let id = self.new_job(request, tier);
        let job = Job::Get {
            id,
            names,
            deadline,
        };
        let taken = self.tiers[tier].submit(job).is_ok();
        if !taken {
            self.jobs.remove(&id);
        }
        taken
    }

    /// Takes in what was fetched.
    fn take_fetched(
        &mut self,
        request: RequestId,
        outcome: Outcome,
    ) -> Result<StoredTokens, Missed> {
        let wanted = self.wanted.remove(&request).ok_or(Missed::TierMiss)?;
        let Outcome::Got { groups, .. } = outcome else {
            return Err(Missed::TierDown);
        };
        let pieces = wanted.pieces.into_iter().zip(groups).collect();
        let fetched = FetchedPrefix { pieces };
        let (first, n_tokens) = fetched.range().ok_or(Missed::TierMiss)?;
        self.fetched.insert(request, fetched);
        Ok(StoredTokens {
            first,
            n_tokens,
            cuts: self.cuts,
        })
    }
}

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// Looks the prompt of a request up that comes now. Returns whether it waits for the answer.
    pub(super) fn look_up(&mut self, request: &Request) -> bool {
        let Some(store) = &mut self.store else {
            return false;
        };
        let PrefixUse::Within(salt) = request.prefix else {
            return false;
        };
        let is_cached = self.scheduler.config().prefix_cache == PrefixCaching::On;
        if !is_cached || request.source != SourceUse::None {
            return false;
        }
        let most = request.prompt.len().saturating_sub(1);
        let tokens = &request.prompt[..most];
        let (memory, prefix) = (self.engine.memory(), request.prefix);
        let n_held = self.scheduler.n_held(memory, prefix, tokens);
        store.look_up(request.id, salt, tokens, n_held)
    }

    /// Takes the answers of the tiers in.
    pub(super) fn watch_store(&mut self) {
        while let Some((request, tier, outcome)) =
            self.store.as_mut().and_then(SessionStore::next_outcome)
        {
            self.take_outcome_of_tier(request, tier, outcome);
        }
        if let Some(store) = &mut self.store {
            store.answer_awaited();
        }
    }

    fn take_outcome_of_tier(&mut self, request: RequestId, tier: usize, outcome: Outcome) {
        let Some(store) = &mut self.store else {
            return;
        };
        if store.lookups.contains_key(&request) {
            if let Some(result) = store.answer_lookup(request, tier, outcome) {
                self.handle(Event::Probed { request, result });
            }
        } else {
            let result = store.take_fetched(request, outcome);
            self.handle(Event::Fetched { request, result });
        }
    }

    /// Begins to fetch what was found of a request.
    pub(super) fn fetch(&mut self, request: RequestId) {
        let begun = self
            .store
            .as_mut()
            .is_some_and(|store| store.fetch(request));
        if !begun {
            let result = Err(Missed::TierDown);
            self.handle(Event::Fetched { request, result });
        }
    }

    /// Nothing of a store is needed for a request any more.
    pub(super) fn forget_stored(&mut self, request: RequestId) {
        if let Some(store) = &mut self.store {
            store.forget(request);
        }
    }

    /// Does something for the store while there is nothing else to do. Returns whether there is
    /// more of that.
    pub(super) fn serve_store(&mut self) -> bool {
        if self.store.as_ref().is_some_and(SessionStore::wait) {
            return true;
        }
        (self.texts.is_empty() && self.publish(Eagerness::All)) || self.publish_awaited()
    }
}
