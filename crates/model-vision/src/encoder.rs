//! [`TowerEncoder`]: a tower on a backend.
//!
//! Pieces of a picture are some layers of one of its tiles, or projectors. Invariant: a tile's rows
//! do not depend on other tiles, nor on what is computed between its pieces. The graphs that were
//! used last are kept compiled. Knows no format of pictures.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use kv_backend::{Backend, CancelFlag, OnProgress};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{
    GridPos, Pos,
    batch::{Batch, BatchRules, PositionRule, SplitPolicy, UBatch, validate_with},
    memory::{BatchVisibility, batch_visibility},
};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphShape};
use kv_rows::RowLayout;
use model_core::architecture::ModelError;
use model_core::media::MediaKind;
use model_core::picture::{
    PartialPicture, Picture, PictureEncoder, PictureError, PictureRow, Tile,
};

use crate::resample::{AxisRows, Resampling};
use crate::stage::Stage;
use crate::tower::{LINE_END, POSITIONS, STEM_FRAMES, Tower, TowerPositions};

/// The rows of the compiled graphs that are kept, all together: each has memory for its own.
const KEPT_ROWS: usize = 1 << 14;

/// The rows of the layers that are computed in one piece, all together, where the host computes.
const HOST_PIECE_ROWS: usize = 1 << 11;

/// The same where a device computes, from which rows come back slowly.
const DEVICE_PIECE_ROWS: usize = 1 << 15;

/// The learned rows that come in with patches.
enum PositionRows {
    None,
    /// A square of rows.
    Square(Vec<f32>, Resampling),
    /// Those of columns and of rows.
    OfAxes(AxisRows),
}

/// A compiled graph, for so many rows.
struct CompiledStage<P> {
    stage: Stage,
    n_rows: usize,
    program: P,
    /// The rows that rows see, in each window of the graph.
    windows: Vec<BatchVisibility>,
}

/// A tower on a backend.
pub struct TowerEncoder<B: Backend> {
    backend: B,
    tower: Arc<Tower>,
    weights: B::Weights,
    source: Arc<dyn WeightSource>,
    layout: RowLayout,
    rows: B::Rows,
    /// The last used last.
    programs: VecDeque<CompiledStage<B::Program>>,
    outputs: GraphOutputs,
    /// The learned rows of positions that come in with patches, where they do.
    positions: PositionRows,
    /// The row behind lines of rows; empty where a tower has none.
    line_end: Vec<f32>,
    /// See [`HOST_PIECE_ROWS`].
    piece_rows: usize,
}

impl<B: Backend> TowerEncoder<B> {
    /// A tower whose weights are loaded into a backend.
    ///
    /// # Errors
    /// [`PictureError`] where the backend cannot hold them.
    pub fn new(
        backend: B,
        tower: Arc<Tower>,
        source: Arc<dyn WeightSource>,
    ) -> Result<Self, PictureError> {
        let layout = RowLayout::default();
        let rows = backend.allocate(&layout)?;
        let weights = backend.load_weights(Arc::clone(&source), OnProgress::default())?;
        let learned = || source.require(POSITIONS).map_err(ModelError::Weight);
        let positions = match tower.positions {
            TowerPositions::None | TowerPositions::Learned(_) => PositionRows::None,
            TowerPositions::Resampled(how) => PositionRows::Square(learned()?.to_f32(), how),
            TowerPositions::OfAxes(n) => PositionRows::OfAxes(AxisRows::new(learned()?, n)),
        };
        let line_end = source.get(LINE_END).map(|row| row.to_f32());
        let line_end = line_end.unwrap_or_default();
        Ok(Self {
            piece_rows: if backend.prefers_candidates() {
                DEVICE_PIECE_ROWS
            } else {
                HOST_PIECE_ROWS
            },
            backend,
            tower,
            weights,
            source,
            layout,
            rows,
            programs: VecDeque::new(),
            outputs: GraphOutputs::default(),
            positions,
            line_end,
        })
    }

    /// The same where at most so many rows of layers are computed in one piece, all together.
    #[must_use]
    pub fn with_piece_rows(mut self, n: usize) -> Self {
        self.piece_rows = n;
        self
    }

    /// Computes the next piece of a tile: some of its layers, or the projectors behind the last.
    fn piece(
        &mut self,
        tile: &Tile,
        partial: &mut PartialPicture,
        cancel: &CancelFlag,
    ) -> Result<(), PictureError> {
        let tower = Arc::clone(&self.tower);
        let stages = tower.stages(tile.places.len(), self.piece_rows);
        let Some(&stage) = stages.get(partial.n_stages) else {
            let rows = std::mem::take(&mut partial.results);
            let rows = self.projected(tile, rows, cancel)?;
            partial.rows.extend(rows);
            partial.n_tiles += 1;
            partial.n_stages = 0;
            return Ok(());
        };
        let deep = partial.results.split_off(partial.results.len().min(1));
        let given = match partial.results.pop() {
            None => self.given(tile, cancel)?,
            Some(patches) => {
                let n_rows = patches.len() / tower.stage_width(stage).max(1);
                // Behind a merger rows are no longer those of patches.
                Cow::Owned(if tile.places.len() == n_rows {
                    with_patches(tile, patches)
                } else {
                    with_patches(&Tile::default(), patches)
                })
            }
        };
        let results = self.run(stage, &given, cancel)?;
        let (rows, new) = results.split_at(results.len().min(1));
        partial.results = [rows, &deep, new].concat();
        partial.n_stages += 1;
        Ok(())
    }

