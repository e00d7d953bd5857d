//! Lines as a person types them, or as a pipe brings them.
//!
//! Invariant: a line that Ctrl-C interrupts is gone, and nothing else is. Knows nothing of commands
//! and models.

use std::env;
use std::ffi::OsString;
use std::io::{BufRead, IsTerminal, Stdin};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Context;
use rustyline::error::ReadlineError;
use rustyline::{
    Cmd, ConditionalEventHandler, Config, DefaultEditor, Event, EventContext, EventHandler,
    KeyEvent, RepeatCount,
};

use crate::failure::UsageError;
use crate::keyboard;
use crate::terminal::remark;

/// Lines that are remembered.
const MAX_HISTORY: usize = 1000;

/// The mark before and after a message of several lines.
const QUOTES: &str = "\"\"\"";

/// What came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Input {
    /// A line, or several that belong together.
    Text(String),
    /// Ctrl-C on an empty line.
    Interrupt,
    /// Nothing more comes.
    End,
}

/// Where lines come from.
pub(super) enum Lines {
    /// A person, who can edit them.
    Terminal(Box<Editor>),
    /// A pipe or file.
    Pipe(Stdin),
}

/// A line editor with a history.
pub(super) struct Editor {
    editor: DefaultEditor,
    history: Option<PathBuf>,
    /// Whether the line was empty when Ctrl-C came.
    was_empty: Arc<AtomicBool>,
}

/// Looks at the line before Ctrl-C ends it.
struct OnInterrupt(Arc<AtomicBool>);

impl ConditionalEventHandler for OnInterrupt {
    fn handle(&self, _: &Event, _: RepeatCount, _: bool, context: &EventContext) -> Option<Cmd> {
        self.0.store(context.line().is_empty(), Ordering::Relaxed);
        Some(Cmd::Interrupt)
    }
}

impl Lines {
    /// Standard input; a person's lines are kept in the file `history` for later runs.
    ///
    /// # Errors
    /// Where the terminal cannot be set up.
    pub(super) fn open(history: Option<PathBuf>) -> anyhow::Result<Self> {
        let stdin = std::io::stdin();
        if !stdin.is_terminal() {
            return Ok(Self::Pipe(stdin));
        }
        let cannot = || "cannot use this terminal";
        let config = Config::builder()
            .max_history_size(MAX_HISTORY)
            .with_context(cannot)?
            .history_ignore_space(true)
            .build();
        let mut editor = DefaultEditor::with_config(config).with_context(cannot)?;
        let was_empty = Arc::new(AtomicBool::new(true));
        let on_interrupt = OnInterrupt(Arc::clone(&was_empty));
        editor.bind_sequence(
            KeyEvent::ctrl('C'),
            EventHandler::Conditional(Box::new(on_interrupt)),
        );
        if let Some(path) = &history {
            // The first time, there is none.
            let _ = editor.load_history(path);
        }
        Ok(Self::Terminal(Box::new(Editor {
            editor,
            history,
            was_empty,
        })))
    }

    /// Whether a person is there.
    pub(super) fn is_terminal(&self) -> bool {
        matches!(self, Self::Terminal(_))
    }

    /// The next lines that belong together.
    ///
    /// # Errors
    /// Where input cannot be read.
    pub(super) fn next(&mut self) -> anyhow::Result<Input> {
        let mut text = String::new();
        // Whether the lines between two marks are collected.
        let mut is_quoted = false;
        loop {
            // A line that continues another one has another prompt.
            let before = if is_quoted { QUOTES } else { &text };
            match self.line(before)? {
                Input::Interrupt if text.is_empty() => return Ok(Input::Interrupt),
                Input::Interrupt => {
                    text.clear();
                    is_quoted = false;
                }
                Input::End if text.is_empty() => return Ok(Input::End),
                Input::End => break,
                Input::Text(line) if is_quoted => match line.trim_end().strip_suffix(QUOTES) {
                    Some(last) => {
                        text += last;
                        text.truncate(text.trim_end_matches('\n').len());
                        break;
                    }
                    None => text = text + &line + "\n",
                },
                Input::Text(line) if text.is_empty() && line.starts_with(QUOTES) => {
                    let begun = &line[QUOTES.len()..];
                    if let Some(whole) = begun.trim_end().strip_suffix(QUOTES) {
                        text += whole;
                        break;
                    }
                    is_quoted = true;
                    text = if begun.is_empty() {
                        String::new()
                    } else {
                        format!("{begun}\n")
                    };
                }
                Input::Text(line) => match line.strip_suffix('\\') {
                    Some(start) => text = text + start + "\n",
                    None => {
                        text += &line;
                        break;
                    }
                },
            }
        }
        if let Self::Terminal(editor) = self {
            editor.remember(&text);
        }
        Ok(Input::Text(text))
    }

