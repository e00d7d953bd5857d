//! Diffusion language models: a text of masks, filled step by step.
//!
//! In reading order: [`DenoiseOptions`] (how many steps, and which masks are filled first),
//! `schedule` (how many masks each step fills), `confidence` (how sure the model is of a token),
//! [`Denoiser`] (a model on a backend), [`Denoising`] (one text). Knows nothing of memories: every
//! step computes the whole text.

mod confidence;
mod denoiser;
mod options;
mod schedule;

pub use denoiser::{Denoiser, Denoising};
pub use options::{DenoiseOptions, FillOrder, FillSchedule};
