//! Tests of the crate, as one: a test program takes longer to link than most tests to run.
//! `heap_bytes` is apart, as it counts what its process allocates.

mod any;
mod exhaust;
mod faults;
mod grid;
mod iswa;
mod masks;
mod memory_model;
mod owners;
mod recurrent;
mod recurrent_model;
mod scale;
mod shift;
mod snapshots;
mod sources;
mod splitters;
mod support;
mod unified;
mod worked;
