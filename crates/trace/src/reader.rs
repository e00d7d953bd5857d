//! [`Trace`]: a trace that was read.
//!
//! Invariant: every event belongs to a request that came before and has not ended; what is wrong is
//! an error with the place in the file. A file that was cut off is read up to the cut, and says
//! where that is.

use std::collections::BTreeMap;
use std::io::BufRead;

use cellar_scheduler::{Micros, PrefixUse, PromptRows, Request, RequestId, Salt, Tenant};
use kv_core::TokenId;

use crate::error::TraceError;
use crate::record::{
    ChosenTokens, SubmittedRequest, TRACE_VERSION, TraceEvent, TraceHeader, TraceLine, TracedEnd,
};

/// A trace that was read: the requests with their texts, and what the service did.
#[derive(Clone, Debug)]
pub struct Trace {
    pub(crate) header: TraceHeader,
    /// Tokens that each token of it stands for, and each cell of its memory.
    pub(crate) unit: u32,
    /// In the order in which they came.
    pub(crate) requests: Vec<TracedRequest>,
    /// Texts by number.
    pub(crate) texts: BTreeMap<RequestId, TracedText>,
    /// All events but those that requests came.
    pub(crate) events: Vec<TraceEvent>,
    /// Microseconds from the first line to the last.
    pub(crate) micros: u64,
    cut_off: Option<u64>,
}

/// A request that came.
#[derive(Clone, Debug)]
pub(crate) struct TracedRequest {
    pub(crate) at: Micros,
    pub(crate) request: Request,
    /// Texts that had ended before it came.
    pub(crate) n_ended: usize,
}

/// What became of a text.
#[derive(Clone, Debug, Default)]
pub(crate) struct TracedText {
    /// What was chosen for it.
    pub(crate) tokens: Vec<TokenId>,
    /// How long after it came, and why; `None` where the trace ends before.
    pub(crate) end: Option<(Micros, TracedEnd)>,
    pub(crate) came_at: Micros,
}

impl Trace {
    /// Reads a trace.
    ///
    /// # Errors
    /// [`TraceError::Wrong`] with the place in the file, where it cannot be read, is no trace, is
    /// of another version, or a line is wrong. Not where it was cut off: [`Trace::cut_off`].
    pub fn read(mut input: impl BufRead) -> Result<Self, TraceError> {
        let mut line = Vec::new();
        let mut at = 0;
        let header = match read_line(&mut input, &mut line, at)? {
            LineEnd::Newline => header(&line)?,
            LineEnd::Cut => return Err(wrong(at, "the first line is no header of a trace")),
        };
        at += line.len() as u64;
        let mut trace = Self::new(header, 1);
        let mut n_ended = 0;
        let mut has_stopped = false;
        loop {
            match read_line(&mut input, &mut line, at)? {
                LineEnd::Newline if has_stopped => {
                    return Err(wrong(at, "there are lines after the end of the service"));
                }
                LineEnd::Newline => {}
                LineEnd::Cut => break,
            }
            let parsed: TraceLine = serde_json::from_slice(&line).map_err(|error| {
                let column = error.column().saturating_sub(1) as u64;
                wrong(at + column, &format!("the line is no event: {error}"))
            })?;
            has_stopped = parsed.event == TraceEvent::Stop;
            trace
                .take(parsed, &mut n_ended)
                .map_err(|what| wrong(at, &what))?;
            at += line.len() as u64;
        }
        trace.cut_off = (!has_stopped || !line.is_empty()).then_some(at);
        Ok(trace)
    }

    /// A trace without requests, whose tokens stand for so many each.
    pub(crate) fn new(header: TraceHeader, unit: u32) -> Self {
        Self {
            header,
            unit,
            requests: Vec::new(),
            texts: BTreeMap::new(),
            events: Vec::new(),
            micros: 0,
            cut_off: None,
        }
    }

    /// Where the file was cut off, in bytes: the program that wrote it did not end as it should.
    /// The events before are in the trace.
    pub fn cut_off(&self) -> Option<u64> {
        self.cut_off
    }

    /// Requests that came.
    pub fn n_requests(&self) -> usize {
        self.requests.len()
    }

