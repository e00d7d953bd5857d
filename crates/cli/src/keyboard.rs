//! The terminal of a person who types: its width, and what it does with keys while an answer
//! streams.
//!
//! Invariant: however the program ends by itself, the terminal gets its settings back. Without a
//! terminal, and where it is no Unix terminal, everything here does nothing.

/// The columns of the terminal that shows stdout, now; `None` where there is none.
pub(crate) fn width() -> Option<usize> {
    let (terminal_size::Width(columns), _) = terminal_size::terminal_size_of(std::io::stdout())?;
    (columns > 0).then_some(usize::from(columns))
}

/// Gives the terminal its settings back when it is dropped.
#[derive(Debug)]
pub(crate) struct RestoreOnDrop;

impl Drop for RestoreOnDrop {
    fn drop(&mut self) {
        restore();
    }
}

#[cfg(not(unix))]
pub(crate) use elsewhere::{restore, silence_keys};
#[cfg(unix)]
pub(crate) use unix::{restore, silence_keys};

/// The settings of a terminal on stdin.
#[cfg(unix)]
mod unix {
    use std::io::{self, IsTerminal, Write};
    use std::sync::{Mutex, PoisonError};

    use rustix::termios::{
        InputModes, LocalModes, OptionalActions, SpecialCodeIndex, Termios, tcgetattr, tcsetattr,
    };

    /// Pasted text stands between marks, so that the next prompt takes it as one message.
    const BRACKETED_PASTE_ON: &str = "\x1b[?2004h";
    const BRACKETED_PASTE_OFF: &str = "\x1b[?2004l";

    /// The settings before the program changed them.
    static ORIGINAL: Mutex<Option<Termios>> = Mutex::new(None);

    /// Lets keys wait for the next prompt instead of showing them; Ctrl-C stays a signal. May be
    /// called again, after another program has had the terminal.
    pub(crate) fn silence_keys() {
        let stdin = io::stdin();
        if stdin.is_terminal()
            && let Ok(original) = tcgetattr(&stdin)
        {
            let mut silent = original.clone();
            silent
                .local_modes
                .remove(LocalModes::ECHO | LocalModes::ICANON);
            silent.input_modes.remove(InputModes::ICRNL);
            silent.special_codes[SpecialCodeIndex::VMIN] = 1;
            silent.special_codes[SpecialCodeIndex::VTIME] = 0;
            // A terminal that refuses shows the keys.
            let _ = tcsetattr(&stdin, OptionalActions::Drain, &silent);
            let mut kept = ORIGINAL.lock().unwrap_or_else(PoisonError::into_inner);
            kept.get_or_insert(original);
            write_to_terminal(BRACKETED_PASTE_ON);
        }
    }

    /// Gives the terminal the settings that it had before [`silence_keys`].
    pub(crate) fn restore() {
        let kept = ORIGINAL
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(original) = kept {
            write_to_terminal(BRACKETED_PASTE_OFF);
            let _ = tcsetattr(io::stdin(), OptionalActions::Drain, &original);
        }
    }

    fn write_to_terminal(sequence: &str) {
        let mut stderr = io::stderr();
        if stderr.is_terminal() {
            let _ = stderr.write_all(sequence.as_bytes());
        }
    }
}

/// Where keys cannot be silenced.
#[cfg(not(unix))]
mod elsewhere {
    /// Does nothing.
    pub(crate) fn silence_keys() {}

    /// Does nothing.
    pub(crate) fn restore() {}
}
