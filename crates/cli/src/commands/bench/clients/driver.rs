//! [`drive`]: sends requests to a service when they are due, and reads all texts as they come.
//!
//! One thread does both: the service's thread notes when a piece is there, so the times are those
//! of a reader that always waits. Invariant: in an open loop a request counts from when it was due,
//! so a driver that is late makes no service look faster. Knows nothing of reports.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use cellar_engine::serve::{Service, ServiceError, TextRequest, TextStream, Usage};
use kv_backend::BoxedBackend;

use super::schedule::Schedule;

/// What became of one request.
#[derive(Clone, Debug)]
pub(super) struct Answered {
    pub(super) usage: Usage,
    /// How much later than it was due it was sent.
    pub(super) late: Duration,
    /// Between pieces of its text.
    pub(super) gaps: Vec<Duration>,
}

/// A text that has not ended.
struct Reading {
    stream: TextStream,
    waker: Waker,
    late: Duration,
    last_piece: Option<Instant>,
    gaps: Vec<Duration>,
}

/// Notes when there is something to read.
struct PieceWaker {
    number: usize,
    woken: Sender<(usize, Instant)>,
}

impl Wake for PieceWaker {
    fn wake(self: Arc<Self>) {
        // The receiver is gone where another request has failed and the run ends.
        let _is_read = self.woken.send((self.number, Instant::now()));
    }
}

/// Sends requests and reads their texts.
struct Driver<'a> {
    service: &'a Service<BoxedBackend>,
    started: Instant,
    /// When there is something to read, and of which request.
    woken: Receiver<(usize, Instant)>,
    waker: Sender<(usize, Instant)>,
    /// By the number of the request.
    reading: BTreeMap<usize, Reading>,
    answered: Vec<Answered>,
}

/// Sends the requests in their order, and returns what became of them when all have ended.
pub(super) fn drive(
    service: &Service<BoxedBackend>,
    requests: Vec<TextRequest>,
    schedule: &Schedule,
) -> Result<Vec<Answered>, ServiceError> {
    let n_requests = requests.len();
    let mut requests = requests.into_iter();
    let (waker, woken) = channel();
    let mut driver = Driver {
        service,
        started: Instant::now(),
        woken,
        waker,
        reading: BTreeMap::new(),
        answered: Vec::with_capacity(n_requests),
    };
    while driver.answered.len() < n_requests {
        let n_ended = driver.answered.len();
        let due = schedule.next_time(n_ended + driver.reading.len(), n_ended);
        match due {
            Some(due) if due <= driver.started.elapsed() => {
                if let Some(request) = requests.next() {
                    driver.send(request, schedule, due)?;
                }
            }
            _ => driver.wait(due)?,
        }
    }
    Ok(driver.answered)
}

impl Driver<'_> {
    /// Sends a request that was due at this time since the start.
    fn send(
        &mut self,
        request: TextRequest,
        schedule: &Schedule,
        due: Duration,
    ) -> Result<(), ServiceError> {
        let late = match schedule {
            Schedule::Closed { .. } => Duration::ZERO,
            Schedule::Open { .. } => self.started.elapsed().saturating_sub(due),
        };
        let number = self.answered.len() + self.reading.len();
        let stream = self.service.submit(request)?;
        let woken = self.waker.clone();
        let text = Reading {
            stream,
            waker: Waker::from(Arc::new(PieceWaker { number, woken })),
            late,
            last_piece: None,
            gaps: Vec::new(),
        };
        self.reading.insert(number, text);
        self.read(number, Instant::now())
    }

    /// Waits until there is something to read, and reads it; until this time since the start at
    /// most.
    fn wait(&mut self, until: Option<Duration>) -> Result<(), ServiceError> {
        let woken = match until {
            Some(until) => {
                let left = until.saturating_sub(self.started.elapsed());
                self.woken.recv_timeout(left).ok()
            }
            // This side has a sender, too, so it never ends.
            None => self.woken.recv().ok(),
        };
        woken.map_or(Ok(()), |(number, at)| self.read(number, at))
    }

    /// Reads what there is of a text since this moment.
    fn read(&mut self, number: usize, at: Instant) -> Result<(), ServiceError> {
        let Some(text) = self.reading.get_mut(&number) else {
            return Ok(()); // its end was read with the piece before
        };
        let mut cx = Context::from_waker(&text.waker);
        let mut at = Some(at);
        while let Poll::Ready(piece) = text.stream.poll_piece(&mut cx) {
            if piece?.is_none() {
                return self.end(number);
            }
            let now = at.take().unwrap_or_else(Instant::now);
            let last = text.last_piece.replace(now);
            text.gaps.extend(last.map(|last| now - last));
        }
        Ok(())
    }

    fn end(&mut self, number: usize) -> Result<(), ServiceError> {
        if let Some(text) = self.reading.remove(&number) {
            self.answered.push(Answered {
                usage: text.stream.finish()?.usage,
                late: text.late,
                gaps: text.gaps,
            });
        }
        Ok(())
    }
}
