//! llama-server's own API, and what its clients and routers ask of a server.
//!
//! Knows the wire and nothing of how texts are generated.

pub mod completion;
pub mod models;
pub mod status;
pub mod tokens;
