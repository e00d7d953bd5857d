//! [`Expression`]: any regular expression that cuts text into words.
//!
//! Invariant: the pieces cover the text without gaps: a match is one piece, and so is what lies
//! between two. Letters, numbers and marks are those of Unicode 15.1, as in
//! [`super::char_class`]. An automaton reads the text in linear time wherever the expression allows
//! it. The one thing that published expressions have beyond it is the alternative `\s+(?!\S)`, a
//! run of white space without its last character where a word follows; it is done by hand. Other
//! look-arounds and possessive repetitions are run by backtracking, within a limit.

use regex_automata::meta;
use regex_automata::{Input, PatternID};

use super::TokenizerError;

/// The alternative that looks ahead, as files write it.
const SPACES_BEFORE_TEXT: &str = r"\s+(?!\S)";
/// Alternatives that may follow it: the same characters, which are a piece in any case.
const SPACES_AFTER_IT: [&str; 2] = [r"\s+", r"\s"];
/// The most memory that an expression may take.
const MAX_BYTES: usize = 8 << 20;
/// Its greatest length, in bytes: the longest published one has 800.
const MAX_LENGTH: usize = 16 << 10;
/// The most steps back that one match may take.
const MAX_STEPS_BACK: usize = 1_000_000;

/// An expression that is ready to cut.
#[derive(Clone, Debug)]
pub(super) struct Expression {
    engine: Engine,
}

#[derive(Clone, Debug)]
enum Engine {
    /// One pattern for each alternative, and which of them is [`SPACES_BEFORE_TEXT`].
    Automaton {
        regex: meta::Regex,
        spaces: Option<PatternID>,
    },
    Backtracking(Box<fancy_regex::Regex>),
}

impl Expression {
    /// # Errors
    /// [`TokenizerError::Expression`] where it is none.
    pub(super) fn new(text: &str) -> Result<Self, TokenizerError> {
        if text.len() > MAX_LENGTH {
            return Err(TokenizerError::Expression {
                text: text.chars().take(40).collect(),
                reason: format!("it has {} bytes, more than {MAX_LENGTH}", text.len()),
            });
        }
        let engine = match automaton(text) {
            Some(engine) => engine,
            None => backtracking(text)?,
        };
        Ok(Self { engine })
    }

    /// Calls `piece` for the matches and for what lies between them, in order.
    pub(super) fn each<'t>(&self, text: &'t str, piece: &mut dyn FnMut(&'t str)) {
        let (mut at, mut from) = (0, 0);
        while let Some((start, end)) = self.find(text, from) {
            if start == end {
                // An empty match cuts nothing; the next one begins after a character.
                match text[end..].chars().next() {
                    Some(c) => from = end + c.len_utf8(),
                    None => break,
                }
                continue;
            }
            if at < start {
                piece(&text[at..start]);
            }
            piece(&text[start..end]);
            (at, from) = (end, end);
        }
        if at < text.len() {
            piece(&text[at..]);
        }
    }

    /// The first match that begins at `from` or later.
    fn find(&self, text: &str, from: usize) -> Option<(usize, usize)> {
        match &self.engine {
            Engine::Automaton { regex, spaces } => {
                let found = regex.search(&Input::new(text).range(from..))?;
                let (start, mut end) = (found.start(), found.end());
                if *spaces == Some(found.pattern()) && end < text.len() {
                    let last = text[start..end].chars().next_back();
                    let kept = end - last.map_or(0, char::len_utf8);
                    // A single character that text follows is matched by the next alternative.
                    if start < kept {
                        end = kept;
                    }
                }
                Some((start, end))
            }
            // A search that is given up finds nothing more: the rest is one piece.
            Engine::Backtracking(regex) => {
                let found = regex.find_from_pos(text, from).ok().flatten()?;
                Some((found.start(), found.end()))
            }
        }
    }
}

/// The expression as an automaton, if one can do it.
fn automaton(text: &str) -> Option<Engine> {
    let alternatives = alternatives(text)?;
    let at = alternatives.iter().position(|a| *a == SPACES_BEFORE_TEXT);
    let after = at.map_or(&[][..], |at| &alternatives[at + 1..]);
    if after.iter().any(|a| !SPACES_AFTER_IT.contains(a)) {
        return None;
    }
    let patterns: Vec<String> = alternatives
        .iter()
        .map(|a| if *a == SPACES_BEFORE_TEXT { r"\s+" } else { a })
        .map(of_unicode_15)
        .collect();
    if patterns.iter().any(|p| is_possessive(p)) {
        return None;
    }
    let config = meta::Config::new()
        .which_captures(regex_automata::nfa::thompson::WhichCaptures::Implicit)
        .nfa_size_limit(Some(MAX_BYTES));
    let regex = meta::Builder::new().configure(config).build_many(&patterns);
    let spaces = at.map(PatternID::new).transpose().ok()?;
    Some(Engine::Automaton {
        regex: regex.ok()?,
        spaces,
    })
}

