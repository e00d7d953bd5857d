//! [`Tower`]: the graphs of a vision tower: patches to rows, and rows to those of a decoder.
//!
//! Patches are embedded by a matrix, get positions, and pass through layers whose rows all see each
//! other, or those of their window. Between graphs ([`Stage`](crate::stage::Stage)) rows are merged
//! or moved ([`Arrangement`]), which no graph does. Invariant: weight names are those of `mmproj`
//! files with vision towers; those with audio towers have `a.` in place of `v.`. Knows no picture.

use std::ops::Range;

use kv_core::{LayerIdx, PartIdx, Window};
use kv_graph::rope::{RopeScaling, RopeSections, RopeSpec, RopeStyle, SectionOrder};
use kv_graph::{
    Activation, Affine, Graph, GraphBuilder, GraphError, Input, NodeId, NormGain, RowGain, TableRow,
};
use model_core::blocks::{AttentionBlock, FeedForwardBlock, LayerContext, Norm};

use crate::arrange::Arrangement;
use crate::clip::ClippedMatrices;
use crate::resample::Resampling;
use crate::stage::Merger;

/// The names of weights of the towers and of projectors.
pub(crate) const PATCH_EMBEDDING: &str = "v.patch_embd.weight";
pub(crate) const PATCH_BIAS: &str = "v.patch_embd.bias";
/// The norm of patches, without `.weight`.
pub(crate) const PATCH_NORM: &str = "v.norm_embd";
pub(crate) const POSITIONS: &str = "v.position_embd.weight";
/// The row behind lines of rows (LLaVA 1.6).
pub(crate) const LINE_END: &str = "v.image_newline";
/// Divisors of the frequencies of rotations, which are computed.
pub(crate) const ROPE_DIVISORS: &str = "v.rope_divisors.weight";

/// The first of two convolutions over the frames of a sound: each row of its matrix has the values
/// of three frames. The second is in the place of the matrix of patches.
pub(crate) const STEM: &str = "v.stem.weight";
pub(crate) const STEM_BIAS: &str = "v.stem.bias";

/// Frames that a row of a convolution takes.
pub(crate) const STEM_FRAMES: usize = 3;

/// The rows of positions that are added to patches. Queries and keys may rotate besides.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum TowerPositions {
    /// None.
    #[default]
    None,
    /// So many learned rows, one for each place.
    Learned(usize),
    /// A square of learned rows, resampled to the patches of each picture: they come in behind the
    /// values of patches.
    Resampled(Resampling),
    /// So many learned rows for columns, and as many for rows: a patch's are added and come in
    /// behind its values.
    OfAxes(usize),
}

impl TowerPositions {
    /// True if the rows of positions come in behind the values of patches.
    fn are_given(self) -> bool {
        match self {
            Self::None | Self::Learned(_) => false,
            Self::Resampled(_) | Self::OfAxes(_) => true,
        }
    }
}

/// The feed-forward block of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum TowerFeedForward {
    /// One of those that decoders have, too.
    Block(FeedForwardBlock),
    /// Two matrices with biases around `x sigmoid(1.702 x)` (CLIP), of this width.
    QuickGelu(usize),
}

/// The treatment of the rows that a block of a layer adds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) enum TowerResidual {
    /// Nothing.
    #[default]
    Plain,
    /// Each value gets a learned factor: `ls1` behind the attention, `ls2` behind the feed-forward
    /// block (InternViT).
    Scaled,
    /// They are normed: `attn_post_norm` and `ffn_post_norm` (Gemma 4).
    Normed(Norm),
}

impl TowerResidual {
    /// The rows `x`, with the factors or the norm of these names where there are some.
    fn build(
        self,
        b: &mut GraphBuilder,
        [factors, norm]: [&str; 2],
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self {
            Self::Plain => Ok(x),
            Self::Scaled => {
                let weight = format!("{factors}.weight");
                b.gain(factors, x, RowGain::PerValue(&weight))
            }
            Self::Normed(kind) => kind.build(b, norm, x, norm),
        }
    }
}

/// One step of a projector.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ProjectorStep {
    /// The norm with these weights.
    Norm(Norm, String),
    /// A matrix without a bias, to so many values.
    Matrix(String, usize),
    /// The same with a bias, whose name has `bias` where the matrix has `weight`.
    Affine(String, usize),
    /// A function.
    Activate(Activation),
    /// All values times this.
    Scale(f32),
    /// The one row of a tensor, added.
    Plus(String),
    /// Each value times one of a tensor.
    Times(String),
    /// A norm by the root of the mean square without a gain, to which this is added.
    PlainNorm(f32),
    /// A block with a gate: the names of the matrices of gate, of what it is multiplied with, and
    /// of what both go through then.
    Gated([(String, usize); 3], Activation),
}

