//! [`Answers`]: where the lines of the output go, and [`Answer`]: one of them.
//!
//! Invariant: the lines of an output file are the answers of the first requests, in their order, so
//! that a run can continue behind them.

use std::fmt::Display;
use std::fs::{File, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, bail};
use cellar_engine::serve::{Choices, FinishedText, Missed, Reuse};
use cellar_engine::{FinishReason, Logprobs, Speculated};
use model_core::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Value, json};

use super::requests::RequestLine;
use crate::failure::usage;
use crate::logprobs::{ShownLogprobs, shown_logprobs};
use crate::output_file::{self, InPlace};
use crate::terminal;

/// The answer to one request.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    /// Number of the request, counted from 0.
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    custom_id: Option<String>,
    #[serde(flatten)]
    result: AnswerResult,
    #[serde(skip)]
    n_tokens: TokenCounts,
}

/// The cost of an answer.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenCounts {
    pub(super) n_prompt: usize,
    /// Those of the prompt that were computed before.
    pub(super) n_reused: usize,
    pub(super) n_text: usize,
    /// True if the request failed.
    pub(super) is_failed: bool,
}

#[derive(Debug, Serialize)]
#[serde(untagged)]
enum AnswerResult {
    /// One text.
    Text {
        #[serde(flatten)]
        text: AnswerText,
        #[serde(flatten)]
        prompt: AnswerPrompt,
    },
    /// Several texts of one prompt.
    Texts {
        texts: Vec<AnswerText>,
        #[serde(flatten)]
        prompt: AnswerPrompt,
    },
    Failed {
        error: String,
    },
    /// In OpenAI's form: "response" and "error".
    OpenAi(Value),
}

#[derive(Debug, Serialize)]
struct AnswerText {
    text: String,
    tokens: usize,
    finish_reason: FinishReason,
    #[serde(skip_serializing_if = "Option::is_none")]
    speculation: Option<SpeculationReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    logprobs: Option<Vec<ShownLogprobs>>,
}

#[derive(Debug, Default, Serialize)]
struct AnswerPrompt {
    prompt_tokens: usize,
    reuse: ReuseReport,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    prompt_logprobs: Vec<ShownLogprobs>,
}

/// How answers are shown.
#[derive(Clone, Copy)]
pub(super) struct Shown<'a> {
    /// Writes single tokens.
    pub(super) tokenizer: &'a Tokenizer,
    /// Which of the texts are given.
    pub(super) choices: Choices,
    /// Log probabilities of the text, which may be there for other reasons.
    pub(super) logprobs: Logprobs,
}

#[derive(Debug, Serialize)]
struct SpeculationReport {
    drafted: usize,
    accepted: usize,
    /// Why nothing was drafted.
    #[serde(skip_serializing_if = "Option::is_none")]
    off: Option<String>,
}

impl SpeculationReport {
    fn of(speculated: Speculated) -> Option<Self> {
        let is_of_use = speculated.n_drafted > 0 || speculated.off.is_some();
        is_of_use.then(|| Self {
            drafted: speculated.n_drafted,
            accepted: speculated.n_accepted,
            off: speculated.off.map(|off| off.to_string()),
        })
    }
}

#[derive(Debug, Default, Serialize)]
struct ReuseReport {
    tokens: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    missed: Option<Value>,
}