    /// The input for the patches of a tile.
    fn given<'t>(
        &mut self,
        tile: &'t Tile,
        cancel: &CancelFlag,
    ) -> Result<Cow<'t, Tile>, PictureError> {
        let tower = Arc::clone(&self.tower);
        let tile = match tower.n_bins {
            None => Cow::Borrowed(tile),
            Some(n_bins) => Cow::Owned(self.stem(tile, n_bins, cancel)?),
        };
        let rows = match &self.positions {
            PositionRows::None => return Ok(tile),
            PositionRows::Square(square, how) => how.rows(square, tower.dim, &tile),
            PositionRows::OfAxes(axes) => axes.rows(&tile)?,
        };
        let patches = Cow::Borrowed(&*tile.patches);
        let parts = vec![(patches, tower.patch_len), (Cow::Owned(rows), tower.dim)];
        let patches = side_by_side(parts);
        Ok(Cow::Owned(with_patches(&tile, patches)))
    }

    /// The rows of a tile in a prompt, of those behind its last layer and of DeepStack's.
    fn projected(
        &mut self,
        tile: &Tile,
        rows: Vec<Vec<f32>>,
        cancel: &CancelFlag,
    ) -> Result<Vec<f32>, PictureError> {
        let tower = Arc::clone(&self.tower);
        let mut parts = Vec::with_capacity(rows.len());
        for (number, (steps, rows)) in tower.projectors().zip(rows).enumerate() {
            let merged = Tile {
                patches: tower.arrangement.apply(rows, tower.dim, tile),
                ..Tile::default()
            };
            let projected = if steps.is_empty() {
                merged.patches
            } else {
                let results = self.run(Stage::Projector(number), &merged, cancel)?;
                results.into_iter().next().unwrap_or_default()
            };
            parts.push((Cow::Owned(projected), tower.projected_dim(steps)));
        }
        Ok(side_by_side(parts))
    }

    /// The tile of a sound with what the first convolution makes of its frames, as the second one
    /// takes it.
    fn stem(
        &mut self,
        tile: &Tile,
        n_bins: usize,
        cancel: &CancelFlag,
    ) -> Result<Tile, PictureError> {
        let dim = self.tower.dim;
        let frames = Tile {
            patches: overlapping(&tile.patches, n_bins, 1),
            ..Tile::default()
        };
        let results = self.run(Stage::Stem, &frames, cancel)?;
        // Before the first row there is an empty one.
        let mut rows = vec![0.0; dim];
        rows.extend(results.into_iter().next().unwrap_or_default());
        Ok(with_patches(tile, overlapping(&rows, dim, 2)))
    }

    /// The results of a graph for a tile's values.
    fn run(
        &mut self,
        stage: Stage,
        tile: &Tile,
        cancel: &CancelFlag,
    ) -> Result<Vec<Vec<f32>>, PictureError> {
        let ubatch = ubatch_of(tile, self.tower.stage_width(stage))?;
        let n_rows = ubatch.n_tokens() as usize;
        let mut compiled = self.compiled(stage, n_rows)?;
        for window in &mut compiled.windows {
            batch_visibility(&ubatch, window);
        }
        let coordinates: Vec<[u32; 3]> = ubatch.coordinates().collect();
        let inputs = GraphInputs {
            shape: Some(GraphShape {
                n_tokens: n_rows,
                n_outputs: n_rows,
            }),
            embeddings: &ubatch.embeddings,
            positions: &ubatch.positions,
            coordinates: &coordinates,
            output_rows: &ubatch.output_rows,
            batch: &compiled.windows,
            cancel: Some(cancel),
            ..GraphInputs::default()
        };
        let program = &mut compiled.program;
        let ran = (self.backend).run(program, &mut self.rows, &inputs, &mut self.outputs);
        self.programs.push_back(compiled);
        ran?;
        self.backend.finish(&mut self.rows)?;
        self.source.check()?;
        Ok(std::mem::take(&mut self.outputs.values))
    }

    /// The program of a graph for so many rows, taken out of those that are kept.
    fn compiled(
        &mut self,
        stage: Stage,
        n_rows: usize,
    ) -> Result<CompiledStage<B::Program>, PictureError> {
        let is_it = |kept: &CompiledStage<_>| kept.stage == stage && kept.n_rows == n_rows;
        if let Some(at) = self.programs.iter().position(is_it)
            && let Some(kept) = self.programs.remove(at)
        {
            return Ok(kept);
        }
        let of_kept = |kept: &VecDeque<CompiledStage<_>>| -> usize {
            kept.iter().map(|kept| kept.n_rows).sum()
        };
        while !self.programs.is_empty() && of_kept(&self.programs) + n_rows > KEPT_ROWS {
            self.programs.pop_front();
        }
        let graph = self.tower.stage_graph(stage, n_rows);
        let graph: Graph = graph.map_err(ModelError::Graph)?;
        let windows = graph.batch_windows().map(|window| BatchVisibility {
            window,
            ..BatchVisibility::default()
        });
        Ok(CompiledStage {
            stage,
            n_rows,
            windows: windows.collect(),
            program: self.backend.compile(&graph, &self.weights, &self.layout)?,
        })
    }
}

