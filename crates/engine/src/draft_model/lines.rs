//! [`Lines`]: what a draft model remembers of the texts that it drafts for, and how it drafts for
//! several in common batches.
//!
//! A line is a sequence of the model's engine. Invariant: before tokens are drafted, the line of a
//! text holds the text but its last token and nothing else: tokens that the larger model did not
//! take are removed, whatever became of the text meanwhile. A line that is released keeps its
//! tokens, for the next text that begins so, until their room is needed. The scheduler's tree of
//! prefixes is not used: it copies sequences and plans with a scheduler's requests, where a line
//! only goes on with another text. Knows neither samplers nor what becomes of drafts.

use std::cmp::Reverse;

use cellar_scheduler::{SpeculationOff, n_common};
use kv_backend::{BoxedBackend, CancelFlag};
use kv_core::batch::Batch;
use kv_core::memory::{Memory, Refusal, Seqs, Streams};
use kv_core::{Pos, PosRange, SeqId, TokenId};

use crate::decode::Engine;
use crate::error::EngineError;
use crate::sampler::likeliest;

/// A text, to the model that drafts for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LineOwner(u64);

/// A text that is to be drafted for.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftRequest<'a> {
    pub(super) owner: LineOwner,
    /// All of it, with its prompt.
    pub(super) tokens: &'a [TokenId],
    /// The most tokens that are drafted.
    pub(super) n: usize,
}

/// What came of it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Drafted {
    /// These may follow; none where none were wanted.
    Tokens(Vec<TokenId>),
    /// More of the text is to be computed first; a part was.
    Behind,
    /// There is no room for the text next to the others.
    NoRoom,
    /// Nothing is drafted from now on.
    Off(SpeculationOff),
}

/// The lines of a draft model.
#[derive(Debug)]
pub(super) struct Lines {
    engine: Engine<BoxedBackend>,
    /// One for each sequence of the engine.
    lines: Vec<Line>,
    /// The most tokens that are drafted at once.
    limit: usize,
    batch: Batch,
    n_owners: u64,
    n_calls: u64,
}

#[derive(Clone, Debug, Default)]
struct Line {
    owner: Option<LineOwner>,
    /// What its sequence holds.
    held: Vec<TokenId>,
    /// The call that used it last.
    last_used: u64,
}

/// The index of a line, which is the number of its sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LineIdx(usize);

impl LineIdx {
    fn seq(self) -> SeqId {
        SeqId(u32::try_from(self.0).unwrap_or(u32::MAX))
    }
}

/// A text that is being drafted for.
#[derive(Debug)]
struct Job {
    /// Its place in the call.
    number: usize,
    line: LineIdx,
    n: usize,
    drafted: Vec<TokenId>,
}

impl Lines {
    /// Those of an engine, whose memory is cleared.
    pub(super) fn new(mut engine: Engine<BoxedBackend>, n_max: usize) -> Self {
        let _removed = engine.clear();
        // The last one is not evaluated, and all others may have to be taken back.
        let most = (engine.memory().max_take_back() as usize).saturating_add(1);
        Self {
            lines: vec![Line::default(); engine.memory().n_seqs() as usize],
            limit: n_max.min(most),
            engine,
            batch: Batch::new(),
            n_owners: 0,
            n_calls: 0,
        }
    }

    pub(super) fn new_owner(&mut self) -> LineOwner {
        self.n_owners += 1;
        LineOwner(self.n_owners)
    }

    /// Lines that texts have.
    pub(super) fn n_owned(&self) -> usize {
        let lines = self.lines.iter();
        lines.filter(|line| line.owner.is_some()).count()
    }

    /// Another text may have the line of this one.
    pub(super) fn release(&mut self, owner: LineOwner) {
        let mut lines = self.lines.iter_mut();
        if let Some(line) = lines.find(|line| line.owner == Some(owner)) {
            line.owner = None;
        }
    }

