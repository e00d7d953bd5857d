//! [`Encoder`]: embedding, layers of attention within the ubatch and feed-forward, final rows, or
//! scores of them.
//!
//! Invariant: only output rows pass through the last feed-forward block. Weight names are those of
//! GGUF files. Knows no architecture by name.

use kv_core::{LayerIdx, PartIdx};
use kv_graph::{Affine, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId, TableRow};
use model_core::blocks::{
    AttentionBlock, FeedForward, LayerContext, Norm, POSITION_EMBEDDING, TOKEN_EMBEDDING,
};

use crate::head::{HeadPooling, ScoreHead};

/// Name of the learned rows of token types.
pub(crate) const TOKEN_TYPES: &str = "token_types.weight";
/// Name of the matrix from the width of embeddings to that of layers.
const INPUT_PROJECTION: &str = "token_embd_proj.weight";

/// The place of a layer's norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EncoderNorms {
    /// After the sum of each block and its input (BERT).
    #[default]
    PostNorm,
    /// Before each block, but not before the first attention where its rows are normed already;
    /// and one after the last layer (ModernBERT).
    PreNorm,
    /// As that, and of what each block adds (Gemma).
    PreAndPostNorm,
}

/// The norm of rows before the first layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum InputNorm {
    /// They are.
    #[default]
    Normed,
    /// They are not.
    None,
}

/// One layer.
#[derive(Clone, Debug, PartialEq)]
pub struct EncoderLayer {
    /// Its attention, with the window that tokens see.
    pub attention: AttentionBlock,
    /// Its feed-forward block.
    pub feed_forward: FeedForward,
    /// The layer whose weights it computes with: itself, or an earlier one (ALBERT).
    pub weights: LayerIdx,
}

/// The input of the first layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct EncoderInput {
    /// Width of embeddings; where it is not that of layers, a matrix leads from one to the other.
    pub dim: usize,
    /// Positions with a learned row, where positions are rows.
    pub positions: Option<usize>,
    /// Token types with a learned row, where there are such rows.
    pub token_types: Option<usize>,
    /// Factor on embeddings, where there is one.
    pub scale: Option<f32>,
    /// The norm of the sum of all that.
    pub norm: InputNorm,
}

/// Settings of a whole encoder.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Encoder {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows.
    pub dim: usize,
    /// The input of the first layer.
    pub input: EncoderInput,
    /// Every norm.
    pub norm: Norm,
    /// The place of the layers' norms.
    pub norms: EncoderNorms,
    /// Name of the norm after the last layer, where there is one.
    pub output_norm: &'static str,
    /// The layers, in order.
    pub layers: Vec<EncoderLayer>,
    /// Widths of the rows that the matrices `dense_2` and `dense_3` make of the last ones, as many
    /// as there are.
    pub dense: Vec<usize>,
    /// The head that makes scores of rows, where there is one.
    pub head: Option<ScoreHead>,
}

