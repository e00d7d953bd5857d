//! The contract suite on an NVIDIA GPU.

#[path = "../../kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
#[path = "../../kv-gpu/tests/any_gpu/contract.rs"]
mod contract;

use kv_cuda::CudaDevice as Gpu;
