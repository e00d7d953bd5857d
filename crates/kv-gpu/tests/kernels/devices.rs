//! The devices that every test runs on: the simulator in both orders of threads, recorded and not.

use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};

/// Backends whose results must be the same to the bit; one of them cannot record its launches.
pub(crate) fn backends(precision: Precision) -> Vec<GpuBackend<Sim>> {
    let devices = [
        Sim::new(Order::Forward),
        Sim::new(Order::Reverse).without_recordings(),
    ];
    let backend = |device| GpuBackend::new(device, GpuConfig { precision });
    devices.into_iter().map(backend).collect()
}
