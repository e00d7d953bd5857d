//! [`Publisher`]: which cached prefixes go to the tiers, and when.
//!
//! At once goes what was used again or is long, and what is evicted; the rest when there is nothing
//! else to do, and at the end. Between two steps one group is read, and handed to the tiers; they
//! write it on threads of their own. Invariant: what is published of a sequence is what it holds
//! now. Knows no files.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use cellar_prefix_store::{GROUP_TOKENS, GroupKind, GroupName, Job, Tier};
use cellar_scheduler::{EvictedPrefix, Note, PrefixUse, RequestId, Salt, StoredCuts, n_common};
use kv_backend::Backend;
use kv_backend::state::SeqTokens;
use kv_core::memory::{Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId, TokenId};

use super::SessionStore;
use super::names::Piece;
use crate::error::EngineError;
use crate::session::Session;
use crate::session::prefixes::PrefixCounts;
use crate::state::SaveOptions;

/// A prefix of so many tokens is published as soon as it is cached.
const LONG: usize = 1024;

/// Names of groups that are known to be stored.
const MAX_KNOWN: usize = 1 << 16;

/// The time that the end of a session waits for its tiers.
const LAST_WRITES: Duration = Duration::from_secs(20);

/// The time that it waits at once for a tier with much to write.
const PAUSE: Duration = Duration::from_millis(5);

/// The longest time that somebody waits for a prompt to be stored.
const PROMPT_TIME: Duration = Duration::from_secs(10);

/// A group that is published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::session) enum Eagerness {
    /// The publications that are due.
    Due,
    /// Everything.
    All,
}

/// The cached prefixes on their way to the tiers.
#[derive(Debug, Default)]
pub(super) struct Publisher {
    due: VecDeque<SeqId>,
    /// Those that nothing is known of but that they are cached.
    later: BTreeSet<SeqId>,
    current: Option<Publication>,
    known: HashSet<GroupName>,
    awaited: Vec<AwaitedPrompt>,
}

/// A prompt that somebody waits for until it is stored.
#[derive(Debug)]
struct AwaitedPrompt {
    pieces: Vec<Piece>,
    until: Instant,
    /// Gets the number of its first tokens that are stored.
    done: SyncSender<Option<usize>>,
}

/// A cached prefix that is being published.
#[derive(Debug)]
struct Publication {
    seq: SeqId,
    request: RequestId,
    pieces: VecDeque<Piece>,
}

/// The result of handing a group over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handover {
    /// All tiers that work have it.
    Over,
    /// A tier has too much to write.
    Busy,
}

impl Publisher {
    /// Takes a note in of what became of cached prefixes.
    pub(in crate::session) fn notice(&mut self, note: &Note) {
        match *note {
            Note::Cached { seq, n_tokens, .. } if n_tokens >= LONG => self.due.push_back(seq),
            Note::Cached { seq, .. } => {
                self.later.insert(seq);
            }
            Note::Shared { from, .. } if self.later.remove(&from) => self.due.push_back(from),
            Note::Dropped { seq, .. } => {
                self.later.remove(&seq);
            }
            _ => {}
        }
    }

    fn next(&mut self, eagerness: Eagerness) -> Option<SeqId> {
        let due = self.due.pop_front();
        due.or_else(|| match eagerness {
            Eagerness::Due => None,
            Eagerness::All => self.later.pop_first(),
        })
    }

    fn know(&mut self, name: GroupName) {
        if self.known.len() >= MAX_KNOWN {
            self.known.clear();
        }
        self.known.insert(name);
    }
}

impl SessionStore {
    /// Takes a note in of what became of cached prefixes.
    pub(in crate::session) fn notice(&mut self, note: &Note) {
        self.publisher.notice(note);
    }

    /// The groups of these tokens that are not known to be stored.
    fn new_pieces(&mut self, salt: Salt, tokens: &[TokenId], n_prompt: usize) -> VecDeque<Piece> {
        let pieces = self.pieces_of(salt, tokens, n_prompt);
        let known = &self.publisher.known;
        let new = pieces
            .into_iter()
            .filter(|piece| !known.contains(&piece.name));
        new.collect()
    }

    /// Hands a group to all tiers.
    fn hand_over(&mut self, name: GroupName, payload: &Arc<[u8]>) -> Handover {
        let (mut handed, mut is_stored) = (Handover::Over, true);
        for tier in &self.tiers {
            let payload = Arc::clone(payload);
            if tier.submit(Job::Put { name, payload }).is_err() {
                is_stored = false;
                // One that is down gets it when it is published again.
                if !tier.is_down() {
                    handed = Handover::Busy;
                }
            }
        }
        if is_stored {
            self.publisher.know(name);
        }
        handed
    }

