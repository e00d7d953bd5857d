//! The flags that choose how tokens are sampled.
//!
//! Invariant: each value is in the range of its flag. Knows no vocabulary.

use cellar_engine::sampler::LogitBias;
use clap::Args;

use super::values::{self, LookBack, MirostatVersion};
use super::{Seed, count, count_or_none};

/// How tokens are sampled.
#[derive(Debug, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplerArgs {
    /// Temperature; 0 always takes the most likely token [default: 0.8; diffusion models: 0]
    #[arg(
        long,
        value_name = "T",
        value_parser = values::non_negative
    )]
    pub(crate) temp: Option<f32>,
    /// Keep tokens whose logit is within N standard deviations of the largest; 0 keeps all
    #[arg(
        long,
        value_name = "N",
        alias = "top-n-sigma",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        value_parser = values::top_nsigma
    )]
    pub(crate) top_nsigma: f32,
    /// Keep the K most likely tokens; 0 keeps all
    #[arg(
        long,
        value_name = "K",
        default_value_t = 40,
        allow_negative_numbers = true,
        value_parser = values::top_k
    )]
    pub(crate) top_k: u32,
    /// Keep the most likely tokens whose probabilities add up to P; 1 keeps all
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.95,
        value_parser = values::probability
    )]
    pub(crate) top_p: f32,
    /// Keep tokens at least P times as likely as the most likely; 0 keeps all
    #[arg(
        long,
        value_name = "P",
        default_value_t = 0.05,
        value_parser = values::probability
    )]
    pub(crate) min_p: f32,
    /// Penalty factor for repeated tokens; 1 turns it off
    #[arg(
        long,
        value_name = "X",
        default_value_t = 1.0,
        value_parser = values::positive
    )]
    pub(crate) repeat_penalty: f32,
    /// Penalty for tokens that occurred
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        value_parser = values::finite
    )]
    pub(crate) presence_penalty: f32,
    /// Penalty for each occurrence of a token
    #[arg(
        long,
        value_name = "X",
        default_value_t = 0.0,
        value_parser = values::finite
    )]
    pub(crate) frequency_penalty: f32,
    /// How many tokens back penalties look; -1 looks at the whole text, 0 turns them off
    #[arg(long, value_name = "N", default_value = "64")]
    pub(crate) repeat_last_n: LookBack,
    /// Add N to the logit of a token (by its id, see 'cellar tokenize'), or subtract it: 15043+1,
    /// 15043-2.5; 15043-inf never chooses it. N is at most 100; may be given several times
    #[arg(long, value_name = "TOKEN(+|-)N", value_parser = values::logit_bias)]
    pub(crate) logit_bias: Vec<LogitBias>,
    /// Do not end the text before it has N tokens
    #[arg(long, value_name = "N", default_value_t = 0, value_parser = count_or_none())]
    pub(crate) min_tokens: u32,
    /// Locally typical sampling: keep the tokens whose surprise is nearest to the expected one,
    /// until their probabilities add up to P; 1 keeps all
    #[arg(long, visible_alias = "typical-p", value_name = "P", default_value_t = 1.0,
          hide_short_help = true, value_parser = values::probability)]
    pub(crate) typical: f32,
    /// XTC: how often the most likely tokens are left out, from 0 (never) to 1 (at every token)
    #[arg(long, value_name = "P", default_value_t = 0.0,
          hide_short_help = true, value_parser = values::probability)]
    pub(crate) xtc_probability: f32,
    /// XTC: tokens at least this likely are left out, but for the least likely of them
    #[arg(long, value_name = "P", default_value_t = 0.1,
          hide_short_help = true, value_parser = values::probability)]
    pub(crate) xtc_threshold: f32,
    /// DRY: penalty for a token that would continue a repetition, X * BASE^(its length - what is
    /// allowed); 0 turns it off, 0.8 is usual
    #[arg(long, value_name = "X", default_value_t = 0.0,
          hide_short_help = true, value_parser = values::non_negative)]
    pub(crate) dry_multiplier: f32,
    /// DRY: by how much the penalty grows with each repeated token
    #[arg(long, value_name = "BASE", default_value_t = 1.75,
          hide_short_help = true, value_parser = values::at_least_one)]
    pub(crate) dry_base: f32,
    /// DRY: repetitions of fewer tokens than this are free
    #[arg(long, value_name = "N", default_value_t = 2,
          hide_short_help = true, value_parser = count())]
    pub(crate) dry_allowed_length: u32,
    /// DRY: how many tokens back repetitions are looked for; -1 looks at the whole text, 0 turns it
    /// off
    #[arg(long, value_name = "N", default_value = "-1", hide_short_help = true)]
    pub(crate) dry_penalty_last_n: LookBack,
    /// DRY: repetitions do not reach over this text; may be given several times, and replaces the
    /// default; none stands for no such text [default: a line break, ':', '"' and '*']
    #[arg(long, value_name = "TEXT", hide_short_help = true)]
    pub(crate) dry_sequence_breaker: Vec<String>,
    /// 2 leaves out tokens by how surprising the text has been (Mirostat 2), in place of --top-k,
    /// --typical, --top-p, --min-p and XTC; 0 does not
    #[arg(long, value_name = "N", default_value = "0", hide_short_help = true)]
    pub(crate) mirostat: MirostatVersion,
    /// Mirostat: how fast its limit follows the text
    #[arg(long, value_name = "RATE", default_value_t = 0.1,
          hide_short_help = true, value_parser = values::probability)]
    pub(crate) mirostat_lr: f32,
    /// Mirostat: the surprise to aim at, in bits a token
    #[arg(long, value_name = "BITS", default_value_t = 5.0,
          hide_short_help = true, value_parser = values::positive)]
    pub(crate) mirostat_ent: f32,
    /// Random seed; -1 takes a random one [default: a random one, shown in the statistics]
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<Seed>,
}
