//! [`Graph::with_recent`]: a graph over layers that keep the rows of recent tokens apart.
//!
//! Invariant: it computes the same, but for the types of rows. A node that stores rows of such a
//! layer becomes two; an [`Op::Attend`] becomes partial ones and their merge, which has its name.

use kv_core::ids::{LayerIdx, PartIdx};
use kv_core::layers::LayerMap;
use kv_core::window::Window;

use crate::{Attention, Graph, GraphBuilder, GraphError, Input, Node, NodeId, Op, ResultForm};

impl Graph {
    /// The same computation over `layers`: those of this graph after [`LayerMap::with_recent`].
    ///
    /// # Errors
    /// [`GraphError::AnyAge`] where a node reads rows that are kept apart, and is no [`Op::Attend`]
    /// without scores by distance; [`GraphError`] where a name of the new nodes is taken.
    pub fn with_recent(&self, layers: &LayerMap) -> Result<Self, GraphError> {
        let mut rewrite = Rewrite {
            b: GraphBuilder::new(self.shape()),
            graph: self,
            layers,
            moved: Vec::with_capacity(self.nodes().len()),
            in_recent: Vec::new(),
        };
        for node in self.nodes() {
            let id = rewrite.node(node)?;
            rewrite.moved.push(id);
        }
        let outputs: Vec<NodeId> = self.outputs().iter().map(|&id| rewrite.to(id)).collect();
        rewrite.b.finish(&outputs)
    }
}

struct Rewrite<'a> {
    b: GraphBuilder,
    graph: &'a Graph,
    layers: &'a LayerMap,
    /// The new node of each old one.
    moved: Vec<NodeId>,
    /// New nodes that store rows, each with the one that stores them as recent ones.
    in_recent: Vec<(NodeId, NodeId)>,
}

impl Rewrite<'_> {
    fn to(&self, id: NodeId) -> NodeId {
        self.moved.get(id.as_usize()).copied().unwrap_or(id)
    }

    fn node(&mut self, node: &Node) -> Result<NodeId, GraphError> {
        let operands: Vec<NodeId> = node.operands.iter().map(|&id| self.to(id)).collect();
        if let Op::Input(Input::Visibility { part, window }) = node.op {
            let window = self.window_of(part).unwrap_or(window);
            return self.b.input(Input::Visibility { part, window });
        }
        let layer = node.op.layer_of_rows();
        let recent = layer.and_then(|layer| self.layers.recent_of(layer));
        let (Some(layer), Some(recent)) = (layer, recent) else {
            return self.b.copy_node(self.graph, node, &operands);
        };
        match (&node.op, operands.as_slice()) {
            (Op::StoreKv { .. }, &[k, v, _]) => {
                let (cells, name) = (self.cells(recent)?, named(node, "recent"));
                let second = self.b.store_kv(&name, recent, [k, v, cells])?;
                self.stored(node, &operands, second)
            }
            (Op::StoreK { .. }, &[k, _]) => {
                let (cells, name) = (self.cells(recent)?, named(node, "recent"));
                let second = self.b.store_k(&name, recent, [k, cells])?;
                self.stored(node, &operands, second)
            }
            (
                Op::Attend {
                    spec,
                    sinks,
                    relative: None,
                    ..
                },
                &[q, own, seen, ..],
            ) => {
                let sinks = sinks.as_deref();
                let stored = self.in_recent.iter().find(|(first, _)| *first == own);
                let Some(&(_, in_recent)) = stored else {
                    return Err(any_age(node, layer));
                };
                let name = named(node, "old");
                let old = self.b.attend_partial(&name, layer, *spec, [q, own, seen])?;
                // A sink takes part once.
                let attention = Attention { spec: *spec, sinks };
                let new = self.attend_recent(node, recent, attention, [q, in_recent])?;
                self.b
                    .merge_partials(&node.name, ResultForm::Whole, [old, new])
            }
            _ => Err(any_age(node, layer)),
        }
    }

    /// Attention over the rows that are kept apart from old ones.
    fn attend_recent(
        &mut self,
        node: &Node,
        layer: LayerIdx,
        attention: Attention<'_>,
        rows: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let window = self.window_of(self.part(layer)).unwrap_or_default();
        let name = named(node, "recent");
        let last = self.attend_through(&name, (layer, window), attention, rows)?;
        let Some(window) = window.first() else {
            return Ok(last);
        };
        let name = named(node, "first");
        let first = self.attend_through(&name, (layer, window), attention.spec.into(), rows)?;
        let name = named(node, "both");
        self.b
            .merge_partials(&name, ResultForm::Partial, [first, last])
    }

    fn attend_through(
        &mut self,
        name: &str,
        (layer, window): (LayerIdx, Window),
        attention: Attention<'_>,
        [q, stored]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let part = self.part(layer);
        let seen = self.b.input(Input::Visibility { part, window })?;
        self.b
            .attend_partial(name, layer, attention, [q, stored, seen])
    }

    /// Adds a node that stores; `second` stores the same as recent rows.
    fn stored(
        &mut self,
        node: &Node,
        operands: &[NodeId],
        second: NodeId,
    ) -> Result<NodeId, GraphError> {
        let first = self.b.copy_node(self.graph, node, operands)?;
        self.in_recent.push((first, second));
        Ok(first)
    }

    /// The part over which a layer attends.
    fn part(&self, layer: LayerIdx) -> PartIdx {
        self.layers.part_of(layer).unwrap_or_default()
    }

    /// The window of a part.
    fn window_of(&self, part: PartIdx) -> Option<Window> {
        let parts = self.layers.parts();
        parts.get(part.as_usize()).map(|part| part.window)
    }

    fn cells(&mut self, layer: LayerIdx) -> Result<NodeId, GraphError> {
        let part = self.part(layer);
        self.b.input(Input::Cells { part })
    }
}

