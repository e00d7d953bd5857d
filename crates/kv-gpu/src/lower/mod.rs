//! [`Lower`]: turns a graph into steps, node by node.
//!
//! Each family of operations has a file that says which kernels compute it. Invariant: a value's
//! place in scratch memory is not used for another before its last reader. Knows no device.

mod activations;
mod attend;
mod custom;
mod delta;
mod distances;
mod elementwise;
mod embed;
mod experts;
mod linear;
mod norm;
mod plain_attention;
mod recurrent;
mod rope;
mod rows;
mod sparse;
mod store;
mod top_k;

use std::collections::HashMap;
use std::sync::Arc;

use bytemuck::Pod;
use kv_backend::{BackendError, RowKind};
use kv_core::LayerIdx;
use kv_graph::{DType, Graph, Node, NodeId, Op};
use kv_rows::RowLayout;

use crate::arena::{Scratch, ScratchPlan};
use crate::config::GpuConfig;
use crate::device::Device;
use crate::inputs::{InputPlan, NumberedNode, after, numbered};
use crate::kernels::{check_len, word};
use crate::planes::has_kernels;
use crate::program::{Grid, Launch, Operand, ProgramContext, Step};
use crate::rows::GpuRows;
use crate::weights::{DeviceWeight, GpuWeights, WeightForm};

use activations::PreparedValue;
pub(crate) use store::StoredRows;

/// Lowering fails as compiling does.
type Result<T, E = BackendError> = std::result::Result<T, E>;

/// The context of a graph that is lowered.
pub(crate) struct Context<'a, D: Device> {
    pub(crate) shared: &'a ProgramContext<D>,
    pub(crate) config: GpuConfig,
    pub(crate) graph: &'a Graph,
    pub(crate) weights: &'a GpuWeights<D>,
    pub(crate) layout: &'a RowLayout,
}

/// A graph that is being lowered.
pub(crate) struct Lower<'a, D: Device> {
    pub(crate) context: Context<'a, D>,
    pub(crate) inputs: InputPlan,
    pub(crate) steps: Vec<Step<D>>,
    scratch: ScratchPlan,
    /// By node: the node whose place its value is in, itself except for reshaped values.
    root: Vec<NodeId>,
    /// By node that is a root: the last node that reads the value.
    last_use: Vec<usize>,
    /// Of the graph's weights.
    shapes: HashMap<&'a str, &'a [usize]>,
    places: Vec<Option<Scratch>>,
    /// Places that are needed until the node under way is done.
    temporary: Vec<Scratch>,
    /// Values that were made ready for products, until their last reader.
    quantized: Vec<PreparedValue>,
    /// Nodes that were lowered together with an earlier one.
    done: Vec<bool>,
}

/// A graph that was lowered.
pub(crate) struct LoweredGraph<D: Device> {
    pub(crate) steps: Vec<Step<D>>,
    pub(crate) inputs: InputPlan,
    pub(crate) scratch_bytes: usize,
    /// The places of the graph's outputs; `None` where they have no values.
    pub(crate) outputs: Vec<Option<Operand<D>>>,
}

/// Lowers a graph whose weights and rows were checked.
pub(crate) fn lower<D: Device>(context: Context<'_, D>) -> Result<LoweredGraph<D>> {
    let graph = context.graph;
    let mut lower = Lower::new(context);
    for (id, node) in numbered(graph) {
        check_len(node.n_values(), &node.name)?;
        if !lower.done[id.as_usize()] && has_work(node) {
            lower.node((id, node))?;
        }
        lower.release(id.as_usize());
    }
    let outputs = graph.outputs().iter().map(|&id| lower.value(id));
    Ok(LoweredGraph {
        outputs: outputs.collect(),
        scratch_bytes: lower.scratch.bytes(),
        steps: lower.steps,
        inputs: lower.inputs,
    })
}

/// True if there is anything to compute: values, or rows or states to store.
fn has_work(node: &Node) -> bool {
    let stores = node.dtype == DType::None || matches!(node.op, Op::Custom { .. });
    !matches!(node.op, Op::Input(_)) && (stores || node.n_values() > 0)
}

