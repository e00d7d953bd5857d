//! [`RequestLog`]: a line on stderr for each request.
//!
//! Invariant: lines are written by a thread of its own, so no request waits for a slow reader of
//! stderr; lines that find no room in its queue are counted, and the number is said.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use anyhow::Context;
use cellar_server::{ObserveRequests, RequestReport};

use crate::args::{LogFormat, LogLevel, ServeArgs};
use crate::terminal;

/// Lines that wait to be written.
const QUEUE: usize = 4096;

/// Addresses that programs ask again and again, whose answers are no news while they are good.
const PROBES: [&str; 5] = ["/health", "/readyz", "/livez", "/metrics", "/v1/health"];

/// Writes a line for each request.
#[derive(Debug)]
pub(super) struct RequestLog {
    level: LogLevel,
    format: LogFormat,
    lines: Mutex<Option<SyncSender<String>>>,
    n_lost: Arc<AtomicU64>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

impl RequestLog {
    /// `None` where no log is wanted.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(super) fn start(args: &ServeArgs) -> anyhow::Result<Option<Arc<Self>>> {
        if args.log == LogLevel::Off {
            return Ok(None);
        }
        let (lines, written) = sync_channel::<String>(QUEUE);
        let n_lost = Arc::<AtomicU64>::default();
        let lost = Arc::clone(&n_lost);
        let write = move || {
            for line in written {
                terminal::note(line);
                let n = lost.swap(0, Ordering::Relaxed);
                if n > 0 {
                    terminal::note(format_args!(
                        "{n} lines of this log were lost: stderr is slow"
                    ));
                }
            }
        };
        let writer = std::thread::Builder::new().name("cellar-log".to_owned());
        let writer = writer.spawn(write).context("cannot start the log")?;
        Ok(Some(Arc::new(Self {
            level: args.log,
            format: args.log_format,
            lines: Mutex::new(Some(lines)),
            n_lost,
            writer: Mutex::new(Some(writer)),
        })))
    }

    /// Writes what waits, and ends.
    pub(super) fn close(&self) {
        let lines = self.lines.lock();
        drop(lines.unwrap_or_else(PoisonError::into_inner).take());
        let writer = self.writer.lock();
        if let Some(writer) = writer.unwrap_or_else(PoisonError::into_inner).take() {
            // A writer does not panic.
            let _ended = writer.join();
        }
    }

    /// True for what is asked often and was answered well: the probes, and what the page loads.
    fn is_no_news(&self, report: &RequestReport) -> bool {
        let is_good = report
            .status
            .is_some_and(|status| !status.is_client_error() && !status.is_server_error());
        let is_often = PROBES.contains(&report.path.as_str()) || report.path.starts_with("/view/");
        self.level != LogLevel::Debug && is_good && is_often
    }
}

impl ObserveRequests for RequestLog {
    fn ended(&self, report: &RequestReport) {
        if self.is_no_news(report) {
            return;
        }
        let line = match self.format {
            LogFormat::Text => terminal::escape(&report.to_string()).into_owned(),
            LogFormat::Json => match terminal::json(&report.json()) {
                Ok(line) => line,
                Err(_) => return,
            },
        };
        let lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lines) = &*lines
            && lines.try_send(line).is_err()
        {
            self.n_lost.fetch_add(1, Ordering::Relaxed);
        }
    }
}
