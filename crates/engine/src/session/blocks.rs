//! [`BlockEvent`]: which blocks of tokens a service holds, for a router that sends each request
//! where most of its prompt is.
//!
//! A block is so many tokens and all before them; its hash, which the observer computes, stands for
//! both and for the salt that may share them. With sliding windows and recurrent states a prompt
//! can begin at kept points alone, so that less than its blocks may be reused. Invariant: what was
//! stored and not removed is exactly the set of whole blocks that cached prefixes and running
//! requests hold, each once, and a block is stored after the one before it. Decides nothing, and
//! knows no wire.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::num::NonZeroU32;

use cellar_scheduler::{PrefixUse, RequestId, Salt, Scheduler};
use kv_core::{SeqId, TokenId};

/// The name of a block: the same for the same tokens with the same tokens before them, within one
/// salt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub [u8; 32]);

/// What a block is called by.
#[derive(Clone, Copy, Debug)]
pub struct Block<'t> {
    /// Who shares it.
    pub salt: Salt,
    /// The block before it; `None` where it is the first of its sequence.
    pub parent: Option<BlockHash>,
    /// Its own tokens.
    pub tokens: &'t [TokenId],
}

/// Something happened to blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockEvent {
    /// There are none: the first event of a service.
    Cleared,
    /// Blocks came, one after the other.
    Stored {
        /// Their names.
        hashes: Vec<BlockHash>,
        /// The block before the first; `None` where it is the first of its sequence.
        parent: Option<BlockHash>,
        /// Who shares them.
        salt: Salt,
        /// Their tokens, `[hashes * block_size]`.
        tokens: Vec<TokenId>,
    },
    /// Blocks are not there any more.
    Removed {
        /// Their names.
        hashes: Vec<BlockHash>,
    },
}

/// Takes events of blocks, for a router.
pub struct BlockObserver {
    /// Tokens of a block.
    pub block_size: NonZeroU32,
    /// Names a block, on the service's thread: other names for other tokens, parents or salts.
    pub hash: Box<dyn Fn(Block<'_>) -> BlockHash + Send>,
    /// Takes events on the service's thread, in their order, several where they belong to one step.
    /// It must not wait.
    pub on_events: Box<dyn FnMut(Vec<BlockEvent>) + Send>,
}

impl fmt::Debug for BlockObserver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockObserver")
            .field("block_size", &self.block_size)
            .finish_non_exhaustive()
    }
}

/// A sequence, as its blocks are counted.
#[derive(Clone, Copy, Debug)]
struct Held<'t> {
    seq: SeqId,
    /// Whose tokens they are: a request's tokens only become more.
    request: RequestId,
    salt: Salt,
    tokens: &'t [TokenId],
}

/// The blocks of a sequence.
#[derive(Debug)]
struct Holder {
    request: RequestId,
    hashes: Vec<BlockHash>,
}

/// What the service holds, in blocks.
#[derive(Debug)]
pub(crate) struct BlockTable {
    observer: BlockObserver,
    holders: BTreeMap<SeqId, Holder>,
    /// Sequences that hold a block.
    n_holders: HashMap<BlockHash, u32>,
}

impl BlockTable {
    /// Without blocks, of which the observer gets an event.
    pub(crate) fn new(mut observer: BlockObserver) -> Self {
        (observer.on_events)(vec![BlockEvent::Cleared]);
        Self {
            observer,
            holders: BTreeMap::new(),
            n_holders: HashMap::new(),
        }
    }

    /// Hands over what has changed since the call before.
    pub(crate) fn update(&mut self, scheduler: &Scheduler) {
        let running = scheduler.running().filter_map(|text| match text.prefix {
            PrefixUse::Off => None,
            PrefixUse::Within(salt) => Some(Held {
                seq: text.seq,
                request: text.id,
                salt,
                tokens: text.tokens.get(..text.n_done)?,
            }),
        });
        let cached = scheduler.cached().map(|prefix| Held {
            seq: prefix.seq,
            request: prefix.request,
            salt: prefix.salt,
            tokens: prefix.tokens,
        });
        let events = self.changes(running.chain(cached));
        if !events.is_empty() {
            (self.observer.on_events)(events);
        }
    }