impl<'a, D: Device> Lower<'a, D> {
    fn new(context: Context<'a, D>) -> Self {
        let graph = context.graph;
        let n = graph.nodes().len();
        let mut root: Vec<NodeId> = Vec::with_capacity(n);
        for (id, node) in numbered(graph) {
            let of = match (&node.op, node.operands.first()) {
                (Op::Reshape, Some(&from)) => root[from.as_usize()],
                _ => id,
            };
            root.push(of);
        }
        let mut last_use: Vec<usize> = (0..n).collect();
        for (at, node) in graph.nodes().iter().enumerate() {
            for operand in &node.operands {
                last_use[root[operand.as_usize()].as_usize()] = at;
            }
        }
        for output in graph.outputs() {
            last_use[root[output.as_usize()].as_usize()] = n;
        }
        Self {
            inputs: InputPlan::new(graph),
            steps: Vec::new(),
            scratch: ScratchPlan::default(),
            root,
            last_use,
            shapes: graph
                .weights()
                .iter()
                .map(|w| (w.name.as_str(), w.shape.as_slice()))
                .collect(),
            places: vec![None; n],
            temporary: Vec::new(),
            quantized: Vec::new(),
            done: vec![false; n],
            context,
        }
    }

    /// Lowers one node.
    fn node(&mut self, at: NumberedNode<'_>) -> Result<()> {
        let (_, node) = at;
        match &node.op {
            Op::Reshape => Ok(()),
            Op::Linear { .. } => self.linear(at),
            Op::Embed { weight } => self.embed(at, weight),
            Op::Route { spec, bias, gain } => {
                self.route(at, spec, [bias, gain].map(Option::as_deref))
            }
            Op::ExpertLinear { .. } => self.expert_linear(at),
            Op::HeadLinear { .. } => self.head_linear(at),
            Op::ExpertScale => self.expert_scale(at),
            Op::ExpertSum => self.expert_sum(at),
            Op::Add if self.add_norm(at)? => Ok(()),
            Op::Add
            | Op::Mul
            | Op::Gate { .. }
            | Op::ClampedGate { .. }
            | Op::Activate { .. }
            | Op::Clamp { .. }
            | Op::Scale { .. }
            | Op::SoftCap { .. } => self.elementwise(at),
            Op::Columns { .. }
            | Op::Concat
            | Op::TakeRows
            | Op::AddRow { .. }
            | Op::Gain { .. }
            | Op::ScaleByPosition { .. } => self.on_rows(at),
            Op::Mix => self.mix(at),
            Op::RmsNorm { weight, eps } => self.rms_norm(at, (weight.as_deref(), *eps)),
            Op::LayerNorm { weight, bias, eps } => self.layer_norm(at, [weight, bias], *eps),
            Op::GaussianTopK { deviations } => self.gaussian_top_k(at, *deviations),
            Op::Rope { rope } => self.rope(at, rope, None),
            Op::RopeSections { rope, sections } => self.rope(at, rope, Some(*sections)),
            Op::StoreKv { .. } | Op::StoreK { .. } => self.store(node),
            Op::Attend { .. } | Op::AttendPartial { .. } | Op::AttendBatch { .. } => {
                self.attend(at)
            }
            Op::MergePartials { .. } => self.merge_partials(at),
            Op::Index { layer, index } => self.index(at, *layer, index),
            Op::AttendSparse { layer, spec } => self.attend_sparse(at, *layer, spec),
            Op::Custom { custom } => self.custom(at, custom),
            Op::Conv { layer, conv } => self.conv(at, *layer, conv),
            Op::Scan { layer, scan } => self.scan(at, *layer, scan),
            Op::ScanHeads { layer, scan } => self.scan_heads(at, *layer, scan),
            Op::Decay { decay } => self.decay(at, decay),
            Op::Delta { layer, delta } => self.delta(at, *layer, delta),
            Op::TopK { k } => self.top_k(at, *k),
            Op::Kq { layer, spec } => self.kq(at, *layer, spec),
            Op::KqSoftMax { spec, sinks } => self.kq_soft_max(at, spec, sinks.as_deref()),
            Op::Kqv { layer, spec } => self.kqv(at, *layer, spec),
            _ => Err(self.unsupported(node)),
        }
    }

