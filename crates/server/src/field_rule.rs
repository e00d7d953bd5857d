//! [`FieldRule`]: a parameter that is not done, and the values of it that change nothing.

use serde_json::Value;

use crate::error::ApiError;
use crate::skips::Skips;

/// The rule for a parameter that is not done: it is refused or skipped, unless its value changes
/// nothing.
#[derive(Clone, Copy, Debug)]
pub struct FieldRule {
    /// Its name.
    pub name: &'static str,
    /// The values that change nothing.
    pub neutral: Neutral,
    /// The way to do it instead, or the reason why it can be left out.
    pub hint: &'static str,
    /// Its treatment.
    pub(crate) treatment: Treatment,
}

/// The treatment of a parameter that is not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Treatment {
    /// It is refused: 400.
    Refused,
    /// It is refused as something that another server has: 501, as Ollama's clients know it.
    NotImplemented,
    /// It is left out, as no text depends on it; strict servers refuse it.
    Skipped,
}

impl FieldRule {
    /// A parameter with the values that change nothing, and what to do instead.
    pub const fn new(name: &'static str, neutral: Neutral, hint: &'static str) -> Self {
        Self {
            name,
            neutral,
            hint,
            treatment: Treatment::Refused,
        }
    }

    /// The same, left out for the reason of its hint: the text is the same without it.
    pub(crate) const fn skipped(self) -> Self {
        Self {
            treatment: Treatment::Skipped,
            ..self
        }
    }

    /// The same, refused with 501.
    pub(crate) const fn not_implemented(self) -> Self {
        Self {
            treatment: Treatment::NotImplemented,
            ..self
        }
    }

    /// True if it is left out.
    pub(crate) fn is_skipped(&self) -> bool {
        self.treatment == Treatment::Skipped
    }

    pub(crate) fn apply(self, skips: &Skips) -> Result<(), ApiError> {
        let Self { name, hint, .. } = self;
        let message = format!("'{name}' is not supported: {hint}");
        match self.treatment {
            Treatment::Skipped => skips.skip(name, hint),
            Treatment::Refused => Err(ApiError::unsupported(name, message)),
            Treatment::NotImplemented => Err(ApiError::not_implemented(message)),
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
    pub(crate) fn is_met_by(self, value: &Value) -> bool {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use serde_json::json;

    use super::*;
    use crate::skips::SkipPolicy;

    #[test]
    fn limited_parameters_pass_where_they_change_nothing() {
        for (neutral, pass, wrong) in [
            (Neutral::Number(1.0), json!([1, 1.0]), json!([2, true, "1"])),
            (Neutral::False, json!([false]), json!([true, 0])),
            (Neutral::True, json!([true]), json!([false])),
            (Neutral::NotPositive, json!([-1, 0]), json!([5])),
            (
                Neutral::Empty,
                json!([{}, [], ""]),
                json!([{"1": 2}, [1], "a", false]),
            ),
            (
                Neutral::Text("text"),
                json!(["text", ["text"]]),
                json!([["text", "audio"], "audio"]),
            ),
        ] {
            for value in pass.as_array().unwrap() {
                assert!(neutral.is_met_by(value), "{neutral:?} {value}");
            }
            for value in wrong.as_array().unwrap() {
                assert!(!neutral.is_met_by(value), "{neutral:?} {value}");
            }
        }
    }

    #[test]
    fn limited_parameters_are_refused_or_skipped() {
        let rule = FieldRule::new("n", Neutral::Number(1.0), "use another");
        let named = Skips::new(SkipPolicy::Named);
        let strict = Skips::new(SkipPolicy::Refused);
        let error = rule.apply(&named).unwrap_err();
        assert_eq!(
            (error.param.as_deref(), error.code),
            (Some("n"), Some("unsupported_parameter"))
        );
        let error = rule.not_implemented().apply(&named).unwrap_err();
        assert_eq!(error.status, 501);
        rule.skipped().apply(&named).unwrap();
        let error = rule.skipped().apply(&strict).unwrap_err();
        assert_eq!(
            (error.param.as_deref(), error.code),
            (Some("n"), Some("unsupported_parameter"))
        );
    }
}
