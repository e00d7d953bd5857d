//! [`tojson`]: JSON as Python's `json.dumps` writes it.
//!
//! Invariant: the text is `json.dumps(value, ensure_ascii=…, indent=…, separators=…, sort_keys=…)`,
//! with the defaults of `transformers`: no HTML is escaped, and no letter.

use minijinja::value::{ObjectRepr, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, ErrorKind, State, Value};

use super::methods::Arguments;
use super::python::{Text, float};

/// The options of a writer.
struct Style {
    is_ascii: bool,
    /// The text before a line for each level; `None` where all is in one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    is_sorted: bool,
}

/// The filter.
pub(super) fn tojson(
    state: &State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<String, Error> {
    let names = ["ensure_ascii", "indent", "separators", "sort_keys"];
    let args = Arguments::of_filter(args, names)?;
    let indent = args.value(1).map(indent_of).transpose()?;
    let (item_separator, key_separator) = match args.value(2) {
        Some(separators) => separators_of(separators)?,
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let style = Style {
        is_ascii: args.is_true(0),
        indent,
        item_separator,
        key_separator,
        is_sorted: args.is_true(3),
    };
    let mut json = Json {
        text: Text::new(state),
        style,
        depth: 0,
    };
    json.value(value)?;
    Ok(json.text.finish())
}

fn fail<T>(message: String) -> Result<T, Error> {
    Err(Error::new(ErrorKind::BadSerialization, message))
}

/// A number of spaces, or the text itself.
fn indent_of(value: &Value) -> Result<String, Error> {
    if let Some(text) = value.as_str() {
        return Ok(text.to_owned());
    }
    // Wider lines would not be read by anybody.
    const MAX_INDENT: i64 = 1_000;
    match i64::try_from(value.clone()) {
        Ok(n @ ..=MAX_INDENT) => Ok(" ".repeat(usize::try_from(n).unwrap_or_default())),
        _ => fail(format!(
            "tojson(indent={value}): it is a text or a number up to {MAX_INDENT}"
        )),
    }
}

fn separators_of(value: &Value) -> Result<(String, String), Error> {
    let texts = value.try_iter()?.map(|text| text.to_str());
    match texts.collect::<Option<Vec<_>>>().as_deref() {
        Some([item, key]) => Ok((item.to_string(), key.to_string())),
        _ => fail(format!("tojson(separators={value}): they are two texts")),
    }
}

struct Json<'s, 't, 'e> {
    text: Text<'s, 't, 'e>,
    style: Style,
    depth: usize,
}

impl Json<'_, '_, '_> {
    fn value(&mut self, value: &Value) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.text.push("null"),
            ValueKind::Bool | ValueKind::Number => self.text.push(&plain(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => self.object(value),
            ValueKind::Seq | ValueKind::Iterable => self.array(value),
            ValueKind::Invalid => fail(value.to_string()),
            kind => fail(format!("tojson cannot write {kind} as JSON")),
        }
    }

    fn array(&mut self, value: &Value) -> Result<(), Error> {
        self.text.push("[")?;
        self.depth += 1;
        let mut n = 0;
        for item in value.try_iter()? {
            self.next(n)?;
            n += 1;
            self.value(&item)?;
        }
        self.end(n, "]")
    }

    fn object(&mut self, value: &Value) -> Result<(), Error> {
        let Some(object) = value.as_object().filter(|o| o.repr() == ObjectRepr::Map) else {
            return fail("tojson cannot write this as JSON".to_owned());
        };
        let mut pairs: Vec<_> = object.try_iter_pairs().into_iter().flatten().collect();
        if self.style.is_sorted {
            pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.text.push("{")?;
        self.depth += 1;
        let n = pairs.len();
        for (i, (key, value)) in pairs.into_iter().enumerate() {
            self.next(i)?;
            match key.kind() {
                ValueKind::String => self.string(key.as_str().unwrap_or_default())?,
                ValueKind::None => self.string("null")?,
                ValueKind::Bool | ValueKind::Number => self.string(&plain(&key))?,
                kind => return fail(format!("tojson cannot write {kind} as a key of JSON")),
            }
            self.text.push(&self.style.key_separator)?;
            self.value(&value)?;
        }
        self.end(n, "}")
    }

    /// The text before a value that has so many before it.
    fn next(&mut self, n_before: usize) -> Result<(), Error> {
        if n_before > 0 {
            self.text.push(&self.style.item_separator)?;
        }
        self.line()
    }

    fn line(&mut self) -> Result<(), Error> {
        let Some(indent) = &self.style.indent else {
            return Ok(());
        };
        self.text.push("\n")?;
        self.text.repeat(indent, self.depth)
    }

    /// The text behind so many values.
    fn end(&mut self, n: usize, bracket: &str) -> Result<(), Error> {
        self.depth -= 1;
        if n > 0 {
            self.line()?;
        }
        self.text.push(bracket)
    }

    fn string(&mut self, text: &str) -> Result<(), Error> {
        let is_ascii = self.style.is_ascii;
        let is_escaped = |c: char| match c {
            '"' | '\\' | '\0'..='\x1f' => true,
            ' '..='~' => false,
            _ => is_ascii,
        };
        self.text.push("\"")?;
        let mut rest = text;
        while let Some(at) = rest.find(is_escaped) {
            let (plain, from) = rest.split_at(at);
            self.text.push(plain)?;
            let mut chars = from.chars();
            match chars.next() {
                Some('"') => self.text.push("\\\"")?,
                Some('\\') => self.text.push("\\\\")?,
                Some('\n') => self.text.push("\\n")?,
                Some('\r') => self.text.push("\\r")?,
                Some('\t') => self.text.push("\\t")?,
                Some('\x08') => self.text.push("\\b")?,
                Some('\x0c') => self.text.push("\\f")?,
                Some(c) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.text.push(&format!("\\u{unit:04x}"))?;
                    }
                }
                None => {}
            }
            rest = chars.as_str();
        }
        self.text.push(rest)?;
        self.text.push("\"")
    }
}

/// A number or a truth value.
fn plain(value: &Value) -> String {
    match f64::try_from(value.clone()) {
        _ if value.kind() == ValueKind::Bool => value.is_true().to_string(),
        Ok(number) if !value.is_integer() => match number {
            f64::INFINITY => "Infinity".to_owned(),
            f64::NEG_INFINITY => "-Infinity".to_owned(),
            _ if number.is_nan() => "NaN".to_owned(),
            _ => float(number),
        },
        _ => value.to_string(),
    }
}
