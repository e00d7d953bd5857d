//! The contract suite on a GPU.

mod common;

use kv_contract::Subject;
use kv_cuda::CudaDevice;
use kv_gpu::{GpuBackend, GpuConfig, Precision};

fn precise() -> Subject<GpuBackend<CudaDevice>> {
    let precision = Precision::Precise;
    Subject::new(GpuBackend::new(common::device(), GpuConfig { precision }))
}

kv_contract::backend_contract!(precise);
