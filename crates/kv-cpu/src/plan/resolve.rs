//! Nodes become symbolic steps: operands are checked and followed through reshapes, weights are
//! looked up, matrices that multiply the same rows are gathered, norms and gates before them and residual
//! sums after are fused.
//!
//! All of it is neutral to the bits of the result: the same values are added in the same order.

mod attend;
mod curves;
mod custom;
mod experts;
mod linear;
mod recurrent;
mod split;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kv_core::backend::BackendError;
use kv_core::graph::{Graph, Input, Node, NodeId, Op};
use kv_core::layers::{LayerRows, RowLayout};
use kv_core::rope::{RopeSections, RopeSpec};
use kv_core::weights::Weight;
use kv_core::{LayerIdx, PartIdx};

use super::{Change, Needs, PartNeeds, RopeTable, Step};
use crate::matrix::Matrix;
use crate::weights::CpuWeights;

/// A value of the graph that steps compute with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value {
    /// The result of a node.
    Node(NodeId),
    /// The caller's embedding rows, by the input node.
    Embeddings(NodeId),
}

impl Value {
    fn id(self) -> NodeId {
        match self {
            Self::Node(id) | Self::Embeddings(id) => id,
        }
    }

    pub(super) fn shape(self, graph: &Graph) -> (usize, usize) {
        graph
            .node(self.id())
            .map_or((0, 0), |n| (n.n_rows(), n.row_len()))
    }

    pub(super) fn len(self, graph: &Graph) -> usize {
        let (rows, width) = self.shape(graph);
        rows * width
    }
}

/// A graph as steps over its own values.
pub(super) struct Resolved {
    pub(super) steps: Vec<Step<Value>>,
    pub(super) ropes: Vec<RopeTable>,
    pub(super) needs: Needs,
    pub(super) outputs: Vec<Value>,
}

struct Resolver<'a> {
    graph: &'a Graph,
    weights: &'a CpuWeights,
    layout: &'a RowLayout,
    matrices: HashMap<&'a str, Arc<Matrix>>,
    vectors: HashMap<&'a str, Arc<[f32]>>,
    /// What stands for the result of a node: itself, or what it was fused into.
    stands_for: HashMap<NodeId, Value>,
    n_uses: HashMap<NodeId, usize>,
    finished: HashSet<NodeId>,
    out: Resolved,
}

impl Resolved {
    pub(super) fn new(
        graph: &Graph,
        weights: &CpuWeights,
        layout: &RowLayout,
    ) -> Result<Self, BackendError> {
        let out = Self {
            steps: Vec::new(),
            ropes: Vec::new(),
            needs: Needs::default(),
            outputs: Vec::new(),
        };
        let mut resolver = Resolver {
            graph,
            weights,
            layout,
            matrices: HashMap::new(),
            vectors: HashMap::new(),
            stands_for: HashMap::new(),
            n_uses: HashMap::new(),
            finished: HashSet::new(),
            out,
        };
        let operands = graph.nodes().iter().flat_map(|n| &n.operands);
        for &id in operands.chain(graph.outputs()) {
            *resolver.n_uses.entry(id).or_default() += 1;
        }
        for (at, node) in graph.nodes().iter().enumerate() {
            let id = NodeId(u32::try_from(at).unwrap_or(u32::MAX));
            if !resolver.finished.contains(&id) {
                resolver.node(id, node)?;
            }
        }
        for &output in graph.outputs() {
            let node = &graph.nodes()[output.as_usize()];
            let value = resolver.value(node, output)?;
            resolver.out.outputs.push(value);
        }
        Ok(resolver.out)
    }
}

fn unsupported(node: &Node) -> BackendError {
    BackendError::UnsupportedOp {
        backend: "cpu",
        op: node.op.name(),
        node: node.name.clone(),
    }
}

