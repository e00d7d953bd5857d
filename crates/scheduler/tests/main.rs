//! Tests of the scheduler, as one: a test program takes longer to link than most tests to run.

mod pace;
mod reuse;
mod scheduler;
mod share;
mod simulation;
mod support;
mod swap;
