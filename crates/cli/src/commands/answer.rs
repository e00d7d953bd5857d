//! Prints an answer piece by piece: thinking dimmed or hidden, words wrapped on a terminal.
//!
//! Invariant: where stdout is no terminal, it gets the text unchanged; a terminal gets no control
//! characters of the model's. Knows nothing of how answers are generated.

mod thinking;
mod wrap;

use std::io::{self, Write};

use clap::ValueEnum;

use crate::keyboard;
use crate::terminal::{self, Reader, shown_text};
pub(crate) use thinking::{Answer, Section, Splitter, ThinkingFormat};
use wrap::Wrapper;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Whether the thinking of reasoning models is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ShowThinking {
    /// Dimmed on a terminal, hidden elsewhere
    #[default]
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Prints one answer.
#[derive(Debug)]
pub(crate) struct AnswerPrinter {
    shows_thinking: bool,
    reader: Reader,
    wrapper: Wrapper,
    wraps: bool,
    section: Section,
    /// Whether thinking came before the answer.
    has_thought: bool,
    /// Whether anything of the section was printed.
    has_begun: bool,
    /// Whether there was thinking that is not printed, and nothing else so far.
    is_hidden: bool,
}

impl AnswerPrinter {
    /// For an answer that this reader gets.
    pub(crate) fn new(show: ShowThinking, reader: Reader) -> Self {
        Self {
            shows_thinking: match show {
                ShowThinking::Auto => reader == Reader::Terminal,
                ShowThinking::Always => true,
                ShowThinking::Never => false,
            },
            reader,
            wrapper: Wrapper::default(),
            wraps: true,
            section: Section::Answer,
            has_thought: false,
            has_begun: false,
            is_hidden: false,
        }
    }

    /// The same without word wrap: a line break in a JSON string would be part of it.
    pub(crate) fn unwrapped(mut self) -> Self {
        self.wraps = false;
        self
    }

    /// Prints a part of the answer.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn print(
        &mut self,
        section: Section,
        part: &str,
        out: &mut impl Write,
    ) -> io::Result<()> {
        if section != self.section {
            self.begin(section, out)?;
        }
        if section == Section::Thinking && !self.shows_thinking {
            self.is_hidden |= !part.trim().is_empty();
            return Ok(());
        }
        // Line breaks stand around thinking.
        let part = if self.has_thought && !self.has_begun {
            part.trim_start()
        } else {
            part
        };
        if part.is_empty() {
            return Ok(());
        }
        if self.reader == Reader::Terminal {
            if !self.has_begun && section == Section::Thinking {
                out.write_all(DIM.as_bytes())?;
            }
            let width = keyboard::width().filter(|_| self.wraps);
            let text = self.wrapper.push(&shown_text(self.reader, part), width);
            out.write_all(text.as_bytes())?;
        } else {
            out.write_all(part.as_bytes())?;
        }
        self.has_begun = true;
        self.is_hidden = false;
        out.flush()
    }

    /// Ends the answer and its line.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn finish(&mut self, out: &mut impl Write) -> io::Result<()> {
        self.end_section(out)?;
        writeln!(out)?;
        out.flush()?;
        if self.is_hidden {
            terminal::note(
                "(the answer is thinking alone, which is not shown: --show-thinking shows it, and a \
                 larger --predict lets it come to an end)",
            );
        }
        Ok(())
    }

    /// Ends the line of an answer that failed, where it has begun.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn end_line(&mut self, out: &mut impl Write) -> io::Result<()> {
        if self.has_begun || self.has_thought {
            self.finish(out)
        } else {
            Ok(())
        }
    }

    fn begin(&mut self, section: Section, out: &mut impl Write) -> io::Result<()> {
        self.end_section(out)?;
        if self.has_begun {
            out.write_all(b"\n\n")?;
        }
        self.wrapper = Wrapper::default();
        self.section = section;
        self.has_thought = true;
        self.has_begun = false;
        Ok(())
    }

    fn end_section(&mut self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(self.wrapper.finish().as_bytes())?;
        if self.reader == Reader::Terminal && self.section == Section::Thinking && self.has_begun {
            out.write_all(PLAIN.as_bytes())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn printed(show: ShowThinking, reader: Reader, parts: &[(Section, &str)]) -> String {
        let mut printer = AnswerPrinter::new(show, reader);
        let mut out = Vec::new();
        for (section, part) in parts {
            printer.print(*section, part, &mut out).unwrap();
        }
        printer.finish(&mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    const PARTS: [(Section, &str); 5] = [
        (Section::Thinking, "\n"),
        (Section::Thinking, "1 + 1"),
        (Section::Answer, "\n\n"),
        (Section::Answer, "It is "),
        (Section::Answer, "2."),
    ];

    #[test]
    fn thinking_is_dimmed_or_hidden() {
        let (always, never) = (ShowThinking::Always, ShowThinking::Never);
        assert_eq!(
            printed(always, Reader::Terminal, &PARTS),
            "\x1b[2m1 + 1\x1b[0m\n\nIt is 2.\n"
        );
        let auto = ShowThinking::Auto;
        assert!(printed(auto, Reader::Terminal, &PARTS).contains("1 + 1"));
        assert_eq!(printed(auto, Reader::Program, &PARTS), "It is 2.\n");
        assert_eq!(
            printed(always, Reader::Program, &PARTS),
            "1 + 1\n\nIt is 2.\n"
        );
        for reader in [Reader::Terminal, Reader::Program] {
            assert_eq!(printed(never, reader, &PARTS), "It is 2.\n");
        }
        // It was ended while it thought.
        assert_eq!(
            printed(always, Reader::Terminal, &PARTS[..2]),
            "\x1b[2m1 + 1\x1b[0m\n"
        );
    }

    #[test]
    fn an_answer_without_thinking_is_unchanged() {
        let parts = [(Section::Answer, " It is\n"), (Section::Answer, " 2.")];
        assert_eq!(
            printed(ShowThinking::Never, Reader::Program, &parts),
            " It is\n 2.\n"
        );
    }

    #[test]
    fn a_terminal_gets_no_escapes_of_the_model() {
        let parts = [(Section::Answer, "a\x1b[2Jb\tc")];
        let never = ShowThinking::Never;
        assert_eq!(
            printed(never, Reader::Terminal, &parts),
            "a\\u{1b}[2Jb\tc\n"
        );
        assert_eq!(printed(never, Reader::Program, &parts), "a\x1b[2Jb\tc\n");
    }
}
