//! [`method`]: Python's methods of texts, lists and dictionaries.
//!
//! Invariant: those that `transformers` allows in templates give what Python's give; those that
//! change a list or a dictionary are refused, as there. What one makes is paid for before.

use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat;

use super::python::{Text, is_printable, str_of};
use super::values::BYTES_PER_FUEL;

/// Fuel of a part of a text: it is a value.
const PART_FUEL: u64 = 1;

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

fn failure(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// The arguments of a call.
struct Arguments<const N: usize> {
    values: [Option<Value>; N],
    names: [&'static str; N],
}

impl<const N: usize> Arguments<N> {
    /// Those that a method takes, in order or by name.
    fn of(args: &[Value], names: [&'static str; N]) -> Result<Self, Error> {
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

    /// Where nothing or `None` is given, nothing.
    fn value(&self, i: usize) -> Option<&Value> {
        let value = self.values.get(i)?.as_ref();
        value.filter(|value| !value.is_none())
    }

    fn wrong(&self, i: usize, wanted: &str) -> Error {
        let name = self.names.get(i).copied().unwrap_or_default();
        let given = self.value(i).map_or(ValueKind::None, Value::kind);
        failure(format!("the argument '{name}' is {given}, not {wanted}"))
    }

    fn text(&self, i: usize) -> Result<Option<&str>, Error> {
        let Some(value) = self.value(i) else {
            return Ok(None);
        };
        match value.as_str() {
            Some(text) => Ok(Some(text)),
            None => Err(self.wrong(i, "a text")),
        }
    }

    fn needed_text(&self, i: usize) -> Result<&str, Error> {
        self.text(i)?.ok_or_else(|| self.wrong(i, "a text"))
    }

    fn number(&self, i: usize) -> Result<Option<i64>, Error> {
        match self.value(i) {
            Some(value) => match i64::try_from(value.clone()) {
                Ok(number) => Ok(Some(number)),
                Err(_) => Err(self.wrong(i, "a whole number")),
            },
            None => Ok(None),
        }
    }
}

/// White space for `strip` and `split`: also the separators among the control characters.
pub(super) fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

/// `None` for a method that the engine's own crate has.
fn text_method(
    state: &State<'_, '_>,
    text: &str,
    name: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    let of_all = |is_one: fn(char) -> bool| -> Result<Value, Error> {
        let () = from_args(args)?;
        Ok(Value::from(!text.is_empty() && text.chars().all(is_one)))
    };
    let made = match name {
        "format" | "format_map" => return paid_format(state, text, args).map(|()| None),
        "strip" | "lstrip" | "rstrip" => {
            let chars = Arguments::of(args, ["chars"])?;
            let chars = chars.text(0)?;
            let is_outer = |c: char| chars.map_or_else(|| is_space(c), |all| all.contains(c));
            Value::from(match name {
                "strip" => text.trim_matches(is_outer),
                "lstrip" => text.trim_start_matches(is_outer),
                _ => text.trim_end_matches(is_outer),
            })
        }
        "removeprefix" => {
            let args = Arguments::of(args, ["prefix"])?;
            let prefix = args.needed_text(0)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let args = Arguments::of(args, ["suffix"])?;
            let suffix = args.needed_text(0)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "split" | "rsplit" => {
            let args = Arguments::of(args, ["sep", "maxsplit"])?;
            let most = args.number(1)?.unwrap_or(-1);
            let most = usize::try_from(most).unwrap_or(usize::MAX);
            // Each part is a value, which takes more than its text. Messages pay for 40 passes.
            state.consume_fuel((text.len() / 4) as u64)?;
            split(text, args.text(0)?, most, Side::of(name))?
        }
        "partition" | "rpartition" => {
            let args = Arguments::of(args, ["sep"])?;
            partition(text, args.needed_text(0)?, Side::of(name))?
        }
        "splitlines" => {
            let args = Arguments::of(args, ["keepends"])?;
            state.consume_fuel((text.len() / 4) as u64)?;
            lines(text, args.value(0).is_some_and(Value::is_true))
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let args = Arguments::of(args, ["sub", "start", "end"])?;
            let span = Span::of(text, args.number(1)?, args.number(2)?);
            return found(span, args.needed_text(0)?, name).map(Some);
        }
        "startswith" | "endswith" => {
            let args = Arguments::of(args, ["prefix", "start", "end"])?;
            let span = Span::of(text, args.number(1)?, args.number(2)?);
            let is_it = |affix: &str| match span.text {
                Some(text) if name == "startswith" => text.starts_with(affix),
                Some(text) => text.ends_with(affix),
                None => false,
            };
            match args.value(0) {
                Some(all) if all.is_tuple() => {
                    let mut is_any = false;
                    for affix in all.try_iter()? {
                        is_any |= is_it(affix.as_str().ok_or_else(|| args.wrong(0, "of texts"))?);
                    }
                    Value::from(is_any)
                }
                _ => Value::from(is_it(args.needed_text(0)?)),
            }
        }
        "center" | "ljust" | "rjust" => {
            let args = Arguments::of(args, ["width", "fillchar"])?;
            let width = args.number(0)?.ok_or_else(|| args.wrong(0, "a number"))?;
            padded(state, text, width, args.text(1)?.unwrap_or(" "), name)?
        }
        "zfill" => {
            let args = Arguments::of(args, ["width"])?;
            let width = args.number(0)?.ok_or_else(|| args.wrong(0, "a number"))?;
            let (sign, digits) = match text.strip_prefix(['+', '-']) {
                Some(digits) => text.split_at(text.len() - digits.len()),
                None => ("", text),
            };
            let width = width.saturating_sub(sign.len() as i64);
            let filled = padded(state, digits, width, "0", "rjust")?;
            Value::from(format!("{sign}{filled}"))
        }
        "expandtabs" => {
            let args = Arguments::of(args, ["tabsize"])?;
            expanded(state, text, args.number(0)?.unwrap_or(8))?
        }
        "swapcase" => {
            let () = from_args(args)?;
            Value::from(text.chars().fold(String::new(), |mut out, c| {
                if c.is_uppercase() {
                    out.extend(c.to_lowercase());
                } else {
                    out.extend(c.to_uppercase());
                }
                out
            }))
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase().replace('ß', "ss"))
        }
        "capitalize" => {
            let () = from_args(args)?;
            let mut chars = text.chars();
            let first = chars.next().map(char::to_uppercase);
            let rest = chars.as_str().to_lowercase();
            Value::from(
                first
                    .into_iter()
                    .flatten()
                    .chain(rest.chars())
                    .collect::<String>(),
            )
        }
        "title" => {
            let () = from_args(args)?;
            Value::from(titled(text))
        }
        "istitle" => {
            let () = from_args(args)?;
            let is_cased = text.chars().any(char::is_alphabetic);
            Value::from(is_cased && titled(text) == text)
        }
        "encode" => {
            let args = Arguments::of(args, ["encoding", "errors"])?;
            let encoding = args.text(0)?.unwrap_or("utf-8").to_ascii_lowercase();
            match encoding.as_str() {
                "utf-8" | "utf8" | "utf_8" => {}
                "ascii" if text.is_ascii() => {}
                other => return Err(failure(format!("encode knows 'utf-8', not '{other}'"))),
            }
            Value::from_bytes(text.as_bytes().to_vec())
        }
        "join" => {
            let args = Arguments::of(args, ["iterable"])?;
            let items = args.value(0).ok_or_else(|| args.wrong(0, "a list"))?;
            let mut out = Text::new(state);
            for (i, item) in items.try_iter()?.enumerate() {
                state.consume_fuel(PART_FUEL)?;
                out.push(if i == 0 { "" } else { text })?;
                let kind = item.kind();
                let item = item.as_str().ok_or_else(|| {
                    failure(format!(
                        "join: item {i} is {kind}, not a text: use the filter 'join'"
                    ))
                })?;
                out.push(item)?;
            }
            Value::from(out.finish())
        }
        "isdecimal" => of_all(|c| c.is_ascii_digit() || (!c.is_ascii() && is_decimal(c)))?,
        "isdigit" => {
            of_all(|c| c.is_ascii_digit() || matches!(c, '²' | '³' | '¹') || is_decimal(c))?
        }
        "isspace" => of_all(is_space)?,
        "isprintable" => {
            let () = from_args(args)?;
            Value::from(text.chars().all(is_printable))
        }
        "isidentifier" => {
            let () = from_args(args)?;
            let is_word = text.chars().all(|c| c.is_alphanumeric() || c == '_');
            let is_number = text.starts_with(char::is_numeric);
            Value::from(!text.is_empty() && is_word && !is_number)
        }
        _ => return Ok(None),
    };
    Ok(Some(made))
}

/// True for the decimal digits of other scripts.
fn is_decimal(c: char) -> bool {
    use crate::tokenizer::char_class::{contains, ranges};
    static DIGITS: std::sync::LazyLock<Vec<(char, char)>> =
        std::sync::LazyLock::new(|| ranges(r"[\p{Nd}&&\p{Age:15.1}]").unwrap_or_default());
    contains(&DIGITS, c)
}

/// Pays for what `format` makes: its widths may be any, and a field may stand for a large value.
pub(super) fn paid_format(state: &State<'_, '_>, text: &str, args: &[Value]) -> Result<(), Error> {
    let widths = text.split(|c: char| !c.is_ascii_digit());
    let widths = widths.filter(|digits| !digits.is_empty());
    // A number that is too large for this is too large.
    let widths = widths.map(|digits| digits.parse().unwrap_or(u64::MAX));
    let n_bytes = widths.fold(0, u64::saturating_add);
    state.consume_fuel(n_bytes / BYTES_PER_FUEL as u64)?;
    let n_fields = text.bytes().filter(|&b| matches!(b, b'{' | b'%')).count() as u64;
    let mut n_bytes = 0_u64;
    for arg in args {
        n_bytes = n_bytes.saturating_add(str_of(state, arg)?.len() as u64);
    }
    state.consume_fuel(n_bytes.saturating_mul(n_fields) / BYTES_PER_FUEL as u64)
}

/// The end of a text from which a method begins.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Left,
    Right,
}

impl Side {
    fn of(method: &str) -> Self {
        if method.starts_with('r') {
            Self::Right
        } else {
            Self::Left
        }
    }
}

fn split(text: &str, separator: Option<&str>, most: usize, side: Side) -> Result<Value, Error> {
    let n = most.saturating_add(1);
    let parts: Vec<&str> = match (separator, side) {
        (Some(""), _) => return Err(failure("split: the separator is empty".to_owned())),
        (Some(separator), Side::Left) => text.splitn(n, separator).collect(),
        (Some(separator), Side::Right) => {
            let mut parts: Vec<_> = text.rsplitn(n, separator).collect();
            parts.reverse();
            parts
        }
        (None, Side::Left) => words(text, most),
        (None, Side::Right) => words_from_right(text, most),
    };
    Ok(Value::from_iter(parts))
}

fn words(text: &str, most: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        let end = match parts.len() < most {
            true => rest.find(is_space).unwrap_or(rest.len()),
            false => rest.len(),
        };
        let (part, after) = rest.split_at(end);
        parts.push(part);
        rest = after.trim_start_matches(is_space);
    }
    parts
}

fn words_from_right(text: &str, most: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        let space = rest.char_indices().rev().find(|&(_, c)| is_space(c));
        let start = match space {
            Some((at, c)) if parts.len() < most => at + c.len_utf8(),
            _ => 0,
        };
        let (before, part) = rest.split_at(start);
        parts.push(part);
        rest = before.trim_end_matches(is_space);
    }
    parts.reverse();
    parts
}

fn partition(text: &str, separator: &str, side: Side) -> Result<Value, Error> {
    if separator.is_empty() {
        return Err(failure("partition: the separator is empty".to_owned()));
    }
    let parts = match side {
        Side::Left => text.split_once(separator),
        Side::Right => text.rsplit_once(separator),
    };
    let parts = match (parts, side) {
        (Some((before, after)), _) => [before, separator, after],
        (None, Side::Left) => [text, "", ""],
        (None, Side::Right) => ["", "", text],
    };
    Ok(Value::from(Tuple::from(parts.map(Value::from))))
}

fn lines(text: &str, keeps_ends: bool) -> Value {
    let is_end =
        |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut all = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (line, from) = rest.split_at(rest.find(is_end).unwrap_or(rest.len()));
        let n = match from.starts_with("\r\n") {
            true => 2,
            false => from.chars().next().map_or(0, char::len_utf8),
        };
        let (with_end, after) = rest.split_at(line.len() + n);
        all.push(if keeps_ends { with_end } else { line });
        rest = after;
    }
    Value::from_iter(all)
}

