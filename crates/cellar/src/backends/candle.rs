//! Plain candle operations: the reference. Knows nothing of other backends.

use std::num::NonZeroUsize;
use std::sync::Once;

use kv_backend::{BackendError, BoxedBackend};
use kv_candle::CandleBackend;

use super::{BackendOptions, unavailable};

/// Where candle computes.
#[derive(Clone, Copy, Debug)]
pub(super) enum CandleDevice {
    Cpu,
    Cuda,
    Metal,
}

/// Opens it on a device.
///
/// # Errors
/// [`BackendError::Unavailable`] where it cannot profile and is asked to, threads cannot be
/// started, or there is no such device.
pub(super) fn open(
    options: &BackendOptions,
    device: CandleDevice,
) -> Result<BoxedBackend, BackendError> {
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
    Ok(BoxedBackend::new(match device {
        CandleDevice::Cpu => CandleBackend::cpu(),
        CandleDevice::Cuda => CandleBackend::cuda(0)?,
        CandleDevice::Metal => CandleBackend::metal(0)?,
    }))
}
