//! Which formats the matrices of files with grids have: `iq3_m` to `iq2_xxs`.
//!
//! As in llama.cpp. Attention V, which is small where query heads share it, and the first FFN down
//! matrices are larger than others; in the smallest of three bits, attention Q and K are smaller.
//! Knows no names of tensors.

use kv_core::block::BlockFormat;

use super::file_type::GridMix;
use super::mix::{Columns, ModelTraits, needs_more_bits};

impl GridMix {
    /// The format of the matrix that makes the logits.
    pub(super) fn output(self) -> BlockFormat {
        match self {
            Self::IQ3M | Self::IQ3S | Self::IQ3XS => BlockFormat::Q6_K,
            _ => BlockFormat::Q5_K,
        }
    }

    /// The format of the embedding, where it is not that of most matrices. This and the others
    /// like it are `None` there.
    pub(super) fn embedding(self) -> Option<BlockFormat> {
        match self {
            Self::IQ3M | Self::IQ3S | Self::IQ3XS => None,
            Self::IQ3XXS | Self::IQ2M | Self::IQ2S => Some(BlockFormat::IQ3_S),
            Self::IQ2XS | Self::IQ2XXS => Some(BlockFormat::Q2_K),
        }
    }

    /// The format of attention V.
    pub(super) fn value(self, model: ModelTraits) -> Option<BlockFormat> {
        let is_shared = model.queries_per_kv >= 4;
        if self.has_two_bits() {
            let is_small = is_shared || model.n_experts >= 4;
            return Some(if is_small {
                BlockFormat::Q4_K
            } else {
                self.larger()
            });
        }
        match self {
            _ if model.n_experts == 8 => Some(BlockFormat::Q8_0),
            _ if (is_shared || self == Self::IQ3M) && model.is_70b() => Some(BlockFormat::Q5_K),
            _ if is_shared || self == Self::IQ3M => Some(BlockFormat::Q4_K),
            Self::IQ3XXS if model.columns == Columns::Alike => Some(BlockFormat::IQ3_S),
            _ => None,
        }
    }

    /// The format of attention K.
    pub(super) fn key(self, model: ModelTraits) -> Option<BlockFormat> {
        match (self.has_two_bits(), model.n_experts) {
            (true, 8) => Some(BlockFormat::Q4_K),
            (false, 8) => Some(BlockFormat::Q8_0),
            _ => self.query(),
        }
    }

    /// The format of attention Q.
    pub(super) fn query(self) -> Option<BlockFormat> {
        match self {
            Self::IQ3XS => Some(BlockFormat::IQ3_XXS),
            Self::IQ3XXS => Some(BlockFormat::IQ2_S),
            _ => None,
        }
    }

    /// The format of attention output.
    pub(super) fn attention_output(self, model: ModelTraits) -> Option<BlockFormat> {
        match self {
            _ if model.n_experts == 8 => Some(BlockFormat::Q5_K),
            Self::IQ3M => Some(BlockFormat::Q4_K),
            Self::IQ3XXS | Self::IQ2M | Self::IQ2S => Some(BlockFormat::IQ3_S),
            _ => None,
        }
    }

    /// The format of the FFN down of this number.
    pub(super) fn down(self, model: ModelTraits, index: usize) -> Option<BlockFormat> {
        let n = model.n_layers;
        let is_first = index < n / 8;
        match self {
            _ if self.has_two_bits() => is_first.then(|| self.larger()),
            Self::IQ3XXS if model.columns == Columns::Weighted => None,
            Self::IQ3XXS if is_first => Some(BlockFormat::Q4_K),
            Self::IQ3XXS => Some(BlockFormat::Q3_K),
            Self::IQ3M if is_first => Some(BlockFormat::Q4_K),
            Self::IQ3M if model.n_experts == 8 && needs_more_bits(index, n) => {
                Some(BlockFormat::Q4_K)
            }
            _ => None,
        }
    }

    /// The format of the FFN gate or up of this number.
    pub(super) fn gate_or_up(self, model: ModelTraits, index: usize) -> Option<BlockFormat> {
        let n = model.n_layers;
        let is_inner = index >= n / 8 && index < 7 * n / 8;
        (self == Self::IQ3XS && is_inner).then_some(BlockFormat::IQ3_XXS)
    }

    /// True for the types of about two bits a value.
    pub(super) fn has_two_bits(self) -> bool {
        matches!(self, Self::IQ2M | Self::IQ2S | Self::IQ2XS | Self::IQ2XXS)
    }

    /// What the larger matrices of a file of two bits have.
    fn larger(self) -> BlockFormat {
        match self {
            Self::IQ2M | Self::IQ2S => BlockFormat::IQ3_S,
            _ => BlockFormat::Q2_K,
        }
    }
}
