//! [`Head`]: the layer of a model that drafts, next to the model itself on the same memory.
//!
//! Behind each ubatch of the model the head stores its keys and values of the same tokens, in the
//! same cells; those of single tokens later, of several together. Drafting takes tokens into a copy
//! of the memory, of which nothing is left: the head writes its own rows of free cells alone.
//! Invariant: whatever is drafted, neither the memory nor any other layer's row has changed. Knows
//! no text.

mod pending;
mod stores;
mod tails;

use std::sync::Arc;

use kv_backend::{Backend, CancelFlag, GraphInputs, GraphOutputs};
use kv_core::batch::{Batch, UBatch, validate_with};
use kv_core::memory::{Memory, MemoryInputs, PartInputs, RowsWritten};
use kv_core::{Pos, SeqId, TokenId};
use kv_graph::{Graph, GraphShape, Input, Op};
use model_core::architecture::{HeadReading, HeadRows, Model, ModelError};

use self::pending::{MAX_PENDING, PendingRows};
use self::stores::stores_alone;
use self::tails::Tails;
use crate::config::AttentionMode;
use crate::decode::Engine;
use crate::error::EngineError;
use crate::runner::{FailedStep, ProgramKey, RowsOut, Runner};
use crate::sampler::likeliest;

/// The layer of a model that drafts.
pub(crate) struct Head {
    pub(crate) model: Arc<dyn Model>,
    pub(crate) tails: Tails,
    /// The rows that it reads of the tokens before those of a ubatch.
    pub(crate) before: Vec<f32>,
    /// The part of the memory that its tokens see, where that is less than what the model's see.
    pub(crate) parts: Vec<PartInputs>,
    pub(crate) pending: PendingRows,
    /// The time at which its keys and values are stored.
    pub(crate) store_time: StoreTime,
    /// The outputs of storing: none.
    stored: GraphOutputs,
}

/// The time at which a head stores its keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreTime {
    /// With each ubatch, by its whole graph: its layer has a state.
    WithStates,
    /// With each ubatch.
    AtOnce,
    /// When they are needed.
    Later,
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
    /// The head of a model, whose graph is like this one.
    pub(crate) fn new(model: Arc<dyn Model>, graph: &Graph) -> Self {
        let mut nodes = graph.nodes().iter();
        let has_states = nodes.any(|node| node.op == Op::Input(Input::States));
        Self {
            tails: Tails::new(model.embedding_dim()),
            model,
            before: Vec::new(),
            parts: Vec::new(),
            pending: PendingRows::default(),
            store_time: if has_states {
                StoreTime::WithStates
            } else {
                StoreTime::AtOnce
            },
            stored: GraphOutputs::default(),
        }
    }

    /// Takes what the model's tokens see of a ubatch, of which its own see what begins at their
    /// first position, and not themselves where it stores nothing.
    fn see(&mut self, parts: &[PartInputs], positions: &[u32]) {
        let HeadReading { first, rows, .. } = self.model.head_reading();
        self.parts.clear();
        if first == Pos(0) && rows == HeadRows::Own {
            return;
        }
        self.parts.extend_from_slice(parts);
        let seen = self.parts.iter_mut();
        let seen = seen.flat_map(|part| [&mut part.visibility, &mut part.first]);
        let groups = seen.flat_map(|visibility| &mut visibility.groups);
        for group in groups {
            for (limits, &row) in group.limits.iter_mut().zip(&group.rows) {
                limits.first = limits.first.max(first);
                if let (HeadRows::OfModel, Some(&pos)) = (rows, positions.get(row as usize)) {
                    limits.last = limits.last.min(Pos(pos.saturating_sub(1)));
                }
            }
        }
    }
}

/// The graph of a head that stores and does nothing else.
fn stores_of(head: &dyn Model, shape: GraphShape) -> Result<Graph, EngineError> {
    let stores = stores_alone(&head.graph(shape)?);
    Ok(stores.map_err(ModelError::Graph)?)
}

