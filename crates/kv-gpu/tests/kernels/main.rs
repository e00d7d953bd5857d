//! Kernels at odd sizes on the simulator, in both orders of threads. kv-cuda compiles the same
//! modules for a GPU.

mod attend;
mod bandwidth;
mod devices;
mod distances;
mod fused;
mod linear;
mod rates;
mod recordings;
mod recurrent;
mod simple;
mod simulator;
mod sparse;
mod stored;
mod support;
