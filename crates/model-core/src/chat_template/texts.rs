//! [`add_to`]: Jinja's filters of texts.
//!
//! Invariant: each gives what Jinja2's gives, and what it makes is paid for before it is made.

use minijinja::value::{Kwargs, Rest, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::filters as contrib;

use super::filters::text;
use super::python::{Text, str_of};
use super::text_methods::{Ends, is_space, lines, padded};

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

/// The arguments of a filter, in order or by name.
struct Options<'a, const N: usize> {
    given: &'a [Value],
    named: &'a Kwargs,
    names: [&'static str; N],
}

impl<'a, const N: usize> Options<'a, N> {
    fn new(given: &'a [Value], named: &'a Kwargs, names: [&'static str; N]) -> Result<Self, Error> {
        for name in names {
            let _: Option<Value> = named.get(name)?;
        }
        named.assert_all_used()?;
        if given.len() > N {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        Ok(Self {
            given,
            named,
            names,
        })
    }

    fn value(&self, i: usize) -> Option<Value> {
        let named = || self.named.get(self.names.get(i)?).ok();
        self.given.get(i).cloned().or_else(named)
    }

    fn number(&self, i: usize, default: usize) -> Result<usize, Error> {
        match self.value(i).filter(|value| !value.is_none()) {
            Some(value) => usize::try_from(value),
            None => Ok(default),
        }
    }

    fn is_true(&self, i: usize) -> bool {
        self.value(i).is_some_and(|value| value.is_true())
    }
}

fn center(state: &State<'_, '_>, text: String, width: Option<i64>) -> Result<Value, Error> {
    padded(state, &text, width.unwrap_or(80), " ", "center")
}

/// A number of bytes with a prefix of its unit.
fn filesizeformat(value: &Value, binary: Option<bool>, options: Kwargs) -> Result<String, Error> {
    let is_binary = match binary {
        Some(given) => given,
        None => options.get::<Option<bool>>("binary")?.unwrap_or_default(),
    };
    options.assert_all_used()?;
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
fn indent(
    state: &State<'_, '_>,
    text: String,
    args: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let options = Options::new(&args, &named, ["width", "first", "blank"])?;
    let width = options.value(0).filter(|value| !value.is_none());
    let (unit, n) = match width.as_ref().and_then(Value::as_str) {
        Some(text) => (text, 1),
        None => (" ", options.number(0, 4)?),
    };
    let (has_first, has_blank) = (options.is_true(1), options.is_true(2));
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
    args: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let options = Options::new(&args, &named, ["old", "new", "count"])?;
    let count = options.value(2).filter(|count| !count.is_none());
    let of = |i: usize| options.value(i).unwrap_or_default();
    let (old, new) = (str_of(state, &of(0))?, str_of(state, &of(1))?);
    let mut all = vec![Value::from(old), Value::from(new)];
    all.extend(count);
    let text = Value::from(str_of(state, value)?);
    text.call_method(state, "replace", &all)
}

fn trim(state: &State<'_, '_>, value: &Value, chars: Option<String>) -> Result<String, Error> {
    let text = str_of(state, value)?;
    let is_outer = |c: char| {
        chars
            .as_ref()
            .map_or_else(|| is_space(c), |all| all.contains(c))
    };
    Ok(text.trim_matches(is_outer).to_owned())
}

/// The beginning of a text that is longer than a number of characters, with an end.
fn truncate(text: String, args: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let options = Options::new(&args, &named, ["length", "killwords", "end", "leeway"])?;
    let (length, leeway) = (options.number(0, 255)?, options.number(3, 5)?);
    let end = options.value(2).filter(|value| !value.is_none());
    let end = end.map_or_else(|| "...".to_owned(), |end| end.to_string());
    let Some(n) = length.checked_sub(end.chars().count()) else {
        let message = format!("truncate: the end '{end}' is longer than {length} characters");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text);
    }
    let start: String = text.chars().take(n).collect();
    let kept = match start.rsplit_once(' ') {
        Some((words, _)) if !options.is_true(1) => words,
        _ => &start,
    };
    Ok(format!("{kept}{end}"))
}

fn wordcount(text: String) -> usize {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let words = text.split(|c| !is_word(c));
    words.filter(|word| !word.is_empty()).count()
}
