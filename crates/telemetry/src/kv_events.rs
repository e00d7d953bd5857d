//! KV events over ZeroMQ, as vLLM publishes them: a router subscribes, and learns which blocks of
//! tokens this server has, to send each request where most of its prompt is.
//!
//! A message has three frames: the topic, the number of the batch as eight big-endian bytes, and
//! the batch ([`wire`]). A router that missed batches sends `["", first number]` to the replay
//! endpoint from a DEALER or REQ socket, and gets `["", topic, number, batch]` for each that is
//! kept, then the number -1 with an empty topic and batch.
//!
//! Invariant: batch 0 says that all blocks are cleared, and the batches after it lead from nothing
//! to what the service holds. Publishing never waits for a subscriber, and not on the service's
//! thread.

mod hash;
mod wire;

use std::collections::VecDeque;
use std::io;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use cellar_engine::serve::{BlockEvent, BlockObserver};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqError, ZmqMessage};

use self::hash::BlockHasher;

/// Batches that are kept for replays, as vLLM keeps them.
const MAX_KEPT: usize = 10_000;

/// The number that ends a replay: -1.
const END: [u8; 8] = [0xff; 8];

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
    /// How hashes of blocks are written.
    pub hash_format: HashFormat,
    /// What the hashes of blocks begin with: vLLM's environment variable `PYTHONHASHSEED`.
    pub hash_seed: String,
}

/// How hashes of blocks are written in events.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HashFormat {
    /// Their last 64 bits as a number: as vLLM unless `VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES` is 0.
    #[default]
    Int,
    /// All their 32 bytes.
    Bytes,
}

/// Binds the endpoints and publishes, on a thread of its own, the events that the returned observer
/// gets, for as long as it lives.
///
/// # Errors
/// Where an endpoint is not one, or is taken.
pub fn publish(events: KvEvents) -> io::Result<BlockObserver> {
    let block_size = events.block_size;
    let hasher = BlockHasher::new(&events.hash_seed);
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
        hash: Box::new(move |block| hasher.hash(block)),
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
    form: wire::Form,
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
            let topic = Bytes::from(events.topic.clone());
            tokio::spawn(replay(socket, topic, Arc::clone(&kept)));
        }
        Ok(Self {
            socket,
            topic: Bytes::from(events.topic.clone()),
            form: wire::Form {
                block_size: events.block_size,
                hash_format: events.hash_format,
            },
            kept,
            next: 0,
        })
    }

    async fn run(mut self, mut batches: UnboundedReceiver<Vec<BlockEvent>>) {
        while let Some(events) = batches.recv().await {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            let bytes = wire::encode(now.unwrap_or_default(), &events, self.form);
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
async fn replay(mut socket: RouterSocket, topic: Bytes, kept: Kept) {
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
        let end = [Bytes::new(), Bytes::from_static(&END), Bytes::new()];
        let batches = batches
            .into_iter()
            .map(|batch| [topic.clone(), number_frame(batch.number), batch.bytes]);
        for frames in batches.chain([end]) {
            let mut message = ZmqMessage::from(client.clone());
            for frame in [empty.clone()].into_iter().chain(frames) {
                message.push_back(frame);
            }
            if let Err(error) = socket.send(message).await {
                tracing::debug!(%error, "who asked for a replay is gone");
                break;
            }
        }
    }
}
