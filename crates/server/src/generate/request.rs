//! [`GenerateRequest`]: what all APIs ask for, in the words of none.
//!
//! Plain data. Knows no model.

use std::time::Duration;

use cellar_chat::{CallNumber, Tool};
use cellar_engine::Logprobs;
use cellar_engine::sampler::SamplerConfig;
use cellar_engine::serve::{Choices, Priority};
use kv_core::TokenId;
use serde_json::{Map, Value};

use crate::adapters::AdapterChoice;
use crate::error::ApiError;
use crate::fim::Gap;
use crate::skips::Skips;
use crate::speculate::Speculate;

/// What is to be continued.
#[derive(Clone, Debug)]
pub enum Prompt {
    /// A text, encoded as a whole prompt.
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<TokenId>),
    /// Messages, rendered by the model's chat template.
    Chat(ChatPrompt),
    /// A gap in a text, for models whose vocabulary has marks for it.
    Gap(Gap),
    /// A text with marks for its pictures or sounds.
    Marked(MarkedText),
}

/// A text of llama.cpp's form, in which `<__media__>` stands for each of its pictures
/// or sounds.
#[derive(Clone, Debug)]
pub struct MarkedText {
    /// The text.
    pub text: String,
    /// The pictures or sounds, in base64.
    pub pictures: Vec<String>,
}

/// Messages for a chat template.
#[derive(Clone, Debug, Default)]
pub struct ChatPrompt {
    /// The messages: JSON objects with `role` and `content`.
    pub messages: Vec<Value>,
    /// What the template knows besides, for example `enable_thinking`.
    pub variables: Map<String, Value>,
}

impl ChatPrompt {
    /// The beginning of an answer, and the messages before it, where the last message is an
    /// assistant's text alone.
    pub(crate) fn begun_answer(&self) -> Option<(&str, &[Value])> {
        let (last, before) = self.messages.split_last()?;
        let is_text = ["tool_calls", "reasoning_content", "reasoning", "thinking"]
            .iter()
            .all(|name| last.get(*name).is_none());
        let content = last["content"].as_str().filter(|text| !text.is_empty())?;
        (last["role"] == "assistant" && is_text && !before.is_empty()).then_some((content, before))
    }
}

/// What a text is held to.
#[derive(Clone, Debug)]
pub enum Constraint {
    /// A JSON object.
    JsonObject,
    /// JSON that a schema allows.
    JsonSchema {
        /// The schema.
        schema: Value,
        /// Its path in the request, for errors.
        param: &'static str,
        /// The treatment of keywords that cannot be held.
        unheld: UnheldKeywords,
    },
    /// A text of a form.
    Text {
        /// The form.
        form: Form,
        /// Its path in the request, for errors.
        param: &'static str,
    },
    /// Calls of these tools, and nothing else.
    Calls {
        /// The tools.
        tools: Vec<Tool>,
        /// How many calls.
        number: CallNumber,
    },
}

/// The treatment of keywords of a schema that cannot be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnheldKeywords {
    /// They are left out, and named.
    Skipped,
    /// The request is refused.
    Refused,
}

/// The form of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// A grammar in GBNF or Lark.
    Grammar(String),
    /// A regular expression of the whole text.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl Form {
    /// Bytes of what a request says of it.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Grammar(text) | Self::Regex(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(String::len).sum(),
        }
    }
}

impl Constraint {
    /// The same, where this object of a request has `strict: true`, with all keywords of a schema.
    #[must_use]
    pub(crate) fn strict_where(self, format: &Value) -> Self {
        match self {
            Self::JsonSchema { schema, param, .. } if format["strict"] == true => {
                let unheld = UnheldKeywords::Refused;
                Self::JsonSchema {
                    schema,
                    param,
                    unheld,
                }
            }
            other => other,
        }
    }
}

/// A request in the words of no API.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// What is to be continued.
    pub prompt: Prompt,
    /// How tokens are sampled.
    pub sampler: SamplerConfig,
    /// Largest number of tokens; `None` goes on until the model or the context ends.
    pub max_tokens: Option<usize>,
    /// What ends the text.
    pub stop: Stop,
    /// What the text is held to.
    pub constraint: Option<Constraint>,
    /// Which requests go before it.
    pub priority: Priority,
    /// Narrows who shares cached prefixes with this request.
    pub cache_salt: Option<String>,
    /// The adapters that are wanted.
    pub adapters: AdapterChoice,
    /// How its tokens are drafted; `None` as the model's settings say.
    pub speculate: Option<Speculate>,
    /// Which log probabilities of its tokens are wanted.
    pub logprobs: Logprobs,
    /// Whether the prompt comes first, with the log probabilities of its tokens where such are
    /// wanted.
    pub echo: bool,
    /// How many texts are computed, and how many of them are given.
    pub choices: Choices,
    /// What the pieces of the text are.
    pub output: Output,
    /// Takes the names of what is left out of the request.
    pub(crate) skips: Skips,
}

/// What ends a text before it is as long as it may get.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stop {
    /// Texts that do.
    pub strings: Vec<String>,
    /// Whether the one that does is part of the text.
    pub is_included: bool,
    /// Tokens that do, besides those of the model; they are not part of the text.
    pub tokens: Vec<TokenId>,
    /// Whether those of the model are never chosen.
    pub ignore_eos: bool,
    /// The time after its first token in which a text goes on. Then it ends at once where it has a
    /// line break, or else with the line.
    pub max_time: Option<Duration>,
    /// Tokens after which reasoning ends; `None` where the model ends it.
    pub reasoning_tokens: Option<usize>,
}

/// Texts that end a text: each is looked for after each token.
const MAX_STOPS: usize = 256;

/// Bytes of these texts together.
const MAX_STOP_BYTES: usize = 64 << 10;

/// Tokens that end a text, besides those of the model.
const MAX_STOP_TOKENS: usize = 1024;

impl Stop {
    /// Checks the texts, which the request has under this name.
    ///
    /// # Errors
    /// [`ApiError`] 400 with the limit, where one is empty, or there are too many, or too much is
    /// in them.
    pub(crate) fn check(&self, param: &str) -> Result<(), ApiError> {
        let wrong = |message| Err(ApiError::invalid_param(param, message));
        let n_bytes: usize = self.strings.iter().map(String::len).sum();
        match self.strings.len() {
            n if n > MAX_STOPS => wrong(format!(
                "'{param}' has {n} texts: {MAX_STOPS} are taken at most"
            )),
            _ if n_bytes > MAX_STOP_BYTES => wrong(format!(
                "the texts of '{param}' have {n_bytes} bytes: {MAX_STOP_BYTES} are taken at most"
            )),
            _ if self.strings.iter().any(String::is_empty) => {
                wrong(format!("a text of '{param}' is empty"))
            }
            _ => match self.tokens.len() {
                n if n > MAX_STOP_TOKENS => Err(ApiError::invalid_param(
                    "stop_token_ids",
                    format!("'stop_token_ids' has {n} tokens: {MAX_STOP_TOKENS} are taken at most"),
                )),
                _ => Ok(()),
            },
        }
    }
}

/// What the pieces of a text are.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Output {
    /// All of it is text.
    #[default]
    Text,
    /// Reasoning is apart from the text, and so are calls of tools where there are any.
    Chat(ToolUse),
}

/// Which tools an answer may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum ToolUse {
    /// None.
    #[default]
    None,
    /// These, as the model likes.
    Auto {
        /// The tools.
        tools: Vec<Tool>,
        /// How many calls; later ones are dropped.
        number: CallNumber,
    },
    /// The text is held to a grammar by which it is calls and nothing else.
    Forced,
}
