//! What may reach a terminal. Strings that come from files (metadata, names of tensors, tokens,
//! states, error messages with their contents) can hold control sequences, which a terminal would
//! obey, and direction marks, which reorder what is read.
//!
//! Invariant: everything that is printed from a file passes [`escape`]; text that a model generates
//! passes [`write_text`]. Knows nothing of where strings are from.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use serde::Serialize;

/// Shows a string in one line: control characters and marks of direction are written as in Rust,
/// for example `\n` and `\u{1b}`. A backslash stays as it is: `--json` is what programs read.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    escape_where(text, is_control, |c| c.escape_default().collect())
}

/// The same for a text of several lines, whose line breaks stay.
pub(crate) fn escape_lines(text: &str) -> Cow<'_, str> {
    let is_unsafe = |c| is_control(c) && c != '\n';
    escape_where(text, is_unsafe, |c| c.escape_default().collect())
}

/// Writes a line to stderr. Where stderr is closed there is no reader, and the line is dropped.
/// What comes from a file is to be escaped before.
pub(crate) fn note(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes the beginning of a line to stderr, after which the user types an answer.
#[cfg(all(feature = "hub", feature = "serve"))]
pub(crate) fn ask(question: &str) {
    let _ = write!(io::stderr(), "{}", escape(question));
}

/// True once --quiet was given.
static IS_QUIET: AtomicBool = AtomicBool::new(false);

/// Makes the program print no statistics and no notes.
pub(crate) fn set_quiet() {
    IS_QUIET.store(true, Ordering::Relaxed);
}

/// Writes a line to stderr that is no error and no warning, unless --quiet was given.
pub(crate) fn info(line: impl Display) {
    if !IS_QUIET.load(Ordering::Relaxed) {
        note(line);
    }
}

/// Writes a remark of a chat to stderr, for its user.
pub(crate) fn remark(text: &str) {
    info(format_args!("({})", escape(text)));
}

/// A value as one line of JSON. Characters that [`escape`] escapes are escaped as in JSON.
///
/// # Errors
/// Where the value cannot be JSON.
pub(crate) fn json(value: &impl Serialize) -> serde_json::Result<String> {
    let json = serde_json::to_string(value)?;
    // The syntax of JSON has none of them, so they are in strings; none is beyond 16 bits.
    let escaped = escape_where(&json, is_control, |c| format!("\\u{:04x}", u32::from(c)));
    Ok(escaped.into_owned())
}

/// Whether generated text is shown to someone or kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reader {
    /// A terminal, which obeys control sequences.
    Terminal,
    /// A file or pipe, which gets the text byte for byte.
    Program,
}

impl Reader {
    /// Who reads this stream.
    pub(crate) fn of(stream: &impl IsTerminal) -> Self {
        if stream.is_terminal() {
            Self::Terminal
        } else {
            Self::Program
        }
    }
}

/// Writes text that a model generated. On a terminal, line breaks and tabs are kept, carriage
/// returns are left out, and other control characters are escaped; right-to-left scripts need marks
/// of direction, so these stay.
///
/// # Errors
/// Those of the stream.
pub(crate) fn write_text(out: &mut impl Write, reader: Reader, text: &str) -> io::Result<()> {
    out.write_all(shown_text(reader, text).as_bytes())?;
    out.flush()
}

/// The text that [`write_text`] writes.
pub(crate) fn shown_text(reader: Reader, text: &str) -> Cow<'_, str> {
    match reader {
        Reader::Program => Cow::Borrowed(text),
        Reader::Terminal => {
            let is_unsafe = |c: char| c.is_control() && c != '\n' && c != '\t';
            escape_where(text, is_unsafe, |c| match c {
                '\r' => String::new(),
                c => c.escape_default().collect(),
            })
        }
    }
}

fn escape_where(
    text: &str,
    is_unsafe: impl Fn(char) -> bool,
    escaped: impl Fn(char) -> String,
) -> Cow<'_, str> {
    if !text.contains(&is_unsafe) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if is_unsafe(c) {
            shown.push_str(&escaped(c));
        } else {
            shown.push(c);
        }
    }
    Cow::Owned(shown)
}

/// Control characters, line and paragraph separators, and marks that set the direction of text.
fn is_control(c: char) -> bool {
    let marks = ['\u{61c}', '\u{200e}', '\u{200f}', '\u{feff}'];
    c.is_control()
        || matches!(c, '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
        || marks.contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "a\x1b[31m\u{9b}2J\u{202e}b\r\n\té";

    #[test]
    fn strings_from_files_become_one_harmless_line() {
        assert_eq!(escape(HOSTILE), r"a\u{1b}[31m\u{9b}2J\u{202e}b\r\n\té");
        assert_eq!(escape_lines("a\n\x07"), "a\n\\u{7}");
        assert!(matches!(escape("'plain' \\ \"é\""), Cow::Borrowed(_)));
    }

    #[test]
    fn json_is_harmless_and_means_the_same() {
        let json = json(&HOSTILE).unwrap();
        assert_eq!(json, r#""a\u001b[31m\u009b2J\u202eb\r\n\té""#);
        assert_eq!(serde_json::from_str::<String>(&json).unwrap(), HOSTILE);
    }

    #[test]
    fn generated_text_is_exact_in_pipes_and_harmless_on_terminals() {
        let written = |reader| {
            let mut out = Vec::new();
            write_text(&mut out, reader, HOSTILE).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(Reader::Program), HOSTILE);
        assert_eq!(
            written(Reader::Terminal),
            "a\\u{1b}[31m\\u{9b}2J\u{202e}b\n\té"
        );
    }
}
