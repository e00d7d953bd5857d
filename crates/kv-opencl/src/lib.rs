//! [`OpenClDevice`]: GPUs with an OpenCL driver as a [`Device`](kv_gpu::Device).
//!
//! The driver's library is looked for at run time, and the driver compiles the kernels of kv-gpu
//! when they are first used: no SDK is needed to build. Knows no kernel and no graph.
//!
//! **Nothing of this crate has run on a GPU**: it was tested on Intel's driver for CPUs, which
//! counts as a GPU with `CELLAR_OPENCL_CPU=1`.

#![allow(unsafe_code)]

mod api;
mod buffer;
mod context;
mod device;
mod info;
mod kernel;
mod recording;

pub use buffer::OpenClBuffer;
pub use device::OpenClDevice;
pub use info::{OpenClDeviceInfo, devices, is_gpu_present};
pub use kernel::OpenClKernel;
pub use recording::OpenClRecording;