    /// Counts what sequences hold now, and what they held before no more.
    fn changes<'t>(&mut self, held: impl Iterator<Item = Held<'t>>) -> Vec<BlockEvent> {
        let mut before = std::mem::take(&mut self.holders);
        let (mut events, mut let_go) = (Vec::new(), Vec::new());
        for held in held {
            let n_blocks = held.tokens.len() / self.block_size();
            let known = before.remove(&held.seq);
            let mut hashes = match known {
                Some(known) if known.request == held.request => known.hashes,
                Some(known) => {
                    let_go.extend(known.hashes);
                    Vec::new()
                }
                None => Vec::new(),
            };
            let_go.extend(hashes.drain(n_blocks.min(hashes.len())..));
            self.extend(&mut hashes, held, &mut events);
            let request = held.request;
            self.holders.insert(held.seq, Holder { request, hashes });
        }
        let_go.extend(before.into_values().flat_map(|holder| holder.hashes));
        let_go.retain(|&hash| self.is_last_holder(hash));
        if !let_go.is_empty() {
            events.push(BlockEvent::Removed { hashes: let_go });
        }
        events
    }

    fn block_size(&self) -> usize {
        self.observer.block_size.get() as usize
    }

    /// Adds the blocks of a sequence that it did not have before.
    fn extend(
        &mut self,
        hashes: &mut Vec<BlockHash>,
        held: Held<'_>,
        events: &mut Vec<BlockEvent>,
    ) {
        let n_known = hashes.len();
        let new = held
            .tokens
            .chunks_exact(self.block_size())
            .skip(n_known)
            .enumerate();
        let mut first_stored = None;
        for (at, block) in new {
            let hash = (self.observer.hash)(Block {
                salt: held.salt,
                parent: hashes.last().copied(),
                tokens: block,
            });
            let n_holders = self.n_holders.entry(hash).or_default();
            *n_holders += 1;
            // Who holds a block holds all before it, so those that are new are the last ones.
            if *n_holders == 1 && first_stored.is_none() {
                first_stored = Some(n_known + at);
            }
            hashes.push(hash);
        }
        if let Some(first) = first_stored {
            let tokens = first * self.block_size()..hashes.len() * self.block_size();
            events.push(BlockEvent::Stored {
                hashes: hashes[first..].to_vec(),
                parent: first.checked_sub(1).map(|before| hashes[before]),
                salt: held.salt,
                tokens: held.tokens[tokens].to_vec(),
            });
        }
    }

    /// Whether nothing holds a block any more, once one sequence has let it go.
    fn is_last_holder(&mut self, hash: BlockHash) -> bool {
        let Some(n_holders) = self.n_holders.get_mut(&hash) else {
            return false;
        };
        *n_holders -= 1;
        let is_last = *n_holders == 0;
        if is_last {
            self.n_holders.remove(&hash);
        }
        is_last
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails
mod tests {
    use std::collections::BTreeSet;
    use std::hash::{DefaultHasher, Hash, Hasher};

    use kv_contract::Random;

    use super::*;

    fn hash(block: Block<'_>) -> BlockHash {
        let mut hasher = DefaultHasher::new();
        (block.salt.0, block.parent, block.tokens).hash(&mut hasher);
        let mut hash = [0; 32];
        hash[..8].copy_from_slice(&hasher.finish().to_be_bytes());
        BlockHash(hash)
    }

    fn table() -> BlockTable {
        BlockTable::new(BlockObserver {
            block_size: NonZeroU32::new(4).unwrap(),
            hash: Box::new(hash),
            on_events: Box::new(|_| {}),
        })
    }

    fn held(seq: u32, request: u64, tokens: &[TokenId]) -> Held<'_> {
        Held {
            seq: SeqId(seq),
            request: RequestId(request),
            salt: Salt(0),
            tokens,
        }
    }

    fn tokens(ids: std::ops::Range<u32>) -> Vec<TokenId> {
        ids.map(TokenId).collect()
    }

    #[test]
    fn a_block_is_stored_once_and_removed_with_its_last_holder() {
        let mut table = table();
        let (long, short) = (tokens(0..11), tokens(0..9));
        let events = table.changes([held(0, 0, &long)].into_iter());
        let [
            BlockEvent::Stored {
                hashes,
                parent: None,
                tokens: stored,
                ..
            },
        ] = &events[..]
        else {
            panic!("{events:?}");
        };
        assert_eq!((hashes.len(), &stored[..]), (2, &long[..8]));
        // Another one with the same blocks, and a longer one.
        let more = tokens(0..12);
        let both = [held(0, 0, &more), held(1, 1, &short)];
        let events = table.changes(both.into_iter());
        let [
            BlockEvent::Stored {
                hashes: third,
                parent,
                ..
            },
        ] = &events[..]
        else {
            panic!("{events:?}");
        };
        assert_eq!((third.len(), *parent), (1, Some(hashes[1])));
        // The first one goes: the second still holds what they share.
        let events = table.changes([held(1, 1, &short)].into_iter());
        let removed = third.clone();
        assert_eq!(events, [BlockEvent::Removed { hashes: removed }]);
        let events = table.changes([].into_iter());
        let hashes = hashes.clone();
        assert_eq!(events, [BlockEvent::Removed { hashes }]);
    }

    #[test]
    fn salts_share_no_names() {
        let (mut table, text) = (table(), tokens(0..4));
        let other = Held {
            salt: Salt(1),
            ..held(1, 1, &text)
        };
        let events = table.changes([held(0, 0, &text), other].into_iter());
        assert_eq!(events.len(), 2, "{events:?}");
    }

    /// Events lead from nothing to what sequences hold, whatever they did before.
    #[test]
    fn events_add_up_to_what_is_held() {
        let mut random = Random::new(7);
        let mut table = table();
        let mut known = BTreeSet::new();
        let mut sequences: BTreeMap<u32, (u64, Vec<TokenId>)> = BTreeMap::new();
        for request in 0..3000 {
            let seq = random.below(6) as u32;
            match (random.below(4), sequences.get_mut(&seq)) {
                (0, _) => {
                    sequences.remove(&seq);
                }
                (1, Some((_, tokens))) => tokens.truncate(random.below(tokens.len() + 1)),
                (2, Some((_, tokens))) => {
                    // As a request goes on: its tokens are determined by those before it.
                    let next = tokens.len() as u32 / 20;
                    tokens.extend(std::iter::repeat_n(TokenId(next), 1 + random.below(9)));
                }
                _ => {
                    let n = random.below(40);
                    let tokens = (0..n).map(|at| TokenId((at / 10 * random.below(2)) as u32));
                    sequences.insert(seq, (request, tokens.collect()));
                }
            }
            let now = sequences
                .iter()
                .map(|(&seq, (request, tokens))| held(seq, *request, tokens));
            for event in table.changes(now) {
                match event {
                    BlockEvent::Cleared => panic!("it is the first alone"),
                    BlockEvent::Stored { hashes, parent, .. } => {
                        assert!(parent.is_none_or(|parent| known.contains(&parent)));
                        for hash in hashes {
                            assert!(known.insert(hash), "stored twice");
                        }
                    }
                    BlockEvent::Removed { hashes } => {
                        for hash in hashes {
                            assert!(known.remove(&hash), "removed, but not stored");
                        }
                    }
                }
            }
            let mut expected = BTreeSet::new();
            for (_, tokens) in sequences.values() {
                let mut parent = None;
                for tokens in tokens.chunks_exact(4) {
                    let salt = Salt(0);
                    let hash = hash(Block {
                        salt,
                        parent,
                        tokens,
                    });
                    expected.insert(hash);
                    parent = Some(hash);
                }
            }
            assert_eq!(known, expected, "request {request}");
        }
    }
}
