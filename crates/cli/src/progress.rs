//! Progress bars on stderr, where that is a terminal; elsewhere nothing.

use std::fmt;
use std::io::IsTerminal;
use std::sync::LazyLock;
use std::time::Duration;

use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use kv_core::backend::OnProgress;

use crate::terminal::escape;

/// All bars, so that two shown at a time keep to lines of their own.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A progress line, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

impl Progress {
    /// For work of unknown length.
    pub(crate) fn spinner(message: impl Into<String>) -> Self {
        let bar = shown(ProgressBar::new_spinner());
        bar.set_message(escape(&message.into()).into_owned());
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

    /// For work counted in values.
    pub(crate) fn values(message: impl Into<String>, n_values: usize) -> Self {
        Self::counted(message, n_values, "values")
    }

    /// For weights that a backend loads or packs, and what it reports to.
    pub(crate) fn weights() -> (Self, OnProgress) {
        let bar = shown(ProgressBar::new(0));
        let style = "packing weights [{bar:30}] {bytes}/{total_bytes} ({bytes_per_sec})";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style.progress_chars("=> "));
        }
        let reported = bar.clone();
        let on_progress = OnProgress::new(move |progress| {
            reported.set_length(progress.total);
            reported.set_position(progress.done);
        });
        (Self(bar), on_progress)
    }

    fn counted(message: impl Into<String>, n: usize, what: &'static str) -> Self {
        let bar = shown(ProgressBar::new(n as u64));
        let style = format!("{{msg}} [{{bar:30}}] {{human_pos}}/{{human_len}} {what} ({{rate}})");
        if let Ok(style) = ProgressStyle::with_template(&style) {
            let rate = move |state: &ProgressState, out: &mut dyn fmt::Write| {
                // Nobody reads a bar that cannot be written.
                let _ = out.write_str(&rate(state, what));
            };
            bar.set_style(style.progress_chars("=> ").with_key("rate", rate));
        }
        bar.set_message(escape(&message.into()).into_owned());
        // The first step may take long: its time is shown.
        bar.enable_steady_tick(Duration::from_millis(200));
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

/// How fast the work goes and how long it takes; before anything is done, for how long it has.
fn rate(state: &ProgressState, what: &str) -> String {
    if state.pos() == 0 {
        return format!("{} s", state.elapsed().as_secs());
    }
    let (rate, left) = (state.per_sec(), HumanDuration(state.eta()));
    format!("{rate:.0} {what}/s, {left:#} left")
}

fn shown(bar: ProgressBar) -> ProgressBar {
    if std::io::stderr().is_terminal() {
        BARS.add(bar)
    } else {
        ProgressBar::hidden()
    }
}
