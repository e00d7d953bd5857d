//! [`Seq2Seq`]: the graphs of an encoder and of a decoder that attends over what it stored.
//!
//! Invariant: only output rows pass through what follows the last attention of the decoder. Weight
//! names are those of GGUF files of T5 (`enc.blk.N`, `dec.blk.N`). Knows no architecture by name.

use kv_core::layers::{LayerMap, LayerMemory};
use kv_core::{LayerIdx, PartIdx};
use kv_graph::{Affine, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId};
use model_core::blocks::{
    AttentionBlock, FeedForwardBlock, LayerContext, Norm, OUTPUT, OUTPUT_BIAS, POSITION_EMBEDDING,
    TOKEN_EMBEDDING,
};

use super::cross::{CrossAttention, CrossRows};

/// The prefix of the names of the encoder's weights.
pub(super) const ENCODER: &str = "enc.";
/// The prefix of the names of the decoder's weights.
pub(super) const DECODER: &str = "dec.";

/// One of the two stacks of layers.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    Encoder,
    Decoder,
}

/// The place of the layers' norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormPlace {
    /// Before each block, and one after the last layer (T5, M2M-100).
    #[default]
    Before,
    /// After the sum of each block and its input (BART).
    After,
}

/// The source from which a stack of layers learns the positions of its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StackPositions {
    /// From its attention.
    #[default]
    None,
    /// From so many learned rows, which are added to those of tokens, and the sum is normed.
    Learnt(usize),
    /// From so many rows that both stacks share, which are added to those of tokens.
    Shared(usize),
}

/// The layers of an encoder or a decoder, which are alike.
#[derive(Clone, Debug, PartialEq)]
pub struct Stack {
    /// Their number.
    pub n_layers: usize,
    /// Attention over the tokens of the stack itself.
    pub attention: AttentionBlock,
    /// Its feed-forward block.
    pub feed_forward: FeedForwardBlock,
    /// Positions.
    pub positions: StackPositions,
}

/// Settings of a whole encoder-decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Seq2Seq {
    /// Tokens of the vocabulary, which both stacks share.
    pub vocab: usize,
    /// Width of the rows.
    pub dim: usize,
    /// Every norm.
    pub norm: Norm,
    /// The place of the layers' norms.
    pub norms: NormPlace,
    /// Factor on embeddings, where there is one.
    pub embedding_scale: Option<f32>,
    /// The encoder.
    pub encoder: Stack,
    /// The decoder, whose layers attend over the source with as many heads.
    pub decoder: Stack,
    /// Factor on the rows that logits are made of, where there is one.
    pub output_scale: Option<f32>,
    /// The output matrix: the embedding, or one of its own.
    pub output: OutputMatrix,
    /// The bias of logits.
    pub output_bias: OutputBias,
}

/// The matrix that logits are the products with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputMatrix {
    /// The embedding.
    #[default]
    Embedding,
    /// A matrix of its own.
    Own,
}

/// The bias of logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OutputBias {
    /// They do not.
    #[default]
    None,
    /// One for every token.
    Own,
}

impl Seq2Seq {
    /// The memory of the layers: the decoder's own tokens first, then the source for each.
    pub fn memory(&self) -> LayerMap {
        let n = self.decoder.n_layers;
        let own = LayerMemory::Attention(self.decoder.attention.memory());
        let cross = CrossAttention::like(&self.decoder.attention).memory();
        LayerMap::new([vec![own; n], vec![cross; n]].concat())
    }

    /// The rows of a source for layer `at` of the decoder.
    fn cross_rows(&self, at: usize) -> CrossRows {
        CrossRows {
            layer: layer_idx(self.decoder.n_layers + at),
            // Its own tokens are the first part.
            part: PartIdx(1),
        }
    }

