//! The norm of a row, in the kinds that models have.
//!
//! Does not know where it is used.

use kv_graph::{Affine, GraphBuilder, GraphError, NodeId};

/// One norm.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Norm {
    /// Its kind.
    pub kind: NormKind,
    /// Added to what the root is taken of.
    pub eps: f32,
}

/// Kinds of norms.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormKind {
    /// By the root of the mean square, with a gain (Zhang and Sennrich, arXiv 1910.07467).
    #[default]
    Rms,
    /// Centred, by the standard deviation, with a gain (Ba et al., arXiv 1607.06450).
    Layer,
    /// As that, with a bias.
    LayerWithBias,
    /// Centred, by the standard deviation, and nothing more (OLMo, arXiv 2402.00838).
    LayerPlain,
}

impl Norm {
    /// Adds the norm of `x` with the weights `{weight}.weight` and, where it has one,
    /// `{weight}.bias`.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        weight: &str,
    ) -> Result<NodeId, GraphError> {
        self.build_with(b, name, x, &format!("{weight}.weight"))
    }

    /// As [`Norm::build`], by the whole name of the gain. A bias has `bias` where that has
    /// `weight`.
    pub(super) fn build_with(
        &self,
        b: &mut GraphBuilder,
        name: &str,
        x: NodeId,
        gain: &str,
    ) -> Result<NodeId, GraphError> {
        let bias = format!("{}.bias", gain.strip_suffix(".weight").unwrap_or(gain));
        match self.kind {
            NormKind::Rms => b.rms_norm(name, x, gain, self.eps),
            NormKind::LayerPlain => b.plain_layer_norm(name, x, self.eps),
            NormKind::Layer => b.layer_norm(name, x, Affine::new(gain), self.eps),
            NormKind::LayerWithBias => {
                b.layer_norm(name, x, Affine::new(gain).bias(&bias), self.eps)
            }
        }
    }
}
