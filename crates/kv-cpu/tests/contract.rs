//! The contract suite, for every instruction set of this machine and for one thread and several.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::num::NonZeroUsize;

use kv_contract::{Subject, Tolerance};
use kv_cpu::activations::ActivationKind;
use kv_cpu::isa::Isa;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig};

fn backend(isa: Isa, n_threads: usize, kind: ActivationKind) -> CpuBackend {
    CpuBackend::new(CpuConfig {
        n_threads: NonZeroUsize::new(n_threads),
        isa: Some(isa),
        activations: ActivationChoice::Always(kind),
        ..CpuConfig::default()
    })
    .unwrap()
}

fn subject(isa: Isa, n_threads: usize) -> Subject<CpuBackend> {
    // Activations of quantised weights are rounded to int8 blocks of 32: half a step of the largest
    // of 32 values, so a few hundredths of a product's root mean square at the worst of thousands.
    // Those of BF16 weights to BF16, where there are products of it: to eight bits, each by itself.
    let tolerance = Tolerance {
        linear_quantised: 0.05,
        linear_bf16: match isa {
            Isa::Avx512Bf16 => 0.01,
            _ => Tolerance::default().linear_bf16,
        },
        ..Tolerance::default()
    };
    Subject::new(backend(isa, n_threads, ActivationKind::Int8)).with_tolerance(tolerance)
}

/// Nothing is rounded on the way to quantised weights: the default tolerances hold.
mod exact {
    use super::{ActivationKind, Isa, Subject, backend};

    kv_contract::backend_contract!(|| Subject::new(backend(Isa::detect(), 2, ActivationKind::F32)));
}

/// The fastest instruction set, with helpers.
mod fastest {
    kv_contract::backend_contract!(|| super::subject(super::Isa::detect(), 3));
}

/// The specification.
mod scalar {
    kv_contract::backend_contract!(|| super::subject(super::Isa::Scalar, 1));
}

/// The ones between, where the machine has them; the fastest again where it does not.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod between {
    use super::Isa;

    fn available(isa: Isa) -> Isa {
        if isa.is_available() {
            isa
        } else {
            Isa::detect()
        }
    }

    macro_rules! contracts {
        ($($name:ident: $isa:ident),+) => {
            $(mod $name {
                use super::{Isa, available};

                kv_contract::backend_contract!(|| crate::subject(available(Isa::$isa), 2));
            })+
        };
    }

    #[cfg(target_arch = "x86_64")]
    contracts!(avx2: Avx2, avx_vnni: AvxVnni, avx512_vnni: Avx512Vnni);
    #[cfg(target_arch = "aarch64")]
    contracts!(neon: Neon, neon_dot: NeonDot);
}
