//! The devices that every test runs on: the simulator in both orders of threads.

use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};

/// Backends whose results must be the same to the bit.
pub(crate) fn backends(precision: Precision) -> Vec<GpuBackend<Sim>> {
    let orders = [Order::Forward, Order::Reverse].into_iter();
    orders
        .map(|order| GpuBackend::new(Sim::new(order), GpuConfig { precision }))
        .collect()
}
