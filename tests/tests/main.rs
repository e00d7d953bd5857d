//! Tests of whole models, as one: a test program takes longer to link than most tests to run.
//! `cuda.rs`, `metal.rs` and `opencl.rs` are apart, since each compiles the tests in `gpu/` for its
//! own device.

mod adapters;
mod device_memory;
mod diffusion;
mod formats;
mod gpu;
mod own_heads;
mod quantized;
mod served_experts;
mod simulator;
mod tiny2;
