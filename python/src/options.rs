//! Keyword arguments to settings. Decides nothing that the defaults of `cellar` do not, but for the
//! seed: a text without one draws one.

use std::collections::HashMap;
use std::num::{NonZeroU32, NonZeroUsize};

use cellar::engine::sampler::random_seed;
use cellar::engine::serve::DEFAULT_DRAFT;
use cellar::engine::{Logprobs, Speculation};
use cellar::{
    BackendKind, BackendOptions, Bias, GenerateOptions, LogitBias, LongContext, Mirostat,
    SamplerConfig, TokenId,
};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::values::{Count, in_range, json};

/// The options of a text.
#[derive(Default)]
pub(crate) struct TextOptions {
    pub(crate) generate: GenerateOptions,
    pub(crate) constraint: Option<Constraint>,
    /// The scales of adapters by name.
    pub(crate) lora: Option<HashMap<String, f32>>,
}

/// The schema or grammar that a text is held to.
pub(crate) enum Constraint {
    /// A JSON schema.
    Schema(String),
    /// A grammar in GBNF or Lark.
    Grammar(String),
}

/// The options of a text from keyword arguments; those that are absent have `cellar`'s defaults.
///
/// # Errors
/// `TypeError` for a name that does not exist, `ValueError` for a value that is out of range.
pub(crate) fn text_options(kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<TextOptions> {
    let mut options = TextOptions::default();
    options.generate.sampler.seed = random_seed();
    for (name, value) in kwargs.into_iter().flatten() {
        let name: String = name.extract()?;
        let set = match set_text(&mut options, &name, &value) {
            Ok(false) => set_sampler(&mut options.generate.sampler, &name, &value),
            set => set,
        };
        let py = value.py();
        match set {
            Ok(true) => {}
            Ok(false) => {
                let message = format!("'{name}' is no option of a text");
                return Err(PyTypeError::new_err(message));
            }
            Err(error) => {
                let error = in_range(error, &value, "0 or more, and not as large");
                let kind = error.get_type(py);
                return Err(PyErr::from_type(
                    kind,
                    format!("{name}: {}", error.value(py)),
                ));
            }
        }
    }
    let checked = options.generate.sampler.check();
    checked.map_err(|error| PyValueError::new_err(error.to_string()))?;
    Ok(options)
}

fn set_text(options: &mut TextOptions, name: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    let generate = &mut options.generate;
    match name {
        "max_tokens" => generate.n_predict = value.extract()?,
        "stop" => {
            generate.stop = match value.cast::<PyString>() {
                Ok(one) => vec![one.extract()?],
                Err(_) => value.extract()?,
            }
        }
        "stop_tokens" => {
            let tokens: Vec<Count> = value.extract()?;
            generate.stop_tokens = tokens.into_iter().map(|token| TokenId(token.0)).collect();
        }
        "logprobs" => {
            let n_top: Option<usize> = value.extract()?;
            generate.logprobs = n_top.map_or(Logprobs::Off, Logprobs::Top);
        }
        "speculate" => {
            let (n_max, how) = (DEFAULT_DRAFT, value.extract::<String>()?);
            generate.speculation = match how.as_str() {
                "off" => Speculation::Off,
                "lookup" => Speculation::Lookup { n_max },
                "head" => Speculation::Head { n_max },
                "auto" => Speculation::Auto { n_max },
                other => {
                    return Err(PyValueError::new_err(format!(
                        "'{other}' is none of off, lookup, head and auto"
                    )));
                }
            };
        }
        "keep" => {
            let n_keep: Option<Count> = value.extract()?;
            let shift = |n: Count| LongContext::Shift { n_keep: n.0 };
            generate.long_context = n_keep.map_or(LongContext::Stop, shift);
        }
        "lora" => options.lora = value.extract()?,
        "schema" | "grammar" if value.is_none() => {}
        "schema" | "grammar" if options.constraint.is_some() => {
            return Err(PyValueError::new_err(
                "a text has a schema or a grammar, not both",
            ));
        }
        "schema" => {
            options.constraint = Some(Constraint::Schema(match value.cast::<PyString>() {
                Ok(text) => text.extract()?,
                Err(_) => json(value)?.to_string(),
            }));
        }
        "grammar" => options.constraint = Some(Constraint::Grammar(value.extract()?)),
        _ => return Ok(false),
    }
    Ok(true)
}

fn set_sampler(
    sampler: &mut SamplerConfig,
    name: &str,
    value: &Bound<'_, PyAny>,
) -> PyResult<bool> {
    match name {
        "temperature" => sampler.temperature = value.extract()?,
        "top_k" => sampler.top_k = NonZeroU32::new(value.extract::<Count>()?.0),
        "top_p" => sampler.top_p = value.extract()?,
        "min_p" => sampler.min_p = value.extract()?,
        "top_n_sigma" => sampler.top_n_sigma = value.extract()?,
        "typical_p" => sampler.typical_p = value.extract()?,
        "xtc_probability" => sampler.xtc.probability = value.extract()?,
        "xtc_threshold" => sampler.xtc.threshold = value.extract()?,
        "mirostat_tau" => {
            sampler.mirostat.get_or_insert_with(Mirostat::default).tau = value.extract()?
        }
        "mirostat_eta" => {
            sampler.mirostat.get_or_insert_with(Mirostat::default).eta = value.extract()?
        }
        "dry_multiplier" => sampler.dry.multiplier = value.extract()?,
        "dry_base" => sampler.dry.base = value.extract()?,
        "dry_allowed_length" => sampler.dry.allowed_length = value.extract()?,
        "min_tokens" => sampler.min_tokens = value.extract()?,
        "logit_bias" => sampler.logit_bias = biases(&value.extract::<Bound<'_, PyDict>>()?)?,
        "seed" if value.is_none() => {}
        "seed" => sampler.seed = value.extract()?,
        "repeat_penalty" => sampler.penalties.repeat = value.extract()?,
        "frequency_penalty" => sampler.penalties.frequency = value.extract()?,
        "presence_penalty" => sampler.penalties.presence = value.extract()?,
        "repeat_last_n" => sampler.penalties.last_n = value.extract()?,
        _ => return Ok(false),
    }
    Ok(true)
}

/// Numbers that are added to the logits of tokens; minus infinity bans them.
fn biases(of_tokens: &Bound<'_, PyDict>) -> PyResult<Vec<LogitBias>> {
    let bias = |(token, bias): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let bias: f32 = bias.extract()?;
        Ok(LogitBias {
            token: TokenId(token.extract::<Count>()?.0),
            bias: if bias == f32::NEG_INFINITY {
                Bias::Ban
            } else {
                Bias::Add(bias)
            },
        })
    };
    of_tokens.iter().map(bias).collect()
}

/// The backend of a model.
pub(crate) fn backend_options(
    backend: Option<&str>,
    gpu_layers: Option<Count>,
    threads: Option<usize>,
) -> PyResult<BackendOptions> {
    let kinds = BackendKind::ALL;
    let kind = match backend {
        None => None,
        Some(name) => Some(
            kinds
                .into_iter()
                .find(|kind| kind.name() == name)
                .ok_or_else(|| {
                    let names = kinds.map(BackendKind::name).join(", ");
                    PyValueError::new_err(format!("backend: '{name}' is none of: {names}"))
                })?,
        ),
    };
    let n_threads = match threads {
        None => None,
        Some(n) => Some(
            NonZeroUsize::new(n).ok_or_else(|| PyValueError::new_err("threads: 0; at least 1"))?,
        ),
    };
    Ok(BackendOptions {
        kind,
        gpu_layers: gpu_layers.map(|n| n.0),
        n_threads,
        ..BackendOptions::default()
    })
}
