//! [`Head`]: the layer of a model that drafts, next to the model itself on the same memory.
//!
//! After each ubatch of the model the head stores its keys and values of the same tokens, in the
//! same cells. Drafting takes tokens into a copy of the memory, of which nothing is left: the head
//! writes its own rows of free cells alone. Invariant: whatever is drafted, neither the memory nor
//! any other layer's row has changed. Knows no text.

mod tails;

use std::sync::Arc;

use kv_backend::{Backend, CancelFlag};
use kv_core::batch::{Batch, UBatch, validate_with};
use kv_core::memory::{Memory, MemoryInputs, PartInputs};
use kv_core::{Pos, SeqId, TokenId};
use kv_graph::GraphShape;
use model_core::architecture::Model;

use self::tails::Tails;
use crate::decode::Engine;
use crate::error::EngineError;
use crate::runner::{FailedStep, RowsOut, Runner};
use crate::sampler::likeliest;

/// The layer of a model that drafts.
pub(crate) struct Head {
    pub(crate) model: Arc<dyn Model>,
    pub(crate) tails: Tails,
    /// The rows that it reads of the tokens before those of a ubatch.
    pub(crate) before: Vec<f32>,
    /// The part of the memory that its tokens see, where that is less than what the model's see.
    pub(crate) parts: Vec<PartInputs>,
}

/// A text that a head drafts for: [`Engine::draft_with_head`].
#[derive(Clone, Copy, Debug)]
pub struct HeadTurn {
    /// Its sequence.
    pub seq: SeqId,
    /// Its last token, which is not computed yet.
    pub token: TokenId,
    /// The most tokens that are drafted.
    pub n: usize,
}

/// A text that is being drafted for.
struct Job {
    /// Its place in the call.
    number: usize,
    seq: SeqId,
    n: usize,
    /// The token that is read next.
    token: TokenId,
    /// The final row of the one before.
    row: Vec<f32>,
    drafted: Vec<TokenId>,
}

impl Head {
    pub(crate) fn new(model: Arc<dyn Model>) -> Self {
        Self {
            tails: Tails::new(model.embedding_dim()),
            model,
            before: Vec::new(),
            parts: Vec::new(),
        }
    }

    /// Takes what the model's tokens see of a ubatch, of which its own see what begins at their
    /// first position.
    fn see(&mut self, parts: &[PartInputs]) {
        let first = self.model.head_reading().first;
        self.parts.clear();
        if first == Pos(0) {
            return;
        }
        self.parts.extend_from_slice(parts);
        let seen = self.parts.iter_mut();
        let seen = seen.flat_map(|part| [&mut part.visibility, &mut part.first]);
        let groups = seen.flat_map(|visibility| &mut visibility.groups);
        for limits in groups.flat_map(|group| &mut group.limits) {
            limits.first = limits.first.max(first);
        }
    }
}

impl<B: Backend> Runner<B> {
    /// Has the head store its keys and values of the tokens of a ubatch that was just computed, and
    /// keeps their final rows.
    pub(crate) fn store_for_head(
        &mut self,
        ubatch: &UBatch,
        memory: &MemoryInputs,
        cancel: Option<&CancelFlag>,
    ) -> Result<(), FailedStep> {
        let Some(head) = &mut self.head else {
            return Ok(());
        };
        if ubatch.tokens.is_empty() {
            // Rows in place of tokens: the head has no embedding of them.
            let seqs = ubatch.seqs.iter().flat_map(|seqs| seqs.iter());
            seqs.for_each(|seq| head.tails.forget(seq));
            return Ok(());
        }
        let rows = self.outputs.values.get_mut(1).map(std::mem::take);
        let rows = rows.unwrap_or_default();
        head.tails.rows_before(ubatch, &rows, &mut head.before);
        head.tails.push(ubatch, &rows);
        if let Some(place) = self.outputs.values.get_mut(1) {
            *place = rows;
        }
        self.run_head(ubatch, 0, memory, cancel)
    }

    /// Runs the head for the tokens of a ubatch and the rows before them.
    fn run_head(
        &mut self,
        ubatch: &UBatch,
        n_outputs: usize,
        memory: &MemoryInputs,
        cancel: Option<&CancelFlag>,
    ) -> Result<(), FailedStep> {
        let shape = GraphShape {
            n_tokens: ubatch.n_tokens() as usize,
            n_outputs,
        };
        if let Some(head) = &mut self.head {
            head.see(&memory.parts);
        }
        let rows_kind = std::mem::replace(&mut self.rows_kind, RowsOut::Drafts);
        let result = self.run(shape, ubatch, memory, cancel);
        self.rows_kind = rows_kind;
        result
    }