/// `kqv-3` becomes `kqv.old-3`: the number of the block stays last.
fn named(node: &Node, age: &str) -> String {
    match node.name.rsplit_once('-') {
        Some((name, block)) if block.parse::<u32>().is_ok() => format!("{name}.{age}-{block}"),
        _ => format!("{}.{age}", node.name),
    }
}

fn any_age(node: &Node, layer: LayerIdx) -> GraphError {
    GraphError::AnyAge {
        node: node.name.clone(),
        op: node.op.name(),
        layer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{AttendSpec, GraphShape};
    use kv_core::layers::{AttentionMemory, LayerMemory, RecentTokens};

    const SPEC: AttendSpec = AttendSpec {
        n_heads: 2,
        kv_heads: 1,
        k_dim: 4,
        v_dim: 4,
        scale: 0.5,
        soft_cap: None,
        alibi: None,
    };

    fn layers() -> LayerMap {
        let through = |window| AttentionMemory {
            kv_heads: SPEC.kv_heads,
            k_dim: SPEC.k_dim,
            v_dim: SPEC.v_dim,
            window,
        };
        LayerMap::new(vec![
            LayerMemory::Attention(through(Window::Sliding(9))),
            LayerMemory::Attention(through(Window::Full)),
            LayerMemory::SharedWith(LayerIdx(1)),
        ])
    }

    /// Queries, and what a layer stores.
    fn store(b: &mut GraphBuilder, layer: u32, part: u32) -> [NodeId; 3] {
        let x = b.input(Input::Embeddings { dim: 8 }).unwrap();
        let (part, window) = (
            PartIdx(part),
            [Window::Sliding(9), Window::Full][part as usize],
        );
        let cells = b.input(Input::Cells { part }).unwrap();
        let seen = b.input(Input::Visibility { part, window }).unwrap();
        let mut b = b.scope(LayerIdx(layer));
        let q = b.reshape("q", x, &[3, 2, 4]).unwrap();
        let k = b.columns("k", x, 0..4).unwrap();
        let k = b.reshape("k_heads", k, &[3, 1, 4]).unwrap();
        let stored = b.store_kv("kv", LayerIdx(layer), [k, k, cells]).unwrap();
        [q, stored, seen]
    }

    fn builder() -> GraphBuilder {
        GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        })
    }

    #[test]
    fn layers_that_see_everything_attend_in_two_parts() {
        let mut b = builder();
        let sliding = store(&mut b, 0, 0);
        let a = b.attend("kqv-0", LayerIdx(0), SPEC, sliding).unwrap();
        let full = store(&mut b, 1, 1);
        let with_sinks = Attention {
            spec: SPEC,
            sinks: Some("sinks.w"),
        };
        let y = b.attend("kqv-1", LayerIdx(1), with_sinks, full).unwrap();
        let z = b.attend("kqv-2", LayerIdx(2), SPEC, full).unwrap();
        let graph = b.finish(&[a, y, z]).unwrap();
        let apart = |tokens| {
            let layers = layers().with_recent(tokens).unwrap();
            let aged = graph.with_recent(&layers).unwrap();
            assert_eq!(Graph::from_json(&aged.to_json().unwrap()), Ok(aged.clone()));
            aged.text().to_string()
        };
        insta::assert_snapshot!(apart(RecentTokens::last(5)));
        let with_first = RecentTokens {
            n_last: 5,
            n_first: 2,
        };
        insta::assert_snapshot!("with_first_tokens", apart(with_first));
    }

    #[test]
    fn what_reads_rows_of_any_age_is_refused() {
        let mut b = builder();
        let [q, stored, _] = store(&mut b, 1, 1);
        let kq = b.kq("kq-1", LayerIdx(1), SPEC, [q, stored], 16).unwrap();
        let graph = b.finish(&[kq]).unwrap();
        let layers = layers().with_recent(RecentTokens::last(5)).unwrap();
        let refused = graph.with_recent(&layers).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "'kq-1' (kq) reads the rows of layer 1 of any age: they cannot have other types once they \
             are old"
        );
        assert_eq!(graph.with_recent(&self::layers()), Ok(graph));
    }

    #[test]
    fn numbers_of_blocks_stay_last() {
        let node = |name: &str| {
            let mut b = GraphBuilder::new(GraphShape {
                n_tokens: 1,
                n_outputs: 1,
            });
            let tokens = b.input(Input::Tokens).unwrap();
            let id = b.embed(name, tokens, "table", [9, 4]).unwrap();
            let graph = b.finish(&[id]).unwrap();
            graph.node(id).unwrap().clone()
        };
        assert_eq!(named(&node("kqv-3"), "old"), "kqv.old-3");
        assert_eq!(named(&node("kqv-all"), "old"), "kqv-all.old");
        assert_eq!(named(&node("kqv"), "old"), "kqv.old");
    }
}
