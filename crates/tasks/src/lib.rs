//! The other uses of an engine than writing texts.
//!
//! In reading order: [`Embedder`] (vectors of texts), [`Reranker`] (scores of pairs), [`Denoiser`]
//! (texts of masks, for diffusion models), [`RecordingBackend`] (sums of what weight matrices
//! multiply). Generic over backends and models; names none of them.

mod denoise;
mod embedder;
mod importance;
mod reranker;
mod texts;

pub use denoise::{DenoiseOptions, Denoiser, Denoising, FillOrder, FillSchedule};
pub use embedder::{Embedder, EmbedderConfig, LongTexts};
pub use importance::{ActivationSums, RecordedMatrices, RecordingBackend, RecordingProgram};
pub use reranker::{Ranked, Reranker, RerankerConfig};
pub use texts::TextPlan;