    /// Takes an event in; an error is what is wrong with it.
    fn take(&mut self, line: TraceLine, n_ended: &mut usize) -> Result<(), String> {
        let at = Micros(line.at);
        self.micros = self.micros.max(line.at);
        match &line.event {
            TraceEvent::Submit(submitted) => {
                self.submit(at, submitted, *n_ended)?;
                return Ok(());
            }
            TraceEvent::Step(step) => {
                for ChosenTokens { request, tokens } in &step.chosen {
                    let text = self.live(*request)?;
                    text.tokens.extend(tokens.as_tokens());
                }
            }
            TraceEvent::End { request, end } => {
                let text = self.live(*request)?;
                let after = Micros(at.0.saturating_sub(text.came_at.0));
                text.end = Some((after, *end));
                *n_ended += 1;
            }
            TraceEvent::Refuse { request } => {
                let text = self.live(*request)?;
                text.end = Some((Micros(0), TracedEnd::Failed));
                *n_ended += 1;
            }
            TraceEvent::Admit(admitted) | TraceEvent::Resume(admitted) => {
                self.live(admitted.request)?;
            }
            TraceEvent::Preempt { request, .. } => {
                self.live(*request)?;
            }
            TraceEvent::Share { .. }
            | TraceEvent::Swap { .. }
            | TraceEvent::Cache { .. }
            | TraceEvent::Drop { .. }
            | TraceEvent::Stop => {}
        }
        self.events.push(line.event);
        Ok(())
    }

    fn submit(
        &mut self,
        at: Micros,
        submitted: &SubmittedRequest,
        n_ended: usize,
    ) -> Result<(), String> {
        /// The most texts of a prompt, far above what a service takes.
        const MAX_TEXTS: u64 = 1 << 16;
        let (first, n_texts) = (submitted.request, submitted.n_texts);
        let end = first.checked_add(n_texts);
        let Some(end) = end.filter(|_| (1..=MAX_TEXTS).contains(&n_texts)) else {
            return Err(format!("request {first} is for {n_texts} texts"));
        };
        for id in (first..end).map(RequestId) {
            let text = TracedText {
                came_at: at,
                ..TracedText::default()
            };
            if self.texts.insert(id, text).is_some() {
                return Err(format!("request {id} came before"));
            }
        }
        self.requests.push(TracedRequest {
            at,
            request: Request {
                id: RequestId(first),
                priority: submitted.priority.into(),
                prompt: submitted.prompt.as_tokens().collect(),
                prefix: match submitted.salt {
                    Some(salt) => PrefixUse::Within(Salt(salt)),
                    None => PrefixUse::Off,
                },
                prompt_rows: if submitted.has_all_rows {
                    PromptRows::All
                } else {
                    PromptRows::Last
                },
                checkpoints: submitted.checkpoints.clone(),
                parting: submitted.parting,
                siblings: (first + 1..end).map(RequestId).collect(),
                tenant: submitted.tenant.map_or_else(Tenant::default, Tenant::from),
                ..Request::default()
            },
            n_ended,
        });
        Ok(())
    }

    /// A text that came and has not ended.
    fn live(&mut self, request: u64) -> Result<&mut TracedText, String> {
        match self.texts.get_mut(&RequestId(request)) {
            Some(text) if text.end.is_none() => Ok(text),
            Some(_) => Err(format!("request {request} has ended before")),
            None => Err(format!("request {request} never came")),
        }
    }
}

fn header(line: &[u8]) -> Result<TraceHeader, TraceError> {
    #[derive(serde::Deserialize)]
    struct Version {
        cellar_trace: u32,
    }
    let version: Version = serde_json::from_slice(line)
        .map_err(|_| wrong(0, "the first line is no header of a trace"))?;
    if version.cellar_trace != TRACE_VERSION {
        let found = version.cellar_trace;
        let what = format!("version {found}, and this program reads version {TRACE_VERSION}");
        return Err(wrong(0, &what));
    }
    serde_json::from_slice(line).map_err(|error| {
        let column = error.column().saturating_sub(1) as u64;
        wrong(column, &format!("the header is wrong: {error}"))
    })
}

/// How a line ends.
enum LineEnd {
    Newline,
    /// The file ends within it, or before it.
    Cut,
}

/// Reads a line, with its end.
fn read_line(input: &mut impl BufRead, line: &mut Vec<u8>, at: u64) -> Result<LineEnd, TraceError> {
    line.clear();
    let read = input.read_until(b'\n', line);
    read.map_err(|error| wrong(at, &error.to_string()))?;
    Ok(if line.ends_with(b"\n") {
        LineEnd::Newline
    } else {
        LineEnd::Cut
    })
}

pub(crate) fn wrong(at: u64, what: &str) -> TraceError {
    TraceError::Wrong {
        at,
        what: what.to_owned(),
    }
}
