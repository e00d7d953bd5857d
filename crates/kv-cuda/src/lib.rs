//! [`CudaDevice`]: NVIDIA GPUs as a [`Device`](kv_gpu::Device), through the driver alone.
//!
//! The driver's library is looked for at run time, and the kernels are in this crate as PTX
//! (`ptx/kernels.ptx.lzma`), which the driver compiles for its GPU: nothing of CUDA is needed to
//! build or to start. Knows no kernel and no graph: those are kv-gpu's.

#![allow(unsafe_code)]

mod buffer;
mod context;
mod device;
mod driver;
mod module;
mod ptx;
mod recording;
mod staging;

pub use buffer::CudaBuffer;
pub use device::CudaDevice;
pub use driver::{CudaDeviceInfo, Version, devices, is_gpu_present};
pub use module::CudaKernel;
pub use recording::CudaRecording;
