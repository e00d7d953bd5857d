//! Whole models on the device that OpenCL shows.

#[path = "../../crates/kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
mod gpu;
#[path = "gpu/on_a_gpu.rs"]
mod on_a_gpu;

use kv_opencl::OpenClDevice as Gpu;
