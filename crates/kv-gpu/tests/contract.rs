//! The contract suite on the simulator, whose threads run in either order.

mod forward {
    use kv_contract::Subject;
    use kv_gpu::sim::{Order, Sim};
    use kv_gpu::{GpuBackend, GpuConfig, Precision};

    kv_contract::backend_contract!(|| {
        let precision = Precision::Precise;
        let config = GpuConfig { precision };
        Subject::new(GpuBackend::new(Sim::new(Order::Forward), config))
    });
}
