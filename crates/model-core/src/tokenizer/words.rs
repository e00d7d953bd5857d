//! Cuts text into the words whose bytes byte-level BPE joins.
//!
//! Invariant: the words cover the text without gaps, and equal the matches of the regular
//! expressions that the vocabulary was trained with, one expression after another: each cuts what
//! the one before it left. The expressions of most models are written as scanners, which read every
//! character a bounded number of times and are several times as fast as an automaton; all others
//! are run by [`Expression`].

use super::TokenizerError;
use super::cased::{CaseExpression, Contractions};
use super::char_class::{CharClass, CharClasses};
use super::expression::Expression;

/// The most expressions that a pre-tokenizer may have: the longest published list has six.
const MAX_EXPRESSIONS: usize = 32;

/// The expression of GPT-2, which a `ByteLevel` of `tokenizer.json` has built in.
pub(crate) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// Every digit alone.
pub(crate) const DIGIT: &str = r"\p{N}";
/// Runs of punctuation.
pub(crate) const PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|`]+";
/// Three digits of ASCII.
pub(crate) const TRIPLE: &str = "[0-9][0-9][0-9]";
/// Groups of three digits from the right, where no letter follows.
pub(crate) const THREES: &str = r"\d{1,3}(?=(?:\d{3})*\b)";
/// The same, cut before each group.
pub(crate) const BEFORE_THREES: &str = r"(?=(\d{3})+(?!\d))";
/// The same for all numbers, whatever follows them.
pub(crate) const THREE_NUMBERS: &str = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))";
pub(crate) const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const MINICPM5: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const JAIS2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|\s{1,2}(?!\S)|\s{1}";
pub(crate) const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
pub(crate) const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// One expression, and how it is run.
#[derive(Clone, Debug)]
enum WordStep {
    /// [`GPT2`]
    Gpt2,
    /// [`LLAMA3`], with so many digits in a word, and with `[\p{L}\p{M}]` for `\p{L}` where marks
    /// belong to letters. Only ASCII letters are matched in any case.
    Llama3 {
        digits: usize,
        marks: MarkPlacement,
    },
    /// Two alternatives of letters, by their case; see [`super::cased`].
    Cased(CaseExpression),
    /// [`DIGIT`]
    Digit,
    /// [`PUNCTUATION`]
    Punctuation,
    /// [`TRIPLE`]
    Triple,
    /// [`THREES`], [`THREE_NUMBERS`] and [`BEFORE_THREES`]
    Threes(LeadingDigits),
    /// The pieces of white space of [`JAIS2`]: 512, 256 … 4, 2 and 1 characters.
    SpaceUnits,
    Expression(Expression),
}

/// The place of combining marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MarkPlacement {
    WithSymbols,
    WithLetters,
}

/// The place of the one or two digits before groups of three.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LeadingDigits {
    /// They are a piece. Digits that a letter follows are not cut.
    Apart,
    /// They are a piece, and numbers of all kinds are cut.
    OfNumbers,
    /// They stay with what comes before them.
    WithText,
}

impl WordStep {
    /// The steps that do what the expression does.
    fn of(expression: &str) -> Result<Vec<Self>, TokenizerError> {
        let llama3 = |digits, marks| Self::Llama3 { digits, marks };
        let cased = |digits, contractions| {
            Self::Cased(CaseExpression {
                digits,
                contractions,
            })
        };
        let steps = match expression {
            GPT2 => vec![Self::Gpt2],
            DIGIT => vec![Self::Digit],
            PUNCTUATION => vec![Self::Punctuation],
            TRIPLE => vec![Self::Triple],
            THREES => vec![Self::Threes(LeadingDigits::Apart)],
            THREE_NUMBERS => vec![Self::Threes(LeadingDigits::OfNumbers)],
            BEFORE_THREES => vec![Self::Threes(LeadingDigits::WithText)],
            LLAMA3 => vec![llama3(3, MarkPlacement::WithSymbols)],
            QWEN2 => vec![llama3(1, MarkPlacement::WithSymbols)],
            QWEN35 => vec![llama3(1, MarkPlacement::WithLetters)],
            MINICPM5 => vec![llama3(usize::MAX, MarkPlacement::WithSymbols)],
            JAIS2 => vec![llama3(3, MarkPlacement::WithSymbols), Self::SpaceUnits],
            GPT4O => vec![cased(3, Contractions::WithWord)],
            TEKKEN => vec![cased(1, Contractions::Apart)],
            other => vec![Self::Expression(Expression::new(other)?)],
        };
        Ok(steps)
    }
}

/// The expressions of a pre-tokenizer, ready to cut.
#[derive(Clone, Debug)]
pub(super) struct WordSplitter {
    steps: Vec<WordStep>,
    pub(super) classes: CharClasses,
}

impl WordSplitter {
    /// # Errors
    /// [`TokenizerError::Expression`] naming the one that is none.
    pub(super) fn new<'e>(
        expressions: impl IntoIterator<Item = &'e str>,
    ) -> Result<Self, TokenizerError> {
        let mut steps = Vec::new();
        for (index, expression) in expressions.into_iter().enumerate() {
            if index == MAX_EXPRESSIONS {
                return Err(TokenizerError::Expression {
                    text: expression.chars().take(40).collect(),
                    reason: format!("it is one of more than {MAX_EXPRESSIONS}"),
                });
            }
            steps.extend(WordStep::of(expression)?);
        }
        Ok(Self {
            steps,
            classes: CharClasses::new()?,
        })
    }

    /// Calls `word` for the words of `text` in order.
    pub(super) fn each<'t>(&self, text: &'t str, word: &mut dyn FnMut(&'t str)) {
        self.cut(&self.steps, text, word);
    }

    fn cut<'t>(&self, steps: &[WordStep], text: &'t str, word: &mut dyn FnMut(&'t str)) {
        let Some((step, later)) = steps.split_first() else {
            word(text);
            return;
        };
        let mut next = |piece: &'t str| {
            if later.is_empty() {
                word(piece);
            } else {
                self.cut(later, piece, word);
            }
        };
        match step {
            WordStep::Triple => triples(text, &mut next),
            WordStep::Threes(before) => self.threes(text, *before, &mut next),
            WordStep::SpaceUnits => self.space_units(text, &mut next),
            WordStep::Expression(expression) => expression.each(text, &mut next),
            _ => {
                let mut rest = text;
                while !rest.is_empty() {
                    let (piece, after) = rest.split_at(self.word_len(step, rest));
                    next(piece);
                    rest = after;
                }
            }
        }
    }

    /// The length of the first piece of `rest`, which is not empty, in bytes: at least one
    /// character.
    fn word_len(&self, step: &WordStep, rest: &str) -> usize {
        let is_number = |c: char| self.classes.of(c) == CharClass::Number;
        let is_symbol = |c: char| "$+<=>^~|`".contains(c) || self.classes.is_punctuation(c);
        match (step, rest.chars().next()) {
            (WordStep::Gpt2, _) => self.gpt2_word(rest),
            (WordStep::Llama3 { digits, marks }, _) => self.llama3_word(rest, *digits, *marks),
            (WordStep::Cased(cased), _) => self.cased_word(rest, *cased),
            (WordStep::Digit, Some(c)) if is_number(c) => c.len_utf8(),
            (WordStep::Digit, _) => rest.find(is_number).unwrap_or(rest.len()),
            (WordStep::Punctuation, Some(c)) if is_symbol(c) => run(rest, is_symbol),
            (WordStep::Punctuation, _) => rest.find(is_symbol).unwrap_or(rest.len()),
            (
                WordStep::Triple
                | WordStep::Threes(_)
                | WordStep::SpaceUnits
                | WordStep::Expression(_),
                _,
            ) => rest.len(),
        }
    }

    fn gpt2_word(&self, text: &str) -> usize {
        if let Some(len) = contraction(text, |suffix, tail| tail.starts_with(suffix)) {
            return len;
        }
        let body = text.strip_prefix(' ').unwrap_or(text);
        let lead = text.len() - body.len();
        let of = |c| self.classes.of(c);
        match body.chars().next().map(of) {
            Some(CharClass::Letter) => lead + run(body, |c| of(c) == CharClass::Letter),
            Some(CharClass::Number) => lead + run(body, |c| of(c) == CharClass::Number),
            Some(CharClass::Mark | CharClass::Other) => {
                lead + run(body, |c| {
                    matches!(of(c), CharClass::Mark | CharClass::Other)
                })
            }
            Some(CharClass::Space) | None => self.spaces(text),
        }
    }

    fn llama3_word(&self, text: &str, digits: usize, marks: MarkPlacement) -> usize {
        if let Some(len) = contraction(text, any_case) {
            return len;
        }
        let of = |c| self.classes.of(c);
        let in_word = |c| match of(c) {
            CharClass::Letter => true,
            CharClass::Mark => marks == MarkPlacement::WithLetters,
            _ => false,
        };
        let is_symbol = |c| !in_word(c) && matches!(of(c), CharClass::Mark | CharClass::Other);
        let mut chars = text.chars();
        let Some(first) = chars.next() else { return 0 };
        let after = chars.as_str();
        if of(first) == CharClass::Number {
            return self.digits(text, digits);
        }
        if in_word(first) {
            return run(text, in_word);
        }
        if !matches!(first, '\r' | '\n') && after.starts_with(in_word) {
            return first.len_utf8() + run(after, in_word);
        }
        self.symbols_or_spaces(text, is_symbol, &['\r', '\n'])
    }

    /// `\p{N}{1,D}` at the start of `text`.
    pub(super) fn digits(&self, text: &str, most: usize) -> usize {
        let is_number = |&(_, c): &(usize, char)| self.classes.of(c) == CharClass::Number;
        let last = text.char_indices().take(most).take_while(is_number).last();
        last.map_or(0, |(at, c)| at + c.len_utf8())
    }

    /// ` ?SYMBOL+[TRAILING]*|\s*[\r\n]+|\s+(?!\S)|\s+`
    pub(super) fn symbols_or_spaces(
        &self,
        text: &str,
        is_symbol: impl Fn(char) -> bool,
        trailing: &[char],
    ) -> usize {
        let of = |c| self.classes.of(c);
        let body = text.strip_prefix(' ').unwrap_or(text);
        let symbols = run(body, is_symbol);
        if symbols > 0 {
            let end = text.len() - body.len() + symbols;
            return end + run(&text[end..], |c| trailing.contains(&c));
        }
        let spaces = run(text, |c| of(c) == CharClass::Space);
        match text[..spaces].rfind(['\r', '\n']) {
            Some(newline) => newline + 1,
            None => self.spaces(text),
        }
    }

    /// `\s+(?!\S)|\s+`: a run of white space, but for its last character where a word follows.
    fn spaces(&self, text: &str) -> usize {
        let len = run(text, |c| self.classes.of(c) == CharClass::Space);
        let last = text[..len].chars().next_back().map_or(0, char::len_utf8);
        match len {
            0 => text.chars().next().map_or(0, char::len_utf8),
            _ if len == text.len() || len == last => len,
            _ => len - last,
        }
    }
}

