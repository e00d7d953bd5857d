//! What the tests share: a model without weights, memories of every kind, and the simulator.

// A panic is how a test fails.
#![allow(unreachable_pub, clippy::unwrap_used, clippy::panic)]

pub mod fake;
pub mod holds;
pub mod kinds;
pub mod simulator;
pub mod store;
