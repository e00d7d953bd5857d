//! The alphabet of byte-level BPE: every byte written as one printable character.
//!
//! Invariant: [`byte_to_char`] and [`char_to_byte`] are inverse to each other. Source: the GPT-2
//! release (`bytes_to_unicode`): printable Latin-1 bytes represent themselves, the 68 others are
//! written, in order, as the characters from U+0100 on.

const fn is_itself(byte: u8) -> bool {
    matches!(byte, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF)
}

/// The character that represents `byte`.
pub(super) fn byte_to_char(byte: u8) -> char {
    if is_itself(byte) {
        return char::from(byte);
    }
    let rank = match byte {
        0x00..=0x20 => u32::from(byte),
        0x7F..=0xA0 => u32::from(byte) - 0x7F + 0x21,
        _ => 0x43,
    };
    char::from_u32(0x100 + rank).unwrap_or(char::REPLACEMENT_CHARACTER)
}

/// The byte that `c` represents, if it is in the alphabet.
pub(super) fn char_to_byte(c: char) -> Option<u8> {
    match u32::from(c) {
        code @ 0..=0xFF => u8::try_from(code).ok().filter(|&byte| is_itself(byte)),
        code @ 0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        code @ 0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

/// `text` with every byte written as its character.
pub(super) fn escape(text: &str) -> String {
    text.bytes().map(byte_to_char).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_has_its_own_character() {
        let chars: std::collections::BTreeSet<char> = (0..=255).map(byte_to_char).collect();
        assert_eq!(chars.len(), 256);
        for byte in 0..=255u8 {
            assert_eq!(char_to_byte(byte_to_char(byte)), Some(byte));
        }
        let n = (0..0x11_0000)
            .filter_map(char::from_u32)
            .filter_map(char_to_byte)
            .count();
        assert_eq!(n, 256);
    }

    #[test]
    fn known_characters() {
        assert_eq!(byte_to_char(b' '), 'Ġ');
        assert_eq!(byte_to_char(b'\n'), 'Ċ');
        assert_eq!(byte_to_char(0xAD), 'Ń');
        assert_eq!(escape("é a"), "Ã©Ġa");
    }
}
