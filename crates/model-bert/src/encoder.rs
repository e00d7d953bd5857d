//! [`Encoder`]: embedding, layers of attention within the ubatch and feed-forward, final rows.
//!
//! Invariant: only rows that are wanted pass through the last feed-forward block. Weight names are
//! those of GGUF files. Knows no architecture by name.

use kv_core::LayerIdx;
use kv_core::graph::{Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};
use model_core::blocks::{AttentionBlock, FeedForwardBlock, Norm, TOKEN_EMBEDDING};

/// Name of the rows that were learnt for positions.
pub(crate) const POSITION_EMBEDDING: &str = "position_embd.weight";
/// Name of the rows that were learnt for the parts of a text.
pub(crate) const TOKEN_TYPES: &str = "token_types.weight";

/// Where a layer's norms stand.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderNorms {
    /// Behind the sum of each block and what it was given (BERT).
    #[default]
    Behind,
    /// Before each block, but not before the first attention, whose rows were normed just then; and
    /// one after the last layer (ModernBERT).
    Before,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderLayer {
    /// Its attention; the window is how far tokens see.
    pub attention: AttentionBlock,
    /// Its feed-forward block.
    pub feed_forward: FeedForwardBlock,
}

/// Settings of a whole encoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Encoder {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows.
    pub dim: usize,
    /// Positions for which a row was learnt, where positions are rows.
    pub positions: Option<usize>,
    /// Parts of a text for which a row was learnt, where there are such rows; texts are of the
    /// first.
    pub token_types: Option<usize>,
    /// Every norm.
    pub norm: Norm,
    /// Where the norms of layers stand.
    pub norms: EncoderNorms,
    /// The layers, in order.
    pub layers: Vec<EncoderLayer>,
}

/// One layer under construction.
#[derive(Clone, Copy)]
struct At {
    index: LayerIdx,
    /// The rows that are wanted after the attention, where not all are.
    wanted: Option<NodeId>,
}

impl At {
    fn name(self, what: &str) -> String {
        format!("{what}-{}", self.index)
    }

    /// The wanted rows of `x`.
    fn take(self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        match self.wanted {
            Some(rows) => b.take_rows(&self.name("inpL_rows"), x, rows),
            None => Ok(x),
        }
    }
}

impl Encoder {
    /// The computation for a ubatch of `shape`, which gives `[outputs, dim]`.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub fn graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let mut x = self.embedding(&mut b)?;
        let last = self.layers.len().saturating_sub(1);
        for (at, layer) in self.layers.iter().enumerate() {
            let wanted = match at == last && shape.n_outputs < shape.n_tokens {
                true => Some(b.input(Input::OutputRows)?),
                false => None,
            };
            let index = LayerIdx(u32::try_from(at).unwrap_or(u32::MAX));
            x = self.layer(&mut b, At { index, wanted }, layer, x)?;
        }
        if self.norms == EncoderNorms::Before {
            x = self.norm.build(&mut b, "result_norm", x, "output_norm")?;
        }
        b.finish(&[x])
    }

    /// Rows of tokens, positions and the first part of a text, normed.
    fn embedding(&self, b: &mut GraphBuilder) -> Result<NodeId, GraphError> {
        let tokens = b.input(Input::Tokens)?;
        let mut x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, [self.vocab, self.dim])?;
        if let Some(n_types) = self.token_types {
            x = b.add_row("inp_typed", x, (TOKEN_TYPES, n_types), 0)?;
        }
        if let Some(n_positions) = self.positions {
            let positions = b.input(Input::Positions)?;
            let sizes = [n_positions, self.dim];
            let rows = b.embed("pos_embd", positions, POSITION_EMBEDDING, sizes)?;
            x = b.add("inp_placed", x, rows)?;
        }
        self.norm.build(b, "inp_norm", x, "token_embd_norm")
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        at: At,
        layer: &EncoderLayer,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let before = self.norms == EncoderNorms::Before;
        let normed = match before && at.index != LayerIdx(0) {
            true => self.normed(b, at, "attn_norm", "attn_norm", x)?,
            false => x,
        };
        let attended = layer
            .attention
            .build_in_batch(b, at.index, normed, at.wanted)?;
        let x = at.take(b, x)?;
        let x = b.add(&at.name("ffn_inp"), attended, x)?;
        if before {
            let normed = self.normed(b, at, "ffn_norm", "ffn_norm", x)?;
            let fed = layer.feed_forward.build(b, at.index, normed)?;
            return b.add(&at.name("l_out"), fed, x);
        }
        let x = self.normed(b, at, "attn_out_norm", "attn_output_norm", x)?;
        let fed = layer.feed_forward.build(b, at.index, x)?;
        let x = b.add(&at.name("ffn_sum"), fed, x)?;
        self.normed(b, at, "l_out", "layer_output_norm", x)
    }

    fn normed(
        &self,
        b: &mut GraphBuilder,
        at: At,
        name: &str,
        weight: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let weight = format!("blk.{}.{weight}", at.index);
        self.norm.build(b, &at.name(name), x, &weight)
    }
}
