//! The blocks that architectures share, each once, configured by data.
//!
//! A block is a struct of settings and a function that adds its nodes to a graph. Weight names are
//! those of GGUF files. Knows no architecture by name.

mod attention;
mod decoder;
mod feed_forward;

pub use attention::{AttentionBlock, QkNorm, QkvBias};
pub use decoder::{Decoder, DecoderLayer, PostNorms, TOKEN_EMBEDDING};
pub use feed_forward::FeedForwardBlock;
