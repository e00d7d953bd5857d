//! [`add_to`]: Jinja's filters, tests and functions that the engine has not, or has otherwise.
//!
//! Invariant: each gives what Jinja2's gives, and what it makes is paid for before it is made.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};

use super::json::tojson;
use super::methods::paid_format;
use super::python::{Text, str_of};

/// The function that the operands of `~` go through.
pub(super) const TEXT: &str = "__text";

/// The function that does `%`.
pub(super) const REMAINDER: &str = "__remainder";

/// Gives an environment all of them.
pub(super) fn add_to(environment: &mut Environment<'static>) {
    environment.set_formatter(write);
    environment.add_function(TEXT, text);
    environment.add_function(REMAINDER, remainder);
    environment.add_filter("tojson", tojson);
    environment.add_filter("string", text);
    environment.add_filter("join", join);
    environment.add_test("iterable", is_iterable);
    environment.add_test("callable", |value: &Value| value.kind() == ValueKind::Plain);
}

/// Writes a value into the text.
fn write(out: &mut Output<'_>, state: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    if !is_written_otherwise(value) {
        return escape_formatter(out, state, value);
    }
    out.write_str(&str_of(state, value)?).map_err(Error::from)
}

/// The text of a value that the engine would write otherwise.
fn text(state: &State<'_, '_>, value: &Value) -> Result<Value, Error> {
    if is_written_otherwise(value) {
        str_of(state, value).map(Value::from)
    } else {
        Ok(value.clone())
    }
}

/// True if the engine does not write the value as Python does.
fn is_written_otherwise(value: &Value) -> bool {
    value.as_object().is_some() || (value.is_number() && !value.is_integer())
}

/// `left % right`: a text with values in it, or what is left of a division.
fn remainder(state: &State<'_, '_>, left: &Value, right: &Value) -> Result<Value, Error> {
    let fail = |message: String| Error::new(ErrorKind::InvalidOperation, message);
    if let Some(text) = left.as_str() {
        let values: Vec<Value> = if right.is_tuple() {
            right.try_iter()?.collect()
        } else {
            vec![right.clone()]
        };
        paid_format(state, text, &values)?;
        let is_named = text.contains("%(");
        let values = values.into_iter().map(|value| match value.kind() {
            ValueKind::Map if is_named => Ok(value),
            ValueKind::Map | ValueKind::Seq => self::text(state, &value),
            _ => Ok(value),
        });
        let values = values.collect::<Result<Vec<_>, Error>>()?;
        return format(FormatStyle::Printf, text, &values).map(Value::from);
    }
    let whole = |value: &Value| i128::try_from(value.clone()).ok();
    let is_float = |value: &Value| value.is_number() && !value.is_integer();
    if !is_float(left)
        && !is_float(right)
        && let (Some(a), Some(b)) = (whole(left), whole(right))
    {
        let rest = a.checked_rem(b).ok_or_else(|| fail(format!("{a} % {b}")))?;
        let is_below = rest != 0 && (rest < 0) != (b < 0);
        return Ok(Value::from(if is_below { rest + b } else { rest }));
    }
    match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
        (Ok(a), Ok(b)) if b != 0.0 => {
            let rest = a % b;
            let is_below = rest != 0.0 && (rest < 0.0) != (b < 0.0);
            Ok(Value::from(if is_below { rest + b } else { rest }))
        }
        _ => Err(fail(format!(
            "no remainder of {} and {}",
            left.kind(),
            right.kind()
        ))),
    }
}

fn join(
    state: &State<'_, '_>,
    value: &Value,
    separator: Option<Value>,
    attribute: Option<Value>,
    options: Kwargs,
) -> Result<String, Error> {
    let option = |given: Option<Value>, name: &'static str| match given {
        Some(value) => Ok::<Option<Value>, Error>(Some(value)),
        None => options.get(name),
    };
    let separator = str_of(state, &option(separator, "d")?.unwrap_or_default())?;
    let attribute = option(attribute, "attribute")?;
    options.assert_all_used()?;
    let mut text = Text::new(state);
    for (i, item) in value.try_iter()?.enumerate() {
        state.consume_fuel(1)?;
        if i > 0 {
            text.push(&separator)?;
        }
        match &attribute {
            Some(path) => text.str(&attribute_of(&item, path)?)?,
            None => text.str(&item)?,
        }
    }
    Ok(text.finish())
}

/// What is at a path of names and indices.
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

/// As in Python, where `None` cannot be iterated.
fn is_iterable(value: &Value) -> bool {
    let is_text = value.is_undefined() || value.as_str().is_some();
    is_text || (!value.is_none() && value.try_iter().is_ok())
}