fn backtracking(text: &str) -> Result<Engine, TokenizerError> {
    let regex = fancy_regex::RegexBuilder::new(&of_unicode_15(text))
        .backtrack_limit(MAX_STEPS_BACK)
        .delegate_size_limit(MAX_BYTES)
        .build();
    let fail = |e: fancy_regex::Error| TokenizerError::Expression {
        text: text.to_owned(),
        reason: e.to_string(),
    };
    Ok(Engine::Backtracking(Box::new(regex.map_err(fail)?)))
}

/// The alternatives of the whole expression; `None` where its parentheses do not fit.
fn alternatives(text: &str) -> Option<Vec<&str>> {
    let (mut depth, mut in_class, mut start) = (0_usize, 0_usize, 0);
    let mut found = Vec::new();
    let mut chars = text.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '\\' => {
                chars.next();
            }
            '[' => in_class += 1,
            ']' if in_class > 0 => in_class -= 1,
            _ if in_class > 0 => {}
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1)?,
            '|' if depth == 0 => {
                found.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    found.push(&text[start..]);
    Some(found)
}

/// True if a repetition gives nothing back (`a?+`, `a++`, `a*+`), which an automaton reads as
/// something else.
fn is_possessive(text: &str) -> bool {
    let mut chars = text.chars();
    let mut in_class = 0_usize;
    let mut before = None;
    while let Some(c) = chars.next() {
        let is_repetition = in_class == 0 && matches!(c, '+' | '?' | '*' | '}');
        match c {
            '\\' => {
                chars.next();
            }
            '[' => in_class += 1,
            ']' => in_class = in_class.saturating_sub(1),
            '+' if in_class == 0 && before == Some(()) => return true,
            _ => {}
        }
        before = is_repetition.then_some(());
    }
    false
}

/// The expression with every general category held to the characters of Unicode 15.1.
fn of_unicode_15(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 2);
    let mut rest = text;
    while let Some(at) = rest.find(r"\p{") {
        let (before, from) = rest.split_at(at);
        out.push_str(before);
        let is_escaped = before.bytes().rev().take_while(|&b| b == b'\\').count() % 2 == 1;
        let Some(end) = from.find('}').filter(|_| !is_escaped) else {
            out.push_str(&from[..3]);
            rest = &from[3..];
            continue;
        };
        let (class, after) = from.split_at(end + 1);
        out.push_str(&format!(r"[{class}&&\p{{Age:15.1}}]"));
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces<'t>(expression: &str, text: &'t str) -> Vec<&'t str> {
        let mut out = Vec::new();
        Expression::new(expression)
            .unwrap()
            .each(text, &mut |piece| out.push(piece));
        out
    }

    fn is_automaton(expression: &str) -> bool {
        let engine = Expression::new(expression).unwrap().engine;
        matches!(engine, Engine::Automaton { .. })
    }

    #[test]
    fn matches_and_what_lies_between_are_pieces() {
        assert_eq!(pieces(r"\p{N}", "ab12c"), ["ab", "1", "2", "c"]);
        assert_eq!(pieces(r"\p{N}", ""), Vec::<&str>::new());
        assert_eq!(pieces(r"\p{N}*", "ab12"), ["ab", "12"]);
    }

    #[test]
    fn a_run_of_white_space_leaves_its_last_character_to_the_word() {
        let expression = r" ?\p{L}+|\s+(?!\S)|\s+";
        assert!(is_automaton(expression));
        assert_eq!(
            pieces(expression, "a   b \u{3000}\tc  "),
            ["a", "  ", " b", " \u{3000}", "\t", "c", "  "]
        );
    }

    #[test]
    fn both_engines_cut_alike() {
        let text = "I'll  pay\n\n $12345.6 \u{301}e\u{301}tude  漢字かな x\t\t";
        let linear = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
        let looking = format!("(?=.|\n)(?:{linear})");
        assert!(is_automaton(linear) && !is_automaton(&looking));
        assert_eq!(pieces(linear, text), pieces(&looking, text));
    }

    #[test]
    fn possessive_repetitions_are_not_read_as_repeated_ones() {
        let expression = r"[^\r\n\p{L}\p{N}]?+\p{L}+| ?[^\s\p{L}]++";
        assert!(!is_automaton(expression));
        assert_eq!(pieces(expression, "--a b!!c"), ["--", "a", " b", "!!", "c"]);
    }

    #[test]
    fn letters_are_those_of_unicode_15() {
        // U+A7CB is a letter since Unicode 16.
        assert_eq!(pieces(r"\p{L}+", "a\u{A7CB}b"), ["a", "\u{A7CB}", "b"]);
    }

    #[test]
    fn a_broken_expression_is_an_error() {
        let error = Expression::new("a(").unwrap_err();
        assert!(
            matches!(error, TokenizerError::Expression { .. }),
            "{error}"
        );
    }

    #[test]
    fn a_long_run_of_white_space_is_read_once() {
        let text = format!("{}x", " ".repeat(2_000_000));
        let found = pieces(r" ?\p{L}+|\s*[\r\n]+|\s+(?!\S)|\s+", &text);
        let lengths: Vec<usize> = found.iter().map(|piece| piece.len()).collect();
        assert_eq!(lengths, [1_999_999, 2]);
    }
}
