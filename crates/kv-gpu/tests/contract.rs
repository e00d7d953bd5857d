//! The contract suite on the simulator, whose threads run in either order, in both precisions, with
//! the kernels as C++ and as Metal.
//!
//! All combinations of types and cases are tried in one of the five ways, a sample of them in the
//! others: all of them in all would take several times as long. Metal's kernels run in one order of
//! threads each: what is theirs alone is in dialect headers, and the kernels are those of CUDA.

mod tolerance;

use kv_contract::{Combinations, Subject};
use kv_gpu::sim::{Dialect, Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision, has_kernels};

fn subject(order: Order, precision: Precision) -> Subject<GpuBackend<Sim>> {
    let backend = GpuBackend::new(Sim::new(order), GpuConfig { precision });
    Subject::new(backend)
        .with_combinations(Combinations::Sampled)
        .with_formats(has_kernels)
}

/// With the kernels that Metal gets.
fn metal(order: Order, precision: Precision) -> Subject<GpuBackend<Sim>> {
    let device = Sim::new(order).with_dialect(Dialect::Metal);
    let backend = GpuBackend::new(device, GpuConfig { precision });
    Subject::new(backend)
        .with_combinations(Combinations::Sampled)
        .with_formats(has_kernels)
}

mod forward {
    use super::{Combinations, Order, Precision, subject};

    kv_contract::backend_contract!(|| {
        subject(Order::Forward, Precision::Precise).with_combinations(Combinations::All)
    });
}

mod reverse {
    use super::{Order, Precision, subject};

    kv_contract::backend_contract!(|| subject(Order::Reverse, Precision::Precise));
}

/// With activations of int8 and products on tensor cores.
mod fast {
    use super::{Order, Precision, subject, tolerance};

    kv_contract::backend_contract!(|| {
        subject(Order::Reverse, Precision::Fast).with_tolerance(tolerance::FAST)
    });
}

mod metal {
    use super::{Order, Precision, metal, tolerance};

    mod precise {
        use super::{Order, Precision, metal};

        kv_contract::backend_contract!(|| metal(Order::Forward, Precision::Precise));
    }

    /// With products on matrices of SIMD groups.
    mod fast {
        use super::{Order, Precision, metal, tolerance};

        kv_contract::backend_contract!(|| {
            metal(Order::Reverse, Precision::Fast).with_tolerance(tolerance::FAST)
        });
    }
}
