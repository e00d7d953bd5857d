//! The contract suite on a GPU, in both precisions.

mod common;
#[path = "../../kv-gpu/tests/known/mod.rs"]
mod known;
#[path = "../../kv-gpu/tests/tolerance/mod.rs"]
mod tolerance;

use kv_contract::Subject;
use kv_cuda::CudaDevice;
use kv_gpu::{GpuBackend, GpuConfig, Precision};

fn subject(precision: Precision) -> Subject<GpuBackend<CudaDevice>> {
    let backend = GpuBackend::new(common::device(), GpuConfig { precision });
    Subject::new(backend).with_known(known::KNOWN)
}

mod precise {
    use super::{Precision, subject};

    kv_contract::backend_contract!(|| subject(Precision::Precise));
}

mod fast {
    use super::{Precision, subject, tolerance};

    kv_contract::backend_contract!(|| { subject(Precision::Fast).with_tolerance(tolerance::FAST) });
}
