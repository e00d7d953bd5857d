//! Encoders: BERT and its descendants, each a table row over one graph ([`Encoder`]); and
//! encoder-decoders: T5, BART and M2M-100 ([`Seq2Seq`]); and [`WavTokenizerDec`], whose tokens are
//! audio codes.
//!
//! With a classification head, an encoder scores texts or pairs of texts.
//!
//! An encoder remembers nothing: its tokens see each other, later ones too, within one ubatch, and
//! what comes out is a row for each of them. What becomes of rows is [`model_core::sentence`]'s.
//! Sizes are read from the file; attention, feed-forward and norms are shared blocks, and
//! [`Encoder`] wires them. Invariant: no encoder of texts has code of its own here, but for what
//! reads its `config.json`. Knows nothing of devices.
//!
//! ```
//! use model_core::architecture::Registry;
//!
//! let mut registry = Registry::new();
//! model_bert::register(&mut registry);
//! assert!(registry.get("bert").is_ok());
//! ```

mod encoder;
mod example;
mod family;
mod head;
mod hf;
mod member;
mod model;
mod read;
mod seq2seq;
mod wavtokenizer;

pub use encoder::{Encoder, EncoderInput, EncoderLayer, EncoderNorms, InputNorm};
pub use family::FAMILY;
pub use head::{HeadActivation, HeadDense, HeadNorm, HeadPooling, ScoreHead};
pub use member::{
    EmbeddingScale, EncoderLike, EncoderWindows, LayerSharing, Mixtures, Positions, WindowedBase,
};
pub use model::EncoderModel;
pub use seq2seq::{
    NormPlace, OutputBias, OutputMatrix, SEQ2SEQ_FAMILY, Seq2Seq, Seq2SeqLike, Seq2SeqModel,
    Seq2SeqPositions, Stack, StackPositions,
};
pub use wavtokenizer::WavTokenizerDec;

use model_core::architecture::Registry;

/// Adds the encoders and encoder-decoders to a registry, and how directories of their models are
/// read.
pub fn register(registry: &mut Registry) {
    for member in FAMILY {
        registry.register(*member);
    }
    registry.register(WavTokenizerDec);
    for member in SEQ2SEQ_FAMILY {
        registry.register(*member);
    }
    for class in hf::classes() {
        registry.register_hf(*class);
    }
}
