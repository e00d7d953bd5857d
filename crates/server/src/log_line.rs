//! A [`RequestReport`] as a line of a log: for people, and as JSON for programs.
//!
//! Invariant: one line, without control characters, and without a word of prompts and texts; what a
//! message repeats of a request is cut off. Knows nothing of where lines go.

use std::fmt::{self, Write};

use serde_json::{Map, Value, json};

use crate::api::params::rfc3339;
use crate::report::RequestReport;

/// Characters of the reason of a refusal.
const MAX_REASON: usize = 400;

/// The tokens of all texts of a request.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    n_prompt: usize,
    n_cached: usize,
    n_generated: usize,
}

impl RequestReport {
    /// The model of its texts, or the one that it got.
    fn model_name(&self) -> Option<&str> {
        let of_text = self.texts.first().map(|text| text.model.as_str());
        of_text.or(self.model.as_deref())
    }

    fn sums(&self) -> Sums {
        let mut sums = Sums::default();
        for text in &self.texts {
            sums.n_prompt += text.n_prompt;
            sums.n_cached += text.usage.n_reused();
            sums.n_generated += text.usage.n_tokens;
        }
        sums
    }

    /// The end of its texts, where there are some: that of the first that did not end well.
    fn end(&self) -> Option<&'static str> {
        let mut words = self.texts.iter().map(|text| text.end.word());
        let bad = words
            .clone()
            .find(|word| matches!(*word, "error" | "cancelled"));
        bad.or_else(|| words.next_back())
    }

    /// The reason of a refusal in one line.
    fn reason_line(&self) -> Option<String> {
        let reason = self.reason.as_deref()?;
        let mut line = String::new();
        for c in reason.chars().take(MAX_REASON) {
            if c.is_control() {
                line.extend(c.escape_default());
            } else {
                line.push(c);
            }
        }
        if reason.chars().nth(MAX_REASON).is_some() {
            line.push('…');
        }
        Some(line)
    }

    /// Its members as JSON: `time`, `request_id`, `method`, `path`, `status`, `seconds`, and where
    /// there are such, `model`, `prompt_tokens`, `cached_tokens`, `generated_tokens`, `end` and
    /// `reason`.
    pub fn json(&self) -> Value {
        let mut line = Map::new();
        let mut set = |name: &str, value: Value| line.insert(name.to_owned(), value);
        set("time", json!(rfc3339(self.began)));
        set("request_id", json!(self.id));
        set("method", json!(self.method.as_str()));
        set("path", json!(self.path));
        set("status", json!(self.status.map(|status| status.as_u16())));
        set("seconds", json!(self.took.as_secs_f64()));
        if let Some(model) = self.model_name() {
            set("model", json!(model));
        }
        if let Some(end) = self.end() {
            let sums = self.sums();
            set("prompt_tokens", json!(sums.n_prompt));
            set("cached_tokens", json!(sums.n_cached));
            set("generated_tokens", json!(sums.n_generated));
            set("end", json!(end));
        }
        if let Some(reason) = self.reason_line() {
            set("reason", json!(reason));
        }
        Value::Object(line)
    }
}

/// A line for people: `2026-11-29T12:00:00.000000Z POST /v1/completions 200 1.204s model=stories
/// prompt=12 cached=8 generated=24 end=length id=req_…`, or after the id the reason of a refusal.
impl fmt::Display for RequestReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (time, took) = (rfc3339(self.began), self.took.as_secs_f64());
        write!(f, "{time} {} {} ", self.method, self.path)?;
        match self.status {
            Some(status) => write!(f, "{} {took:.3}s", status.as_u16())?,
            // The client went before there was an answer.
            None => write!(f, "- {took:.3}s")?,
        }
        if let Some(model) = self.model_name() {
            f.write_str(" model=")?;
            for c in model.chars() {
                if c.is_control() {
                    write!(f, "{}", c.escape_default())?;
                } else {
                    f.write_char(c)?;
                }
            }
        }
        if let Some(end) = self.end() {
            let sums = self.sums();
            write!(f, " prompt={} cached={}", sums.n_prompt, sums.n_cached)?;
            write!(f, " generated={} end={end}", sums.n_generated)?;
        }
        write!(f, " id={}", self.id)?;
        match self.reason_line() {
            Some(reason) => write!(f, ": {reason}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use std::time::{Duration, SystemTime};

    use axum::http::{Method, StatusCode};

    use super::*;

    #[test]
    fn a_line_is_one_line_whatever_a_client_sends() {
        let report = RequestReport {
            id: "a".to_owned(),
            method: Method::POST,
            path: "/v1/completions".to_owned(),
            route: String::new(),
            is_let_in: true,
            parent: None,
            status: Some(StatusCode::BAD_REQUEST),
            reason: Some(format!("no\n\u{1b}[31m{}", "x".repeat(1000))),
            model: Some("st\nories".to_owned()),
            began: SystemTime::UNIX_EPOCH,
            took: Duration::from_millis(1204),
            texts: Vec::new(),
        };
        let line = report.to_string();
        let wanted = "1970-01-01T00:00:00.000000Z POST /v1/completions 400 1.204s \
                      model=st\\nories id=a: no\\n\\u{1b}[31mxxx";
        assert!(line.starts_with(wanted), "{line}");
        assert!(
            !line.chars().any(char::is_control) && line.len() < 600,
            "{line}"
        );
        let json = report.json();
        assert_eq!(json["status"], 400);
        assert_eq!(json["seconds"], 1.204);
        assert_eq!(json.get("prompt_tokens"), None);
    }
}
