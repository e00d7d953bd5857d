//! [`CpuWeights`]: a model's weights as they lie in their file and as they are repacked, and how precisely their
//! inputs are kept.
//!
//! Products with quantised weights can take their activations as int8 (with a scale for every 32 or 256
//! values, as the format wants: what makes prompts fast) or as `f32` (nothing is lost). A model whose matrices fit in a processor's cache is
//! fast either way, and the differences between its logits are small, so it keeps every bit. Knows
//! nothing of graphs.

use std::fmt;
use std::sync::Arc;

use kv_core::backend::{BackendError, CustomOps};
use kv_core::block::BlockFormat;
use kv_core::graph::Graph;
use kv_core::weights::WeightSource;

use crate::activations::ActivationKind;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::repack::{RepackChoice, Repacked, RepackedWeights, Repacking};
use crate::team::Lead;

/// Models with at most this many bytes of quantised weights keep their activations as `f32`.
const EXACT_UP_TO: usize = 8 << 20;

/// How activations meet quantised weights. Weights of F32, F16 and BF16 always meet `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActivationChoice {
    /// As `f32` for models of at most 8 MiB of quantised weights, else as int8.
    #[default]
    Auto,
    /// Always as this.
    Always(ActivationKind),
}

/// Weights as they lie in their file, and what has been repacked of them.
pub struct CpuWeights {
    pub(crate) source: Arc<dyn WeightSource>,
    /// What quantised matrices want their activations to be.
    pub(crate) activations: ActivationKind,
    /// What custom operations of its graphs compute.
    pub(crate) custom: CustomOps,
    repack: RepackChoice,
    repacked: Arc<RepackedWeights>,
    kernels: &'static Kernels,
}

impl CpuWeights {
    pub(crate) fn new(
        source: Arc<dyn WeightSource>,
        (choice, repack): (ActivationChoice, RepackChoice),
        kernels: &'static Kernels,
        custom: CustomOps,
    ) -> Self {
        let activations = match choice {
            ActivationChoice::Always(kind) => kind,
            ActivationChoice::Auto if quantised_bytes(&*source) <= EXACT_UP_TO => {
                ActivationKind::F32
            }
            ActivationChoice::Auto => ActivationKind::Int8,
        };
        Self {
            source,
            activations,
            custom,
            repack,
            repacked: Arc::default(),
            kernels,
        }
    }

    /// Takes memory for what a graph multiplies with, if that is to be repacked and has none yet. Runs repack it
    /// ([`RepackedWeights::begin_run`]).
    pub(crate) fn prepare_for(&self, graph: &Graph) -> Arc<RepackedWeights> {
        if self.repack == RepackChoice::Auto {
            let get = |name: &str| self.source.get(name);
            let fns = self.kernels.repack.as_ref();
            // Of quantised weights only int8 meets what is repacked.
            let is_met = |f| !is_quantised(f) || self.activations != ActivationKind::F32;
            self.repacked
                .prepare(graph, get, |format| fns.filter(|_| is_met(format)));
        }
        Arc::clone(&self.repacked)
    }

    /// For which instruction set they are repacked.
    pub(crate) fn isa(&self) -> Isa {
        self.kernels.isa
    }

    /// Repacks what one run would, the first one as well; says whether there is more to do.
    ///
    /// # Errors
    /// As [`RepackedWeights::go_on`].
    pub(crate) fn settle(&self, lead: &mut Lead<'_>) -> Result<bool, BackendError> {
        self.repacked.go_on(lead)
    }

    /// How much of the weights that were compiled with has been repacked. What is not, and will not be, is read as it is
    /// stored.
    pub fn repacking(&self) -> Repacking {
        self.repacked.progress()
    }

    /// The rows of a weight that are repacked or will be, if there are any.
    pub(crate) fn repacked(&self, name: &str) -> Option<Repacked> {
        self.repacked.get(name)
    }
}

fn quantised_bytes(source: &dyn WeightSource) -> usize {
    let weights = source
        .names()
        .into_iter()
        .filter_map(|name| source.get(&name));
    weights
        .filter(|w| is_quantised(w.format()))
        .map(|w| w.bytes().len())
        .sum()
}

/// Whether values of this format share scales.
pub(crate) fn is_quantised(format: BlockFormat) -> bool {
    format.block_len() > 1
}

impl fmt::Debug for CpuWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.source.names().len();
        write!(f, "CpuWeights({n} weights, {:?})", self.activations)
    }
}