impl<B: Backend> Runner<B> {
    /// Has the head store its keys and values of the tokens of a ubatch that was just computed, now
    /// or later, and keeps their final rows.
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
        if head.model.head_reading().rows == HeadRows::OfModel {
            head.tails.push(ubatch, &rows);
            if let Some(place) = self.outputs.values.get_mut(1) {
                *place = rows;
            }
            return Ok(());
        }
        head.tails.rows_before(ubatch, &rows, &mut head.before);
        head.tails.push(ubatch, &rows);
        if let Some(place) = self.outputs.values.get_mut(1) {
            *place = rows;
        }
        let n_max = MAX_PENDING.min(self.settings.n_ubatch as usize);
        match head.store_time {
            StoreTime::WithStates => return self.run_head(ubatch, 0, memory, cancel),
            StoreTime::Later
                if head
                    .pending
                    .takes(&memory.parts, ubatch.tokens.len(), n_max) =>
            {
                head.pending.push(ubatch, &memory.parts, &head.before);
                return Ok(());
            }
            StoreTime::Later | StoreTime::AtOnce => {}
        }
        self.store_pending(cancel)?;
        if let Some(head) = &mut self.head {
            head.pending.push(ubatch, &memory.parts, &head.before);
            if head.store_time == StoreTime::Later && head.pending.len() < n_max {
                return Ok(());
            }
        }
        self.store_pending(cancel)
    }

    /// Compiles what drafts take besides the programs of one token, where a program serves many
    /// shapes: no text waits for that then, and no measured time has it.
    pub(crate) fn compile_for_drafts(&mut self) -> Result<(), EngineError> {
        let Some(head) = &self.head else {
            return Ok(());
        };
        if !self.capacities.serve_many() || self.settings.attention == AttentionMode::Plain {
            return Ok(());
        }
        let n = 2.min(self.settings.max_ubatch());
        let shape = |n_outputs| {
            self.capacities.shape_for(GraphShape {
                n_tokens: n,
                n_outputs,
            })
        };
        let bare = self.model.with_active_adapters(0);
        let model = bare.as_ref().unwrap_or(&self.model);
        // A head with states stores by its whole graph; one without rows of its own never.
        let (all, none) = (shape(n), shape(0));
        let reading = head.model.head_reading();
        let stores = head.store_time != StoreTime::WithStates && reading.rows == HeadRows::Own;
        let stores = stores.then(|| stores_of(&*head.model, none)).transpose()?;
        let stores = stores.map(|graph| (none, RowsOut::Stored, graph));
        let verifies = [(all, RowsOut::Whole, model.graph(all)?)];
        for (shape, rows, graph) in verifies.into_iter().chain(stores) {
            let key = ProgramKey::of(shape, rows, 0);
            let (backend, layout) = (&self.backend, &self.settings.layout);
            self.programs.get_or_compile(key, || {
                Ok::<_, EngineError>(backend.compile(&graph, &self.weights, layout)?)
            })?;
        }
        Ok(())
    }

    /// Has the head store the keys and values that it has not yet.
    pub(crate) fn store_pending(&mut self, cancel: Option<&CancelFlag>) -> Result<(), FailedStep> {
        let Some(head) = self.head.as_mut().filter(|head| head.pending.len() > 0) else {
            return Ok(());
        };
        let shape = GraphShape {
            n_tokens: head.pending.len(),
            n_outputs: 0,
        };
        let capacity = self.capacities.shape_for(shape);
        let key = ProgramKey::of(capacity, RowsOut::Stored, 0);
        let (backend, weights, model) = (&self.backend, &self.weights, &*head.model);
        let layout = &self.settings.layout;
        let program = self.programs.get_or_compile(key, || {
            let stores = stores_of(model, capacity)?;
            Ok::<_, EngineError>(backend.compile(&stores, weights, layout)?)
        });
        let program = program.map_err(|error| FailedStep {
            error,
            rows: RowsWritten::No,
        })?;
        let pending = &head.pending;
        let inputs = GraphInputs {
            shape: Some(shape),
            tokens: &pending.tokens,
            embeddings: &pending.rows,
            positions: &pending.positions,
            coordinates: &pending.coordinates,
            parts: &pending.parts,
            cancel,
            ..GraphInputs::default()
        };
        let ran = backend.run(program, &mut self.rows, &inputs, &mut head.stored);
        ran.map_err(|error| FailedStep {
            error: error.into(),
            rows: RowsWritten::Perhaps,
        })?;
        head.pending.truncate(0);
        Ok(())
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
            head.see(&memory.parts, &ubatch.positions);
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
        let HeadReading {
            tokens: known,
            groups,
            ..
        } = head.model.head_reading();
        let n_groups = groups.map_or(0, |groups| groups.n_groups);
        let of_groups = self.outputs.values.get(2).map_or(&[][..], Vec::as_slice);
        let rows = rows.chunks_exact(dim.max(1));
        let logits = logits.chunks_exact(n_vocab.max(1));
        let each = ubatch.entries.iter().zip(logits).zip(rows);
        for (at, ((&entry, logits), row)) in each.enumerate() {
            let Some(job) = jobs.get_mut(entry as usize) else {
                continue;
            };
            let best = match groups {
                None => likeliest(logits).ok().map(|candidate| candidate.token),
                Some(groups) => {
                    let own = of_groups.get(at * n_groups..(at + 1) * n_groups);
                    groups.likeliest(own.unwrap_or_default(), logits)
                }
            };
            match best {
                Some(token) => {
                    let named = known.and_then(|known| known.get(token.0 as usize));
                    job.token = named.copied().unwrap_or(token);
                    job.drafted.push(job.token);
                    job.row.clear();
                    job.row.extend_from_slice(row);
                }
                // Not a number: nothing more is drafted.
                None => job.n = 0,
            }
        }
    }
}

impl<B: Backend, M: Memory + Clone> Engine<B, M> {
    /// True if the model was loaded with a head that drafts.
    pub fn has_head(&self) -> bool {
        self.runner.head.is_some()
    }

    /// Has the head store what it has not stored yet, before rows are read.
    pub(crate) fn complete_rows(&mut self) -> Result<(), EngineError> {
        let stored = self.runner.store_pending(None);
        stored.map_err(|failed| failed.error)
    }

    /// Has the head store keys and values of further steps when they are needed, or with each step.
    pub(crate) fn set_store_time(&mut self, store_time: StoreTime) {
        if let Some(head) = &mut self.runner.head
            && head.store_time != StoreTime::WithStates
        {
            head.store_time = store_time;
        }
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
        let stored = self.runner.store_pending(Some(cancel));
        stored.map_err(|failed| failed.error)?;
        let mut memory = self.memory.clone();
        let turns = turns.iter().enumerate();
        let mut jobs: Vec<Job> = turns
            .filter_map(|(number, turn)| self.begin_draft(number, turn))
            .collect();
        let mut inputs = MemoryInputs::default();
        let rows = self
            .runner
            .head
            .as_ref()
            .map(|head| head.model.head_reading().rows);
        while !jobs.is_empty() {
            if rows == Some(HeadRows::OfModel) {
                // Each of its tokens stands where the first did.
                memory = self.memory.clone();
            }
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
