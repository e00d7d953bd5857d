//! The backends by name: the only place that knows which there are.

use std::fmt;

use clap::ValueEnum;
use kv_candle::CandleBackend;
use kv_core::backend::BoxedBackend;

/// A backend as it is called on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// Plain candle operations on the CPU: the reference, slower.
    #[default]
    Candle,
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Candle => "candle",
        })
    }
}

/// Starts a backend with so many threads.
///
/// # Errors
/// Where its threads cannot be started.
pub(crate) fn open(name: BackendName, n_threads: usize) -> anyhow::Result<BoxedBackend> {
    match name {
        BackendName::Candle => {
            // Candle computes on rayon's global pool.
            rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads)
                .build_global()?;
            Ok(BoxedBackend::new(CandleBackend::cpu()))
        }
    }
}
