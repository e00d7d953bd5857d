//! The backend contract suite on every ISA of this machine, with one thread and several.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::num::NonZeroUsize;

use kv_contract::{KnownLimit, Subject, Tolerance};
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
    // Activations of quantized weights are quantized to int8 blocks of 32: half a step of the
    // largest of 32 values, a few hundredths of a dot product's root mean square at the worst of
    // thousands. Those of BF16 weights are rounded to BF16 if the ISA has BF16 dot products.
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

/// `F32` activations for quantized weights: the default tolerances hold.
mod exact {
    use super::{ActivationKind, Isa, Subject, backend};

    kv_contract::backend_contract!(|| Subject::new(backend(Isa::detect(), 2, ActivationKind::F32)));
}

/// The best ISA, with helper threads.
mod fastest {
    kv_contract::backend_contract!(|| super::subject(super::Isa::detect(), 3));
}

/// Scalar code, the specification.
mod scalar {
    kv_contract::backend_contract!(|| super::subject(super::Isa::Scalar, 1));
}

/// The ISAs in between; the best one again in place of those that the machine lacks.
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

/// Two backends, of which the first has the rows of layer 0.
mod split {
    use kv_backend::Split;
    use kv_core::LayerIdx;
    use kv_core::ids::PartIdx;
    use kv_cpu::CpuBackend;
    use kv_graph::{GraphBuilder, GraphShape, Input, SplitPoint};

    use super::{ActivationKind, Isa, KnownLimit, Subject, backend};

    /// After a block that stores rows of layer 0, and before one of layer 1.
    fn point() -> SplitPoint {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        });
        let x = b.input(Input::Embeddings { dim: 8 }).unwrap();
        let cells = b.input(Input::Cells { part: PartIdx(0) }).unwrap();
        for layer in [LayerIdx(0), LayerIdx(1)] {
            let mut b = b.scope(layer);
            let k = b.reshape("k", x, &[1, 1, 8]).unwrap();
            b.store_k("stored", layer, [k, cells]).unwrap();
        }
        SplitPoint::new(&b.finish(&[x]).unwrap(), 1).unwrap()
    }

    fn subject() -> Subject<Split<CpuBackend, CpuBackend>> {
        let half = |n_threads| backend(Isa::detect(), n_threads, ActivationKind::F32);
        let known =
            ACROSS.map(|test| KnownLimit::fails(test, "layers 0 and 1 share rows or a node"));
        Subject::new(Split::new(half(2), half(1), point())).with_known(&known)
    }

    /// Tests of graphs that cannot be split there.
    const ACROSS: [&str; 11] = [
        "bad_attention_is_refused",
        "graphs_with_shared_and_latent_layers_compute",
        "indexers_choose_what_is_attended",
        "indexers_need_keys_of_their_width",
        "indexers_that_may_choose_everything_leave_nothing_out",
        "partial_results_have_logarithms",
        "recent_and_old_rows_merge",
        "rows_that_see_nothing_merge_to_zero",
        "states_of_latents_come_back",
        "stores_that_do_not_suit_their_rows_are_refused",
        "values_can_be_the_beginnings_of_keys",
    ];

    kv_contract::backend_contract!(subject);
}

/// Two backends, of which the second computes the experts.
mod detached {
    use kv_backend::{DetachedExperts, ExpertShare};
    use kv_cpu::CpuBackend;

    use super::{ActivationKind, Isa, Subject, backend};

    fn subject() -> Subject<DetachedExperts<CpuBackend, CpuBackend>> {
        let of = |n_threads| backend(Isa::detect(), n_threads, ActivationKind::F32);
        let share = ExpertShare {
            weights: ["d", "g", "u", "w"].map(str::to_owned).into(),
            n_layers: 1,
        };
        Subject::new(DetachedExperts::new(of(2), of(1), share).unwrap())
    }

    kv_contract::backend_contract!(subject);
}
