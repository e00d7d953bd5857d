//! The tests of kv-gpu's kernels at odd sizes, on a GPU.

#[path = "../../kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
#[path = "../../kv-gpu/tests/kernels/attend.rs"]
mod attend;
#[path = "../../kv-gpu/tests/kernels/distances.rs"]
mod distances;
#[path = "../../kv-gpu/tests/kernels/fused.rs"]
mod fused;
#[path = "../../kv-gpu/tests/kernels/linear.rs"]
mod linear;
#[path = "../../kv-gpu/tests/kernels/recurrent.rs"]
mod recurrent;
#[path = "../../kv-gpu/tests/kernels/simple.rs"]
mod simple;
#[path = "../../kv-gpu/tests/kernels/sparse.rs"]
mod sparse;
#[path = "../../kv-gpu/tests/kernels/stored.rs"]
mod stored;
#[path = "../../kv-gpu/tests/kernels/support.rs"]
mod support;

use kv_opencl::OpenClDevice as Gpu;

mod devices {
    use kv_gpu::{GpuBackend, GpuConfig, Precision};

    /// One: the order of threads is the GPU's.
    pub(crate) fn backends(precision: Precision) -> Vec<GpuBackend<crate::Gpu>> {
        let device = crate::any_gpu::device();
        vec![GpuBackend::new(device, GpuConfig { precision })]
    }
}
