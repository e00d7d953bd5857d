//! llama.cpp's C API (b11434) over Cellar: `libllama`, which unmodified programs load.
//!
//! In reading order: [`ffi`] (pointers that cross the boundary, and the macro that exports
//! functions), [`abi`] (structures), [`model`] with [`meta`] and [`vocab`], [`context`],
//! [`entries`] with [`batch`], [`decode`], [`output`], [`memory`], [`state`] with [`foreign`],
//! [`sampler`], [`chat`], [`adapter`], [`quantize`]; [`perf`], [`log`] and [`defaults`] beside
//! them, and in [`refused`] what Cellar does not do.
//!
//! Invariant: no function panics, aborts or follows a null pointer; what it cannot do, it says in a
//! log line and returns as the API's failure. How each behaves is written in `llama.h`; what
//! differs is a table in `docs/how-to/libllama.md`.

// The functions' documentation is `llama.h`, and C calls them.
#![allow(missing_docs)]

mod abi;
mod adapter;
mod batch;
mod chat;
mod context;
mod cxx;
mod decode;
mod defaults;
mod entries;
mod ffi;
mod foreign;
mod log;
mod memory;
mod meta;
mod model;
mod output;
mod perf;
mod quantize;
mod refused;
mod sampler;
mod state;
mod vocab;
mod whole_file;

#[cfg(test)]
mod tests;
