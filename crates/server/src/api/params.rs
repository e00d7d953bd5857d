//! [`SamplingParams`]: the parameters that several APIs have in common.
//!
//! Invariant: a value out of range is refused with the name of its parameter. Decides no defaults
//! but those of the model's settings.

use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::time::{SystemTime, UNIX_EPOCH};

use cellar_engine::sampler::{
    Bias, Dry, LogitBias, Mirostat, Penalties, SamplerConfig, Xtc, random_seed,
};
use cellar_engine::serve::{Choices, Priority};
use kv_core::TokenId;
use model_core::date::Date;
use serde::Deserialize;

use crate::adapters::{AdapterChoice, AdapterScale};
use crate::error::ApiError;
use crate::generate::Stop;
use crate::model::ModelSettings;
use crate::speculate::Speculate;

/// How tokens are sampled, and where texts end.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct SamplingParams {
    temperature: Option<f32>,
    top_p: Option<f32>,
    /// 0 and -1 keep all.
    top_k: Option<i64>,
    min_p: Option<f32>,
    /// 0 and negative numbers keep all.
    top_n_sigma: Option<f32>,
    /// Tokens of reasoning; -1 sets no limit.
    reasoning_budget: Option<i64>,
    /// llama-server's name of it in the bodies of chats.
    thinking_budget_tokens: Option<i64>,
    /// vLLM's.
    thinking_token_budget: Option<i64>,
    seed: Option<i64>,
    presence_penalty: Option<f32>,
    frequency_penalty: Option<f32>,
    repeat_penalty: Option<f32>,
    /// vLLM's name of `repeat_penalty`.
    repetition_penalty: Option<f32>,
    repeat_last_n: Option<i64>,
    typical_p: Option<f32>,
    min_tokens: Option<usize>,
    logit_bias: Option<LogitBiases>,
    dry_multiplier: Option<f32>,
    dry_base: Option<f32>,
    dry_allowed_length: Option<usize>,
    /// -1 looks at the whole text.
    dry_penalty_last_n: Option<i64>,
    dry_sequence_breakers: Option<Vec<String>>,
    xtc_probability: Option<f32>,
    xtc_threshold: Option<f32>,
    /// 0 or 2.
    mirostat: Option<u32>,
    mirostat_tau: Option<f32>,
    mirostat_eta: Option<f32>,
    n: Option<u32>,
    best_of: Option<u32>,
    stop: Option<StopStrings>,
    stop_token_ids: Option<Vec<u32>>,
    include_stop_str_in_output: Option<bool>,
    ignore_eos: Option<bool>,
    cache_salt: Option<String>,
    /// The name in the request, which may be that of an adapter.
    model: Option<String>,
    /// llama-server's list of adapters with their scales.
    lora: Option<Vec<AdapterScale>>,
    priority: Option<PriorityParam>,
    speculate: Option<Speculate>,
}

/// One text or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a text or a list of texts")]
enum StopStrings {
    One(String),
    Many(Vec<String>),
}

/// OpenAI's object of numbers by token id, or llama-server's list of pairs, whose second may be
/// `false` for a token that is never chosen.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected an object of numbers by token id, or a list of pairs of these"
)]
enum LogitBiases {
    ById(BTreeMap<String, f32>),
    Pairs(Vec<(u32, BiasValue)>),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(untagged, expecting = "expected a number or false")]
enum BiasValue {
    Number(f32),
    Flag(bool),
}

impl LogitBiases {
    fn list(&self) -> Result<Vec<LogitBias>, ApiError> {
        let bias = |token, bias| LogitBias {
            token: TokenId(token),
            bias,
        };
        let wrong =
            |what: &str| ApiError::invalid_param("logit_bias", format!("'logit_bias': {what}"));
        match self {
            Self::ById(biases) => {
                let read = |(id, value): (&String, &f32)| match id.parse() {
                    Ok(id) => Ok(bias(id, Bias::Add(*value))),
                    Err(_) => Err(wrong(&format!("'{id}' is no token id"))),
                };
                biases.iter().map(read).collect()
            }
            Self::Pairs(biases) => {
                let read = |(id, value): &(u32, BiasValue)| match value {
                    BiasValue::Number(value) => Ok(bias(*id, Bias::Add(*value))),
                    BiasValue::Flag(false) => Ok(bias(*id, Bias::Ban)),
                    BiasValue::Flag(true) => Err(wrong("true is no bias: give a number or false")),
                };
                biases.iter().map(read).collect()
            }
        }
    }
}

