//! Tests of the models, as one: a test program takes longer to link than most tests to run.

mod common;
mod graphs;
mod heads;
mod images;
mod logits;
mod rwkv_gguf;
mod settings;
mod stories;
mod wrong;
