//! [`Engine`]: evaluates batches with one model on one backend, and remembers them.
//!
//! A batch is validated, planned, and then taken ubatch by ubatch: commit, compile the graph of its
//! shape (or find it compiled), run. Invariant: a call that fails leaves the memory as it was before
//! the call, at whichever ubatch it failed, or where a window forbids that, as it was before a ubatch
//! of the call. Knows nothing of text or of how tokens are chosen.

use std::sync::Arc;

use kv_core::backend::{Backend, LayerRope};
use kv_core::batch::{Batch, Output, PositionRule, SplitPolicy, UBatch, ValidBatch, validate_with};
use kv_core::graph::{
    BatchVisibility, GraphInputs, GraphOutputs, GraphShape, Input, KeyRopeError, Node, Op,
    PartInputs,
};
use kv_core::layers::RowLayout;
use kv_core::memory::{
    AnyMemory, Memory, MemoryInputs, Plan, Removed, RowsWritten, Seqs, batch_visibility,
};
use kv_core::state::Fingerprint;
use kv_core::weights::WeightSource;
use kv_core::{PartIdx, PosRange, SeqId};
use model_core::architecture::{Model, ModelError, OutputKind};

use crate::config::{AttentionMode, ConfigError, EngineConfig, Settings};
use crate::error::EngineError;
use crate::programs::ProgramCache;

/// A model on a backend, with what it remembers.
pub struct Engine<B: Backend> {
    pub(crate) backend: B,
    model: Arc<dyn Model>,
    weights: B::Weights,
    pub(crate) rows: B::Rows,
    pub(crate) memory: AnyMemory,
    /// How each layer's keys move, or why they cannot.
    pub(crate) key_ropes: Result<Vec<LayerRope>, Arc<KeyRopeError>>,
    /// Which model this is, for states.
    pub(crate) fingerprint: Fingerprint,
    programs: ProgramCache<ProgramKey, B::Program>,
    settings: Settings,
    inputs: MemoryInputs,
    outputs: GraphOutputs,
    /// Whether the graph takes rows and columns of images.
    position_rule: PositionRule,
    /// Position, row and column of each token of a ubatch, where the graph takes them.
    coordinates: Vec<[u32; 3]>,
    /// What tokens see of their ubatch, for each window of the graph.
    batch: Vec<BatchVisibility>,
    /// Rows that came out, in the order of the batch.
    rows_out: Vec<f32>,
}

/// The logits of the entries whose output was wanted, in the order of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'e> {
    values: &'e [f32],
    n_vocab: usize,
}

impl<'e> Logits<'e> {
    /// Number of rows: entries whose output was wanted.
    pub fn n_rows(self) -> usize {
        self.values.len() / self.n_vocab.max(1)
    }

    /// The logits of the `index`-th wanted entry, `[vocab]`; `None` beyond the last.
    pub fn row(self, index: usize) -> Option<&'e [f32]> {
        self.values.chunks_exact(self.n_vocab.max(1)).nth(index)
    }

    /// The logits of the last wanted entry, `[vocab]`; `None` where none was wanted.
    pub fn last(self) -> Option<&'e [f32]> {
        self.values.chunks_exact(self.n_vocab.max(1)).next_back()
    }

    /// All rows one after the other, `[wanted, vocab]`.
    pub fn values(self) -> &'e [f32] {
        self.values
    }
}

/// The final rows of the entries whose output was wanted, in the order of the batch.
#[derive(Clone, Copy, Debug)]
pub struct Embeddings<'e> {
    values: &'e [f32],
    dim: usize,
}

impl<'e> Embeddings<'e> {
    /// The rows, `[dim]` each, in order.
    pub fn rows(self) -> impl ExactSizeIterator<Item = &'e [f32]> {
        self.values.chunks_exact(self.dim.max(1))
    }

    /// Values of one row.
    pub fn dim(self) -> usize {
        self.dim
    }

    /// All rows one after the other, `[wanted, dim]`.
    pub fn values(self) -> &'e [f32] {
        self.values
    }
}

/// Steps in which the tables of plain attention grow, in cells.
const N_KV_STEP: usize = 256;

