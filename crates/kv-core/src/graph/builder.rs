//! [`GraphBuilder`]: adds nodes and checks shapes as it goes.
//!
//! Invariant: what [`GraphBuilder::finish`] returns has operands before users, unique names and
//! fitting shapes. Knows nothing of architectures; third-party models build with it too.

mod recurrent;
mod rope;

use std::collections::HashSet;
use std::ops::Range;

use super::op::{Activation, DType, Input, Op};
use super::{Graph, GraphShape, Node, NodeId, WeightUse};
use crate::ids::LayerIdx;

/// A graph that cannot be.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum GraphError {
    /// Two nodes have one name.
    #[error("node '{name}' exists already; names must be unique")]
    DuplicateName {
        /// The name.
        name: String,
    },
    /// An operand is no earlier node.
    #[error("node '{node}': operand %{} is no earlier node", operand.0)]
    UnknownOperand {
        /// The node.
        node: String,
        /// The operand.
        operand: NodeId,
    },
    /// Operands do not fit the operation.
    #[error("node '{node}': {op} wants {wanted}, got {got:?}")]
    Shape {
        /// The node.
        node: String,
        /// The operation's name.
        op: &'static str,
        /// What it wants.
        wanted: String,
        /// The operands' shapes.
        got: Vec<Vec<usize>>,
    },
    /// A weight is used with two shapes.
    #[error("weight '{name}' is used as {first:?} and as {second:?}")]
    WeightShape {
        /// The weight.
        name: String,
        /// Its shape at the first use.
        first: Vec<usize>,
        /// Its shape now.
        second: Vec<usize>,
    },
    /// A node with too many or too few operands.
    #[error("node '{node}': {op} has {wanted} operands, not {got}")]
    OperandCount {
        /// The node.
        node: String,
        /// The operation's name.
        op: &'static str,
        /// Operands that it has.
        wanted: usize,
        /// Operands given.
        got: usize,
    },
    /// A node whose shape, type or weights do not follow from its operation and operands.
    #[error("node '{node}' is not what its operation and operands give")]
    NotAsBuilt {
        /// The node.
        node: String,
    },
    /// A text that is no graph.
    #[error("not a graph in JSON form: {0}")]
    Json(String),
}

/// What normed values are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormGain<'a> {
    /// Nothing.
    None,
    /// A weight of `[dim]`, the same for everything before the last dimension.
    Shared(&'a str),
    /// A weight of `[groups, dim]` for values of `[n, groups, dim]`.
    PerGroup(&'a str),
}

impl<'a> NormGain<'a> {
    /// Name of the weight.
    fn weight(self) -> Option<&'a str> {
        match self {
            Self::None => None,
            Self::Shared(weight) | Self::PerGroup(weight) => Some(weight),
        }
    }
}

/// Builds a [`Graph`] node by node.
#[derive(Debug)]
pub struct GraphBuilder {
    graph: Graph,
    names: HashSet<String>,
    inputs: Vec<(Input, NodeId)>,
}

impl GraphBuilder {
    /// An empty graph of this shape.
    pub fn new(shape: GraphShape) -> Self {
        let graph = Graph {
            shape,
            nodes: Vec::new(),
            outputs: Vec::new(),
            weights: Vec::new(),
        };
        Self {
            graph,
            names: HashSet::new(),
            inputs: Vec::new(),
        }
    }

    /// Rows in and out.
    pub fn shape(&self) -> GraphShape {
        self.graph.shape
    }

    /// Shape of a node added earlier; empty for an unknown one.
    pub fn shape_of(&self, id: NodeId) -> &[usize] {
        self.graph.node(id).map_or(&[], |n| &n.shape)
    }

    pub(super) fn op_of(&self, id: NodeId) -> Option<&Op> {
        self.graph.node(id).map(|n| &n.op)
    }

    /// Element type of a node added earlier; `None` for an unknown one.
    pub fn dtype_of(&self, id: NodeId) -> Option<DType> {
        self.graph.node(id).map(|n| n.dtype)
    }

