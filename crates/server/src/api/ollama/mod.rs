//! Ollama's API: `/api/chat`, `/api/generate`, `/api/embed`, and what lists models.
//!
//! Invariant: a stream is lines of JSON, of which the last has `"done": true`, or is an error. What
//! this server cannot do is answered 501 with the reason. Knows the wire and nothing of how texts
//! are generated.

pub mod embed;
pub mod models;
pub mod texts;

use std::time::Duration;

use axum::routing::MethodRouter;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api::{on_get, on_post};
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::models::{KeepLoaded, ModelInUse};

/// An error in Ollama's shape.
pub(crate) fn error_json(error: &ApiError) -> Value {
    json!({ "error": error.message })
}

/// The route of something that changes the models of a server.
pub(crate) fn no_changes() -> MethodRouter<App> {
    let refuse = async || {
        ApiError::not_implemented(
            "this server has the models that it was started with: 'cellar pull' downloads others, and \
             'cellar serve -m MODEL' or '--models DIR' serves them",
        )
    };
    on_post(refuse)
        .put(refuse)
        .delete(refuse)
        .merge(on_get(refuse))
        .head(refuse)
}

/// How long a model stays loaded after a request.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a number of seconds, or a duration such as \"5m\""
)]
pub(crate) enum KeepAlive {
    /// Negative: forever.
    Seconds(f64),
    /// As Go writes durations.
    Text(String),
}

/// Keeps a model as long as a request of an admin asks; what others ask has no effect.
fn keep_as_asked(model: &ModelInUse, tenant: &Tenant, keep: Option<KeepLoaded>) {
    if let Some(keep) = keep.filter(|_| tenant.is_admin()) {
        model.keep(keep);
    }
}

impl KeepAlive {
    /// The duration.
    ///
    /// # Errors
    /// [`ApiError`] 400 where it is none.
    pub(crate) fn keep(&self) -> Result<KeepLoaded, ApiError> {
        let seconds = match self {
            Self::Seconds(seconds) => *seconds,
            Self::Text(text) => seconds_of(text.trim())?,
        };
        Ok(match Duration::try_from_secs_f64(seconds) {
            Ok(time) => KeepLoaded::For(time),
            // Negative, or longer than any server runs.
            Err(_) => KeepLoaded::Forever,
        })
    }
}

/// The seconds of a duration such as `1h30m`, or of a negative one.
fn seconds_of(text: &str) -> Result<f64, ApiError> {
    let wrong = || {
        let message = format!("'keep_alive' is '{text}': it must be a duration such as 5m or 24h");
        ApiError::invalid_param("keep_alive", message)
    };
    let (sign, mut rest) = match text.strip_prefix('-') {
        Some(rest) => (-1.0, rest),
        None => (1.0, text),
    };
    // A number alone is one of seconds, as Ollama reads it.
    if let Ok(seconds) = rest.parse::<u32>() {
        return Ok(sign * f64::from(seconds));
    }
    if rest.is_empty() {
        return Err(wrong());
    }
    let mut sum = 0.0;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.');
        let (number, unit) = rest.split_at(end.ok_or_else(wrong)?);
        let number: f64 = number.parse().map_err(|_| wrong())?;
        // The longer names first: "m" also begins "ms".
        let units = [
            ("ns", 1e-9),
            ("us", 1e-6),
            ("µs", 1e-6),
            ("ms", 1e-3),
            ("s", 1.0),
            ("m", 60.0),
            ("h", 3600.0),
        ];
        let found = units.iter().find_map(|(name, seconds)| {
            let after = unit.strip_prefix(name)?;
            Some((after, seconds))
        });
        let (after, seconds) = found.ok_or_else(wrong)?;
        rest = after;
        sum += number * seconds;
    }
    Ok(sign * sum)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;
    use crate::api::params::rfc3339;

    #[test]
    fn times_are_written_as_rfc_3339_does() {
        let at =
            |seconds: u64| rfc3339(UNIX_EPOCH + Duration::from_micros(seconds * 1_000_000 + 42));
        assert_eq!(at(0), "1970-01-01T00:00:00.000042Z");
        assert_eq!(at(951_827_696), "2000-02-29T12:34:56.000042Z");
        assert_eq!(at(1_709_251_199), "2024-02-29T23:59:59.000042Z");
        assert_eq!(at(4_107_542_400), "2100-03-01T00:00:00.000042Z");
    }

    #[test]
    fn durations_are_those_of_go() {
        let keep = |value: Value| serde_json::from_value::<KeepAlive>(value).unwrap().keep();
        let time = |seconds| Ok(KeepLoaded::For(Duration::from_secs_f64(seconds)));
        for zero in [json!(0), json!("0"), json!("0s"), json!("0m0s")] {
            assert_eq!(keep(zero.clone()), time(0.0), "{zero}");
        }
        for (value, seconds) in [
            (json!(300), 300.0),
            (json!(0.5), 0.5),
            (json!("5m"), 300.0),
            (json!("1h30m"), 5400.0),
            (json!("10ms"), 0.01),
            (json!("5"), 5.0),
        ] {
            assert_eq!(keep(value.clone()), time(seconds), "{value}");
        }
        for forever in [json!(-1), json!("-1"), json!("-1m"), json!(1e300)] {
            assert_eq!(keep(forever.clone()), Ok(KeepLoaded::Forever), "{forever}");
        }
        for wrong in [
            json!(""),
            json!("soon"),
            json!("-"),
            json!("m5"),
            json!("5x"),
        ] {
            assert!(keep(wrong.clone()).is_err(), "{wrong}");
        }
    }
}
