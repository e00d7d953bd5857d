//! Messages as a person types them, or as a pipe brings them.
//!
//! Invariant: a message is never empty. Knows nothing of models.

use std::io::{BufRead, IsTerminal, Stdin};

use anyhow::Context;
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;

/// What came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// Something to answer.
    Message(String),
    /// Something to do.
    Command(Command),
    /// Nothing more comes.
    End,
}

/// A line that is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Exit,
    Clear,
    Help,
}

/// Where lines come from.
pub(super) enum Lines {
    /// A person, who can edit them.
    Terminal(Box<DefaultEditor>),
    /// A pipe or file.
    Pipe(Stdin),
}

impl Lines {
    /// Standard input.
    ///
    /// # Errors
    /// Where the terminal cannot be set up.
    pub(super) fn open() -> anyhow::Result<Self> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(Self::Pipe(stdin));
        }
        let editor = DefaultEditor::new().context("cannot use this terminal")?;
        Ok(Self::Terminal(Box::new(editor)))
    }

    /// Whether a person is there.
    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// The next message or command; empty lines are passed over.
    ///
    /// # Errors
    /// Where input cannot be read.
    pub(super) fn next(&mut self) -> anyhow::Result<Line> {
        loop {
            let mut message = String::new();
            loop {
                match self.line(&message)? {
                    None if message.is_empty() => return Ok(Line::End),
                    None => break,
                    Some(line) => match line.strip_suffix('\\') {
                        Some(start) => message = message + start + "\n",
                        None => {
                            message += &line;
                            break;
                        }
                    },
                }
            }
            if let Some(line) = classify(message) {
                if let (Self::Terminal(editor), Line::Message(text)) = (&mut *self, &line) {
                    editor.add_history_entry(text)?;
                }
                return Ok(line);
            }
        }
    }

    /// One line, without its end; `before` is what it continues.
    fn line(&mut self, before: &str) -> anyhow::Result<Option<String>> {
        match self {
            Self::Terminal(editor) => {
                let prompt = if before.is_empty() { "> " } else { ". " };
                match editor.readline(prompt) {
                    Ok(line) => Ok(Some(line)),
                    Err(ReadlineError::Eof | ReadlineError::Interrupted) => Ok(None),
                    Err(error) => Err(error).context("cannot read a message"),
                }
            }
            Self::Pipe(stdin) => {
                let mut line = String::new();
                let read = stdin.lock().read_line(&mut line);
                if read.context("cannot read the messages on stdin")? == 0 {
                    return Ok(None);
                }
                let line = line.strip_suffix('\n').unwrap_or(&line);
                Ok(Some(line.strip_suffix('\r').unwrap_or(line).to_owned()))
            }
        }
    }
}

/// `None` for an empty line. A slash that begins no command begins a message.
fn classify(text: String) -> Option<Line> {
    let trimmed = text.trim();
    if trimmed.is_empty() {
        return None;
    }
    Some(match trimmed {
        "/exit" => Line::Command(Command::Exit),
        "/clear" => Line::Command(Command::Clear),
        "/help" => Line::Command(Command::Help),
        _ => Line::Message(text),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_whole_lines() {
        let message = |text: &str| Some(Line::Message(text.to_owned()));
        assert_eq!(
            classify(" /clear ".into()),
            Some(Line::Command(Command::Clear))
        );
        assert_eq!(classify("/exit now".into()), message("/exit now"));
        assert_eq!(classify("/usr/bin?".into()), message("/usr/bin?"));
        assert_eq!(classify(" \n".into()), None);
        assert_eq!(classify("  Hello ".into()), message("  Hello "));
    }
}