impl Answer {
    /// The answer with these texts, which are of one prompt: the first is the one that it was
    /// computed for.
    pub(super) fn of(
        index: usize,
        line: &RequestLine,
        texts: Vec<FinishedText>,
        shown: Shown<'_>,
    ) -> Self {
        let usage = texts.first().map(|first| &first.usage);
        let (n_prompt, n_reused) = usage.map_or((0, 0), |usage| (usage.n_prompt, usage.n_reused()));
        let prompt = texts.first().map_or_else(AnswerPrompt::default, |first| {
            let usage = &first.usage;
            AnswerPrompt {
                prompt_tokens: usage.n_prompt,
                reuse: ReuseReport {
                    tokens: usage.n_reused(),
                    missed: usage.reuse.as_ref().and_then(missed),
                },
                prompt_logprobs: shown_logprobs(shown.tokenizer, &first.prompt_logprobs),
            }
        });
        let texts = shown.choices.choose(texts, |text| &text.logprobs);
        let n_tokens = TokenCounts {
            n_prompt,
            n_reused,
            n_text: texts.iter().map(|text| text.tokens.len()).sum(),
            is_failed: false,
        };
        if let Some(openai) = line.openai() {
            let answer = openai.answer(index, &texts);
            return Self::in_openai_form(index, line, answer, n_tokens);
        }
        let texts = texts.into_iter().map(|text| AnswerText {
            text: text.text,
            tokens: text.tokens.len(),
            finish_reason: text.finish,
            speculation: SpeculationReport::of(text.usage.speculated),
            logprobs: match shown.logprobs {
                Logprobs::Off => None,
                Logprobs::Top(_) => Some(shown_logprobs(shown.tokenizer, &text.logprobs)),
            },
        });
        let mut texts: Vec<AnswerText> = texts.collect();
        let result = match (texts.len(), texts.pop()) {
            (1, Some(text)) => AnswerResult::Text { text, prompt },
            (_, last) => {
                texts.extend(last);
                AnswerResult::Texts { texts, prompt }
            }
        };
        Self {
            index,
            id: line.id().cloned(),
            custom_id: None,
            result,
            n_tokens,
        }
    }

    pub(super) fn failed(index: usize, line: &RequestLine, error: &impl Display) -> Self {
        let error = error.to_string();
        let n_tokens = TokenCounts {
            is_failed: true,
            ..TokenCounts::default()
        };
        if let Some(openai) = line.openai() {
            return Self::in_openai_form(index, line, openai.failure(&error), n_tokens);
        }
        Self {
            index,
            id: line.id().cloned(),
            custom_id: None,
            result: AnswerResult::Failed { error },
            n_tokens,
        }
    }

    fn in_openai_form(
        index: usize,
        line: &RequestLine,
        answer: Value,
        n_tokens: TokenCounts,
    ) -> Self {
        Self {
            index,
            id: Some(Value::String(format!("batch_req_{index}"))),
            custom_id: line.openai().map(|openai| openai.custom_id().to_owned()),
            result: AnswerResult::OpenAi(answer),
            n_tokens,
        }
    }

    /// Its cost.
    pub(super) fn n_tokens(&self) -> TokenCounts {
        self.n_tokens
    }
}

/// Why no more was reused.
fn missed(reuse: &Reuse) -> Option<Value> {
    Some(match reuse.missed? {
        Missed::Differs { at } => json!({"reason": "differs", "at": at}),
        Missed::WindowForgotten { from, common } => {
            json!({"reason": "window_forgotten", "from": from.0, "common": common})
        }
        Missed::StateGone { nearest, common } => {
            json!({"reason": "state_gone", "nearest": nearest, "common": common})
        }
        Missed::Evicted { age, common } => {
            json!({"reason": "evicted", "age_ms": age.0 / 1000, "common": common})
        }
        Missed::TooShort { n_prompt, least } => {
            json!({"reason": "too_short", "prompt_tokens": n_prompt, "least": least})
        }
        Missed::Disabled => json!({"reason": "disabled"}),
        Missed::NeverSeen => json!({"reason": "never_seen"}),
        Missed::TierMiss => json!({"reason": "tier_miss"}),
        Missed::TierSlow { needed, would_take } => {
            json!({"reason": "tier_slow", "needed_us": needed.0, "would_take_us": would_take.0})
        }
        Missed::TierDown => json!({"reason": "tier_down"}),
        Missed::Refused { common } => json!({"reason": "refused", "common": common}),
    })
}

/// What becomes of an output file that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Existing {
    /// It is continued behind its last whole line.
    Continued,
    /// It is replaced.
    Replaced,
}

/// The output.
pub(super) struct Answers<'a> {
    out: Output<'a>,
    name: String,
    n_written: usize,
}

/// Where answers go.
enum Output<'a> {
    Stdout(&'a mut dyn Write),
    /// Behind what is there.
    Appended(File),
    /// In place of what is there.
    Replaced(File),
}

impl<'a> Answers<'a> {
    /// To standard output.
    pub(super) fn to(out: &'a mut impl Write) -> Self {
        Self {
            out: Output::Stdout(out),
            name: "-".to_owned(),
            n_written: 0,
        }
    }

