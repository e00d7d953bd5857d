//! GGUF, weights, tokenizer, chat templates, and the blocks that architectures share
pub mod architecture;
pub mod blocks;
pub mod hyperparameters;

pub mod gguf;

pub mod tokenizer;
