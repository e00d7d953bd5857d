//! Tests of the engine, as one: a test program takes longer to link than most tests to run.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod budget;
mod completion;
mod context;
mod decode;
mod edits;
mod embed;
mod faults;
mod generation;
mod head_drafts;
mod hybrid;
mod images;
mod interrupted;
mod iswa;
mod kv_types;
mod logprobs;
#[path = "faults/model.rs"]
mod model;
mod next_token;
mod old_rows;
mod planning;

mod service;
mod shared_rows;
mod state;
mod state_types;
mod support;
mod texts;
