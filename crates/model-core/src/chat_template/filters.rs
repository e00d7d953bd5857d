//! [`add_to`]: Jinja's filters, tests and functions that the engine has not, or has otherwise.
//!
//! Invariant: each gives what Jinja2's gives, and what it makes is paid for before it is made.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use minijinja::value::{
    DynObject, Object, ObjectRepr, Rest, Tuple, ValueKind, ValueOrKwargs, from_args,
};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use minijinja_contrib::globals;

use super::json::tojson;
use super::methods::Arguments;
use super::printf::{REMAINDER, formatted, remainder};
use super::python::{Text, is_written_otherwise, str_of, text};
use super::texts;
use super::values::{is_changeable, paid};
use super::variadic::{VARIADIC, variadic};

/// The function that the operands of `~` go through.
pub(super) const TEXT: &str = "__text";

/// Gives an environment all of them.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_formatter(write);
    environment.add_function(TEXT, text);
    environment.add_function(REMAINDER, remainder);
    environment.add_function(VARIADIC, variadic);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", |state: &State<'_, '_>, value: &Value| {
        str_of(state, value)
    });
    environment.add_filter("join", join);
    environment.add_filter("format", formatted);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("dictsort", dictsort);
    environment.add_filter("unique", unique);
    texts::add_to(environment);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_test("integer", |value: &Value| value.is_integer());
    environment.add_test("callable", is_callable);
    environment.add_test("mapping", is_mapping);
    environment.add_function("joiner", globals::joiner);
    environment.add_function("cycler", |items: Rest<Value>| Cycler::value(items.to_vec()));
}

/// Writes a value into the text.
fn write(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if !is_written_otherwise(value) {
        return escape_formatter(out, state, value);
    }
    out.write_str(&str_of(state, value)?).map_err(Error::from)
}

fn join(state: &State<'_, '_>, value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = Arguments::of_filter(args, ["d", "attribute"])?;
    let separator = match args.value(0) {
        Some(separator) => str_of(state, separator)?,
        None => String::new(),
    };
    let mut text = Text::new(state);
    for (i, item) in value.try_iter()?.enumerate() {
        state.consume_fuel(1)?;
        if i > 0 {
            text.push(&separator)?;
        }
        match args.value(1) {
            Some(path) => text.str(&attribute_of(&item, path)?)?,
            None => text.str(&item)?,
        }
    }
    Ok(text.finish())
}

/// The value at a path of names and indices.
fn attribute_of(value: &Value, path: &Value) -> Result<Value, Error> {
    let Some(path) = path.as_str() else {
        return value.get_item(path);
    };
    path.split('.')
        .try_fold(value.clone(), |value, name| match name.parse::<usize>() {
            Ok(index) => value.get_item(&Value::from(index)),
            Err(_) => value.get_attr(name),
        })
}

/// A number without its fraction; the default for what is none.
fn int(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::of_filter(args, ["default", "base"])?;
    let base = args.number(1)?.unwrap_or(10);
    let base = u32::try_from(base).unwrap_or_default();
    if value.is_integer() {
        return Ok(value.clone());
    }
    let whole = value.as_str().and_then(|text| parsed(text, base));
    let whole = whole.or_else(|| {
        as_float(value)
            .filter(|float| float.is_finite())
            .map(|f| f as i128)
    });
    let default = || args.value(0).cloned().unwrap_or_else(|| Value::from(0));
    Ok(whole.map_or_else(default, Value::from))
}

/// A whole number in a base, which its prefix may repeat.
fn parsed(text: &str, base: u32) -> Option<i128> {
    let text = text.trim().replace('_', "");
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => (-1, digits),
        None => (1, text.strip_prefix('+').unwrap_or(&text)),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        3..=36 => "",
        _ => return None,
    };
    let lower = digits.to_ascii_lowercase();
    let digits = lower.strip_prefix(prefix).unwrap_or(&lower);
    let is_signed = digits.starts_with(['+', '-']);
    let whole = i128::from_str_radix(digits, base).ok();
    whole.filter(|_| !is_signed).map(|whole| sign * whole)
}

fn float(value: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::of_filter(args, ["default"])?;
    let default = || args.value(0).cloned().unwrap_or_else(|| Value::from(0.0));
    Ok(as_float(value).map_or_else(default, Value::from))
}

/// The number that Python's `float` makes of it.
fn as_float(value: &Value) -> Option<f64> {
    match value.kind() {
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => f64::try_from(value.clone())
            .ok()
            .or_else(|| value.to_string().parse().ok()),
        ValueKind::String => value.as_str()?.trim().replace('_', "").parse().ok(),
        _ => None,
    }
}

/// True if capital and small letters are different.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Letters {
    AsTheyAre,
    Small,
}

