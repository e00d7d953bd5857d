//! [`Program`]: a graph with its weights, checked against the memory's layout.
//!
//! Invariant: every node's operation is known, every weight is there in its shape, every layer has
//! rows of the graph's shape. Does not know inputs.

use std::collections::HashMap;

use candle_core::{Device, Tensor};
use kv_backend::{BackendError, check_rows};
use kv_graph::rope::{RopeSections, RopeSpec};
use kv_graph::{Activation, Graph, Node, NodeId, Op};
use kv_rows::RowLayout;

use crate::custom::Custom;
use crate::error::{NAME, OnDevice};
use crate::weights::Weights;

/// A graph that can be run.
#[derive(Debug)]
pub struct Program {
    pub(crate) graph: Graph,
    pub(crate) device: Device,
    pub(crate) weights: HashMap<String, Tensor>,
    /// Every distinct rotation, so that layers share its angles.
    pub(crate) rotations: Vec<Rotation>,
    /// Custom operations by the name of their node.
    pub(crate) custom: HashMap<String, Custom>,
    /// For each node the last one that uses it.
    pub(crate) last_use: Vec<usize>,
}

/// A rotation of some positions.
#[derive(Debug)]
pub(crate) struct Rotation {
    pub(crate) rope: RopeSpec,
    /// The coordinate that rotates each pair, where tokens may be in images.
    pub(crate) sections: Option<RopeSections>,
    pub(crate) positions: Option<NodeId>,
    pub(crate) frequencies: Vec<f64>,
}

impl Program {
    pub(crate) fn compile(
        graph: &Graph,
        weights: &Weights,
        layout: &RowLayout,
    ) -> Result<Self, BackendError> {
        check_rows(graph, layout)?;
        let n_nodes = graph.nodes().len();
        let mut last_use = vec![0; n_nodes];
        for (at, node) in graph.nodes().iter().enumerate() {
            for operand in &node.operands {
                last_use[operand.as_usize()] = at; // operands come before their users
            }
        }
        for output in graph.outputs() {
            last_use[output.as_usize()] = n_nodes;
        }
        let mut program = Self {
            graph: graph.clone(),
            device: weights.device().clone(),
            weights: HashMap::new(),
            rotations: Vec::new(),
            custom: HashMap::new(),
            last_use,
        };
        for node in graph.nodes() {
            program.prepare(node, weights)?;
            if let Op::Custom { custom } = &node.op {
                let of = (weights, layout);
                let made = Custom::new((graph, node), custom, of, &program.weights)?;
                program.custom.insert(node.name.clone(), made);
            }
        }
        Ok(program)
    }

    /// Loads the weights of a node and the frequencies of its rotation.
    fn prepare(&mut self, node: &Node, weights: &Weights) -> Result<(), BackendError> {
        for name in node.op.spec().weights() {
            self.load(name, node, weights)?;
        }
        match &node.op {
            Op::Gate { activation } | Op::Activate { activation } if !is_known(*activation) => {
                Err(unsupported(node))
            }
            Op::Rope { rope } | Op::RopeSections { rope, .. } => self.prepare_rotation(rope, node),
            _ => Ok(()),
        }
    }

    fn load(&mut self, name: &str, node: &Node, weights: &Weights) -> Result<(), BackendError> {
        if !self.weights.contains_key(name) {
            let shape = self.graph.weights().iter().find(|w| w.name == name);
            let shape = shape.map_or(&[][..], |w| &w.shape);
            self.weights
                .insert(name.to_owned(), weights.get(name, shape, &node.name)?);
        }
        Ok(())
    }

    fn prepare_rotation(&mut self, rope: &RopeSpec, node: &Node) -> Result<(), BackendError> {
        let positions = node.operands.get(1).copied();
        if self.rotation(node).is_some() {
            return Ok(());
        }
        let mut factors = None;
        if let Some(name) = &rope.factors {
            let tensor = self.weights.get(name);
            factors = tensor.map(|t| t.to_vec1::<f32>()).transpose().on_device()?;
        }
        let frequencies = rope.frequencies(factors.as_deref());
        self.rotations.push(Rotation {
            rope: rope.clone(),
            sections: sections_of(node),
            positions,
            frequencies,
        });
        Ok(())
    }

    /// Number of this rotation in [`Program::rotations`].
    pub(crate) fn rotation(&self, node: &Node) -> Option<usize> {
        let (Op::Rope { rope } | Op::RopeSections { rope, .. }) = &node.op else {
            return None;
        };
        let (positions, sections) = (node.operands.get(1).copied(), sections_of(node));
        let is_it =
            |r: &Rotation| r.rope == *rope && r.sections == sections && r.positions == positions;
        self.rotations.iter().position(is_it)
    }

    /// A weight that was found when compiling.
    pub(crate) fn weight(&self, name: &str, node: &Node) -> Result<&Tensor, BackendError> {
        self.weights
            .get(name)
            .ok_or_else(|| BackendError::MissingWeight {
                name: name.to_owned(),
                node: node.name.clone(),
                shape: Vec::new(),
            })
    }
}

/// The coordinate that rotates each pair, where a rotation has sections.
fn sections_of(node: &Node) -> Option<RopeSections> {
    match node.op {
        Op::RopeSections { sections, .. } => Some(sections),
        _ => None,
    }
}

/// True if this version computes the function.
fn is_known(activation: Activation) -> bool {
    use Activation::{GeluErf, GeluTanh, Relu, ReluSquared, Sigmoid, Silu};
    matches!(
        activation,
        Silu | GeluTanh | GeluErf | Sigmoid | Relu | ReluSquared
    )
}

/// The error for an operation that this version does not know.
pub(crate) fn unsupported(node: &Node) -> BackendError {
    let node_name = node.name.clone();
    BackendError::UnsupportedOp {
        backend: NAME,
        op: node.op.name(),
        node: node_name,
    }
}
