//! [`read`]: the lines of OpenAI's batch files.
//!
//! Invariant: lines that are wrong are all found before anything is computed, each with its number.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Wrong lines that are named at most.
const MAX_ERRORS: usize = 100;

/// Lines of one batch, as OpenAI's.
const MAX_LINES: usize = 50_000;

/// A request of a batch.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct BatchLine {
    pub(crate) custom_id: String,
    method: Option<String>,
    url: Option<String>,
    pub(crate) body: Map<String, Value>,
}

/// The lines of a file for an endpoint; empty ones are passed over.
///
/// # Errors
/// OpenAI's objects of what is wrong.
pub(crate) fn read(text: &[u8], endpoint: &str) -> Result<Vec<BatchLine>, Vec<Value>> {
    let (mut lines, mut errors, mut ids) = (Vec::new(), Vec::new(), BTreeSet::new());
    for (number, line) in (1..).zip(text.split(|&byte| byte == b'\n')) {
        if line.trim_ascii().is_empty() {
            continue;
        }
        let read = parse(line, endpoint).and_then(|line| {
            if ids.insert(line.custom_id.clone()) {
                Ok(line)
            } else {
                Err(format!(
                    "another line has the 'custom_id' '{}'",
                    line.custom_id
                ))
            }
        });
        match read {
            Ok(line) => lines.push(line),
            Err(message) => errors.push(json!({
                "code": "invalid_line", "line": number, "message": message, "param": null,
            })),
        }
        if errors.len() >= MAX_ERRORS || lines.len() > MAX_LINES {
            break;
        }
    }
    let of_file = match lines.len() {
        _ if !errors.is_empty() => return Err(errors),
        0 => "there are no requests: each line of the file is a JSON object".to_owned(),
        n if n > MAX_LINES => format!("there are more than {MAX_LINES} requests"),
        _ => return Ok(lines),
    };
    let error = json!({"code": "invalid_file", "line": null, "message": of_file, "param": null});
    Err(vec![error])
}

fn parse(line: &[u8], endpoint: &str) -> Result<BatchLine, String> {
    let line: BatchLine = serde_json::from_slice(line).map_err(|error| error.to_string())?;
    if let Some(method) = line.method.as_ref().filter(|method| *method != "POST") {
        return Err(format!("'method' is '{method}': it must be POST"));
    }
    if let Some(url) = line.url.as_ref().filter(|url| *url != endpoint) {
        return Err(format!(
            "'url' is '{url}', and the batch is for '{endpoint}'"
        ));
    }
    if line.body.get("stream").is_some_and(|value| value == true) {
        return Err("'stream' is true: the answers of a batch come whole".to_owned());
    }
    Ok(line)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn wrong_lines_are_told_with_their_numbers() {
        let text = br#"{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}

{"custom_id": "a", "body": {}}
{"custom_id": "b", "url": "/v1/embeddings", "body": {}}
{"custom_id": "c", "method": "GET", "body": {}}
{"custom_id": "d", "body": {"stream": true}}
{"custom_id": "e"}
nonsense
"#;
        let errors = read(text, "/v1/completions").unwrap_err();
        let told: Vec<(u64, &str)> = errors
            .iter()
            .map(|error| {
                (
                    error["line"].as_u64().unwrap(),
                    error["message"].as_str().unwrap(),
                )
            })
            .collect();
        let expected = [
            (3, "another line has"),
            (4, "'url' is '/v1/embeddings'"),
            (5, "'method' is 'GET'"),
            (6, "'stream' is true"),
            (7, "missing field `body`"),
            (8, "expected"),
        ];
        assert_eq!(told.len(), expected.len(), "{told:?}");
        for ((line, message), (number, part)) in told.iter().zip(expected) {
            assert_eq!(*line, number, "{message}");
            assert!(message.contains(part), "{message}");
        }
        let empty = read(b"\n \n", "/v1/completions").unwrap_err();
        assert!(empty[0]["message"].to_string().contains("no requests"));
        let good = read(
            br#"{"custom_id": "a", "body": {"n": 1}}"#,
            "/v1/completions",
        )
        .unwrap();
        assert_eq!(good[0].body["n"], 1);
    }
}
