//! [`text_method`]: Python's methods of texts.
//!
//! Invariant: each gives what Python's gives, and what it makes is paid for before it is made.
//! Knows no lists and dictionaries.

use std::sync::LazyLock;

use minijinja::value::{Tuple, from_args};
use minijinja::{Error, State, Value};

use super::methods::{Arguments, failure};
use super::python::{BYTES_PER_FUEL, Text, is_printable, str_of};
use crate::tokenizer::char_class::{contains, ranges};

/// White space for `strip` and `split`: also the separators among the control characters.
fn is_space(c: char) -> bool {
    c.is_whitespace() || matches!(c, '\x1c'..='\x1f')
}

/// `None` for a method that the engine's own crate has.
pub(super) fn text_method(
    state: &State<'_, '_>,
    text: &str,
    name: &str,
    args: &[Value],
) -> Result<Option<Value>, Error> {
    match name {
        "format" | "format_map" => paid_format(state, text, args).map(|()| None),
        "strip" | "lstrip" | "rstrip" | "removeprefix" | "removesuffix" => {
            trimmed(text, name, args).map(Some)
        }
        "split" | "rsplit" | "partition" | "rpartition" | "splitlines" => {
            // Each part is a value, which takes more than its text. Messages pay for 40 passes.
            state.consume_fuel((text.len() / 4) as u64)?;
            parts(text, name, args).map(Some)
        }
        "find" | "rfind" | "index" | "rindex" | "count" => found(text, name, args).map(Some),
        "startswith" | "endswith" => has_affix(text, name, args).map(Some),
        "center" | "ljust" | "rjust" | "zfill" | "expandtabs" => {
            widened(state, text, name, args).map(Some)
        }
        "swapcase" | "casefold" | "capitalize" | "title" => {
            let () = from_args(args)?;
            Ok(Some(Value::from(in_case(text, name))))
        }
        "join" => joined(state, text, args).map(Some),
        "encode" => encoded(text, args).map(Some),
        _ => match is_of_class(text, name) {
            Some(is_it) => {
                let () = from_args(args)?;
                Ok(Some(Value::from(is_it)))
            }
            None => Ok(None),
        },
    }
}

/// True for what is taken from the ends of a text: these characters, or white space.
pub(super) fn outer(chars: Option<&str>) -> impl Fn(char) -> bool {
    move |c| chars.map_or_else(|| is_space(c), |chars| chars.contains(c))
}

/// A text without what is at its ends.
fn trimmed(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let args = Arguments::of(args, ["chars"])?;
    Ok(Value::from(match name {
        "strip" => text.trim_matches(outer(args.text(0)?)),
        "lstrip" => text.trim_start_matches(outer(args.text(0)?)),
        "rstrip" => text.trim_end_matches(outer(args.text(0)?)),
        "removeprefix" => text.strip_prefix(args.needed_text(0)?).unwrap_or(text),
        _ => text.strip_suffix(args.needed_text(0)?).unwrap_or(text),
    }))
}

/// The kind of all characters of a text.
fn parts(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    if name == "splitlines" {
        let args = Arguments::of(args, ["keepends"])?;
        let ends = if args.is_true(0) {
            Ends::Kept
        } else {
            Ends::Dropped
        };
        return Ok(Value::from_iter(lines(text, ends)));
    }
    let side = if name.starts_with('r') {
        Side::Right
    } else {
        Side::Left
    };
    if name.ends_with("partition") {
        let args = Arguments::of(args, ["sep"])?;
        return partition(text, args.needed_text(0)?, side);
    }
    let args = Arguments::of(args, ["sep", "maxsplit"])?;
    let most = args.number(1)?.unwrap_or(-1);
    split(
        text,
        args.text(0)?,
        usize::try_from(most).unwrap_or(usize::MAX),
        side,
    )
}

/// The place of a text in another, or its count.
fn found(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let args = Arguments::of(args, ["sub", "start", "end"])?;
    let span = Span::of(text, args.number(1)?, args.number(2)?);
    let wanted = args.needed_text(0)?;
    let at = match (span.text, name) {
        (None, "count") => return Ok(Value::from(0)),
        (Some(text), "count") => return Ok(Value::from(text.matches(wanted).count())),
        (Some(text), "find" | "index") => text.find(wanted),
        (Some(text), _) => text.rfind(wanted),
        (None, _) => None,
    };
    let before = at.and_then(|at| span.text.unwrap_or_default().get(..at));
    match before {
        Some(before) => Ok(Value::from(span.n_before + before.chars().count())),
        None if name.ends_with("find") => Ok(Value::from(-1)),
        None => Err(failure(format!("{name}: the text has no such part"))),
    }
}

/// True if a text begins or ends with another, or with one of a tuple.
fn has_affix(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let args = Arguments::of(args, ["prefix", "start", "end"])?;
    let span = Span::of(text, args.number(1)?, args.number(2)?);
    let has = |affix: &str| match span.text {
        Some(text) if name == "startswith" => text.starts_with(affix),
        Some(text) => text.ends_with(affix),
        None => false,
    };
    let Some(all) = args.value(0).filter(|affix| affix.is_tuple()) else {
        return Ok(Value::from(has(args.needed_text(0)?)));
    };
    let mut has_any = false;
    for affix in all.try_iter()? {
        has_any |= has(affix.as_str().ok_or_else(|| args.wrong(0, "of texts"))?);
    }
    Ok(Value::from(has_any))
}

