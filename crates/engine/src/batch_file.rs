//! Files of requests, one a line, in the form of OpenAI's Batch API.
//!
//! Invariant: empty lines are passed over and counted, and no two requests of a file have the same
//! name. Knows nothing of what a body asks for, nor of how requests are computed.

use std::collections::BTreeSet;

use serde::Deserialize;
use serde_json::{Map, Value};

/// A request of a file.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct BatchLine {
    /// The caller's name of the request.
    pub custom_id: String,
    method: Option<String>,
    /// The endpoint that is to answer it; where there is none, the first that may.
    pub url: Option<String>,
    /// The body that a client of that endpoint would send.
    pub body: Map<String, Value>,
}

/// Reads the lines of one file.
#[derive(Clone, Debug)]
pub struct BatchReader<'e> {
    endpoints: &'e [&'e str],
    names: BTreeSet<String>,
}

/// The lines of a file that are not empty, with their numbers, from 1.
pub fn numbered_lines(text: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    let lines = (1..).zip(text.split(|&byte| byte == b'\n'));
    lines.filter(|(_, line)| !line.trim_ascii().is_empty())
}

/// The fault of the JSON of one line, with its column.
pub fn json_fault(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    match message.strip_suffix(&place) {
        Some(what) => format!("{what} in column {}", error.column()),
        None => message,
    }
}

impl<'e> BatchReader<'e> {
    /// For requests to these endpoints.
    pub fn new(endpoints: &'e [&'e str]) -> Self {
        Self {
            endpoints,
            names: BTreeSet::new(),
        }
    }

    /// The request in a line.
    ///
    /// # Errors
    /// Why the line is none, or none of these endpoints; or that another has its name.
    pub fn read(&mut self, line: &[u8]) -> Result<BatchLine, String> {
        let line: BatchLine = serde_json::from_slice(line).map_err(|error| json_fault(&error))?;
        if let Some(method) = line.method.as_ref().filter(|method| *method != "POST") {
            return Err(format!("'method' is '{method}': it must be POST"));
        }
        let url = line.url.as_deref();
        if let Some(url) = url.filter(|url| !self.endpoints.contains(url)) {
            let known = self.endpoints.join("' or '");
            return Err(format!("'url' is '{url}': here it must be '{known}'"));
        }
        if line.body.get("stream").is_some_and(|value| value == true) {
            return Err("'stream' is true: the answers of a batch come whole".to_owned());
        }
        if !self.names.insert(line.custom_id.clone()) {
            let name = &line.custom_id;
            return Err(format!("another line has the 'custom_id' '{name}'"));
        }
        Ok(line)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn wrong_lines_are_told() {
        let text =
            br#"{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"n": 1}}

{"custom_id": "a", "body": {}}
{"custom_id": "b", "url": "/v1/embeddings", "body": {}}
{"custom_id": "c", "method": "GET", "body": {}}
{"custom_id": "d", "body": {"stream": true}}
{"custom_id": "e"}
nonsense
{"custom_id": "d", "body": {"stream": false}}
"#;
        let mut reader = BatchReader::new(&["/v1/completions", "/v1/responses"]);
        let mut read = numbered_lines(text).map(|(number, line)| (number, reader.read(line)));
        let (number, first) = read.next().unwrap();
        assert_eq!((number, &first.unwrap().body["n"]), (1, &Value::from(1)));
        let expected = [
            (3, "another line has"),
            (4, "it must be '/v1/completions' or '/v1/responses'"),
            (5, "'method' is 'GET'"),
            (6, "'stream' is true"),
            (7, "missing field `body`"),
            (8, "expected"),
        ];
        for (wanted, part) in expected {
            let (number, read) = read.next().unwrap();
            let message = read.unwrap_err();
            assert!(
                number == wanted && message.contains(part),
                "{number}: {message}"
            );
        }
        // The name of a line that is wrong is free.
        assert!(read.next().unwrap().1.is_ok());
        assert_eq!(read.next(), None);
    }
}