impl WordSplitter {
    /// Digits in groups of three from the right, and what lies between digits.
    fn threes<'t>(&self, text: &'t str, before: LeadingDigits, piece: &mut dyn FnMut(&'t str)) {
        let is_digit = |c: char| match before {
            LeadingDigits::OfNumbers => self.classes.of(c) == CharClass::Number,
            LeadingDigits::Apart | LeadingDigits::WithText => self.classes.is_decimal(c),
        };
        let (mut start, mut at) = (0, 0);
        while let Some(found) = text[at..].find(is_digit) {
            let first = at + found;
            let digits = &text[first..first + run(&text[first..], is_digit)];
            at = first + digits.len();
            if before == LeadingDigits::Apart && text[at..].starts_with(is_word) {
                continue;
            }
            let n_first = digits.chars().count() % 3;
            let (some, threes) = digits.split_at(n_chars_len(digits, n_first));
            match before {
                LeadingDigits::Apart | LeadingDigits::OfNumbers => {
                    push(&text[start..first], piece);
                    push(some, piece);
                }
                LeadingDigits::WithText => push(&text[start..first + some.len()], piece),
            }
            let mut rest = threes;
            while !rest.is_empty() {
                let (three, after) = rest.split_at(n_chars_len(rest, 3));
                piece(three);
                rest = after;
            }
            start = at;
        }
        push(&text[start..], piece);
    }

