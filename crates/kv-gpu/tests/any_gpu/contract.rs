//! The contract suite on any GPU, in both precisions.

#[path = "../tolerance/mod.rs"]
mod tolerance;

use kv_contract::Subject;
use kv_gpu::{GpuBackend, GpuConfig, Precision, has_kernels};

use crate::{Gpu, any_gpu};

fn subject(precision: Precision) -> Subject<GpuBackend<Gpu>> {
    let backend = GpuBackend::new(any_gpu::device(), GpuConfig { precision });
    Subject::new(backend).with_formats(has_kernels)
}

mod precise {
    use super::{Precision, subject};

    kv_contract::backend_contract!(|| subject(Precision::Precise));
}

mod fast {
    use super::{Precision, subject, tolerance};

    kv_contract::backend_contract!(|| { subject(Precision::Fast).with_tolerance(tolerance::FAST) });
}
