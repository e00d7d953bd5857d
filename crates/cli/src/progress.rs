//! Progress bars on stderr, where that is a terminal; elsewhere nothing.

use std::io::IsTerminal;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// A progress line, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// For work of unknown length.
    pub(crate) fn spinner(message: impl Into<String>) -> Self {
        let bar = shown(ProgressBar::new_spinner());
        bar.set_message(message.into());
        bar.enable_steady_tick(Duration::from_millis(100));
        Self(bar)
    }

    /// For work counted in tokens.
    pub(crate) fn tokens(message: impl Into<String>, n_tokens: usize) -> Self {
        Self::counted(message, n_tokens, "tokens")
    }

    /// For work counted in texts.
    pub(crate) fn texts(message: impl Into<String>, n_texts: usize) -> Self {
        Self::counted(message, n_texts, "texts")
    }

    /// For work counted in tensors.
    pub(crate) fn tensors(message: impl Into<String>, n_tensors: usize) -> Self {
        Self::counted(message, n_tensors, "tensors")
    }

    fn counted(message: impl Into<String>, n: usize, what: &str) -> Self {
        let bar = shown(ProgressBar::new(n as u64));
        let style = format!("{{msg}} [{{bar:30}}] {{pos}}/{{len}} {what} ({{per_sec}})");
        if let Ok(style) = ProgressStyle::with_template(&style) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(message.into());
        Self(bar)
    }

    /// Shows that so many are done.
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