    /// The groups of these tokens. Somebody who asks the same again computes at least the prompt's
    /// last token: a whole group that ends with it or behind it is of no use to them, and the
    /// prompt's small groups are there, too.
    fn pieces_of(&mut self, salt: Salt, tokens: &[TokenId], n_prompt: usize) -> Vec<Piece> {
        match self.cuts {
            StoredCuts::Groups => {
                let mut pieces = self.names.ranges(salt, tokens);
                let n_whole = n_prompt.saturating_sub(1) / GROUP_TOKENS;
                if n_whole < tokens.len() / GROUP_TOKENS {
                    let prompt = tokens.get(..n_prompt).unwrap_or(tokens);
                    pieces.extend(self.names.tail(salt, prompt, n_whole));
                }
                pieces
            }
            StoredCuts::Nowhere => self.names.end(salt, tokens).to_vec(),
        }
    }

    /// Tells those who wait for prompts that are stored, or that are not in time.
    pub(super) fn answer_awaited(&mut self) {
        let now = Instant::now();
        let are_down = self.tiers.iter().all(Tier::is_down);
        for prompt in std::mem::take(&mut self.publisher.awaited) {
            let is_stored = |piece: &&Piece| {
                let is_known = self.publisher.known.contains(&piece.name);
                let mut tiers = self.tiers.iter().filter(|tier| !tier.is_down());
                is_known && tiers.all(|tier| tier.has_written(&[piece.name]))
            };
            let stored = prompt.pieces.iter().take_while(is_stored);
            let (n_stored, n_tokens) =
                stored.fold((0, 0), |(n, end), piece| (n + 1, piece.end.max(end)));
            if n_stored == prompt.pieces.len() || are_down || now >= prompt.until {
                let _gone = prompt.done.send(Some(n_tokens)); // who asked may have gone
            } else {
                self.publisher.awaited.push(prompt);
            }
        }
    }

    /// Waits until the tiers have written what they have, at most until then.
    fn flush(&self, until: Instant) {
        let tiers = self.tiers.iter().filter(|tier| !tier.is_down());
        for tier in tiers {
            let _written = tier.flush(until.saturating_duration_since(Instant::now()));
        }
    }
}