/// vLLM's number, of which lower ones go first, or a name.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number, or one of interactive, normal, batch"
)]
enum PriorityParam {
    Number(i64),
    Name(PriorityName),
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum PriorityName {
    Interactive,
    Normal,
    Batch,
}

impl SamplingParams {
    /// The sampler, with the model's settings where the request says nothing.
    ///
    /// # Errors
    /// [`ApiError`] 400 where a value is out of range.
    pub fn sampler(&self, settings: &ModelSettings) -> Result<SamplerConfig, ApiError> {
        let defaults = &settings.sampler;
        let penalties = &defaults.penalties;
        let repeat = self.repeat_penalty.or(self.repetition_penalty);
        let (dry, xtc) = (&defaults.dry, &defaults.xtc);
        let config = SamplerConfig {
            typical_p: self.typical_p.unwrap_or(defaults.typical_p),
            min_tokens: self.min_tokens.unwrap_or(defaults.min_tokens),
            logit_bias: match &self.logit_bias {
                Some(biases) => biases.list()?,
                None => defaults.logit_bias.clone(),
            },
            dry: Dry {
                multiplier: self.dry_multiplier.unwrap_or(dry.multiplier),
                base: self.dry_base.unwrap_or(dry.base),
                allowed_length: self.dry_allowed_length.unwrap_or(dry.allowed_length),
                last_n: match self.dry_penalty_last_n {
                    None => dry.last_n,
                    Some(-1) => None,
                    Some(n) => Some(usize::try_from(n).map_err(|_| {
                        let message = "'dry_penalty_last_n' is below -1";
                        ApiError::invalid_param("dry_penalty_last_n", message)
                    })?),
                },
                breakers: match &self.dry_sequence_breakers {
                    Some(breakers) => breakers.clone(),
                    None => dry.breakers.clone(),
                },
            },
            xtc: Xtc {
                probability: self.xtc_probability.unwrap_or(xtc.probability),
                threshold: self.xtc_threshold.unwrap_or(xtc.threshold),
            },
            mirostat: self.mirostat(defaults.mirostat)?,
            temperature: self.temperature.unwrap_or(defaults.temperature),
            top_k: match self.top_k {
                None => defaults.top_k,
                Some(0 | -1) => None,
                Some(k) => {
                    let k = u32::try_from(k).ok().and_then(NonZeroU32::new);
                    let wrong =
                        || ApiError::invalid_param("top_k", "'top_k' is below -1 or too large");
                    Some(k.ok_or_else(wrong)?)
                }
            },
            top_p: self.top_p.unwrap_or(defaults.top_p),
            min_p: self.min_p.unwrap_or(defaults.min_p),
            top_n_sigma: self
                .top_n_sigma
                .map_or(defaults.top_n_sigma, |n| n.max(0.0)),
            penalties: Penalties {
                last_n: match self.repeat_last_n {
                    None => penalties.last_n,
                    Some(-1) => cellar_engine::sampler::MAX_LAST_N,
                    Some(n) => usize::try_from(n).map_err(|_| {
                        ApiError::invalid_param("repeat_last_n", "'repeat_last_n' is below -1")
                    })?,
                },
                repeat: repeat.unwrap_or(penalties.repeat),
                frequency: self.frequency_penalty.unwrap_or(penalties.frequency),
                presence: self.presence_penalty.unwrap_or(penalties.presence),
            },
            seed: match self.seed {
                // llama-server's way to ask for a random one.
                None | Some(-1) => settings.seed.unwrap_or_else(random_seed),
                Some(seed) => seed.cast_unsigned(),
            },
        };
        match config.check() {
            Ok(()) => Ok(config),
            Err(error) => Err(ApiError {
                param: wrong_param(&config).map(str::to_owned),
                ..ApiError::invalid(error.to_string())
            }),
        }
    }

    /// Mirostat, where it is asked for.
    fn mirostat(&self, default: Option<Mirostat>) -> Result<Option<Mirostat>, ApiError> {
        let values = default.unwrap_or_default();
        match (self.mirostat, default) {
            (Some(0), _) | (None, None) => Ok(None),
            (Some(2), _) | (None, Some(_)) => Ok(Some(Mirostat {
                tau: self.mirostat_tau.unwrap_or(values.tau),
                eta: self.mirostat_eta.unwrap_or(values.eta),
            })),
            (Some(other), _) => {
                let message = format!("'mirostat' is {other}: 2 is Mirostat 2, and 0 is none");
                Err(ApiError::invalid_param("mirostat", message))
            }
        }
    }

    /// How many texts are computed, and how many of them are given.
    ///
    /// # Errors
    /// [`ApiError`] 400 where the numbers make no sense.
    pub fn choices(&self) -> Result<Choices, ApiError> {
        let choices = Choices::new(self.n.unwrap_or(1), self.best_of);
        choices.map_err(|error| ApiError::invalid_param("n", error.to_string()))
    }