    /// Drafts for texts, and computes at most a ubatch of what it does not have of them.
    pub(super) fn draft(
        &mut self,
        wanted: &[DraftRequest<'_>],
        cancel: &CancelFlag,
    ) -> Vec<Drafted> {
        self.n_calls += 1;
        let mut drafted: Vec<Drafted> = vec![Drafted::Tokens(Vec::new()); wanted.len()];
        for line in &mut self.lines {
            let mut texts = wanted.iter().filter(|text| text.n > 0);
            if texts.any(|text| line.owner == Some(text.owner)) {
                line.last_used = self.n_calls;
            }
        }
        let (mut jobs, mut n_reserved) = (Vec::new(), 0);
        for (number, text) in wanted.iter().enumerate() {
            if text.n == 0 || text.tokens.is_empty() {
                continue;
            }
            match self.begin(number, text, &mut n_reserved) {
                Ok(job) => jobs.push(job),
                Err(why) => drafted[number] = why,
            }
        }
        let mut jobs = self.catch_up(jobs, wanted, &mut drafted, cancel);
        while !jobs.is_empty() {
            self.take_rows(&mut jobs);
            let is_complete = |job: &Job| job.drafted.len() >= job.n;
            for job in jobs.extract_if(.., |job| is_complete(job)) {
                drafted[job.number] = Drafted::Tokens(job.drafted);
            }
            self.batch.clear();
            for job in &jobs {
                let last = job.drafted.last().copied().unwrap_or_default();
                let entry = self.batch.push_token(last);
                entry.in_sequence(job.line.seq()).with_output();
            }
            let computed = if jobs.is_empty() {
                break;
            } else {
                self.compute(cancel)
            };
            match computed {
                Ok(()) => jobs.iter().for_each(|job| {
                    let held = &mut self.lines[job.line.0].held;
                    held.extend(job.drafted.last());
                }),
                Err(why) => self.give_up(std::mem::take(&mut jobs), &why, &mut drafted),
            }
        }
        drafted
    }

    /// Finds a line for a text, and room for what is new of it and its draft.
    fn begin(
        &mut self,
        number: usize,
        text: &DraftRequest<'_>,
        n_reserved: &mut usize,
    ) -> Result<Job, Drafted> {
        let n_ctx = self.engine.settings().n_ctx;
        if text.tokens.len() > n_ctx as usize {
            self.release(text.owner);
            return Err(Drafted::Off(SpeculationOff::DraftModelFull { n_ctx }));
        }
        let Some(line) = self.line_of(text) else {
            return Err(Drafted::NoRoom);
        };
        if let Err(error) = self.keep_common(line, text.tokens) {
            tracing::warn!(%error, "the draft model failed");
            self.forget(line);
            return Err(Drafted::Off(SpeculationOff::DraftModelFailed));
        }
        let n_room = n_ctx as usize - text.tokens.len() + 1;
        let n = text.n.min(n_room).min(self.limit);
        let n_new = text.tokens.len() - self.lines[line.0].held.len() + n - 1;
        while !self.has_room(line, *n_reserved + n_new) {
            let free = (0..self.lines.len()).filter(|&at| {
                let line = &self.lines[at];
                line.owner.is_none() && !line.held.is_empty()
            });
            let oldest = free.min_by_key(|&at| self.lines[at].last_used);
            let Some(oldest) = oldest.map(LineIdx) else {
                // Others may have what it has.
                self.forget(line);
                return Err(Drafted::NoRoom);
            };
            self.forget(oldest);
        }
        *n_reserved += n_new;
        Ok(Job {
            number,
            line,
            n,
            drafted: Vec::new(),
        })
    }

    /// The line of a text: its own, else of those that no text has the one that begins most like
    /// it, else the one whose text has not drafted for longest.
    fn line_of(&mut self, text: &DraftRequest<'_>) -> Option<LineIdx> {
        let all = || self.lines.iter().enumerate();
        let own = all().find(|(_, line)| line.owner == Some(text.owner));
        let free = || {
            let free = all().filter(|(_, line)| line.owner.is_none());
            free.max_by_key(|(_, line)| {
                let n_same = n_common(&line.held, text.tokens);
                (n_same, line.held.is_empty(), Reverse(line.last_used))
            })
        };
        let idle = || {
            let idle = all().filter(|(_, line)| line.last_used < self.n_calls);
            idle.min_by_key(|(_, line)| line.last_used)
        };
        let (at, _) = own.or_else(free).or_else(idle)?;
        let line = &mut self.lines[at];
        line.owner = Some(text.owner);
        line.last_used = self.n_calls;
        Some(LineIdx(at))
    }

    /// Takes from a line what the text does not begin with, and always its last token, whose row is
    /// wanted.
    fn keep_common(&mut self, line: LineIdx, text: &[TokenId]) -> Result<(), EngineError> {
        let held = &self.lines[line.0].held;
        let n_held = held.len();
        let n_common = n_common(held, text).min(text.len().saturating_sub(1));
        if n_common == n_held {
            return Ok(());
        }
        let first = Pos(u32::try_from(n_common).unwrap_or(u32::MAX));
        let seqs = Seqs::One(line.seq());
        match self.engine.remove(seqs, PosRange::from(first..)) {
            Ok(_) => self.lines[line.0].held.truncate(n_common),
            // A window that has forgotten what it would see, or a text that is another one: all of
            // it is computed again. Of single tokens none has to be taken back.
            Err(EngineError::Refused(_)) => {
                if n_held - n_common < self.limit {
                    self.limit = 1;
                }
                self.forget(line);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Whether there is room for so many further tokens, in this line or all together.
    fn has_room(&self, line: LineIdx, n_new: usize) -> bool {
        let n_held = self.lines[line.0].held.len();
        self.engine.memory().parts().iter().all(|part| {
            let config = part.config();
            let n_new = match config.window.width() {
                Some(width) => n_new.min(width as usize),
                None => n_new,
            };
            let n_used = match config.streams {
                Streams::Shared => part.n_used() as usize,
                Streams::PerSequence => n_held,
            };
            n_used + n_new <= config.n_cells as usize
        })
    }

    /// Computes what lines do not have of their texts, the shortest first and a ubatch at most.
    /// Returns the texts that are complete, in the order of their rows.
    fn catch_up(
        &mut self,
        mut jobs: Vec<Job>,
        wanted: &[DraftRequest<'_>],
        drafted: &mut [Drafted],
        cancel: &CancelFlag,
    ) -> Vec<Job> {
        let settings = self.engine.settings();
        let mut n_left = settings.n_ubatch.min(settings.rules.n_batch) as usize;
        let new = |lines: &[Line], job: &Job| {
            let held = lines[job.line.0].held.len();
            held..wanted[job.number].tokens.len()
        };
        jobs.sort_by_key(|job| new(&self.lines, job).len());
        self.batch.clear();
        let mut pieces = Vec::with_capacity(jobs.len());
        for job in &jobs {
            let range = new(&self.lines, job);
            let piece = range.start..range.end.min(range.start + n_left);
            n_left -= piece.len();
            let tokens = &wanted[job.number].tokens[piece.clone()];
            for (at, &token) in (piece.start..).zip(tokens) {
                let entry = self.batch.push_token(token).in_sequence(job.line.seq());
                if at + 1 == range.end {
                    entry.with_output();
                }
            }
            pieces.push(tokens);
        }
        if jobs.is_empty() {
            return jobs;
        }
        if let Err(why) = self.compute(cancel) {
            self.give_up(jobs, &why, drafted);
            return Vec::new();
        }
        for (job, piece) in jobs.iter().zip(pieces) {
            self.lines[job.line.0].held.extend_from_slice(piece);
        }
        let is_behind = |job: &mut Job| !new(&self.lines, job).is_empty();
        for job in jobs.extract_if(.., is_behind) {
            drafted[job.number] = Drafted::Behind;
        }
        jobs
    }

    /// Computes the batch; an error is what becomes of the texts in it.
    fn compute(&mut self, cancel: &CancelFlag) -> Result<(), Drafted> {
        match self.engine.decode_until(&self.batch, cancel) {
            Ok(_) => Ok(()),
            // The texts end in the same way.
            Err(EngineError::Cancelled) => Err(Drafted::Tokens(Vec::new())),
            Err(EngineError::Refused(Refusal::NoRoom(_) | Refusal::NoStateRoom(_))) => {
                Err(Drafted::NoRoom)
            }
            Err(error) => {
                tracing::warn!(%error, "the draft model failed");
                Err(Drafted::Off(SpeculationOff::DraftModelFailed))
            }
        }
    }

    /// Adds to each draft the token that a greedy sampler takes; one without such a token is
    /// complete.
    fn take_rows(&self, jobs: &mut [Job]) {
        let logits = self.engine.last_logits();
        for (row, job) in jobs.iter_mut().enumerate() {
            let likeliest = logits.row(row).and_then(|row| likeliest(row).ok());
            match likeliest {
                Some(candidate) => job.drafted.push(candidate.token),
                None => job.n = job.drafted.len(),
            }
        }
    }

    /// What a batch that failed left of these lines is not known.
    fn give_up(&mut self, jobs: Vec<Job>, why: &Drafted, drafted: &mut [Drafted]) {
        for job in jobs {
            self.forget(job.line);
            drafted[job.number] = why.clone();
        }
    }

    fn forget(&mut self, line: LineIdx) {
        let _removed = self.engine.remove(Seqs::One(line.seq()), PosRange::ALL);
        self.lines[line.0].held.clear();
    }
}
