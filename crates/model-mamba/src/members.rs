//! [`FAMILY`]: the members. Knows no member but by its row.

use crate::delta::{QWEN3_NEXT, QWEN35, QWEN35_MOE};
use crate::family::MambaLike;
use crate::griffin::RECURRENT_GEMMA;
use crate::hybrids::{FALCON_H1, GRANITE_HYBRID, JAMBA};
use crate::kimi::KIMI_LINEAR;
use crate::mamba::{MAMBA, MAMBA2};
use crate::minimax::MINIMAX;
use crate::nemotron::{NEMOTRON_H, NEMOTRON_H_MOE};
use crate::short_conv::{LFM2, LFM2_MOE};
use crate::xlstm::XLSTM;
use crate::zamba::ZAMBA2;

/// All members.
pub const FAMILY: &[MambaLike] = &[
    MAMBA,
    MAMBA2,
    FALCON_H1,
    GRANITE_HYBRID,
    JAMBA,
    QWEN3_NEXT,
    QWEN35,
    QWEN35_MOE,
    LFM2,
    LFM2_MOE,
    KIMI_LINEAR,
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    RECURRENT_GEMMA,
    ZAMBA2,
    XLSTM,
    MINIMAX,
];
