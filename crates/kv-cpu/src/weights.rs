//! [`CpuWeights`]: a model's weights as they lie in their file and as they are repacked, and how precisely their
//! inputs are kept.
//!
//! Products with quantised weights can take their activations as int8 (with a scale for every 32 or 256 values, as the format
//! wants: what makes prompts fast), those with BF16 theirs as BF16, or both as `f32` (nothing is lost). A model whose matrices
//! fit in a processor's cache is fast either way, and the differences between its logits are small, so it keeps every bit.
//! Knows nothing of graphs.

use std::fmt;
use std::sync::Arc;

use kv_core::backend::{BackendError, CustomOps};
use kv_core::block::BlockFormat;
use kv_core::graph::Graph;
use kv_core::weights::WeightSource;

use crate::activations::ActivationKind;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::matrix::int8_kind;
use crate::repack::{PackedRows, PackedWeights, RepackChoice};
use crate::team::Lead;

/// Models with at most this many bytes of weights that meet rounded activations keep theirs as `f32`.
const EXACT_UP_TO: usize = 8 << 20;

/// How activations meet quantised weights, and those of BF16 where the processor has products of BF16. All others meet
/// `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActivationChoice {
    /// As `f32` for models of at most 8 MiB of such weights, else as [`ActivationKind::Int8`] says.
    #[default]
    Auto,
    /// Always as this: as `f32`, or (whichever other kind) rounded as each format wants, to int8 with a scale for every 32
    /// or 256 values, or to BF16.
    Always(ActivationKind),
}

/// Weights as they lie in their file, and what has been repacked of them.
pub struct CpuWeights {
    pub(crate) source: Arc<dyn WeightSource>,
    /// Whether activations are kept as `f32`, whatever they meet.
    is_exact: bool,
    /// What custom operations of its graphs compute.
    pub(crate) custom: CustomOps,
    repack: RepackChoice,
    packed: PackedWeights,
    kernels: &'static Kernels,
}

impl CpuWeights {
    pub(crate) fn new(
        source: Arc<dyn WeightSource>,
        (choice, repack): (ActivationChoice, RepackChoice),
        kernels: &'static Kernels,
        custom: CustomOps,
    ) -> Self {
        let is_exact = match choice {
            ActivationChoice::Always(kind) => kind == ActivationKind::F32,
            ActivationChoice::Auto => {
                let meets_rounded = |format| rounded_kind(kernels, format) != ActivationKind::F32;
                bytes_of(&*source, meets_rounded) <= EXACT_UP_TO
            }
        };
        Self {
            source,
            is_exact,
            custom,
            repack,
            packed: PackedWeights::default(),
            kernels,
        }
    }

    /// What a matrix of this format wants its activations to be.
    pub(crate) fn activations_for(&self, format: BlockFormat) -> ActivationKind {
        match self.is_exact {
            true => ActivationKind::F32,
            false => rounded_kind(self.kernels, format),
        }
    }

    /// Packs what a graph multiplies with, if that is wanted and not done yet.
    ///
    /// # Errors
    /// As [`PackedWeights::pack`].
    pub(crate) fn pack_for(&self, graph: &Graph, lead: &mut Lead<'_>) -> Result<(), BackendError> {
        if self.repack == RepackChoice::Never {
            return Ok(());
        }
        let get = |name: &str| self.source.get(name);
        let fns_of = |format| match self.activations_for(format) {
            // Packed quantised weights take int8 activations only.
            ActivationKind::F32 if is_quantised(format) => None,
            ActivationKind::Bf16 => self.kernels.pack_bf16,
            _ => self.kernels.pack,
        };
        self.packed.pack(graph, get, fns_of, lead)
    }

    /// For which instruction set they are packed.
    pub(crate) fn isa(&self) -> Isa {
        self.kernels.isa
    }

    /// Bytes of the weights that were packed, or copied to huge pages, for what was compiled so far.
    /// All others are read as stored.
    pub fn packed_bytes(&self) -> usize {
        self.packed.n_bytes()
    }

    /// The packed rows of a weight, if there are any.
    pub(crate) fn packed(&self, name: &str) -> Option<PackedRows> {
        self.packed.get(name)
    }
}

/// How weights of this format meet activations that may be rounded.
fn rounded_kind(kernels: &Kernels, format: BlockFormat) -> ActivationKind {
    match format {
        // Elsewhere nothing would be won by rounding.
        BlockFormat::BF16 if kernels.isa == Isa::Avx512Bf16 => ActivationKind::Bf16,
        _ => int8_kind(format),
    }
}

/// Bytes of all weights of some formats.
fn bytes_of(source: &dyn WeightSource, is_counted: impl Fn(BlockFormat) -> bool) -> usize {
    let names = source.names().into_iter();
    let weights = names.filter_map(|name| source.get(&name));
    let counted = weights.filter(|w| is_counted(w.format()));
    counted.map(|w| w.bytes().len()).sum()
}

/// Whether values of this format share scales.
pub(crate) fn is_quantised(format: BlockFormat) -> bool {
    format.block_len() > 1
}

impl fmt::Debug for CpuWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.source.names().len();
        write!(f, "CpuWeights({n} weights, exact: {})", self.is_exact)
    }
}