    /// Takes what the head made of the tokens of a ubatch: for each its draft, and its row.
    fn take_drafts(&self, ubatch: &UBatch, jobs: &mut [Job]) {
        let (Some(head), [logits, rows, ..]) = (&self.head, self.outputs.values.as_slice()) else {
            return;
        };
        let (n_vocab, dim) = (head.model.vocab_size(), head.model.embedding_dim());
        let known = head.model.head_reading().tokens;
        let rows = rows.chunks_exact(dim.max(1));
        let logits = logits.chunks_exact(n_vocab.max(1));
        for ((&entry, logits), row) in ubatch.entries.iter().zip(logits).zip(rows) {
            let Some(job) = jobs.get_mut(entry as usize) else {
                continue;
            };
            match likeliest(logits) {
                Ok(candidate) => {
                    let named = known.and_then(|known| known.get(candidate.token.0 as usize));
                    job.token = named.copied().unwrap_or(candidate.token);
                    job.drafted.push(job.token);
                    job.row.clear();
                    job.row.extend_from_slice(row);
                }
                // Not a number: nothing more is drafted.
                Err(_) => job.n = 0,
            }
        }
    }
}

impl<B: Backend, M: Memory + Clone> Engine<B, M> {
    /// True if the model was loaded with a head that drafts.
    pub fn has_head(&self) -> bool {
        self.runner.head.is_some()
    }

    /// Drafts for several texts in common batches: for each the tokens that may follow its last
    /// one, none where the memory has no room for them or the rows before are not known. A session
    /// does so by itself; this is for loops of one's own.
    ///
    /// # Errors
    /// [`EngineError`] where the head could not be computed; nothing has changed.
    pub fn draft_with_head(
        &mut self,
        turns: &[HeadTurn],
        cancel: &CancelFlag,
    ) -> Result<Vec<Vec<TokenId>>, EngineError> {
        let mut drafted = vec![Vec::new(); turns.len()];
        let mut memory = self.memory.clone();
        let turns = turns.iter().enumerate();
        let mut jobs: Vec<Job> = turns
            .filter_map(|(number, turn)| self.begin_draft(number, turn))
            .collect();
        let mut inputs = MemoryInputs::default();
        while !jobs.is_empty() {
            let mut batch = Batch::new();
            for job in &jobs {
                let entry = batch.push_token(job.token);
                entry.in_sequence(job.seq).with_output();
            }
            if !memory.edits_before(&batch).is_empty() {
                break;
            }
            let runner = &mut self.runner;
            let (rules, rule) = (&runner.settings.rules, runner.position_rule);
            let valid = validate_with(&batch, rules, rule, |seq| memory.positions(seq));
            let planned = valid.map(|valid| memory.plan(&valid, runner.settings.n_ubatch));
            let Ok(Ok(plan)) = planned else {
                break; // no room, or too many tokens for a batch
            };
            let mut steps = memory.begin_planned(plan);
            while let Some(ubatch) = steps.next(&mut inputs) {
                runner.prepare(ubatch);
                if let Some(head) = &mut runner.head {
                    head.before.clear();
                    let of_job = |&entry: &u32| jobs.get(entry as usize);
                    let rows = ubatch.entries.iter().filter_map(of_job);
                    rows.for_each(|job| head.before.extend_from_slice(&job.row));
                }
                let n_outputs = ubatch.output_rows.len();
                let ran = runner.run_head(ubatch, n_outputs, &inputs, Some(cancel));
                ran.map_err(|failed| failed.error)?;
                runner.take_drafts(ubatch, &mut jobs);
            }
            for job in jobs.extract_if(.., |job| job.drafted.len() >= job.n) {
                drafted[job.number] = job.drafted;
            }
        }
        for job in jobs {
            drafted[job.number] = job.drafted;
        }
        let finished = self.runner.finish();
        finished.map_err(|failed| failed.error)?;
        Ok(drafted)
    }

    /// `None` where nothing can be drafted.
    fn begin_draft(&self, number: usize, turn: &HeadTurn) -> Option<Job> {
        let &HeadTurn { seq, token, n } = turn;
        let tails = &self.runner.head.as_ref()?.tails;
        let end = tails.end(seq)?;
        let row = tails.row(seq, Pos(end.0.checked_sub(1)?))?.to_vec();
        (n > 0 && self.memory.next_pos(seq) == end).then_some(Job {
            number,
            seq,
            n,
            token,
            row,
            drafted: Vec::new(),
        })
    }
}
