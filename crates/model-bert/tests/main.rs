//! Tests of the models, as one: a test program takes longer to link than most tests to run.

mod common;
mod dense;
mod graphs;
mod recipes;
mod scores;
mod seq2seq;
mod settings;
mod tiny2;
mod vectors;
mod wavtokenizer;
mod wrong;