impl<'a> Resolver<'a> {
    fn node(&mut self, id: NodeId, node: &'a Node) -> Result<(), BackendError> {
        let out = Value::Node(id);
        let step = match &node.op {
            Op::Input(input) => return self.input(id, input, node),
            Op::Reshape => {
                let value = self.operand(node, 0)?;
                self.same_len(node, value)?;
                self.stands_for.insert(id, value);
                return Ok(());
            }
            Op::Linear { .. } => return self.linear(id, node),
            Op::Embed { weight } => self.embed(node, weight, out)?,
            Op::AddRow { weight, row } => self.add_row(node, (weight, *row), out)?,
            Op::RmsNorm { weight, eps } => {
                let x = self.operand(node, 0)?;
                self.same_len(node, x)?;
                let dim = node.shape.last().copied().unwrap_or(0);
                let gain = match weight {
                    Some(weight) => self.vector(weight, node)?,
                    None => vec![1.0; dim].into(),
                };
                let n_groups = gain.len() / dim.max(1);
                if dim == 0 || n_groups * dim != gain.len() || n_groups == 0 {
                    return Err(unsupported(node));
                }
                if n_groups > 1 && node.row_len() != gain.len() {
                    return Err(unsupported(node));
                }
                let eps = *eps;
                Step::RmsNorm {
                    x,
                    gain,
                    dim,
                    eps,
                    out,
                }
            }
            Op::Rope { rope } | Op::RopeSections { rope, .. } => {
                let sections = match node.op {
                    Op::RopeSections { sections, .. } => Some(sections),
                    _ => None,
                };
                let wanted = match sections {
                    None => Input::Positions,
                    Some(_) => Input::Coordinates,
                };
                self.operand_input(node, 1, |i| *i == wanted)?;
                let &[n, _, dim] = &*node.shape else {
                    return Err(unsupported(node));
                };
                if n != self.graph.shape().n_tokens || rope.n_rot > dim {
                    return Err(unsupported(node));
                }
                let table = self.rope((rope, sections), node)?;
                self.change(node, Change::Rope { table, dim }, out)?
            }
            Op::Add => {
                let other = self.operand(node, 1)?;
                self.change(node, Change::Add(other), out)?
            }
            Op::Mul => {
                let other = self.operand(node, 1)?;
                self.change(node, Change::Mul(other), out)?
            }
            Op::Scale { factor } => self.change(node, Change::Scale(*factor), out)?,
            Op::Gate { activation } => {
                let up = self.operand(node, 1)?;
                let step = self.change(node, Change::Gate(*activation, up), out)?;
                if self.gate_products(node, *activation, out)? {
                    self.stands_for.insert(id, out);
                    return Ok(());
                }
                step
            }
            Op::Activate { activation } => self.change(node, Change::Activate(*activation), out)?,
            Op::Columns { first } => {
                let x = self.operand(node, 0)?;
                let (rows, width) = x.shape(self.graph);
                if rows != node.n_rows() || first.saturating_add(node.row_len()) > width {
                    return Err(unsupported(node));
                }
                let first = *first;
                Step::Columns { x, first, out }
            }
            Op::LayerNorm { weight, bias, eps } => {
                self.layer_norm(node, (weight, bias.as_deref()), (*eps, out))?
            }
            Op::SoftCap { cap } => self.change(node, Change::SoftCap(*cap), out)?,
            Op::ClampedGate { slope, limit } => {
                let change = Change::ClampedGate((*slope, *limit), self.operand(node, 1)?);
                self.change(node, change, out)?
            }
            Op::ScaleByPosition { scale } => {
                self.operand_input(node, 1, |i| matches!(i, Input::Positions))?;
                self.change(node, Change::ScaleByPosition(*scale), out)?
            }
            Op::Route { spec } => self.route(node, *spec, out)?,
            Op::ExpertLinear { weight, bias } => {
                self.expert_linear(node, (weight, bias.as_deref()), out)?
            }
            Op::ExpertWeigh => self.expert_weigh(node, out)?,
            Op::ExpertSum => self.expert_sum(node, out)?,
            Op::Conv { layer, conv } => self.conv(node, (*layer, conv), out)?,
            Op::Scan { layer, scan } => self.scan(node, (*layer, scan), out)?,
            Op::ScanHeads { layer, scan } => self.scan_heads(node, (*layer, scan), out)?,
            Op::StoreKv { layer } => self.store(node, *layer)?,
            Op::StoreK { layer } => self.store_k(node, *layer)?,
            Op::Attend { layer, spec, .. } => self.attend(node, (*layer, *spec), out)?,
            Op::AttendBatch { spec, .. } => self.attend_batch(node, *spec, out)?,
            Op::Custom { custom } => self.custom(node, custom, out)?,
            Op::Kq { .. } | Op::KqSoftMax { .. } | Op::Kqv { .. } => self.plain(node, out)?,
            Op::TakeRows => {
                self.operand_input(node, 1, |i| matches!(i, Input::OutputRows))?;
                let x = self.operand(node, 0)?;
                let fits = x.shape(self.graph).1 == node.row_len()
                    && x.shape(self.graph).0 == self.graph.shape().n_tokens
                    && node.n_rows() == self.graph.shape().n_outputs;
                if !fits {
                    return Err(unsupported(node));
                }
                Step::TakeRows { x, out }
            }
            _ => return Err(unsupported(node)),
        };
        self.out.steps.push(step);
        self.stands_for.insert(id, out);
        Ok(())
    }

