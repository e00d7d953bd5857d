//! KV events over ZeroMQ, as vLLM publishes them: a router subscribes, and learns which blocks of tokens this
//! server has, to send each request where most of its prompt is.
//!
//! A message has three frames: the topic, the number of the batch as eight big-endian bytes, and the batch in
//! MessagePack: `[seconds since 1970, [event…]]`, where an event is a map with the `type` `BlockStored`
//! (`block_hashes`, `parent_block_hash`, `token_ids`, `block_size`, `lora_id`, `medium`, `lora_name`),
//! `BlockRemoved` (`block_hashes`, `medium`) or `AllBlocksCleared` (vLLM's `KVEventBatch` as of 0.29). A router that missed
//! batches sends `["", first number]` to the replay endpoint from a DEALER or REQ socket, and gets `["", number, batch]` for each that is kept, then the number -1 with an empty batch.
//!
//! Invariant: batch 0 says that all blocks are cleared, and the batches after it lead from nothing to what the
//! service holds. Publishing never waits for a subscriber, and not on the service's thread.

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use engine::serve::{BlockEvent, BlockHash, BlockObserver};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

/// Batches that are kept for replays, as vLLM keeps them.
const MAX_KEPT: usize = 10_000;

/// The number that ends a replay: -1.
const END: [u8; 8] = [0xff; 8];

/// Where blocks are: vLLM's word for the memory that requests are computed in, whatever the device.
const MEDIUM: &str = "GPU";

/// Where events are published.
#[derive(Clone, Debug)]
pub struct KvEvents {
    /// Where subscribers connect: `tcp://127.0.0.1:5557`.
    pub endpoint: String,
    /// Where they ask for batches that they missed.
    pub replay: Option<String>,
    /// The first frame of each message.
    pub topic: String,
    /// Tokens of a block.
    pub block_size: NonZeroU32,
}

/// Binds the endpoints and publishes, on a thread of its own, the events that the returned observer gets, for
/// as long as it lives.
///
/// # Errors
/// Where an endpoint is not one, or is taken.
pub fn publish(events: KvEvents) -> io::Result<BlockObserver> {
    let block_size = events.block_size;
    let (send, batches) = unbounded_channel();
    let (is_bound, bound) = std::sync::mpsc::channel();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("cellar-kv-events".to_owned())
        .spawn(move || {
            runtime.block_on(async {
                match Publisher::bind(&events).await {
                    Ok(publisher) => {
                        let _starter_waits = is_bound.send(Ok(()));
                        publisher.run(batches).await;
                    }
                    Err(error) => {
                        let _starter_waits = is_bound.send(Err(error));
                    }
                }
            });
        })?;
    bound
        .recv()
        .unwrap_or_else(|_| Err(io::Error::other("the thread has ended")))?;
    Ok(BlockObserver {
        block_size,
        on_events: Box::new(move |events| {
            // Without a publisher there are no subscribers.
            let _gone = send.send(events);
        }),
    })
}

/// A batch as it is sent.
#[derive(Clone, Debug)]
struct Batch {
    number: u64,
    bytes: Bytes,
}

/// The last batches.
type Kept = Arc<Mutex<VecDeque<Batch>>>;

struct Publisher {
    socket: PubSocket,
    topic: Bytes,
    block_size: NonZeroU32,
    kept: Kept,
    next: u64,
}

impl Publisher {
    async fn bind(events: &KvEvents) -> io::Result<Self> {
        let wrong = |endpoint: &str, error: ZmqError| {
            io::Error::other(format!("the endpoint '{endpoint}': {error}"))
        };
        let mut socket = PubSocket::new();
        let bound = socket.bind(&events.endpoint).await;
        bound.map_err(|error| wrong(&events.endpoint, error))?;
        let kept = Kept::default();
        if let Some(endpoint) = &events.replay {
            let mut socket = RouterSocket::new();
            let bound = socket.bind(endpoint).await;
            bound.map_err(|error| wrong(endpoint, error))?;
            tokio::spawn(replay(socket, Arc::clone(&kept)));
        }
        Ok(Self {
            socket,
            topic: Bytes::from(events.topic.clone()),
            block_size: events.block_size,
            kept,
            next: 0,
        })
    }

    async fn run(mut self, mut batches: UnboundedReceiver<Vec<BlockEvent>>) {
        while let Some(events) = batches.recv().await {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let bytes = encode(now.unwrap_or_default(), &events, self.block_size);
            self.send(bytes).await;
        }
    }

    async fn send(&mut self, bytes: Bytes) {
        let number = self.next;
        self.next += 1;
        {
            let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
            if kept.len() == MAX_KEPT {
                kept.pop_front();
            }
            let bytes = bytes.clone();
            kept.push_back(Batch { number, bytes });
        }
        let mut message = ZmqMessage::from(self.topic.clone());
        message.push_back(number_frame(number));
        message.push_back(bytes);
        // A subscriber that went away is not an error of the others.
        if let Err(error) = self.socket.send(message).await {
            tracing::debug!(%error, "a KV event reached nobody");
        }
    }
}

