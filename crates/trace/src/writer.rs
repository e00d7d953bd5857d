//! [`TraceWriter`]: writes what happens to a trace, line by line.
//!
//! Invariant: each line is written whole and at once, so a trace that was cut off is readable up to
//! there; a file that cannot be written ends the trace, never the service. Keeps no token: only the
//! state of a hash for each text.

use std::collections::BTreeMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Write};

use cellar_scheduler::{
    End, Micros, Note, PrefixUse, Progress, PromptRows, Request, RequestId, Reuse, RowReport, Salt,
    SchedulerConfig, Step, TenantId,
};
use kv_core::{SeqId, TokenId};
use serde::Serialize;

use crate::layout::{MemoryShape, TraceLimits, TracedMemory};
use crate::record::{
    AdmittedRequest, ChosenTokens, ComputedStep, MAX_HASH, PrefixHashes, SubmittedRequest,
    TRACE_VERSION, TraceEvent, TraceHeader, TraceLine, TracedTenant,
};

/// Where an engine for many requests writes what it was asked and what it did.
pub struct TraceWriter {
    /// `None` after an error.
    out: Option<Box<dyn Write + Send>>,
    /// The key of the hashes, which is not written.
    key: RandomState,
    /// The hash of all tokens of each text so far.
    texts: BTreeMap<RequestId, u64>,
    salts: BTreeMap<Salt, u64>,
    tenants: BTreeMap<TenantId, u64>,
    line: Vec<u8>,
}

impl fmt::Debug for TraceWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_open = self.out.is_some();
        f.debug_struct("TraceWriter")
            .field("is_open", &is_open)
            .finish_non_exhaustive()
    }
}

impl TraceWriter {
    /// A trace that goes to `out`, which gets each line in one write. A buffer around it would lose
    /// the last lines of a program that is killed.
    pub fn new(out: impl Write + Send + 'static) -> Self {
        Self {
            out: Some(Box::new(out)),
            key: RandomState::new(),
            texts: BTreeMap::new(),
            salts: BTreeMap::new(),
            tenants: BTreeMap::new(),
            line: Vec::new(),
        }
    }

    /// Writes the first line.
    ///
    /// # Errors
    /// Those of the file.
    pub fn begin(&mut self, memory: &TracedMemory<'_>, config: &SchedulerConfig) -> io::Result<()> {
        self.write(&TraceHeader {
            cellar_trace: TRACE_VERSION,
            memory: MemoryShape::new(memory),
            limits: TraceLimits::of(config),
        })
    }

    /// The scheduler did not take a request.
    pub fn refused(&mut self, at: Micros, request: RequestId) {
        let request = request.0;
        self.event(at, TraceEvent::Refuse { request });
    }

    /// A request was given a sequence for the first time.
    pub fn admitted(&mut self, at: Micros, request: RequestId, seq: SeqId, reuse: &Reuse) {
        let admitted = AdmittedRequest::new(request.0, seq.0, reuse);
        self.event(at, TraceEvent::Admit(admitted));
    }

    /// A request was given a sequence again after a preemption.
    pub fn resumed(&mut self, at: Micros, request: RequestId, seq: SeqId, reuse: &Reuse) {
        let admitted = AdmittedRequest::new(request.0, seq.0, reuse);
        self.event(at, TraceEvent::Resume(admitted));
    }

    /// The sequence of a request was taken from it: so many tokens have to be computed again.
    pub fn preempted(&mut self, at: Micros, request: RequestId, n_tokens: usize) {
        let request = request.0;
        self.event(at, TraceEvent::Preempt { request, n_tokens });
    }

    /// Something happened to cached prefixes.
    pub fn cache(&mut self, at: Micros, note: Note) {
        self.event(at, TraceEvent::of_cache(note));
    }

    /// A request has ended.
    pub fn ended(&mut self, at: Micros, request: RequestId, end: End) {
        let (request, end) = (request.0, end.into());
        self.event(at, TraceEvent::End { request, end });
    }

    /// Nothing follows.
    pub fn stop(&mut self, at: Micros) {
        self.event(at, TraceEvent::Stop);
    }

    fn event(&mut self, at: Micros, event: TraceEvent) {
        if let TraceEvent::End { request, .. } | TraceEvent::Refuse { request } = event {
            self.texts.remove(&RequestId(request));
        }
        if let Err(error) = self.write(&TraceLine { at: at.0, event }) {
            tracing::warn!(%error, "the trace cannot be written, and ends here");
            self.out = None;
        }
    }

    /// Writes that a request came.
    pub fn submit(&mut self, at: Micros, request: &Request) {
        let next_salt = self.salts.len() as u64;
        let salt = match request.prefix {
            PrefixUse::Off => None,
            PrefixUse::Within(salt) => Some(*self.salts.entry(salt).or_insert(next_salt)),
        };
        // Hashes of different salts do not show that texts are the same.
        let mut state = self.key.hash_one(salt);
        let prompt = self.hashes(&mut state, &request.prompt);
        let texts = std::iter::once(request.id).chain(request.siblings.iter().copied());
        self.texts.extend(texts.map(|id| (id, state)));
        let event = TraceEvent::Submit(SubmittedRequest {
            request: request.id.0,
            n_texts: 1 + request.siblings.len() as u64,
            priority: request.priority.into(),
            salt,
            has_all_rows: request.prompt_rows == PromptRows::All,
            checkpoints: request.checkpoints.clone(),
            parting: request.parting,
            tenant: TracedTenant::new(request.tenant, &mut self.tenants),
            prompt,
        });
        self.event(at, event);
    }

    /// Writes that a step was computed, and what was chosen from its rows.
    pub fn step(&mut self, at: Micros, step: &Step, rows: &[RowReport], took: Micros) {
        let mut chosen: Vec<ChosenTokens> = Vec::new();
        for row in rows {
            let Progress::Token(token) = row.progress else {
                continue;
            };
            let Some(mut state) = self.texts.get(&row.request).copied() else {
                continue;
            };
            let hash = self.hashes(&mut state, &[token]);
            self.texts.insert(row.request, state);
            match chosen.last_mut() {
                Some(last) if last.request == row.request.0 => last.tokens.0.extend(hash.0),
                _ => chosen.push(ChosenTokens {
                    request: row.request.0,
                    tokens: hash,
                }),
            }
        }
        let event = TraceEvent::Step(ComputedStep {
            took: took.0,
            n_tokens: step.batch.len(),
            n_drafted: step.feeds.iter().map(|feed| feed.n_draft).sum(),
            chosen,
        });
        self.event(at, event);
    }

    /// The hashes of further tokens of a text, whose state they change.
    fn hashes(&self, state: &mut u64, tokens: &[TokenId]) -> PrefixHashes {
        let hash = |token: &TokenId| {
            *state = self.key.hash_one((*state, token.0));
            *state as u32 & MAX_HASH
        };
        PrefixHashes(tokens.iter().map(hash).collect())
    }

    fn write(&mut self, line: &impl Serialize) -> io::Result<()> {
        let Some(out) = &mut self.out else {
            return Ok(());
        };
        self.line.clear();
        serde_json::to_writer(&mut self.line, line)?;
        self.line.push(b'\n');
        out.write_all(&self.line)?;
        out.flush()
    }
}
