//! Whole models on an NVIDIA GPU.

#[path = "../../crates/kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
mod gpu;
#[path = "gpu/on_a_gpu.rs"]
mod on_a_gpu;

use kv_cuda::CudaDevice as Gpu;
