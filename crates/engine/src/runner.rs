//! [`Runner`]: a model on a backend, with the rows of its memory: everything of an engine but the
//! memory itself.
//!
//! Compiles the graph of a ubatch's shape, or finds it compiled, and runs it. Invariant: a step
//! that fails says whether rows may have been written. Knows nothing of plans.

use std::sync::Arc;

use kv_backend::{Backend, CancelFlag, RunProgress};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{
    PartIdx,
    batch::{Output, PositionRule, UBatch, ValidBatch},
    memory::{
        BatchVisibility, Edit, Edited, MemoryInputs, PartInputs, RowsWritten, batch_visibility,
    },
};
use kv_graph::rope::LayerRope;
use kv_graph::weights::WeightSource as _;
use kv_graph::{GraphShape, KeyRopeError, TopK};
use kv_rows::RowLayout;
use model_core::architecture::{Model, ModelError, PADDING};

use crate::adapters::ActiveAdapters;
use crate::capacities::Capacities;
use crate::changing_weights::ChangingWeights;
use crate::config::{AttentionMode, Settings};
use crate::error::EngineError;
use crate::head::Head;
use crate::picture_rows::{self, StepPictures};
use crate::programs::ProgramCache;

/// Steps in which the tables of plain attention grow, in cells.
const N_KV_STEP: usize = 256;

/// A model on a backend, with the rows of its memory.
pub(crate) struct Runner<B: Backend> {
    pub(crate) backend: B,
    pub(crate) model: Arc<dyn Model>,
    /// The same as it was loaded, without the adapters that it got since.
    pub(crate) loaded: Arc<dyn Model>,
    pub(crate) weights: B::Weights,
    /// The source of the weights: files that somebody may change, and adapters that the engine
    /// changes.
    pub(crate) source: Arc<ChangingWeights>,
    pub(crate) rows: B::Rows,
    /// How each layer's keys move, or why they cannot.
    pub(crate) key_ropes: Result<Vec<LayerRope>, Arc<KeyRopeError>>,
    pub(crate) programs: ProgramCache<ProgramKey, B::Program>,
    /// The shapes that programs are compiled for.
    pub(crate) capacities: Capacities,
    pub(crate) settings: Settings,
    /// Buffers for what the memory says of a ubatch.
    pub(crate) inputs: MemoryInputs,
    pub(crate) outputs: GraphOutputs,
    /// Whether the graph takes rows and columns of images.
    pub(crate) position_rule: PositionRule,
    /// The pictures of the step's sequences.
    pub(crate) pictures: StepPictures,
    /// Rows of pictures in place of a ubatch's tokens; empty where it has tokens or own rows.
    pub(crate) picture_rows: Vec<f32>,
    /// A token for each row of a ubatch that has rows in place of tokens.
    pub(crate) padding: Vec<u32>,
    /// Position, row and column of each token of a ubatch, where the graph takes them.
    pub(crate) coordinates: Vec<[u32; 3]>,
    /// The adapters of sequences, where the model has any.
    pub(crate) adapters: Option<ActiveAdapters>,
    /// What tokens see of their ubatch, for each window of the graph.
    pub(crate) batch: Vec<BatchVisibility>,
    /// Rows that came out, in the order of the batch, and what they are.
    pub(crate) rows_out: Vec<f32>,
    pub(crate) rows_kind: RowsOut,
    /// Takes how far each run has come.
    pub(crate) progress: Option<RunProgress>,
    /// The layer that drafts, where the model was loaded with one.
    pub(crate) head: Option<Head>,
}

/// Where the rows of a batch go that come out.
pub(crate) struct BatchOutput {
    /// For each entry whose output is wanted, the number of its row.
    pub(crate) places: Vec<Option<usize>>,
    /// The rows, in the order of the batch.
    pub(crate) values: Vec<f32>,
}

/// What the rows that come out are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RowsOut {
    /// Logits or embeddings, as the model gives them.
    #[default]
    Whole,
    /// So many candidates of each row of logits: rows of [`TopK`].
    Candidates(usize),
    /// Last rows of sources, as the model's encoder gives them.
    Sources,
    /// Logits and rows of the head that drafts.
    Drafts,
    /// None: the head that drafts stores its keys and values.
    Stored,
}

/// A step that failed, and whether rows may have been written by then.
pub(crate) struct FailedStep {
    pub(crate) error: EngineError,
    pub(crate) rows: RowsWritten,
}

/// What a compiled program depends on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProgramKey {
    /// Of its graph: a run may have fewer tokens and outputs.
    pub(crate) shape: GraphShape,
    /// With plain attention, the cells of each part that its tables reach.
    pub(crate) n_kv: Vec<usize>,
    pub(crate) rows: RowsOut,
    /// Whether rows are given in place of tokens.
    pub(crate) given_rows: bool,
    /// The most adapters of a token.
    pub(crate) n_adapters: usize,
}