    /// Stores the keys and values of sources; the last rows of wanted tokens come out.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub fn encoder_graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let stack = &self.encoder;
        let mut x = self.embedding(&mut b, ENCODER, stack.positions)?;
        for number in 0..stack.n_layers {
            let at = context(number, None);
            let mut b = b.scope_in(ENCODER, at.layer);
            let normed = self.norm_before(&mut b, "attn_norm", x)?;
            let attended = stack.attention.build_in_batch(&mut b, at, normed)?;
            x = b.add("ffn_inp", attended, x)?;
            x = self.norm_after(&mut b, "attn_norm", x)?;
            x = self.feed_forward(&mut b, stack, x)?;
        }
        x = self.last_norm(&mut b, ENCODER, x)?;
        let cross = CrossAttention::like(&self.decoder.attention);
        for number in 0..self.decoder.n_layers {
            let mut b = b.scope_in(DECODER, layer_idx(number));
            cross.store(&mut b, self.cross_rows(number), x)?;
        }
        if shape.n_outputs < shape.n_tokens {
            let rows = b.input(Input::OutputRows)?;
            x = b.take_rows("result_rows", x, rows)?;
        }
        b.finish(&[x])
    }

    /// The logits of a decoder over its own tokens and the source of each sequence.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub fn decoder_graph(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let mut b = GraphBuilder::new(shape);
        let stack = &self.decoder;
        let cross = CrossAttention::like(&stack.attention);
        let mut x = self.embedding(&mut b, DECODER, stack.positions)?;
        for number in 0..stack.n_layers {
            let is_cut = number + 1 == stack.n_layers && shape.n_outputs < shape.n_tokens;
            let output_rows = if is_cut {
                Some(b.input(Input::OutputRows)?)
            } else {
                None
            };
            let at = context(number, output_rows);
            let mut b = b.scope_in(DECODER, at.layer);
            let normed = self.norm_before(&mut b, "attn_norm", x)?;
            let attended = stack
                .attention
                .build(&mut b, context(number, None), normed)?;
            x = b.add("cross_inp", attended, x)?;
            x = self.norm_after(&mut b, "attn_norm", x)?;
            let normed = self.norm_before(&mut b, "cross_attn_norm", x)?;
            let crossed = cross.attend(&mut b, at, self.cross_rows(number), normed)?;
            let rows = at.take_rows(&mut b, "inpL_rows", x)?;
            x = b.add("ffn_inp", crossed, rows)?;
            x = self.norm_after(&mut b, "cross_attn_norm", x)?;
            x = self.feed_forward(&mut b, stack, x)?;
        }
        x = self.last_norm(&mut b, DECODER, x)?;
        if let Some(factor) = self.output_scale {
            x = b.scale("result_scaled", x, factor)?;
        }
        let weights = Affine {
            weight: match self.output {
                OutputMatrix::Embedding => TOKEN_EMBEDDING,
                OutputMatrix::Own => OUTPUT,
            },
            bias: (self.output_bias == OutputBias::Own).then_some(OUTPUT_BIAS),
        };
        let logits = b.affine("result_output", x, weights, self.vocab)?;
        b.finish(&[logits])
    }

    /// Rows of tokens and, where there are any, of positions.
    fn embedding(
        &self,
        b: &mut GraphBuilder,
        stack: &str,
        positions: StackPositions,
    ) -> Result<NodeId, GraphError> {
        let tokens = b.input(Input::Tokens)?;
        let mut x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, [self.vocab, self.dim])?;
        if let Some(factor) = self.embedding_scale {
            x = b.scale("inp_scaled", x, factor)?;
        }
        let (weight, n_positions) = match positions {
            StackPositions::None => return Ok(x),
            StackPositions::Learnt(n) => (format!("{stack}{POSITION_EMBEDDING}"), n),
            StackPositions::Shared(n) => (POSITION_EMBEDDING.to_owned(), n),
        };
        let numbers = b.input(Input::Positions)?;
        let rows = b.embed("pos_embd", numbers, &weight, [n_positions, self.dim])?;
        let x = b.add("inp_placed", x, rows)?;
        match positions {
            StackPositions::Learnt(_) => {
                let weight = format!("{stack}token_embd_norm");
                self.norm.build(b, "inp_norm", x, &weight)
            }
            StackPositions::None | StackPositions::Shared(_) => Ok(x),
        }
    }

    fn feed_forward(
        &self,
        b: &mut GraphBuilder,
        stack: &Stack,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let normed = self.norm_before(b, "ffn_norm", x)?;
        let fed = stack.feed_forward.build(b, normed)?;
        let x = b.add("l_out", fed, x)?;
        self.norm_after(b, "ffn_norm", x)
    }

    fn norm_before(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self.norms {
            NormPlace::Before => self.norm.build(b, name, x, name),
            NormPlace::After => Ok(x),
        }
    }

    fn norm_after(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self.norms {
            NormPlace::Before => Ok(x),
            NormPlace::After => self.norm.build(b, name, x, name),
        }
    }

    fn last_norm(
        &self,
        b: &mut GraphBuilder,
        stack: &str,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self.norms {
            NormPlace::Before => {
                let weight = format!("{stack}output_norm");
                self.norm.build(b, "result_norm", x, &weight)
            }
            NormPlace::After => Ok(x),
        }
    }
}

fn layer_idx(at: usize) -> LayerIdx {
    LayerIdx(u32::try_from(at).unwrap_or(u32::MAX))
}

fn context(number: usize, output_rows: Option<NodeId>) -> LayerContext {
    LayerContext {
        layer: layer_idx(number),
        index_layer: layer_idx(number),
        part: PartIdx(0),
        output_rows,
    }
}