    /// An input; asking twice gives the same node.
    ///
    /// # Errors
    /// [`GraphError::DuplicateName`] where another node took the input's name.
    pub fn input(&mut self, input: Input) -> Result<NodeId, GraphError> {
        if let Some((_, id)) = self.inputs.iter().find(|(i, _)| *i == input) {
            return Ok(*id);
        }
        let GraphShape {
            n_tokens,
            n_outputs,
        } = self.graph.shape;
        let (name, shape, dtype) = match input {
            Input::Tokens => ("inp_tokens".to_owned(), vec![n_tokens], DType::U32),
            Input::Embeddings { dim } => ("inp_embd".to_owned(), vec![n_tokens, dim], DType::F32),
            Input::Positions => ("inp_pos".to_owned(), vec![n_tokens], DType::U32),
            Input::Coordinates => ("inp_coordinates".to_owned(), vec![n_tokens, 3], DType::U32),
            Input::OutputRows => ("inp_out_rows".to_owned(), vec![n_outputs], DType::U32),
            Input::Cells { part } => (format!("inp_cells.{part}"), vec![n_tokens], DType::U32),
            Input::Visibility { part, .. } => {
                (format!("inp_visibility.{part}"), vec![], DType::None)
            }
            Input::BatchVisibility { window } => (
                format!("inp_visibility.batch.{window}"),
                vec![],
                DType::None,
            ),
            Input::States => ("inp_states".to_owned(), vec![], DType::None),
        };
        let id = self.push(name, Op::Input(input), vec![], (shape, dtype))?;
        self.inputs.push((input, id));
        Ok(id)
    }

    /// Rows of the embedding matrix `weight` (`[vocab, dim]`) for each token.
    ///
    /// # Errors
    /// [`GraphError`] where the operand is no list of tokens.
    pub fn embed(
        &mut self,
        name: &str,
        tokens: NodeId,
        weight: &str,
        [vocab, dim]: [usize; 2],
    ) -> Result<NodeId, GraphError> {
        let op = Op::Embed {
            weight: weight.to_owned(),
        };
        let &[n] = self.shape_of(tokens) else {
            return Err(self.misfit(name, &op, "a list of tokens", &[tokens]));
        };
        self.declare(weight, &[vocab, dim])?;
        self.push(name, op, vec![tokens], (vec![n, dim], DType::F32))
    }

    /// `x W^T`, with `weight` of shape `[n_out, in]`, where `in` is the width of `x`.
    ///
    /// # Errors
    /// [`GraphError`] where `x` is no matrix.
    pub fn linear(
        &mut self,
        name: &str,
        x: NodeId,
        weight: &str,
        n_out: usize,
    ) -> Result<NodeId, GraphError> {
        self.affine(name, x, (weight, None), n_out)
    }

    /// `x W^T + b`, with weights `(matrix [n_out, in], bias [n_out])`.
    ///
    /// # Errors
    /// [`GraphError`] where `x` is no matrix.
    pub fn affine(
        &mut self,
        name: &str,
        x: NodeId,
        (weight, bias): (&str, Option<&str>),
        n_out: usize,
    ) -> Result<NodeId, GraphError> {
        let op = Op::Linear {
            weight: weight.to_owned(),
            bias: bias.map(str::to_owned),
        };
        let &[n, n_in] = self.shape_of(x) else {
            return Err(self.misfit(name, &op, "[tokens, in]", &[x]));
        };
        self.declare(weight, &[n_out, n_in])?;
        if let Some(bias) = bias {
            self.declare(bias, &[n_out])?;
        }
        self.push(name, op, vec![x], (vec![n, n_out], DType::F32))
    }

    /// RMS norm over the last dimension.
    ///
    /// # Errors
    /// [`GraphError`] where `x` has no dimension.
    pub fn rms_norm(
        &mut self,
        name: &str,
        x: NodeId,
        weight: &str,
        eps: f32,
    ) -> Result<NodeId, GraphError> {
        self.rms_norm_with(name, x, NormGain::Shared(weight), eps)
    }

    /// RMS norm over the last dimension, with any kind of gain.
    ///
    /// # Errors
    /// [`GraphError`] where `x` has no dimension, or no groups for the gain of each.
    pub fn rms_norm_with(
        &mut self,
        name: &str,
        x: NodeId,
        gain: NormGain<'_>,
        eps: f32,
    ) -> Result<NodeId, GraphError> {
        let weight = gain.weight().map(str::to_owned);
        let op = Op::RmsNorm { weight, eps };
        let shape = self.shape_of(x).to_vec();
        match (gain, &*shape) {
            (NormGain::None, [_, ..]) => {}
            (NormGain::Shared(weight), [.., dim]) => self.declare(weight, &[*dim])?,
            (NormGain::PerGroup(weight), [_, groups, dim]) => {
                self.declare(weight, &[*groups, *dim])?;
            }
            (NormGain::None | NormGain::Shared(_), _) => {
                return Err(self.misfit(name, &op, "[.., dim]", &[x]));
            }
            (NormGain::PerGroup(_), _) => {
                return Err(self.misfit(name, &op, "[n, groups, dim]", &[x]));
            }
        }
        self.push(name, op, vec![x], (shape, DType::F32))
    }

