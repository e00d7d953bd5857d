//! Progress on stderr, where a person looks at it; elsewhere nothing.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A line that says what goes on until it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// Something that takes an unknown time.
    pub(crate) fn spinner(message: impl Into<String>) -> Self {
        let bar = shown(ProgressBar::new_spinner());
        bar.set_message(message.into());
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    /// Something that is counted in tokens.
    pub(crate) fn tokens(message: impl Into<String>, n_tokens: usize) -> Self {
        Self::counted(message, (n_tokens, "tokens"))
    }

    /// Something that is counted in texts.
    pub(crate) fn texts(message: impl Into<String>, n_texts: usize) -> Self {
        Self::counted(message, (n_texts, "texts"))
    }

    /// Something that is counted in tensors.
    pub(crate) fn tensors(message: impl Into<String>, n_tensors: usize) -> Self {
        Self::counted(message, (n_tensors, "tensors"))
    }

    fn counted(message: impl Into<String>, (n, what): (usize, &str)) -> Self {
        let bar = shown(ProgressBar::new(n as u64));
        let style = format!("{{msg}} [{{bar:30}}] {{pos}}/{{len}} {what} ({{per_sec}})");
        if let Ok(style) = ProgressStyle::with_template(&style) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(message.into());
        Self(bar)
    }

    /// How far it is.
    pub(crate) fn set(&self, n_done: usize) {
        self.0.set_position(n_done as u64);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn shown(bar: ProgressBar) -> ProgressBar {
    if std::io::stderr().is_terminal() {
        bar
    } else {
        ProgressBar::hidden()
    }
}