    /// One line, without its end; `before` is what it continues.
    fn line(&mut self, before: &str) -> anyhow::Result<Input> {
        match self {
            Self::Terminal(editor) => editor.line(before),
            Self::Pipe(stdin) => {
                let mut line = String::new();
                let read = stdin.lock().read_line(&mut line);
                if read.context("cannot read the messages on stdin")? == 0 {
                    return Ok(Input::End);
                }
                let line = line.strip_suffix('\n').unwrap_or(&line);
                let line = line.strip_suffix('\r').unwrap_or(line);
                Ok(Input::Text(line.to_owned()))
            }
        }
    }
}

impl Editor {
    fn line(&mut self, before: &str) -> anyhow::Result<Input> {
        let prompt = if before.is_empty() { "> " } else { ". " };
        loop {
            self.was_empty.store(true, Ordering::Relaxed);
            let line = self.editor.readline(prompt);
            // Keys that come before the next prompt wait for it.
            keyboard::silence_keys();
            return match line {
                Ok(line) => Ok(Input::Text(line)),
                Err(ReadlineError::Eof) => Ok(Input::End),
                Err(ReadlineError::Interrupted) => {
                    let is_cleared = !self.was_empty.load(Ordering::Relaxed);
                    if is_cleared && before.is_empty() {
                        continue;
                    }
                    Ok(Input::Interrupt)
                }
                Err(error) => Err(error).context("cannot read a message"),
            };
        }
    }

    /// Adds a line to the history, in memory and in its file.
    fn remember(&mut self, text: &str) {
        if text.trim().is_empty() {
            return;
        }
        let added = self.editor.add_history_entry(text);
        let (Ok(true), Some(path)) = (added, &self.history) else {
            return;
        };
        if let Some(parent) = path.parent() {
            // Where it cannot be made, writing fails.
            let _ = std::fs::create_dir_all(parent);
        }
        if let Err(error) = self.editor.append_history(path) {
            remark(&format!(
                "the history is not kept: cannot write '{}': {error}",
                path.display()
            ));
            self.history = None;
        }
    }
}

/// Where the history is kept: `CELLAR_HISTORY` (empty: nowhere), or the directory for the state of
/// programs.
///
/// # Errors
/// A usage error where `CELLAR_HISTORY` is a directory.
pub(super) fn history_path() -> anyhow::Result<Option<PathBuf>> {
    let path = path_of_history(|name| env::var_os(name));
    match path {
        Some(path) if path.is_dir() => Err(UsageError(format!(
            "the history cannot be kept in '{}': it is a directory; CELLAR_HISTORY names a file",
            path.display()
        ))
        .into()),
        path => Ok(path),
    }
}

fn path_of_history(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    if let Some(path) = variable("CELLAR_HISTORY") {
        return (!path.is_empty()).then(|| PathBuf::from(path));
    }
    let directory = |name| {
        variable(name)
            .map(PathBuf::from)
            .filter(|path| path.is_absolute())
    };
    let state = directory("XDG_STATE_HOME")
        .or_else(|| directory("LOCALAPPDATA"))
        .or_else(|| directory("HOME").map(|home| home.join(".local/state")))?;
    Some(state.join("cellar").join("history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(variables: &[(&str, &str)]) -> Option<String> {
        let found = path_of_history(|name| {
            let variable = variables.iter().find(|(n, _)| *n == name);
            variable.map(|(_, value)| OsString::from(value))
        });
        found.map(|path| path.to_str().unwrap().to_owned())
    }

    #[test]
    fn the_history_is_state_of_the_user() {
        let home = ("HOME", "/home/me");
        let of = |path: &str| Some(path.to_owned());
        assert_eq!(path(&[home]), of("/home/me/.local/state/cellar/history"));
        let state = ("XDG_STATE_HOME", "/state");
        assert_eq!(path(&[home, state]), of("/state/cellar/history"));
        // The specification ignores relative paths.
        let relative = ("XDG_STATE_HOME", "state");
        assert_eq!(
            path(&[home, relative]),
            of("/home/me/.local/state/cellar/history")
        );
        let own = ("CELLAR_HISTORY", "lines");
        assert_eq!(path(&[home, state, own]), of("lines"));
        assert_eq!(path(&[home, ("CELLAR_HISTORY", "")]), None);
        assert_eq!(path(&[]), None);
    }
}
