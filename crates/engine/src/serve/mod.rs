//! Many requests on one engine: [`Service`].
//!
//! A service runs a [`Session`](crate::session::Session) on a thread of its own. Requests
//! ([`TextRequest`]) go in from any thread, and each comes back as a stream of pieces
//! ([`TextStream`]). Requests are computed together: a step has one token of every text that goes
//! on, and chunks of prompts.
//!
//! Two promises. The text of a request is what it would be alone: byte for byte on the CPU backend,
//! where the same tokens give the same bits in any company; on other backends within their
//! tolerance. And no request that was taken ends because memory ran short: the youngest of the
//! lowest priority waits then, and goes on exactly where it was.
//!
//! ```
//! use std::sync::Arc;
//!
//! use cellar_engine::serve::{Service, ServiceConfig, ServiceError, TextRequest};
//! use cellar_engine::{CompletionOptions, Engine};
//! use kv_backend::Backend;
//! use model_core::tokenizer::{EncodeOptions, Tokenizer};
//!
//! fn generate(
//!     engine: Engine<impl Backend>,
//!     tokenizer: &Arc<Tokenizer>,
//! ) -> Result<(), ServiceError> {
//!     let service = Service::start(engine, tokenizer, &ServiceConfig::default())?;
//!     let request = |prompt: &str| TextRequest {
//!         prompt: tokenizer.encode(prompt, EncodeOptions::PROMPT),
//!         options: CompletionOptions { n_predict: Some(40), ..CompletionOptions::default() },
//!         ..TextRequest::default()
//!     };
//!     let first = service.submit(request("Once upon a time"))?;
//!     let second = service.submit(request("One day"))?; // computed together with the first
//!     for piece in first {
//!         print!("{}", piece?);
//!     }
//!     println!("\n{:?}", second.finish()?);
//!     Ok(())
//! }
//! ```
//!
//! [`Service::watch`] looks at it while it runs: which cells of the memory belong to which requests
//! ([`Frame`]), and what happens to them ([`ServiceEvent`]). [`ServiceExtras`] has two more
//! observers: a trace, from which `cellar_trace::replay` computes what another memory would do, and
//! a [`BlockObserver`], which gets events of blocks of tokens as a router counts them.
//!
//! [`Service::save_prefixes`] writes the cached prefixes, and [`Service::restore_prefixes`] takes
//! them back in another process. What the memory held of a request that has to wait goes to the
//! host ([`ServiceConfig::swap_bytes`]), and on to files ([`SwapDisk`]), and comes back from there.
//!
//! Knows no network and no chat.

mod prefixes;
mod service;

pub use cellar_scheduler::{
    Counters, DEFAULT_DRAFT, DropReason, End, EvictionPolicy, Missed, Note, PrefixCaching,
    PrefixUse, Priority, PromptLimits, RequestError, RequestId, Retention, Reuse, Salt, Speculated,
    Speculation, SpeculationOff, Tenant, TenantId, TenantLimits,
};
pub use service::Service;

pub use crate::session::{
    Block, BlockEvent, BlockHash, BlockObserver, CachedText, Choices, DraftCostSource, EventKind,
    Excerpt, ExcerptLen, ExpertFrame, FRAME_TIME, FetchPolicy, FinishedText, Frame, MAX_CHOICES,
    MAX_EVENTS, MemoryLayout, PrefixCounts, PrefixTiers, PromptProgress, RunningText,
    ServiceConfig, ServiceError, ServiceEvent, ServiceExtras, ServiceStatus, SwapDisk, TextRequest,
    TextStream, TokenPiece, Update, Usage, WaitingText, Watcher,
};
