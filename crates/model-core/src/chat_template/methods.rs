//! [`method`]: Python's methods of texts, lists and dictionaries.
//!
//! Invariant: those that `transformers` allows in templates give what Python's give; those that
//! change a list or a dictionary are refused, as there. What one makes is paid for before.

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::text_methods::text_method;

/// A method of a value.
pub(super) fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let made = match value.kind() {
        ValueKind::String => text_method(state, value.as_str().unwrap_or_default(), name, args)?,
        ValueKind::Bytes if name == "decode" => {
            let bytes = value.as_bytes().unwrap_or_default();
            let text = std::str::from_utf8(bytes);
            Some(Value::from(
                text.map_err(|error| failure(format!("decode: {error}")))?,
            ))
        }
        ValueKind::Seq => list_method(state, value, name, args)?,
        ValueKind::Map => map_method(value, name, args)?,
        ValueKind::Number if name == "is_integer" => {
            let float = f64::try_from(value.clone());
            Some(Value::from(
                float.map_or(true, |float| float.fract() == 0.0),
            ))
        }
        _ => None,
    };
    match made {
        Some(made) => Ok(made),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

pub(super) fn failure(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// The arguments of a call.
pub(super) struct Arguments<const N: usize> {
    values: [Option<Value>; N],
    names: [&'static str; N],
}

impl<const N: usize> Arguments<N> {
    /// Those that a method takes, in order or by name.
    pub(super) fn of(args: &[Value], names: [&'static str; N]) -> Result<Self, Error> {
        let (given, named): (Rest<Value>, Kwargs) = from_args(args)?;
        if given.len() > N {
            return Err(Error::from(ErrorKind::TooManyArguments));
        }
        let mut values = [const { None }; N];
        for (i, (value, name)) in values.iter_mut().zip(names).enumerate() {
            *value = match given.get(i) {
                Some(given) => Some(given.clone()),
                None => named.get(name)?,
            };
        }
        named.assert_all_used()?;
        Ok(Self { values, names })
    }

    /// Those of a filter.
    pub(super) fn of_filter(
        args: Rest<ValueOrKwargs>,
        names: [&'static str; N],
    ) -> Result<Self, Error> {
        Self::of(&args.into_values(), names)
    }

    pub(super) fn is_true(&self, i: usize) -> bool {
        self.value(i).is_some_and(Value::is_true)
    }

    /// Nothing, where nothing or `None` is given.
    pub(super) fn value(&self, i: usize) -> Option<&Value> {
        let value = self.values.get(i)?.as_ref();
        value.filter(|value| !value.is_none())
    }

    pub(super) fn wrong(&self, i: usize, wanted: &str) -> Error {
        let name = self.names.get(i).copied().unwrap_or_default();
        let given = self.value(i).map_or(ValueKind::None, Value::kind);
        failure(format!("the argument '{name}' is {given}, not {wanted}"))
    }

    pub(super) fn text(&self, i: usize) -> Result<Option<&str>, Error> {
        let Some(value) = self.value(i) else {
            return Ok(None);
        };
        match value.as_str() {
            Some(text) => Ok(Some(text)),
            None => Err(self.wrong(i, "a text")),
        }
    }

    pub(super) fn needed_text(&self, i: usize) -> Result<&str, Error> {
        self.text(i)?.ok_or_else(|| self.wrong(i, "a text"))
    }

    /// A number that is not below 0.
    pub(super) fn size(&self, i: usize, usual: usize) -> Result<usize, Error> {
        match self.number(i)? {
            Some(n) => usize::try_from(n).map_err(|_| self.wrong(i, "0 or more")),
            None => Ok(usual),
        }
    }

    pub(super) fn number(&self, i: usize) -> Result<Option<i64>, Error> {
        match self.value(i) {
            Some(value) => match i64::try_from(value.clone()) {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(self.wrong(i, "a whole number")),
            },
            None => Ok(None),
        }
    }
}

/// `None` for a method that the engine's own crate has.
fn list_method(
    state: &State<'_, '_>,
    list: &Value,
    name: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    match name {
        "append" | "clear" | "extend" | "insert" | "pop" | "remove" | "reverse" | "sort" => {
            Err(unchangeable("list", name))
        }
        "copy" => {
            let () = from_args(args)?;
            Ok(Some(list.clone()))
        }
        "index" => {
            let args = Arguments::of(args, ["value", "start", "stop"])?;
            let wanted = args.values.first().cloned().flatten().unwrap_or_default();
            let n = list.len().unwrap_or(0);
            let place = |at: i64| {
                let back = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
                if at < 0 { n.saturating_sub(back) } else { back }
            };
            let (start, stop) = (
                args.number(1)?.map_or(0, place),
                args.number(2)?.map_or(n, place),
            );
            for (i, item) in list.try_iter()?.enumerate() {
                state.consume_fuel(1)?;
                if (start..stop).contains(&i) && item == wanted {
                    return Ok(Some(Value::from(i)));
                }
            }
            Err(failure("index: the list has no such value".to_owned()))
        }
        _ => Ok(None),
    }
}

/// `None` for a method that the engine's own crate has.
fn map_method(map: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match name {
        "clear" | "pop" | "popitem" | "setdefault" | "update" => Err(unchangeable("dict", name)),
        "copy" => {
            let () = from_args(args)?;
            Ok(Some(map.clone()))
        }
        _ => Ok(None),
    }
}

/// As `transformers` has it: templates must not change what they are given.
fn unchangeable(what: &str, name: &str) -> Error {
    failure(format!(
        "a template must not change a {what}: '{name}' is refused. Make a new one, as in 'a + [b]'"
    ))
}
