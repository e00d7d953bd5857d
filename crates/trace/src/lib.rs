//! Traces: what an engine for many requests was asked and what it did, in a file, and replays of
//! them under another memory or policy. Knows schedulers and memories, and neither engines nor
//! models.
//!
//! A trace ([`TraceWriter`], [`Trace`]) is JSON lines: a header with the layout of the memory and
//! the limits of the scheduler, then a line for each event, written as it happens. It has no text
//! and no token ids. In place of a token it has a hash of the token and all before it, with a
//! random key that is not kept: two texts have the same hashes as far as they have the same tokens,
//! which is all that prefix reuse looks at, so a replay is exact; what the tokens were cannot be
//! computed from it.
//!
//! [`replay`] sends the requests of a trace through a real scheduler and a real memory module, of
//! another size or with another eviction policy, without a model: each text goes on as it did in
//! the trace, and steps take the time that steps of so many tokens took there.
//! [`replay_fleet`] sends them through several services behind a [`Router`], with or without a
//! store of prefixes that all share; [`Trace::read_mooncake`] reads public traces, which have no
//! model.
//!
//! ```
//! use cellar_trace::{ReplayConfig, Trace, replay};
//!
//! fn hit_rates(path: &std::path::Path) -> Result<(), Box<dyn std::error::Error>> {
//!     let trace = Trace::read(std::io::BufReader::new(std::fs::File::open(path)?))?;
//!     for n_ctx in [4096, 8192, 16384] {
//!         let config = ReplayConfig { n_ctx: Some(n_ctx), ..ReplayConfig::default() };
//!         let report = replay(&trace, &config)?;
//!         println!("{n_ctx}: {} of {} tokens", report.n_reused, report.n_prompt);
//!     }
//!     Ok(())
//! }
//! ```

mod error;
mod fleet;
mod layout;
mod mooncake;
mod reader;
mod record;
mod replay;
mod replica;
mod shared_tier;
mod step_cost;
mod writer;

pub use error::TraceError;
pub use fleet::Router;
pub use layout::TracedMemory;
pub use mooncake::MooncakeFormat;
pub use reader::Trace;
pub use record::TRACE_VERSION;
pub use replay::{FleetConfig, FleetReport, ReplayConfig, ReplayReport, replay, replay_fleet};
pub use writer::TraceWriter;
