//! The decode loop, the sampler and the texts of Cellar.
//!
//! In reading order: [`Engine`] (batches in, logits out, and the memory in between), [`sampler`]
//! (from logits to a token), [`stop`] (stop strings), [`Completion`] (the text of one request,
//! apart from any engine), [`session`] (the texts of one engine, from prompt to token), [`serve`]
//! (a session on a thread), [`batch_file`] (files of requests). What those did is written by the
//! crate `cellar-trace`. Vectors, scores and other uses of an engine are the crate `cellar-tasks`.
//! Generic over backends and models; names none of them.

mod adapters;
mod aged;
pub mod batch_file;
mod budget;
mod capacities;
mod changing_weights;
mod completion;
mod config;
mod context;
mod decode;
mod draft_model;
mod encode;
mod error;
mod exchange;
mod guard;
mod head;
mod logprobs;
mod memory_report;
mod picture_rows;
mod pictures;
mod planning;
mod programs;
mod rows_out;
mod runner;
pub mod sampler;
pub mod serve;
pub mod session;
mod speculate;
mod state;
pub mod stop;
mod stored_types;
mod timings;

pub use adapters::TextAdapters;
pub use cellar_scheduler::{MAX_DRAFT, Speculated, Speculation, SpeculationOff};
pub use completion::{Completion, CompletionOptions, FinishReason, OutputRow};
pub use config::{
    AttentionMode, ConfigError, DEFAULT_N_CTX, EngineConfig, HEAD_SNAPSHOTS, MAX_TOP_LOGPROBS,
    MemoryBudget, Settings,
};
pub use context::{GroupAttention, LongContext};
pub use decode::Engine;
pub use draft_model::DraftModel;
pub use error::{EngineError, Replaced, with_reasons};
pub use head::HeadTurn;
pub use kv_backend::CancelFlag;
pub use logprobs::{Logprobs, TokenLogprob, TokenLogprobs};
pub use memory_report::{KindReport, LayerReport, MemoryReport, PartReport, RowsReport};
pub use model_core::sentence::{Normalization, Pooling};
pub use pictures::{DEFAULT_PICTURE_BYTES, Tower};
pub use planning::{PromptOutputs, Workload};
pub use rows_out::{Embeddings, Logits};
pub use state::{RestoredState, SaveOptions};
pub use timings::{Pace, Timings};
