//! [`Scope`]: a builder that names nodes and weights after a layer.

use std::ops::{Deref, DerefMut};

use kv_core::ids::LayerIdx;

use crate::GraphBuilder;

/// A [`GraphBuilder`] inside of one layer: nodes get `-3` behind their names, weights `blk.3.`
/// before theirs, or `enc.blk.3.` in a stack of layers with a name. Ends with its lifetime.
#[derive(Debug)]
pub struct Scope<'a> {
    builder: &'a mut GraphBuilder,
    outer: Option<ScopeLayer>,
}

/// The layers that names get in a scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ScopeLayer {
    nodes: LayerIdx,
    weights: LayerIdx,
    /// The prefix of `blk` in names of weights.
    stack: &'static str,
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
        self.scope_with_weights_of(layer, layer)
    }

    /// As [`GraphBuilder::scope`] for a layer that computes with the weights of another one.
    pub fn scope_with_weights_of(&mut self, layer: LayerIdx, weights: LayerIdx) -> Scope<'_> {
        self.scope_of(ScopeLayer {
            nodes: layer,
            weights,
            stack: "",
        })
    }

    /// As [`GraphBuilder::scope`] in one of several stacks of layers: weights get `enc.blk.3.`
    /// before their names, where `stack` is `enc.`.
    pub fn scope_in(&mut self, stack: &'static str, layer: LayerIdx) -> Scope<'_> {
        self.scope_of(ScopeLayer {
            nodes: layer,
            weights: layer,
            stack,
        })
    }

    fn scope_of(&mut self, layer: ScopeLayer) -> Scope<'_> {
        let outer = self.layer.replace(layer);
        Scope {
            builder: self,
            outer,
        }
    }

    pub(super) fn node_name(&self, name: &str) -> String {
        match self.layer {
            Some(ScopeLayer { nodes, .. }) => format!("{name}-{nodes}"),
            None => name.to_owned(),
        }
    }

    pub(super) fn weight_name(&self, name: &str) -> String {
        match self.layer {
            Some(ScopeLayer { weights, stack, .. }) => format!("{stack}blk.{weights}.{name}"),
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
    use crate::{GraphShape, Input};

    #[test]
    fn a_layer_may_have_the_weights_of_another() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let mut x = b.input(Input::Embeddings { dim: 4 }).unwrap();
        for layer in [0, 1] {
            let mut b = b.scope_with_weights_of(LayerIdx(layer), LayerIdx(0));
            x = b.linear("y", x, "w", 4).unwrap();
        }
        let graph = b.finish(&[x]).unwrap();
        let text = graph.text().to_string();
        assert!(
            text.contains("y-1: f32[3, 4] = linear(%1, w=blk.0.w)"),
            "{text}"
        );
        assert_eq!(graph.weights().len(), 1);
    }

    #[test]
    fn names_get_the_layer_only_inside_of_its_scope() {
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 3,
            n_outputs: 3,
        });
        let mut outer = b.scope(LayerIdx(7));
        let x = outer.input(Input::Embeddings { dim: 4 }).unwrap();
        let y = outer.scope(LayerIdx(8)).linear("y", x, "w", 4).unwrap();
        let y = outer
            .scope_in("enc.", LayerIdx(9))
            .linear("y", y, "w", 4)
            .unwrap();
        let y = outer.linear("y", y, "w", 4).unwrap();
        drop(outer);
        let y = b.linear("y", y, "w", 4).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let nodes: Vec<_> = graph.nodes().iter().map(|n| &*n.name).collect();
        assert_eq!(nodes, ["inp_embd", "y-8", "y-9", "y-7", "y"]);
        let weights: Vec<_> = graph.weights().iter().map(|w| &*w.name).collect();
        assert_eq!(weights, ["blk.8.w", "enc.blk.9.w", "blk.7.w", "w"]);
    }
}
