//! The functions as a C program calls them.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod adapter;
mod decode;
mod foreign;
mod layout;
mod memory;
mod misuse;
mod quantize;
mod random;
mod sampler;
mod scene;
mod vocab;
