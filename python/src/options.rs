//! Keyword arguments to settings. Decides nothing that the defaults of `cellar` do not.

use std::num::NonZeroU32;

use cellar::{GenerateOptions, LongContext, SamplerConfig, SeqId};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// The options of a text from keyword arguments; those that are absent have `cellar`'s defaults.
///
/// # Errors
/// `TypeError` for a name that does not exist, `ValueError` for a value that is out of range.
pub(crate) fn generate_options(kwargs: Option<&Bound<'_, PyDict>>) -> PyResult<GenerateOptions> {
    let mut options = GenerateOptions::default();
    let Some(kwargs) = kwargs else {
        return Ok(options);
    };
    let sampler = &mut options.sampler;
    for (name, value) in kwargs {
        let name: String = name.extract()?;
        match name.as_str() {
            "seq" => options.seq = SeqId(value.extract()?),
            "max_tokens" => options.n_predict = value.extract()?,
            "stop" => options.stop = value.extract()?,
            "keep" => {
                let n_keep: Option<u32> = value.extract()?;
                options.long_context =
                    n_keep.map_or(LongContext::Stop, |n_keep| LongContext::Shift { n_keep });
            }
            "temperature" => sampler.temperature = value.extract()?,
            "top_k" => sampler.top_k = NonZeroU32::new(value.extract()?),
            "top_p" => sampler.top_p = value.extract()?,
            "min_p" => sampler.min_p = value.extract()?,
            "seed" => sampler.seed = value.extract()?,
            "repeat_penalty" => sampler.penalties.repeat = value.extract()?,
            "frequency_penalty" => sampler.penalties.frequency = value.extract()?,
            "presence_penalty" => sampler.penalties.presence = value.extract()?,
            "repeat_last_n" => sampler.penalties.last_n = value.extract()?,
            _ => {
                return Err(PyTypeError::new_err(format!(
                    "'{name}' is no option of a text"
                )));
            }
        }
    }
    check(sampler)?;
    Ok(options)
}

fn check(sampler: &SamplerConfig) -> PyResult<()> {
    let checked = sampler.check();
    checked.map_err(|error| PyValueError::new_err(error.to_string()))
}
