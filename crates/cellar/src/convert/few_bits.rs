//! Formats of the matrices in files of few bits: `q3_k_m`, `q2_k`, `q2_k_s`, and the IQ types from
//! `iq4_nl` to `iq1_s`.
//!
//! As in llama.cpp. Attention V, which is small where query heads share it, and the first FFN down
//! matrices are larger than others; in the smallest of three bits, attention Q and K are smaller.
//! Knows no names of tensors.

use kv_block::BlockFormat;

use super::file_type::{IqMix, LowMix};
use super::mix::{Columns, ModelTraits, needs_more_bits};

impl LowMix {
    /// The format of FFN down and of attention output, where it is not that of most.
    pub(super) fn base(self) -> Option<BlockFormat> {
        match self {
            Self::Q3KM => Some(BlockFormat::Q4_K),
            Self::Q2K => Some(BlockFormat::Q3_K),
            Self::Q2KS => None,
        }
    }

    /// The format of the attention V of this number.
    pub(super) fn value(self, model: ModelTraits, index: usize) -> BlockFormat {
        match self {
            Self::Q3KM if index < 2 => BlockFormat::Q5_K,
            Self::Q2K if model.queries_per_kv < 4 => BlockFormat::Q3_K,
            Self::Q2KS if model.queries_per_kv < 4 => BlockFormat::Q2_K,
            _ => BlockFormat::Q4_K,
        }
    }
}

impl IqMix {
    /// The format of the matrix that makes the logits.
    pub(super) fn output(self) -> BlockFormat {
        if self.is_least() || self == Self::IQ3XXS {
            BlockFormat::Q5_K
        } else {
            BlockFormat::Q6_K
        }
    }

    /// The format of the embedding, where it is not that of most matrices. This and the others
    /// like it are `None` there.
    pub(super) fn embedding(self) -> Option<BlockFormat> {
        match self {
            Self::IQ3XXS => Some(BlockFormat::IQ3_S),
            _ => self.is_least().then(|| self.larger()),
        }
    }

    /// The format of attention V.
    pub(super) fn value(self, model: ModelTraits) -> Option<BlockFormat> {
        let is_shared = model.queries_per_kv >= 4;
        if self.is_least() {
            let is_small = is_shared || model.n_experts >= 4;
            return Some(if is_small {
                BlockFormat::Q4_K
            } else {
                self.larger()
            });
        }
        match self {
            _ if model.n_experts == 8 => Some(BlockFormat::Q8_0),
            Self::IQ4NL | Self::IQ4XS => is_shared.then_some(BlockFormat::Q5_K),
            _ if (is_shared || self == Self::IQ3M) && model.is_70b() => Some(BlockFormat::Q5_K),
            _ if is_shared || self == Self::IQ3M => Some(BlockFormat::Q4_K),
            Self::IQ3XXS if model.columns == Columns::Alike => Some(BlockFormat::IQ3_S),
            _ => None,
        }
    }

    /// The format of attention K.
    pub(super) fn key(self, model: ModelTraits) -> Option<BlockFormat> {
        match (self.is_least(), model.n_experts) {
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
            Self::IQ1M | Self::IQ1S => Some(BlockFormat::IQ2_XXS),
            _ => None,
        }
    }

    /// The format of the FFN down of this number.
    pub(super) fn down(self, model: ModelTraits, index: usize) -> Option<BlockFormat> {
        let n = model.n_layers;
        let is_first = index < n / 8;
        match self {
            _ if self.is_least() => is_first.then(|| self.larger()),
            Self::IQ4NL | Self::IQ4XS | Self::IQ3XXS if model.columns == Columns::Weighted => None,
            Self::IQ4NL | Self::IQ4XS => is_first.then_some(BlockFormat::Q5_K),
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

    /// True for the types of two bits a value and fewer.
    pub(super) fn is_least(self) -> bool {
        match self {
            Self::IQ4NL | Self::IQ4XS => false,
            Self::IQ3M | Self::IQ3S | Self::IQ3XS | Self::IQ3XXS => false,
            Self::IQ2M | Self::IQ2S | Self::IQ2XS | Self::IQ2XXS => true,
            Self::IQ1M | Self::IQ1S => true,
        }
    }

    /// The format of the larger matrices in a file of the least types.
    fn larger(self) -> BlockFormat {
        match self {
            Self::IQ2M | Self::IQ2S => BlockFormat::IQ3_S,
            _ => BlockFormat::Q2_K,
        }
    }
}
