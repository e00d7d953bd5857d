//! Bounds of the values that a template makes: no deeper than [`MAX_DEPTH`], in no circle, and no
//! larger than its fuel allows.
//!
//! Invariant: a value that went through [`settled`] can be written, compared and dropped on any
//! stack, and what it takes to write it was paid for. Knows nothing of messages.

use minijinja::value::{DynObject, ObjectRepr, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions};

use super::python::BYTES_PER_FUEL;

/// Values in values. JSON of requests has at most 128.
const MAX_DEPTH: usize = 200;

/// The function that a template's values go through.
pub(super) const SETTLED: &str = "__settled";

/// The function that what namespaces hold goes through.
pub(super) const KEPT: &str = "__kept";

/// Gives an environment these functions, and its own that make values of values as they should be.
pub(super) fn bound(environment: &mut Environment<'static>) {
    environment.add_function(SETTLED, |state: &State<'_, '_>, value: Value| {
        settled(state, value, Holder::Variable)
    });
    environment.add_function(KEPT, |state: &State<'_, '_>, value: Value| {
        settled(state, value, Holder::Namespace)
    });
    environment.add_filter(SETTLED, |state: &State<'_, '_>, value: Value| {
        settled(state, value, Holder::Variable)
    });
    environment.add_filter(KEPT, |state: &State<'_, '_>, value: Value| {
        settled(state, value, Holder::Namespace)
    });
    let namespace = Value::from_function(functions::namespace);
    let make = move |state: &mut State<'_, '_>, values: Rest<ValueOrKwargs>| {
        let values = values.into_values();
        for value in &values {
            rebuilt(state, value, Holder::Namespace, MAX_DEPTH)?;
        }
        namespace.call(state, &values)
    };
    environment.add_function("namespace", make);
    environment.set_unknown_method_callback(super::methods::method);
    // Writes all variables, and is none of transformers' functions.
    environment.remove_global("debug");
    let dict = Value::from_function(functions::dict);
    environment.add_function(
        "dict",
        move |state: &mut State<'_, '_>, values: Rest<ValueOrKwargs>| {
            let mut values = values.into_values();
            if let Some(pairs) = values.first_mut() {
                *pairs = of_pairs(pairs)?;
            }
            let made = dict.call(state, &values)?;
            settled(state, made, Holder::Variable)
        },
    );
    // Those that may put a value into a new one several times.
    let making = [
        ("batch", Value::from_function(filters::batch)),
        ("chain", Value::from_function(filters::chain)),
        ("map", Value::from_function(filters::map)),
        ("slice", Value::from_function(filters::slice)),
        ("zip", Value::from_function(filters::zip)),
    ];
    for (name, filter) in making {
        let filter = move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let made = filter.call(state, &args.into_values())?;
            settled(state, made, Holder::Variable)
        };
        environment.add_filter(name, filter);
    }
}

/// A dictionary of pairs, in place of a list of them.
fn of_pairs(value: &Value) -> Result<Value, Error> {
    if !matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable) {
        return Ok(value.clone());
    }
    let pair = |pair: Value| match pair.len() {
        Some(2) => Ok((pair.get_item_by_index(0)?, pair.get_item_by_index(1)?)),
        _ => {
            let message = format!("dict: {} is no pair", pair.kind());
            Err(Error::new(ErrorKind::InvalidOperation, message))
        }
    };
    let pairs = value
        .try_iter()?
        .map(pair)
        .collect::<Result<Vec<_>, Error>>()?;
    Ok(Value::from_pairs(pairs))
}

/// The holder of a value.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holder {
    /// A variable, or another value.
    Variable,
    /// A namespace, which can be changed: what it holds must not lead back to it.
    Namespace,
}

/// The value, with lists in place of what is only computed when it is read: those nest without end.
fn settled(state: &State<'_, '_>, value: Value, holder: Holder) -> Result<Value, Error> {
    Ok(rebuilt(state, &value, holder, MAX_DEPTH)?.unwrap_or(value))
}

/// Pays for looking at a value.
pub(super) fn paid(state: &State<'_, '_>, value: &Value) -> Result<(), Error> {
    rebuilt(state, value, Holder::Variable, MAX_DEPTH).map(drop)
}

/// The replacement of a value: `None` for one that may stay.
fn rebuilt(
    state: &State<'_, '_>,
    value: &Value,
    holder: Holder,
    depth: usize,
) -> Result<Option<Value>, Error> {
    let fail = |message: String| Err(Error::new(ErrorKind::InvalidOperation, message));
    let Some(object) = value.as_object() else {
        let n_bytes = value.as_str().map_or(0, str::len);
        state.consume_fuel((n_bytes / BYTES_PER_FUEL) as u64)?;
        return Ok(None);
    };
    state.consume_fuel(1)?;
    let Some(depth) = depth.checked_sub(1) else {
        return fail(format!("values in values, more than {MAX_DEPTH} deep"));
    };
    if is_changeable(object) {
        return match holder {
            Holder::Variable => Ok(None),
            Holder::Namespace => fail("a namespace cannot hold a namespace or a loop".to_owned()),
        };
    }
    let part = |value: &Value| rebuilt(state, value, holder, depth);
    match object.repr() {
        ObjectRepr::Map => {
            let Some(pairs) = object.try_iter_pairs() else {
                return Ok(None);
            };
            let mut is_same = true;
            let mut all = Vec::new();
            for (key, value) in pairs {
                part(&key)?;
                let new = part(&value)?;
                is_same &= new.is_none();
                all.push((key, new.unwrap_or(value)));
            }
            Ok((!is_same).then(|| Value::from_iter(all)))
        }
        ObjectRepr::Seq | ObjectRepr::Iterable => {
            let Some(items) = object.try_iter() else {
                return Ok(None);
            };
            let mut is_same = object.repr() == ObjectRepr::Seq;
            let mut all = Vec::new();
            for value in items {
                if value.kind() == ValueKind::Invalid {
                    return fail(value.to_string());
                }
                let new = part(&value)?;
                is_same &= new.is_none();
                state.consume_fuel(1)?;
                all.push(new.unwrap_or(value));
            }
            Ok((!is_same).then(|| Value::from(all)))
        }
        _ => Ok(None),
    }
}

/// Namespaces and loops: what they hold may be another value later.
pub(super) fn is_changeable(object: &DynObject) -> bool {
    let name = object.type_name();
    name.ends_with("::Namespace") || name.ends_with("::Loop")
}