    /// Pieces of white space alone, but for those that end a line.
    fn space_units<'t>(&self, text: &'t str, piece: &mut dyn FnMut(&'t str)) {
        let is_space = |c| self.classes.of(c) == CharClass::Space;
        if text.ends_with(['\r', '\n']) || !text.chars().all(is_space) {
            piece(text);
            return;
        }
        let mut rest = text;
        for unit in [512, 256, 128, 64, 32, 16, 8, 4, 2, 1] {
            while let Some((at, c)) = rest.char_indices().nth(unit - 1) {
                let (first, after) = rest.split_at(at + c.len_utf8());
                piece(first);
                rest = after;
            }
        }
    }
}

fn push<'t>(text: &'t str, piece: &mut dyn FnMut(&'t str)) {
    if !text.is_empty() {
        piece(text);
    }
}

/// The length of the first `n` characters, in bytes.
fn n_chars_len(text: &str, n: usize) -> usize {
    text.chars().take(n).map(char::len_utf8).sum()
}

/// True if `c` is a letter, a digit or a connector (`\w`).
fn is_word(c: char) -> bool {
    c == '_' || c.is_alphanumeric()
}

/// Calls `word` for the parts of `text`, of which every three digits in a row are one.
fn triples<'t>(text: &'t str, word: &mut dyn FnMut(&'t str)) {
    let mut rest = text;
    let is_triple = |three: &[u8]| three.iter().all(u8::is_ascii_digit);
    while let Some(at) = rest.as_bytes().windows(3).position(is_triple) {
        let (before, from) = rest.split_at(at);
        let (three, after) = from.split_at(3);
        if !before.is_empty() {
            word(before);
        }
        word(three);
        rest = after;
    }
    if !rest.is_empty() {
        word(rest);
    }
}

