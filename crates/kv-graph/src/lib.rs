//! The compute graph: plain data that prints itself, compares itself and knows no device.
//!
//! A [`Graph`] is a list of [`Node`]s in execution order. It names weights and layers but holds
//! neither, and does not depend on how full a memory is: it is built once for each
//! [`GraphShape`] and reused. Invariants: operands come before their users, names are unique,
//! shapes fit (all three checked by [`GraphBuilder`]).
//!
//! One description per operation ([`OpSpec`]) drives shape inference, checking, text, DOT, diff and
//! the list of weights. To add an operation, change these files:
//!
//! 1. `op.rs`: the variant of [`Op`], and its line in [`Op::spec`]; `read.rs`: how it
//!    comes from JSON;
//! 2. `ops/FAMILY.rs`: the description and the builder method;
//! 3. `kv-contract/src/evaluate.rs`: its definition in `f64`, which tests compare with;
//! 4. `kv-candle/src/execute.rs`: the same in tensor operations;
//! 5. `kv-cpu/src/plan/lower/FAMILY.rs`: its step operation, and the lowering of its nodes;
//! 6. `kv-cpu/src/execute/FAMILY.rs`: the kernel that the step runs;
//! 7. `kv-gpu/src/lower/FAMILY.rs` and a kernel in `kv-gpu/kernels`.
//!
//! A backend that lacks an operation refuses its graphs by name, so 4 to 7 may come later.

mod ages;
mod alibi;
mod builder;
mod check;
mod detach;
mod diff;
mod display;
mod key_rope;
mod op;
mod ops;
mod read;
mod relative;
pub mod rope;
mod row_count;
mod scope;
mod spec;
mod split;
mod taps;
mod used_layer;
pub mod weights;

pub use alibi::Alibi;
pub use builder::{Affine, GraphBuilder, GraphError, TableRow};
pub use detach::Mixture;
pub use diff::{GraphDiff, NodeChange, NodeText};
pub use display::{Dot, Text};
pub use key_rope::KeyRopeError;
pub use op::{Activation, AttendSpec, Input, Op};
pub use ops::attend::{Attention, DistanceScores, Distances};
pub use ops::custom::{CustomScope, CustomSizes, CustomSpec};
pub use ops::delta_rule::{DecaySpec, DeltaSpec, KeySharing};
pub use ops::elementwise::{ClampedGate, PositionScale};
pub use ops::experts::slots;
pub use ops::gaussian_top_k::gaussian_top_k;
pub use ops::mix::mix;
pub use ops::norm::{NormGain, RowGain};
pub use ops::partial::ResultForm;
pub use ops::recurrent::{ConvKernels, ConvSpec, HeadScanSpec, ScanSpec};
pub use ops::route::{
    GroupScore, MAX_ROUTE_GROUPS, RouteGate, RouteGroups, RouteSpec, RouteSum, Routing,
};
pub use ops::sparse::IndexSpec;
pub use ops::top_k::TopK;
pub use relative::{BucketTable, DistanceBuckets, RelativeBias, RelativeScores};
pub use row_count::RowCount;
pub use scope::Scope;
pub use spec::{Attribute, AttributeValue, DType, OpScope, OpSpec};
pub use split::{SplitGraph, SplitOutput, SplitPoint};
pub use taps::MatMulInput;

use builder::Claim;
use serde::{Deserialize, Serialize};

/// Number of a node in its graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeId(pub u32);

impl NodeId {
    /// The number as a `usize`, for indexing slices.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

/// Rows in and out of a graph, which it depends on besides the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GraphShape {
    /// Tokens of the ubatch.
    pub n_tokens: usize,
    /// Rows whose logits are wanted.
    pub n_outputs: usize,
}

impl GraphShape {
    /// True if it has no more tokens and outputs than another.
    pub const fn fits(self, other: Self) -> bool {
        self.n_tokens <= other.n_tokens && self.n_outputs <= other.n_outputs
    }
}

/// One operation with its operands and what comes out.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Node {
    /// Field-standard name with the layer at its end, for example `Qcur-3`; unique in its graph.
    pub name: String,
    /// The operation.
    pub op: Op,
    /// The nodes whose results it reads.
    pub operands: Vec<NodeId>,
    /// Shape of the result, outermost dimension first; empty where there is no result.
    pub shape: Vec<usize>,
    /// Element type of the result.
    pub dtype: DType,
}

impl Node {
    /// Number of values in the result.
    pub fn n_values(&self) -> usize {
        self.shape.iter().product()
    }

    /// The first dimension: rows of the result, one for each token or output.
    pub fn n_rows(&self) -> usize {
        self.shape.first().copied().unwrap_or(0)
    }

    /// Product of all dimensions but the first.
    pub fn row_len(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

/// A weight that the graph names, and the shape it must have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightUse {
    /// Name of the weight.
    pub name: String,
    /// Its shape, outermost dimension first.
    pub shape: Vec<usize>,
}

/// A computation over one ubatch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Graph {
    shape: GraphShape,
    nodes: Vec<Node>,
    outputs: Vec<NodeId>,
    weights: Vec<WeightUse>,
}

impl Graph {
    /// Rows in and out.
    pub fn shape(&self) -> GraphShape {
        self.shape
    }

    /// All nodes in execution order.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node with this number.
    pub fn node(&self, id: NodeId) -> Option<&Node> {
        self.nodes.get(id.as_usize())
    }

    /// The node with this name.
    pub fn find(&self, name: &str) -> Option<(NodeId, &Node)> {
        let at = self.nodes.iter().position(|n| n.name == name)?;
        Some((NodeId(u32::try_from(at).ok()?), &self.nodes[at]))
    }

    /// The results that a run gives back, in order.
    pub fn outputs(&self) -> &[NodeId] {
        &self.outputs
    }

    /// Every weight that some node names, in order of first use.
    pub fn weights(&self) -> &[WeightUse] {
        &self.weights
    }

    /// The graph as text, one node a line: what snapshots hold.
    pub fn text(&self) -> Text<'_> {
        Text(self)
    }

    /// The graph in Graphviz' DOT language.
    pub fn dot(&self) -> Dot<'_> {
        Dot(self)
    }

    /// The graph as JSON.
    ///
    /// # Errors
    /// Only where the JSON writer fails, which it does not for this data.
    pub fn to_json(&self) -> Result<String, serde_json::Error> {
        serde_json::to_string_pretty(self)
    }

    /// A graph from its JSON form, checked as the builder would have built it.
    ///
    /// # Errors
    /// [`GraphError::Json`] where the text is no graph, or another [`GraphError`] where the graph
    /// breaks an invariant.
    pub fn from_json(text: &str) -> Result<Self, GraphError> {
        let graph: Self =
            serde_json::from_str(text).map_err(|e| GraphError::Json(e.to_string()))?;
        check::rebuild(&graph)
    }

    /// The differences from `other`, node by node, matched by name.
    pub fn diff(&self, other: &Self) -> GraphDiff {
        GraphDiff::new(self, other)
    }
}
