//! Any graph on any GPU: [`GpuBackend`] lowers graphs to launches of kernels that a [`Device`]
//! runs.
//!
//! The kernels (`kernels/`) are written once, in a dialect that becomes CUDA C++, Metal, C++ for
//! OpenCL, or C++ for the simulator `sim`, which runs every kernel in tests on machines without a
//! GPU. Knows no vendor's library: those are in the crates of the devices.

mod arena;
mod backend;
mod config;
mod custom;
mod device;
mod edits;
mod inputs;
mod kernels;
mod lower;
mod plan;
mod planes;
mod program;
mod rows;
#[cfg(feature = "sim")]
#[allow(unsafe_code)]
pub mod sim;
mod state_table;
mod visibility_table;
mod weights;

pub use backend::GpuBackend;
pub use config::{GpuConfig, Precision};
pub use device::{Argument, Device, Region};
pub use kernels::{
    KernelInfo, KernelSource, kernel_info, kernel_infos, metal_source, opencl_source,
};
pub use plan::{GpuMemoryPlan, GpuWork, plan_memory};
pub use planes::has_kernels;
pub use program::GpuProgram;
pub use rows::GpuRows;
pub use weights::GpuWeights;
