//! [`RequestLine`]: one line of the input, checked.
//!
//! Invariant: a field that is not known, or a value out of range, is refused with the number of its
//! line before anything is computed.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::rc::Rc;

use cellar::{MediaPart, chat_tokens};
use cellar_engine::batch_file::{BatchReader, json_fault, numbered_lines};
use cellar_engine::sampler::{Bias, LogitBias, SamplerConfig};
use cellar_engine::serve::{Choices, TextRequest};
use cellar_engine::{CompletionOptions, ConfigError, Logprobs, Speculation};
use kv_core::TokenId;
use model_core::chat_template::ChatMessage;
use model_core::model_file::ModelFile;
use model_core::tokenizer::EncodeOptions;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::openai::{self, AnsweredLine, ENDPOINTS};
use crate::args::{SpeculationArgs, SpeculationName};
use crate::constraint::{Constraint, Schemas};
use crate::failure::{UsageError, usage};
use crate::pictures::{self, Sight};

/// One line of the input.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    id: Option<Value>,
    prompt: Option<String>,
    messages: Option<Vec<Message>>,
    max_tokens: Option<TokenLimit>,
    temperature: Option<f32>,
    top_k: Option<TopK>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    top_n_sigma: Option<f32>,
    typical_p: Option<f32>,
    repeat_penalty: Option<f32>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    dry_multiplier: Option<f32>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    /// By token id.
    logit_bias: Option<BTreeMap<u32, f32>>,
    min_tokens: Option<usize>,
    logprobs: Option<usize>,
    prompt_logprobs: Option<usize>,
    /// Texts of the prompt.
    n: Option<u32>,
    /// Texts of which the best `n` are given.
    best_of: Option<u32>,
    seed: Option<u64>,
    stop: Option<Stop>,
    /// The JSON schema of its text.
    schema: Option<Map<String, Value>>,
    /// How its tokens are drafted.
    speculate: Option<SpeculationName>,
}

/// A message: its content is a text, or a list of parts.
#[derive(Clone, Debug, Deserialize)]
struct Message {
    role: String,
    content: Value,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Many(Vec<String>),
}

/// The number of most likely tokens that are kept; `None` all of them, written as 0 or -1.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "i64")]
struct TopK(Option<NonZeroU32>);

/// The number of tokens that a text may have; `None` any, written as -1.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(try_from = "i64")]
struct TokenLimit(Option<usize>);

impl TryFrom<i64> for TokenLimit {
    type Error = String;

    fn try_from(number: i64) -> Result<Self, String> {
        match usize::try_from(number) {
            Ok(limit) => Ok(Self(Some(limit))),
            Err(_) if number == -1 => Ok(Self(None)),
            Err(_) => Err(format!(
                "\"max_tokens\" is {number}: it must be at least 0, or -1 for no limit"
            )),
        }
    }
}

impl TryFrom<i64> for TopK {
    type Error = String;

    fn try_from(number: i64) -> Result<Self, String> {
        let kept = u32::try_from(number.max(0)).ok().filter(|_| number >= -1);
        kept.map(|kept| Self(NonZeroU32::new(kept))).ok_or_else(|| {
            format!("\"top_k\" is {number}: it must be at least 1, or 0 or -1 for all tokens")
        })
    }
}

impl Message {
    /// The fault of its content; `None` where it is a text, or parts that are texts,
    /// pictures and sounds.
    fn wrong(&self) -> Option<String> {
        let parts = match &self.content {
            Value::String(_) => return None,
            Value::Array(parts) => parts,
            _ => {
                return Some(
                    "the \"content\" of a message is neither a text nor a list of parts".into(),
                );
            }
        };
        let other = parts
            .iter()
            .find(|part| text_of(part).is_none() && MediaPart::of(part).is_none())?;
        Some(format!(
            "a part of a message has the type {}: parts are \"text\", \"image_url\", \
             \"input_audio\" and \"audio_url\"",
            other["type"]
        ))
    }

    /// The number of its pictures and sounds.
    fn n_pictures(&self) -> usize {
        let parts = self.content.as_array().into_iter().flatten();
        parts.filter_map(MediaPart::of).count()
    }

    /// The message where it is text alone: parts follow each other.
    fn text(&self) -> ChatMessage {
        let content = match &self.content {
            Value::Array(parts) => parts.iter().filter_map(text_of).collect(),
            content => content.as_str().unwrap_or_default().to_owned(),
        };
        ChatMessage::new(&self.role, content)
    }

    /// The message as JSON, with its parts.
    fn json(&self) -> Value {
        json!({"role": self.role, "content": self.content})
    }
}

/// The text of a part that is one.
fn text_of(part: &Value) -> Option<&str> {
    let is_text = matches!(part["type"].as_str(), Some("text" | "input_text"));
    part["text"].as_str().filter(|_| is_text)
}

