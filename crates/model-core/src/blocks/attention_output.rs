//! The way of an attention's outputs out of its heads: a gate, a norm, and the name of the matrix
//! that projects them back.
//!
//! Does not know the attention.

/// The gate on the outputs of heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputGate {
    /// It is not.
    #[default]
    None,
    /// By the sigmoid of a projection, whose rows follow those of its head in the matrix of queries
    /// (Qwen3-Next). Values are as wide as keys.
    WithQueries,
}

/// The norm of what the heads of a row attend to, together, before the output matrix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputNorm {
    /// None.
    #[default]
    None,
    /// By the root of the mean square, with a gain (BitNet, arXiv 2402.17764).
    Rms,
}

/// The name of the output matrix of an attention in files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputName {
    /// `attn_output`.
    #[default]
    AttnOutput,
    /// `attn_o` (T5).
    AttnO,
}

impl OutputName {
    /// The matrix and its bias.
    pub(super) const fn weights(self) -> [&'static str; 2] {
        match self {
            Self::AttnOutput => ["attn_output.weight", "attn_output.bias"],
            Self::AttnO => ["attn_o.weight", "attn_o.bias"],
        }
    }
}
