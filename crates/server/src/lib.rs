//! HTTP server of Cellar: the APIs of OpenAI, Anthropic, Ollama and llama-server on an engine for
//! many requests.
//!
//! A library first: [`router`] makes an [`axum::Router`] from an [`App`], to be mounted anywhere;
//! [`serve`] runs it on a listener until it is told to end. Models are loaded by the caller
//! ([`ServedModel`]), or when they are needed, by what the caller gives for it ([`LoadModel`]). Two
//! promises come from [`cellar_engine::serve`]: the text of a request is what it would be alone,
//! and no request that was taken ends because memory ran short. A client that goes away cancels its
//! request.
//!
//! ```
//! use cellar_engine::Engine;
//! use cellar_engine::serve::{Service, ServiceConfig};
//! use kv_backend::BoxedBackend;
//! use model_core::model_file::ModelFile;
//! use cellar_server::{App, ModelSettings, ServedModel, ServerConfig};
//!
//! async fn serve(
//!     file: ModelFile,
//!     engine: Engine<BoxedBackend>,
//! ) -> Result<(), Box<dyn std::error::Error>> {
//!     let service = Service::start(engine, file.tokenizer(), &ServiceConfig::default())?;
//!     let settings = ModelSettings { id: "stories".to_owned(), ..ModelSettings::default() };
//!     let model = ServedModel::texts(&file, service, settings)?;
//!     let app = App::new(vec![model], ServerConfig::default());
//!     let listener = tokio::net::TcpListener::bind("127.0.0.1:8080").await?;
//!     let stop = std::future::pending(); // until a signal, for example
//!     cellar_server::serve(listener, app.clone(), cellar_server::router(app), stop).await;
//!     Ok(())
//! }
//! ```
//!
//! Knows no files of models, no backends and no command line.

mod adapters;
pub mod api;
mod app;
mod auth;
mod batches;
mod body_worker;
mod branches;
mod constrain;
mod control_texts;
mod conversations;
mod cors;
mod encode;
mod error;
mod field_rule;
mod files;
mod fim;
mod generate;
mod hosts;
mod ids;
mod json;
mod kept;
mod listen;
mod log_line;
mod memory_use;
mod metrics;
mod model;
mod models;
mod pictures;
mod places;
mod query;
mod report;
mod shelves;
mod skips;
mod speculate;
mod stream;
mod texts;
mod tls;
mod trace;
mod verify;
mod view;
mod whole;

pub use api::router;
pub use app::{App, Phase, Running, ServerConfig};
pub use auth::{Keys, Tenant};
pub use cors::Origins;
pub use error::ApiError;
pub use field_rule::{FieldRule, Neutral};
pub use fim::{Gap, GapFile};
pub use generate::{
    Answer, Arguments, CallNumber, ChatPrompt, Constraint, EchoedPrompt, Finish, Form,
    GenerateRequest, Generating, MarkedText, Output, Piece, Prompt, Stop, Tool, ToolCall,
    ToolPaths, ToolUse, UnheldKeywords,
};
pub use hosts::HostCheck;
pub use json::{Body, MaxTokens};
#[cfg(unix)]
pub use listen::serve_unix;
pub use listen::{serve, serve_tls};
pub use metrics::Metrics;
pub use model::{Job, ModelSettings, ServedModel, Work};
pub use models::{
    Expiry, FindModels, FinishLoad, KeepLoaded, LoadCounts, LoadModel, LoadState, MemoryBudget,
    ModelBytes, ModelEntry, ModelFacts, ModelInUse, ModelStatus, PlannedModel,
};
pub use pictures::PictureFetcher;
pub use report::{ObserveRequests, RequestReport, TextEnd, TextReport};
pub use shelves::ShelfLimits;
pub use speculate::Speculate;
pub use stream::{EVENT_STREAM, Encoder};
pub use texts::{EmbedJob, EmbedTexts, EmbedWorker, Embedded, RerankJob, RerankWorker, Scored};
pub use tls::Tls;
pub use trace::TraceParent;