/// The settings of a run that a line does not change.
#[derive(Clone, Copy, Debug)]
pub(super) struct LineContext<'a> {
    pub(super) file: &'a ModelFile,
    /// What the flags say.
    pub(super) flags: &'a CompletionOptions,
    /// The tower of the model; `None` where no line has a picture.
    pub(super) sight: Option<&'a Sight>,
}

/// A request, and the number of its line.
#[derive(Clone, Debug)]
pub(super) struct RequestLine {
    /// Counted from 1.
    number: usize,
    /// Its parts of OpenAI's form, where it is in that form.
    openai: Option<AnsweredLine>,
    fields: Fields,
}

/// The requests of an input; empty lines are passed over.
///
/// # Errors
/// A usage error that names the first line that is none.
pub(super) fn read(text: &str) -> anyhow::Result<Vec<RequestLine>> {
    let mut reader = BatchReader::new(&ENDPOINTS);
    let lines = numbered_lines(text.as_bytes());
    let requests = lines.map(|(number, line)| match parse(line, &mut reader) {
        Ok((openai, fields)) => RequestLine {
            number,
            openai,
            fields,
        }
        .checked(),
        Err(error) => usage(format!("line {number}: {error}")),
    });
    let requests = requests.collect::<anyhow::Result<Vec<RequestLine>>>()?;
    if requests.is_empty() {
        usage("there are no requests: each line of the input is a JSON object")
    } else {
        Ok(requests)
    }
}

/// A line in either form.
fn parse(
    line: &[u8],
    reader: &mut BatchReader<'_>,
) -> Result<(Option<AnsweredLine>, Fields), String> {
    let value: Value = serde_json::from_slice(line).map_err(|error| json_fault(&error))?;
    if value.get("custom_id").is_some() || value.get("body").is_some() {
        let (answered, fields) = openai::fields_of(reader.read(line)?)?;
        let fields = serde_json::from_value(fields).map_err(|error| error.to_string())?;
        return Ok((Some(answered), fields));
    }
    // Once more, for the column of what is wrong.
    let fields = serde_json::from_slice(line).map_err(|error| json_fault(&error))?;
    Ok((None, fields))
}

impl RequestLine {
    /// The parts that an answer in OpenAI's form needs, where the line is in that form.
    pub(super) fn openai(&self) -> Option<&AnsweredLine> {
        self.openai.as_ref()
    }

    /// The caller's name of the request.
    pub(super) fn id(&self) -> Option<&Value> {
        self.fields.id.as_ref()
    }

    fn checked(self) -> anyhow::Result<Self> {
        let Self { number, fields, .. } = &self;
        match (&fields.prompt, &fields.messages) {
            (Some(_), None) | (None, Some(_)) => {}
            (None, None) => {
                return usage(format!(
                    "line {number} has neither \"prompt\" nor \"messages\""
                ));
            }
            (Some(_), Some(_)) => {
                return usage(format!(
                    "line {number} has both \"prompt\" and \"messages\": give one of them"
                ));
            }
        }
        for message in fields.messages.iter().flatten() {
            if let Some(wrong) = message.wrong() {
                return usage(format!("line {number}: {wrong}"));
            }
        }
        if let Err(error) = self.choices() {
            return usage(format!("line {number}: {error}"));
        }
        if self.stop().iter().any(String::is_empty) {
            return usage(format!("line {number}: a text of \"stop\" is empty"));
        }
        if let Err(error) = self.sampler(&SamplerConfig::default()).check() {
            return usage(format!("line {number}: {error}"));
        }
        Ok(self)
    }

    /// How many texts are computed, and how many of them are given.
    ///
    /// # Errors
    /// Where the numbers make no sense.
    pub(super) fn choices(&self) -> Result<Choices, ConfigError> {
        Choices::new(self.fields.n.unwrap_or(1), self.fields.best_of)
    }

    /// How its tokens are drafted: as the flags say where the line does not.
    ///
    /// # Errors
    /// A usage error where a model is to draft, and the flags name none.
    pub(super) fn speculation(&self, flags: &SpeculationArgs) -> anyhow::Result<Speculation> {
        let Some(name) = self.fields.speculate else {
            return Ok(flags.speculation());
        };
        let number = self.number;
        let speculation = flags.of_request(name);
        speculation.or_else(|wrong| usage(format!("line {number}: {wrong}")))
    }

    /// The constraint of its text; `None` where it is free.
    ///
    /// # Errors
    /// A usage error where its schema cannot be used.
    pub(super) fn constraint(
        &self,
        schemas: &mut Schemas<'_>,
    ) -> anyhow::Result<Option<Rc<Constraint>>> {
        let Some(schema) = &self.fields.schema else {
            return Ok(None);
        };
        let number = self.number;
        match schemas.constraint(&Value::Object(schema.clone())) {
            Ok(constraint) => Ok(Some(constraint)),
            Err(error) => usage(format!("line {number}: \"schema\": {error:#}")),
        }
    }