/// The rows that a decoder adds behind one of its first layers (DeepStack: Meng et al., arXiv
/// 2406.04334).
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DeepRows {
    /// The number of the tower's layer whose rows it is made of.
    pub(crate) layer: usize,
    pub(crate) projector: Vec<ProjectorStep>,
}

/// A tower: settings of its graphs, and how rows are moved in between.
#[derive(Clone, Debug, PartialEq)]
pub struct Tower {
    /// Bins of the frames of a sound, where it hears.
    pub(crate) n_bins: Option<usize>,
    /// Values of a patch.
    pub(crate) patch_len: usize,
    /// True if the matrix of patches has a bias.
    pub(crate) patch_bias: bool,
    pub(crate) dim: usize,
    pub(crate) positions: TowerPositions,
    /// The norm of patches before they get positions, where there is one.
    pub(crate) patch_norm: Option<Norm>,
    /// The norm before the first layer, where there is one.
    pub(crate) first_norm: Option<Norm>,
    /// The norm after the last layer, where there is one.
    pub(crate) last_norm: Option<Norm>,
    /// The norms of layers.
    pub(crate) norm: Norm,
    pub(crate) attention: AttentionBlock,
    pub(crate) feed_forward: TowerFeedForward,
    pub(crate) residual: TowerResidual,
    /// The merger between two layers, where rows become fewer there.
    pub(crate) merger: Option<Merger>,
    /// The window of each layer.
    pub(crate) windows: Vec<Window>,
    /// The step of rows between tower and projector.
    pub(crate) arrangement: Arrangement,
    pub(crate) projector: Vec<ProjectorStep>,
    /// What comes out behind a row's own values, in the order of layers.
    pub(crate) deep: Vec<DeepRows>,
    /// The matrices of layers whose inputs and outputs have bounds.
    pub(crate) clipped: ClippedMatrices,
}

