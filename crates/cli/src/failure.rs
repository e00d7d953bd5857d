//! How the program fails: one line on stderr, and an exit code.
//!
//! Invariant: a closed pipe (`cellar … | head -1`) is not a failure and prints nothing.

use std::fmt;
use std::io;

use crate::advice::advice;
use crate::terminal::{escape, note};

/// The command line asks for something impossible.
#[derive(Debug)]
pub(crate) struct UsageError(pub(crate) String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for UsageError {}

/// A model takes more memory than is free.
#[derive(Debug)]
#[cfg_attr(
    not(feature = "serve"),
    allow(dead_code, reason = "only a server tells the numbers apart")
)]
pub(crate) struct MemoryShortage {
    /// What takes how much, and what to do.
    pub(crate) message: String,
    /// Bytes that it takes.
    pub(crate) needed: u64,
    /// Bytes that are free.
    pub(crate) available: u64,
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.message.fmt(f)
    }
}

impl std::error::Error for MemoryShortage {}

/// A usage error as a result.
pub(crate) fn usage<T>(message: impl Into<String>) -> anyhow::Result<T> {
    Err(UsageError(message.into()).into())
}

/// How the program ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Exit {
    /// It did its work.
    Done,
    /// It failed.
    Failed,
    /// The command line was wrong.
    WrongUsage,
    /// It was ended by Ctrl-C.
    Interrupted,
}

impl Exit {
    /// The code that the shell sees.
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Done => 0,
            Self::Failed => 1,
            Self::WrongUsage => 2,
            Self::Interrupted => 130,
        }
    }

    /// How the program ends after this error.
    pub(crate) fn of(error: &anyhow::Error) -> Self {
        let is_closed_pipe = |e: &io::Error| e.kind() == io::ErrorKind::BrokenPipe;
        if error
            .chain()
            .filter_map(|e| e.downcast_ref())
            .any(is_closed_pipe)
        {
            Self::Done
        } else if error.chain().any(|e| e.is::<UsageError>()) {
            Self::WrongUsage
        } else {
            Self::Failed
        }
    }
}

/// An error with its causes in one line. Causes that the message contains already are left out.
pub(crate) fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = words(&cause.to_string());
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line = format!("{line}: {text}");
        }
    }
    if let Some(advice) = advice(error) {
        line = format!("{line}; {}", words(&advice));
    }
    line
}

/// A text in one line, with one space between words, and without control characters, which could
/// come from a file.
pub(crate) fn words(text: &str) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    escape(&words.join(" ")).into_owned()
}

/// Prints a warning on stderr.
pub(crate) fn warn(text: &str) {
    note(format_args!("warning: {}", words(text)));
}

#[cfg(test)]
mod tests {
    use anyhow::Context;

    use super::*;

    #[test]
    fn causes_are_printed_once() {
        let error =
            Err::<(), _>(anyhow::anyhow!("no\n such  thing")).context("cannot: no such thing");
        assert_eq!(one_line(&error.unwrap_err()), "cannot: no such thing");
        let error = Err::<(), _>(anyhow::anyhow!("disk full")).context("cannot write");
        assert_eq!(one_line(&error.unwrap_err()), "cannot write: disk full");
    }

    #[test]
    fn exit_codes_tell_usage_errors_from_failures() {
        let closed = io::Error::from(io::ErrorKind::BrokenPipe);
        assert_eq!(
            Exit::of(&anyhow::Error::from(closed).context("writing")),
            Exit::Done
        );
        assert_eq!(
            Exit::of(&usage::<()>("-c 0").unwrap_err().context("run")),
            Exit::WrongUsage
        );
        assert_eq!(Exit::of(&anyhow::anyhow!("broken")), Exit::Failed);
        assert_eq!(Exit::Interrupted.code(), 130);
    }
}
