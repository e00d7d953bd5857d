//! The device on the device that OpenCL shows.

#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
#[path = "../../kv-gpu/tests/any_gpu/device.rs"]
mod device;

use kv_opencl::OpenClDevice as Gpu;
