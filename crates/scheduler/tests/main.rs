//! Tests of the scheduler, as one: a test program takes longer to link than most tests to run.

mod admission;
mod checkpoints;
mod every_order;
mod failures;
mod floors;
mod held;
mod notes;
mod pace;
mod park;
mod restore;
mod reuse;
mod rounded;
mod scheduler;
mod share;
mod shift;
mod simulation;
mod stored;
mod support;
mod swap;
