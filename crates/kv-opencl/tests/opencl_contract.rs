//! The contract suite on the device that OpenCL shows.

#[path = "../../kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
#[path = "../../kv-gpu/tests/any_gpu/contract.rs"]
mod contract;

use kv_opencl::OpenClDevice as Gpu;
