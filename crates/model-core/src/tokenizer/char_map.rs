//! [`CharMap`]: the table by which a SentencePiece model normalises a text before it is cut into
//! pieces.
//!
//! Invariant: a table is checked when it is read, and looking a text up in it never leaves it.
//! Source of the table's layout: SentencePiece's `precompiled_charsmap`, a double-array trie (Aoe,
//! 1989; the units of Darts-clone) followed by the replacements.

use super::TokenizerError;

/// Replacements of beginnings of texts.
#[derive(Clone, Debug)]
pub(super) struct CharMap {
    /// Units of the trie.
    trie: Vec<u32>,
    /// Replacements, each with a zero behind it.
    replacements: String,
}

/// A beginning that is replaced.
struct PrefixReplacement<'m> {
    /// Its length in bytes.
    len: usize,
    by: &'m str,
}

impl CharMap {
    /// Reads a table: the size of its trie in bytes, the trie, the replacements.
    pub(super) fn new(bytes: &[u8]) -> Result<Self, TokenizerError> {
        let wrong = |reason: String| TokenizerError::CharMap { reason };
        let (words, _) = bytes.as_chunks::<4>();
        let Some((size, units)) = words.split_first() else {
            return Err(wrong(format!("{} bytes are no table", bytes.len())));
        };
        let n_bytes = u32::from_le_bytes(*size) as usize;
        let n_units = n_bytes / 4;
        if n_units == 0 || !n_bytes.is_multiple_of(4) || n_units > units.len() {
            let rest = bytes.len() - 4;
            return Err(wrong(format!(
                "a trie of {n_bytes} bytes in {rest} is not possible"
            )));
        }
        let trie = units.iter().take(n_units);
        let trie = trie.map(|unit| u32::from_le_bytes(*unit)).collect();
        let replacements = bytes.get(4 + n_bytes..).unwrap_or_default().to_vec();
        let replacements = String::from_utf8(replacements)
            .map_err(|error| wrong(format!("its replacements are no UTF-8: {error}")))?;
        Ok(Self { trie, replacements })
    }

    pub(super) fn apply(&self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(first) = rest.chars().next() {
            let len = match self.longest(rest) {
                Some(replaced) => {
                    out.push_str(replaced.by);
                    replaced.len
                }
                None => {
                    out.push(first);
                    first.len_utf8()
                }
            };
            rest = rest.get(len..).unwrap_or_default();
        }
        out
    }

    /// The longest beginning of `text` that is replaced.
    fn longest(&self, text: &str) -> Option<PrefixReplacement<'_>> {
        let unit = |at: u32| self.trie.get(at as usize).copied();
        let mut found = None;
        let mut node = offset(unit(0)?);
        for (at, byte) in text.bytes().enumerate() {
            node ^= u32::from(byte);
            let Some(child) = unit(node).filter(|&child| label(child) == u32::from(byte)) else {
                break;
            };
            node ^= offset(child);
            let len = at + 1;
            if has_value(child)
                && text.is_char_boundary(len)
                && let Some(value) = unit(node)
                && let Some(by) = self.replacement(value & 0x7FFF_FFFF)
            {
                found = Some(PrefixReplacement { len, by });
            }
        }
        found
    }

    /// The replacement that begins at a place.
    fn replacement(&self, at: u32) -> Option<&str> {
        let rest = self.replacements.get(at as usize..)?;
        rest.split('\0').next()
    }
}

/// True if a value belongs to the text that ends here.
fn has_value(unit: u32) -> bool {
    (unit >> 8) & 1 == 1
}

/// The byte that leads to a node; no byte where the unit is a value.
fn label(unit: u32) -> u32 {
    unit & ((1 << 31) | 0xFF)
}

/// The place of the children of a node, relative to it.
fn offset(unit: u32) -> u32 {
    (unit >> 10) << ((unit & (1 << 9)) >> 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Marks a node to which a value belongs.
    const VALUE: u32 = 1 << 8;

    /// Unit of a node: where its children are, and the byte that leads to it.
    fn node(offset: u32, byte: u8) -> u32 {
        (offset << 10) | u32::from(byte)
    }

    /// `A` becomes `a`, `AB` becomes `x y`, a tab becomes a space.
    fn table() -> Vec<u8> {
        let mut trie = vec![0u32; 512];
        trie[0] = node(256, 0);
        // Children of the root are at 256 ^ byte.
        trie[256 ^ 0x41] = node(128, 0x41) | VALUE;
        let a = (256 ^ 0x41) ^ 128;
        trie[a] = 1 << 31;
        trie[a ^ 0x42] = node(64, 0x42) | VALUE;
        trie[(a ^ 0x42) ^ 64] = (1 << 31) | 2;
        trie[256 ^ 0x09] = node(32, 0x09) | VALUE;
        trie[(256 ^ 0x09) ^ 32] = (1 << 31) | 6;
        let mut bytes = (trie.len() as u32 * 4).to_le_bytes().to_vec();
        bytes.extend(trie.iter().flat_map(|unit| unit.to_le_bytes()));
        bytes.extend(b"a\0x y\0 \0");
        bytes
    }

    #[test]
    fn the_longest_beginning_is_replaced() {
        let map = CharMap::new(&table()).unwrap();
        assert_eq!(map.apply("AABé\tB"), "ax yé B");
        assert_eq!(map.apply(""), "");
    }

    #[test]
    fn broken_tables_are_refused_or_harmless() {
        for bytes in [
            &[][..],
            &[1, 0],
            &[8, 0, 0, 0, 1, 2, 3, 4],
            &[3, 0, 0, 0, 9],
        ] {
            assert!(CharMap::new(bytes).is_err(), "{bytes:?}");
        }
        // Every unit of a table that points anywhere.
        for word in [0xFFFF_FFFFu32, 0x7FFF_FF41, 0x0000_0141, 0x8000_0041] {
            let mut bytes = 64u32.to_le_bytes().to_vec();
            bytes.extend(std::iter::repeat_n(word.to_le_bytes(), 16).flatten());
            let map = CharMap::new(&bytes).unwrap();
            map.apply("AAAA é\u{1F600}");
        }
        let mut bytes = table();
        bytes.push(0xFF);
        assert!(CharMap::new(&bytes).is_err());
    }
}
