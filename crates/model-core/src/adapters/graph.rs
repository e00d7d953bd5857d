//! Graphs with the products of adapters: each adapter is an expert that tokens are routed to.
//!
//! A token's row of adapters, which comes in behind its embedding's values, has for each adapter a
//! logit, which is far above or below 0, then each one's scale, then the scales of the active ones
//! in order. Invariant: a node keeps its name and place; sums are behind it.

use kv_graph::{
    Affine, Graph, GraphBuilder, GraphError, Input, Node, NodeId, Op, RouteGate, RouteSpec,
    RowCount, TableRow,
};

use super::check::Use;
use super::stacks::{STEERING, name_of_one, stacked_name};
use super::{AdapterError, Adapters};

/// The products to add to a graph.
pub(super) struct Products<'a> {
    pub(super) adapters: &'a Adapters,
    /// The most adapters of a token.
    pub(super) n_active: usize,
    pub(super) architecture: &'a str,
}

/// The parts of the rows of adapters, for the tokens or for the outputs.
#[derive(Clone, Copy)]
struct RowParts {
    rows: NodeId,
    n_rows: usize,
    routes: NodeId,
    /// The scales of the active ones, `[n, 1, active]`.
    active: NodeId,
}

struct Rewrite<'a> {
    b: GraphBuilder,
    graph: &'a Graph,
    products: &'a Products<'a>,
    counts: Vec<RowCount>,
    moved: Vec<NodeId>,
    tokens: Option<RowParts>,
    outputs: Option<RowParts>,
    /// Values of a row that is given in place of a token.
    given: usize,
}

impl Products<'_> {
    /// The same computation, with the adapters that the rows of tokens name.
    pub(super) fn add_to(&self, graph: &Graph) -> Result<Graph, AdapterError> {
        let refused = |reason: String| AdapterError::Graph {
            architecture: self.architecture.to_owned(),
            what: "adapters",
            reason,
        };
        let counts = graph
            .row_counts()
            .ok_or_else(|| refused("a node has rows of tokens and of outputs".to_owned()))?;
        let given = graph.nodes().iter().find_map(|node| match node.op {
            Op::Input(Input::Embeddings { dim }) => Some(dim),
            _ => None,
        });
        let mut rewrite = Rewrite {
            b: GraphBuilder::new(graph.shape()),
            graph,
            products: self,
            counts,
            moved: Vec::with_capacity(graph.nodes().len()),
            tokens: None,
            outputs: None,
            given: given.unwrap_or(0),
        };
        let rewritten = rewrite.nodes();
        let outputs = rewritten.map_err(|error| refused(error.to_string()))?;
        let finished = rewrite.b.finish(&outputs);
        finished.map_err(|error| refused(error.to_string()))
    }
}

