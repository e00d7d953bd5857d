//! What `cellar run` reports at the end: an object as JSON, and a line of statistics.
//!
//! Invariant: keys of the object are only ever added. Knows nothing of how text is generated.

use std::time::Duration;

use cellar_engine::serve::Usage;
use cellar_engine::{FinishReason, Pace, Speculated, Timings};
use kv_backend::{BackendInfo, ExpertUse};
use kv_core::{BinaryUnits, TokenId};
use serde::Serialize;

use crate::commands::answer::Answer;
use crate::logprobs::ShownLogprobs;

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    pub(super) text: &'a str,
    /// The text without thinking, where there was any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) answer: Option<&'a str>,
    /// The thinking in the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) thinking: Option<&'a str>,
    pub(super) tokens: &'a [TokenId],
    /// Of each token, where they are wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) logprobs: Option<Vec<ShownLogprobs>>,
    /// Of the prompt's tokens but the first, where they are wanted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<Vec<ShownLogprobs>>,
    pub(super) prompt: &'a str,
    pub(super) prompt_tokens: usize,
    pub(super) prompt_ids: &'a [TokenId],
    pub(super) finish: Option<&'a FinishReason>,
    pub(super) seed: u64,
    pub(super) model: String,
    pub(super) backend: &'a str,
    pub(super) device: &'a str,
    pub(super) n_ctx: u32,
    /// Tokens of the loaded state that were evaluated before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) loaded_tokens: Option<usize>,
    /// Bytes of the state that was saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) saved_bytes: Option<u64>,
    /// How often a diffusion model computed the text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) steps: Option<usize>,
    /// What reading experts took, where they are read as they are needed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) experts: Option<ExpertUse>,
    pub(super) timings: ReportTimings,
}

/// How long it took.
#[derive(Debug, Serialize)]
pub(super) struct ReportTimings {
    load_ms: f64,
    prompt_ms: f64,
    prompt_tokens_per_second: Option<f64>,
    generation_ms: f64,
    generation_tokens_per_second: Option<f64>,
    /// Tokens that were drafted, and those of them that the text has.
    #[serde(skip_serializing_if = "Option::is_none")]
    drafted: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    accepted: Option<usize>,
    /// Why no more were drafted at the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    drafts_off: Option<String>,
}

impl ReportTimings {
    /// The times of loading, and of a generation.
    pub(super) fn new(load: Duration, timings: Timings) -> Self {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        Self {
            load_ms: ms(load),
            prompt_ms: ms(timings.prompt.time),
            prompt_tokens_per_second: timings.prompt.tokens_per_second(),
            generation_ms: ms(timings.generation.time),
            generation_tokens_per_second: timings.generation.tokens_per_second(),
            drafted: None,
            accepted: None,
            drafts_off: None,
        }
    }

    /// The same with what speculation did, if anything.
    pub(super) fn with_speculation(self, speculated: Speculated) -> Self {
        let did = speculated.n_drafted > 0;
        Self {
            drafted: did.then_some(speculated.n_drafted),
            accepted: did.then_some(speculated.n_accepted),
            drafts_off: speculated.off.map(|off| off.to_string()),
            ..self
        }
    }
}

/// The text without its thinking, and the thinking.
pub(super) fn answer_parts(answer: Option<&Answer>) -> (Option<&str>, Option<&str>) {
    match answer {
        Some(Answer {
            thinking: Some(thinking),
            text,
        }) => (Some(text.trim_start()), Some(thinking.trim())),
        _ => (None, None),
    }
}

/// What the line of statistics says.
pub(super) struct Statistics<'a> {
    pub(super) usage: Usage,
    pub(super) finish: Option<&'a FinishReason>,
    pub(super) load: Duration,
    /// `None` where it is of no use.
    pub(super) seed: Option<u64>,
    pub(super) experts: Option<ExpertUse>,
}

impl Statistics<'_> {
    /// The line of statistics.
    pub(super) fn line(&self, info: &BackendInfo) -> String {
        let seed = self
            .seed
            .map_or(String::new(), |seed| format!("seed {seed} | "));
        let pace = |pace: Pace| match pace.tokens_per_second() {
            Some(rate) => format!("{:.2} s, {rate:.1} tokens/s", pace.time.as_secs_f64()),
            None => format!("{:.2} s", pace.time.as_secs_f64()),
        };
        let Timings { prompt, generation } = self.usage.timings();
        let finish = match self.finish {
            Some(FinishReason::EndOfGeneration { .. }) => "the model ended it",
            Some(FinishReason::StopToken { .. }) => "a stop token",
            Some(FinishReason::StopString { .. }) => "a stop string",
            Some(FinishReason::Length) => "--predict reached",
            Some(FinishReason::ContextFull) => "the context is full",
            Some(FinishReason::Cancelled) => "interrupted",
            _ => "unknown",
        };
        let speculated = match self.usage.speculated {
            Speculated { n_drafted: 0, .. } => String::new(),
            Speculated {
                n_drafted,
                n_accepted,
                ..
            } => format!(" ({n_accepted} of {n_drafted} drafted)"),
        };
        let experts = self.experts.map_or_else(String::new, |found| {
            format!(
                "experts: {:.1} % hits, {} read, {:.2} s waited | ",
                found.hit_percent().unwrap_or(0.0),
                BinaryUnits(found.read),
                found.waited().as_secs_f64()
            )
        });
        format!(
            "loaded in {:.2} s | prompt: {} tokens in {} | generated: {} tokens in {}{speculated} | {experts}end: \
             {finish} | {seed}{} ({})",
            self.load.as_secs_f64(),
            prompt.n_tokens,
            pace(prompt),
            self.usage.n_tokens,
            pace(generation),
            info.name,
            info.device,
        )
    }
}
