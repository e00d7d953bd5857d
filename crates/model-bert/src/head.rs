//! [`ScoreHead`]: what makes scores of a text from the row of its first token, or the mean of all.

use kv_core::Window;
use kv_graph::weights::WeightSource;
use kv_graph::{Activation, Affine, AttendSpec, GraphBuilder, GraphError, NodeId};
use model_core::architecture::ModelError;
use model_core::blocks::{Norm, NormKind};
use model_core::hyperparameters::{HeadSizes, Hyperparameters, optional_weight};
use model_core::sentence::Pooling;

/// Name of the matrix of the dense layer.
pub(crate) const HEAD_DENSE: &str = "cls.weight";
const HEAD_DENSE_BIAS: &str = "cls.bias";
const HEAD_NORM: &str = "cls.norm.weight";
/// Name of the matrix that gives the scores.
pub(crate) const HEAD_OUTPUT: &str = "cls.output.weight";
/// Key of the activation's name.
pub(crate) const HEAD_ACTIVATION: &str = "classifier_activation";

/// Key of what becomes of the rows of a text.
pub(crate) const HEAD_POOLING: &str = "classifier_pooling";

/// The head that makes scores of a text.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScoreHead {
    /// The pooling of its rows.
    pub pooling: HeadPooling,
    /// Scores of a text.
    pub n_labels: usize,
    /// The dense layer before the matrix that gives them, where there is one.
    pub dense: Option<HeadDense>,
}

/// The row that a head makes scores of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadPooling {
    /// The row of the first token.
    #[default]
    First,
    /// The mean of all rows of a text (ModernBERT).
    Mean,
}

/// The dense layer before the matrix of scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HeadDense {
    /// Applied to what it gives.
    pub activation: HeadActivation,
    /// Name of its bias, where it has one.
    pub bias: Option<&'static str>,
    /// The norm of the result.
    pub norm: HeadNorm,
}

/// The norm behind a dense layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum HeadNorm {
    /// There is none.
    #[default]
    None,
    /// A norm without a bias, with this `eps` (ModernBERT).
    Layer(f32),
}

/// Applied to the result of a dense layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HeadActivation {
    /// The hyperbolic tangent (BERT).
    #[default]
    Tanh,
    /// [`Activation::Relu`] (DistilBERT).
    Relu,
    /// [`Activation::GeluErf`] (ModernBERT).
    Gelu,
}

/// The names of activations of heads, as files have them.
pub(crate) const HEAD_ACTIVATIONS: &[(&str, HeadActivation)] = &[
    ("tanh", HeadActivation::Tanh),
    ("relu", HeadActivation::Relu),
    ("gelu", HeadActivation::Gelu),
];

impl ScoreHead {
    /// Adds the mean of the rows of each text, for each of its tokens: `x [tokens, dim]` in and
    /// out, where `dim` is cut into heads.
    pub(crate) fn mean(
        b: &mut GraphBuilder,
        heads: HeadSizes,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let n = b.shape_of(x).first().copied().unwrap_or(0);
        let values = b.reshape("cls_heads", x, &[n, heads.n_heads, heads.v_dim])?;
        // Attention to a text by equal scores.
        let equal = b.scale("cls_equal", values, 0.0)?;
        let spec = AttendSpec {
            n_heads: heads.n_heads,
            kv_heads: heads.n_heads,
            k_dim: heads.v_dim,
            v_dim: heads.v_dim,
            scale: 1.0,
            soft_cap: None,
            alibi: None,
        };
        b.attend_batch("cls_mean", spec, [equal, equal, values], Window::Full)
    }

    /// Adds the head: `x [rows, dim]` in, `[rows, labels]` out.
    pub(crate) fn build(self, b: &mut GraphBuilder, mut x: NodeId) -> Result<NodeId, GraphError> {
        if let Some(HeadDense {
            activation,
            bias,
            norm,
        }) = self.dense
        {
            let dim = b.shape_of(x).last().copied().unwrap_or(0);
            let weight = HEAD_DENSE;
            x = b.affine("cls", x, Affine { weight, bias }, dim)?;
            x = match activation {
                // A cap of 1 is tanh itself.
                HeadActivation::Tanh => b.soft_cap("cls_tanh", x, 1.0)?,
                HeadActivation::Relu => b.activate("cls_relu", Activation::Relu, x)?,
                HeadActivation::Gelu => b.activate("cls_gelu", Activation::GeluErf, x)?,
            };
            if let HeadNorm::Layer(eps) = norm {
                let kind = NormKind::Layer;
                x = Norm { kind, eps }.build(b, "cls_norm", x, "cls.norm")?;
            }
        }
        let output = Affine::new(HEAD_OUTPUT).bias("cls.output.bias");
        b.affine("result_scores", x, output, self.n_labels)
    }

    /// The classification head, where the file has one. Files of llama.cpp have its tensors with
    /// or without the key that names the pooling.
    pub(crate) fn read(
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
        usual: HeadActivation,
    ) -> Result<Option<Self>, ModelError> {
        let dim = hyper.count("embedding_length")?;
        let ranks = hyper.optional::<u32>("pooling_type")? == Some(Pooling::Rank.code());
        let dense = match optional_weight(weights, HEAD_DENSE)? {
            Some(_) => Some(HeadDense::read(hyper, weights, usual)?),
            None => None,
        };
        let missing = |shape| ModelError::MissingTensor {
            name: HEAD_OUTPUT.to_owned(),
            shape,
        };
        match optional_weight(weights, HEAD_OUTPUT)? {
            Some(weight) => match weight.shape[..] {
                [n_labels, _] => Ok(Some(Self {
                    pooling: HeadPooling::read(hyper)?,
                    n_labels,
                    dense,
                })),
                ref got => Err(ModelError::TensorShape {
                    name: HEAD_OUTPUT.to_owned(),
                    wanted: vec![1, dim],
                    got: got.to_vec(),
                }),
            },
            None if ranks || dense.is_some() => Err(missing(vec![1, dim])),
            None => Ok(None),
        }
    }
}

impl HeadPooling {
    fn read(hyper: &Hyperparameters<'_>) -> Result<Self, ModelError> {
        match hyper.optional::<&str>(HEAD_POOLING)? {
            None | Some("cls") => Ok(Self::First),
            Some("mean") => Ok(Self::Mean),
            Some(name) => {
                let reason = format!("'{name}' is not one of: cls, mean");
                Err(hyper.wrong(HEAD_POOLING, reason))
            }
        }
    }
}

impl HeadDense {
    fn read(
        hyper: &Hyperparameters<'_>,
        weights: &dyn WeightSource,
        usual: HeadActivation,
    ) -> Result<Self, ModelError> {
        let known = || HEAD_ACTIVATIONS.iter();
        let activation = match hyper.optional::<&str>(HEAD_ACTIVATION)? {
            None => usual,
            Some(name) => match known().find(|(known, _)| *known == name) {
                Some((_, activation)) => *activation,
                None => {
                    let names: Vec<_> = known().map(|(name, _)| *name).collect();
                    let reason = format!("'{name}' is not one of: {}", names.join(", "));
                    return Err(hyper.wrong(HEAD_ACTIVATION, reason));
                }
            },
        };
        let bias = optional_weight(weights, HEAD_DENSE_BIAS)?;
        Ok(Self {
            activation,
            bias: bias.map(|_| HEAD_DENSE_BIAS),
            norm: match optional_weight(weights, HEAD_NORM)? {
                Some(_) => HeadNorm::Layer(hyper.layer_norm_eps()?),
                None => HeadNorm::None,
            },
        })
    }
}
