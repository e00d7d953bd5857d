//! The contract suite on the GPU of a Mac.

#![cfg(target_os = "macos")]

#[path = "../../kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
#[path = "../../kv-gpu/tests/any_gpu/contract.rs"]
mod contract;

use kv_metal::MetalDevice as Gpu;
