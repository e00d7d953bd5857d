//! [`Mamba`]: from a file's metadata to a model.

use std::sync::Arc;

use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{ConvBias, SsmMixerBlock, TOKEN_EMBEDDING};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{Hyperparameters, optional_weight};

use crate::model::{MambaModel, MambaSizes};

/// The output matrix of models that do not reuse the embedding matrix.
const OUTPUT: &str = "output.weight";

/// The architecture `mamba`: Mamba-1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mamba;

impl Architecture for Mamba {
    fn name(&self) -> &'static str {
        "mamba"
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, self.name());
        // Falcon Mamba calls itself `mamba` too.
        if hyper.optional("ssm.dt_b_c_rms")? == Some(true) {
            let reason = "norms of dt, B and C are not supported yet".to_owned();
            return Err(hyper.wrong("ssm.dt_b_c_rms", reason));
        }
        let dim = hyper.count("embedding_length")?;
        let conv_bias = match optional_weight(weights, "blk.0.ssm_conv1d.bias")? {
            Some(_) => ConvBias::PerChannel,
            None => ConvBias::None,
        };
        let tied = optional_weight(weights, OUTPUT)?.is_none();
        let sizes = MambaSizes {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            norm_eps: hyper.norm_eps()?,
            output_weight: if tied { TOKEN_EMBEDDING } else { OUTPUT }.to_owned(),
            n_layers: hyper.n_layers()?,
            mixer: SsmMixerBlock {
                d_inner: hyper.count("ssm.inner_size")?,
                d_state: hyper.count("ssm.state_size")?,
                d_conv: hyper.count("ssm.conv_kernel")?,
                dt_rank: hyper.count("ssm.time_step_rank")?,
                conv_bias,
            },
            context_length: hyper.count("context_length")?,
        };
        Ok(Arc::new(MambaModel::new(sizes)))
    }

    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        Ok(Arc::new(MambaModel::new(MambaSizes {
            vocab: 50_280,
            dim: 768,
            norm_eps: 1e-5,
            output_weight: TOKEN_EMBEDDING.to_owned(),
            n_layers: 2,
            mixer: SsmMixerBlock {
                d_inner: 1536,
                d_state: 16,
                d_conv: 4,
                dt_rank: 48,
                conv_bias: ConvBias::PerChannel,
            },
            context_length: 2048,
        })))
    }
}
