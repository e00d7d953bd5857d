//! Messages of a server to others about its work, each kind behind a feature of its name.
//!
//! `kv_events`: which blocks of tokens are cached, for routers, over ZeroMQ as vLLM does. `otlp`:
//! a span for each request. Both observe a server from outside: it runs as well without them.

#[cfg(feature = "kv-events")]
pub mod kv_events;
#[cfg(feature = "otlp")]
pub mod otlp;
