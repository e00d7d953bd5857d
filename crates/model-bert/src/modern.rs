//! [`ModernBert`]: rotary positions, two of three layers see a symmetric window, gated feed-forward
//! blocks, norms before the blocks (Warner et al., arXiv 2412.13663).

use std::sync::Arc;

use kv_core::Window;
use kv_core::graph::Activation;
use kv_core::rope::{RopeScaling, RopeSpec, RopeStyle};
use kv_core::weights::WeightSource;
use model_core::architecture::{Architecture, Model, ModelError};
use model_core::blocks::{
    AttentionBlock, FeedForwardBlock, FeedForwardForm, Norm, NormKind, QkvWeights,
};
use model_core::gguf::Metadata;
use model_core::hyperparameters::{HeadSizes, Hyperparameters};
use model_core::windows::{FullLayer, WindowPattern};

use crate::encoder::{Encoder, EncoderLayer, EncoderNorms};
use crate::model::EncoderModel;
use crate::read;

/// The architecture `modern-bert`.
#[derive(Clone, Copy, Debug)]
pub struct ModernBert;

const NAME: &str = "modern-bert";

/// The first layer of three sees everything, unless the file specifies otherwise.
const PATTERN: WindowPattern = WindowPattern {
    period: 3,
    full: FullLayer::First,
};

const fn norm(eps: f32) -> Norm {
    Norm {
        kind: NormKind::Layer,
        eps,
    }
}

fn layer(
    heads: HeadSizes,
    window: Window,
    rope: RopeSpec,
    hidden: usize,
    activation: Activation,
) -> EncoderLayer {
    EncoderLayer {
        attention: AttentionBlock {
            weights: QkvWeights::Fused,
            rope: Some(rope),
            window,
            ..heads.into()
        },
        feed_forward: FeedForwardBlock {
            hidden,
            activation,
            form: FeedForwardForm::FusedGate,
        },
    }
}

/// How far the layers see: a window reaches half its width to either side.
fn windows(hyper: &Hyperparameters<'_>, n_layers: usize) -> Result<Vec<Window>, ModelError> {
    let windows = hyper.windows(n_layers, PATTERN)?.into_iter();
    let symmetric = windows.map(|window| match window.width() {
        Some(width) => Window::Symmetric(width),
        None => Window::Full,
    });
    Ok(symmetric.collect())
}

impl Architecture for ModernBert {
    fn name(&self) -> &'static str {
        NAME
    }

    fn model(
        &self,
        metadata: &Metadata,
        weights: &dyn WeightSource,
    ) -> Result<Arc<dyn Model>, ModelError> {
        let hyper = Hyperparameters::new(metadata, NAME);
        read::refuse_causal(&hyper)?;
        let dim = hyper.count("embedding_length")?;
        let (n_layers, heads) = read::heads(&hyper, dim)?;
        let (hidden, activation) = (
            hyper.count("feed_forward_length")?,
            read::activation(&hyper)?,
        );
        let rope = hyper.rope(RopeStyle::Neox, heads.k_dim, weights)?;
        let local = RopeSpec {
            base: hyper.rope_base("rope.freq_base_swa")?.unwrap_or(rope.base),
            ..rope.clone()
        };
        let of_layer = |window| match window {
            Window::Full => layer(heads, window, rope.clone(), hidden, activation),
            _ => layer(heads, window, local.clone(), hidden, activation),
        };
        let encoder = Encoder {
            vocab: hyper.vocab(weights, dim)?,
            dim,
            positions: None,
            token_types: None,
            norm: norm(hyper.layer_norm_eps()?),
            norms: EncoderNorms::PreNorm,
            head: None,
            layers: windows(&hyper, n_layers)?
                .into_iter()
                .map(of_layer)
                .collect(),
        };
        let context_length = hyper.count("context_length")?;
        Ok(Arc::new(EncoderModel::new(NAME, encoder, context_length)))
    }

    /// Two layers of the size of ModernBERT base: one that sees everything, one with a window.
    fn example(&self) -> Result<Arc<dyn Model>, ModelError> {
        let heads = HeadSizes {
            n_heads: 12,
            kv_heads: 12,
            k_dim: 64,
            v_dim: 64,
        };
        let rope = |base| RopeSpec {
            style: RopeStyle::Neox,
            n_rot: 64,
            base,
            scaling: RopeScaling::None,
            factors: None,
        };
        let (hidden, activation) = (1152, Activation::GeluErf);
        let layers = [
            (Window::Full, rope(160_000.0)),
            (Window::Symmetric(128), rope(10_000.0)),
        ];
        let encoder = Encoder {
            vocab: 50_368,
            dim: 768,
            positions: None,
            token_types: None,
            norm: norm(1e-5),
            norms: EncoderNorms::PreNorm,
            head: None,
            layers: layers
                .map(|(window, rope)| layer(heads, window, rope, hidden, activation))
                .into(),
        };
        Ok(Arc::new(EncoderModel::new(NAME, encoder, 8192)))
    }
}
