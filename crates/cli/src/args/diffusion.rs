//! The flags of `cellar run` for diffusion models.
//!
//! Invariant: a flag that was not given is `None`, so that other models can refuse those that
//! were. Knows no model.

use cellar_tasks::FillOrder;
use clap::{Args, ValueEnum};

use super::{count, values};

/// How the masks of a text are filled.
#[derive(Debug, Default, Args)]
#[command(next_help_heading = "Diffusion models")]
pub(crate) struct DiffusionArgs {
    /// How often the text is computed, at most once for each token: more steps are slower and
    /// better [default: as many as tokens]
    #[arg(long, value_name = "N", value_parser = count())]
    pub(crate) diffusion_steps: Option<u32>,
    /// Fill blocks of N tokens, one after the other [default: 32 for LLaDA; Dream fills anywhere]
    #[arg(long, value_name = "N", value_parser = count())]
    pub(crate) diffusion_block_length: Option<u32>,
    /// Fill anywhere, with times that fall from 1 to X: the smaller, the more masks the last steps
    /// fill [default: 0.001]
    #[arg(long, value_name = "X", conflicts_with = "diffusion_block_length", value_parser = values::probability)]
    pub(crate) diffusion_eps: Option<f32>,
    /// Which masks are filled first: those with the likeliest token, the largest margin between the
    /// two likeliest, the least entropy, or any [default: confidence]
    #[arg(long, value_name = "ORDER", value_enum)]
    pub(crate) diffusion_order: Option<OrderName>,
    /// Strength of guidance by the prompt, which computes every step twice [default: 0]
    #[arg(long, value_name = "X", visible_alias = "diffusion-cfg-scale", value_parser = values::non_negative)]
    pub(crate) diffusion_guidance: Option<f32>,
}

/// Which masks are filled first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OrderName {
    /// The likeliest token
    Confidence,
    /// The largest difference of the two likeliest tokens
    Margin,
    /// The least entropy
    Entropy,
    /// Any
    Random,
}

impl OrderName {
    pub(crate) fn order(self) -> FillOrder {
        match self {
            Self::Confidence => FillOrder::Confidence,
            Self::Margin => FillOrder::Margin,
            Self::Entropy => FillOrder::Entropy,
            Self::Random => FillOrder::Random,
        }
    }
}

impl DiffusionArgs {
    /// The first flag that was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let flags = [
            (self.diffusion_steps.is_some(), "--diffusion-steps"),
            (
                self.diffusion_block_length.is_some(),
                "--diffusion-block-length",
            ),
            (self.diffusion_eps.is_some(), "--diffusion-eps"),
            (self.diffusion_order.is_some(), "--diffusion-order"),
            (self.diffusion_guidance.is_some(), "--diffusion-guidance"),
        ];
        flags
            .into_iter()
            .find_map(|(is_given, flag)| is_given.then_some(flag))
    }
}
