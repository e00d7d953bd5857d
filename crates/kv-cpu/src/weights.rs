//! [`CpuWeights`]: a model's weights, packed as graphs need them, and the kind of their
//! activations.
//!
//! Products with quantized weights can take int8 activations (with a scale for every 32 or 256
//! values, as the format wants; this makes prompts fast), those with BF16 weights BF16 activations,
//! or both can take `f32`, which loses nothing. A model whose matrices fit in a processor's cache
//! is fast either way, and the differences between its logits are small, so it keeps every bit.
//! Knows of graphs only which weights they multiply with.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, OnceLock};

use kv_backend::{BackendError, CustomOps, ExpertMeter, OnProgress};
use kv_block::BlockFormat;
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, NodeId, Op};

use crate::activations::ActivationKind;
use crate::backend::CpuExpertPlan;
use crate::expert_store::{ExpertMemory, ExpertStore};
use crate::isa::Isa;
use crate::kernels::{Kernels, PackFns};
use crate::matrix::{int8_kind, is_quantised};
use crate::repack::{ExpertLayout, PackedRows, PackedWeights, RepackChoice};
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
    /// Where experts are read as they are needed.
    pub(crate) experts: Option<ExpertMemory>,
    /// Counts their hits and reads.
    pub(crate) expert_meter: Arc<ExpertMeter>,
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
    expert_memory: Option<ExpertMemory>,
    expert_meter: Arc<ExpertMeter>,
    /// Begun when a graph with experts is compiled.
    experts: OnceLock<Arc<ExpertStore>>,
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
            expert_memory: options.experts,
            expert_meter: options.expert_meter,
            experts: OnceLock::new(),
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
        self.read_experts_of(graph)?;
        if self.repack == RepackChoice::Never {
            return Ok(());
        }
        let get = |name: &str| {
            let is_kept = self.expert_stack(name).is_none();
            Some(name)
                .filter(|_| is_kept)
                .and_then(|name| self.source.get(name))
        };
        let fns_of = |format| self.pack_fns(format);
        self.packed
            .pack(graph, get, fns_of, &self.on_progress, lead)
    }

    /// Drops the packed rows of these weights.
    ///
    /// # Errors
    /// [`BackendError::KeepsWeights`] where one is read as experts are.
    pub(crate) fn forget(&self, names: &[String]) -> Result<(), BackendError> {
        if let Some(name) = names.iter().find(|name| self.expert_stack(name).is_some()) {
            return Err(BackendError::KeepsWeights {
                backend: "cpu".to_owned(),
                name: name.clone(),
            });
        }
        self.packed.forget(names);
        Ok(())
    }

    /// The memory that [`CpuWeights::pack_for`] would take for these graphs.
    pub(crate) fn plan_packing(&self, graphs: &[Graph]) -> WeightPlan {
        let (names, mut plan) = self.plan_experts(graphs);
        if self.repack == RepackChoice::Never {
            return plan;
        }
        let get = |name: &str| {
            let is_kept = !names.contains(name);
            Some(name)
                .filter(|_| is_kept)
                .and_then(|name| self.source.get(name))
        };
        let others = PackedWeights::plan(graphs.iter(), get, |format| self.pack_fns(format));
        plan.packed += others.packed;
        plan.replaced += others.replaced;
        plan
    }

    /// Begins to hold the experts of a graph within the budget, where there is one.
    fn read_experts_of(&self, graph: &Graph) -> Result<(), BackendError> {
        let Some(memory) = &self.expert_memory else {
            return Ok(());
        };
        let layers = expert_layers(graph, |name| self.expert_stack(name).is_some());
        if layers.is_empty() {
            return Ok(());
        }
        let layout = |name: &str| {
            let weight = self.source.require(name)?;
            let fns = self.expert_fns(weight.format());
            Ok::<_, BackendError>(ExpertLayout::new(weight, fns))
        };
        let of_layer = |layer: ExpertLayer<'_>| {
            let layouts = layer.weights.into_iter().map(layout);
            layouts.filter_map(Result::transpose).collect()
        };
        let layers = layers.into_iter().map(of_layer);
        let layers = layers.collect::<Result<Vec<_>, BackendError>>()?;
        let store = match self.experts.get() {
            Some(store) => Arc::clone(store),
            None => {
                let meter = Arc::clone(&self.expert_meter);
                let store = Arc::new(ExpertStore::new(memory.clone(), meter)?);
                // Another graph may be compiled at the same time: its store is taken then.
                Arc::clone(self.experts.get_or_init(|| store))
            }
        };
        store.add(layers)
    }

    /// The names of experts that would be held within the budget, where there is one, and what
    /// they take.
    fn plan_experts(&self, graphs: &[Graph]) -> (HashSet<String>, WeightPlan) {
        let (mut names, mut plan) = (HashSet::new(), WeightPlan::default());
        let Some(memory) = &self.expert_memory else {
            return (names, plan);
        };
        let experts = &mut plan.experts;
        for graph in graphs {
            for layer in expert_layers(graph, |name| names.contains(name)) {
                for name in layer.weights {
                    names.insert(name.to_owned());
                    let Some(weight) = self.source.get(name) else {
                        continue;
                    };
                    plan.replaced += weight.bytes().len();
                    let fns = self.expert_fns(weight.format());
                    let Some(layout) = ExpertLayout::new(weight, fns) else {
                        continue;
                    };
                    let n_bytes = layout.n_bytes();
                    experts.total += layout.n_experts() * n_bytes;
                    experts.largest = experts.largest.max(n_bytes);
                    experts.of_token += layer.n_used * n_bytes;
                }
            }
        }
        let budget = usize::try_from(memory.budget()).unwrap_or(usize::MAX);
        experts.held = experts.total.min(budget);
        plan.packed = experts.held;
        (names, plan)
    }

    /// The number of a weight's experts, and where they are, if they are read as they are needed.
    pub(crate) fn expert_stack(&self, name: &str) -> Option<(Arc<ExpertStore>, u32)> {
        let store = self.experts.get()?;
        Some((Arc::clone(store), store.stack(name)?))
    }

    fn expert_fns(&self, format: BlockFormat) -> Option<&'static PackFns> {
        if self.repack == RepackChoice::Never {
            None
        } else {
            self.pack_fns(format)
        }
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

