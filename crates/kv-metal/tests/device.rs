//! The device on the GPU of a Mac.

#![cfg(target_os = "macos")]
#![allow(clippy::unwrap_used, clippy::panic)]

#[path = "../../kv-gpu/tests/any_gpu/mod.rs"]
mod any_gpu;
#[path = "../../kv-gpu/tests/any_gpu/device.rs"]
mod device;

use kv_metal::MetalDevice as Gpu;