impl Letters {
    /// As the first argument says.
    fn of<const N: usize>(args: &Arguments<N>) -> Self {
        if args.is_true(0) {
            Self::AsTheyAre
        } else {
            Self::Small
        }
    }

    /// The key by which a value is sorted and compared.
    fn key(self, value: &Value) -> Value {
        match (self, value.as_str()) {
            (Self::Small, Some(text)) => Value::from(text.to_lowercase()),
            _ => value.clone(),
        }
    }
}

/// The pairs of a dictionary in order.
fn dictsort(state: &State<'_, '_>, map: &Value, args: Rest<ValueOrKwargs>) -> Result<Value, Error> {
    let args = Arguments::of_filter(args, ["case_sensitive", "by", "reverse"])?;
    let (letters, is_reversed) = (Letters::of(&args), args.is_true(2));
    let fail = |message: String| Err(Error::new(ErrorKind::InvalidOperation, message));
    let by_value = match args.text(1)? {
        None | Some("key") => false,
        Some("value") => true,
        Some(by) => return fail(format!("dictsort(by='{by}'): it is 'key' or 'value'")),
    };
    let Some(object) = map.as_object().filter(|_| map.kind() == ValueKind::Map) else {
        return fail(format!("dictsort of {}: it is no dictionary", map.kind()));
    };
    let pairs = object.try_iter_pairs().into_iter().flatten();
    let mut pairs: Vec<_> = pairs
        .map(|(key, value)| {
            (
                letters.key(if by_value { &value } else { &key }),
                key,
                value,
            )
        })
        .collect();
    state.consume_fuel(pairs.len() as u64 * 8)?;
    pairs.sort_by(|(a, ..), (b, ..)| if is_reversed { b.cmp(a) } else { a.cmp(b) });
    let pairs = pairs
        .into_iter()
        .map(|(_, key, value)| Value::from(Tuple::from([key, value])));
    Ok(pairs.collect())
}

/// The first of each of the values that are equal.
fn unique(
    state: &State<'_, '_>,
    values: &Value,
    args: Rest<ValueOrKwargs>,
) -> Result<Value, Error> {
    let args = Arguments::of_filter(args, ["case_sensitive", "attribute"])?;
    let letters = Letters::of(&args);
    let mut seen = BTreeSet::new();
    let mut all = Vec::new();
    for value in values.try_iter()? {
        // Values in values take time to compare.
        paid(state, &value)?;
        let key = match args.value(1) {
            Some(path) => letters.key(&attribute_of(&value, path)?),
            None => letters.key(&value),
        };
        if seen.insert(key) {
            all.push(value);
        }
    }
    Ok(Value::from(all))
}

/// `cycler`: one value after the other, and again.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    at: AtomicUsize,
}

impl Cycler {
    fn value(items: Vec<Value>) -> Result<Value, Error> {
        if items.is_empty() {
            let message = "cycler needs a value".to_owned();
            return Err(Error::new(ErrorKind::MissingArgument, message));
        }
        let at = AtomicUsize::new(0);
        Ok(Value::from_object(Self { items, at }))
    }

    fn current(&self) -> Value {
        let at = self.at.load(Ordering::Relaxed);
        self.items.get(at).cloned().unwrap_or_default()
    }
}

impl Object for Cycler {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.current())
    }

    fn call_method(
        self: &Arc<Self>,
        _: &mut State<'_, '_>,
        method: &str,
        args: &[Value],
    ) -> Result<Value, Error> {
        let () = from_args(args)?;
        let (given, next) = match method {
            "next" => (self.current(), self.at.load(Ordering::Relaxed) + 1),
            "reset" => (Value::from(()), 0),
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        };
        self.at.store(next % self.items.len(), Ordering::Relaxed);
        Ok(given)
    }
}

/// As in Python, where `None` cannot be iterated.
fn is_iterable(value: &Value) -> bool {
    let is_text = value.is_undefined() || value.as_str().is_some();
    is_text || (!value.is_none() && value.try_iter().is_ok())
}

/// True for what has a length and items: texts and dictionaries, too.
fn is_sequence(value: &Value) -> bool {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Bytes => true,
        ValueKind::Seq => true,
        ValueKind::Map => is_mapping(value),
        _ => false,
    }
}

fn is_mapping(value: &Value) -> bool {
    let is_namespace = value.as_object().is_some_and(is_changeable);
    value.kind() == ValueKind::Map && !is_namespace && !is_callable(value)
}

fn is_callable(value: &Value) -> bool {
    let is_function = |object: &DynObject| {
        let name = object.type_name();
        ["::Macro", "::BoxedFunction", "::Joiner", "::Variadic"]
            .iter()
            .any(|end| name.ends_with(end))
    };
    value.as_object().is_some_and(is_function)
}
