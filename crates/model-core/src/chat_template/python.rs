//! [`Text`]: values as Python writes them, with `str` and `repr`.
//!
//! Invariant: a text is paid for while it is written, so that none is larger than the fuel that is
//! left. Knows nothing of JSON.

use std::sync::LazyLock;

use minijinja::value::{ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use crate::tokenizer::char_class::{contains, ranges};

/// Bytes of text that one unit of fuel pays for, as in the engine.
pub(super) const BYTES_PER_FUEL: usize = 64;

/// Bytes that one unit of fuel pays for: half as many as elsewhere, as a text that grows takes up
/// to three times its size while it is moved.
const GROWN_BYTES_PER_FUEL: usize = BYTES_PER_FUEL / 2;

/// Bytes that are written until they are paid for.
const UNPAID_BYTES: usize = 128 * GROWN_BYTES_PER_FUEL;

/// Bytes that a piece of a text costs however short it is.
const PIECE_BYTES: usize = 8;

/// A text that a template makes.
pub(super) struct Text<'s, 't, 'e> {
    state: &'s State<'t, 'e>,
    text: String,
    n_unpaid: usize,
}

impl<'s, 't, 'e> Text<'s, 't, 'e> {
    pub(super) fn new(state: &'s State<'t, 'e>) -> Self {
        Self {
            state,
            text: String::new(),
            n_unpaid: 0,
        }
    }

    pub(super) fn finish(self) -> String {
        self.text
    }

    pub(super) fn push(&mut self, text: &str) -> Result<(), Error> {
        self.n_unpaid += text.len() + PIECE_BYTES;
        if self.n_unpaid >= UNPAID_BYTES {
            let fuel = std::mem::take(&mut self.n_unpaid) / GROWN_BYTES_PER_FUEL;
            self.state.consume_fuel(fuel as u64)?;
        }
        self.text.push_str(text);
        Ok(())
    }

    pub(super) fn push_char(&mut self, c: char) -> Result<(), Error> {
        self.push(c.encode_utf8(&mut [0; 4]))
    }

    /// So many times the same.
    pub(super) fn repeat(&mut self, text: &str, n: usize) -> Result<(), Error> {
        let n_bytes = text.len().saturating_mul(n);
        self.state
            .consume_fuel((n_bytes / GROWN_BYTES_PER_FUEL) as u64)?;
        let many = (UNPAID_BYTES / text.len().max(1)).clamp(1, n.max(1));
        let (times, rest) = (n / many, n % many);
        let unit = text.repeat(many);
        (0..times).for_each(|_| self.text.push_str(&unit));
        self.text.extend(std::iter::repeat_n(text, rest));
        Ok(())
    }

    /// `str(value)`
    pub(super) fn str(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::String => self.push(value.as_str().unwrap_or_default()),
            ValueKind::Undefined => Ok(()),
            _ => self.repr(value),
        }
    }

    /// `repr(value)`
    pub(super) fn repr(&mut self, value: &Value) -> Result<(), Error> {
        self.state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::Undefined => self.push("Undefined"),
            ValueKind::Number => self.push(&number(value)),
            ValueKind::String => self.quoted(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => self.container(value),
            ValueKind::Bytes => self.bytes(value.as_bytes().unwrap_or_default()),
            ValueKind::Invalid => {
                let message = value.to_string();
                Err(Error::new(ErrorKind::InvalidOperation, message))
            }
            _ => self.push(&value.to_string()),
        }
    }

    fn container(&mut self, value: &Value) -> Result<(), Error> {
        let Some(object) = value.as_object() else {
            return self.push(&value.to_string());
        };
        if object.repr() == ObjectRepr::Map {
            self.push("{")?;
            for (i, (key, value)) in object.try_iter_pairs().into_iter().flatten().enumerate() {
                self.push(if i == 0 { "" } else { ", " })?;
                self.repr(&key)?;
                self.push(": ")?;
                self.repr(&value)?;
            }
            return self.push("}");
        }
        // A macro's arguments and the like, which have no end that is known, are not looked into.
        if object.enumerator_len().is_none() {
            return self.push(&value.to_string());
        }
        let (open, close) = if value.is_tuple() {
            ("(", ")")
        } else {
            ("[", "]")
        };
        self.push(open)?;
        let mut n = 0;
        for item in object.try_iter().into_iter().flatten() {
            self.push(if n == 0 { "" } else { ", " })?;
            self.repr(&item)?;
            n += 1;
        }
        self.push(if n == 1 && value.is_tuple() { "," } else { "" })?;
        self.push(close)
    }

    fn quoted(&mut self, text: &str) -> Result<(), Error> {
        let quote = if text.contains('\'') && !text.contains('"') {
            '"'
        } else {
            '\''
        };
        self.push_char(quote)?;
        for c in text.chars() {
            match c {
                '\n' => self.push("\\n")?,
                '\r' => self.push("\\r")?,
                '\t' => self.push("\\t")?,
                '\\' => self.push("\\\\")?,
                _ if c == quote => {
                    self.push("\\")?;
                    self.push_char(c)?;
                }
                _ if is_printable(c) => self.push_char(c)?,
                _ => self.push(&match u32::from(c) {
                    code @ ..=0xff => format!("\\x{code:02x}"),
                    code @ ..=0xffff => format!("\\u{code:04x}"),
                    code => format!("\\U{code:08x}"),
                })?,
            }
        }
        self.push_char(quote)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let is_quoted_twice = bytes.contains(&b'\'') && !bytes.contains(&b'"');
        let quote = if is_quoted_twice { "\"" } else { "'" };
        self.push("b")?;
        self.push(quote)?;
        for &byte in bytes {
            match byte {
                b'\'' if is_quoted_twice => self.push("'")?,
                b'"' => self.push("\"")?,
                _ => self.push(&byte.escape_ascii().to_string())?,
            }
        }
        self.push(quote)
    }
}

/// `str(value)`
pub(super) fn str_of(state: &State<'_, '_>, value: &Value) -> Result<String, Error> {
    let mut text = Text::new(state);
    text.str(value)?;
    Ok(text.finish())
}

/// A number as Python writes it.
pub(super) fn number(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        Ok(float) if !value.is_integer() => self::float(float),
        _ => value.to_string(),
    }
}

/// The shortest digits that give the same float, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    // Rust's limits for the exponent are the same, but it writes `1e-5` for `1e-05`.
    let text = format!("{value:?}");
    match text.split_once('e') {
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
        None => text,
    }
}

/// True if `repr` writes the character as it is.
pub(super) fn is_printable(c: char) -> bool {
    static OTHERS: LazyLock<Vec<(char, char)>> =
        LazyLock::new(|| ranges(r"[\p{C}\p{Z}[^\p{Age:15.1}]]").unwrap_or_default());
    match c {
        ' '..='~' => true,
        '\0'..='\u{a0}' => false,
        _ => !contains(&OTHERS, c),
    }
}

/// The text of a value that the engine would write otherwise.
pub(super) fn text(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    if is_written_otherwise(value) {
        str_of(state, value).map(Value::from)
    } else {
        Ok(value.clone())
    }
}

/// True if the engine does not write the value as Python does.
pub(super) fn is_written_otherwise(value: &Value) -> bool {
    value.as_object().is_some() || value.kind() == ValueKind::Bytes || is_float(value)
}

fn is_float(value: &Value) -> bool {
    value.is_number() && !value.is_integer()
}
