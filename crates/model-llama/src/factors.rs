//! Factors and soft caps of a member, of a file.
//!
//! Invariant: a factor that its row does not have is an error that names the key.

use model_core::architecture::ModelError;
use model_core::hyperparameters::{HeadSizes, Hyperparameters};

use crate::member::{EmbeddingScale, LlamaLike, LogitScale, ResidualScale, ScoreScale, SoftCaps};

/// Soft cap on the logits.
pub(crate) const LOGIT_CAP: &str = "final_logit_softcapping";

impl LlamaLike {
    pub(crate) fn embedding_scale(
        &self,
        hyper: &Hyperparameters<'_>,
        dim: usize,
    ) -> Result<Option<f32>, ModelError> {
        let name = "embedding_scale";
        let from_file = || Ok(hyper.positive(name)?.map(|s| s as f32));
        match self.embedding {
            EmbeddingScale::FromFile => from_file(),
            EmbeddingScale::FromFileOr(usual) => Ok(from_file()?.or(Some(usual))),
            EmbeddingScale::One | EmbeddingScale::SqrtDim => {
                self.refuse_factor(hyper, name)?;
                Ok(self.own_embedding_scale(dim))
            }
        }
    }

    /// The factor that no file names.
    pub(crate) fn own_embedding_scale(&self, dim: usize) -> Option<f32> {
        match self.embedding {
            EmbeddingScale::One | EmbeddingScale::FromFile | EmbeddingScale::FromFileOr(_) => None,
            EmbeddingScale::SqrtDim => Some((dim as f32).sqrt()),
        }
    }

    pub(crate) fn score_scale(&self, n_layers: usize, dim: usize, heads: HeadSizes) -> f32 {
        let width = match self.scores {
            ScoreScale::One => 1,
            ScoreScale::KeyDimUnlessLayers(n) if n == n_layers => dim / heads.n_heads.max(1),
            _ => heads.k_dim,
        };
        1.0 / (width as f32).sqrt()
    }

    pub(crate) fn logit_scale(
        &self,
        hyper: &Hyperparameters<'_>,
    ) -> Result<Option<f32>, ModelError> {
        let name = "logit_scale";
        if self.logits == LogitScale::One {
            return self.refuse_factor(hyper, name).map(|()| None);
        }
        let scale = hyper.positive(name)?.map(|s| s as f32);
        let missing = || hyper.wrong(name, "is missing; the model needs it".into());
        Ok(Some(match self.logits {
            LogitScale::DividedByOrWidth(usual) => match scale {
                None => usual as f32 / hyper.count("embedding_length")? as f32,
                Some(scale) => 1.0 / scale,
            },
            LogitScale::DividedBy => 1.0 / scale.ok_or_else(missing)?,
            LogitScale::One | LogitScale::Times => scale.ok_or_else(missing)?,
        }))
    }

    /// A cap that the file names, where the member has caps.
    pub(crate) fn soft_cap(
        &self,
        hyper: &Hyperparameters<'_>,
        name: &str,
    ) -> Result<Option<f32>, ModelError> {
        let cap = hyper.optional::<f32>(name)?.filter(|&cap| cap != 0.0);
        match (self.soft_caps, cap) {
            (_, None) => Ok(None),
            (SoftCaps::Logits, Some(_)) if name == LOGIT_CAP => {
                Ok(hyper.positive(name)?.map(|cap| cap as f32))
            }
            (SoftCaps::None | SoftCaps::Logits, Some(cap)) => {
                let reason = format!("{cap}; {} has no soft caps", self.name);
                Err(hyper.wrong(name, reason))
            }
            (SoftCaps::FromFile, Some(_)) => Ok(hyper.positive(name)?.map(|cap| cap as f32)),
        }
    }

    /// Nothing may ask for a factor that the member does not have.
    fn refuse_factor(&self, hyper: &Hyperparameters<'_>, name: &str) -> Result<(), ModelError> {
        match hyper.optional::<f32>(name)? {
            None | Some(0.0 | 1.0) => Ok(()),
            Some(factor) => {
                let reason = format!("{factor}; {} has no such factor", self.name);
                Err(hyper.wrong(name, reason))
            }
        }
    }

    pub(crate) fn residual_scale(
        &self,
        hyper: &Hyperparameters<'_>,
    ) -> Result<Option<f32>, ModelError> {
        let name = "residual_scale";
        let from_file = || Ok(hyper.positive(name)?.map(|s| s as f32));
        match self.residual {
            ResidualScale::FromFile => from_file(),
            ResidualScale::FromFileOrDepth(usual) => {
                let depth = hyper.n_layers()? as f32;
                Ok(from_file()?.or(Some(usual / depth.sqrt())))
            }
            ResidualScale::One => self.refuse_factor(hyper, name).map(|()| None),
        }
    }
}
