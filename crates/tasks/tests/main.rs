//! Tests of the crate, as one: a test program takes longer to link than most tests to run.

mod importance;
