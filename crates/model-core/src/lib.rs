//! What lies between a model file and a compute graph: GGUF, tokenizer, chat template, and the
//! blocks that architectures share.
//!
//! An author of a model writes an [`architecture::Architecture`]: metadata in, a
//! [`architecture::Model`] out, wired from [`blocks`]. [`model_file::ModelFile`] opens a file and
//! brings model, weights and tokenizer together.

pub mod adapters;
pub mod aged;
pub mod architecture;
pub mod blocks;
pub mod chat_template;
pub mod date;
#[cfg(target_os = "linux")]
mod direct_file;
pub mod directory;
pub mod error;
pub mod expert_tensors;
pub mod file_start;
pub mod gguf;
pub mod head_file;
pub mod hf;
pub mod hyperparameters;
pub mod imatrix;
mod map;
#[cfg(unix)]
mod map_guard;
pub mod media;
pub mod message_ends;
pub mod model_file;
pub mod picture;
pub mod sentence;
pub mod tokenizer;
pub mod weight_summary;
pub mod windows;