    /// To a file, which is continued or replaced.
    ///
    /// # Errors
    /// An error where it cannot be written, or another program writes answers to it, and where it
    /// is to be continued and is no output of these requests.
    pub(super) fn to_file(
        path: &Path,
        existing: Existing,
        requests: &[RequestLine],
    ) -> anyhow::Result<Self> {
        let target = output_file::open_in_place(path)?;
        if let InPlace::Regular(file) = &target
            && let Err(TryLockError::WouldBlock) = file.try_lock()
        {
            // A file system without locks gives another error: a second writer is not seen there.
            bail!(
                "cannot write '{}': another program writes answers to it; wait for it, or name \
                 another file",
                path.display()
            );
        }
        let (out, n_written) = match (target, existing) {
            (InPlace::Regular(mut file), Existing::Continued) => {
                let n_written = keep_complete_lines(&mut file, path, requests)?;
                (Output::Appended(file), n_written)
            }
            (InPlace::Regular(file), Existing::Replaced) => (Output::Replaced(file), 0),
            (InPlace::Direct(file), Existing::Replaced) => (Output::Appended(file), 0),
            (InPlace::Direct(_), Existing::Continued) => {
                return usage(format!(
                    "--resume continues a file, and -o '{}' is none: name a file, or leave out --resume",
                    path.display()
                ));
            }
        };
        Ok(Self {
            out,
            name: path.display().to_string(),
            n_written,
        })
    }

    /// Removes what is to be replaced: when nothing but computing can fail any more.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub(super) fn begin(&mut self) -> anyhow::Result<()> {
        match &self.out {
            Output::Replaced(file) => file.set_len(0).with_context(|| self.cannot_write()),
            Output::Stdout(_) | Output::Appended(_) => Ok(()),
        }
    }

    /// Answers that were there before.
    pub(super) fn n_written(&self) -> usize {
        self.n_written
    }

    pub(super) fn write(&mut self, answer: &Answer) -> anyhow::Result<()> {
        let line = format!("{}\n", terminal::json(answer)?);
        match &mut self.out {
            Output::Stdout(out) => {
                out.write_all(line.as_bytes())?;
                Ok(out.flush()?)
            }
            Output::Appended(file) | Output::Replaced(file) => {
                let written = file.write_all(line.as_bytes());
                written.with_context(|| self.cannot_write())
            }
        }
    }

    fn cannot_write(&self) -> String {
        format!("cannot write '{}'", self.name)
    }
}

/// Checks that an answer has the name that its request has now.
fn check_name(answer: &Value, request: &RequestLine) -> anyhow::Result<()> {
    let (key, wanted) = match request.openai() {
        Some(openai) => ("custom_id", Value::from(openai.custom_id())),
        None => ("id", request.id().cloned().unwrap_or_default()),
    };
    let found = &answer[key];
    if *found == wanted {
        return Ok(());
    }
    bail!(
        "its \"{key}\" is {found}, and that of the request is {wanted}; continue with the same \
         requests, or name another file"
    )
}

/// Cuts a line off that was not written to its end, and returns how many there are.
fn keep_complete_lines(
    file: &mut File,
    path: &Path,
    requests: &[RequestLine],
) -> anyhow::Result<usize> {
    let mut bytes = Vec::new();
    let cannot = || format!("cannot continue '{}'", path.display());
    file.read_to_end(&mut bytes).with_context(cannot)?;
    // The rest may end inside a character.
    let complete = bytes
        .iter()
        .rposition(|&b| b == b'\n')
        .map_or(0, |at| at + 1);
    let text = std::str::from_utf8(&bytes[..complete]).with_context(cannot)?;
    let lines = text.lines();
    for (number, line) in lines.clone().enumerate() {
        let answer: Option<Value> = serde_json::from_str(line).ok();
        let index = answer.as_ref().and_then(|answer| answer["index"].as_u64());
        if index != Some(number as u64) {
            bail!("{}: line {} is not answer {number}", cannot(), number + 1);
        }
        if let (Some(answer), Some(request)) = (answer, requests.get(number)) {
            check_name(&answer, request).with_context(|| {
                format!("{}: line {} answers another request", cannot(), number + 1)
            })?;
        }
    }
    let (n_lines, n_requests) = (lines.count(), requests.len());
    if n_lines > n_requests {
        bail!(
            "{}: it has {n_lines} answers, but there are {n_requests} requests",
            cannot()
        );
    }
    file.set_len(complete as u64).with_context(cannot)?;
    file.seek(SeekFrom::End(0)).with_context(cannot)?;
    Ok(n_lines)
}