fn number_frame(number: u64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

/// Answers those who missed batches.
async fn replay(mut socket: RouterSocket, kept: Kept) {
    loop {
        let asked = match socket.recv().await {
            Ok(asked) => asked,
            Err(error) => {
                tracing::debug!(%error, "a replay was asked for in a way that cannot be read");
                tokio::task::yield_now().await;
                continue;
            }
        };
        let frames = asked.into_vec();
        let [client, empty, first] = &frames[..] else {
            tracing::debug!(n_frames = frames.len(), "a replay needs three frames");
            continue;
        };
        let Ok(first) = <[u8; 8]>::try_from(&first[..]) else {
            tracing::debug!(n_bytes = first.len(), "the number of a batch has 8 bytes");
            continue;
        };
        let first = u64::from_be_bytes(first);
        let batches: Vec<Batch> = {
            let kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
            let wanted = kept.iter().filter(|batch| batch.number >= first);
            wanted.cloned().collect()
        };
        let end = (Bytes::from_static(&END), Bytes::new());
        let batches = batches
            .into_iter()
            .map(|batch| (number_frame(batch.number), batch.bytes));
        for (number, bytes) in batches.chain([end]) {
            let mut message = ZmqMessage::from(client.clone());
            for frame in [empty.clone(), number, bytes] {
                message.push_back(frame);
            }
            if let Err(error) = socket.send(message).await {
                tracing::debug!(%error, "who asked for a replay is gone");
                break;
            }
        }
    }
}

/// A batch of events at a time since 1970.
fn encode(time: Duration, events: &[BlockEvent], block_size: NonZeroU32) -> Bytes {
    let mut out = Encoder(Vec::new());
    out.array(2);
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
                tokens,
            } => {
                out.event("BlockStored", 7);
                out.member("block_hashes").hashes(hashes);
                match parent {
                    Some(parent) => out.member("parent_block_hash").uint(parent.0),
                    None => out.member("parent_block_hash").nil(),
                }
                out.member("token_ids").array(tokens.len());
                tokens.iter().for_each(|token| out.uint(token.0.into()));
                out.member("block_size").uint(block_size.get().into());
                // There are no adapters.
                out.member("lora_id").nil();
                out.member("medium").text(MEDIUM);
                out.member("lora_name").nil();
            }
        }
    }
    Bytes::from(out.0)
}

/// MessagePack in memory, where writing cannot fail.
struct Encoder(Vec<u8>);

impl Encoder {
    /// The head of an event with so many members besides its type.
    fn event(&mut self, kind: &str, n_members: u32) {
        let _fits = rmp::encode::write_map_len(&mut self.0, 1 + n_members);
        self.member("type").text(kind);
    }

    /// A member's name; its value comes next.
    fn member(&mut self, name: &str) -> &mut Self {
        self.text(name);
        self
    }

    fn array(&mut self, n: usize) {
        let _fits = rmp::encode::write_array_len(&mut self.0, n as u32);
    }

    fn text(&mut self, text: &str) {
        let _fits = rmp::encode::write_str(&mut self.0, text);
    }

    fn uint(&mut self, value: u64) {
        let _fits = rmp::encode::write_uint(&mut self.0, value);
    }

    fn float(&mut self, value: f64) {
        let _fits = rmp::encode::write_f64(&mut self.0, value);
    }

    fn nil(&mut self) {
        let _fits = rmp::encode::write_nil(&mut self.0);
    }

    fn hashes(&mut self, hashes: &[BlockHash]) {
        self.array(hashes.len());
        hashes.iter().for_each(|hash| self.uint(hash.0));
    }
}

#[cfg(test)]
mod tests {
    use kv_core::TokenId;

    use super::*;

    /// Against the bytes that Python's `msgspec.msgpack` encodes vLLM's structs to.
    #[test]
    fn batches_are_the_bytes_of_msgspec() {
        let stored = BlockEvent::Stored {
            hashes: vec![BlockHash(1), BlockHash(u64::MAX)],
            parent: None,
            tokens: [5, 300, 70_000, 1].map(TokenId).to_vec(),
        };
        let removed = BlockEvent::Removed {
            hashes: vec![BlockHash(200)],
        };
        let two = NonZeroU32::new(2).unwrap_or(NonZeroU32::MIN);
        let events = [BlockEvent::Cleared, stored, removed];
        let hex: String = encode(Duration::from_millis(1500), &events, two)
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(hex, include_str!("../tests/corpus/kv_events.hex").trim());
    }
}
