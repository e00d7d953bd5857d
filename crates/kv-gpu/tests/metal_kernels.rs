//! Kernels at odd sizes as Metal gets them, on the simulator, in both orders of threads. kv-metal
//! compiles the same modules for a GPU.

#[path = "kernels/attend.rs"]
mod attend;
#[path = "kernels/distances.rs"]
mod distances;
#[path = "kernels/fused.rs"]
mod fused;
#[path = "kernels/linear.rs"]
mod linear;
#[path = "kernels/recurrent.rs"]
mod recurrent;
#[path = "kernels/simple.rs"]
mod simple;
#[path = "kernels/sparse.rs"]
mod sparse;
#[path = "kernels/stored.rs"]
mod stored;
#[path = "kernels/support.rs"]
mod support;

mod devices {
    use kv_gpu::sim::{Dialect, Order, Sim};
    use kv_gpu::{GpuBackend, GpuConfig, Precision};

    /// Backends whose results must be the same to the bit.
    pub(crate) fn backends(precision: Precision) -> Vec<GpuBackend<Sim>> {
        let devices = [Order::Forward, Order::Reverse]
            .map(|order| Sim::new(order).with_dialect(Dialect::Metal));
        devices
            .map(|device| GpuBackend::new(device, GpuConfig { precision }))
            .into()
    }
}
