//! Word wrap of a text that arrives in pieces.
//!
//! Invariant: a line is broken only at spaces and next to wide characters, and never inside a
//! fenced block of code; without a width the text is unchanged. Knows nothing of terminals.

use unicode_width::UnicodeWidthChar;

/// What begins and ends a block of code.
const FENCE: &str = "```";

/// Breaks lines at a width that may change between two pieces.
#[derive(Debug, Default)]
pub(crate) struct Wrapper {
    /// The width when the last piece came; `None` before the first.
    width: Option<usize>,
    /// Columns of the current line that are written.
    column: usize,
    /// Spaces after what is written; dropped where the line is broken.
    spaces: String,
    /// The word that may go on in the next piece.
    word: String,
    word_width: usize,
    /// The first characters of the current line, up to a fence's length.
    line_start: String,
    in_fence: bool,
}

impl Wrapper {
    /// The part of the text that can be written now.
    pub(crate) fn push(&mut self, text: &str, width: Option<usize>) -> String {
        self.width = width;
        let Some(width) = width else {
            let mut out = self.finish();
            out.push_str(text);
            return out;
        };
        let mut out = String::new();
        for c in text.chars() {
            match c {
                '\n' => {
                    self.write_word(width, &mut out);
                    self.end_line(&mut out);
                }
                ' ' | '\t' => {
                    self.write_word(width, &mut out);
                    self.spaces.push(c);
                }
                c => {
                    let columns = c.width().unwrap_or(0);
                    self.word.push(c);
                    self.word_width += columns;
                    if self.line_start.len() < FENCE.len() {
                        self.line_start.push(c);
                    }
                    if columns > 1 || self.word_width >= width {
                        self.write_word(width, &mut out);
                    }
                }
            }
        }
        out
    }

    /// What is still held back.
    pub(crate) fn finish(&mut self) -> String {
        let mut out = String::new();
        self.write_word(self.width.unwrap_or(usize::MAX), &mut out);
        out
    }

    fn write_word(&mut self, width: usize, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let n_spaces = self.spaces.chars().count();
        let columns = n_spaces.saturating_add(self.word_width);
        let fits = self.column.saturating_add(columns) <= width;
        if self.column > 0 && !fits && !self.in_fence {
            out.push('\n');
            self.column = self.word_width;
        } else {
            out.push_str(&self.spaces);
            self.column = self.column.saturating_add(columns);
        }
        out.push_str(&self.word);
        self.spaces.clear();
        self.word.clear();
        self.word_width = 0;
    }

    fn end_line(&mut self, out: &mut String) {
        if self.line_start == FENCE {
            self.in_fence = !self.in_fence;
        }
        self.line_start.clear();
        self.spaces.clear();
        self.column = 0;
        out.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text in pieces of one character, wrapped.
    fn wrapped(text: &str, width: usize) -> String {
        let mut wrapper = Wrapper::default();
        let mut out = String::new();
        for c in text.chars() {
            out += &wrapper.push(&c.to_string(), Some(width));
        }
        out + &wrapper.finish()
    }

    #[test]
    fn lines_break_at_spaces() {
        assert_eq!(wrapped("one two three", 7), "one two\nthree");
        assert_eq!(wrapped("one two three", 8), "one two\nthree");
        assert_eq!(wrapped("one\ntwo three", 9), "one\ntwo three");
        assert_eq!(wrapped("  one two", 5), "  one\ntwo");
        assert_eq!(wrapped("one  \n\n two", 80), "one\n\n two");
    }

    #[test]
    fn a_word_longer_than_the_line_is_not_held_back() {
        let mut wrapper = Wrapper::default();
        assert_eq!(wrapper.push("abcdefgh", Some(4)), "abcd\nefgh");
        assert_eq!(wrapper.push("ij", Some(4)), "");
        assert_eq!(wrapper.push(" ", Some(4)), "\nij");
    }

    #[test]
    fn wide_characters_take_two_columns_and_break_anywhere() {
        assert_eq!(wrapped("日本語の文", 4), "日本\n語の\n文");
    }

    #[test]
    fn code_keeps_its_lines() {
        let code = "```\nlet a = b + c;\n```\n";
        assert_eq!(
            wrapped(&format!("{code}one two"), 5),
            format!("{code}one\ntwo")
        );
    }

    #[test]
    fn the_width_may_change_or_be_absent() {
        let mut wrapper = Wrapper::default();
        let mut out = wrapper.push("one two ", Some(80));
        out += &wrapper.push("three four ", Some(8));
        assert_eq!(out, "one two\nthree\nfour");
        assert_eq!(wrapper.push("  five\n", None), "  five\n");
    }
}
