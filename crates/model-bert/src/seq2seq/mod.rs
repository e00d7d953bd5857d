//! Encoder-decoders: T5, BART and M2M-100, each a table row over one pair of graphs ([`Seq2Seq`]).
//!
//! The encoder reads a source and stores, for every layer of the decoder, the keys and values that
//! it attends over; the decoder never computes them. Invariant: no architecture has code of its own
//! here. Knows nothing of devices.

mod cross;
mod family;
mod graph;
mod model;
pub(crate) mod read;

pub use family::{SEQ2SEQ_FAMILY, Seq2SeqLike, Seq2SeqPositions};
pub use graph::{NormPlace, OutputBias, OutputMatrix, Seq2Seq, Stack, StackPositions};
pub use model::Seq2SeqModel;
