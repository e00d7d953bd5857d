//! [`Encoder`]: embedding, layers of attention within the ubatch and feed-forward, final rows, or
//! scores of them.
//!
//! Invariant: only output rows pass through the last feed-forward block. Weight names are those of
//! GGUF files. Knows no architecture by name.

use kv_core::graph::{
    Affine, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId, TableRow,
};
use kv_core::{LayerIdx, PartIdx};
use model_core::blocks::{AttentionBlock, FeedForwardBlock, LayerContext, Norm, TOKEN_EMBEDDING};

/// Name of the learned rows of positions.
pub(crate) const POSITION_EMBEDDING: &str = "position_embd.weight";
/// Name of the learned rows of token types.
pub(crate) const TOKEN_TYPES: &str = "token_types.weight";

/// Where a layer has its norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderNorms {
    /// After the sum of each block and its input (BERT).
    #[default]
    PostNorm,
    /// Before each block, but not before the first attention, whose rows are normed already; and
    /// one after the last layer (ModernBERT).
    PreNorm,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderLayer {
    /// Its attention, with the window that tokens see.
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
    /// Positions with a learned row, where positions are rows.
    pub positions: Option<usize>,
    /// Token types with a learned row, where there are such rows. With a head, tokens have types
    /// of their own; without one, all have the first.
    pub token_types: Option<usize>,
    /// Every norm.
    pub norm: Norm,
    /// Where layers have their norms.
    pub norms: EncoderNorms,
    /// The layers, in order.
    pub layers: Vec<EncoderLayer>,
    /// What makes scores of rows, where there is something.
    pub head: Option<ScoreHead>,
}

/// Name of the matrix of a head's dense layer.
pub(crate) const HEAD_DENSE: &str = "cls.weight";
/// Name of the matrix that gives a head's scores.
pub(crate) const HEAD_OUTPUT: &str = "cls.output.weight";

/// What makes scores of a text from the row of its first token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScoreHead {
    /// Scores of a text.
    pub n_labels: usize,
    /// What comes before the matrix that gives them.
    pub dense: HeadDense,
}

/// What comes before the matrix of scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadDense {
    /// Nothing.
    None,
    /// A dense layer and tanh.
    Tanh,
}

impl Encoder {
    /// The computation for a ubatch of `shape`, which gives `[outputs, dim]`, or with a head
    /// `[outputs, labels]`.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub fn graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let mut x = self.embedding(&mut b)?;
        let last = self.layers.len().saturating_sub(1);
        for (at, layer) in self.layers.iter().enumerate() {
            let output_rows = match at == last && shape.n_outputs < shape.n_tokens {
                true => Some(b.input(Input::OutputRows)?),
                false => None,
            };
            let index = LayerIdx(u32::try_from(at).unwrap_or(u32::MAX));
            let at = LayerContext {
                layer: index,
                // Attention within the ubatch has no memory.
                part: PartIdx(0),
                output_rows,
            };
            x = self.layer(&mut b.scope(index), at, layer, x)?;
        }
        if self.norms == EncoderNorms::PreNorm {
            x = self.norm.build(&mut b, "result_norm", x, "output_norm")?;
        }
        if let Some(head) = self.head {
            x = self.scores(&mut b, head, x)?;
        }
        b.finish(&[x])
    }

    fn scores(
        &self,
        b: &mut GraphBuilder,
        head: ScoreHead,
        mut x: NodeId,
    ) -> Result<NodeId, GraphError> {
        if head.dense == HeadDense::Tanh {
            let dense = Affine::new(HEAD_DENSE).bias("cls.bias");
            x = b.affine("cls", x, dense, self.dim)?;
            // A cap of 1 is tanh itself.
            x = b.soft_cap("cls_tanh", x, 1.0)?;
        }
        let output = Affine::new(HEAD_OUTPUT).bias("cls.output.bias");
        b.affine("result_scores", x, output, head.n_labels)
    }

    /// Rows of tokens, positions and token types, normed.
    fn embedding(&self, b: &mut GraphBuilder) -> Result<NodeId, GraphError> {
        let tokens = b.input(Input::Tokens)?;
        let mut x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, [self.vocab, self.dim])?;
        if let (Some(n_types @ 2..), Some(_)) = (self.token_types, self.head) {
            let types = b.input(Input::TokenTypes)?;
            let rows = b.embed("type_embd", types, TOKEN_TYPES, [n_types, self.dim])?;
            x = b.add("inp_typed", x, rows)?;
        } else if let Some(n_rows) = self.token_types {
            let first = TableRow {
                weight: TOKEN_TYPES,
                n_rows,
                row: 0,
            };
            x = b.add_row("inp_typed", x, first)?;
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
        at: LayerContext,
        layer: &EncoderLayer,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let pre_norm = self.norms == EncoderNorms::PreNorm;
        let normed = match pre_norm && at.layer != LayerIdx(0) {
            true => self.norm.build(b, "attn_norm", x, "attn_norm")?,
            false => x,
        };
        let attended = layer.attention.build_in_batch(b, at, normed)?;
        let x = at.take_rows(b, "inpL_rows", x)?;
        let x = b.add("ffn_inp", attended, x)?;
        if pre_norm {
            let normed = self.norm.build(b, "ffn_norm", x, "ffn_norm")?;
            let fed = layer.feed_forward.build(b, normed)?;
            return b.add("l_out", fed, x);
        }
        let x = self.norm.build(b, "attn_out_norm", x, "attn_output_norm")?;
        let fed = layer.feed_forward.build(b, x)?;
        let x = b.add("ffn_sum", fed, x)?;
        self.norm.build(b, "l_out", x, "layer_output_norm")
    }
}