impl Rewrite<'_> {
    fn nodes(&mut self) -> Result<Vec<NodeId>, GraphError> {
        let graph = self.graph;
        for (node, count) in graph.nodes().iter().zip(self.counts.clone()) {
            let id = self.node(node, count)?;
            self.moved.push(id);
        }
        let outputs = graph.outputs().iter();
        Ok(outputs.map(|&id| self.to(id)).collect())
    }

    fn to(&self, id: NodeId) -> NodeId {
        self.moved.get(id.as_usize()).copied().unwrap_or(id)
    }

    fn node(&mut self, node: &Node, count: RowCount) -> Result<NodeId, GraphError> {
        if let Op::Input(Input::Embeddings { dim }) = node.op
            && self.products.n_active > 0
        {
            let all = self.input()?;
            return self.b.columns("adapters.given", all, 0..dim);
        }
        let operands: Vec<NodeId> = node.operands.iter().map(|&id| self.to(id)).collect();
        let mut copied = node.clone();
        if copied.name == ROWS_INPUT {
            // The input that rows of adapters come in has the name that models give embeddings.
            copied.name = format!("{ROWS_INPUT}.tokens");
        }
        let id = self.b.copy_node(self.graph, &copied, &operands)?;
        let id = self.adapted(node, count, (id, &operands))?;
        self.steered(node, id)
    }

    /// The node with what adapters add to it.
    fn adapted(
        &mut self,
        node: &Node,
        count: RowCount,
        (id, operands): (NodeId, &[NodeId]),
    ) -> Result<NodeId, GraphError> {
        let weight = match &node.op {
            Op::Linear { weight, .. } | Op::ExpertLinear { weight, .. } | Op::Embed { weight } => {
                weight
            }
            _ => return Ok(id),
        };
        if self.products.n_active == 0 {
            return Ok(id);
        }
        let used = self.products.adapters.uses.get(weight).cloned();
        match (used, &node.op, operands) {
            (Some(Use::Matrix), Op::Linear { .. }, &[x]) => {
                self.matrix(node, weight, count, [x, id])
            }
            (Some(Use::Experts), Op::ExpertLinear { .. }, &[x, routes]) => {
                self.experts(node, weight, count, [x, routes, id])
            }
            (Some(Use::Embedding), Op::Embed { .. }, &[tokens]) => {
                self.embedding(node, weight, count, [tokens, id])
            }
            _ => Ok(id),
        }
    }

    /// Products of all adapters with one matrix: each row through those that it is routed to.
    fn matrix(
        &mut self,
        node: &Node,
        weight: &str,
        count: RowCount,
        [x, y]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let RowParts {
            n_rows,
            routes,
            active,
            ..
        } = self.parts(count)?;
        let (name, width) = (&node.name, node.row_len());
        let rank = self.products.adapters.stack_rank(weight);
        let (a, b) = (stacked_name("a", weight), stacked_name("b", weight));
        let narrow = self.b.expert_linear(
            &format!("lora_a.{name}"),
            [x, routes],
            Affine::new(&a),
            rank,
        )?;
        let wide = self.b.expert_linear(
            &format!("lora_b.{name}"),
            [narrow, routes],
            Affine::new(&b),
            width,
        )?;
        let sum = self.b.mix(&format!("lora_mix.{name}"), wide, active)?;
        let row = self
            .b
            .reshape(&format!("lora_row.{name}"), sum, &[n_rows, width])?;
        self.b.add(&format!("lora.{name}"), y, row)
    }

    /// Products of each adapter with the matrices of experts.
    fn experts(
        &mut self,
        node: &Node,
        weight: &str,
        count: RowCount,
        [x, routes, y]: [NodeId; 3],
    ) -> Result<NodeId, GraphError> {
        let parts = self.parts(count)?;
        let name = &node.name;
        let &[n_rows, n_slots, width] = node.shape.as_slice() else {
            return Ok(y);
        };
        let mut sum = y;
        let adapters = self.products.adapters;
        for (at, adapter) in adapters.all().iter().enumerate() {
            let Some(pair) = adapter.pairs().get(weight) else {
                continue;
            };
            let (a, b) = (name_of_one(at, "a", weight), name_of_one(at, "b", weight));
            let narrow = self.b.expert_linear(
                &format!("lora_a{at}.{name}"),
                [x, routes],
                Affine::new(&a),
                pair.rank(),
            )?;
            let wide = self.b.expert_linear(
                &format!("lora_b{at}.{name}"),
                [narrow, routes],
                Affine::new(&b),
                width,
            )?;
            let wide_row = [n_rows, 1, n_slots * width];
            let row = self
                .b
                .reshape(&format!("lora_row{at}.{name}"), wide, &wide_row)?;
            let scaled = self.scaled(&format!("{at}.{name}"), at, parts, row)?;
            let slots = self.b.reshape(
                &format!("lora_slots{at}.{name}"),
                scaled,
                &[n_rows, n_slots, width],
            )?;
            sum = self.b.add(&format!("lora{at}.{name}"), sum, slots)?;
        }
        Ok(sum)
    }

    /// Rows of each adapter's embedding.
    fn embedding(
        &mut self,
        node: &Node,
        weight: &str,
        count: RowCount,
        [tokens, y]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let parts = self.parts(count)?;
        let (name, width) = (&node.name, node.row_len());
        let mut sum = y;
        let adapters = self.products.adapters;
        for (at, adapter) in adapters.all().iter().enumerate() {
            let Some(pair) = adapter.pairs().get(weight) else {
                continue;
            };
            let (a, b) = (name_of_one(at, "a", weight), name_of_one(at, "b", weight));
            let table = [pair.a.n_rows(), pair.rank()];
            let narrow = self
                .b
                .embed(&format!("lora_a{at}.{name}"), tokens, &a, table)?;
            let wide = self
                .b
                .linear(&format!("lora_b{at}.{name}"), narrow, &b, width)?;
            let row = self.b.reshape(
                &format!("lora_row{at}.{name}"),
                wide,
                &[parts.n_rows, 1, width],
            )?;
            let scaled = self.scaled(&format!("{at}.{name}"), at, parts, row)?;
            let row = self.b.reshape(
                &format!("lora_sum{at}.{name}"),
                scaled,
                &[parts.n_rows, width],
            )?;
            sum = self.b.add(&format!("lora{at}.{name}"), sum, row)?;
        }
        Ok(sum)
    }

    /// `x [n, 1, width]` times each row's scale of one adapter.
    fn scaled(
        &mut self,
        name: &str,
        at: usize,
        parts: RowParts,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let first = self.products.adapters.len() + at;
        let scale = self
            .b
            .columns(&format!("lora_scale{name}"), parts.rows, first..first + 1)?;
        let scale = self
            .b
            .reshape(&format!("lora_factor{name}"), scale, &[parts.n_rows, 1, 1])?;
        self.b.mix(&format!("lora_mix{name}"), x, scale)
    }

    /// The input that has the rows of adapters.
    fn input(&mut self) -> Result<NodeId, GraphError> {
        let Products {
            adapters, n_active, ..
        } = self.products;
        let dim = self.given + adapters.row_width(*n_active);
        self.b.input(Input::Embeddings { dim })
    }

    /// The rows of adapters, one for each token or output.
    fn parts(&mut self, count: RowCount) -> Result<RowParts, GraphError> {
        let known = match count {
            RowCount::Tokens => self.tokens,
            RowCount::Outputs => self.outputs,
        };
        if let Some(parts) = known {
            return Ok(parts);
        }
        let (n, n_active) = (self.products.adapters.len(), self.products.n_active);
        let width = self.products.adapters.row_width(n_active);
        let n_rows = count.of(self.graph.shape());
        let (rows, of) = match (count, self.tokens) {
            (RowCount::Outputs, Some(tokens)) => {
                let wanted = self.b.input(Input::OutputRows)?;
                let rows = self.b.take_rows("adapters.out", tokens.rows, wanted)?;
                (rows, ".out")
            }
            (RowCount::Outputs, None) => {
                self.parts(RowCount::Tokens)?;
                return self.parts(count);
            }
            (RowCount::Tokens, _) => {
                let all = self.input()?;
                let columns = self.given..self.given + width;
                (self.b.columns("adapters.rows", all, columns)?, "")
            }
        };
        let logits = self
            .b
            .columns(&format!("adapters.logits{of}"), rows, 0..n)?;
        let route = RouteSpec::plain(n_active, RouteGate::Sigmoid);
        let routes = self
            .b
            .route(&format!("adapters.routes{of}"), logits, route)?;
        let active = self.b.columns(
            &format!("adapters.scales{of}"),
            rows,
            2 * n..2 * n + n_active,
        )?;
        let active = self.b.reshape(
            &format!("adapters.active{of}"),
            active,
            &[n_rows, 1, n_active],
        )?;
        let parts = RowParts {
            rows,
            n_rows,
            routes,
            active,
        };
        match count {
            RowCount::Tokens => self.tokens = Some(parts),
            RowCount::Outputs => self.outputs = Some(parts),
        }
        Ok(parts)
    }

    /// The rows that leave a layer, with the control vector of that layer added.
    fn steered(&mut self, node: &Node, id: NodeId) -> Result<NodeId, GraphError> {
        let control = self.products.adapters.control();
        let layer = node.name.strip_prefix(LAYER_RESULT);
        let layer = layer.and_then(|layer| layer.parse().ok());
        let (Some(control), Some(layer)) = (control, layer) else {
            return Ok(id);
        };
        if !control.has_layer(layer) || node.shape.len() != 2 {
            return Ok(id);
        }
        let table = TableRow {
            weight: STEERING,
            n_rows: control.n_rows(),
            row: layer,
        };
        self.b.add_row(&format!("steered.{}", node.name), id, table)
    }
}

/// The name of the node of [`Input::Embeddings`].
const ROWS_INPUT: &str = "inp_embd";

/// The beginning of the names of what leaves each layer.
pub(super) const LAYER_RESULT: &str = "l_out-";
