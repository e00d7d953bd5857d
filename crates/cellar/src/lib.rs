//! Language models in ten lines: from a GGUF file or a safetensors directory to text.
//!
//! ```no_run
//! use cellar::{GenerateOptions, Model};
//!
//! let mut model = Model::open("model.gguf")?;
//! let mut text = model.generate("Once upon a time", GenerateOptions::default())?;
//! for piece in &mut text {
//!     print!("{}", piece?);
//! }
//! println!("\n({:?})", text.finish_reason());
//! # Ok::<(), cellar::Error>(())
//! ```
//!
//! A chat is a list of messages that the caller keeps; only what is new of it is evaluated:
//!
//! ```no_run
//! use cellar::{ChatMessage, GenerateOptions, Model};
//!
//! let mut model = Model::open("instruct.gguf")?;
//! let mut messages = vec![ChatMessage::new("user", "Why is the sky blue?")];
//! let answer = model.chat(&messages, GenerateOptions::default())?.finish()?;
//! messages.push(ChatMessage::new("assistant", answer));
//! messages.push(ChatMessage::new("user", "And at night?"));
//! let answer = model.chat(&messages, GenerateOptions::default())?.finish()?;
//! # Ok::<(), cellar::Error>(())
//! ```
//!
//! [`Model`] is a file on a backend with its texts; [`embedder`] gives vectors,
//! [`reranker`] scores. This crate
//! only puts things together: every part can be used alone, and all are re-exported. [`engine`]
//! evaluates batches of many sequences, [`kv_core`] has memories, graphs and the backend interface,
//! [`model_core`] reads files, tokenizes and renders chat templates.
//!
//! Features: `cpu` (on by default), `candle`, and `cuda`, which needs no CUDA toolkit to build and
//! no driver to start.

mod architectures;
mod backends;
mod chat;
mod choice;
pub mod convert;
mod error;
mod gpu_layers;
mod model;
mod model_options;
mod options;
mod pictures;
mod plan;
mod text;

pub use architectures::architectures;
pub use backends::{
    Activations, BackendKind, BackendMemory, BackendOptions, ComputeDevice, ExpertMemory,
    ExpertPlan, MemoryPlace, Repack, backend_devices, open_backend,
};
pub use cellar_engine as engine;
pub use cellar_engine::sampler::{Bias, Dry, LogitBias, Mirostat, Penalties, SamplerConfig, Xtc};
pub use cellar_engine::{CancelFlag, EngineConfig, FinishReason, LongContext};
pub use cellar_tasks as tasks;
pub use cellar_tasks::{Embedder, EmbedderConfig, Ranked, Reranker, RerankerConfig};
pub use chat::{ChatTokens, chat_tokens, render_chat, render_json_chat};
pub use choice::{
    Choice, DEVICE_RESERVE, DeviceNeeds, DeviceShortage, ModelWork, choose_backend,
    fewest_host_experts, weight_shapes,
};
pub use error::Error;
pub use kv_backend;
pub use kv_block;
pub use kv_core;
pub use kv_core::{SeqId, TokenId};
pub use kv_graph;
pub use kv_rows;
pub use kv_rows::{KvType, KvTypes};
pub use model::{Model, embedder, reranker};
pub use model_core;
pub use model_core::chat_template::ChatMessage;
pub use model_core::expert_tensors::{ExpertLayers, TensorPattern};
pub use model_core::media::MediaKind;
pub use model_core::model_file::ModelFile;
pub use model_core::picture::{PictureError, PreparedPicture, PromptTokens};
pub use model_options::{HeadUse, ModelOptions};
pub use model_vision::{
    MAX_BYTES as MAX_PICTURE_BYTES, MediaPart, PictureReader, Vision, data_url_bytes, take_pictures,
};
pub use options::GenerateOptions;
pub use pictures::{PictureChat, media_message, open_tower, picture_chat, vision_of};
pub use plan::{BackendPlan, DeviceReport, LayersOnGpu, MemoryNeeds, gpu_room, plan_memory, taken};
pub use text::{Text, TextState};

/// The programs of READMEs and pages are doc tests.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../README.md")]
    struct PackageReadme;
    #[doc = include_str!("../../../README.md")]
    struct ProjectReadme;
    #[doc = include_str!("../../../docs/how-to/embed.md")]
    struct EmbedPage;
}
