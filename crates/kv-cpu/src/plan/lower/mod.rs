//! Lowers a graph: each node becomes a step over values of the graph.
//!
//! Operands, weights and layers are checked here, and values are followed through reshapes. A
//! module for each family of operations has the family's step operations and their lowering.
//! Nothing is fused: that is [`fuse`](super::fuse)'s. Does not know buffers.

mod attention;
mod custom;
mod elementwise;
mod experts;
mod matmul;
mod norm;
mod recurrent;
mod rows;

use std::collections::HashMap;
use std::sync::Arc;

use kv_backend::BackendError;
use kv_core::PartIdx;
use kv_graph::weights::Weight;
use kv_graph::{DType, Graph, Input, Node, NodeId, Op};
use kv_rows::RowLayout;

use super::{PartNeeds, RequiredInputs, RopeTable, Step, StepOp};
use crate::matrix::Matrix;
use crate::weights::CpuWeights;

pub(crate) use attention::{AttentionOp, PlainAttentionOp, PlainStep};
pub(crate) use custom::{CustomState, CustomStep};
pub(crate) use elementwise::Elementwise;
pub(crate) use experts::ExpertsOp;
pub(crate) use norm::NormOp;
pub(crate) use recurrent::RecurrentOp;
pub(crate) use rows::{EmbedBy, RowsOp};

/// A value of the graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value {
    /// The result of a node.
    Node(NodeId),
    /// The caller's embedding rows, by the input node.
    Embeddings(NodeId),
}

impl Value {
    pub(super) fn id(self) -> NodeId {
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
pub(super) struct LoweredGraph {
    pub(super) steps: Vec<Step<Value>>,
    pub(super) ropes: Vec<RopeTable>,
    pub(super) needs: RequiredInputs,
    pub(super) outputs: Vec<Value>,
}

struct Lowering<'a> {
    graph: &'a Graph,
    weights: &'a CpuWeights,
    layout: &'a RowLayout,
    matrices: HashMap<&'a str, Arc<Matrix>>,
    vectors: HashMap<&'a str, Arc<[f32]>>,
    /// The value of each node's result: its own, or that of its operand for a reshape.
    values: HashMap<NodeId, Value>,
    ropes: Vec<RopeTable>,
    needs: RequiredInputs,
}

/// Translates every node of `graph`.
pub(super) fn lower(
    graph: &Graph,
    weights: &CpuWeights,
    layout: &RowLayout,
) -> Result<LoweredGraph, BackendError> {
    let mut lowering = Lowering {
        graph,
        weights,
        layout,
        matrices: HashMap::new(),
        vectors: HashMap::new(),
        values: HashMap::new(),
        ropes: Vec::new(),
        needs: RequiredInputs::default(),
    };
    let mut steps = Vec::with_capacity(graph.nodes().len());
    for (id, node) in (0..).map(NodeId).zip(graph.nodes()) {
        steps.extend(lowering.node(id, node)?);
    }
    let outputs = graph.outputs().iter().map(|&output| {
        let node = graph.node(output);
        let known = node.map(|node| lowering.value(node, output));
        known.unwrap_or(Ok(Value::Node(output)))
    });
    Ok(LoweredGraph {
        outputs: outputs.collect::<Result<_, _>>()?,
        steps,
        ropes: lowering.ropes,
        needs: lowering.needs,
    })
}

fn unsupported(node: &Node) -> BackendError {
    BackendError::UnsupportedOp {
        backend: "cpu",
        op: node.op.name(),
        node: node.name.clone(),
    }
}

/// An operation and the values that it reads.
type Call = (StepOp, Vec<Value>);

/// Lowers a node of one family.
type Family<'a> = fn(&mut Lowering<'a>, &'a Node) -> Result<Option<Call>, BackendError>;

impl<'a> Lowering<'a> {
    /// The step of a node; none for inputs and reshapes.
    fn node(&mut self, id: NodeId, node: &'a Node) -> Result<Option<Step<Value>>, BackendError> {
        match &node.op {
            Op::Input(input) => {
                self.input(id, input, node)?;
                return Ok(None);
            }
            Op::Reshape => {
                let value = self.operand(node, 0)?;
                self.same_len(node, value)?;
                self.values.insert(id, value);
                return Ok(None);
            }
            _ => {}
        }
        let mut calls = Self::FAMILIES.iter().map(|family| family(self, node));
        let call = calls.find_map(Result::transpose);
        let (op, reads) = call.unwrap_or_else(|| Err(unsupported(node)))?;
        let writes = match node.dtype {
            DType::None => Vec::new(),
            _ => vec![Value::Node(id)],
        };
        self.values.insert(id, Value::Node(id));
        Ok(Some(Step { op, reads, writes }))
    }

    /// The lowering of each family: none where the operation is of another.
    const FAMILIES: [Family<'a>; 8] = [
        Self::matmul,
        Self::elementwise,
        Self::norm,
        Self::rows,
        Self::attention,
        Self::recurrent,
        Self::experts,
        Self::custom,
    ];

    fn input(&mut self, id: NodeId, input: &Input, node: &Node) -> Result<(), BackendError> {
        let needs = &mut self.needs;
        match *input {
            Input::Tokens => needs.tokens_below = needs.tokens_below.or(Some(usize::MAX)),
            Input::Embeddings { dim } => {
                if *needs.embedding_dim.get_or_insert(dim) != dim {
                    return Err(unsupported(node));
                }
                self.values.insert(id, Value::Embeddings(id));
            }
            Input::Positions => needs.positions = true,
            Input::TokenTypes => needs.types_below = needs.types_below.or(Some(usize::MAX)),
            Input::Coordinates => needs.coordinates = true,
            Input::OutputRows => needs.output_rows = true,
            Input::Cells { part } => self.part(part).cells = true,
            Input::Visibility { part, window } => self.part(part).windows.push(window),
            Input::BatchVisibility { window } => needs.batch.push(window),
            Input::States => {
                let states = self.layout.states().iter().map(|s| s.n_rows);
                needs.n_states = Some(states.min().unwrap_or(0));
            }
        }
        Ok(())
    }

    fn part(&mut self, part: PartIdx) -> &mut PartNeeds {
        let parts = &mut self.needs.parts;
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
                    windows: Vec::new(),
                });
                parts.len() - 1
            });
        &mut parts[at]
    }

    /// The value of an operand.
    fn operand(&self, node: &Node, at: usize) -> Result<Value, BackendError> {
        let id = node
            .operands
            .get(at)
            .copied()
            .ok_or_else(|| unsupported(node))?;
        self.value(node, id)
    }

    fn value(&self, node: &Node, id: NodeId) -> Result<Value, BackendError> {
        self.values
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
