//! [`readable`]: a template's source as the engine reads it, where it reads otherwise than Jinja2
//! with `transformers`' tag.
//!
//! Invariant: lines stay as they are, and so does all that is no literal with an escape and no tag
//! `generation`. Knows no expressions.

/// The source with escapes that the engine knows, and without the tags with which `transformers`
/// marks answers for training: they write nothing, like a condition that always holds.
pub(super) fn readable(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let n_bytes = match from.as_bytes().get(1) {
            Some(b'#') => from.find("#}").map_or(from.len(), |end| end + 2),
            Some(b'%') if tag_of(from) == Some("raw") => raw_bytes(from),
            Some(b'%' | b'{') => tag_bytes(from),
            _ => 1,
        };
        let (tag, after) = from.split_at(n_bytes);
        match tag_of(tag) {
            Some("generation") => out.push_str(&tag.replace("generation", "if true")),
            Some("endgeneration") => out.push_str(&tag.replace("endgeneration", "endif")),
            _ if tag.len() > 1 && !tag.starts_with("{#") && tag_of(tag) != Some("raw") => {
                push_with_literals(&mut out, tag);
            }
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// The inside of the tag that a text begins with.
fn tag_of(text: &str) -> Option<&str> {
    let (inside, _) = text.strip_prefix("{%")?.split_once("%}")?;
    Some(inside.trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+')))
}

/// Bytes until the tag that ends what is not to be read.
fn raw_bytes(text: &str) -> usize {
    let mut at = 0;
    while let Some(begin) = text.get(at..).and_then(|rest| rest.find("{%")) {
        match text.get(at + begin..).and_then(tag_of) {
            Some("endraw") => return at + begin,
            Some(_) => at += begin + 2,
            // No tag ends any more.
            None => break,
        }
    }
    text.len()
}

/// Bytes of a tag or expression, in whose literals its end may be.
fn tag_bytes(text: &str) -> usize {
    let bytes = text.as_bytes();
    let is_expression = bytes.get(1) == Some(&b'{');
    let (mut at, mut depth) = (2, 0_usize);
    while let Some(&byte) = bytes.get(at) {
        let next = bytes.get(at + 1);
        match byte {
            b'\'' | b'"' => {
                at += literal_bytes(text.get(at..).unwrap_or_default());
                continue;
            }
            b'%' if !is_expression && next == Some(&b'}') => return at + 2,
            b'{' => depth += 1,
            b'}' if depth > 0 => depth -= 1,
            b'}' if is_expression && next == Some(&b'}') => return at + 2,
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

/// Bytes of the literal that a text begins with; all where it has no end.
fn literal_bytes(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 1;
    while let Some(byte) = bytes.get(at) {
        match byte {
            b'\\' => at += 1,
            _ if bytes.first() == Some(byte) => return at + 1,
            _ => {}
        }
        at += 1;
    }
    bytes.len()
}

fn push_with_literals(out: &mut String, tag: &str) {
    let mut rest = tag;
    while let Some(at) = rest.find(['\'', '"']) {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let (literal, after) = from.split_at(literal_bytes(from));
        // What Python refuses, the engine refuses, too: with the right message.
        match with_known_escapes(literal) {
            Some(known) => out.push_str(&known),
            None => out.push_str(literal),
        }
        rest = after;
    }
    out.push_str(rest);
}

/// A literal with Python's escapes, with those that the engine has: `None` where one is not whole.
fn with_known_escapes(literal: &str) -> Option<String> {
    let mut out = String::with_capacity(literal.len());
    let mut rest = literal;
    while let Some(at) = rest.find('\\') {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let mut chars = from.chars();
        chars.next();
        let letter = chars.next()?;
        rest = chars.as_str();
        let c = match letter {
            'a' => '\x07',
            'v' => '\x0b',
            'x' => hexadecimal(&mut rest, 2)?,
            'u' => hexadecimal(&mut rest, 4)?,
            'U' => hexadecimal(&mut rest, 8)?,
            '0'..='7' => {
                let digits = from.bytes().skip(1).take(3);
                let n = digits.take_while(|b| matches!(b, b'0'..=b'7')).count();
                let digits = from.get(1..=n)?;
                rest = from.get(n + 1..)?;
                char::from_u32(u32::from_str_radix(digits, 8).ok()?)?
            }
            'b' | 'f' | 'n' | 'r' | 't' | '\'' | '"' | '\\' => {
                out.push('\\');
                out.push(letter);
                continue;
            }
            _ => {
                out.push_str("\\\\");
                out.push(letter);
                continue;
            }
        };
        match c {
            '\'' | '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            _ => out.push(c),
        }
    }
    out.push_str(rest);
    Some(out)
}

/// The character of so many digits. Of two halves of a surrogate pair it is the character that they
/// are elsewhere; one alone, which no text can have, becomes U+FFFD.
fn hexadecimal(rest: &mut &str, n: usize) -> Option<char> {
    let code = take_digits(rest, n)?;
    if !(0xd800..0xe000).contains(&code) {
        return char::from_u32(code);
    }
    let mut after = *rest;
    let low = after.strip_prefix("\\u").and_then(|digits| {
        after = digits;
        take_digits(&mut after, 4)
    });
    let units = [code, low.unwrap_or_default()].map(|unit| unit as u16);
    match char::decode_utf16(units).next() {
        Some(Ok(c)) => {
            *rest = after;
            Some(c)
        }
        _ => Some(char::REPLACEMENT_CHARACTER),
    }
}

fn take_digits(rest: &mut &str, n: usize) -> Option<u32> {
    let (digits, after) = rest.split_at_checked(n)?;
    let is_number = digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    *rest = after;
    is_number.then(|| u32::from_str_radix(digits, 16).ok())?
}
