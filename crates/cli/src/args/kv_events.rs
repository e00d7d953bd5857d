//! `--kv-events` and its flags. Knows nothing of what events say.

use std::num::NonZeroU32;

use anyhow::Context;
use cellar_engine::serve::BlockObserver;
use cellar_telemetry::kv_events::{HashFormat, KvEvents, publish};
use clap::{Args, ValueEnum};

/// Where events of cached blocks are published.
#[derive(Debug, Args)]
pub(crate) struct KvEventArgs {
    /// Publish over ZeroMQ which blocks of tokens come and go, in vLLM's format, for routers: at
    /// this endpoint, as tcp://127.0.0.1:5557. Every subscriber reads the tokens of all prompts and
    /// texts
    #[arg(long, value_name = "ENDPOINT")]
    kv_events: Option<String>,
    /// Send events again to a router that asks at this endpoint, as tcp://127.0.0.1:5558
    #[arg(long, value_name = "ENDPOINT", requires = "kv_events")]
    kv_events_replay: Option<String>,
    /// The topic of these events
    #[arg(
        long,
        value_name = "TOPIC",
        default_value = "",
        hide_default_value = true,
        requires = "kv_events"
    )]
    kv_events_topic: String,
    /// Tokens of a block: as the router counts them
    #[arg(long, value_name = "N", default_value = "16", requires = "kv_events")]
    kv_block_size: NonZeroU32,
    /// The form of the hashes of blocks in events
    #[arg(
        long,
        value_enum,
        value_name = "FORM",
        default_value_t,
        requires = "kv_events"
    )]
    kv_hash_format: KvHashFormat,
    /// Seed of the hashes of blocks: PYTHONHASHSEED of a vLLM, for routers that compute them
    #[arg(long, value_name = "SEED", default_value = "0", requires = "kv_events")]
    kv_hash_seed: String,
}

/// The form of a hash.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum KvHashFormat {
    /// Its last 64 bits as a number: vLLM's default, which Dynamo reads
    #[default]
    Int,
    /// Its 32 bytes: vLLM's with VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0
    Bytes,
}

impl KvEventArgs {
    /// Whether they are published.
    pub(crate) fn is_wanted(&self) -> bool {
        self.kv_events.is_some()
    }

    /// A publisher at these endpoints, where one is wanted.
    ///
    /// # Errors
    /// Where an endpoint is none, or is taken.
    pub(crate) fn observer(&self) -> anyhow::Result<Option<BlockObserver>> {
        let Some(endpoint) = &self.kv_events else {
            return Ok(None);
        };
        let events = KvEvents {
            endpoint: endpoint.clone(),
            replay: self.kv_events_replay.clone(),
            topic: self.kv_events_topic.clone(),
            block_size: self.kv_block_size,
            hash_format: match self.kv_hash_format {
                KvHashFormat::Int => HashFormat::Int,
                KvHashFormat::Bytes => HashFormat::Bytes,
            },
            hash_seed: self.kv_hash_seed.clone(),
        };
        let observer = publish(events).context("cannot publish KV events")?;
        Ok(Some(observer))
    }
}
