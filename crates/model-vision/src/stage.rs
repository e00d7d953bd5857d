//! [`Stage`]: the graphs of a tower, one after the other, with rows that are moved in between.
//!
//! A picture is computed stage by stage, so that other work can come between two of them, and so
//! that rows can become fewer between layers ([`Merger`]). Invariant: the stages of a tower have
//! each of its layers once, in order. Knows no picture.

use kv_core::{LayerIdx, Window};
use kv_graph::{Activation, Affine, Graph, GraphBuilder, GraphError, GraphShape, Input};

use crate::tower::{STEM_FRAMES, Tower, bias_of};

/// A graph of a tower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// The first convolution over the frames of a sound, which comes before the first layers.
    Stem,
    /// The layers from one on to before another. The first ones take patches.
    Layers {
        /// The first one.
        first: usize,
        /// The one behind the last.
        end: usize,
    },
    /// The attention of the merger.
    MergerAttention,
    /// The rest of it: rows that follow each other become one.
    MergerRows,
    /// The projector of this number: that of the tower's last rows has the number 0, those of
    /// DeepStack follow.
    Projector(usize),
}

impl Stage {
    /// Number of the steps of a tile that it does ([`Tower::n_steps`]).
    pub(crate) fn n_steps(self) -> usize {
        match self {
            Self::Stem => 0,
            Self::Layers { first, end } => (end - first).max(1),
            Self::MergerAttention | Self::MergerRows | Self::Projector(_) => 1,
        }
    }
}

/// The steps of a merger.
const MERGER_STEPS: usize = 2;

/// The step between two layers that makes one row of several (MiniCPM-V 4.6): these see each other
/// in an attention of their own, a block of two matrices takes them side by side, and their mean is
/// added to what it gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Merger {
    /// Number of layers before it: fewer than all.
    pub(crate) n_before: usize,
    /// Rows that become one. They follow each other.
    pub(crate) n_joined: usize,
    /// Values between its two matrices.
    pub(crate) hidden: usize,
}

/// The beginning of the names of the attention's weights in graphs. Files have
/// [`MERGER`] in its place.
pub(crate) const MERGER_LAYER: &str = "v.merger.blk.0.";
/// The beginning of the names of a merger's weights in files.
pub(crate) const MERGER: &str = "v.vit_merger.";
/// The first matrix of its block.
pub(crate) const MERGER_UP: &str = "v.vit_merger.ds_ffn_up.weight";
const MERGER_DOWN: &str = "v.vit_merger.ds_ffn_down.weight";

impl Tower {
    /// Number of the steps of a tile: each layer, the two of a merger, and the projectors.
    pub(crate) fn n_steps(&self) -> usize {
        let merging = self.merger.map_or(0, |_| MERGER_STEPS);
        self.windows.len().max(1) + merging + 1
    }

    /// Rows of a tile of so many patches that its next step takes.
    pub(crate) fn n_rows(&self, n_patches: usize, n_steps: usize) -> usize {
        match self.merger {
            Some(merger) if n_steps > merger.n_before => n_patches / merger.n_joined.max(1),
            _ => n_patches,
        }
    }

    /// The next graph of a tile of which so many steps are done, of at most `n_most` layers. `None`
    /// where projectors are next.
    pub(crate) fn next_stage(&self, n_steps: usize, n_most: usize) -> Option<Stage> {
        let n_layers = self.windows.len();
        let (first, bound) = match self.merger {
            Some(merger) => match n_steps.checked_sub(merger.n_before) {
                None => (n_steps, merger.n_before),
                Some(0) => return Some(Stage::MergerAttention),
                Some(1) => return Some(Stage::MergerRows),
                Some(behind) => (merger.n_before + behind - MERGER_STEPS, n_layers),
            },
            None => (n_steps, n_layers),
        };
        // Without layers, the graph of the first ones takes patches alone.
        (first < bound.max(1)).then(|| Stage::Layers {
            first,
            end: first.saturating_add(n_most.max(1)).min(bound),
        })
    }

    /// The graphs of a tile but the stem and the projectors, in order and as few as there can be.
    pub(crate) fn stages(&self) -> impl Iterator<Item = Stage> {
        let mut n_steps = 0;
        std::iter::from_fn(move || {
            let stage = self.next_stage(n_steps, usize::MAX)?;
            n_steps += stage.n_steps();
            Some(stage)
        })
    }

    /// The graph of a stage for so many rows.
    ///
    /// # Errors
    /// [`GraphError`] where the settings do not fit together.
    pub(crate) fn stage_graph(&self, stage: Stage, n_rows: usize) -> Result<Graph, GraphError> {
        let builder = GraphBuilder::new(GraphShape {
            n_tokens: n_rows,
            n_outputs: n_rows,
        });
        match stage {
            Stage::Stem => self.stem_graph(builder),
            Stage::Layers { first, end } => self.layers_graph(builder, first..end),
            Stage::MergerAttention => self.merger_attention(builder),
            Stage::MergerRows => self.merger_rows(builder),
            Stage::Projector(number) => self.projector_graph(builder, number),
        }
    }

    /// Values of a row that a stage takes.
    pub(crate) fn stage_width(&self, stage: Stage) -> usize {
        match stage {
            Stage::Stem => STEM_FRAMES * self.n_bins.unwrap_or(0),
            Stage::Layers { first: 0, .. } => self.given_len(),
            Stage::Layers { .. } | Stage::MergerAttention => self.dim,
            Stage::MergerRows => self.dim * self.joined_rows(),
            Stage::Projector(_) => self.arrangement.width(self.dim),
        }
    }

    /// Number of rows that the merger makes one of.
    fn joined_rows(&self) -> usize {
        self.merger.map_or(1, |merger| merger.n_joined)
    }

    fn merger_attention(&self, mut b: GraphBuilder) -> Result<Graph, GraphError> {
        let x = b.input(Input::Embeddings { dim: self.dim })?;
        let window = Window::Chunked(u32::try_from(self.joined_rows()).unwrap_or(u32::MAX));
        let layer = LayerIdx(0);
        let attended = self.attended(&mut b.scope_in("v.merger.", layer), layer, window, x)?;
        b.finish(&[attended])
    }

    fn merger_rows(&self, mut b: GraphBuilder) -> Result<Graph, GraphError> {
        let (n, dim) = (self.joined_rows(), self.dim);
        let x = b.input(Input::Embeddings { dim: n * dim })?;
        let mut sum = b.columns("joined-0", x, 0..dim)?;
        for row in 1..n {
            let part = b.columns(&format!("joined-{row}"), x, row * dim..(row + 1) * dim)?;
            sum = b.add(&format!("joined_sum-{row}"), sum, part)?;
        }
        let mean = b.scale("joined_mean", sum, (n as f32).recip())?;
        let normed = self.norm.build(&mut b, "ds_ln", x, "v.vit_merger.ds_ln")?;
        let hidden = self.merger.map_or(0, |merger| merger.hidden);
        let [up_bias, down_bias] = [MERGER_UP, MERGER_DOWN].map(bias_of);
        let up = Affine::new(MERGER_UP).bias(&up_bias);
        let up = b.affine("ds_ffn_up", normed, up, hidden)?;
        let act = b.activate("ds_ffn_act", Activation::GeluTanh, up)?;
        let down = Affine::new(MERGER_DOWN).bias(&down_bias);
        let fed = b.affine("ds_ffn_out", act, down, dim)?;
        let out = b.add("ds_out", fed, mean)?;
        b.finish(&[out])
    }
}