impl Tower {
    /// The graph of some layers: their last rows, and those behind the layers that DeepStack uses.
    /// The first ones take patches, and the tower's norm is behind the last.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub(crate) fn layers_graph(
        &self,
        mut b: GraphBuilder,
        layers: Range<usize>,
    ) -> Result<Graph, GraphError> {
        let mut x = if layers.start == 0 {
            self.placed_patches(&mut b)?
        } else {
            b.input(Input::Embeddings { dim: self.dim })?
        };
        let mut deep = Vec::new();
        let windows = self.windows.get(layers.clone()).unwrap_or_default();
        for (at, &window) in layers.clone().zip(windows) {
            let layer = LayerIdx(u32::try_from(at).unwrap_or(u32::MAX));
            let mut b = b.scope_in("v.", layer);
            x = self.layer(&mut b, layer, window, x)?;
            deep.extend(
                self.deep
                    .iter()
                    .filter_map(|rows| (rows.layer == at).then_some(x)),
            );
        }
        if let Some(norm) = self.last_norm
            && layers.end == self.windows.len()
        {
            x = norm.build(&mut b, "post_ln", x, "v.post_ln")?;
        }
        let outputs: Vec<NodeId> = std::iter::once(x).chain(deep).collect();
        self.clipped.applied(b.finish(&outputs)?)
    }

    /// Patches, embedded and at their places.
    fn placed_patches(&self, b: &mut GraphBuilder) -> Result<NodeId, GraphError> {
        let given = b.input(Input::Embeddings {
            dim: self.given_len(),
        })?;
        let patches = if self.positions.are_given() {
            b.columns("patches", given, 0..self.patch_len)?
        } else {
            given
        };
        let matrix = Affine {
            weight: PATCH_EMBEDDING,
            bias: self.patch_bias.then_some(PATCH_BIAS),
        };
        let mut x = b.affine("patch_embd", patches, matrix, self.dim)?;
        if self.n_bins.is_some() {
            x = b.activate("patch_act", Activation::GeluErf, x)?;
        }
        if let Some(norm) = self.patch_norm {
            x = norm.build(b, "norm_embd", x, PATCH_NORM)?;
        }
        let rows = match self.positions {
            TowerPositions::None => None,
            TowerPositions::Learned(n) => {
                let positions = b.input(Input::Positions)?;
                Some(b.embed("pos_embd", positions, POSITIONS, [n, self.dim])?)
            }
            TowerPositions::Resampled(_) | TowerPositions::OfAxes(_) => {
                let columns = self.patch_len..self.given_len();
                Some(b.columns("pos_embd", given, columns)?)
            }
        };
        if let Some(rows) = rows {
            x = b.add("patch_placed", x, rows)?;
        }
        match self.first_norm {
            Some(norm) => norm.build(b, "pre_ln", x, "v.pre_ln"),
            None => Ok(x),
        }
    }

    /// The graph of the first convolution over the frames of a sound, where the tower hears.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub(crate) fn stem_graph(&self, mut b: GraphBuilder) -> Result<Graph, GraphError> {
        let dim = STEM_FRAMES * self.n_bins.unwrap_or(0);
        let frames = b.input(Input::Embeddings { dim })?;
        let x = b.affine("stem", frames, Affine::new(STEM).bias(STEM_BIAS), self.dim)?;
        let x = b.activate("stem_act", Activation::GeluErf, x)?;
        b.finish(&[x])
    }

    /// Values of what comes in for a patch.
    pub(crate) fn given_len(&self) -> usize {
        if self.positions.are_given() {
            self.patch_len + self.dim
        } else {
            self.patch_len
        }
    }

    /// The projectors of the rows that the tower's graph gives.
    pub(crate) fn projectors(&self) -> impl Iterator<Item = &[ProjectorStep]> {
        let deep = self.deep.iter().map(|rows| rows.projector.as_slice());
        std::iter::once(self.projector.as_slice()).chain(deep)
    }

    /// Rows with what the attention of a layer adds to them.
    pub(crate) fn attended(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        window: Window,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let at = LayerContext {
            layer,
            index_layer: layer,
            // Nothing is remembered.
            part: PartIdx(0),
            output_rows: None,
        };
        let attention = AttentionBlock {
            window,
            ..self.attention.clone()
        };
        let normed = self.norm.build(b, "ln1", x, "ln1")?;
        let attended = attention.build_in_batch(b, at, normed)?;
        let attended = self
            .residual
            .build(b, ["ls1", "attn_post_norm"], attended)?;
        b.add("attn_sum", attended, x)
    }

    fn layer(
        &self,
        b: &mut GraphBuilder,
        layer: LayerIdx,
        window: Window,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        let x = self.attended(b, layer, window, x)?;
        let normed = self.norm.build(b, "ln2", x, "ln2")?;
        let fed = match self.feed_forward {
            TowerFeedForward::Block(block) => block.build(b, normed)?,
            TowerFeedForward::QuickGelu(hidden) => {
                let weights = Affine::new("ffn_up.weight").bias("ffn_up.bias");
                let up = b.affine("ffn_up", normed, weights, hidden)?;
                let up = b.scale("ffn_up_scaled", up, QUICK_GELU)?;
                let act = b.activate("ffn_silu", Activation::Silu, up)?;
                let act = b.scale("ffn_act", act, 1.0 / QUICK_GELU)?;
                let weights = Affine::new("ffn_down.weight").bias("ffn_down.bias");
                b.affine("ffn_out", act, weights, self.dim)?
            }
        };
        let fed = self.residual.build(b, ["ls2", "ffn_post_norm"], fed)?;
        b.add("l_out", fed, x)
    }

    /// The graph of a projector for rows that are as wide as the arrangement makes them.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub(crate) fn projector_graph(
        &self,
        mut b: GraphBuilder,
        number: usize,
    ) -> Result<Graph, GraphError> {
        let dim = self.arrangement.width(self.dim);
        let mut x = b.input(Input::Embeddings { dim })?;
        let steps = self.projectors().nth(number).unwrap_or_default();
        for (number, step) in steps.iter().enumerate() {
            let name = format!("mm_{number}");
            x = match step {
                ProjectorStep::Norm(norm, weight) => norm.build(&mut b, &name, x, weight)?,
                ProjectorStep::Matrix(weight, width) => b.linear(&name, x, weight, *width)?,
                ProjectorStep::Affine(weight, width) => {
                    let bias = bias_of(weight);
                    b.affine(&name, x, Affine::new(weight).bias(&bias), *width)?
                }
                ProjectorStep::Activate(activation) => b.activate(&name, *activation, x)?,
                ProjectorStep::Scale(factor) => b.scale(&name, x, *factor)?,
                ProjectorStep::Plus(weight) => {
                    let (row, n_rows) = (0, 1);
                    b.add_row(
                        &name,
                        x,
                        TableRow {
                            weight,
                            row,
                            n_rows,
                        },
                    )?
                }
                ProjectorStep::Times(weight) => b.gain(&name, x, RowGain::PerValue(weight))?,
                ProjectorStep::PlainNorm(eps) => b.rms_norm_with(&name, x, NormGain::None, *eps)?,
                ProjectorStep::Gated([gate, up, down], activation) => {
                    let gate = b.linear(&format!("{name}_gate"), x, &gate.0, gate.1)?;
                    let up = b.linear(&format!("{name}_up"), x, &up.0, up.1)?;
                    let gated = b.gate(&format!("{name}_par"), *activation, gate, up)?;
                    b.linear(&name, gated, &down.0, down.1)?
                }
            };
        }
        b.finish(&[x])
    }

    /// The name of the first matrix of the projector.
    pub(crate) fn first_matrix(&self) -> Option<&str> {
        self.projector.iter().find_map(|step| match step {
            ProjectorStep::Matrix(name, _) | ProjectorStep::Affine(name, _) => Some(name.as_str()),
            ProjectorStep::Gated([(name, _), ..], _) => Some(name.as_str()),
            _ => None,
        })
    }

    /// Values of a row that comes out.
    pub fn output_dim(&self) -> usize {
        let all = self.projectors().map(|steps| self.projected_dim(steps));
        all.sum()
    }

    /// Values of a row behind a projector.
    pub(crate) fn projected_dim(&self, steps: &[ProjectorStep]) -> usize {
        let width = steps.iter().rev().find_map(|step| match *step {
            ProjectorStep::Matrix(_, width)
            | ProjectorStep::Affine(_, width)
            | ProjectorStep::Gated([.., (_, width)], _) => Some(width),
            _ => None,
        });
        width.unwrap_or(self.arrangement.width(self.dim))
    }
}

