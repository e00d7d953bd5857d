//! [`MetalDevice`]: the GPUs of Apple silicon as a `kv_gpu::Device`, through Metal alone.
//!
//! macOS compiles the kernels of kv-gpu when they are first used: no tool of Apple's is needed to
//! build. On other systems the crate is [`devices`] and [`MetalDevice::open`], which say so. Knows
//! no kernel and no graph.
//!
//! **Nothing of this crate has run on Apple hardware**: it was written without, and type-checked
//! for macOS alone. `scripts/metal-check.sh` of the repository runs its tests on a Mac.

#![allow(unsafe_code)]

mod info;

#[cfg(target_os = "macos")]
mod buffer;
#[cfg(target_os = "macos")]
mod context;
#[cfg(target_os = "macos")]
mod device;
#[cfg(target_os = "macos")]
mod kernel;
#[cfg(target_os = "macos")]
mod queue;
#[cfg(target_os = "macos")]
mod recording;

#[cfg(not(target_os = "macos"))]
mod absent;

#[cfg(not(target_os = "macos"))]
pub use absent::{MetalDevice, devices, is_gpu_present};
#[cfg(target_os = "macos")]
pub use buffer::MetalBuffer;
#[cfg(target_os = "macos")]
pub use context::{devices, is_gpu_present};
#[cfg(target_os = "macos")]
pub use device::MetalDevice;
pub use info::MetalDeviceInfo;
#[cfg(target_os = "macos")]
pub use kernel::MetalKernel;
#[cfg(target_os = "macos")]
pub use recording::MetalRecording;
