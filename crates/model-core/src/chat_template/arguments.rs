//! Arguments of tool calls as models and clients write them.
//!
//! Invariant: text that is the JSON of an object gives that object. Text with plain faults (raw
//! control characters in strings, commas before a closing bracket, an end that is cut off) gives
//! the object that was begun; everything else gives `None`.

use std::io;

use serde::Serialize;
use serde_json::ser::Formatter;
use serde_json::{Map, Value};

/// The object that a text of arguments stands for.
pub(super) fn object(text: &str) -> Option<Value> {
    if text.trim().is_empty() {
        return Some(Value::Object(Map::new()));
    }
    match serde_json::from_str(text) {
        Ok(object @ Value::Object(_)) => Some(object),
        // Some clients encode twice.
        Ok(Value::String(inner)) => parse_object(&inner).or_else(|| repaired(&inner)),
        Ok(_) => None,
        Err(_) => repaired(text),
    }
}

/// A value as Python writes JSON: templates print arguments that are texts as they are.
pub(super) fn python_json(value: &Value) -> String {
    let mut out = Vec::new();
    let mut writer = serde_json::Serializer::with_formatter(&mut out, PythonJson);
    match value.serialize(&mut writer) {
        Ok(()) => String::from_utf8_lossy(&out).into_owned(),
        Err(_) => value.to_string(),
    }
}

fn parse_object(text: &str) -> Option<Value> {
    serde_json::from_str(text).ok().filter(Value::is_object)
}

/// `", "` and `": "` between values.
struct PythonJson;

impl Formatter for PythonJson {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The object of a text that is JSON but for plain faults.
fn repaired(text: &str) -> Option<Value> {
    let text = text.trim();
    if !text.starts_with('{') {
        return None;
    }
    let mut scan = Scan::default();
    for c in text.chars() {
        scan.push(c)?;
    }
    let before = scan.before_last_member();
    // Where the end was cut off inside of a member, the members before it are kept.
    parse_object(&scan.closed()).or_else(|| parse_object(&before?.closed()))
}

/// A text of JSON as it is read, with its faults mended so far.
#[derive(Debug, Default)]
struct Scan {
    out: String,
    /// The ends of the brackets that are open, the outermost first.
    closers: Vec<char>,
    in_string: bool,
    is_escaped: bool,
    /// The bytes of `out` before the last member that began, and how many brackets were open there.
    last_member: Option<MemberStart>,
}

/// The place where a member of an object or a list begins.
#[derive(Clone, Copy, Debug)]
struct MemberStart {
    n_bytes: usize,
    n_open: usize,
}

impl Scan {
    /// Reads one more character; `None` where a bracket closes another one.
    fn push(&mut self, c: char) -> Option<()> {
        if self.in_string {
            self.push_in_string(c);
            return Some(());
        }
        match c {
            '"' => self.in_string = true,
            '{' | '[' => self.closers.push(if c == '{' { '}' } else { ']' }),
            '}' | ']' => {
                if self.closers.pop() != Some(c) {
                    return None;
                }
                self.drop_comma();
            }
            _ => {}
        }
        self.out.push(c);
        if matches!(c, '{' | '[' | ',') {
            self.last_member = Some(MemberStart {
                n_bytes: self.out.len(),
                n_open: self.closers.len(),
            });
        }
        Some(())
    }

    /// The text without the last member that began, which was cut off.
    fn before_last_member(&self) -> Option<Self> {
        let start = self.last_member?;
        Some(Self {
            out: self.out.get(..start.n_bytes)?.to_owned(),
            closers: self.closers.get(..start.n_open)?.to_vec(),
            ..Self::default()
        })
    }

    fn push_in_string(&mut self, c: char) {
        let was_escaped = std::mem::take(&mut self.is_escaped);
        match c {
            '"' if !was_escaped => self.in_string = false,
            '\\' if !was_escaped => self.is_escaped = true,
            c if (c as u32) < 0x20 => {
                // A raw line break after a backslash is a continued line in no JSON.
                if was_escaped {
                    self.out.pop();
                }
                self.out.push_str(&format!("\\u{:04x}", c as u32));
                return;
            }
            _ => {}
        }
        self.out.push(c);
    }

    fn drop_comma(&mut self) {
        let end = self.out.trim_end().len();
        if self.out.get(..end).is_some_and(|text| text.ends_with(',')) {
            self.out.truncate(end - 1);
        }
    }

    /// The text with what closes its string and its brackets.
    fn closed(mut self) -> String {
        if self.in_string {
            if self.is_escaped {
                self.out.pop();
            }
            // Half of an escape like `\u00e9`.
            if let Some(at) = self.out.rfind("\\u")
                && self.out.len() - at < 6
            {
                self.out.truncate(at);
            }
            self.out.push('"');
        }
        self.drop_comma();
        self.out.extend(self.closers.iter().rev());
        self.out
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn plain_faults_are_mended() {
        for (text, expected) in [
            ("", json!({})),
            (r#"{"city": "Paris"}"#, json!({"city": "Paris"})),
            ("{\"city\": \"Pa\nris\"}", json!({"city": "Pa\nris"})),
            (
                "{\"a\": \"x\ty\", \"b\": [1, 2,],}",
                json!({"a": "x\ty", "b": [1, 2]}),
            ),
            (r#"{"a": "cut o"#, json!({"a": "cut o"})),
            (r#"{"a": "é\u00e"#, json!({"a": "é"})),
            (
                r#"{"a": {"b": [1, {"c": 2"#,
                json!({"a": {"b": [1, {"c": 2}]}}),
            ),
            (r#"{"a": 1, "b"#, json!({"a": 1})),
            (r#"{"a": 1, "b": "#, json!({"a": 1})),
            (r#"{"a": 1, "b": tr"#, json!({"a": 1})),
            (r#"{"a": 1,"#, json!({"a": 1})),
            (r#"{"a"#, json!({})),
            ("{", json!({})),
            (r#""{\"a\": 1}""#, json!({"a": 1})),
        ] {
            assert_eq!(object(text), Some(expected), "{text}");
        }
    }

    #[test]
    fn other_texts_stay_texts() {
        for text in [
            "[1]",
            "1",
            "Paris",
            "{'a': 1}",
            r#"{"a": 1]"#,
            r#"{"a": 1} x"#,
            "{a: 1}}",
        ] {
            assert_eq!(object(text), None, "{text}");
        }
    }

    #[test]
    fn json_is_written_as_python_does() {
        let value = json!({"a": [1, true], "b": "é\n"});
        assert_eq!(python_json(&value), r#"{"a": [1, true], "b": "é\n"}"#);
    }
}
