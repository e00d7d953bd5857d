//! Per-layer inputs: every layer has an embedding of each token of its own, which a gate lets into
//! the rows behind the layer (Gemma 3n and 4).
//!
//! Does not know what layers compute.

use kv_graph::{Activation, GraphBuilder, GraphError, Input, NodeId};

use super::{LayerContext, Norm};

/// Name of the matrix of all layers' embeddings, `[vocab, layers * dim]`.
pub const PER_LAYER_EMBEDDING: &str = "per_layer_token_embd.weight";

/// Settings of per-layer inputs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PerLayerInputs {
    /// Tokens that have embeddings.
    pub vocab: usize,
    /// Layers of the model.
    pub n_layers: usize,
    /// Values that a layer gets for a token.
    pub dim: usize,
    /// Applied to gates.
    pub activation: Activation,
    /// Norm of projected rows, and of what is added to rows.
    pub norm: Norm,
}

impl PerLayerInputs {
    /// The inputs of all layers, `[tokens, layers * dim]`: the embeddings of the tokens and a
    /// normed projection of the rows `x [tokens, width]` that enter the first layer, added and
    /// divided by the root of 2.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        let (n, width) = match *b.shape_of(x) {
            [n, width] => (n, width),
            _ => (0, 0),
        };
        let all = self.n_layers * self.dim;
        let by_layer = [n, self.n_layers, self.dim];
        let tokens = b.input(Input::Tokens)?;
        let sizes = [self.vocab, all];
        let embedded = b.embed("inp_per_layer_embd", tokens, PER_LAYER_EMBEDDING, sizes)?;
        let embedded = b.scale("inp_per_layer", embedded, (self.dim as f32).sqrt())?;
        let weight = "per_layer_model_proj.weight";
        let projected = b.linear("per_layer_proj", x, weight, all)?;
        let factor = 1.0 / (width as f32).sqrt();
        let projected = b.scale("per_layer_proj_scaled", projected, factor)?;
        let projected = b.reshape("per_layer_proj_layers", projected, &by_layer)?;
        let name = "per_layer_proj_norm";
        let projected = self.norm.build(b, name, projected, "per_layer_proj_norm")?;
        let projected = b.reshape("per_layer_proj_flat", projected, &[n, all])?;
        let sum = b.add("per_layer_sum", projected, embedded)?;
        b.scale("per_layer_inputs", sum, std::f32::consts::FRAC_1_SQRT_2)
    }

    /// The layer's rows with its input added: `x [rows, width]` in, the same shape out, where
    /// `inputs` is what [`PerLayerInputs::build`] gave.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn gated(
        &self,
        b: &mut GraphBuilder,
        at: LayerContext,
        inputs: NodeId,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let width = b.shape_of(x).last().copied().unwrap_or(0);
        let first = at.layer.as_usize() * self.dim;
        let own = b.columns("per_layer_inp", inputs, first..first + self.dim)?;
        let own = at.take_rows(b, "per_layer_inp_rows", own)?;
        let gate = b.linear("per_layer_gate", x, "inp_gate.weight", self.dim)?;
        let gated = b.gate("per_layer_gated", self.activation, gate, own)?;
        let projected = b.linear("per_layer_out", gated, "proj.weight", width)?;
        self.norm
            .build(b, "per_layer_post_norm", projected, "post_norm")
    }
}