    /// What ends the text.
    ///
    /// # Errors
    /// [`ApiError`] 400 where a stop string is empty or there are too many, and where the text of a
    /// stop token is wanted.
    pub fn stop(&self, settings: &ModelSettings) -> Result<Stop, ApiError> {
        let strings = match &self.stop {
            None => Vec::new(),
            Some(StopStrings::One(stop)) => vec![stop.clone()],
            Some(StopStrings::Many(stop)) => stop.clone(),
        };
        let tokens = self.stop_token_ids.iter().flatten();
        let tokens: Vec<TokenId> = tokens.copied().map(TokenId).collect();
        let is_included = self.include_stop_str_in_output == Some(true);
        if is_included && !tokens.is_empty() {
            let message = "'include_stop_str_in_output' is not supported with 'stop_token_ids', whose text \
                           is never part of an answer: use 'stop'";
            return Err(ApiError::unsupported("include_stop_str_in_output", message));
        }
        let stop = Stop {
            strings,
            is_included,
            tokens,
            ignore_eos: self.ignore_eos == Some(true),
            max_time: None,
            reasoning_tokens: self.reasoning_tokens(settings)?,
        };
        stop.check("stop")?;
        Ok(stop)
    }

    /// After how many tokens reasoning ends.
    fn reasoning_tokens(&self, settings: &ModelSettings) -> Result<Option<usize>, ApiError> {
        let names = [
            ("reasoning_budget", self.reasoning_budget),
            ("thinking_budget_tokens", self.thinking_budget_tokens),
            ("thinking_token_budget", self.thinking_token_budget),
        ];
        let given = names.into_iter().find_map(|(name, n)| Some((name, n?)));
        match given {
            None => Ok(settings.reasoning_tokens),
            Some((_, -1)) => Ok(None),
            Some((name, n)) => match usize::try_from(n) {
                Ok(n) => Ok(Some(n)),
                Err(_) => Err(ApiError::invalid_param(
                    name,
                    format!("'{name}' is below -1"),
                )),
            },
        }
    }

    /// Narrows who shares cached prefixes.
    pub fn cache_salt(&self) -> Option<String> {
        self.cache_salt.clone()
    }

    /// The adapters that are wanted.
    pub fn adapters(&self) -> AdapterChoice {
        AdapterChoice {
            model: self.model.clone(),
            lora: self.lora.clone(),
        }
    }

    /// How tokens are drafted.
    pub fn speculate(&self) -> Option<Speculate> {
        self.speculate
    }

    /// Which requests go before this one.
    pub fn priority(&self) -> Priority {
        match self.priority {
            None => Priority::default(),
            Some(PriorityParam::Number(n)) => match n.signum() {
                -1 => Priority::Interactive,
                0 => Priority::Normal,
                _ => Priority::Batch,
            },
            Some(PriorityParam::Name(name)) => match name {
                PriorityName::Interactive => Priority::Interactive,
                PriorityName::Normal => Priority::Normal,
                PriorityName::Batch => Priority::Batch,
            },
        }
    }
}

/// The parameter that is out of range by itself.
fn wrong_param(config: &SamplerConfig) -> Option<&'static str> {
    type CopyParam = fn(&mut SamplerConfig, &SamplerConfig);
    let usual = SamplerConfig::default;
    let only = |change: CopyParam| {
        let mut changed = usual();
        change(&mut changed, config);
        changed.check().is_err()
    };
    let params: [(&str, CopyParam); 12] = [
        ("temperature", |to, from| to.temperature = from.temperature),
        ("top_p", |to, from| to.top_p = from.top_p),
        ("min_p", |to, from| to.min_p = from.min_p),
        ("typical_p", |to, from| to.typical_p = from.typical_p),
        ("logit_bias", |to, from| {
            to.logit_bias = from.logit_bias.clone()
        }),
        ("xtc_probability", |to, from| {
            to.xtc.probability = from.xtc.probability
        }),
        ("xtc_threshold", |to, from| {
            to.xtc.threshold = from.xtc.threshold
        }),
        ("mirostat_tau", |to, from| to.mirostat = from.mirostat),
        ("repeat_last_n", |to, from| {
            to.penalties.last_n = from.penalties.last_n
        }),
        ("repeat_penalty", |to, from| {
            to.penalties.repeat = from.penalties.repeat
        }),
        ("frequency_penalty", |to, from| {
            to.penalties.frequency = from.penalties.frequency
        }),
        ("presence_penalty", |to, from| {
            to.penalties.presence = from.penalties.presence
        }),
    ];
    let wrong = params.into_iter().find(|(_, change)| only(*change));
    wrong.map(|(name, _)| name)
}

/// A time as RFC 3339 writes it, in UTC.
pub(crate) fn rfc3339(time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, micros) = (since.as_secs(), since.subsec_micros());
    let (days, second) = (seconds / 86_400, seconds % 86_400);
    let date = Date::of_days(days);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let Date { year, month, day } = date;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
}
