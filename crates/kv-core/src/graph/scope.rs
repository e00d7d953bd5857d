//! [`Scope`]: a builder that names nodes and weights after a layer.

use std::ops::{Deref, DerefMut};

use super::GraphBuilder;
use crate::ids::LayerIdx;

/// A [`GraphBuilder`] inside of one layer: nodes get `-3` behind their names, weights `blk.3.`
/// before theirs. Ends with its lifetime.
#[derive(Debug)]
pub struct Scope<'a> {
    builder: &'a mut GraphBuilder,
    outer: Option<LayerIdx>,
}

impl Deref for Scope<'_> {
    type Target = GraphBuilder;

    fn deref(&self) -> &GraphBuilder {
        self.builder
    }
}

impl DerefMut for Scope<'_> {
    fn deref_mut(&mut self) -> &mut GraphBuilder {
        self.builder
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        self.builder.layer = self.outer;
    }
}

impl GraphBuilder {
    /// Names what is added after `layer`: node `attn_norm` becomes `attn_norm-3`, weight
    /// `attn_norm.weight` becomes `blk.3.attn_norm.weight`. Inputs, and the divisors of rotations,
    /// belong to no layer and keep their names.
    pub fn scope(&mut self, layer: LayerIdx) -> Scope<'_> {
        let outer = self.layer.replace(layer);
        Scope {
            builder: self,
            outer,
        }
    }

    pub(super) fn node_name(&self, name: &str) -> String {
        match self.layer {
            Some(layer) => format!("{name}-{layer}"),
            None => name.to_owned(),
        }
    }

    pub(super) fn weight_name(&self, name: &str) -> String {
        match self.layer {
            Some(layer) => format!("blk.{layer}.{name}"),
            None => name.to_owned(),
        }
    }

    pub(super) fn optional_weight_name(&self, name: Option<&str>) -> Option<String> {
        name.map(|name| self.weight_name(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::graph::{GraphShape, Input};

    #[test]
    fn names_get_the_layer_only_inside_of_its_scope() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let mut outer = b.scope(LayerIdx(7));
        let x = outer.input(Input::Embeddings { dim: 4 }).unwrap();
        let y = outer.scope(LayerIdx(8)).linear("y", x, "w", 4).unwrap();
        let y = outer.linear("y", y, "w", 4).unwrap();
        drop(outer);
        let y = b.linear("y", y, "w", 4).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let nodes: Vec<_> = graph.nodes().iter().map(|n| &*n.name).collect();
        assert_eq!(nodes, ["inp_embd", "y-8", "y-7", "y"]);
        let weights: Vec<_> = graph.weights().iter().map(|w| &*w.name).collect();
        assert_eq!(weights, ["blk.8.w", "blk.7.w", "w"]);
    }
}
