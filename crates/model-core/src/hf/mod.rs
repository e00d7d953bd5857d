//! Model directories in the layout of the transformers library: `config.json`, safetensors files,
//! `tokenizer.json`.
//!
//! A directory is translated into what a GGUF file of the same model holds: [`Metadata`] under the
//! same keys, weights under the same names, in the same arrangement of rows. So an architecture is
//! written once, a directory can be written as GGUF without another table, and both can be compared
//! tensor by tensor. What differs from model to model is data: one [`HfClass`] for each class in
//! `architectures` of `config.json`.
//!
//! Invariant: after opening, every tensor of the files is either translated or known to be of no
//! use; none is dropped in silence.
//!
//! What opens a directory is [`HfDirectory`].
//!
//! [`Metadata`]: crate::gguf::Metadata
//! [`HfDirectory`]: crate::directory::HfDirectory

mod class;
mod config;
mod files;
mod fp8;
mod gemma;
mod keys;
mod latents;
mod modules;
mod names;
mod packed;
mod quantization;
mod rope;
mod rules;
mod sentence;
mod steps;
mod tables;
mod tensor_rule;
mod tokenizer;
mod translation;
mod unread;
mod weights;

pub use class::{ClassWhen, DeriveTensors, FixedValue, HfClass, HfClasses, HfHead, Key};
pub use config::HfConfig;
pub(crate) use files::TensorFiles;
pub use gemma::{GEMMA_NORMS, PLUS_ONE, gemma_score_scale, gemma3_windows};
pub use keys::Keys;
pub use latents::{latent_head_dims, latent_key_rows, latent_value_rows};
pub(crate) use modules::ModuleTarget;
pub use rope::{RopeKind, RopeSettings, rope_base_is_stated, rope_keys};
pub use rules::{
    DECODER_KEYS, GRANITE_FACTORS, RMS_EPS, ROPE_KEYS, ROW_KEYS, SILU, SIZE_KEYS, TRAINED_LENGTH,
    VOCAB_SIZE, WIDTH_KEYS, full_attention, groups, head_dim, head_keys, layer_types, only,
    window_of_all, windows_by_layer,
};
pub use steps::{HeadRows, Heads, PickedRows, RowFactors, TensorStep};
pub use tables::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, EMBEDDING_TENSORS, GATE_AND_UP_IN_ROWS, GATED,
    GATED_EXPERTS, GATED_TENSORS, HEAD_TENSORS, INPUT_NORM, NORM_BEFORE_FFN, PAIRED_ATTENTION,
    in_layers, in_stack,
};
pub use tensor_rule::{TensorRule, same, with};
pub use tokenizer::tokenizer_keys;
pub use translation::HfTranslation;
pub use weights::HfWeights;

pub use crate::error::ModelFileError;