/// The factor in CLIP's activation.
const QUICK_GELU: f32 = 1.702;

/// The bias of a matrix.
pub(crate) fn bias_of(weight: &str) -> String {
    format!("{}.bias", weight.strip_suffix(".weight").unwrap_or(weight))
}

/// The frequencies of rows and of columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AxialFrequencies {
    /// The same: every second one of those of a text (Qwen2-VL).
    Same,
    /// In turn: those of a text with even numbers are of rows, with odd ones of columns (Pixtral).
    InTurn,
}

/// The rotation of heads of so many values with rows and columns: one half of the pairs is of rows,
/// the other of columns. Divisors make their frequencies.
pub(crate) fn axial_rope(head_dim: usize, base: f64, style: RopeStyle) -> (RopeSpec, RopeSections) {
    let pairs = head_dim / 2;
    let spec = RopeSpec {
        style,
        n_rot: 2 * pairs,
        base,
        scaling: RopeScaling::None,
        factors: Some(ROPE_DIVISORS.to_owned()),
    };
    let sections = RopeSections {
        pairs: [0, pairs / 2, pairs - pairs / 2],
        order: SectionOrder::Consecutive,
    };
    (spec, sections)
}

/// What divides the frequencies `base^(-2 i / head_dim)`, so that both halves have some that are
/// two steps apart.
pub(crate) fn axial_divisors(
    head_dim: usize,
    base: f64,
    frequencies: AxialFrequencies,
) -> Vec<f32> {
    let pairs = head_dim / 2;
    let half = (pairs / 2).max(1);
    let divisor = |pair: usize| {
        let is_odd = frequencies == AxialFrequencies::InTurn && pair >= half;
        let wanted = 2 * (pair % half) + usize::from(is_odd);
        let power = 2.0 * (wanted as f64 - pair as f64) / head_dim as f64;
        base.powf(power) as f32
    };
    (0..pairs).map(divisor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_columns_have_their_frequencies() {
        let (head_dim, base) = (16, 10_000.0);
        let (spec, sections) = axial_rope(head_dim, base, RopeStyle::Neox);
        assert_eq!(sections.pairs, [0, 4, 4]);
        for (frequencies, powers) in [
            (AxialFrequencies::Same, [0, 4, 8, 12, 0, 4, 8, 12]),
            (AxialFrequencies::InTurn, [0, 4, 8, 12, 2, 6, 10, 14]),
        ] {
            let divisors = axial_divisors(head_dim, base, frequencies);
            for (frequency, power) in spec.frequencies(Some(&divisors)).iter().zip(powers) {
                let wanted = base.powf(-f64::from(power) / 16.0);
                assert!((frequency / wanted - 1.0).abs() < 1e-6, "{power}");
            }
        }
    }
}
