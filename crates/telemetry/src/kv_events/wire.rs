//! Batches of events as vLLM encodes its `KVEventBatch` (0.29).
//!
//! In MessagePack: `[seconds since 1970, [event…], rank]`, where an event is a map with the `type`
//! `BlockStored` (`block_hashes`, `parent_block_hash`, `token_ids`, `block_size`, `lora_id`,
//! `medium`, `lora_name`, and `extra_keys` where blocks are salted), `BlockRemoved`
//! (`block_hashes`, `medium`) or `AllBlocksCleared`. Knows no socket.

use std::num::NonZeroU32;
use std::time::Duration;

use bytes::Bytes;
use cellar_engine::serve::{BlockEvent, BlockHash};

use super::{HashFormat, hash};

/// Where blocks are: vLLM's word for the memory that requests are computed in, whatever the device.
const MEDIUM: &str = "GPU";

/// What all batches of a publisher have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Form {
    pub(super) block_size: NonZeroU32,
    pub(super) hash_format: HashFormat,
}

/// A batch of events at a time since 1970.
pub(super) fn encode(time: Duration, events: &[BlockEvent], form: Form) -> Bytes {
    let mut out = Encoder {
        out: Vec::new(),
        hash_format: form.hash_format,
    };
    out.array(3);
    out.float(time.as_secs_f64());
    out.array(events.len());
    for event in events {
        match event {
            BlockEvent::Cleared => out.event("AllBlocksCleared", 0),
            BlockEvent::Removed { hashes } => {
                out.event("BlockRemoved", 2);
                out.member("block_hashes").hashes(hashes);
                out.member("medium").text(MEDIUM);
            }
            BlockEvent::Stored {
                hashes,
                parent,
                salt,
                tokens,
            } => {
                let extra_keys = hash::extra_key(*salt);
                out.event("BlockStored", 7 + u32::from(extra_keys.is_some()));
                out.member("block_hashes").hashes(hashes);
                match parent {
                    Some(parent) => out.member("parent_block_hash").hash(parent),
                    None => out.member("parent_block_hash").nil(),
                }
                out.member("token_ids").array(tokens.len());
                tokens.iter().for_each(|token| out.uint(token.0.into()));
                out.member("block_size").uint(form.block_size.get().into());
                // There are no adapters.
                out.member("lora_id").nil();
                out.member("medium").text(MEDIUM);
                out.member("lora_name").nil();
                if let Some(key) = extra_keys {
                    out.member("extra_keys").array(hashes.len());
                    for at in 0..hashes.len() {
                        match (at, parent) {
                            (0, None) => {
                                out.array(1);
                                out.text(&key);
                            }
                            _ => out.nil(),
                        }
                    }
                }
            }
        }
    }
    // There is one rank.
    out.uint(0);
    Bytes::from(out.out)
}

/// MessagePack in memory, where writing cannot fail.
struct Encoder {
    out: Vec<u8>,
    hash_format: HashFormat,
}

impl Encoder {
    /// The head of an event with so many members besides its type.
    fn event(&mut self, kind: &str, n_members: u32) {
        let _fits = rmp::encode::write_map_len(&mut self.out, 1 + n_members);
        self.member("type").text(kind);
    }

    /// A member's name; its value comes next.
    fn member(&mut self, name: &str) -> &mut Self {
        self.text(name);
        self
    }

    fn array(&mut self, n: usize) {
        let _fits = rmp::encode::write_array_len(&mut self.out, n as u32);
    }

    fn text(&mut self, text: &str) {
        let _fits = rmp::encode::write_str(&mut self.out, text);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        let _fits = rmp::encode::write_bin(&mut self.out, bytes);
    }

    fn uint(&mut self, value: u64) {
        let _fits = rmp::encode::write_uint(&mut self.out, value);
    }

    fn float(&mut self, value: f64) {
        let _fits = rmp::encode::write_f64(&mut self.out, value);
    }

    fn nil(&mut self) {
        let _fits = rmp::encode::write_nil(&mut self.out);
    }

    fn hashes(&mut self, hashes: &[BlockHash]) {
        self.array(hashes.len());
        hashes.iter().for_each(|hash| self.hash(hash));
    }

    fn hash(&mut self, BlockHash(bytes): &BlockHash) {
        match self.hash_format {
            HashFormat::Bytes => self.bytes(bytes),
            HashFormat::Int => {
                let low = bytes.iter().skip(bytes.len() - 8);
                self.uint(low.fold(0, |number, &byte| number << 8 | u64::from(byte)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use cellar_engine::serve::Salt;
    use kv_core::TokenId;

    use super::*;

    fn stored(parent: Option<BlockHash>, salt: Salt) -> BlockEvent {
        BlockEvent::Stored {
            hashes: vec![BlockHash([1; 32]), BlockHash([255; 32])],
            parent,
            salt,
            tokens: [5, 300, 70_000, 1].map(TokenId).to_vec(),
        }
    }

    /// Against the bytes that Python's `msgspec.msgpack` encodes vLLM's structs to.
    #[test]
    fn batches_are_the_bytes_of_msgspec() {
        let removed = BlockEvent::Removed {
            hashes: vec![BlockHash([200; 32])],
        };
        let events = [
            BlockEvent::Cleared,
            stored(None, hash::unsalted()),
            stored(Some(BlockHash([7; 32])), hash::unsalted()),
            stored(None, Salt(0xab)),
            stored(Some(BlockHash([7; 32])), Salt(0xab)),
            removed,
        ];
        let expected = include_str!("../../tests/corpus/kv_events.hex").lines();
        let formats = [HashFormat::Bytes, HashFormat::Int];
        let encoded = formats.map(|hash_format| {
            let form = Form {
                block_size: NonZeroU32::new(2).unwrap_or(NonZeroU32::MIN),
                hash_format,
            };
            let bytes = encode(Duration::from_millis(1500), &events, form);
            let digits = bytes.iter().map(|byte| format!("{byte:02x}"));
            digits.collect::<String>()
        });
        assert_eq!(encoded.to_vec(), expected.collect::<Vec<_>>());
    }

    /// vLLM keeps the last 8 bytes, the most significant first.
    #[test]
    fn numbers_are_the_last_64_bits() {
        let mut hash = [0xee; 32];
        hash[24..].copy_from_slice(&[0, 0, 0, 0, 0, 1, 2, 3]);
        let mut out = Encoder {
            out: Vec::new(),
            hash_format: HashFormat::Int,
        };
        out.hash(&BlockHash(hash));
        assert_eq!(out.out, [0xce, 0, 1, 2, 3]);
    }
}
