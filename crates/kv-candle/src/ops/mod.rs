//! Operations that take more than a line of candle. They trust their operands: `execute` and the
//! backend's own methods have checked shapes, cells and visibility.

mod attend;
mod curves;
mod dense;
mod experts;
mod plain;
mod recurrent;
mod rope;
mod store_rows;

pub(crate) use attend::{Queries, attend};
pub(crate) use curves::{clamped_gate, layer_norm, scale_by_position, soft_cap};
pub(crate) use dense::{linear, rms_norm};
pub(crate) use experts::{Slots, expert_linear, expert_scale, route};
pub(crate) use plain::{kq, kq_soft_max, kqv};
pub(crate) use recurrent::{conv, scan, scan_heads};
pub(crate) use rope::{angles, rotate};
pub(crate) use store_rows::store_rows;
