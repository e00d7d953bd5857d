//! Starts the service of a command that computes many requests together.
//!
//! Invariant: where `--speculate` has no effect, a warning gives the reason. Knows nothing of
//! requests.

use std::sync::Arc;

use cellar_engine::serve::{
    BlockObserver, PrefixTiers, Service, ServiceConfig, ServiceExtras, Speculation, SwapDisk,
};
use cellar_engine::{Engine, Tower};
use cellar_prefix_store::HostStore;
use cellar_trace::TraceWriter;
use kv_backend::BoxedBackend;
use model_core::tokenizer::Tokenizer;

use crate::args::{EngineArgs, SpeculationArgs};
use crate::draft_model::{self, DraftFor};
use crate::resolve;

/// The flags of a service that are not its limits.
#[derive(Debug)]
pub(crate) struct ServiceFlags<'a> {
    pub(crate) engine: &'a EngineArgs,
    pub(crate) speculation: &'a SpeculationArgs,
    pub(crate) trace: Option<TraceWriter>,
    pub(crate) blocks: Option<BlockObserver>,
    pub(crate) swap_disk: Option<SwapDisk>,
    pub(crate) swap_host: Option<HostStore>,
    pub(crate) prefix_tiers: Option<PrefixTiers>,
    pub(crate) tower: Option<Tower>,
}

impl ServiceFlags<'_> {
    /// The service, with the draft model and the trace that the flags name.
    ///
    /// # Errors
    /// As of [`draft_model::open`] and [`Service::start_with`].
    pub(crate) fn start(
        self,
        engine: Engine<BoxedBackend>,
        tokenizer: &Arc<Tokenizer>,
        config: &ServiceConfig,
    ) -> anyhow::Result<Service<BoxedBackend>> {
        let texts = DraftFor::engine(tokenizer, engine.settings());
        let extras = ServiceExtras {
            trace: self.trace,
            blocks: self.blocks,
            swap_disk: self.swap_disk,
            swap_host: self.swap_host,
            prefix_tiers: self.prefix_tiers,
            tower: self.tower,
            draft_model: draft_model::open(self.speculation, self.engine, texts)?,
        };
        let service = Service::start_with(engine, tokenizer, config, extras)?;
        let drafts = match self.speculation.speculation() {
            Speculation::Off => false,
            Speculation::Auto { .. } => service.has_head(),
            _ => true,
        };
        if drafts {
            resolve::warn_of_no_speculation(service.draft_limit().err());
        }
        Ok(service)
    }
}
