//! Which experts of a mixture stay in memory, and which are read next.
//!
//! A token needs a few experts of each layer. Where memory does not hold all of them, some stay and
//! the others are read when they are needed. [`ExpertCache`] decides which: it is told what routers
//! choose and which reads end, and answers what to read and what to give up. It reads nothing
//! itself. Several models share one budget.
//!
//! Invariant: the same events give the same decisions. Knows neither files nor matrices nor clocks.

mod cache;
mod log;
mod mixture;
mod rates;
mod replay;

pub use cache::{
    Acquisition, Choice, ExpertCache, ExpertId, ReadEnd, RouterHits, Stack, smallest_budget,
};
pub use mixture::{ExpertCounts, ExpertState};
pub use replay::{ReplayCounts, ReplayRule, RouteStep, RouteTrace};