    /// The same values in another shape; the first dimension stays.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the number of values or of rows would change.
    pub fn reshape(
        &mut self,
        name: &str,
        x: NodeId,
        shape: &[usize],
    ) -> Result<NodeId, GraphError> {
        let old = self.shape_of(x);
        let same = old.first() == shape.first()
            && old.iter().product::<usize>() == shape.iter().product::<usize>();
        if !same {
            let wanted = format!("as many values as {shape:?} and the same rows");
            return Err(self.misfit(name, &Op::Reshape, &wanted, &[x]));
        }
        self.push(name, Op::Reshape, vec![x], (shape.to_vec(), DType::F32))
    }

    /// Elementwise sum.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the shapes differ.
    pub fn add(&mut self, name: &str, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.elementwise(name, Op::Add, a, b)
    }

    /// Elementwise product.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the shapes differ.
    pub fn mul(&mut self, name: &str, a: NodeId, b: NodeId) -> Result<NodeId, GraphError> {
        self.elementwise(name, Op::Mul, a, b)
    }

    /// Every value times `factor`.
    ///
    /// # Errors
    /// [`GraphError`] as for every node.
    pub fn scale(&mut self, name: &str, x: NodeId, factor: f32) -> Result<NodeId, GraphError> {
        let shape = self.shape_of(x).to_vec();
        self.push(name, Op::Scale { factor }, vec![x], (shape, DType::F32))
    }

    /// `activation(gate) * up`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where the shapes differ.
    pub fn gate(
        &mut self,
        name: &str,
        activation: Activation,
        gate: NodeId,
        up: NodeId,
    ) -> Result<NodeId, GraphError> {
        self.elementwise(name, Op::Gate { activation }, gate, up)
    }

    /// `activation(x)`.
    ///
    /// # Errors
    /// [`GraphError`] as for every node.
    pub fn activate(
        &mut self,
        name: &str,
        activation: Activation,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let shape = self.shape_of(x).to_vec();
        let op = Op::Activate { activation };
        self.push(name, op, vec![x], (shape, DType::F32))
    }

    /// Some columns of `x [n, width]`.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` does not have them.
    pub fn columns(
        &mut self,
        name: &str,
        x: NodeId,
        columns: Range<usize>,
    ) -> Result<NodeId, GraphError> {
        let op = Op::Columns {
            first: columns.start,
        };
        match *self.shape_of(x) {
            [n, width] if columns.start <= columns.end && columns.end <= width => {
                self.push(name, op, vec![x], (vec![n, columns.len()], DType::F32))
            }
            _ => {
                let wanted = format!("[n, at least {}]", columns.end.max(columns.start));
                Err(self.misfit(name, &op, &wanted, &[x]))
            }
        }
    }

    /// Stores `k` and `v` (`[n, kv_heads, dim]` each) in the cells of the ubatch's tokens.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where rows and cells do not match.
    pub fn store_kv(
        &mut self,
        name: &str,
        layer: LayerIdx,
        [k, v, cells]: [NodeId; 3],
    ) -> Result<NodeId, GraphError> {
        let op = Op::StoreKv { layer };
        let fits = match (self.shape_of(k), self.shape_of(v), self.shape_of(cells)) {
            (&[n, heads, _], &[nv, v_heads, _], &[nc]) => n == nv && n == nc && heads == v_heads,
            _ => false,
        };
        if !fits {
            let wanted = "[tokens, kv_heads, k_dim], [tokens, kv_heads, v_dim], [tokens]";
            return Err(self.misfit(name, &op, wanted, &[k, v, cells]));
        }
        self.push(name, op, vec![k, v, cells], (vec![], DType::None))
    }

    /// The rows of `x` that `rows` names.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `rows` is no list.
    pub fn take_rows(&mut self, name: &str, x: NodeId, rows: NodeId) -> Result<NodeId, GraphError> {
        let (&[n], false) = (self.shape_of(rows), self.shape_of(x).is_empty()) else {
            return Err(self.misfit(name, &Op::TakeRows, "[n, ..], [rows]", &[x, rows]));
        };
        let mut shape = self.shape_of(x).to_vec();
        shape[0] = n;
        self.push(name, Op::TakeRows, vec![x, rows], (shape, DType::F32))
    }

