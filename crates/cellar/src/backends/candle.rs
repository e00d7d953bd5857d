//! Plain candle operations: the reference. Knows nothing of other backends.

use std::num::NonZeroUsize;
use std::sync::Once;

use kv_candle::CandleBackend;
use kv_core::backend::{BackendError, BoxedBackend};

use super::{BackendOptions, unavailable};

/// Opens it on the CPU.
///
/// # Errors
/// [`BackendError::Unavailable`] where it cannot profile and is asked to, or threads cannot be
/// started.
pub(super) fn open(options: &BackendOptions) -> Result<BoxedBackend, BackendError> {
    /// Candle computes on rayon's global pool, which backends share.
    static POOL: Once = Once::new();

    if options.profile.is_some() {
        return Err(unavailable("candle", "it does not profile its steps"));
    }
    let mut built = Ok(());
    POOL.call_once(|| {
        let pool = rayon::ThreadPoolBuilder::new();
        built = pool
            .num_threads(options.n_threads.map_or(0, NonZeroUsize::get))
            .build_global();
    });
    built.map_err(|error| unavailable("candle", error.to_string()))?;
    Ok(BoxedBackend::new(CandleBackend::cpu()))
}