    fn stop(&self) -> Vec<String> {
        match &self.fields.stop {
            None => Vec::new(),
            Some(Stop::One(stop)) => vec![stop.clone()],
            Some(Stop::Many(stop)) => stop.clone(),
        }
    }

    /// How its tokens are sampled: as `flags` say where the line does not.
    fn sampler(&self, flags: &SamplerConfig) -> SamplerConfig {
        let Self { fields, .. } = self;
        let mut sampler = flags.clone();
        let set = |setting: &mut f32, given: Option<f32>| *setting = given.unwrap_or(*setting);
        set(&mut sampler.temperature, fields.temperature);
        set(&mut sampler.top_p, fields.top_p);
        set(&mut sampler.min_p, fields.min_p);
        set(&mut sampler.top_n_sigma, fields.top_n_sigma);
        set(&mut sampler.typical_p, fields.typical_p);
        set(&mut sampler.penalties.repeat, fields.repeat_penalty);
        set(&mut sampler.penalties.presence, fields.presence_penalty);
        set(&mut sampler.penalties.frequency, fields.frequency_penalty);
        set(&mut sampler.dry.multiplier, fields.dry_multiplier);
        set(&mut sampler.xtc.probability, fields.xtc_probability);
        set(&mut sampler.xtc.threshold, fields.xtc_threshold);
        sampler.top_k = fields.top_k.map_or(flags.top_k, |TopK(kept)| kept);
        sampler.min_tokens = fields.min_tokens.unwrap_or(flags.min_tokens);
        sampler.seed = fields.seed.unwrap_or(flags.seed);
        if let Some(biases) = &fields.logit_bias {
            let bias = |(&token, &bias): (&u32, &f32)| LogitBias {
                token: TokenId(token),
                bias: Bias::Add(bias),
            };
            sampler.logit_bias = biases.iter().map(bias).collect();
        }
        sampler
    }

    /// The number of pictures and sounds in its messages.
    pub(super) fn n_pictures(&self) -> usize {
        let messages = self.fields.messages.iter().flatten();
        messages.map(Message::n_pictures).sum()
    }

    /// The request, with what the flags say where the line does not.
    ///
    /// # Errors
    /// Where the model has no chat template, or it refuses the messages; where a picture cannot be
    /// read, or the model sees none.
    pub(super) fn request(&self, context: LineContext<'_>) -> anyhow::Result<TextRequest> {
        let LineContext { file, flags, .. } = context;
        let number = self.number;
        let tokenizer = file.tokenizer();
        let read = match (&self.fields.prompt, &self.fields.messages) {
            (Some(prompt), _) => Ok(TextRequest {
                prompt: tokenizer.encode(prompt, EncodeOptions::PROMPT),
                ..TextRequest::default()
            }),
            (None, messages) => {
                let messages = messages.as_deref().unwrap_or_default();
                self.chat(context, messages)
            }
        };
        let request = read.map_err(|error| match error.downcast::<UsageError>() {
            Ok(UsageError(wrong)) => UsageError(format!("line {number}: {wrong}")).into(),
            Err(error) => anyhow::anyhow!("line {number}: {error:#}"),
        })?;
        let options = CompletionOptions {
            sampler: self.sampler(&flags.sampler),
            n_predict: match self.fields.max_tokens {
                Some(TokenLimit(limit)) => limit,
                None => flags.n_predict,
            },
            stop: self.stop(),
            logprobs: self.fields.logprobs.map_or(flags.logprobs, Logprobs::Top),
            prompt_logprobs: self
                .fields
                .prompt_logprobs
                .map_or(Logprobs::Off, Logprobs::Top),
            ..CompletionOptions::default()
        };
        if let Err(error) = options.check_for(tokenizer) {
            return usage(format!("line {number}: {error}"));
        }
        Ok(TextRequest { options, ..request })
    }

    /// The prompt that messages are.
    fn chat(&self, context: LineContext<'_>, messages: &[Message]) -> anyhow::Result<TextRequest> {
        if let (Some(sight), true) = (context.sight, self.n_pictures() > 0) {
            let mut messages: Vec<Value> = messages.iter().map(Message::json).collect();
            let read = |part: &MediaPart<'_>| pictures::read_part(sight, part);
            let read = cellar::take_pictures(&mut messages, read)?;
            let reader = pictures::reader(sight).map_err(anyhow::Error::msg)?;
            let chat = cellar::picture_chat(context.file, &reader, &messages, &Map::new(), &read)?;
            return Ok(TextRequest {
                prompt: chat.prompt.tokens,
                pictures: chat.prompt.pictures,
                ..TextRequest::default()
            });
        }
        let messages: Vec<ChatMessage> = messages.iter().map(Message::text).collect();
        let Some(chat) = chat_tokens(context.file, &messages)? else {
            return usage(
                "the model has no chat template, which messages need: give it a \"prompt\"",
            );
        };
        Ok(TextRequest {
            prompt: chat.tokens,
            checkpoints: chat.message_ends,
            ..TextRequest::default()
        })
    }
}