impl ProgramKey {
    /// For so many tokens of a text, whatever its memory holds.
    pub(crate) fn of(shape: GraphShape, rows: RowsOut, n_adapters: usize) -> Self {
        Self {
            shape,
            n_kv: Vec::new(),
            rows,
            given_rows: false,
            n_adapters,
        }
    }
}

impl<B: Backend> Runner<B> {
    /// Copies and shifts rows as an edit left it to do.
    pub(crate) fn move_rows(&mut self, edited: &Edited) -> Result<(), EngineError> {
        let stored = self.store_pending(None);
        stored.map_err(|failed| failed.error)?;
        let ropes = match &self.key_ropes {
            Ok(ropes) => ropes.as_slice(),
            Err(_) => &[],
        };
        let (backend, rows) = (&self.backend, &mut self.rows);
        backend.copy_rows(rows, &edited.row_copies)?;
        if !edited.row_shifts.is_empty() {
            backend.shift_rows(rows, &edited.row_shifts, ropes)?;
        }
        Ok(())
    }

    /// Values of a row that comes out.
    pub(crate) fn row_width(&self) -> usize {
        match self.rows_kind {
            RowsOut::Whole | RowsOut::Drafts | RowsOut::Stored => self.settings.output_width(),
            RowsOut::Candidates(k) => TopK::row_len(k),
            RowsOut::Sources => self.settings.embedding_dim,
        }
    }

    /// Sequences were changed as this edit has it.
    pub(crate) fn note_edit(&mut self, edit: Edit) {
        if let Some(head) = &mut self.head {
            head.tails.edit(edit);
        }
    }

    /// Waits for the runs that are under way. They have failed where the files of the weights are
    /// no longer what they were.
    pub(crate) fn finish(&mut self) -> Result<(), FailedStep> {
        let finished = self.backend.finish(&mut self.rows);
        let finished = finished.map_err(EngineError::from);
        let checked = finished.and_then(|()| Ok(self.source.check()?));
        checked.map_err(|error| FailedStep {
            error,
            rows: RowsWritten::Perhaps,
        })
    }

    /// Computes the ubatch that was just committed, with what the memory says of it, unless
    /// `cancel` is set by then.
    pub(crate) fn step(
        &mut self,
        ubatch: &UBatch,
        memory: &MemoryInputs,
        cancel: Option<&CancelFlag>,
        output: &mut BatchOutput,
    ) -> Result<(), FailedStep> {
        let width = self.settings.rules.n_embd as usize;
        let written =
            picture_rows::write_rows(ubatch, &self.pictures, width, &mut self.picture_rows);
        written.map_err(|error| FailedStep {
            error,
            rows: RowsWritten::No,
        })?;
        self.prepare(ubatch);
        let shape = GraphShape {
            n_tokens: ubatch.n_tokens() as usize,
            n_outputs: ubatch.output_rows.len(),
        };
        self.run(shape, ubatch, memory, cancel)?;
        self.take_rows(ubatch, output).map_err(|error| FailedStep {
            error,
            rows: RowsWritten::Perhaps,
        })?;
        self.store_for_head(ubatch, memory, cancel)
    }

    /// Fills what graphs take of the tokens of a ubatch besides what the memory says.
    pub(crate) fn prepare(&mut self, ubatch: &UBatch) {
        if self.position_rule == PositionRule::Grid {
            self.coordinates.clear();
            let coordinates = picture_rows::coordinates(ubatch, &self.pictures);
            self.coordinates.extend(coordinates);
        }
        for seen in &mut self.batch {
            batch_visibility(ubatch, seen);
        }
    }

