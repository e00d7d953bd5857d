//! [`Body`]: the JSON of a request, with the path of what is wrong in it.
//!
//! Invariant: what is parsed takes no more memory than some times that of a long prompt, whatever
//! the bytes are. Knows no API.

use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::body_worker::BodyPermit;
use crate::error::ApiError;
use crate::whole;

/// Values of a body: as many tokens as the longest prompts have, and more. Each takes 32 bytes.
const MAX_VALUES: usize = 1_500_000;

/// Members, objects and lists of a body. Each takes up to 300 bytes.
const MAX_MEMBERS: usize = 200_000;

/// The JSON object of a request.
#[derive(Clone, Debug, Default)]
pub struct Body {
    members: Map<String, Value>,
    /// Its place in the budget of the server, where it is large.
    _room: Option<BodyPermit>,
}

impl From<Map<String, Value>> for Body {
    fn from(members: Map<String, Value>) -> Self {
        Self {
            members,
            _room: None,
        }
    }
}

impl Body {
    /// The JSON object of a request whose body the router has read. No body at all is an empty
    /// object.
    ///
    /// # Errors
    /// [`ApiError`] 400 where the client sends no JSON object.
    pub async fn read(mut request: Request) -> Result<Self, ApiError> {
        let room = request.extensions_mut().remove::<BodyPermit>();
        let read = request.into_body().collect().await;
        let read = read.map_err(|error| ApiError::invalid(error.to_string()))?;
        Ok(Self {
            _room: room,
            ..Self::parse(&read.to_bytes())?
        })
    }

    /// The JSON object in these bytes.
    ///
    /// # Errors
    /// [`ApiError`] 400, with line and column, or with the numbers where there are too many values.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        if bytes.is_empty() {
            return Ok(Self::default());
        }
        Counts::of(bytes).check()?;
        match serde_json::from_slice(bytes) {
            Ok(Value::Object(members)) => Ok(members.into()),
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
        let fields = whole::members(&self.members);
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

    /// The largest number of tokens of an answer, which stands in this field; -1 and null are any
    /// number.
    ///
    /// # Errors
    /// [`ApiError`] 400 where it is something else.
    pub fn max_tokens(&self, name: &str) -> Result<MaxTokens, ApiError> {
        let Some(value) = self.members.get(name) else {
            return Ok(MaxTokens::NotGiven);
        };
        let number = whole::integer(value);
        if value.is_null() || number == Some(-1) {
            return Ok(MaxTokens::Any);
        }
        let number = number.and_then(|n| usize::try_from(n).ok());
        number.map(MaxTokens::These).ok_or_else(|| {
            let message = format!(
                "'{name}' is wrong: expected a number of tokens, or -1 or null for any number"
            );
            ApiError::invalid_param(name, message)
        })
    }

    /// A field that is there and not null.
    pub fn field(&self, name: &str) -> Option<&Value> {
        self.members.get(name).filter(|value| !value.is_null())
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

/// The length of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MaxTokens {
    /// The request says nothing.
    NotGiven,
    /// As long as the context has room.
    Any,
    /// So many tokens.
    These(usize),
}

impl MaxTokens {
    /// The number, `None` for any; this one where the request says nothing.
    pub fn or(self, default: Option<usize>) -> Option<usize> {
        match self {
            Self::NotGiven => default,
            Self::Any => None,
            Self::These(n) => Some(n),
        }
    }

    /// This, or else what another field says.
    #[must_use]
    pub fn or_of(self, other: Self) -> Self {
        match self {
            Self::NotGiven => other,
            given => given,
        }
    }
}

/// Counts of a JSON text, from which its memory follows before it is parsed.
#[derive(Debug, Default)]
struct Counts {
    n_values: usize,
    n_members: usize,
}

impl Counts {
    fn of(bytes: &[u8]) -> Self {
        let mut counts = Self::default();
        let (mut rest, mut is_in_text) = (bytes.iter(), false);
        while let Some(byte) = rest.next() {
            match byte {
                b'"' => is_in_text = !is_in_text,
                b'\\' if is_in_text => {
                    let _escaped = rest.next();
                }
                _ if is_in_text => {}
                b',' => counts.n_values += 1,
                b'{' | b'[' | b':' => counts.n_members += 1,
                _ => {}
            }
        }
        counts
    }

    fn check(&self) -> Result<(), ApiError> {
        let Self {
            n_values,
            n_members,
        } = self;
        if *n_values > MAX_VALUES || *n_members > MAX_MEMBERS {
            return Err(ApiError::invalid(format!(
                "the body has {n_values} values, and {n_members} objects, lists and members: it may have \
                 {MAX_VALUES} and {MAX_MEMBERS}; send less at once"
            )));
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
pub(crate) fn respond(value: &impl Serialize) -> Response {
    let json = HeaderValue::from_static("application/json");
    match serde_json::to_vec(value) {
        Ok(text) => ([(CONTENT_TYPE, json)], text).into_response(),
        Err(error) => ApiError::internal(error.to_string()).into_response(),
    }
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
    fn a_body_has_so_many_values() {
        let counts = |text: &str| {
            let Counts {
                n_values,
                n_members,
            } = Counts::of(text.as_bytes());
            (n_values, n_members)
        };
        assert_eq!(
            counts(r#"{"a,[{": [1, 2, "\\\\", "\"{"], "b": {}}"#),
            (4, 5)
        );
        let tokens = |n: usize| format!("{{\"prompt\": [{}1]}}", "1,".repeat(n));
        assert!(Body::parse(tokens(1_048_576).as_bytes()).is_ok());
        let error = Body::parse(tokens(MAX_VALUES + 1).as_bytes()).unwrap_err();
        assert!(error.message.contains("1500001 values"), "{error}");
        let members = format!("{{\"a\": [{}1]}}", "[],".repeat(MAX_MEMBERS));
        let error = Body::parse(members.as_bytes()).unwrap_err();
        assert_eq!(error.status, 400, "{error}");
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
