//! [`MambaModel`]: embedding, layers of norm and mixer with residuals, norm, head.
//!
//! Invariant: only rows whose logits are wanted pass through the last projection and the head.

use kv_core::LayerIdx;
use kv_core::graph::{Graph, GraphBuilder, GraphError, GraphShape, Input};
use kv_core::layers::{LayerMap, LayerMemory};
use model_core::architecture::{Model, ModelError};
use model_core::blocks::{SsmMixer, TOKEN_EMBEDDING};

/// Settings of a whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct MambaSizes {
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// Width of the rows between layers.
    pub dim: usize,
    /// Added to the mean square in every norm.
    pub norm_eps: f32,
    /// Name of the matrix that turns the last row into logits; the embedding matrix itself where
    /// the two are tied.
    pub output_weight: String,
    /// Number of layers.
    pub n_layers: usize,
    /// The mixer of every layer.
    pub mixer: SsmMixer,
    /// Tokens of a training text.
    pub context_length: usize,
}

/// A Mamba model.
#[derive(Clone, Debug)]
pub struct MambaModel {
    architecture: &'static str,
    sizes: MambaSizes,
    memory: LayerMap,
}

impl MambaModel {
    /// A model from its settings.
    pub fn new(architecture: &'static str, sizes: MambaSizes) -> Self {
        let layer = LayerMemory::Recurrent(sizes.mixer.memory());
        Self {
            architecture,
            memory: LayerMap::new(vec![layer; sizes.n_layers]),
            sizes,
        }
    }

    /// Its settings.
    pub fn sizes(&self) -> &MambaSizes {
        &self.sizes
    }

    fn build(&self, shape: GraphShape) -> Result<Graph, GraphError> {
        let sizes = &self.sizes;
        let mut b = GraphBuilder::new(shape);
        let tokens = b.input(Input::Tokens)?;
        let embedding = [sizes.vocab, sizes.dim];
        let mut x = b.embed("inp_embd", tokens, TOKEN_EMBEDDING, embedding)?;
        for (layer, at) in (0u32..).map(LayerIdx).zip(1..=sizes.n_layers) {
            let wanted = match at == sizes.n_layers && shape.n_outputs < shape.n_tokens {
                true => Some(b.input(Input::OutputRows)?),
                false => None,
            };
            let norm = format!("blk.{layer}.attn_norm.weight");
            let normed = b.rms_norm(&format!("attn_norm-{layer}"), x, &norm, sizes.norm_eps)?;
            let mixed = sizes.mixer.build(&mut b, layer, normed, wanted)?;
            if let Some(rows) = wanted {
                x = b.take_rows(&format!("inpL_rows-{layer}"), x, rows)?;
            }
            x = b.add(&format!("l_out-{layer}"), mixed, x)?;
        }
        let x = b.rms_norm("result_norm", x, "output_norm.weight", sizes.norm_eps)?;
        let logits = b.linear("result_output", x, &sizes.output_weight, sizes.vocab)?;
        b.finish(&[logits])
    }
}

impl Model for MambaModel {
    fn architecture(&self) -> &str {
        self.architecture
    }

    fn layers(&self) -> &LayerMap {
        &self.memory
    }

    fn vocab_size(&self) -> usize {
        self.sizes.vocab
    }

    fn context_length(&self) -> usize {
        self.sizes.context_length
    }

    fn embedding_dim(&self) -> usize {
        self.sizes.dim
    }

    fn graph(&self, shape: GraphShape) -> Result<Graph, ModelError> {
        Ok(self.build(shape)?)
    }
}
