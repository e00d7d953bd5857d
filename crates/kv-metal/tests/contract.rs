//! The contract suite on a GPU, in both precisions.

#![cfg(target_os = "macos")]

mod common;
#[path = "../../kv-gpu/tests/known/mod.rs"]
mod known;
#[path = "../../kv-gpu/tests/tolerance/mod.rs"]
mod tolerance;

use kv_contract::Subject;
use kv_gpu::{GpuBackend, GpuConfig, Precision};
use kv_metal::MetalDevice;

fn subject(precision: Precision) -> Subject<GpuBackend<MetalDevice>> {
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
