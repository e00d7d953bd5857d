//! [`Engine`]: evaluates batches with one model on one backend, and remembers them.
//!
//! A batch is validated, planned, and then taken ubatch by ubatch: commit, compile the graph of its
//! shape (or find it compiled), run. Invariant: a call that fails leaves the memory as it was
//! before the call, at whichever ubatch it failed, or where a window forbids that, as it was before
//! a ubatch of the call. Knows nothing of text or of how tokens are chosen.

use std::sync::Arc;

use kv_backend::GraphOutputs;
use kv_backend::state::Fingerprint;
use kv_backend::{Backend, CancelFlag, OnProgress, RunProgress};
use kv_core::batch::{Batch, PositionRule, SplitPolicy, TokensOf, validate_with};
use kv_core::memory::BatchVisibility;
use kv_core::memory::{Composite, Edit, Edited, Memory, MemoryInputs, PlannedBatch, Removal, Seqs};
use kv_core::{PosRange, SeqId};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphShape, TopK};
use model_core::aged::with_layers;
use model_core::architecture::{Model, OutputKind};

use crate::adapters::{ActiveAdapters, TextAdapters};
use crate::capacities::{Capacities, load_kernels};
use crate::changing_weights::ChangingWeights;
use crate::config::{ConfigError, EngineConfig, Settings};
use crate::error::EngineError;
use crate::guard::{Forgetting, Uncomputed};
use crate::head::{Head, StoreTime};
use crate::picture_rows::{self, StepPictures};
use crate::programs::ProgramCache;
use crate::rows_out::{Embeddings, Logits, StepRows};
use crate::runner::{
    BatchOutput, FailedStep, ProgramKey, RowsOut, Runner, output_places, resize_output,
};
use crate::state::fingerprint_of;

/// A model on a backend, with what it remembers.
///
/// The memory is [`Composite`] unless the caller brings another: [`Engine::with_memory`].
pub struct Engine<B: Backend, M: Memory = Composite> {
    pub(crate) runner: Runner<B>,
    pub(crate) memory: M,
    /// Which model this is, for states.
    pub(crate) fingerprint: Fingerprint,
}

impl<B: Backend> Engine<B> {
    /// An engine with the memory that the model's layers declare. Loads the weights into the
    /// backend and allocates the memory.
    ///
    /// # Errors
    /// [`EngineError::Config`] before anything is allocated; [`EngineError::Backend`] where the
    /// device has too little memory or cannot store this type.
    pub fn new(
        backend: B,
        model: Arc<dyn Model>,
        weights: Arc<dyn WeightSource>,
        config: &EngineConfig,
    ) -> Result<Self, EngineError> {
        Self::with_progress(backend, model, weights, config, OnProgress::default())
    }

    /// As [`Self::new`]; the backend reports how far it is with the weights, also when it compiles
    /// graphs later that name others.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_progress(
        backend: B,
        model: Arc<dyn Model>,
        weights: Arc<dyn WeightSource>,
        config: &EngineConfig,
        on_progress: OnProgress,
    ) -> Result<Self, EngineError> {
        let config = config.within(backend.memory());
        let settings = config.settings(&*model)?;
        let memory = settings.memory()?;
        let loaded = Loaded {
            model,
            weights,
            on_progress,
        };
        Self::load(backend, loaded, settings, memory)
    }
}

impl<B: Backend, M: Memory + Clone> Engine<B, M> {
    /// An engine with a memory of the caller's, which says how many rows the backend allocates
    /// ([`Memory::n_rows`]). Of `config`, what concerns the memory's size has no effect.
    ///
    /// # Errors
    /// As [`Engine::new`].
    pub fn with_memory(
        backend: B,
        model: Arc<dyn Model>,
        weights: Arc<dyn WeightSource>,
        config: &EngineConfig,
        memory: M,
    ) -> Result<Self, EngineError> {
        let config = config.within(backend.memory());
        let settings = config.settings_for(&*model, &memory)?;
        let loaded = Loaded {
            model,
            weights,
            on_progress: OnProgress::default(),
        };
        Self::load(backend, loaded, settings, memory)
    }