/// A step that failed, and whether rows may have been written by then.
struct FailedStep {
    error: EngineError,
    rows: RowsWritten,
}

impl<B: Backend> Engine<B> {
    /// Loads the weights into the backend and allocates the memory.
    ///
    /// # Errors
    /// [`EngineError::Config`] before anything is allocated; [`EngineError::Backend`] where the
    /// device has too little memory or cannot store this type.
    pub fn new(
        mut backend: B,
        model: Arc<dyn Model>,
        weights: Arc<dyn WeightSource>,
        config: &EngineConfig,
    ) -> Result<Self, EngineError> {
        let settings = config.settings(&*model)?;
        let model = model.for_context(settings.n_ctx as usize).unwrap_or(model);
        let memory = settings.memory()?;
        let rows = backend.allocate(&settings.layout)?;
        let source = weights;
        let custom_ops = model.custom_ops();
        if !custom_ops.is_empty() {
            backend.set_custom_ops(custom_ops)?;
        }
        let weights = backend.load_weights(Arc::clone(&source))?;
        let mut programs = ProgramCache::new(settings.n_programs);
        // Weights that the backend cannot use are found now, not with the first token.
        let shape = GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        };
        let key = ProgramKey {
            shape,
            n_kv: Vec::new(),
        };
        programs.get_or_compile(key, || {
            let graph = model.graph(shape)?;
            Ok::<_, EngineError>(backend.compile(&graph, &weights, &settings.layout)?)
        })?;
        let graph = model.graph(shape)?;
        let key_ropes = graph.key_ropes(&*source).map_err(Arc::new);
        let fingerprint = Fingerprint::new(
            model.architecture(),
            settings.rules.n_vocab,
            model.layers(),
            &graph,
            &*source,
        );
        let is_input = |node: &Node, input| node.op == Op::Input(input);
        let takes_images = graph
            .nodes()
            .iter()
            .any(|n| is_input(n, Input::Coordinates));
        let position_rule = match takes_images {
            true => PositionRule::Grid,
            false => PositionRule::Linear,
        };
        let cut = memory.split_policy() != SplitPolicy::WholeSequences;
        if let Some(window) = graph.batch_windows().next().filter(|_| cut) {
            return Err(ConfigError::CutSequences { window }.into());
        }
        let batch = graph.batch_windows().map(|window| BatchVisibility {
            window,
            ..BatchVisibility::default()
        });
        let batch = batch.collect();
        Ok(Self {
            backend,
            model,
            weights,
            rows,
            memory,
            key_ropes,
            fingerprint,
            programs,
            settings,
            inputs: MemoryInputs::default(),
            outputs: GraphOutputs::default(),
            position_rule,
            coordinates: Vec::new(),
            batch,
            rows_out: Vec::new(),
        })
    }

    /// The model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// What it was made with, checked and completed.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// What it remembers, to look at.
    pub fn memory(&self) -> &AnyMemory {
        &self.memory
    }

    /// Number of compiled shapes.
    pub fn n_programs(&self) -> usize {
        self.programs.len()
    }

    /// Evaluates a batch and gives the logits of the entries whose output is wanted.
    ///
    /// # Errors
    /// [`EngineError`]; the memory is then as it was before the call. Where tokens behind a window
    /// have given their rows to later ubatches of the same call, one cannot return that far: the
    /// ubatches before stay, and [`Memory::positions`] says up to where.
    pub fn decode(&mut self, batch: &Batch) -> Result<Logits<'_>, EngineError> {
        self.check_output(OutputKind::Logits)?;
        self.evaluate(batch)?;
        Ok(Logits {
            values: &self.rows_out,
            n_vocab: self.settings.output_width(),
        })
    }

    /// Evaluates a batch with a model that gives embeddings: the final rows of the entries whose
    /// output is wanted, not pooled and not normalised.
    ///
    /// # Errors
    /// As [`Engine::decode`].
    pub fn embed(&mut self, batch: &Batch) -> Result<Embeddings<'_>, EngineError> {
        self.check_output(OutputKind::Embeddings)?;
        self.evaluate(batch)?;
        Ok(Embeddings {
            values: &self.rows_out,
            dim: self.settings.output_width(),
        })
    }

    fn check_output(&self, wanted: OutputKind) -> Result<(), EngineError> {
        let name = |kind| match kind {
            OutputKind::Logits => "logits",
            OutputKind::Embeddings => "embeddings",
        };
        let got = self.settings.output;
        if got == wanted {
            return Ok(());
        }
        Err(EngineError::OtherOutput {
            architecture: self.model.architecture().to_owned(),
            wanted: name(wanted),
            got: name(got),
        })
    }

    fn evaluate(&mut self, batch: &Batch) -> Result<(), EngineError> {
        let rules = (&self.settings.rules, self.position_rule);
        let valid = validate_with(batch, rules, |seq| self.memory.positions(seq))?;
        let plan = self.memory.plan(&valid, self.settings.n_ubatch)?;
        let width = self.settings.output_width();
        self.rows_out.resize(valid.n_outputs() * width, 0.0);
        let places = output_places(&valid);
        let mut undo = Vec::with_capacity(plan.ubatches.len());
        for step in 0..plan.ubatches.len() {
            let Some(ubatch) = plan.ubatches.get(step) else {
                break;
            };
            undo.push(self.memory.commit(ubatch, &plan.placement, step));
            if let Err(FailedStep { error, mut rows }) = self.step(&plan, step, &places) {
                while let Some(latest) = undo.pop() {
                    if self.memory.check_rollback(&latest, rows).is_err() {
                        break;
                    }
                    self.memory.rollback(latest, rows);
                    // All steps before the one that failed did write their rows.
                    rows = RowsWritten::Perhaps;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes the tokens with positions in `range` from sequences.
    ///
    /// # Errors
    /// [`EngineError::Remove`]; nothing has changed then.
    pub fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removed, EngineError> {
        Ok(self.memory.remove(seqs, range)?)
    }

    /// Makes the tokens of `to` with positions in `range` the same as those of `from`, and copies the
    /// rows that they do not share. Returns how many tokens `to` was given.
    ///
    /// # Errors
    /// [`EngineError::Copy`]: nothing has changed then. [`EngineError::Backend`] where rows could
    /// not be copied: `to` is forgotten whole then.
    pub fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<u32, EngineError> {
        let copied = self.memory.copy(from, to, range)?;
        if let Err(error) = self.backend.copy_rows(&mut self.rows, &copied.row_copies) {
            self.memory.remove(Seqs::One(to), PosRange::ALL)?;
            return Err(error.into());
        }
        Ok(copied.n_tokens)
    }

    /// Forgets everything.
    pub fn clear(&mut self) -> Removed {
        self.memory.clear()
    }

    /// Computes the ubatch that was just committed.
    fn step(
        &mut self,
        plan: &Plan<<AnyMemory as Memory>::Placement>,
        step: usize,
        places: &[Option<usize>],
    ) -> Result<(), FailedStep> {
        let Some(ubatch) = plan.ubatches.get(step) else {
            return Ok(());
        };
        self.memory
            .inputs(ubatch, &plan.placement, step, &mut self.inputs);
        if self.position_rule == PositionRule::Grid {
            self.coordinates.clear();
            self.coordinates.extend(ubatch.coordinates());
        }
        for seen in &mut self.batch {
            batch_visibility(ubatch, seen);
        }
        let shape = GraphShape {
            n_tokens: ubatch.n_tokens() as usize,
            n_outputs: ubatch.output_rows.len(),
        };
        self.run(shape, ubatch)?;
        self.take_rows(ubatch, places).map_err(|error| FailedStep {
            error,
            rows: RowsWritten::Perhaps,
        })
    }

    fn run(&mut self, shape: GraphShape, ubatch: &UBatch) -> Result<(), FailedStep> {
        let inputs = GraphInputs {
            tokens: &ubatch.tokens,
            embeddings: &ubatch.embeddings,
            positions: &ubatch.positions,
            coordinates: &self.coordinates,
            output_rows: &ubatch.output_rows,
            parts: &self.inputs.parts,
            batch: &self.batch,
            states: &self.inputs.states,
        };
        let (backend, layout) = (&self.backend, &self.settings.layout);
        let mode = self.settings.attention;
        let n_kv = match mode {
            AttentionMode::Fused => Vec::new(),
            AttentionMode::Plain => cells_in_reach(&self.inputs.parts, layout),
        };
        let key = ProgramKey {
            shape,
            n_kv: n_kv.clone(),
        };
        let program = self
            .programs
            .get_or_compile(key, || {
                tracing::debug!(?shape, "compiling");
                let graph = self.model.graph(shape)?;
                let graph = match mode {
                    AttentionMode::Fused => graph,
                    AttentionMode::Plain => {
                        let n_kv = |part: PartIdx| n_kv.get(part.as_usize()).copied();
                        let plain = graph.with_plain_attention(|part| n_kv(part).unwrap_or(0));
                        plain.map_err(ModelError::Graph)?
                    }
                };
                Ok(backend.compile(&graph, &self.weights, layout)?)
            })
            .map_err(|error| FailedStep {
                error,
                rows: RowsWritten::No,
            })?;
        backend
            .run(program, &mut self.rows, &inputs, &mut self.outputs)
            .map_err(|error| FailedStep {
                error: error.into(),
                rows: RowsWritten::Perhaps,
            })
    }

    /// Puts the rows that came out where their entries' rows are.
    fn take_rows(&mut self, ubatch: &UBatch, places: &[Option<usize>]) -> Result<(), EngineError> {
        let width = self.settings.output_width();
        let (values, wanted) = (self.outputs.first(), ubatch.output_rows.len() * width);
        if values.len() != wanted {
            return Err(EngineError::WrongLogits {
                wanted,
                got: values.len(),
            });
        }
        let place = |&row: &u32| {
            let entry = ubatch.entries.get(row as usize).map(|&e| e as usize);
            entry.and_then(|e| places.get(e).copied().flatten())
        };
        let row_places = ubatch.output_rows.iter().map(place);
        let is_all = wanted == self.rows_out.len();
        if is_all
            && row_places
                .clone()
                .eq((0..ubatch.output_rows.len()).map(Some))
        {
            // All rows in their order are not copied: a megabyte a token, where vocabularies are large.
            if let Some(first) = self.outputs.values.first_mut() {
                std::mem::swap(first, &mut self.rows_out);
            }
            return Ok(());
        }
        for (place, values) in row_places.zip(values.chunks_exact(width.max(1))) {
            let room = place.and_then(|at| self.rows_out.get_mut(at * width..(at + 1) * width));
            if let Some(room) = room {
                room.copy_from_slice(values);
            }
        }
        Ok(())
    }
}

impl<B: Backend> std::fmt::Debug for Engine<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("model", &self.model.architecture())
            .field("backend", &self.backend.info())
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// What a compiled program depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ProgramKey {
    shape: GraphShape,
    /// With plain attention, the cells of each part that its tables reach.
    n_kv: Vec<usize>,
}

/// For each part, a number of first cells that holds all that is stored and seen: a multiple of
/// [`N_KV_STEP`] where there are as many, so that programs serve for a while.
fn cells_in_reach(parts: &[PartInputs], layout: &RowLayout) -> Vec<usize> {
    let in_reach = |(part, inputs): (u32, &PartInputs)| {
        let runs = inputs.visibility.groups.iter().flat_map(|g| &g.runs);
        let last = runs
            .map(|run| run.last_cell())
            .chain(inputs.cells.iter().copied());
        let n_used = last.map(|cell| cell.as_usize() + 1).max().unwrap_or(0);
        let mut layers = layout.layers().iter();
        let n_rows = layers.find(|l| l.part.0 == part).map_or(0, |l| l.n_rows);
        n_used.next_multiple_of(N_KV_STEP).min(n_rows)
    };
    (0u32..).zip(parts).map(in_reach).collect()
}

/// For each entry whose output is wanted, which row of the logits is its.
fn output_places(batch: &ValidBatch) -> Vec<Option<usize>> {
    let mut n = 0;
    let place = |output| {
        (output == Output::Wanted).then(|| {
            n += 1;
            n - 1
        })
    };
    batch
        .entries()
        .iter()
        .map(|e| e.output)
        .map(place)
        .collect()
}
