//! [`CpuWeights`]: a model's weights, packed as graphs need them, and the kind of their
//! activations.
//!
//! Products with quantized weights can take int8 activations (with a scale for every 32 or 256
//! values, as the format wants; this makes prompts fast), those with BF16 weights BF16 activations,
//! or both can take `f32`, which loses nothing. A model whose matrices fit in a processor's cache
//! is fast either way, and the differences between its logits are small, so it keeps every bit.
//! Knows of graphs only which weights they multiply with.

use std::fmt;
use std::sync::Arc;

use kv_backend::{BackendError, CustomOps, OnProgress};
use kv_core::block::BlockFormat;
use kv_graph::Graph;
use kv_graph::weights::WeightSource;

use crate::activations::ActivationKind;
use crate::isa::Isa;
use crate::kernels::{Kernels, PackFns};
use crate::matrix::{int8_kind, is_quantised};
use crate::repack::{PackedRows, PackedWeights, PackingPlan, RepackChoice};
use crate::team::TeamGuard;

/// Models with at most this many bytes of weights that could take quantized activations keep `f32`.
const EXACT_UP_TO: usize = 8 << 20;

/// The activations of products with quantized weights, and with BF16 where the processor has dot
/// products of BF16. All other weights take `f32`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum ActivationChoice {
    /// As `f32` for models of at most 8 MiB of such weights, else as [`ActivationKind::Int8`] says.
    #[default]
    Auto,
    /// Always `f32`; or, for any other kind, quantized as each format wants: to int8 with a scale
    /// for every 32 or 256 values, or to BF16.
    Always(ActivationKind),
}

/// The way weights are used.
#[derive(Clone, Debug)]
pub(crate) struct WeightOptions {
    pub(crate) activations: ActivationChoice,
    pub(crate) repack: RepackChoice,
    /// The custom operations of the graphs.
    pub(crate) custom: CustomOps,
    /// Takes reports of packing.
    pub(crate) on_progress: OnProgress,
}

/// Weights as they are in their file, and those that are packed.
pub struct CpuWeights {
    pub(crate) source: Arc<dyn WeightSource>,
    /// True if all activations stay `f32`.
    is_exact: bool,
    /// The custom operations of its graphs.
    pub(crate) custom: CustomOps,
    repack: RepackChoice,
    on_progress: OnProgress,
    packed: PackedWeights,
    kernels: &'static Kernels,
}

impl CpuWeights {
    pub(crate) fn new(
        source: Arc<dyn WeightSource>,
        kernels: &'static Kernels,
        options: WeightOptions,
    ) -> Self {
        let is_exact = match options.activations {
            ActivationChoice::Always(kind) => kind == ActivationKind::F32,
            ActivationChoice::Auto => {
                let is_quantizable =
                    |format| quantized_kind(kernels, format) != ActivationKind::F32;
                bytes_of(&*source, is_quantizable) <= EXACT_UP_TO
            }
        };
        Self {
            source,
            is_exact,
            custom: options.custom,
            repack: options.repack,
            on_progress: options.on_progress,
            packed: PackedWeights::default(),
            kernels,
        }
    }

    /// The kind of activations that a matrix of this format takes.
    pub(crate) fn activations_for(&self, format: BlockFormat) -> ActivationKind {
        if self.is_exact {
            ActivationKind::F32
        } else {
            quantized_kind(self.kernels, format)
        }
    }

    /// Packs what a graph multiplies with, if that is wanted and not done yet.
    ///
    /// # Errors
    /// As [`PackedWeights::pack`].
    pub(crate) fn pack_for(
        &self,
        graph: &Graph,
        lead: &mut TeamGuard<'_>,
    ) -> Result<(), BackendError> {
        if self.repack == RepackChoice::Never {
            return Ok(());
        }
        let get = |name: &str| self.source.get(name);
        let fns_of = |format| self.pack_fns(format);
        self.packed
            .pack(graph, get, fns_of, &self.on_progress, lead)
    }

    /// The memory that [`CpuWeights::pack_for`] would take for these graphs.
    pub(crate) fn plan_packing(&self, graphs: &[Graph]) -> PackingPlan {
        if self.repack == RepackChoice::Never {
            return PackingPlan::default();
        }
        let get = |name: &str| self.source.get(name);
        PackedWeights::plan(graphs.iter(), get, |format| self.pack_fns(format))
    }

    /// The way weights of this format are packed, if they are.
    fn pack_fns(&self, format: BlockFormat) -> Option<&'static PackFns> {
        match self.activations_for(format) {
            // Packed quantized weights take int8 activations only.
            ActivationKind::F32 if is_quantised(format) => None,
            ActivationKind::Bf16 => self.kernels.pack_bf16,
            _ => self.kernels.pack,
        }
    }

    /// For which instruction set they are packed.
    pub(crate) fn isa(&self) -> Isa {
        self.kernels.isa
    }

    /// Bytes of the weights that were packed, or copied to huge pages, for what was compiled so
    /// far. All others are read as stored.
    pub fn packed_bytes(&self) -> usize {
        self.packed.n_bytes()
    }

    /// The packed rows of a weight, if there are any.
    pub(crate) fn packed(&self, name: &str) -> Option<PackedRows> {
        self.packed.get(name)
    }
}

/// The kind of activations that weights of this format take where these may be quantized.
fn quantized_kind(kernels: &Kernels, format: BlockFormat) -> ActivationKind {
    match format {
        // Elsewhere rounding makes nothing faster.
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

impl fmt::Debug for CpuWeights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.source.names().len();
        write!(f, "CpuWeights({n} weights, exact: {})", self.is_exact)
    }
}