    /// Runs the graph of this shape for a ubatch.
    pub(crate) fn run(
        &mut self,
        shape: GraphShape,
        ubatch: &UBatch,
        memory: &MemoryInputs,
        cancel: Option<&CancelFlag>,
    ) -> Result<(), FailedStep> {
        let n_adapters = match (&self.adapters, self.rows_kind) {
            (None, _) | (_, RowsOut::Sources | RowsOut::Drafts | RowsOut::Stored) => 0,
            (Some(adapters), _) => adapters.n_active(ubatch),
        };
        let given = if self.picture_rows.is_empty() {
            ubatch.embeddings.as_slice()
        } else {
            self.picture_rows.as_slice()
        };
        let given_rows = !given.is_empty();
        let tokens = if given_rows {
            self.padding.resize(shape.n_tokens, PADDING.0);
            self.padding.as_slice()
        } else {
            ubatch.tokens.as_slice()
        };
        let embeddings = match (&self.head, &mut self.adapters) {
            (Some(head), _) if self.rows_kind == RowsOut::Drafts => head.before.as_slice(),
            (_, Some(adapters)) if n_adapters > 0 => adapters.rows(ubatch, given, n_adapters),
            _ => given,
        };
        let inputs = GraphInputs {
            shape: Some(shape),
            tokens,
            embeddings,
            positions: &ubatch.positions,
            token_types: &ubatch.token_types,
            coordinates: &self.coordinates,
            // A head that only stores wants none.
            output_rows: ubatch
                .output_rows
                .get(..shape.n_outputs)
                .unwrap_or_default(),
            parts: match &self.head {
                Some(head) if self.rows_kind == RowsOut::Drafts && !head.parts.is_empty() => {
                    &head.parts
                }
                _ => &memory.parts,
            },
            batch: &self.batch,
            states: &memory.states,
            cancel,
            progress: self.progress.as_ref(),
        };
        let (backend, layout) = (&self.backend, &self.settings.layout);
        let (mode, rows_kind) = (self.settings.attention, self.rows_kind);
        let n_kv = match mode {
            AttentionMode::Fused => Vec::new(),
            AttentionMode::Plain => cells_in_reach(&memory.parts, layout),
        };
        let shape = self.capacities.shape_for(shape);
        let key = ProgramKey {
            shape,
            n_kv: n_kv.clone(),
            rows: self.rows_kind,
            given_rows,
            n_adapters,
        };
        let program = self
            .programs
            .get_or_compile(key, || {
                tracing::debug!(?shape, "compiling");
                let architecture = || self.model.architecture().to_owned();
                let no_encoder = || EngineError::NoEncoder {
                    architecture: architecture(),
                };
                let tokens_only = || EngineError::TokensOnly {
                    architecture: architecture(),
                };
                let adapted = self.model.with_active_adapters(n_adapters);
                let model = adapted.as_ref().unwrap_or(&self.model);
                let other = match (rows_kind, !given_rows) {
                    (RowsOut::Drafts, _) => self.head.as_ref().map(|head| Arc::clone(&head.model)),
                    (RowsOut::Sources, true) => {
                        let encoder = model.source_encoder();
                        Some(encoder.ok_or_else(no_encoder)?.model)
                    }
                    (RowsOut::Sources, false) => return Err(tokens_only()),
                    (_, true) => None,
                    (_, false) => Some(model.of_rows().ok_or_else(tokens_only)?),
                };
                let graph = other.as_ref().unwrap_or(model).graph(shape)?;
                let graph = match mode {
                    AttentionMode::Fused => graph,
                    AttentionMode::Plain => {
                        let n_kv = |part: PartIdx| n_kv.get(part.as_usize()).copied();
                        let plain = graph.with_plain_attention(|part| n_kv(part).unwrap_or(0));
                        plain.map_err(ModelError::Graph)?
                    }
                };
                let graph = match rows_kind {
                    RowsOut::Whole | RowsOut::Sources | RowsOut::Drafts | RowsOut::Stored => graph,
                    RowsOut::Candidates(k) => {
                        graph.with_candidates(k).map_err(ModelError::Graph)?
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

    /// Copies the output rows to the rows of their entries.
    fn take_rows(&mut self, ubatch: &UBatch, to: &mut BatchOutput) -> Result<(), EngineError> {
        let width = self.row_width();
        let (values, wanted) = (self.outputs.first(), ubatch.output_rows.len() * width);
        if values.len() != wanted {
            return Err(EngineError::WrongLogits {
                wanted,
                got: values.len(),
            });
        }
        let place = |&row: &u32| {
            let entry = ubatch.entries.get(row as usize).map(|&e| e as usize);
            entry.and_then(|e| to.places.get(e).copied().flatten())
        };
        let row_places = ubatch.output_rows.iter().map(place);
        let is_all = wanted == to.values.len();
        if is_all
            && row_places
                .clone()
                .eq((0..ubatch.output_rows.len()).map(Some))
        {
            // All rows in their order are not copied: a megabyte a token, where vocabularies are
            // large.
            if let Some(first) = self.outputs.values.first_mut() {
                std::mem::swap(first, &mut to.values);
            }
            return Ok(());
        }
        for (place, values) in row_places.zip(values.chunks_exact(width.max(1))) {
            let room = place.and_then(|at| to.values.get_mut(at * width..(at + 1) * width));
            if let Some(room) = room {
                room.copy_from_slice(values);
            }
        }
        Ok(())
    }
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

/// Makes room for `n_rows` output rows.
pub(crate) fn resize_output(
    values: &mut Vec<f32>,
    n_rows: usize,
    width: usize,
) -> Result<(), EngineError> {
    let out_of_memory = || EngineError::OutputTooLarge { n_rows, width };
    let n_values = n_rows.checked_mul(width).ok_or_else(out_of_memory)?;
    let missing = n_values.saturating_sub(values.len());
    values
        .try_reserve_exact(missing)
        .map_err(|_| out_of_memory())?;
    values.resize(n_values, 0.0);
    Ok(())
}

/// For each entry whose output is wanted, the number of its logits row.
pub(crate) fn output_places(batch: &ValidBatch) -> Vec<Option<usize>> {
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
