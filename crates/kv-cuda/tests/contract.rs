//! The contract suite on a GPU, in both precisions.

mod common;
#[path = "../../kv-gpu/tests/tolerance/mod.rs"]
mod tolerance;

use kv_contract::{Known, Subject};
use kv_cuda::CudaDevice;
use kv_gpu::{GpuBackend, GpuConfig, Precision};

/// What is refused.
const KNOWN: &[Known] = &[Known::fails(
    "stored_keys_have_scores_by_distance",
    "no scores by distance over stored keys",
)];

fn subject(precision: Precision) -> Subject<GpuBackend<CudaDevice>> {
    let backend = GpuBackend::new(common::device(), GpuConfig { precision });
    Subject::new(backend).with_known(KNOWN)
}

mod precise {
    use super::{Precision, subject};

    kv_contract::backend_contract!(|| subject(Precision::Precise));
}

mod fast {
    use super::{Precision, subject, tolerance};

    kv_contract::backend_contract!(|| { subject(Precision::Fast).with_tolerance(tolerance::FAST) });
}
