//! [`FusedHead`]: a head that reads rows of several layers of its model (EAGLE-3; Li et al., arXiv
//! 2503.01840).
//!
//! The model's own graph fuses the rows of a token by one matrix. With the embedding of the token
//! after it, each normed and concatenated, they are what the attention of the head's one layer
//! reads. The row behind that layer has the place of the fused one, so the head can go on from its
//! own. It may know some of the model's tokens alone. Invariant: the fused rows are the last output
//! of the model's graph. Knows no architecture by name.

use std::sync::Arc;

use kv_core::TokenId;
use kv_graph::{Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};

use super::decoder::wanted_rows;
use super::{Decoder, DraftHead, LayerContext, Norm};

/// Beginning of the names of tensors of a head that is a file of its own, but for its layer's.
pub const OWN_HEAD: &str = "draft.";

/// A head that reads rows of several layers.
#[derive(Clone, Debug, PartialEq)]
pub struct FusedHead {
    /// The rows that are fused, in order: those before the layers of these numbers, or those behind
    /// the last layer, where there is none of the number.
    pub layers: [usize; 3],
    /// Width of its rows.
    pub dim: usize,
    /// Tokens that it knows: rows of its output matrix.
    pub vocab: usize,
    /// The model's names of these tokens, where it does not know them all.
    pub tokens: Option<Arc<[TokenId]>>,
    /// Every norm of its rows.
    pub norm: Norm,
    /// The treatment of the rows before the matrix that fuses them.
    pub before: BeforeFusion,
    /// The rows that its attention adds to.
    pub residual: HeadResidual,
}

/// The treatment of the rows of several layers before the matrix that fuses them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BeforeFusion {
    /// None.
    #[default]
    Nothing,
    /// They are normed and concatenated.
    Normed,
}

/// The rows that the attention of a head adds to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadResidual {
    /// The fused rows.
    #[default]
    Fused,
    /// The same behind their norm.
    Normed,
}

impl FusedHead {
    /// Adds the fusion of rows to the model's graph.
    pub(super) fn fuse(
        &self,
        b: &mut GraphBuilder,
        [low, middle, high]: [NodeId; 3],
    ) -> Result<NodeId, GraphError> {
        let two = b.concat("draft_low_middle", low, middle)?;
        let mut all = b.concat("draft_layers", two, high)?;
        let name = |what: &str| format!("{OWN_HEAD}{what}");
        if self.before == BeforeFusion::Normed {
            all = self
                .norm
                .build(b, "draft_layers_norm", all, &name("enc.output_norm"))?;
        }
        b.linear("draft_fused", all, &name("fc.weight"), self.dim)
    }

    /// The computation of the head as [`DraftHead::graph`] says, over fused rows.
    pub(super) fn graph(
        &self,
        head: &DraftHead,
        decoder: &Decoder,
        shape: GraphShape,
    ) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let (norm, dim) = (self.norm, self.dim);
        let tokens = b.input(Input::Tokens)?;
        let fused = b.input(Input::Embeddings { dim })?;
        let sizes = [decoder.vocab, dim];
        let embedded = b.embed("head_embd", tokens, &head.embedding, sizes)?;
        let at = LayerContext {
            output_rows: wanted_rows(&mut b)?,
            ..decoder.place_of(decoder.layers.len())
        };
        let x = {
            let b = &mut b.scope(at.layer);
            let embedded = norm.build(b, "head_enorm", embedded, "attn_norm")?;
            let normed = norm.build(b, "head_hnorm", fused, "attn_norm_2")?;
            let both = b.concat("head_both", embedded, normed)?;
            let residual = match self.residual {
                HeadResidual::Fused => fused,
                HeadResidual::Normed => normed,
            };
            let mut x = residual;
            for layer in &head.layers {
                let mixed = layer.mixer.build(b, at, both)?;
                x = at.take_rows(b, "inpL_rows", x)?;
                x = b.add("ffn_inp", mixed, x)?;
                if let Some(feed_forward) = &layer.feed_forward {
                    let normed = norm.build(b, "ffn_norm", x, "ffn_norm")?;
                    let fed = feed_forward.build(b, normed, x)?;
                    x = b.add("l_out", fed, x)?;
                }
            }
            x
        };
        let normed = norm.build(&mut b, "head_norm", x, &head.last_norm)?;
        let logits = b.linear("head_output", normed, &head.output_weight, self.vocab)?;
        b.finish(&[logits, x])
    }
}
