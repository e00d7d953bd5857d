//! [`remainder`]: `left % right`, which formats values for a text and divides numbers.
//!
//! Invariant: what a format makes is paid for before. Knows no `str.format`.

use minijinja::formatting::{FormatStyle, format};
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind};
use minijinja::{Error, State, Value};

use super::methods::failure;
use super::python::{Text, str_of, text};
use super::text_methods::paid_format;

/// The function that does `%`.
pub(super) const REMAINDER: &str = "__remainder";

/// The rest of a division, with the sign of the divisor; or a text with values in it.
pub(super) fn remainder(
    state: &State<'_, '_>,
    left: &Value,
    right: &Value,
) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        let form = Form::of(state, text, right)?;
        paid_format(state, &form.text, &form.values)?;
        return format(FormatStyle::Printf, &form.text, &form.values).map(Value::from);
    }
    let whole = |value: &Value| {
        let is_whole = value.is_integer() || value.kind() == ValueKind::Bool;
        i128::try_from(value.clone()).ok().filter(|_| is_whole)
    };
    if let (Some(a), Some(b)) = (whole(left), whole(right)) {
        let rest = a.checked_rem(b);
        let rest = rest.ok_or_else(|| failure(format!("{a} % {b} is no number")))?;
        let is_below = rest != 0 && (rest < 0) != (b < 0);
        return Ok(Value::from(if is_below { rest + b } else { rest }));
    }
    match (f64::try_from(left.clone()), f64::try_from(right.clone())) {
        (Ok(a), Ok(b)) if b != 0.0 => {
            let rest = a % b;
            let is_below = rest != 0.0 && (rest < 0.0) != (b < 0.0);
            Ok(Value::from(if is_below { rest + b } else { rest }))
        }
        _ => Err(failure(format!(
            "{} % {} is no number",
            left.kind(),
            right.kind()
        ))),
    }
}

/// The filter: `text % values`.
pub(super) fn formatted(
    state: &State<'_, '_>,
    text: &Value,
    values: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let text = Value::from(str_of(state, text)?);
    let pairs = named.args().map(|name| Ok((name, named.peek(name)?)));
    let pairs = pairs.collect::<Result<Vec<(&str, Value)>, Error>>()?;
    let values = if pairs.is_empty() {
        Value::from(Tuple::from(values.to_vec()))
    } else {
        Value::from_pairs(pairs)
    };
    remainder(state, &text, &values)
}

/// A format whose fields take the values in order, with the conversions that the engine knows.
struct Form {
    text: String,
    values: Vec<Value>,
}

impl Form {
    fn of(state: &State<'_, '_>, source: &str, right: &Value) -> Result<Self, Error> {
        let given: Vec<Value> = if right.is_tuple() {
            right.try_iter()?.collect()
        } else {
            vec![right.clone()]
        };
        let mut given = given.into_iter();
        let mut next = || {
            given
                .next()
                .ok_or_else(|| failure("too few values for %".to_owned()))
        };
        let mut form = Self {
            text: String::new(),
            values: Vec::new(),
        };
        let mut rest = source;
        while let Some(at) = rest.find('%') {
            let (before, from) = rest.split_at(at + 1);
            form.text.push_str(before);
            rest = from;
            let mut named = None;
            if let Some((name, after)) = rest.strip_prefix('(').and_then(|it| it.split_once(')')) {
                let value = right.get_item(&Value::from(name))?;
                if value.is_undefined() {
                    return Err(failure(format!("% has no value '{name}'")));
                }
                named = Some(value);
                rest = after;
            }
            loop {
                let mut chars = rest.chars();
                let Some(c) = chars.next() else { break };
                rest = chars.as_str();
                match c {
                    '*' => form.text.push_str(&i64::try_from(next()?)?.to_string()),
                    '#' | '-' | '+' | ' ' | '.' | '0'..='9' => form.text.push(c),
                    'h' | 'l' | 'L' => {}
                    '%' => {
                        form.text.push('%');
                        break;
                    }
                    _ => {
                        let value = named.take().map_or_else(&mut next, Ok)?;
                        form.push(state, c, &value)?;
                        break;
                    }
                }
            }
        }
        form.text.push_str(rest);
        if given.next().is_some() && right.kind() != ValueKind::Map {
            return Err(failure("too many values for %".to_owned()));
        }
        Ok(form)
    }

    /// A field's last letter, and its value.
    fn push(&mut self, state: &State<'_, '_>, letter: char, value: &Value) -> Result<(), Error> {
        let (letter, value) = match letter {
            'r' => {
                let mut text = Text::new(state);
                text.repr(value)?;
                ('s', Value::from(text.finish()))
            }
            's' => ('s', text(state, value)?),
            'd' | 'i' | 'u' if !value.is_integer() && value.kind() == ValueKind::Number => {
                (letter, Value::from(f64::try_from(value.clone())? as i128))
            }
            _ => (letter, value.clone()),
        };
        self.text.push(letter);
        self.values.push(value);
        Ok(())
    }
}