    fn load(
        mut backend: B,
        loaded: Loaded,
        settings: Settings,
        memory: M,
    ) -> Result<Self, EngineError> {
        let Loaded {
            model,
            weights,
            on_progress,
        } = loaded;
        let model = with_layers(model, settings.layers());
        let model = model.for_context(settings.n_ctx as usize).unwrap_or(model);
        let rows = backend.allocate(&settings.layout)?;
        let source = Arc::new(ChangingWeights::new(weights));
        let custom_ops = model.custom_ops();
        if !custom_ops.is_empty() {
            backend.set_custom_ops(custom_ops)?;
        }
        let weights = backend.load_weights(Arc::clone(&source) as _, on_progress)?;
        let head = model.draft_head();
        // A head has as many graphs as the model.
        let n_programs = settings.n_programs * (1 + head.iter().len());
        let mut programs = ProgramCache::new(n_programs);
        let capacities = Capacities::of(&backend, &*model, settings.max_ubatch())?;
        let one = GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        };
        // Weights that the backend cannot use are found now, not with the first token.
        let mut compiled = |model: &dyn Model, rows: RowsOut, n_adapters: usize| {
            let graph = model.graph(one)?;
            let key = ProgramKey::of(one, rows, n_adapters);
            programs.get_or_compile(key, || {
                Ok::<_, EngineError>(backend.compile(&graph, &weights, &settings.layout)?)
            })?;
            Ok::<_, EngineError>(graph)
        };
        let adapters = model.adapters().cloned().map(ActiveAdapters::new);
        let bare = model.with_active_adapters(0);
        let graph = compiled(&**bare.as_ref().unwrap_or(&model), RowsOut::Whole, 0)?;
        if adapters
            .as_ref()
            .is_some_and(|adapters| !adapters.all().is_empty())
        {
            let adapted = model.with_active_adapters(1);
            compiled(&**adapted.as_ref().unwrap_or(&model), RowsOut::Whole, 1)?;
        }
        let plain = bare.as_ref().unwrap_or(&model);
        load_kernels(&backend, &weights, &settings, &**plain)?;
        let encoder = model.source_encoder();
        let encoder = encoder.map(|encoder| compiled(&*encoder.model, RowsOut::Sources, 0));
        let encoder = encoder.transpose()?;
        let head_graph = head
            .as_deref()
            .map(|head| compiled(head, RowsOut::Drafts, 0));
        let head_graph = head_graph.transpose()?;
        let more = head_graph.iter().chain([&graph]);
        let ropes = more.map(|graph| graph.key_ropes(&*source));
        let key_ropes = ropes.collect::<Result<Vec<_>, _>>().map_err(Arc::new);
        let key_ropes = key_ropes.map(|ropes| ropes.concat());
        let more = encoder.iter().chain(&head_graph);
        let n_vocab = settings.rules.n_vocab;
        let fingerprint = fingerprint_of(&*model, n_vocab, &graph, more, &*source);
        let position_rule = picture_rows::position_rule(&graph);
        let cut = memory.split_policy() != SplitPolicy::WholeSequences;
        if let Some(window) = graph.batch_windows().next().filter(|_| cut) {
            return Err(ConfigError::CutSequences { window }.into());
        }
        let windows = graph.batch_windows();
        let windows = windows.chain(encoder.iter().flat_map(Graph::batch_windows));
        let batch = windows.map(|window| BatchVisibility {
            window,
            ..BatchVisibility::default()
        });
        let batch = batch.collect();
        // What was packed of a file that changes meanwhile is of no use.
        source.check()?;
        let mut runner = Runner {
            backend,
            loaded: Arc::clone(&model),
            model,
            weights,
            source,
            rows,
            key_ropes,
            programs,
            capacities,
            settings,
            inputs: MemoryInputs::default(),
            outputs: GraphOutputs::default(),
            position_rule,
            pictures: StepPictures::default(),
            picture_rows: Vec::new(),
            padding: Vec::new(),
            coordinates: Vec::new(),
            adapters,
            batch,
            rows_out: Vec::new(),
            rows_kind: RowsOut::Whole,
            progress: None,
            head: head
                .zip(head_graph.as_ref())
                .map(|(head, graph)| Head::new(head, graph)),
        };
        runner.compile_for_drafts()?;
        Ok(Self {
            runner,
            memory,
            fingerprint,
        })
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.runner.model
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.runner.backend
    }

    /// What it was made with, checked and completed.
    pub fn settings(&self) -> &Settings {
        &self.runner.settings
    }

    /// What it remembers, to look at.
    pub fn memory(&self) -> &M {
        &self.memory
    }

    /// True if positions of tokens have rows and columns, too, in pictures.
    pub(crate) fn takes_grids(&self) -> bool {
        self.runner.position_rule == PositionRule::Grid
    }

    /// Reports to `progress` how far each run has come, for another thread that shows it.
    pub fn set_run_progress(&mut self, progress: Option<RunProgress>) {
        self.runner.progress = progress;
    }

    /// Gives the tokens that a sequence gets from now on these adapters, or those of texts that do
    /// not say any. What the sequence holds stays as it was computed. Without effect where the
    /// model has no adapters.
    pub fn set_adapters(&mut self, seq: SeqId, adapters: Option<TextAdapters>) {
        if let Some(active) = &mut self.runner.adapters {
            active.set(seq, adapters);
        }
    }

    /// Number of programs that are kept.
    pub fn n_programs(&self) -> usize {
        self.runner.programs.len()
    }

    /// Number of programs that were compiled so far, those that made room for others included.
    pub fn n_compiled(&self) -> u64 {
        self.runner.programs.n_compiled()
    }

    /// Evaluates a batch and gives the logits of the entries whose output is wanted.
    ///
    /// # Errors
    /// [`EngineError`]; the memory is then as it was before the call. Where tokens behind a window
    /// have given their rows to later ubatches of the same call, one cannot return that far: the
    /// ubatches before stay, and [`Memory::positions`] says up to where.
    pub fn decode(&mut self, batch: &Batch) -> Result<Logits<'_>, EngineError> {
        self.decode_or_cancel(batch, None)
    }

    /// As [`Engine::decode`], until `cancel` is set: that takes effect within a layer of the model.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`]; as [`Engine::decode`].
    pub fn decode_until(
        &mut self,
        batch: &Batch,
        cancel: &CancelFlag,
    ) -> Result<Logits<'_>, EngineError> {
        self.decode_or_cancel(batch, Some(cancel))
    }

    fn decode_or_cancel(
        &mut self,
        batch: &Batch,
        cancel: Option<&CancelFlag>,
    ) -> Result<Logits<'_>, EngineError> {
        if self.runner.settings.output != OutputKind::Logits {
            return Err(EngineError::other_output(self.model(), "logits"));
        }
        self.evaluate(batch, RowsOut::Whole, cancel)?;
        Ok(Logits {
            values: &self.runner.rows_out,
            n_vocab: self.runner.settings.output_width(),
        })
    }

    /// Evaluates a batch and has the candidates of a sampler found where the logits are: those of
    /// the last entry whose output is wanted. See [`Sampler::n_candidates`].
    ///
    /// [`Sampler::n_candidates`]: crate::sampler::Sampler::n_candidates
    ///
    /// # Errors
    /// As [`Engine::decode_until`]; where the vocabulary has fewer than `k` tokens.
    pub fn decode_candidates(
        &mut self,
        batch: &Batch,
        k: usize,
        cancel: &CancelFlag,
    ) -> Result<Option<TopK<'_>>, EngineError> {
        if self.runner.settings.output != OutputKind::Logits {
            return Err(EngineError::other_output(self.model(), "logits"));
        }
        self.evaluate(batch, RowsOut::Candidates(k), Some(cancel))?;
        Ok(self.last_candidates())
    }

    /// Computes a step that was planned on this memory as it is now: the logits of its rows, or the
    /// `k` most likely tokens of each. Names of rows are those of `pictures`.
    ///
    /// # Errors
    /// As [`Engine::decode_until`]; [`EngineError::UnknownRow`].
    pub(crate) fn decode_planned(
        &mut self,
        planned: PlannedBatch<M::Slot>,
        pictures: StepPictures,
        k: Option<usize>,
        cancel: &CancelFlag,
    ) -> Result<StepRows<'_>, EngineError> {
        if self.runner.settings.output != OutputKind::Logits {
            return Err(EngineError::other_output(self.model(), "logits"));
        }
        let rows = k.map_or(RowsOut::Whole, RowsOut::Candidates);
        self.runner.pictures = pictures;
        self.set_store_time(StoreTime::Later);
        let computed = self.run(planned, rows, Some(cancel));
        self.set_store_time(StoreTime::AtOnce);
        self.runner.pictures.clear();
        computed?;
        Ok(StepRows {
            values: &self.runner.rows_out,
            n_vocab: self.runner.settings.output_width(),
            k,
        })
    }

    /// What [`Engine::decode_candidates`] returned, if it evaluated the last batch.
    pub fn last_candidates(&self) -> Option<TopK<'_>> {
        let RowsOut::Candidates(k) = self.runner.rows_kind else {
            return None;
        };
        let rows = self.runner.rows_out.chunks_exact(TopK::row_len(k));
        rows.last().and_then(TopK::read)
    }

    /// The logits of the last batch that was decoded, as [`Engine::decode`] returned them: no rows
    /// before the first one, after a batch that failed while it was computed, after
    /// [`Engine::decode_candidates`], and with a model that gives embeddings.
    pub fn last_logits(&self) -> Logits<'_> {
        let values = match (self.runner.settings.output, self.runner.rows_kind) {
            (OutputKind::Logits, RowsOut::Whole) => self.runner.rows_out.as_slice(),
            _ => &[],
        };
        Logits {
            values,
            n_vocab: self.runner.settings.output_width(),
        }
    }

    /// Evaluates a batch with a model that gives embeddings: the final rows of the entries whose
    /// output is wanted, not pooled and not normalised. Of a model that gives scores, these.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub fn embed(&mut self, batch: &Batch) -> Result<Embeddings<'_>, EngineError> {
        match self.runner.settings.output {
            OutputKind::Embeddings | OutputKind::Scores { .. } => {}
            OutputKind::Logits | OutputKind::MaskLogits(_) => {
                return Err(EngineError::other_output(self.model(), "embeddings"));
            }
        }
        self.evaluate(batch, RowsOut::Whole, None)?;
        Ok(Embeddings {
            values: &self.runner.rows_out,
            dim: self.runner.settings.output_width(),
        })
    }

    /// Evaluates a batch with a diffusion model: the logits of the entries whose output is wanted,
    /// for which [`OutputKind::MaskLogits`] says of which masks they are. `Denoiser` of
    /// `cellar-tasks` does.
    ///
    /// # Errors
    /// As [`Engine::decode_until`].
    pub fn decode_masks(
        &mut self,
        batch: &Batch,
        cancel: &CancelFlag,
    ) -> Result<Logits<'_>, EngineError> {
        if !matches!(self.runner.settings.output, OutputKind::MaskLogits(_)) {
            return Err(EngineError::other_output(self.model(), "logits of masks"));
        }
        self.evaluate(batch, RowsOut::Whole, Some(cancel))?;
        Ok(Logits {
            values: &self.runner.rows_out,
            n_vocab: self.runner.settings.output_width(),
        })
    }

    pub(crate) fn evaluate(
        &mut self,
        batch: &Batch,
        rows: RowsOut,
        cancel: Option<&CancelFlag>,
    ) -> Result<(), EngineError> {
        let got = batch.tokens_of();
        if (got == TokensOf::Source) != (rows == RowsOut::Sources) {
            return Err(EngineError::WrongTokens { got });
        }
        for edit in self.memory.edits_before(batch) {
            self.edit(edit)?;
        }
        let (rules, rule) = (&self.runner.settings.rules, self.runner.position_rule);
        let valid = validate_with(batch, rules, rule, |seq| match got {
            TokensOf::Sequence => self.memory.positions(seq),
            TokensOf::Source => self.memory.source_positions(seq),
        })?;
        let n_ubatch = self.runner.settings.n_ubatch;
        let plan = self.memory.plan(&valid, n_ubatch)?;
        let planned = PlannedBatch { batch: valid, plan };
        self.run(planned, rows, cancel)
    }

    /// Computes a batch that was planned on this memory as it is now.
    pub(crate) fn run(
        &mut self,
        planned: PlannedBatch<M::Slot>,
        rows: RowsOut,
        cancel: Option<&CancelFlag>,
    ) -> Result<(), EngineError> {
        let PlannedBatch { batch: valid, plan } = planned;
        // A batch that was refused has left the last one's rows.
        let runner = &mut self.runner;
        let steps = self.memory.begin_planned(plan);
        // Taken out while a step borrows the rest of the runner. Where a step fails or panics, no
        // rows come out.
        let mut output = BatchOutput {
            places: output_places(&valid),
            values: std::mem::take(&mut runner.rows_out),
        };
        runner.rows_kind = rows;
        let n_pending = runner.head.as_ref().map_or(0, |head| head.pending.len());
        resize_output(&mut output.values, valid.n_outputs(), runner.row_width())?;
        let mut inputs = std::mem::take(&mut runner.inputs);
        let mut steps = Uncomputed::new(steps);
        let mut result = Ok(());
        while let Some(ubatch) = steps.next(&mut inputs) {
            result = runner.step(ubatch, &inputs, cancel, &mut output);
            if result.is_err() {
                break;
            }
        }
        runner.inputs = inputs;
        // Runs that are under way may still fail: they can be undone until here.
        match result.and_then(|()| runner.finish()) {
            Ok(()) => {
                steps.keep();
                runner.rows_out = output.values;
                Ok(())
            }
            Err(FailedStep { error, rows }) => {
                steps.undo(rows);
                if let Some(head) = &mut runner.head {
                    head.tails.clear();
                    head.pending.truncate(n_pending);
                }
                Err(error)
            }
        }
    }

    /// Does an edit, and the work on rows that it leaves to do. Returns how many tokens were taken,
    /// given or moved, and how many cells.
    ///
    /// # Errors
    /// [`EngineError::Refused`], and [`EngineError::CannotShift`] where keys cannot move: nothing
    /// has changed then. [`EngineError::Backend`] where rows could not be changed: the sequence
    /// that was copied to or moved is forgotten whole then; a compaction has changed nothing.
    pub fn edit(&mut self, edit: Edit) -> Result<Removal, EngineError> {
        if let Edit::Reposition { .. } = edit {
            self.check_shift()?;
        }
        let edited = self.apply(edit)?;
        self.runner.note_edit(edit);
        Ok(Removal {
            n_tokens: edited.n_tokens,
            n_cells: edited.n_cells,
        })
    }

    fn apply(&mut self, edit: Edit) -> Result<Edited, EngineError> {
        Ok(match edit {
            // Only writes rows of free cells, so the memory before is as good as it was.
            Edit::Compact => {
                let mut compacted = self.memory.clone();
                let edited = compacted.apply(edit)?;
                self.runner.move_rows(&edited)?;
                self.memory = compacted;
                edited
            }
            _ => {
                let edited = self.memory.apply(edit)?;
                self.move_rows(edit, &edited)?;
                edited
            }
        })
    }

    /// Does what an edit left to do with rows. Where that fails, keys and positions of the sequence
    /// that it changed may disagree, and the sequence is forgotten.
    pub(crate) fn move_rows(&mut self, edit: Edit, edited: &Edited) -> Result<(), EngineError> {
        let removal = match edit {
            Edit::Copy { to: seq, .. } | Edit::Reposition { seq, .. } => Edit::Remove {
                seqs: Seqs::One(seq),
                range: PosRange::ALL,
            },
            _ => Edit::Clear,
        };
        let changed = Forgetting::new(&mut self.memory, removal);
        self.runner.move_rows(edited)?;
        changed.keep();
        Ok(())
    }

    /// Takes the tokens with positions in `range` from sequences.
    ///
    /// # Errors
    /// [`EngineError::Refused`]; nothing has changed then.
    pub fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removal, EngineError> {
        self.edit(Edit::Remove { seqs, range })
    }

    /// Makes the tokens of `to` with positions in `range` the same as those of `from`, and copies
    /// the rows that they do not share. Returns how many tokens `to` was given.
    ///
    /// # Errors
    /// As [`Engine::edit`].
    pub fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<u32, EngineError> {
        Ok(self.edit(Edit::Copy { from, to, range })?.n_tokens)
    }

    /// Removes all other sequences.
    ///
    /// # Errors
    /// [`EngineError::Refused`] where there is no such sequence; nothing has changed then.
    pub fn keep_only(&mut self, seq: SeqId) -> Result<Removal, EngineError> {
        self.edit(Edit::KeepOnly(seq))
    }

    /// Forgets everything.
    pub fn clear(&mut self) -> Removal {
        if let Some(active) = &mut self.runner.adapters {
            active.clear();
        }
        self.runner.note_edit(Edit::Clear);
        self.memory.clear()
    }
}

/// A model and where its weights are.
struct Loaded {
    model: Arc<dyn Model>,
    weights: Arc<dyn WeightSource>,
    on_progress: OnProgress,
}

impl<B: Backend, M: Memory> std::fmt::Debug for Engine<B, M> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.runner.model.architecture())
            .field("backend", &self.runner.backend.info())
            .field("settings", &self.runner.settings)
            .finish_non_exhaustive()
    }
}