    /// Gives back the places of values whose last reader was node `at`.
    fn release(&mut self, at: usize) {
        for place in self.temporary.drain(..) {
            self.scratch.give_back(place);
        }
        let Some(node) = self.context.graph.nodes().get(at) else {
            return;
        };
        let own = [self.root[at]];
        let read = node.operands.iter().map(|&id| self.root(id));
        for root in read.chain(own).collect::<Vec<_>>() {
            if self.last_use[root.as_usize()] > at {
                continue;
            }
            let own = self.places[root.as_usize()].take();
            let quantized = self.quantized.extract_if(.., |q| q.root == root);
            let places = own.into_iter().chain(quantized.map(|q| q.place));
            places.for_each(|place| self.scratch.give_back(place));
        }
    }

    /// The node whose place the value of node `id` is in.
    fn root(&self, id: NodeId) -> NodeId {
        self.root.get(id.as_usize()).copied().unwrap_or(id)
    }

    /// The nodes after `id`, up to the last that reads its value.
    fn readers(&self, id: NodeId) -> impl Iterator<Item = NumberedNode<'a>> + use<'a, D> {
        let last = self.last_use.get(id.as_usize()).copied().unwrap_or(0);
        after(self.context.graph, id).take(last.saturating_sub(id.as_usize()))
    }

    /// The place of a node's values; `None` where it has none or was not lowered.
    fn value(&self, id: NodeId) -> Option<Operand<D>> {
        let root = self.root(id);
        if let Some(word) = self.inputs.value(root) {
            return Some(Operand::Inputs(word * 4));
        }
        let place = self.places.get(root.as_usize()).copied().flatten()?;
        Some(Operand::Scratch(place.at))
    }

    /// True if a value is there, or is a norm or a product of one that is, and was computed now.
    fn compute_ahead(&mut self, id: NodeId) -> Result<bool> {
        let root = self.root(id);
        let Some(node) = self.context.graph.node(root) else {
            return Ok(false);
        };
        if self.value(root).is_some() {
            return Ok(true);
        }
        let can_be = matches!(node.op, Op::RmsNorm { .. } | Op::Linear { .. })
            && node.operands.iter().all(|&id| self.value(id).is_some());
        if can_be {
            self.node((root, node))?;
            self.done[root.as_usize()] = true;
        }
        Ok(can_be)
    }

    /// The place of operand number `at` of a node.
    ///
    /// # Errors
    /// [`BackendError::Input`] where it has no values, which no builder lets pass.
    pub(crate) fn operand(&self, node: &Node, at: usize) -> Result<Operand<D>> {
        let value = node.operands.get(at).and_then(|&id| self.value(id));
        value.ok_or_else(|| BackendError::Input {
            input: "graph",
            reason: format!("node '{}' has no operand {at}", node.name),
        })
    }

    /// The first `n` operands of a node.
    ///
    /// # Errors
    /// As [`Lower::operand`].
    pub(crate) fn operands(&self, node: &Node, n: usize) -> Result<Vec<Operand<D>>> {
        (0..n).map(|at| self.operand(node, at)).collect()
    }