/// The length of the longest start of `text` whose characters all satisfy `is`, in bytes.
pub(super) fn run(text: &str, is: impl Fn(char) -> bool) -> usize {
    text.find(|c| !is(c)).unwrap_or(text.len())
}

/// `'s|'t|'re|'ve|'m|'ll|'d` at the start of `text`.
pub(super) fn contraction(text: &str, starts: impl Fn(&str, &str) -> bool) -> Option<usize> {
    let tail = text.strip_prefix('\'')?;
    let suffix = ["s", "t", "re", "ve", "m", "ll", "d"]
        .into_iter()
        .find(|s| starts(s, tail))?;
    Some(1 + suffix.len())
}

/// True if `tail` starts with `suffix`, capitals or not.
pub(super) fn any_case(suffix: &str, tail: &str) -> bool {
    tail.get(..suffix.len())
        .is_some_and(|t| t.eq_ignore_ascii_case(suffix))
}

#[cfg(test)]
mod tests {
    use super::super::pre_tokenizers::PreTokenizer;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let mut out = Vec::new();
        PreTokenizer::named(name)
            .unwrap()
            .splitter()
            .unwrap()
            .each(text, &mut |w| out.push(w));
        out
    }

    #[test]
    fn gpt2_words() {
        let text = "I'll say  \"Hi\" 12 34's, WE'LL\n\n\n x \n";
        let expected = [
            "I", "'ll", " say", " ", " \"", "Hi", "\"", " 12", " 34", "'s", ",", " WE", "'", "LL",
            "\n\n\n", " x", " \n",
        ];
        assert_eq!(words("gpt-2", text), expected);
    }

    #[test]
    fn llama3_words() {
        let text = "WE'LL pay $12345.6\r\n\r\n  (now)\n  \t end  ";
        let expected = [
            "WE", "'LL", " pay", " $", "123", "45", ".", "6", "\r\n\r\n", " ", " (", "now", ")\n",
            "  ", "\tend", "  ",
        ];
        let text = text.replace("\t end", "\tend");
        assert_eq!(words("llama-bpe", &text), expected);
    }

    #[test]
    fn numbers_by_pre_tokenizer() {
        assert_eq!(words("qwen2", "a 1234"), ["a", " ", "1", "2", "3", "4"]);
        assert_eq!(words("llama-bpe", "a 1234"), ["a", " ", "123", "4"]);
        assert_eq!(words("gpt-2", "a 1234"), ["a", " 1234"]);
        // The pattern does not see the text after a digit that was cut out.
        assert_eq!(words("smollm", "a  12 b"), ["a", "  ", "1", "2", " b"]);
    }

    #[test]
    fn falcon_cuts_punctuation_and_threes_of_digits() {
        let text = "I'll pay  $12345.6+7, (\u{201c}now\u{201d}) 1234\u{bd}\n\n x=y\u{20ac}9";
        let expected = [
            "I",
            "'",
            "ll",
            " pay",
            "  ",
            "$",
            "123",
            "45",
            ".",
            "6",
            "+",
            "7",
            ",",
            " ",
            "(\u{201c}",
            "now",
            "\u{201d})",
            " ",
            "123",
            "4\u{bd}",
            "\n\n",
            " x",
            "=",
            "y",
            "\u{20ac}",
            "9",
        ];
        assert_eq!(words("falcon", text), expected);
    }

    #[test]
    fn marks_stand_with_letters_or_apart() {
        let text = "e\u{301}t x";
        assert_eq!(words("qwen2", text), ["e", "\u{301}t", " x"]);
        assert_eq!(words("qwen35", text), ["e\u{301}t", " x"]);
    }

    #[test]
    fn a_long_run_of_white_space_is_one_word() {
        let text = format!("{}x", " ".repeat(2_000_000));
        let found = words("qwen2", &text);
        assert_eq!(
            found.iter().map(|w| w.len()).collect::<Vec<_>>(),
            [1_999_999, 2]
        );
    }

    #[test]
    fn digits_in_threes_from_the_right() {
        assert_eq!(
            words("superbpe", "a 1234567 12"),
            ["a ", "1", "234", "567", " ", "12"]
        );
        assert_eq!(
            words("cohere2moe", "$1234.56"),
            ["$", "1", "234", ".", "56"]
        );
        // A word that goes on is cut from the left, by the second expression.
        assert_eq!(words("cohere2moe", "1234th"), ["123", "4", "th"]);
    }

    #[test]
    fn white_space_in_units() {
        let text = format!("a{}b\n\n  ", " ".repeat(512 + 32 + 3 + 1));
        let lengths: Vec<usize> = words("jais-2", &text).iter().map(|w| w.len()).collect();
        assert_eq!(lengths, [1, 512, 32, 2, 1, 2, 2, 2]);
    }

    #[test]
    fn a_sequence_of_expressions() {
        let text = "This is  one test, 漢字 12\n";
        assert_eq!(
            words("deepseek-llm", text),
            [
                "This", " is", " ", " one", " test", ",", " ", "漢字", " ", "12", "\n"
            ]
        );
    }
}