    fn change(
        &self,
        node: &Node,
        change: Change<Value>,
        out: Value,
    ) -> Result<Step<Value>, BackendError> {
        let x = self.operand(node, 0)?;
        self.same_len(node, x)?;
        if let Some(y) = change.other() {
            self.same_len(node, y)?;
        }
        Ok(Step::Change { x, change, out })
    }

    fn input(&mut self, id: NodeId, input: &Input, node: &Node) -> Result<(), BackendError> {
        let needs = &mut self.out.needs;
        match *input {
            Input::Tokens => needs.tokens_below = needs.tokens_below.or(Some(usize::MAX)),
            Input::Embeddings { dim } => {
                if *needs.embedding_dim.get_or_insert(dim) != dim {
                    return Err(unsupported(node));
                }
                self.stands_for.insert(id, Value::Embeddings(id));
            }
            Input::Positions => needs.positions = true,
            Input::Coordinates => needs.coordinates = true,
            Input::OutputRows => needs.output_rows = true,
            Input::Cells { part } => self.part(part).cells = true,
            Input::Visibility { part, .. } => self.part(part).visibility = true,
            Input::BatchVisibility { window } => needs.batch.push(window),
            Input::States => {
                let states = self.layout.states().iter().map(|s| s.n_rows);
                needs.n_states = Some(states.min().unwrap_or(0));
            }
        }
        Ok(())
    }

    fn part(&mut self, part: PartIdx) -> &mut PartNeeds {
        let parts = &mut self.out.needs.parts;
        let part = part.as_usize();
        let at = parts
            .iter()
            .position(|p| p.part == part)
            .unwrap_or_else(|| {
                let of_part = self
                    .layout
                    .layers()
                    .iter()
                    .filter(|l| l.part.as_usize() == part);
                let n_cells = of_part.map(|l| l.n_rows).min().unwrap_or(0);
                parts.push(PartNeeds {
                    part,
                    n_cells,
                    cells: false,
                    visibility: false,
                });
                parts.len() - 1
            });
        &mut parts[at]
    }

    fn store(&mut self, node: &Node, layer: LayerIdx) -> Result<Step<Value>, BackendError> {
        let (at, rows) = self.layer(layer)?;
        rows.stored_v().ok_or(BackendError::NoRows { layer })?;
        let part = rows.part;
        self.operand_input(
            node,
            2,
            |i| matches!(i, Input::Cells { part: p } if *p == part),
        )?;
        let (k, v) = (self.operand(node, 0)?, self.operand(node, 1)?);
        let shape_of = |at: usize| {
            let id = node.operands.get(at).copied().unwrap_or(NodeId(u32::MAX));
            self.graph.node(id).map_or(&[][..], |n| &n.shape)
        };
        let n = self.graph.shape().n_tokens;
        let wanted = [[n, rows.k.heads, rows.k.dim], [n, rows.v.heads, rows.v.dim]];
        if [shape_of(0), shape_of(1)] != [&wanted[0][..], &wanted[1][..]] {
            return Err(BackendError::RowShape {
                layer,
                wanted: format!("K {:?} and V {:?}", shape_of(0), shape_of(1)),
                got: format!("K {:?} and V {:?}", wanted[0], wanted[1]),
            });
        }
        Ok(Step::Store {
            layer: at,
            part: part.as_usize(),
            k,
            v: Some(v),
        })
    }