impl<B: Backend> PictureEncoder for TowerEncoder<B> {
    fn encode(&mut self, picture: &Picture, cancel: &CancelFlag) -> Result<Vec<f32>, PictureError> {
        let mut partial = PartialPicture::default();
        loop {
            if let Some(rows) = self.encode_piece(picture, &mut partial, cancel)? {
                return Ok(rows);
            }
        }
    }

    fn encode_piece(
        &mut self,
        picture: &Picture,
        partial: &mut PartialPicture,
        cancel: &CancelFlag,
    ) -> Result<Option<Vec<f32>>, PictureError> {
        if let Some(tile) = picture.tiles().get(partial.n_tiles) {
            self.piece(tile, partial, cancel)?;
        }
        if partial.n_tiles < picture.tiles().len() {
            return Ok(None);
        }
        let rows = std::mem::take(&mut partial.rows);
        if picture.layout().is_empty() {
            return Ok(Some(rows));
        }
        let width = self.tower.output_dim();
        let row = |row: &PictureRow| match *row {
            PictureRow::LineEnd => self.line_end.as_slice(),
            PictureRow::OfTile(number) => {
                let start = number as usize * width;
                rows.get(start..start + width).unwrap_or_default()
            }
        };
        let rows = picture.layout().iter().flat_map(row);
        Ok(Some(rows.copied().collect()))
    }
}

impl<B: Backend> fmt::Debug for TowerEncoder<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TowerEncoder")
            .field("tower", &self.tower)
            .field("backend", &self.backend.info())
            .finish_non_exhaustive()
    }
}

/// A tile in the places of another, of other values.
fn with_patches(tile: &Tile, patches: Vec<f32>) -> Tile {
    Tile {
        patches,
        positions: tile.positions.clone(),
        places: tile.places.clone(),
        order: Vec::new(),
    }
}

/// The values of each three rows that follow each other, from every `step`th row on.
fn overlapping(rows: &[f32], width: usize, step: usize) -> Vec<f32> {
    let windows = rows.windows((STEM_FRAMES * width).max(1));
    windows
        .step_by((step * width).max(1))
        .flatten()
        .copied()
        .collect()
}

/// The rows of several lists, each with its width, concatenated.
fn side_by_side(mut parts: Vec<(Cow<'_, [f32]>, usize)>) -> Vec<f32> {
    if parts.len() < 2 {
        let only = parts.pop().map(|(rows, _)| rows.into_owned());
        return only.unwrap_or_default();
    }
    let mut out = Vec::with_capacity(parts.iter().map(|(rows, _)| rows.len()).sum());
    let mut lists: Vec<_> = parts
        .iter()
        .map(|(rows, width)| rows.chunks_exact((*width).max(1)))
        .collect();
    while let Some(row) = lists
        .iter_mut()
        .map(Iterator::next)
        .collect::<Option<Vec<_>>>()
    {
        row.into_iter().for_each(|part| out.extend_from_slice(part));
    }
    out
}

/// The values of a tile as rows of one ubatch.
fn ubatch_of(tile: &Tile, width: usize) -> Result<UBatch, PictureError> {
    let mut batch = Batch::new();
    let values = tile.patches.chunks_exact(width.max(1));
    let n_rows = values.len();
    for (at, row) in (0u32..).zip(values) {
        let number = at as usize;
        let pos = tile.positions.get(number).copied().unwrap_or(at);
        let place = tile.places.get(number).copied();
        let place = place.unwrap_or(GridPos::of_text(Pos(at)));
        batch
            .push_embedding(row)
            .at_grid(Pos(pos), place)
            .with_output();
    }
    let n_batch = u32::try_from(n_rows).unwrap_or(u32::MAX);
    let rules = BatchRules {
        n_batch,
        n_seqs: 1,
        n_vocab: 1,
        n_embd: u32::try_from(width).unwrap_or(u32::MAX),
    };
    let checked = validate_with(&batch, &rules, PositionRule::Grid, |_| None);
    let split = checked.and_then(|valid| SplitPolicy::WholeSequences.split(&valid, n_batch));
    let unreadable = |reason: String| PictureError::Unreadable {
        media: MediaKind::Picture,
        reason,
    };
    let mut ubatches = split.map_err(|error| unreadable(error.to_string()))?;
    ubatches
        .pop()
        .ok_or_else(|| unreadable("it has no patches".to_owned()))
}