    /// The finished graph, whose results are `outputs`.
    ///
    /// # Errors
    /// [`GraphError::UnknownOperand`] where an output is no node.
    pub fn finish(mut self, outputs: &[NodeId]) -> Result<Graph, GraphError> {
        let n_nodes = self.graph.nodes.len();
        if let Some(&operand) = outputs.iter().find(|o| o.as_usize() >= n_nodes) {
            return Err(GraphError::UnknownOperand {
                node: "output".into(),
                operand,
            });
        }
        self.graph.outputs = outputs.to_vec();
        Ok(self.graph)
    }

    fn elementwise(
        &mut self,
        name: &str,
        op: Op,
        a: NodeId,
        b: NodeId,
    ) -> Result<NodeId, GraphError> {
        let shape = self.shape_of(a).to_vec();
        if shape != self.shape_of(b) {
            return Err(self.misfit(name, &op, "two equal shapes", &[a, b]));
        }
        self.push(name, op, vec![a, b], (shape, DType::F32))
    }

    pub(super) fn misfit(
        &self,
        node: &str,
        op: &Op,
        wanted: &str,
        operands: &[NodeId],
    ) -> GraphError {
        GraphError::Shape {
            node: node.to_owned(),
            op: op.name(),
            wanted: wanted.to_owned(),
            got: operands
                .iter()
                .map(|&o| self.shape_of(o).to_vec())
                .collect(),
        }
    }

    pub(super) fn declare(&mut self, name: &str, shape: &[usize]) -> Result<(), GraphError> {
        match self.graph.weights.iter().find(|w| w.name == name) {
            Some(known) if known.shape == shape => Ok(()),
            Some(known) => Err(GraphError::WeightShape {
                name: name.to_owned(),
                first: known.shape.clone(),
                second: shape.to_vec(),
            }),
            None => {
                let weight = WeightUse {
                    name: name.to_owned(),
                    shape: shape.to_vec(),
                };
                self.graph.weights.push(weight);
                Ok(())
            }
        }
    }

    pub(super) fn push(
        &mut self,
        name: impl Into<String>,
        op: Op,
        operands: Vec<NodeId>,
        (shape, dtype): (Vec<usize>, DType),
    ) -> Result<NodeId, GraphError> {
        let name = name.into();
        let next = self.graph.nodes.len();
        if let Some(&operand) = operands.iter().find(|o| o.as_usize() >= next) {
            return Err(GraphError::UnknownOperand {
                node: name,
                operand,
            });
        }
        if !self.names.insert(name.clone()) {
            return Err(GraphError::DuplicateName { name });
        }
        self.graph.nodes.push(Node {
            name,
            op,
            operands,
            shape,
            dtype,
        });
        // A graph of 2^32 nodes cannot be held in memory.
        Ok(NodeId(u32::try_from(next).unwrap_or(u32::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn builder() -> GraphBuilder {
        GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 1,
        })
    }

    #[test]
    fn a_shape_that_does_not_fit_is_refused_with_both_sides() {
        let mut b = builder();
        let tokens = b.input(Input::Tokens).unwrap();
        let x = b.embed("embd", tokens, "tok", [10, 4]).unwrap();
        let y = b.linear("y", x, "w", 6).unwrap();
        let err = b.add("sum", x, y).unwrap_err();
        assert_eq!(
            err.to_string(),
            "node 'sum': add wants two equal shapes, got [[3, 4], [3, 6]]"
        );
    }

    #[test]
    fn names_are_unique_and_inputs_are_shared() {
        let mut b = builder();
        let tokens = b.input(Input::Tokens).unwrap();
        assert_eq!(b.input(Input::Tokens), Ok(tokens));
        let x = b.embed("embd", tokens, "tok", [10, 4]).unwrap();
        assert_eq!(
            b.scale("embd", x, 2.0),
            Err(GraphError::DuplicateName {
                name: "embd".into()
            })
        );
    }

    #[test]
    fn a_weight_has_one_shape() {
        let mut b = builder();
        let tokens = b.input(Input::Tokens).unwrap();
        let x = b.embed("embd", tokens, "tok", [10, 4]).unwrap();
        assert!(b.linear("logits", x, "tok", 10).is_ok(), "tied embeddings");
        assert!(matches!(
            b.linear("other", x, "tok", 11),
            Err(GraphError::WeightShape { .. })
        ));
    }
}
