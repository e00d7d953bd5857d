//! [`add_to`]: Jinja's filters of texts.
//!
//! Invariant: each gives what Jinja2's gives, and what it makes is paid for before it is made.

use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::filters as contrib;

use super::methods::Arguments;
use super::python::{Text, str_of, text};
use super::text_methods::{Ends, lines, outer, padded};

/// Gives an environment all of them.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.add_filter("center", center);
    environment.add_filter("filesizeformat", filesizeformat);
    environment.add_filter("indent", indent);
    environment.add_filter("replace", replace);
    environment.add_filter("striptags", contrib::striptags);
    environment.add_filter("trim", trim);
    environment.add_filter("truncate", truncate);
    environment.add_filter("wordcount", wordcount);
    // Those of the engine, which write numbers otherwise.
    let of_texts = [
        ("capitalize", Value::from_function(filters::capitalize)),
        ("lower", Value::from_function(filters::lower)),
        ("title", Value::from_function(filters::title)),
        ("upper", Value::from_function(filters::upper)),
    ];
    for (name, filter) in of_texts {
        let filter = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let mut args = args.into_values();
            if let Some(value) = args.first_mut() {
                *value = text(state, value)?;
            }
            filter.call(state, &args)
        };
        environment.add_filter(name, filter);
    }
}

fn center(state: &State<'_, '_>, text: String, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::of_filter(args, ["width"])?;
    padded(state, &text, args.number(0)?.unwrap_or(80), " ", "center")
}

/// A number of bytes with a prefix of its unit.
fn filesizeformat(value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let is_binary = Arguments::of_filter(args, ["binary"])?.is_true(0);
    let size = match value.as_str() {
        Some(text) => text.trim().parse().map_err(|_| {
            let message = format!("filesizeformat: '{text}' is no number");
            Error::new(ErrorKind::InvalidOperation, message)
        })?,
        None => f64::try_from(value.clone())?,
    };
    let (base, end) = if is_binary {
        (1024.0, "iB")
    } else {
        (1000.0, "B")
    };
    if size == 1.0 {
        return Ok("1 Byte".to_owned());
    }
    if size < base {
        return Ok(format!("{} Bytes", size.trunc() as i64));
    }
    let prefixes = if is_binary { "KMGTPEZY" } else { "kMGTPEZY" };
    let (mut unit, mut prefix) = (base * base, 'k');
    for (i, next) in prefixes.chars().enumerate() {
        prefix = next;
        if size < unit || i == 7 {
            break;
        }
        unit *= base;
    }
    Ok(format!("{:.1} {prefix}{end}", base * size / unit))
}

/// Spaces, or another text, before each line but the first.
fn indent(state: &State<'_, '_>, text: String, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = Arguments::of_filter(args, ["width", "first", "blank"])?;
    let (unit, n) = match args.value(0).and_then(Value::as_str) {
        Some(text) => (text, 1),
        None => (" ", args.size(0, 4)?),
    };
    let (has_first, has_blank) = (args.is_true(1), args.is_true(2));
    let mut out = Text::new(state);
    // A last end of a line stays.
    let lines = lines(&text, Ends::Dropped);
    let lines = lines.into_iter().chain(text.ends_with('\n').then_some(""));
    for (i, line) in lines.enumerate() {
        if i > 0 {
            out.push("\n")?;
        }
        let is_indented = match i {
            0 => has_first,
            _ => has_blank || !line.is_empty(),
        };
        if is_indented {
            out.repeat(unit, n)?;
        }
        out.push(line)?;
    }
    Ok(out.finish())
}

/// The method of texts, for any value.
fn replace(
    state: &mut State<'_, '_>,
    value: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let args = Arguments::of_filter(args, ["old", "new", "count"])?;
    let mut all = Vec::new();
    for i in 0..2 {
        let text = args.value(i).map(|value| str_of(state, value));
        all.push(Value::from(text.transpose()?.unwrap_or_default()));
    }
    all.extend(args.value(2).cloned());
    let text = Value::from(str_of(state, value)?);
    text.call_method(state, "replace", &all)
}

fn trim(state: &State<'_, '_>, value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = Arguments::of_filter(args, ["chars"])?;
    let text = str_of(state, value)?;
    let is_outer = outer(args.text(0)?);
    Ok(text.trim_matches(is_outer).to_owned())
}

/// The beginning of a text that is longer than a number of characters, with an end.
fn truncate(text: String, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = Arguments::of_filter(args, ["length", "killwords", "end", "leeway"])?;
    let (length, leeway) = (args.size(0, 255)?, args.size(3, 5)?);
    let end = args.text(2)?.unwrap_or("...");
    let Some(n) = length.checked_sub(end.chars().count()) else {
        let message = format!("truncate: the end '{end}' is longer than {length} characters");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let start: String = text.chars().take(n).collect();
    let kept = match start.rsplit_once(' ') {
        Some((words, _)) if !args.is_true(1) => words,
        _ => &start,
    };
    Ok(format!("{kept}{end}"))
}

fn wordcount(text: String) -> usize {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let words = text.split(|c| !is_word(c));
    words.filter(|word| !word.is_empty()).count()
}
