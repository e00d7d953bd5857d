//! What the tests share: a model without weights, memories of every kind, and the simulator.

// Each test file uses a part of this, and a panic is how a test fails.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::panic)]

pub mod fake;
pub mod kinds;
pub mod simulator;
