//! `rwkv_vocab_v20230424.txt`: the vocabulary of RWKV's "world" models, a token a line: its id, its
//! text or bytes as Python writes them, and how many bytes there are.
//!
//! Invariant: a line that is not of this form is an error with its number. Knows nothing of how
//! text is cut.

use std::path::Path;

use super::super::{Keys, ModelFileError};
use crate::gguf::Array;
use crate::tokenizer::escape;

/// The file in the model's directory.
pub(super) const FILE: &str = "rwkv_vocab_v20230424.txt";

/// Kinds of tokens, as GGUF counts them.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;

/// Most tokens that are read: ids of published vocabularies end at 65529.
const MAX_TOKENS: usize = 1 << 20;

/// Writes the tokenizer of a directory with this file, with `n_tokens` at least.
///
/// Token 0 is none of the file: it begins and ends texts, whatever configs say, which name tokens
/// of other vocabularies.
pub(super) fn translate(
    directory: &Path,
    n_tokens: usize,
    keys: &mut Keys,
) -> Result<(), ModelFileError> {
    let path = directory.join(FILE);
    let file = std::fs::read_to_string(&path).map_err(|source| ModelFileError::Io {
        attempt: "read",
        path: path.clone(),
        source,
    })?;
    let (mut texts, mut kinds) = (vec!["<s>".to_owned()], vec![CONTROL]);
    for (number, line) in (1..).zip(file.lines()) {
        let wrong = |reason: String| ModelFileError::Format {
            path: path.clone(),
            reason: format!("line {number}: {reason}"),
        };
        let (id, bytes) = token(line).ok_or_else(|| {
            wrong("not an id, a string or bytes of Python, and how many bytes".to_owned())
        })?;
        if id < texts.len() || id >= MAX_TOKENS {
            let reason = format!(
                "id {id} is not above {} and below {MAX_TOKENS}",
                texts.len() - 1
            );
            return Err(wrong(reason));
        }
        fill(&mut texts, &mut kinds, id);
        texts.push(escape(&bytes));
        kinds.push(NORMAL);
    }
    fill(&mut texts, &mut kinds, n_tokens.min(MAX_TOKENS));
    keys.set_whole("tokenizer.ggml.model", "rwkv");
    keys.set_whole("tokenizer.ggml.tokens", Array::String(texts));
    keys.set_whole("tokenizer.ggml.token_type", Array::I32(kinds));
    for role in ["bos", "eos"] {
        keys.set_whole(&format!("tokenizer.ggml.{role}_token_id"), 0u32);
    }
    Ok(())
}

/// Ids that no line has are called as llama.cpp's converter calls them.
fn fill(texts: &mut Vec<String>, kinds: &mut Vec<i32>, n_tokens: usize) {
    for id in texts.len()..n_tokens {
        texts.push(format!("[PAD{id}]"));
        kinds.push(UNUSED);
    }
}

/// The id and the bytes of a line, of which the number at its end is right.
fn token(line: &str) -> Option<(usize, Vec<u8>)> {
    let (id, rest) = line.split_once(' ')?;
    let (literal, n_bytes) = rest.rsplit_once(' ')?;
    let bytes = literal_bytes(literal)?;
    (n_bytes.parse() == Ok(bytes.len()) && !bytes.is_empty()).then_some((id.parse().ok()?, bytes))
}

/// A kind of literals of Python.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Literal {
    Text,
    Bytes,
}

/// An item between the quotes of a literal: a character, or an escaped number, which is a byte in
/// bytes and a character in a text.
enum Item {
    Char(char),
    Number(u32),
}

/// The meaning of a literal of Python: bytes, or the UTF-8 of a text.
fn literal_bytes(literal: &str) -> Option<Vec<u8>> {
    let (kind, quoted) = match literal.strip_prefix('b') {
        Some(quoted) => (Literal::Bytes, quoted),
        None => (Literal::Text, literal),
    };
    let quote = quoted.chars().next().filter(|c| ['\'', '"'].contains(c))?;
    let inner = quoted.strip_prefix(quote)?.strip_suffix(quote)?;
    let mut bytes = Vec::with_capacity(inner.len());
    let mut rest = inner.chars();
    while let Some(c) = rest.next() {
        let item = match c {
            '\\' => escaped(&mut rest, kind)?,
            // The end of the literal, before the end of the text.
            _ if c == quote => return None,
            _ => Item::Char(c),
        };
        let c = match (kind, item) {
            (Literal::Bytes, Item::Number(number)) => {
                bytes.push(u8::try_from(number).ok()?);
                continue;
            }
            (Literal::Bytes, Item::Char(c)) if !c.is_ascii() => return None,
            (_, Item::Char(c)) => c,
            (Literal::Text, Item::Number(number)) => char::from_u32(number)?,
        };
        bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
    }
    Some(bytes)
}

/// The meaning of an escape, from behind its `\`.
fn escaped(rest: &mut std::str::Chars<'_>, kind: Literal) -> Option<Item> {
    let n_digits = match rest.next()? {
        't' => return Some(Item::Char('\t')),
        'n' => return Some(Item::Char('\n')),
        'r' => return Some(Item::Char('\r')),
        same @ ('\\' | '\'' | '"') => return Some(Item::Char(same)),
        'x' => 2,
        'u' if kind == Literal::Text => 4,
        'U' if kind == Literal::Text => 8,
        _ => return None,
    };
    let mut value = 0u32;
    for _ in 0..n_digits {
        value = value.checked_mul(16)? + rest.next()?.to_digit(16)?;
    }
    Some(Item::Number(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_python_reads_them() {
        for (line, id, bytes) in [
            (r"1 '\x00' 1", 1, &b"\0"[..]),
            (r"129 b'\x80' 1", 129, b"\x80"),
            // In a string it is the character of that number, which has two bytes.
            (r"300 '\x85' 2", 300, b"\xc2\x85"),
            (r"261 '\n\n' 2", 261, b"\n\n"),
            (r"33 ' ' 1", 33, b" "),
            (r"300 '  a b' 5", 300, b"  a b"),
            (r#"40 "'" 1"#, 40, b"'"),
            (r#"300 '\'"' 2"#, 300, b"'\""),
            (r"93 '\\' 1", 93, b"\\"),
            (r"300 b'\xe4\xbd' 2", 300, b"\xe4\xbd"),
            ("300 '你' 3", 300, "你".as_bytes()),
            (r"300 '\u3000' 3", 300, "\u{3000}".as_bytes()),
            (r"300 '\U0001f600' 4", 300, "😀".as_bytes()),
        ] {
            assert_eq!(token(line), Some((id, bytes.to_vec())), "{line}");
        }
        for wrong in [
            "",
            "1",
            "1 'a'",
            "1 a 1",
            "1 'a' 2",
            "x 'a' 1",
            "1 '' 0",
            "1 'a 1",
            "1 'a'b' 3",
            r"1 '\' 1",
            r"1 '\q' 1",
            r"1 b'\u0041' 1",
            r"1 '\ud800' 3",
            "1 b'é' 1",
        ] {
            assert_eq!(token(wrong), None, "{wrong}");
        }
    }
}
