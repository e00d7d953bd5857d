//! The contract suite on the simulator, whose threads run in either order.

use kv_contract::Subject;
use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};

fn precise(order: Order) -> Subject<GpuBackend<Sim>> {
    let precision = Precision::Precise;
    Subject::new(GpuBackend::new(Sim::new(order), GpuConfig { precision }))
}

mod forward {
    kv_contract::backend_contract!(|| super::precise(super::Order::Forward));
}

mod reverse {
    kv_contract::backend_contract!(|| super::precise(super::Order::Reverse));
}
