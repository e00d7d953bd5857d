//! Operations that take more than a line of candle. They trust their operands: shapes, cells and
//! visibility have been checked.

mod attend;
mod delta_rule;
mod elementwise;
mod experts;
mod linear;
mod norm;
mod plain;
mod recurrent;
mod rope;
mod sparse;
mod store_rows;
mod top_k;

pub(crate) use attend::{BucketScores, Buckets, Queries, attend, merge_partials};
pub(crate) use delta_rule::{decay, delta};
pub(crate) use elementwise::{clamped_gate, scale_by_position, soft_cap};
pub(crate) use experts::{Slots, expert_linear, expert_scale, route};
pub(crate) use linear::{head_linear, linear};
pub(crate) use norm::{gaussian_top_k, layer_norm, rms_norm};
pub(crate) use plain::{kq, kq_soft_max, kqv};
pub(crate) use recurrent::{conv, scan, scan_heads};
pub(crate) use rope::{angles, rotate};
pub(crate) use sparse::{IndexQueries, index};
pub(crate) use store_rows::store_rows;
pub(crate) use top_k::top_k;

/// A weight and perhaps its bias.
#[derive(Clone, Copy)]
pub(crate) struct AffineTensors<'a> {
    pub(crate) weight: &'a candle_core::Tensor,
    pub(crate) bias: Option<&'a candle_core::Tensor>,
}
