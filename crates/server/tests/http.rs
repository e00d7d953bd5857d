//! The server over real sockets, with the small model that is compiled into the program.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a test fails

#[path = "http/errors.rs"]
mod errors;
#[path = "http/life.rs"]
mod life;
#[path = "http/llama.rs"]
mod llama;
#[path = "http/openai.rs"]
mod openai;
#[path = "http/support.rs"]
mod support;
