//! The text of a command: an argument, a file, or what comes on standard input.
//!
//! Invariant: standard input is read where it is asked for or brings something at once.

use std::io::{BufRead, IsTerminal};
use std::path::Path;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use anyhow::Context;

use crate::failure::usage;
use crate::input;
use crate::terminal;

/// How long standard input may take to begin next to a prompt, and to end before a remark on it.
const PATIENCE: Duration = Duration::from_secs(1);

/// The text of the argument, the file or standard input, in this order; `None` where there is none.
///
/// # Errors
/// Where the file or pipe cannot be read or holds no text.
pub(crate) fn text(argument: Option<&str>, file: Option<&Path>) -> anyhow::Result<Option<String>> {
    if let Some(text) = argument {
        return Ok(Some(text.to_owned()));
    }
    if let Some(path) = file {
        return input::text(path).map(Some);
    }
    if std::io::stdin().is_terminal() {
        return Ok(None);
    }
    let text = input::read_text(input::stdin()?).context("cannot read the text on stdin")?;
    Ok(Some(text).filter(|text| !text.is_empty()))
}

/// The arguments, or the lines of a file or pipe; at least one.
///
/// # Errors
/// A usage error, `wanted`, where there is none; where the file or pipe cannot be read.
pub(crate) fn lines(
    arguments: &[String],
    file: Option<&Path>,
    wanted: &str,
) -> anyhow::Result<Vec<String>> {
    if !arguments.is_empty() {
        return Ok(arguments.to_vec());
    }
    let lines = text(None, file)?;
    match lines.map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()) {
        Some(lines) if !lines.is_empty() => Ok(lines),
        _ => usage(wanted.to_owned()),
    }
}

/// What a pipe or a file brings on standard input next to a prompt; `None` where there is neither,
/// or nothing but white space in it. Terminals and devices such as `/dev/null` are not read, nor is
/// a file that a shell's loop reads. A pipe that brings nothing for [`PATIENCE`] is left alone.
///
/// # Errors
/// Where it cannot be read or is no text.
pub(crate) fn piped_text() -> anyhow::Result<Option<String>> {
    if !input::stdin_is_piped() || input::stdin_is_shared() {
        return Ok(None);
    }
    let (begun, has_begun) = mpsc::channel::<()>();
    let (done, is_done) = mpsc::channel();
    // Where nothing comes, the thread waits until the program ends.
    thread::spawn(move || {
        let read = || {
            let mut stdin = input::stdin()?;
            let filled = stdin.fill_buf().map(|_| ());
            // A failure means that the receiver has given up waiting.
            let _ = begun.send(());
            filled?;
            input::read_text(stdin)
        };
        let _ = done.send(read());
    });
    if has_begun.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
        terminal::info(
            "(nothing came on standard input within a second: the prompt goes without it; -f - waits \
             for it, --no-stdin does not)",
        );
        return Ok(None);
    }
    let text = match is_done.recv_timeout(PATIENCE) {
        Ok(text) => text,
        Err(_) => {
            // Who starts the program with a pipe that stays open sees why nothing happens.
            terminal::info(
                "(waiting for the end of standard input, which comes before the prompt; --no-stdin \
                 leaves it out)",
            );
            is_done.recv()?
        }
    };
    let text = text.context("cannot read the text on stdin")?;
    Ok(Some(text).filter(|text| !text.trim().is_empty()))
}

/// A prompt without the line break that editors and `echo` leave at its end.
pub(crate) fn without_last_line_break(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_line_break_goes() {
        let cut = |text: &str| without_last_line_break(text.to_owned());
        assert_eq!(cut("a\n\n"), "a\n");
        assert_eq!(cut("a\r\n"), "a");
        assert_eq!(cut("a "), "a ");
    }
}