/// The memory that weights take, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WeightPlan {
    /// Of packed matrices, and of experts within their budget.
    pub(crate) packed: usize,
    /// Of the same matrices in their file, with all experts.
    pub(crate) replaced: usize,
    pub(crate) experts: CpuExpertPlan,
}

/// The experts that one router chooses from.
struct ExpertLayer<'g> {
    route: NodeId,
    /// Experts that a token goes through.
    n_used: usize,
    weights: Vec<&'g str>,
}

/// The weights of a graph's experts that are not known yet, by the route that chooses from them.
fn expert_layers(graph: &Graph, is_known: impl Fn(&str) -> bool) -> Vec<ExpertLayer<'_>> {
    let mut layers: Vec<ExpertLayer<'_>> = Vec::new();
    for node in graph.nodes() {
        let (Op::ExpertLinear { weight, .. }, Some(&route)) = (&node.op, node.operands.get(1))
        else {
            continue;
        };
        let is_named = |layer: &ExpertLayer<'_>| layer.weights.contains(&weight.as_str());
        if layers.iter().any(is_named) || is_known(weight) {
            continue;
        }
        if let Some(layer) = layers.iter_mut().find(|layer| layer.route == route) {
            layer.weights.push(weight);
        } else if let Some(Op::Route { spec, .. }) = graph.node(route).map(|node| &node.op) {
            layers.push(ExpertLayer {
                route,
                n_used: spec.n_used,
                weights: vec![weight],
            });
        }
    }
    layers
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
