//! The parts of a scheduler, each with fields of its own.
//!
//! Invariant: a part knows data and itself, no other part.

pub(crate) mod drafts;
pub(crate) mod pace;
pub(crate) mod parked;
pub(crate) mod prefix;
pub(crate) mod queue;
pub(crate) mod running;
pub(crate) mod sequences;
pub(crate) mod store;
pub(crate) mod swap;
mod tenants;
