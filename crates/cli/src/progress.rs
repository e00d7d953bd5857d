//! Progress bars on stderr, where that is a terminal; elsewhere nothing.

use std::fmt;
use std::io::IsTerminal;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, LazyLock};
use std::thread::JoinHandle;
use std::time::Duration;

use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use kv_backend::{OnProgress, RunProgress};

use crate::terminal::escape;

/// All bars, so that two shown at a time keep to lines of their own.
static BARS: LazyLock<MultiProgress> = LazyLock::new(MultiProgress::new);

/// A progress line, removed when it is dropped.
#[derive(Debug)]
pub(crate) struct Progress(ProgressBar);

/// How often a bar follows a run.
const FOLLOW: Duration = Duration::from_millis(100);

/// A progress line for tokens, which moves within a run.
#[derive(Debug)]
pub(crate) struct PromptBar {
    bar: Progress,
    run: RunProgress,
    /// Tokens of the runs that are done.
    n_done: Arc<AtomicUsize>,
    /// Ends the thread that moves the bar, when it is dropped.
    ends: Option<mpsc::Sender<()>>,
    follower: Option<JoinHandle<()>>,
}

impl PromptBar {
    /// For a prompt that is evaluated in ubatches of at most `n_ubatch` tokens.
    pub(crate) fn new(message: impl Into<String>, n_tokens: usize, n_ubatch: usize) -> Self {
        let bar = Progress::tokens(message, n_tokens);
        let (run, n_done) = (RunProgress::default(), Arc::<AtomicUsize>::default());
        let (ends, ended) = mpsc::channel();
        let shown = (bar.0.clone(), run.clone(), Arc::clone(&n_done));
        let follower = (!bar.0.is_hidden()).then(|| {
            std::thread::spawn(move || {
                let (bar, run, n_done) = shown;
                while ended.recv_timeout(FOLLOW) == Err(RecvTimeoutError::Timeout) {
                    let done = n_done.load(Ordering::Relaxed);
                    let n_in_run = n_ubatch.min(n_tokens.saturating_sub(done));
                    let within = run.fraction() * n_in_run as f64;
                    bar.set_position(done as u64 + within as u64);
                }
            })
        });
        Self {
            bar,
            run,
            n_done,
            ends: Some(ends),
            follower,
        }
    }

    /// What runs report to.
    pub(crate) fn run(&self) -> RunProgress {
        self.run.clone()
    }

    /// Shows that so many tokens are evaluated.
    pub(crate) fn set(&self, n_done: usize) {
        self.run.report(0, 1);
        self.n_done.store(n_done, Ordering::Relaxed);
        self.bar.set(n_done);
    }
}

impl Drop for PromptBar {
    /// No one moves the bar any more before it is removed.
    fn drop(&mut self) {
        self.ends.take();
        // A thread that panicked moves nothing either.
        let _ = self.follower.take().map(JoinHandle::join);
    }
}

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

    /// For work counted in steps.
    pub(crate) fn steps(message: impl Into<String>, n_steps: usize) -> Self {
        Self::counted(message, n_steps, "steps")
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

    /// For bytes, of which some are there already.
    #[cfg(feature = "hub")]
    pub(crate) fn bytes(message: impl Into<String>, n_bytes: u64, n_present: u64) -> Self {
        let bar = shown(ProgressBar::new(n_bytes));
        let style = "{msg} [{bar:30}] {bytes}/{total_bytes} ({bytes_per_sec}, {eta})";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_message(escape(&message.into()).into_owned());
        bar.set_position(n_present);
        // The rate is that of what comes.
        bar.reset_eta();
        Self(bar)
    }

    /// Shows that so many bytes are there.
    #[cfg(feature = "hub")]
    pub(crate) fn set_bytes(&self, n_bytes: u64) {
        self.0.set_position(n_bytes);
    }

    /// Hides all bars while something else is printed.
    pub(crate) fn suspend(print: impl FnOnce()) {
        BARS.suspend(print);
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
