//! Which characters are letters, marks, numbers and white space.
//!
//! Invariant: the classes are those of the Unicode general categories L, M and N and of the property
//! White_Space, so that splitting equals the regular expressions that vocabularies are trained with.

use regex_syntax::hir::{Class, ClassUnicode, HirKind};

use super::TokenizerError;

/// The class of a character.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CharClass {
    /// `\p{L}`
    Letter,
    /// `\p{M}`
    Mark,
    /// `\p{N}`
    Number,
    /// `\s`
    Space,
    /// Everything else.
    Other,
}

/// The classes of all characters.
#[derive(Clone, Debug)]
pub(super) struct CharClasses {
    letters: Vec<(char, char)>,
    marks: Vec<(char, char)>,
}

impl CharClasses {
    pub(super) fn new() -> Result<Self, TokenizerError> {
        Ok(Self {
            letters: ranges(r"\p{L}")?,
            marks: ranges(r"\p{M}")?,
        })
    }

    pub(super) fn of(&self, c: char) -> CharClass {
        match c {
            'a'..='z' | 'A'..='Z' => CharClass::Letter,
            '0'..='9' => CharClass::Number,
            '\t'..='\r' | ' ' => CharClass::Space,
            '\0'..='\x7F' => CharClass::Other,
            _ if c.is_whitespace() => CharClass::Space,
            _ if contains(&self.letters, c) => CharClass::Letter,
            // The standard library's numbers are Nd, Nl and No: all of N.
            _ if c.is_numeric() => CharClass::Number,
            _ if contains(&self.marks, c) => CharClass::Mark,
            _ => CharClass::Other,
        }
    }
}

fn contains(ranges: &[(char, char)], c: char) -> bool {
    let after = ranges.partition_point(|&(first, _)| first <= c);
    after
        .checked_sub(1)
        .and_then(|i| ranges.get(i))
        .is_some_and(|&(_, last)| c <= last)
}

fn ranges(class: &'static str) -> Result<Vec<(char, char)>, TokenizerError> {
    let fail = |reason: String| TokenizerError::CharClass { class, reason };
    let hir = regex_syntax::Parser::new()
        .parse(class)
        .map_err(|e| fail(e.to_string()))?;
    match hir.kind() {
        HirKind::Class(Class::Unicode(set)) => Ok(pairs(set)),
        other => Err(fail(format!("not a set of characters: {other:?}"))),
    }
}

fn pairs(set: &ClassUnicode) -> Vec<(char, char)> {
    set.ranges()
        .iter()
        .map(|range| (range.start(), range.end()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn characters_of_each_class() {
        let classes = CharClasses::new().unwrap();
        let of = |class| move |text: &str| text.chars().all(|c| classes.clone().of(c) == class);
        assert!(of(CharClass::Letter)("aZéßЖ漢あ한ªʰאǅ𝒳"));
        let classes = CharClasses::new().unwrap();
        let of = |class| move |text: &str| text.chars().all(|c| classes.clone().of(c) == class);
        assert!(of(CharClass::Number)("09٣²½Ⅷ〇①"));
        let classes = CharClasses::new().unwrap();
        for c in ['\u{301}', '\u{93E}', '\u{20E3}', '\u{FE0F}'] {
            assert_eq!(classes.of(c), CharClass::Mark, "{c:?}");
        }
        for c in [
            '\t', '\n', '\r', ' ', '\u{85}', '\u{A0}', '\u{2003}', '\u{3000}',
        ] {
            assert_eq!(classes.of(c), CharClass::Space, "{c:?}");
        }
        for c in [
            '\0', '\u{1F}', '_', '€', '😀', '\u{200B}', '\u{200D}', '\u{FEFF}', 'Ⓐ',
        ] {
            assert_eq!(classes.of(c), CharClass::Other, "{c:?}");
        }
    }
}
