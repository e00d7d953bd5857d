//! [`read`]: the requests in a file for one endpoint.
//!
//! Invariant: lines that are wrong are all found before anything is computed, each with its number.

use cellar_engine::batch_file::{BatchLine, BatchReader, numbered_lines};
use serde_json::{Value, json};

/// Wrong lines that are named at most.
const MAX_ERRORS: usize = 100;

/// Lines of one batch, as OpenAI's.
const MAX_LINES: usize = 50_000;

/// The lines of a file for an endpoint.
///
/// # Errors
/// OpenAI's objects of what is wrong.
pub(crate) fn read(text: &[u8], endpoint: &str) -> Result<Vec<BatchLine>, Vec<Value>> {
    let (mut lines, mut errors) = (Vec::new(), Vec::new());
    let endpoints = [endpoint];
    let mut reader = BatchReader::new(&endpoints);
    for (number, line) in numbered_lines(text) {
        match reader.read(line) {
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn wrong_lines_are_told_with_their_numbers() {
        let text = br#"{"custom_id": "a", "url": "/v1/completions", "body": {}}

{"custom_id": "b", "url": "/v1/embeddings", "body": {}}
nonsense
"#;
        let errors = read(text, "/v1/completions").unwrap_err();
        let lines: Vec<_> = errors.iter().map(|error| &error["line"]).collect();
        assert_eq!(lines, [&json!(3), &json!(4)], "{errors:?}");
        let empty = read(b"\n \n", "/v1/completions").unwrap_err();
        assert!(empty[0]["message"].to_string().contains("no requests"));
        let good = br#"{"custom_id": "a", "body": {"n": 1}}"#;
        let good = read(good, "/v1/completions").unwrap();
        assert_eq!(good[0].body["n"], 1);
    }
}
