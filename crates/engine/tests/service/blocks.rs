//! The events of blocks add up to what a service holds.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex};

use cellar_engine::EngineConfig;
use cellar_engine::serve::{
    Block, BlockEvent, BlockHash, BlockObserver, Service, ServiceConfig, ServiceExtras,
};
use kv_core::TokenId;

use crate::service::models::{Case, stories, tiny};

/// Blocks that are there, with the block before each and its tokens.
#[derive(Debug, Default)]
struct Blocks {
    held: BTreeMap<BlockHash, (Option<BlockHash>, Vec<TokenId>)>,
    n_stored: usize,
}

const BLOCK_SIZE: usize = 8;

impl Blocks {
    fn take(&mut self, events: Vec<BlockEvent>) {
        for event in events {
            match event {
                BlockEvent::Stored {
                    hashes,
                    parent,
                    tokens,
                    ..
                } => {
                    assert_eq!(tokens.len(), hashes.len() * BLOCK_SIZE);
                    let mut parent = parent;
                    for (&hash, tokens) in hashes.iter().zip(tokens.chunks(BLOCK_SIZE)) {
                        assert!(parent.is_none_or(|parent| self.held.contains_key(&parent)));
                        let new = self.held.insert(hash, (parent, tokens.to_vec()));
                        assert!(new.is_none(), "stored twice");
                        parent = Some(hash);
                        self.n_stored += 1;
                    }
                }
                BlockEvent::Cleared => self.held.clear(),
                BlockEvent::Removed { hashes } => {
                    for hash in hashes {
                        assert!(self.held.remove(&hash).is_some(), "was not stored");
                    }
                }
            }
        }
    }

    /// Tokens from the beginning that are held in blocks.
    fn n_held(&self, tokens: &[TokenId]) -> usize {
        let (mut parent, mut n) = (None, 0);
        for block in tokens.chunks_exact(BLOCK_SIZE) {
            let found = self
                .held
                .iter()
                .find(|(_, held)| held.0 == parent && held.1 == block);
            let Some((&hash, _)) = found else {
                break;
            };
            parent = Some(hash);
            n += BLOCK_SIZE;
        }
        n
    }
}

fn hash(block: Block<'_>) -> BlockHash {
    let mut hasher = DefaultHasher::new();
    (block.salt.0, block.parent, block.tokens).hash(&mut hasher);
    let mut hash = [0; 32];
    hash[..8].copy_from_slice(&hasher.finish().to_be_bytes());
    BlockHash(hash)
}

fn start(case: &Case, n_ctx: u32) -> (Service<kv_cpu::CpuBackend>, Arc<Mutex<Blocks>>) {
    let engine = case.engine_with(&EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: 12,
        n_active: Some(4),
        n_ubatch: 32,
        ..EngineConfig::default()
    });
    let blocks = Arc::<Mutex<Blocks>>::default();
    let extras = ServiceExtras {
        blocks: Some(BlockObserver {
            block_size: NonZeroU32::new(BLOCK_SIZE as u32).unwrap(),
            hash: Box::new(hash),
            on_events: {
                let blocks = Arc::clone(&blocks);
                Box::new(move |events| blocks.lock().unwrap().take(events))
            },
        }),
        ..ServiceExtras::default()
    };
    let config = ServiceConfig::default();
    let service = Service::start_with(engine, &case.tokenizer, &config, extras);
    (service.unwrap(), blocks)
}

#[test]
fn stored_blocks_are_those_that_are_held() {
    let case = stories("stories-llama");
    let (service, blocks) = start(&case, 2000);
    let texts: [Vec<TokenId>; 4] = case.converse(&service, 12);
    {
        // Nothing was evicted: all of each is there, up to its last token and what is no whole
        // block.
        let blocks = blocks.lock().unwrap();
        for tokens in &texts {
            let n_whole = (tokens.len() - 1) / BLOCK_SIZE * BLOCK_SIZE;
            assert_eq!(blocks.n_held(tokens), n_whole);
        }
        assert_eq!(blocks.n_stored, blocks.held.len(), "some were removed");
    }
    drop(service);
    assert!(blocks.lock().unwrap().held.is_empty());
}

#[test]
fn evicted_blocks_are_removed() {
    for case in [
        stories("stories-llama"),
        stories("stories-mamba"),
        tiny("falcon_h1"),
    ] {
        let name = case.name;
        let (service, blocks) = start(&case, 160);
        let texts: [Vec<TokenId>; 4] = case.converse(&service, 12);
        {
            let blocks = blocks.lock().unwrap();
            assert!(blocks.n_stored > blocks.held.len(), "{name}");
            let kept = texts.iter().filter(|tokens| blocks.n_held(tokens) > 0);
            assert!(kept.count() > 0, "{name}");
        }
        drop(service);
        assert!(blocks.lock().unwrap().held.is_empty(), "{name}");
    }
}
