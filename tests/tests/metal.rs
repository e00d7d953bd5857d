//! Whole models on the GPU of a Mac.

#![cfg(target_os = "macos")]

#[path = "../../crates/kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
mod gpu;
#[path = "gpu/on_a_gpu.rs"]
mod on_a_gpu;

use kv_metal::MetalDevice as Gpu;