/// Matrices that sentence encoders have behind their pooling. They may as well come before it: what
/// is linear has the same mean.
pub(crate) const DENSE: [&str; 2] = ["dense_2.weight", "dense_3.weight"];

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
        let is_mean = self
            .head
            .is_some_and(|head| head.pooling == HeadPooling::Mean);
        for (at, layer) in self.layers.iter().enumerate() {
            let output_rows = if at == last && shape.n_outputs < shape.n_tokens && !is_mean {
                Some(b.input(Input::OutputRows)?)
            } else {
                None
            };
            let index = LayerIdx(u32::try_from(at).unwrap_or(u32::MAX));
            let at = LayerContext {
                layer: index,
                index_layer: index,
                // Attention within the ubatch has no memory.
                part: PartIdx(0),
                output_rows,
            };
            let mut b = b.scope_with_weights_of(index, layer.weights);
            x = self.layer(&mut b, at, layer, x)?;
        }
        if self.norms != EncoderNorms::PostNorm {
            x = self
                .norm
                .build(&mut b, "result_norm", x, self.output_norm)?;
        }
        for (weight, &width) in DENSE.iter().zip(&self.dense) {
            let name = format!("result_{}", weight.trim_end_matches(".weight"));
            x = b.linear(&name, x, weight, width)?;
        }
        if let Some(head) = self.head {
            if let (true, Some(layer)) = (is_mean, self.layers.first()) {
                x = ScoreHead::mean(&mut b, layer.attention.head_sizes(), x)?;
                if shape.n_outputs < shape.n_tokens {
                    let rows = b.input(Input::OutputRows)?;
                    x = b.take_rows("cls_rows", x, rows)?;
                }
            }
            x = head.build(&mut b, x)?;
        }
        b.finish(&[x])
    }

    /// Rows of tokens, positions and token types, normed.
    fn embedding(&self, b: &mut GraphBuilder) -> Result<NodeId, GraphError> {
        let EncoderInput {
            dim,
            positions,
            token_types,
            scale,
            norm,
        } = self.input;
        let tokens = b.input(Input::Tokens)?;
        let mut x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, [self.vocab, dim])?;
        if let Some(factor) = scale {
            x = b.scale("inp_scaled", x, factor)?;
        }
        match token_types {
            None => {}
            Some(n_rows @ ..2) => {
                let first = TableRow {
                    weight: TOKEN_TYPES,
                    n_rows,
                    row: 0,
                };
                x = b.add_row("inp_typed", x, first)?;
            }
            Some(n_types) => {
                let types = b.input(Input::TokenTypes)?;
                let rows = b.embed("type_embd", types, TOKEN_TYPES, [n_types, dim])?;
                x = b.add("inp_typed", x, rows)?;
            }
        }
        if let Some(n_positions) = positions {
            let positions = b.input(Input::Positions)?;
            let rows = b.embed(
                "pos_embd",
                positions,
                POSITION_EMBEDDING,
                [n_positions, dim],
            )?;
            x = b.add("inp_placed", x, rows)?;
        }
        if norm == InputNorm::Normed {
            x = self.norm.build(b, "inp_norm", x, "token_embd_norm")?;
        }
        if dim == self.dim {
            Ok(x)
        } else {
            let projection = Affine::new(INPUT_PROJECTION).bias("token_embd_proj.bias");
            b.affine("inp_proj", x, projection, self.dim)
        }
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        layer: &EncoderLayer,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let pre_norm = self.norms != EncoderNorms::PostNorm;
        let is_normed = at.layer == LayerIdx(0) && self.input.norm == InputNorm::Normed;
        let normed = if pre_norm && !is_normed {
            self.norm.build(b, "attn_norm", x, "attn_norm")?
        } else {
            x
        };
        let attended = layer.attention.build_in_batch(b, at, normed)?;
        let attended = self.post_norm(b, "attn_post_norm", attended, "post_attention_norm")?;
        let x = at.take_rows(b, "inpL_rows", x)?;
        let x = b.add("ffn_inp", attended, x)?;
        if pre_norm {
            let normed = self.norm.build(b, "ffn_norm", x, "ffn_norm")?;
            let fed = layer.feed_forward.build(b, normed, x)?;
            let fed = self.post_norm(b, "ffn_post_norm", fed, "post_ffw_norm")?;
            return b.add("l_out", fed, x);
        }
        let x = self.norm.build(b, "attn_out_norm", x, "attn_output_norm")?;
        let fed = layer.feed_forward.build(b, x, x)?;
        let x = b.add("ffn_sum", fed, x)?;
        self.norm.build(b, "l_out", x, "layer_output_norm")
    }

    /// The norm of what a block adds, where there is one.
    fn post_norm(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        weight: &str,
    ) -> Result<NodeId, GraphError> {
        match self.norms {
            EncoderNorms::PreAndPostNorm => self.norm.build(b, name, x, weight),
            EncoderNorms::PostNorm | EncoderNorms::PreNorm => Ok(x),
        }
    }
}
