//! Pre-tokenizers: how byte-level BPE cuts text into words before it joins their bytes.
//!
//! Invariant: the words cover the text without gaps, and equal the matches of the regular
//! expression that the vocabulary was trained with (quoted at each pattern). Written as scanners,
//! which read every character a bounded number of times whatever the text is: the expressions need
//! lookahead and so a backtracking engine, which gives up on long runs of white space.

use super::TokenizerError;
use super::cased::{Cased, Contractions};
use super::char_class::{CharClass, CharClasses};

/// A regular expression that cuts words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pattern {
    /// `'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+`
    Gpt2,
    /// The alternatives `(?i:'s|'t|'re|'ve|'m|'ll|'d)`, `[^\r\n\p{L}\p{N}]?\p{L}+`, `\p{N}{1,D}`,
    /// ` ?[^\s\p{L}\p{N}]+[\r\n]*`, `\s*[\r\n]+`, `\s+(?!\S)` and `\s+` in this order, with `D`
    /// digits, and with `[\p{L}\p{M}]` for `\p{L}` where marks belong to letters. Only ASCII
    /// letters are matched in any case.
    Llama3 { digits: usize, marks: Marks },
    /// Two alternatives of letters, by their case; see [`super::cased`].
    Cased(Cased),
}

/// Where combining marks belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Marks {
    WithSymbols,
    WithLetters,
}

/// What is cut out before the pattern is applied to what lies between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CutOut {
    Nothing,
    /// `\p{N}`: every digit alone.
    Digits,
    /// ``[\p{P}\$\+<=>\^~\|`]+``, and after it the pattern `[0-9][0-9][0-9]`, out of its words
    /// (Falcon).
    Punctuation,
}

/// A pre-tokenizer by the name that GGUF files give it.
#[derive(Clone, Debug)]
pub(super) struct WordSplitter {
    pattern: Pattern,
    cut_out: CutOut,
    pub(super) classes: CharClasses,
}

/// What a pre-tokenizer's name implies besides how it splits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PreTraits {
    /// A word that is a token stays whole, whatever the merges.
    pub(super) whole_words: bool,
    /// A text starts with BOS unless the file specifies otherwise.
    pub(super) add_bos: bool,
}

impl WordSplitter {
    /// The pre-tokenizer called `name`. Names are those that llama.cpp maps to the same expression.
    pub(super) fn new(name: &str) -> Result<(Self, PreTraits), TokenizerError> {
        let llama3 = Pattern::Llama3 {
            digits: 3,
            marks: Marks::WithSymbols,
        };
        let qwen2 = Pattern::Llama3 {
            digits: 1,
            marks: Marks::WithSymbols,
        };
        let qwen35 = Pattern::Llama3 {
            digits: 1,
            marks: Marks::WithLetters,
        };
        let plain = PreTraits {
            whole_words: false,
            add_bos: false,
        };
        let (pattern, cut_out, traits) = match name {
            "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral"
            | "midm-2.0" | "lfm2" => (
                llama3,
                CutOut::Nothing,
                PreTraits {
                    whole_words: true,
                    add_bos: true,
                },
            ),
            "dbrx" | "smaug-bpe" => (llama3, CutOut::Nothing, plain),
            "qwen2" | "deepseek-r1-qwen" | "stablelm2" | "megrez" => {
                (qwen2, CutOut::Nothing, plain)
            }
            "qwen35" => (qwen35, CutOut::Nothing, plain),
            "gpt-4o" | "llama4" => {
                let cased = Cased {
                    digits: 3,
                    contractions: Contractions::WithWord,
                };
                (Pattern::Cased(cased), CutOut::Nothing, plain)
            }
            "tekken" => {
                let cased = Cased {
                    digits: 1,
                    contractions: Contractions::Apart,
                };
                let traits = PreTraits {
                    whole_words: true,
                    add_bos: true,
                };
                (Pattern::Cased(cased), CutOut::Nothing, traits)
            }
            "gpt-2" | "phi-2" | "mpt" | "olmo" | "modern-bert" | "roberta-bpe" => {
                (Pattern::Gpt2, CutOut::Nothing, plain)
            }
            "starcoder" | "refact" | "command-r" | "smollm" => {
                (Pattern::Gpt2, CutOut::Digits, plain)
            }
            "falcon" => (Pattern::Gpt2, CutOut::Punctuation, plain),
            _ => {
                return Err(TokenizerError::UnknownPre {
                    name: name.to_owned(),
                });
            }
        };
        Ok((
            Self {
                pattern,
                cut_out,
                classes: CharClasses::new()?,
            },
            traits,
        ))
    }

    /// Calls `word` for the words of `text` in order.
    pub(super) fn each<'t>(&self, text: &'t str, mut word: impl FnMut(&'t str)) {
        let mut rest = text;
        while !rest.is_empty() {
            let (mut span, after) = rest.split_at(self.span_len(rest));
            while !span.is_empty() {
                let (found, more) = span.split_at(self.word_len(span));
                match self.cut_out {
                    CutOut::Punctuation => triples(found, &mut word),
                    CutOut::Nothing | CutOut::Digits => word(found),
                }
                span = more;
            }
            rest = after;
        }
    }

    /// How much of `text` the pattern sees at once: no expression looks beyond it.
    fn span_len(&self, text: &str) -> usize {
        let is_number = |c: char| self.classes.of(c) == CharClass::Number;
        let is_symbol = |c: char| "$+<=>^~|`".contains(c) || self.classes.is_punctuation(c);
        match (self.cut_out, text.chars().next()) {
            (CutOut::Digits, Some(c)) if is_number(c) => c.len_utf8(),
            (CutOut::Digits, _) => text.find(is_number).unwrap_or(text.len()),
            (CutOut::Punctuation, Some(c)) if is_symbol(c) => run(text, is_symbol),
            (CutOut::Punctuation, _) => text.find(is_symbol).unwrap_or(text.len()),
            (CutOut::Nothing, _) => text.len(),
        }
    }

    /// The length of the first word of `text`, which is not empty, in bytes: at least one
    /// character.
    fn word_len(&self, text: &str) -> usize {
        match self.pattern {
            Pattern::Gpt2 => self.gpt2_word(text),
            Pattern::Llama3 { digits, marks } => self.llama3_word(text, digits, marks),
            Pattern::Cased(cased) => self.cased_word(text, cased),
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

    fn llama3_word(&self, text: &str, digits: usize, marks: Marks) -> usize {
        if let Some(len) = contraction(text, any_case) {
            return len;
        }
        let of = |c| self.classes.of(c);
        let in_word = |c| match of(c) {
            CharClass::Letter => true,
            CharClass::Mark => marks == Marks::WithLetters,
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

/// Calls `word` for the parts of `text`, of which every three digits in a row are one.
fn triples<'t>(text: &'t str, word: &mut impl FnMut(&'t str)) {
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

/// Whether `tail` starts with `suffix`, capitals or not.
pub(super) fn any_case(suffix: &str, tail: &str) -> bool {
    tail.get(..suffix.len())
        .is_some_and(|t| t.eq_ignore_ascii_case(suffix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        let mut out = Vec::new();
        WordSplitter::new(name)
            .unwrap()
            .0
            .each(text, |w| out.push(w));
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
    fn an_unknown_name_is_an_error() {
        for name in ["default", "", "tekken7", "Qwen2"] {
            let error = WordSplitter::new(name).unwrap_err();
            assert_eq!(
                error,
                TokenizerError::UnknownPre {
                    name: name.to_owned()
                }
            );
        }
    }
}
