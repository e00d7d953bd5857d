//! [`Body`]: the JSON of a request, with the path of what is wrong in it.
//!
//! Invariant: what is parsed takes no more memory than some times that of a long prompt, whatever
//! the bytes are; a field that is not done is refused, or skipped and named. Knows of APIs the
//! table of their fields alone.

use axum::extract::Request;
use axum::http::HeaderValue;
use axum::http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::api::openapi::fields::{FieldUse, RequestBody, RequestFields};
use crate::body_worker::BodyPermit;
use crate::error::ApiError;
use crate::skips::Skips;
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
    /// The fields that are left out of it.
    skips: Skips,
}

impl From<Map<String, Value>> for Body {
    fn from(members: Map<String, Value>) -> Self {
        Self {
            members,
            _room: None,
            skips: Skips::default(),
        }
    }
}

impl Body {
    /// The JSON object of a request whose body the router has read. No body at all is an empty
    /// object. Fields that its endpoint does not do are refused or skipped.
    ///
    /// # Errors
    /// [`ApiError`] 400 where the client sends no JSON object, or a field that is refused; 415
    /// where the body is compressed.
    pub async fn read(mut request: Request) -> Result<Self, ApiError> {
        let room = request.extensions_mut().remove::<BodyPermit>();
        let fields = request.extensions_mut().remove::<RequestFields>();
        if let Some(encoding) = request.headers().get(CONTENT_ENCODING)
            && encoding != "identity"
        {
            return Err(ApiError::compressed(&String::from_utf8_lossy(
                encoding.as_bytes(),
            )));
        }
        let read = request.into_body().collect().await;
        let read = read.map_err(|error| ApiError::invalid(error.to_string()))?;
        let body = Self {
            _room: room,
            skips: fields.map_or_else(Skips::default, |fields| Skips::new(fields.policy)),
            ..Self::parse(&read.to_bytes())?
        };
        if let Some(fields) = fields {
            body.check(fields.body, "")?;
        }
        Ok(body)
    }

    /// The JSON object in these bytes.
    ///
    /// # Errors
    /// [`ApiError`] 400, with line and column, or with the numbers where there are too many values.
    pub fn parse(bytes: &[u8]) -> Result<Self, ApiError> {
        // Some editors and shells write a byte order mark before a text.
        let bytes = bytes.strip_prefix("\u{feff}".as_bytes()).unwrap_or(bytes);
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
            let path = error.path().to_string();
            let error: serde_json::Error = error.into_inner();
            let error = in_words_of_json(&error.to_string());
            if path == "." {
                ApiError {
                    param: missing_field(&error).map(str::to_owned),
                    ..ApiError::invalid(format!("the request is wrong: {error}"))
                }
            } else {
                let message = format!("'{path}' is wrong: {error}");
                let param = match missing_field(&error) {
                    Some(name) => format!("{path}.{name}"),
                    None => path,
                };
                ApiError::invalid_param(param, message)
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

    /// The fields that are left out of the request.
    pub(crate) fn skips(&self) -> &Skips {
        &self.skips
    }

    /// The object in a field, as a body of its own with these fields: what is not done of it is
    /// left out of this one.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub(crate) fn part(&self, name: &str, fields: RequestBody) -> Result<Self, ApiError> {
        let members = match self.field(name) {
            None => Map::new(),
            Some(Value::Object(members)) => members.clone(),
            Some(_) => {
                let message = format!("'{name}' is wrong: expected an object");
                return Err(ApiError::invalid_param(name, message));
            }
        };
        let part = Self {
            skips: self.skips.clone(),
            ..Self::from(members)
        };
        part.check(fields, &format!("{name}."))?;
        Ok(part)
    }

    /// Refuses or skips what is not done of these fields, whose paths begin so.
    fn check(&self, fields: RequestBody, prefix: &str) -> Result<(), ApiError> {
        for (name, value) in &self.members {
            let path = format!("{prefix}{name}");
            match fields.field_use(name) {
                _ if value.is_null() => {}
                FieldUse::Done | FieldUse::WithoutEffect => {}
                FieldUse::Limited(limited) if limited.neutral.is_met_by(value) => {}
                FieldUse::Limited(limited) => limited.apply(&self.skips)?,
                FieldUse::Unknown => {
                    let why = if prefix.is_empty() {
                        "this address has no such field"
                    } else {
                        "there is no such option"
                    };
                    self.skips.skip(&path, why)?;
                }
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

/// The error with Rust's names of types in words of JSON. Only whole words are replaced.
fn in_words_of_json(error: &str) -> String {
    const WORDS: [(&str, &str); 14] = [
        ("usize", "a whole number from 0 on"),
        ("u8", "a whole number from 0 to 255"),
        ("u32", "a whole number from 0 to 4294967295"),
        ("u64", "a whole number from 0 on"),
        ("i32", "a whole number"),
        ("i64", "a whole number"),
        ("f32", "a number"),
        ("f64", "a number"),
        ("string", "text"),
        ("a string", "a text"),
        ("a sequence", "a list"),
        ("a map", "an object"),
        ("a boolean", "true or false"),
        ("unit", "null"),
    ];
    let Some((what, expected)) = error.split_once(", expected ") else {
        return error.to_owned();
    };
    let word = WORDS.iter().find(|(rust, _)| *rust == expected);
    let expected = match expected.strip_prefix("struct ") {
        Some(_) => "an object",
        None => word.map_or(expected, |(_, json)| json),
    };
    let what = what
        .replace("invalid type: sequence", "invalid type: a list")
        .replace("invalid type: map", "invalid type: an object")
        .replace("invalid type: string", "invalid type: text");
    format!("{what}, expected {expected}")
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
        assert!(error.message.contains("expected a number"), "{error}");
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
    fn a_byte_order_mark_is_no_part_of_a_text() {
        let body = Body::parse("\u{feff}{\"a\": 1}".as_bytes()).unwrap();
        assert_eq!(body.field("a"), Some(&json!(1)));
        assert!(
            Body::parse("\u{feff}".as_bytes())
                .unwrap()
                .field("a")
                .is_none()
        );
    }

    #[test]
    fn no_type_of_rust_is_in_a_message() {
        #[derive(Debug, Deserialize)]
        #[allow(dead_code)] // read by its Debug
        struct All {
            a: Option<usize>,
            b: Option<i64>,
            c: Option<f32>,
            d: Option<String>,
            e: Option<Vec<u32>>,
            f: Option<bool>,
            g: Option<Inner>,
            h: Option<Map<String, Value>>,
        }
        for name in ["a", "b", "c", "d", "e", "f", "g", "h"] {
            for value in [
                json!(-1.5),
                json!("x"),
                json!([{}]),
                json!({"list": 1}),
                json!(true),
            ] {
                let Err(error) = body(&json!({name: value})).get::<All>() else {
                    continue;
                };
                for word in [
                    "usize", "u32", "i64", "f32", "struct", "sequence", "map", "string",
                ] {
                    assert!(!error.message.contains(word), "{error}");
                }
            }
        }
        let error = body(&json!({"a": -1})).get::<All>().unwrap_err();
        let message =
            "'a' is wrong: invalid value: integer `-1`, expected a whole number from 0 on";
        assert_eq!(error.message, message);
    }
}
