//! [`Body`]: the JSON of a request, read with a limit of bytes, in limited time, and with the path of
//! what is wrong in it.
//!
//! Knows no API.

use std::time::Duration;

use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use tokio::time::timeout;

use crate::error::ApiError;

/// How long the body of a request may take to come.
const BODY_TIME: Duration = Duration::from_secs(60);

/// The JSON object of a request.
#[derive(Clone, Debug, Default)]
pub struct Body(Map<String, Value>);

impl From<Map<String, Value>> for Body {
    fn from(members: Map<String, Value>) -> Self {
        Self(members)
    }
}

impl Body {
    /// Reads the body of a request, of at most so many bytes. No body at all is an empty object.
    ///
    /// # Errors
    /// [`ApiError`] 408, 413, and 400 where the client breaks off or sends no JSON object.
    pub async fn read(request: Request, limit: usize) -> Result<Self, ApiError> {
        let length = request.headers().get(CONTENT_LENGTH);
        let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if length.is_some_and(|length| length > limit as u64) {
            return Err(ApiError::too_large(limit));
        }
        let read = Limited::new(request.into_body(), limit).collect();
        let read = timeout(BODY_TIME, read).await;
        let read = read.map_err(|_| ApiError::too_slow(BODY_TIME.as_secs()))?;
        let read = read.map_err(|error| match error.is::<LengthLimitError>() {
            true => ApiError::too_large(limit),
            false => ApiError::invalid(format!("the body of the request broke off: {error}")),
        })?;
        Self::parse(&read.to_bytes())
    }

    /// The JSON object in these bytes.
    ///
    /// # Errors
    /// [`ApiError`] 400, with line and column.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(members)) => Ok(Self(members)),
            Ok(_) => Err(ApiError::invalid("the body is not a JSON object")),
            Err(error) => Err(ApiError::invalid(format!(
                "the body is not valid JSON: {error}"
            ))),
        }
    }

    /// The fields that a type has; others are passed over.
    ///
    /// # Errors
    /// [`ApiError`] 400, with the path of the first that is wrong.
    pub fn get<T: DeserializeOwned>(&self) -> Result<T, ApiError> {
        // A struct from a map is read the same way as from the object.
        let fields =
            serde::de::value::MapDeserializer::new(self.0.iter().map(|(k, v)| (k.as_str(), v)));
        serde_path_to_error::deserialize(fields).map_err(|error| {
            let (path, error) = (error.path().to_string(), error.into_inner());
            let error: serde_json::Error = error;
            match path.as_str() {
                "." => ApiError {
                    param: missing_field(&error.to_string()).map(str::to_owned),
                    ..ApiError::invalid(format!("the request is wrong: {error}"))
                },
                _ => {
                    let message = format!("'{path}' is wrong: {error}");
                    let param = match missing_field(&error.to_string()) {
                        Some(name) => format!("{path}.{name}"),
                        None => path,
                    };
                    ApiError::invalid_param(param, message)
                }
            }
        })
    }

    /// A field that is there and not null.
    pub fn field(&self, name: &str) -> Option<&Value> {
        self.0.get(name).filter(|value| !value.is_null())
    }

    /// Refuses a field whose value is not what it would be by default.
    ///
    /// # Errors
    /// [`ApiError::unsupported`].
    pub fn refuse(&self, refused: &[Refused]) -> Result<(), ApiError> {
        for Refused {
            name,
            neutral,
            hint,
        } in refused
        {
            if let Some(value) = self.field(name)
                && !neutral.is_met_by(value)
            {
                let message = format!("'{name}' is not supported: {hint}");
                return Err(ApiError::unsupported(*name, message));
            }
        }
        Ok(())
    }
}

/// The field that this error of serde misses.
fn missing_field(error: &str) -> Option<&str> {
    let (name, _) = error.strip_prefix("missing field `")?.split_once('`')?;
    Some(name)
}

/// A parameter that is refused where it would change the result.
#[derive(Clone, Copy, Debug)]
pub struct Refused {
    /// Its name.
    pub name: &'static str,
    /// The values that change nothing.
    pub neutral: Neutral,
    /// What to do instead.
    pub hint: &'static str,
}

impl Refused {
    /// A parameter with the values that change nothing, and what to do instead.
    pub const fn new(name: &'static str, neutral: Neutral, hint: &'static str) -> Self {
        Self {
            name,
            neutral,
            hint,
        }
    }
}

