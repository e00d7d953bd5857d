//! Bytes as Python writes them between quotes, which is how GGUF has the tokens of RWKV.
//!
//! Invariant: what [`escape`] writes, [`unescape`] reads. Knows no tokens.

/// The bytes of a token's text, where it has no other escapes than Python writes of bytes.
pub(super) fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            bytes.push(byte);
            continue;
        }
        bytes.push(match rest.next()? {
            b't' => b'\t',
            b'n' => b'\n',
            b'r' => b'\r',
            b'x' => {
                let digit = |byte: Option<u8>| char::from(byte?).to_digit(16);
                let (high, low) = (digit(rest.next())?, digit(rest.next())?);
                u8::try_from(16 * high + low).ok()?
            }
            same @ (b'\\' | b'\'' | b'"') => same,
            _ => return None,
        });
    }
    Some(bytes)
}

/// The text of a token, as Python writes its bytes between the quotes.
pub(crate) fn escape(bytes: &[u8]) -> String {
    // In single quotes, unless only those are in it.
    let in_single = !bytes.contains(&b'\'') || bytes.contains(&b'"');
    let mut text = String::with_capacity(bytes.len());
    for &byte in bytes {
        match byte {
            b'\t' => text.push_str("\\t"),
            b'\n' => text.push_str("\\n"),
            b'\r' => text.push_str("\\r"),
            b'\\' => text.push_str("\\\\"),
            b'\'' if in_single => text.push_str("\\'"),
            b' '..=b'~' => text.push(char::from(byte)),
            _ => text.push_str(&format!("\\x{byte:02x}")),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_those_of_python() {
        for (text, bytes) in [
            (r"a\tb\nc\rd", &b"a\tb\nc\rd"[..]),
            (r"\\x41", b"\\x41"),
            (r"\x00\x7f\x80\xff", b"\0\x7f\x80\xff"),
            ("it's", b"it's"),
            ("say \"", b"say \""),
            (r#"\'""#, b"'\""),
            (r"\xe4\xbd", b"\xe4\xbd"),
        ] {
            assert_eq!(unescape(text).as_deref(), Some(bytes));
            assert_eq!(escape(bytes), text);
        }
        // Others write text as it is.
        assert_eq!(unescape("é").unwrap(), "é".as_bytes());
        for wrong in [
            "\\", "\\x", "\\x4", "\\xg1", "\\x4g", "\\q", "\\0", "\\u0041",
        ] {
            assert_eq!(unescape(wrong), None, "{wrong}");
        }
    }
}
