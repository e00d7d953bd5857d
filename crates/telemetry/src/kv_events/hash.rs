//! [`BlockHasher`]: the names of blocks as vLLM computes them with `--prefix-caching-hash-algo
//! sha256_cbor`.
//!
//! SHA-256 over `[parent, [token…], extra keys]` in canonical CBOR, where the parent of a first
//! block is the hash of the seed's text. The extra keys are null, or `[salt]` in the first block of
//! a sequence that is salted. Invariant: without keys and `cache_salt`, the hashes are those of
//! vLLM for the same tokens and seed. A salt is written as a number of this server, so that it does
//! not show a client's.

use cellar_engine::serve::{Block, BlockHash, Salt};
use sha2::{Digest, Sha256};

use cellar_server::Tenant;

/// CBOR's major types, and its null.
const UNSIGNED: u8 = 0;
const BYTES: u8 = 2;
const TEXT: u8 = 3;
const ARRAY: u8 = 4;
const NULL: u8 = 0xf6;

/// Names blocks, from one seed on.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockHasher {
    /// The parent of a block that has none: vLLM's `NONE_HASH`.
    none: [u8; 32],
}

impl BlockHasher {
    /// With the seed that vLLM has in its environment variable `PYTHONHASHSEED`.
    pub(super) fn new(seed: &str) -> Self {
        let mut cbor = Cbor::default();
        cbor.text(seed);
        Self { none: cbor.hash() }
    }

    /// The name of a block.
    pub(super) fn hash(&self, block: Block<'_>) -> BlockHash {
        let parent = block.parent.map_or(self.none, |parent| parent.0);
        let mut cbor = Cbor::default();
        cbor.head(ARRAY, 3);
        cbor.head(BYTES, 32);
        cbor.0.extend_from_slice(&parent);
        cbor.head(ARRAY, block.tokens.len() as u64);
        for token in block.tokens {
            cbor.head(UNSIGNED, token.0.into());
        }
        match extra_key(block.salt).filter(|_| block.parent.is_none()) {
            Some(key) => {
                cbor.head(ARRAY, 1);
                cbor.text(&key);
            }
            None => cbor.0.push(NULL),
        }
        BlockHash(cbor.hash())
    }
}

/// The salt of requests without a key and a `cache_salt`.
pub(super) fn unsalted() -> Salt {
    Tenant::default().salt(None)
}

/// The extra key of a sequence's first block; `None` where it is not salted.
pub(super) fn extra_key(salt: Salt) -> Option<String> {
    (salt != unsalted()).then(|| format!("{:016x}", salt.0))
}

/// Canonical CBOR in memory.
#[derive(Default)]
struct Cbor(Vec<u8>);

impl Cbor {
    /// A value of a major type, or the length of what follows, in as few bytes as it fits.
    fn head(&mut self, major: u8, value: u64) {
        let major = major << 5;
        let bytes = value.to_be_bytes();
        match value {
            0..=23 => self.0.push(major | bytes[7]),
            24..=0xff => self.0.extend([major | 24, bytes[7]]),
            0x100..=0xffff => {
                self.0.push(major | 25);
                self.0.extend_from_slice(&bytes[6..]);
            }
            0x1_0000..=0xffff_ffff => {
                self.0.push(major | 26);
                self.0.extend_from_slice(&bytes[4..]);
            }
            _ => {
                self.0.push(major | 27);
                self.0.extend_from_slice(&bytes);
            }
        }
    }

    fn text(&mut self, text: &str) {
        self.head(TEXT, text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
    }

    fn hash(&self) -> [u8; 32] {
        Sha256::digest(&self.0).into()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use kv_core::TokenId;
    use serde::Deserialize;

    use super::*;

    #[derive(Deserialize)]
    struct Case {
        seed: String,
        salt: Option<u64>,
        block_size: usize,
        tokens: Vec<u32>,
        hashes: Vec<String>,
    }

    /// Against Python's cbor2 and hashlib: `tests/corpus/block_hashes.py`.
    #[test]
    fn hashes_are_those_of_vllm() {
        let cases = include_str!("../../tests/corpus/block_hashes.json");
        let cases: Vec<Case> = serde_json::from_str(cases).unwrap();
        assert!(cases.iter().any(|case| case.salt.is_some()));
        for case in cases {
            let hasher = BlockHasher::new(&case.seed);
            let salt = case.salt.map_or_else(unsalted, Salt);
            let tokens: Vec<TokenId> = case.tokens.into_iter().map(TokenId).collect();
            let (mut parent, mut hashes) = (None, Vec::new());
            for tokens in tokens.chunks_exact(case.block_size) {
                let hash = hasher.hash(Block {
                    salt,
                    parent,
                    tokens,
                });
                hashes.push(hash.0.map(|byte| format!("{byte:02x}")).concat());
                parent = Some(hash);
            }
            assert_eq!(hashes, case.hashes, "seed {}", case.seed);
        }
    }
}