    fn layer(&self, layer: LayerIdx) -> Result<(usize, LayerRows), BackendError> {
        let mut layers = self.layout.layers().iter().enumerate();
        let found = layers.find(|(_, l)| l.layer == layer);
        found
            .map(|(at, l)| (at, *l))
            .ok_or(BackendError::NoRows { layer })
    }

    fn rope(
        &mut self,
        (rope, sections): (&'a RopeSpec, Option<RopeSections>),
        node: &'a Node,
    ) -> Result<usize, BackendError> {
        let is_it = |t: &RopeTable| t.spec == *rope && t.sections == sections;
        let known = self.out.ropes.iter().position(is_it);
        if let Some(at) = known {
            return Ok(at);
        }
        let factors = rope
            .factors
            .as_ref()
            .map(|f| self.vector(f, node))
            .transpose()?;
        let frequencies = rope.frequencies(factors.as_deref());
        self.out.ropes.push(RopeTable {
            spec: rope.clone(),
            sections,
            frequencies,
        });
        Ok(self.out.ropes.len() - 1)
    }

    /// The floats of an operand.
    fn operand(&self, node: &Node, at: usize) -> Result<Value, BackendError> {
        let id = node
            .operands
            .get(at)
            .copied()
            .ok_or_else(|| unsupported(node))?;
        self.value(node, id)
    }

    fn value(&self, node: &Node, id: NodeId) -> Result<Value, BackendError> {
        self.stands_for
            .get(&id)
            .copied()
            .ok_or_else(|| unsupported(node))
    }

    fn operand_input(
        &self,
        node: &Node,
        at: usize,
        right: impl Fn(&Input) -> bool,
    ) -> Result<(), BackendError> {
        let operand = node.operands.get(at).and_then(|&id| self.graph.node(id));
        match operand.map(|o| &o.op) {
            Some(Op::Input(input)) if right(input) => Ok(()),
            _ => Err(unsupported(node)),
        }
    }

    fn same_len(&self, node: &Node, value: Value) -> Result<(), BackendError> {
        if value.len(self.graph) == node.n_values() {
            Ok(())
        } else {
            Err(unsupported(node))
        }
    }

    fn weight(&self, name: &str, node: &Node) -> Result<Weight, BackendError> {
        let declared = self.graph.weights().iter().find(|w| w.name == name);
        let wanted = declared.map_or(&[][..], |w| &w.shape);
        let weight = self
            .weights
            .source
            .get(name)
            .ok_or_else(|| BackendError::MissingWeight {
                name: name.to_owned(),
                node: node.name.clone(),
                shape: wanted.to_vec(),
            })?;
        if weight.shape() != wanted {
            return Err(BackendError::WeightShape {
                name: name.to_owned(),
                wanted: wanted.to_vec(),
                got: weight.shape().to_vec(),
            });
        }
        Ok(weight)
    }

    fn matrix(
        &mut self,
        name: &'a str,
        node: &Node,
        shape: Option<[usize; 2]>,
    ) -> Result<Arc<Matrix>, BackendError> {
        let matrix = match self.matrices.get(name) {
            Some(matrix) => Arc::clone(matrix),
            None => {
                let weight = self.weight(name, node)?;
                let activations = self.weights.activations_for(weight.format());
                let matrix = Matrix::with_activations(weight, activations)?;
                let matrix = Arc::new(matrix.with_packed(self.weights.packed(name)));
                self.matrices.insert(name, Arc::clone(&matrix));
                matrix
            }
        };
        let got = [matrix.n_rows(), matrix.n_columns()];
        let wanted = shape.unwrap_or([matrix.n_rows(), node.row_len()]);
        if got != wanted {
            let (name, wanted) = (name.to_owned(), wanted.to_vec());
            return Err(BackendError::WeightShape {
                name,
                wanted,
                got: got.to_vec(),
            });
        }
        Ok(matrix)
    }

    fn vector(&mut self, name: &'a str, node: &Node) -> Result<Arc<[f32]>, BackendError> {
        if let Some(vector) = self.vectors.get(name) {
            return Ok(Arc::clone(vector));
        }
        let vector: Arc<[f32]> = self.weight(name, node)?.to_f32().into();
        self.vectors.insert(name, Arc::clone(&vector));
        Ok(vector)
    }
}