impl<B: Backend, M: Memory + Clone> Session<B, M> {
    /// Publishes a group of a cached prefix, where there is one. Returns whether there may be more.
    pub(in crate::session) fn publish(&mut self, eagerness: Eagerness) -> bool {
        let Some(store) = &mut self.store else {
            return false;
        };
        let publication = match store.publisher.current.take() {
            Some(current) => current,
            None => {
                let Some(seq) = store.publisher.next(eagerness) else {
                    return false;
                };
                let Some(line) = self.scheduler.cached_in(seq) else {
                    return true;
                };
                Publication {
                    seq,
                    request: line.request,
                    pieces: store.new_pieces(line.salt, line.tokens, line.n_prompt),
                }
            }
        };
        let Publication {
            seq,
            request,
            mut pieces,
        } = publication;
        let Some(piece) = pieces.pop_front() else {
            return true;
        };
        let line = self.scheduler.cached_in(seq);
        let is_there = |line: &cellar_scheduler::CachedPrefix<'_>| {
            let is_whole = piece.kind != GroupKind::End || piece.end == line.tokens.len();
            line.request == request && line.tokens.len() >= piece.end && is_whole
        };
        let Some(tokens) = line.filter(is_there).map(|line| line.tokens.to_vec()) else {
            return true;
        };
        match self.publish_piece(seq, &tokens, piece) {
            Ok(Handover::Over) => {}
            Ok(Handover::Busy) => {
                pieces.push_front(piece);
                if eagerness == Eagerness::All {
                    self.flush_store(Instant::now() + PAUSE);
                }
            }
            Err(error) => {
                tracing::warn!(%error, "a cached prefix cannot be read, and is not stored");
                return true;
            }
        }
        if let Some(store) = &mut self.store {
            store.publisher.current = Some(Publication {
                seq,
                request,
                pieces,
            });
        }
        true
    }

    /// Publishes what is cached of a prompt before all else. `done` gets the number of its first
    /// tokens that are stored, once they are, or after a while; `None` where there is no store.
    pub(crate) fn store_prompt(
        &mut self,
        prefix: PrefixUse,
        prompt: &[TokenId],
        done: SyncSender<Option<usize>>,
    ) {
        let Some(store) = &mut self.store else {
            let _gone = done.send(None); // who asked may have gone
            return;
        };
        let lines = self.scheduler.cached();
        let common = lines
            .filter(|line| prefix == PrefixUse::Within(line.salt))
            .map(|line| (n_common(line.tokens, prompt), line));
        // A prefix that can only be continued at its end has to be one of the prompt's.
        let cuts = store.cuts;
        let usable =
            common.filter(|(n, line)| cuts == StoredCuts::Groups || *n == line.tokens.len());
        let Some((n, line)) = usable.max_by_key(|(n, line)| (*n, line.seq)) else {
            let _gone = done.send(Some(0)); // who asked may have gone
            return;
        };
        let mut pieces = store.pieces_of(line.salt, line.tokens, line.n_prompt);
        pieces.retain(|piece| piece.end <= n);
        store.publisher.due.push_front(line.seq);
        store.publisher.awaited.push(AwaitedPrompt {
            pieces,
            until: Instant::now() + PROMPT_TIME,
            done,
        });
    }

    /// Publishes what somebody waits for while there is nothing else to do. Returns whether
    /// somebody does.
    pub(super) fn publish_awaited(&mut self) -> bool {
        let store = self.store.as_ref();
        if store.is_none_or(|store| store.publisher.awaited.is_empty()) {
            return false;
        }
        if !self.publish(Eagerness::Due) {
            self.flush_store(Instant::now() + PAUSE);
        }
        true
    }

    /// Reads a group, and hands it to the tiers.
    fn publish_piece(
        &mut self,
        seq: SeqId,
        tokens: &[TokenId],
        piece: Piece,
    ) -> Result<Handover, EngineError> {
        let mut payload = Vec::new();
        let of_piece = [SeqTokens {
            seq,
            evaluated: tokens
                .get(piece.first..piece.end)
                .unwrap_or_default()
                .to_vec(),
            pending: Vec::new(),
        }];
        let options = SaveOptions {
            seqs: Seqs::One(seq),
            tokens: &of_piece,
            kv_type: None,
            state_type: None,
        };
        self.engine.complete_rows()?;
        match piece.kind {
            GroupKind::Rows => {
                let pos = |n: usize| Pos(u32::try_from(n).unwrap_or(u32::MAX));
                let range = PosRange::from(pos(piece.first)..pos(piece.end));
                self.engine.save_range(&options, range, &mut payload)?;
            }
            GroupKind::End => {
                self.engine.save_state(&options, &mut payload)?;
            }
            GroupKind::Mark => {}
        }
        let payload: Arc<[u8]> = payload.into();
        let store = self.store.as_mut();
        Ok(store.map_or(Handover::Over, |store| {
            store.hand_over(piece.name, &payload)
        }))
    }

    /// Publishes what is evicted, before its tokens are removed.
    pub(in crate::session) fn publish_evicted(&mut self) {
        for evicted in self.scheduler.take_evicted() {
            let EvictedPrefix {
                seq,
                tokens,
                n_prompt,
                salt,
            } = evicted;
            let Some(store) = &mut self.store else {
                return;
            };
            if self.engine.memory().next_pos(seq).as_usize() != tokens.len() {
                continue;
            }
            for piece in store.new_pieces(salt, &tokens, n_prompt) {
                match self.publish_piece(seq, &tokens, piece) {
                    Ok(Handover::Over) => {}
                    // What the tiers have no time for is computed again.
                    Ok(Handover::Busy) => break,
                    Err(error) => {
                        tracing::warn!(%error, "an evicted prefix cannot be read");
                        break;
                    }
                }
            }
        }
    }

    /// Ends all requests, and publishes all that is cached. Returns once it is stored, or after a
    /// while.
    pub(crate) fn publish_all(&mut self) -> PrefixCounts {
        if self.store.is_none() || self.intake.has_lost_device() {
            return PrefixCounts::default();
        }
        self.pause_all();
        self.finish_edits();
        self.record_notes();
        let mut cached: Vec<_> = self.scheduler.cached().collect();
        cached.sort_by_key(|line| (line.last_used, line.seq));
        let all: VecDeque<SeqId> = cached.iter().map(|line| line.seq).collect();
        let mut counts = PrefixCounts {
            n_prefixes: all.len(),
            n_tokens: cached.iter().map(|line| line.tokens.len()).sum(),
            n_left_out: 0,
            n_lost: 0,
        };
        let n_before = self.n_lost();
        if let Some(store) = &mut self.store {
            // The last one that is written stays longest.
            store.publisher.due = all;
            store.publisher.later.clear();
        }
        let until = Instant::now() + LAST_WRITES;
        while self.publish(Eagerness::All) {
            if Instant::now() >= until {
                let left = self.store.as_ref();
                let left = left.map_or(0, |store| store.publisher.due.len() + 1);
                counts.n_left_out = left;
                counts.n_prefixes = counts.n_prefixes.saturating_sub(left);
                break;
            }
        }
        self.flush_store(until);
        counts.n_lost = self.n_lost().saturating_sub(n_before);
        counts
    }

    /// Groups that the tiers could not keep.
    fn n_lost(&self) -> u64 {
        let tiers = self.store.iter().flat_map(|store| &store.tiers);
        tiers.map(|tier| tier.counts().n_lost).sum()
    }

    fn flush_store(&self, until: Instant) {
        if let Some(store) = &self.store {
            store.flush(until);
        }
    }
}