/// The part of a text that a method looks at.
struct Span<'t> {
    /// `None` where it begins behind its end.
    text: Option<&'t str>,
    /// Characters before it.
    n_before: usize,
}

impl<'t> Span<'t> {
    fn of(text: &'t str, start: Option<i64>, end: Option<i64>) -> Self {
        let whole = Self {
            text: Some(text),
            n_before: 0,
        };
        if (start, end) == (None, None) {
            return whole;
        }
        let n = text.chars().count();
        let place = |at: i64| {
            let back = usize::try_from(at.unsigned_abs()).unwrap_or(usize::MAX);
            if at < 0 { n.saturating_sub(back) } else { back }
        };
        let (start, end) = (start.map_or(0, place), end.map_or(n, place).min(n));
        let at = |i: usize| text.char_indices().nth(i).map_or(text.len(), |(at, _)| at);
        Self {
            text: match start <= end {
                true => text.get(at(start)..at(end)),
                false => None,
            },
            n_before: start,
        }
    }
}

fn found(span: Span<'_>, wanted: &str, name: &str) -> Result<Value, Error> {
    let text = span.text.unwrap_or_default();
    if name == "count" {
        let n = span.text.map_or(0, |text| text.matches(wanted).count());
        return Ok(Value::from(n));
    }
    let at = match name {
        _ if span.text.is_none() => None,
        "find" | "index" => text.find(wanted),
        _ => text.rfind(wanted),
    };
    let at = at.and_then(|at| text.get(..at));
    match at {
        Some(before) => Ok(Value::from(span.n_before + before.chars().count())),
        None if name.ends_with("find") => Ok(Value::from(-1)),
        None => Err(failure(format!("{name}: the text has no such part"))),
    }
}