/// A text with something before, behind or in it.
fn widened(state: &State<'_, '_>, text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    if name == "expandtabs" {
        let args = Arguments::of(args, ["tabsize"])?;
        return expanded(state, text, args.number(0)?.unwrap_or(8));
    }
    let args = Arguments::of(args, ["width", "fillchar"])?;
    let width = args
        .number(0)?
        .ok_or_else(|| args.wrong(0, "a whole number"))?;
    if name != "zfill" {
        return padded(state, text, width, args.text(1)?.unwrap_or(" "), name);
    }
    let digits = text.strip_prefix(['+', '-']).unwrap_or(text);
    let (sign, digits) = text.split_at(text.len() - digits.len());
    let width = width.saturating_sub(sign.len() as i64);
    let filled = padded(state, digits, width, "0", "rjust")?;
    Ok(Value::from(format!("{sign}{filled}")))
}

/// A text in other letters.
fn in_case(text: &str, name: &str) -> String {
    match name {
        "swapcase" => text.chars().fold(String::new(), |mut out, c| {
            if c.is_uppercase() {
                out.extend(c.to_lowercase());
            } else {
                out.extend(c.to_uppercase());
            }
            out
        }),
        "casefold" => text.to_lowercase().replace('ß', "ss"),
        "capitalize" => {
            let mut chars = text.chars();
            let first = chars.next().map(char::to_uppercase);
            let rest = chars.as_str().to_lowercase();
            first.into_iter().flatten().chain(rest.chars()).collect()
        }
        _ => titled(text),
    }
}

fn joined(state: &State<'_, '_>, separator: &str, args: &[Value]) -> Result<Value, Error> {
    let args = Arguments::of(args, ["iterable"])?;
    let items = args.value(0).ok_or_else(|| args.wrong(0, "a list"))?;
    let mut out = Text::new(state);
    for (i, item) in items.try_iter()?.enumerate() {
        state.consume_fuel(1)?;
        out.push(if i == 0 { "" } else { separator })?;
        let kind = item.kind();
        let item = item.as_str().ok_or_else(|| {
            failure(format!(
                "join: item {i} is {kind}, not a text: use the filter 'join'"
            ))
        })?;
        out.push(item)?;
    }
    Ok(Value::from(out.finish()))
}

fn encoded(text: &str, args: &[Value]) -> Result<Value, Error> {
    let args = Arguments::of(args, ["encoding", "errors"])?;
    let encoding = args.text(0)?.unwrap_or("utf-8").to_ascii_lowercase();
    match encoding.as_str() {
        "utf-8" | "utf8" | "utf_8" => {}
        "ascii" if text.is_ascii() => {}
        other => return Err(failure(format!("encode knows 'utf-8', not '{other}'"))),
    }
    Ok(Value::from_bytes(text.as_bytes().to_vec()))
}

/// True if a text is what a method asks: `None` for a method that asks nothing.
fn is_of_class(text: &str, name: &str) -> Option<bool> {
    let of_all = |is_one: fn(char) -> bool| !text.is_empty() && text.chars().all(is_one);
    Some(match name {
        "isdecimal" => of_all(is_decimal),
        "isdigit" => of_all(|c| matches!(c, '²' | '³' | '¹') || is_decimal(c)),
        "isspace" => of_all(is_space),
        "isprintable" => text.chars().all(is_printable),
        "istitle" => text.chars().any(char::is_alphabetic) && titled(text) == text,
        "isidentifier" => {
            of_all(|c| c.is_alphanumeric() || c == '_') && !text.starts_with(char::is_numeric)
        }
        _ => return None,
    })
}

/// True for the decimal digits of all scripts.
fn is_decimal(c: char) -> bool {
    static DIGITS: LazyLock<Vec<(char, char)>> =
        LazyLock::new(|| ranges(r"[\p{Nd}&&\p{Age:15.1}]").unwrap_or_default());
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
        let end = rest.find(is_space).filter(|_| parts.len() < most);
        let end = end.unwrap_or(rest.len());
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

/// True if lines keep their ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    Kept,
    Dropped,
}

/// The lines of a text: `splitlines`.
pub(super) fn lines(text: &str, ends: Ends) -> Vec<&str> {
    let is_end =
        |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut all = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let (line, from) = rest.split_at(rest.find(is_end).unwrap_or(rest.len()));
        let n = if from.starts_with("\r\n") {
            2
        } else {
            from.chars().next().map_or(0, char::len_utf8)
        };
        let (with_end, after) = rest.split_at(line.len() + n);
        all.push(match ends {
            Ends::Kept => with_end,
            Ends::Dropped => line,
        });
        rest = after;
    }
    all
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
            text: if start <= end {
                text.get(at(start)..at(end))
            } else {
                None
            },
            n_before: start,
        }
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
