//! The feed-forward block: `down(activation(gate(x)) * up(x))`, or without a gate.
//!
//! Shazeer, arXiv 2002.05202. Does not know the layers around.

use kv_graph::{Activation, Affine, GraphBuilder, GraphError, NodeId};

use super::{Adapter, DenseAndExperts, ExpertsBlock, Xielu};

/// The block after the mixer of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FeedForward {
    /// One block for all rows.
    Dense(FeedForwardBlock),
    /// Some of many blocks for each row.
    Experts(ExpertsBlock),
    /// Both, of the same rows, added.
    Both(DenseAndExperts),
}

impl FeedForward {
    /// Adds it: `normed [rows, dim]`, and the rows `x` before that norm, in, the same shape out.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(
        &self,
        b: &mut GraphBuilder,
        normed: NodeId,
        x: NodeId,
    ) -> Result<NodeId, GraphError> {
        match self {
            Self::Dense(block) => block.build(b, normed),
            Self::Experts(block) => block.build(b, normed),
            Self::Both(blocks) => blocks.build(b, normed, x),
        }
    }
}

/// Settings of one feed-forward block.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FeedForwardBlock {
    /// Width between the matrices.
    pub hidden: usize,
    /// Applied to the gate, or to what there is where there is none.
    pub activation: Activation,
    /// Its matrices.
    pub form: FeedForwardForm,
}

/// The matrices of a feed-forward block.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum FeedForwardForm {
    /// Gate, up and down.
    #[default]
    Gated,
    /// Gate and up in one, in this order, and down (Phi-3).
    FusedGate,
    /// Gate and up in one, with an adapter, and down (Zamba2).
    FusedGateAdapted(Adapter),
    /// Gate, up, and down, whose rows are normed by the root of their mean square, with a gain
    /// (BitNet, arXiv 2402.17764).
    GatedSubNorm {
        /// Added to the mean square.
        eps: f32,
    },
    /// Gate, up, and down with a bias (Jina BERT v2).
    GatedDownBias,
    /// The same with gate and up in one.
    FusedGateDownBias,
    /// Gate, up and down with biases (RecurrentGemma).
    GatedWithBias,
    /// Up and down, no gate (Falcon, Nemotron).
    Plain,
    /// The same with biases (GPT-2, StarCoder 2).
    PlainWithBias,
    /// Up and down, no gate, and xIELU in place of the block's activation (Apertus).
    PlainXielu(Xielu),
}

impl FeedForwardBlock {
    /// Adds the block: `x [rows, dim]` in, the same shape out.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(&self, b: &mut GraphBuilder, x: NodeId) -> Result<NodeId, GraphError> {
        self.build_named(b, x, "")
    }

    /// Adds a block with separate gate, up and down, of whose gate so many deviations above its
    /// mean are cut off: `x [rows, dim]` in, the same shape out.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build_sparse(
        &self,
        b: &mut GraphBuilder,
        x: NodeId,
        deviations: f32,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let gate = b.linear("ffn_gate", x, "ffn_gate.weight", self.hidden)?;
        let gate = b.gaussian_top_k("ffn_gate_sparse", gate, deviations)?;
        let up = b.linear("ffn_up", x, "ffn_up.weight", self.hidden)?;
        let gated = b.gate("ffn_gate_par", self.activation, gate, up)?;
        b.linear("ffn_out", gated, "ffn_down.weight", dim)
    }

    /// As [`FeedForwardBlock::build`], with `suffix` after the names of nodes and matrices.
    pub(super) fn build_named(
        &self,
        b: &mut GraphBuilder,
        x: NodeId,
        suffix: &str,
    ) -> Result<NodeId, GraphError> {
        let dim = b.shape_of(x).last().copied().unwrap_or(0);
        let name = |what: &str| format!("ffn_{what}{suffix}");
        let weight = |what: &str| format!("ffn_{what}{suffix}.weight");
        let hidden = self.hidden;
        let (gate, up) = match self.form {
            FeedForwardForm::GatedWithBias => {
                let mut part = |what: &str| {
                    let (weight, bias) = (weight(what), format!("ffn_{what}{suffix}.bias"));
                    let weights = Affine::new(&weight).bias(&bias);
                    b.affine(&name(what), x, weights, hidden)
                };
                (part("gate")?, part("up")?)
            }
            FeedForwardForm::Gated
            | FeedForwardForm::GatedSubNorm { .. }
            | FeedForwardForm::GatedDownBias => {
                let gate = b.linear(&name("gate"), x, &weight("gate"), hidden)?;
                (gate, b.linear(&name("up"), x, &weight("up"), hidden)?)
            }
            FeedForwardForm::FusedGate
            | FeedForwardForm::FusedGateDownBias
            | FeedForwardForm::FusedGateAdapted(_) => {
                let both = b.linear(&name("gate_up"), x, &weight("up"), 2 * hidden)?;
                let both = match self.form {
                    FeedForwardForm::FusedGateAdapted(adapter) => {
                        let (name, weight) = (name("gate_up"), format!("ffn_up{suffix}"));
                        adapter.added(b, (&name, &weight), [x, both])?
                    }
                    _ => both,
                };
                let gate = b.columns(&name("gate"), both, 0..hidden)?;
                (gate, b.columns(&name("up"), both, hidden..2 * hidden)?)
            }
            FeedForwardForm::Plain
            | FeedForwardForm::PlainWithBias
            | FeedForwardForm::PlainXielu(_) => {
                let has_bias = self.form == FeedForwardForm::PlainWithBias;
                let weights = ["up", "down"].map(weight);
                let biases = ["up", "down"].map(|what| format!("ffn_{what}{suffix}.bias"));
                let affine = |at: usize| Affine {
                    weight: &weights[at],
                    bias: has_bias.then_some(&*biases[at]),
                };
                let up = b.affine(&name("up"), x, affine(0), hidden)?;
                let y = match self.form {
                    FeedForwardForm::PlainXielu(xielu) => xielu.build(b, &name("act"), up)?,
                    _ => b.activate(&name("act"), self.activation, up)?,
                };
                return b.affine(&name("out"), y, affine(1), dim);
            }
        };
        let mut gated = b.gate(&name("gate_par"), self.activation, gate, up)?;
        if let FeedForwardForm::GatedSubNorm { eps } = self.form {
            gated = b.rms_norm(&name("gate_normed"), gated, &weight("sub_norm"), eps)?;
        }
        let (weight, bias) = (weight("down"), format!("ffn_down{suffix}.bias"));
        let has_bias = matches!(
            self.form,
            FeedForwardForm::GatedWithBias
                | FeedForwardForm::GatedDownBias
                | FeedForwardForm::FusedGateDownBias
        );
        let down = Affine {
            weight: &weight,
            bias: has_bias.then_some(&*bias),
        };
        b.affine(&name("out"), gated, down, dim)
    }
}
