//! Which characters are letters, marks, numbers and white space.
//!
//! Invariant: the classes are those of the Unicode general categories L, M and N and of the
//! property White_Space, so that splitting equals the regular expressions that vocabularies are
//! trained with; frozen at Unicode 15.1, so that a newer table never changes the tokens of a text
//! (characters that are younger are symbols, as they are for llama.cpp).

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

/// The case of a letter or mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LetterCase {
    /// `[\p{Lu}\p{Lt}]`
    Upper,
    /// `\p{Ll}`
    Lower,
    /// `[\p{Lm}\p{Lo}\p{M}]`: those that have none.
    Both,
}

/// The classes of all characters.
#[derive(Clone, Debug)]
pub(super) struct CharClasses {
    letters: Vec<(char, char)>,
    marks: Vec<(char, char)>,
    numbers: Vec<(char, char)>,
    upper: Vec<(char, char)>,
    lower: Vec<(char, char)>,
    accents: Vec<(char, char)>,
    punctuation: Vec<(char, char)>,
    controls: Vec<(char, char)>,
    decimals: Vec<(char, char)>,
}

impl CharClasses {
    pub(super) fn new() -> Result<Self, TokenizerError> {
        Ok(Self {
            letters: ranges(r"[\p{L}&&\p{Age:15.1}]")?,
            marks: ranges(r"[\p{M}&&\p{Age:15.1}]")?,
            numbers: ranges(r"[\p{N}&&\p{Age:15.1}]")?,
            upper: ranges(r"[[\p{Lu}\p{Lt}]&&\p{Age:15.1}]")?,
            lower: ranges(r"[\p{Ll}&&\p{Age:15.1}]")?,
            // What BERT drops and cuts at: the tables of the reference are those of Unicode 8.0.
            accents: ranges(r"[[\p{Mn}\x{1734}]&&\p{Age:8.0}]")?,
            punctuation: ranges(r"[[\p{P}\x{166D}\x{111C9}]&&\p{Age:8.0}]")?,
            decimals: ranges(r"[\p{Nd}&&\p{Age:15.1}]")?,
            controls: ranges(r"[\p{Cc}\p{Co}[\p{Cf}&&\p{Age:8.0}]]")?,
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
            _ if contains(&self.numbers, c) => CharClass::Number,
            _ if contains(&self.marks, c) => CharClass::Mark,
            _ => CharClass::Other,
        }
    }
}

impl CharClasses {
    /// `\d`
    pub(super) fn is_decimal(&self, c: char) -> bool {
        match c {
            '\0'..='\x7F' => c.is_ascii_digit(),
            _ => contains(&self.decimals, c),
        }
    }

    /// `\p{Mn}` of Unicode 8.0
    pub(super) fn is_accent(&self, c: char) -> bool {
        contains(&self.accents, c)
    }

    /// `\p{P}` of Unicode 8.0
    pub(super) fn is_punctuation(&self, c: char) -> bool {
        contains(&self.punctuation, c)
    }

    /// `\p{Cc}`, `\p{Co}`, and `\p{Cf}` of Unicode 8.0
    pub(super) fn is_control(&self, c: char) -> bool {
        contains(&self.controls, c)
    }

    /// The case of `c`, or `None` where it is no letter and no mark.
    pub(super) fn case(&self, c: char) -> Option<LetterCase> {
        match (c, self.of(c)) {
            ('a'..='z', _) => Some(LetterCase::Lower),
            ('A'..='Z', _) => Some(LetterCase::Upper),
            (_, CharClass::Mark) => Some(LetterCase::Both),
            (_, CharClass::Letter) if contains(&self.upper, c) => Some(LetterCase::Upper),
            (_, CharClass::Letter) if contains(&self.lower, c) => Some(LetterCase::Lower),
            (_, CharClass::Letter) => Some(LetterCase::Both),
            _ => None,
        }
    }
}

/// True if one of the ranges, which are in order, has the character.
pub(crate) fn contains(ranges: &[(char, char)], c: char) -> bool {
    let after = ranges.partition_point(|&(first, _)| first <= c);
    after
        .checked_sub(1)
        .and_then(|i| ranges.get(i))
        .is_some_and(|&(_, last)| c <= last)
}

/// The ranges of a class of characters, in order.
pub(crate) fn ranges(class: &'static str) -> Result<Vec<(char, char)>, TokenizerError> {
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
        let all = |text: &str, class| text.chars().all(|c| classes.of(c) == class);
        assert!(all("aZéßЖ漢あ한ªʰאǅ𝒳", CharClass::Letter));
        assert!(all("09٣²½Ⅷ〇①", CharClass::Number));
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

    #[test]
    fn the_tables_are_those_of_unicode_15_1() {
        let classes = CharClasses::new().unwrap();
        let count = |class| {
            ('\0'..=char::MAX)
                .filter(|&c| classes.of(c) == class)
                .count()
        };
        assert_eq!(count(CharClass::Letter), 136_726);
        assert_eq!(count(CharClass::Mark), 2_450);
        assert_eq!(count(CharClass::Number), 1_831);
        assert_eq!(count(CharClass::Space), 25);
        // A letter of Unicode 16.
        assert_eq!(classes.of('\u{A7CB}'), CharClass::Other);
    }
}