/// Values of a parameter that change nothing.
#[derive(Clone, Copy, Debug)]
pub enum Neutral {
    /// This number.
    Number(f64),
    /// `false`.
    False,
    /// `true`.
    True,
    /// No number above 0.
    NotPositive,
    /// An empty object, list or text.
    Empty,
    /// This text, or a list of it alone.
    Text(&'static str),
}

impl Neutral {
    fn is_met_by(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Number(neutral), Value::Number(n)) => n.as_f64() == Some(neutral),
            (Self::False, Value::Bool(value)) => !value,
            (Self::True, Value::Bool(value)) => *value,
            (Self::NotPositive, Value::Number(n)) => n.as_f64().is_some_and(|n| n <= 0.0),
            (Self::Empty, Value::Object(members)) => members.is_empty(),
            (Self::Empty, Value::Array(items)) => items.is_empty(),
            (Self::Empty, Value::String(text)) => text.is_empty(),
            (Self::Text(neutral), Value::String(text)) => text == neutral,
            (Self::Text(neutral), Value::Array(items)) => {
                matches!(items.as_slice(), [Value::String(text)] if text == neutral)
            }
            _ => false,
        }
    }
}

/// An answer with this JSON.
pub(crate) fn respond(value: &Value) -> Response {
    let json = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, json)], value.to_string()).into_response()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use serde::Deserialize;
    use serde_json::json;

    use super::*;

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)] // read by its Debug
    struct Fields {
        n: Option<u32>,
        inner: Option<Inner>,
    }

    #[derive(Debug, Deserialize)]
    #[allow(dead_code)] // read by its Debug
    struct Inner {
        list: Vec<f32>,
    }

    fn body(value: &Value) -> Body {
        Body::parse(value.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn errors_have_the_path_of_what_is_wrong() {
        let error = body(&json!({"n": -1})).get::<Fields>().unwrap_err();
        assert_eq!(error.param.as_deref(), Some("n"));
        let error = body(&json!({"inner": {"list": [1, "x"]}})).get::<Fields>();
        let error = error.unwrap_err();
        assert_eq!(error.param.as_deref(), Some("inner.list[1]"));
        assert!(error.message.contains("expected f32"), "{error}");
        let error = body(&json!({"inner": {}})).get::<Fields>().unwrap_err();
        assert!(error.message.contains("missing field `list`"), "{error}");
        assert_eq!(error.param.as_deref(), Some("inner.list"));
        assert!(
            body(&json!({"n": null, "other": 1}))
                .get::<Fields>()
                .is_ok()
        );
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for (bytes, reason) in [
            (&b"[1]"[..], "not a JSON object"),
            (b"{\"a\": }", "line 1 column 7"),
            (b"{} x", "trailing characters"),
        ] {
            let error = Body::parse(bytes).unwrap_err();
            assert!(error.message.contains(reason), "{error}");
        }
        assert!(Body::parse(b"").unwrap().field("a").is_none());
    }

    #[test]
    fn refused_parameters_pass_where_they_change_nothing() {
        let refused = |name, neutral| Refused::new(name, neutral, "leave it out");
        let list = [
            refused("n", Neutral::Number(1.0)),
            refused("dynatemp_range", Neutral::Number(0.0)),
            refused("echo", Neutral::False),
            refused("add_generation_prompt", Neutral::True),
            refused("t_max_predict_ms", Neutral::NotPositive),
            refused("logit_bias", Neutral::Empty),
            refused("modalities", Neutral::Text("text")),
        ];
        let neutral = json!({"n": 1, "dynatemp_range": 0, "echo": false, "logit_bias": {},
                             "modalities": ["text"], "add_generation_prompt": true, "t_max_predict_ms": -1});
        body(&neutral).refuse(&list).unwrap();
        body(&json!({"n": null, "dynatemp_range": 0.0}))
            .refuse(&list)
            .unwrap();
        for wrong in [
            json!({"n": 2}),
            json!({"dynatemp_range": true}),
            json!({"echo": true}),
            json!({"add_generation_prompt": false}),
            json!({"t_max_predict_ms": 5}),
            json!({"logit_bias": {"1": 2}}),
            json!({"modalities": ["text", "audio"]}),
        ] {
            let error = body(&wrong).refuse(&list).unwrap_err();
            let name = wrong.as_object().unwrap().keys().next().cloned();
            assert_eq!(
                (error.param, error.code),
                (name, Some("unsupported_parameter"))
            );
        }
    }
}
