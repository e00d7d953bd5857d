//! Tests of the models, as one: a test program takes longer to link than most tests to run.

mod common;
mod converted;
mod gemma3;
mod graphs;
mod heads;
mod images;
mod indexer;
mod kimi;
mod latents;
mod logits;
mod settings;
mod shared_rows;
mod wrong;