    /// The node that is operand number `at` of a node.
    ///
    /// # Errors
    /// [`BackendError::Input`] where there is none, which no builder lets pass.
    pub(crate) fn operand_node(&self, node: &Node, at: usize) -> Result<&'a Node> {
        kv_backend::checks::operand(self.context.graph, node, at)
    }

    /// The word of the inputs at which the values of an operand that is an input begin.
    ///
    /// # Errors
    /// [`BackendError::Input`] where it is no input, which no builder lets pass.
    pub(crate) fn input_word(&self, node: &Node, operand: Option<NodeId>) -> Result<u32> {
        let at = operand.and_then(|id| self.inputs.value(id));
        word(at.ok_or_else(|| BackendError::Input {
            input: "graph",
            reason: format!("an operand of node '{}' is no input", node.name),
        })?)
    }

    /// A place for the values of node `id`.
    pub(crate) fn result(&mut self, id: NodeId) -> Operand<D> {
        let n_values = self.context.graph.node(id).map_or(0, Node::n_values);
        self.result_with(id, n_values * 4)
    }

    /// A place for the values of node `id` and what belongs to them, `bytes` together.
    pub(crate) fn result_with(&mut self, id: NodeId, bytes: usize) -> Operand<D> {
        let place = self.scratch.take(bytes);
        self.places[id.as_usize()] = Some(place);
        Operand::Scratch(place.at)
    }

    /// A place that is needed until the node under way is done.
    pub(crate) fn temporary(&mut self, bytes: usize) -> Operand<D> {
        let place = self.scratch.take(bytes);
        self.temporary.push(place);
        Operand::Scratch(place.at)
    }

    /// A weight that `node` names, on the device.
    ///
    /// # Errors
    /// As [`GpuWeights::get`].
    pub(crate) fn weight(
        &self,
        name: &str,
        node: &Node,
        form: WeightForm,
    ) -> Result<Arc<DeviceWeight<D>>> {
        let Context {
            shared, weights, ..
        } = self.context;
        let host = self.host_weight(name, node)?;
        if form == WeightForm::Stored && !has_kernels(host.format()) {
            return Err(BackendError::UnsupportedFormat {
                backend: shared.device.name(),
                name: name.to_owned(),
                format: host.format(),
                node: node.name.to_string(),
            });
        }
        weights.get(shared, &host, form)
    }

    /// A weight as floats.
    pub(crate) fn floats(&self, name: &str, node: &Node) -> Result<Operand<D>> {
        let weight = self.weight(name, node, WeightForm::Floats)?;
        Ok(Operand::Weight(weight))
    }

    /// The same; without a name something that kernels are given and do not read.
    pub(crate) fn floats_or(
        &self,
        name: Option<&str>,
        node: &Node,
        unread: &Operand<D>,
    ) -> Result<Operand<D>> {
        name.map_or_else(|| Ok(unread.clone()), |name| self.floats(name, node))
    }

    /// A weight that `node` names, on the host.
    ///
    /// # Errors
    /// If it is absent or has another shape.
    pub(crate) fn host_weight(&self, name: &str, node: &Node) -> Result<kv_graph::weights::Weight> {
        let shape = self.shapes.get(name).copied().unwrap_or_default();
        self.context.weights.host(name, shape, &node.name)
    }

    /// The buffer of some rows.
    ///
    /// # Errors
    /// [`BackendError::NoRows`].
    pub(crate) fn rows(&self, layer: LayerIdx, kind: RowKind) -> Result<Operand<D>> {
        GpuRows::<D>::number(self.context.layout, layer, kind).map(Operand::Rows)
    }

    /// Adds a launch. `settings` is the kernel's last argument.
    ///
    /// # Errors
    /// If the device has no such kernel.
    pub(crate) fn launch(
        &mut self,
        kernel: &str,
        grid: Grid,
        operands: Vec<Operand<D>>,
        settings: &impl Pod,
    ) -> Result<()> {
        self.steps.push(Step::Launch(Launch {
            kernel: self.context.shared.kernel(kernel)?,
            grid: grid.checked()?,
            operands,
            settings: bytemuck::bytes_of(settings).to_vec(),
        }));
        Ok(())
    }

    /// The error for an operation, or a variant of one, that this version does not know.
    pub(crate) fn unsupported(&self, node: &Node) -> BackendError {
        BackendError::UnsupportedOp {
            backend: self.context.shared.device.name(),
            op: node.op.name(),
            node: node.name.clone(),
        }
    }
}

/// The last dimension of a node.
fn width(node: &Node) -> usize {
    node.shape.last().copied().unwrap_or(1)
}