/// A text in the middle or at a side of a wider one.
pub(super) fn padded(
    state: &State<'_, '_>,
    text: &str,
    width: i64,
    fill: &str,
    name: &str,
) -> Result<Value, Error> {
    if fill.chars().count() != 1 {
        return Err(failure(format!("{name}: '{fill}' is not one character")));
    }
    let n = text.chars().count();
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(n);
    let before = match name {
        "ljust" => 0,
        "rjust" => missing,
        // Python's: the odd one is on the left where the width is odd.
        _ => missing / 2 + (missing & width & 1),
    };
    let mut out = Text::new(state);
    out.repeat(fill, before)?;
    out.push(text)?;
    out.repeat(fill, missing - before)?;
    Ok(Value::from(out.finish()))
}

fn expanded(state: &State<'_, '_>, text: &str, width: i64) -> Result<Value, Error> {
    let width = usize::try_from(width).unwrap_or(0);
    let mut out = Text::new(state);
    let mut column = 0_usize;
    for c in text.chars() {
        match c {
            '\t' if width > 0 => {
                let n = width - column % width;
                out.repeat(" ", n)?;
                column += n;
            }
            '\t' => {}
            '\n' | '\r' => {
                out.push_char(c)?;
                column = 0;
            }
            _ => {
                out.push_char(c)?;
                column += 1;
            }
        }
    }
    Ok(Value::from(out.finish()))
}

/// Upper case for what follows no letter, lower case for the rest.
fn titled(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut is_inside = false;
    for c in text.chars() {
        if is_inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        is_inside = c.is_alphabetic();
    }
    out
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
