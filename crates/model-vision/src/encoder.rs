//! [`TowerEncoder`]: a tower on a backend.
//!
//! Pieces of pictures are some layers of some of their tiles, or projectors. Tiles that are at the
//! same step go through a graph together, each a sequence of its own. Invariant: a tile's rows do
//! not depend on other tiles, nor on what is computed between its pieces. The graphs that were used
//! last are kept compiled. Knows no format of pictures.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

use kv_backend::{Backend, CancelFlag, OnProgress};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::memory::{BatchVisibility, batch_visibility};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphShape};
use kv_rows::RowLayout;
use model_core::architecture::ModelError;
use model_core::picture::{
    PartialPicture, PartialTile, Picture, PictureEncoder, PictureError, PictureRow, PictureWork,
    Tile,
};

use crate::resample::{AxisRows, Resampling};
use crate::stage::Stage;
use crate::tile_rows::{TileRows, divided, overlapping, side_by_side, ubatch_of};
use crate::tower::{LINE_END, POSITIONS, Tower, TowerPositions};

/// The rows of the compiled graphs that are kept, all together: each has memory for its own.
const KEPT_ROWS: usize = 1 << 14;

/// The rows of the layers that are computed in one piece, all together, where the host computes.
const HOST_PIECE_ROWS: usize = 1 << 11;

/// The same where a device computes, from which rows come back slowly.
const DEVICE_PIECE_ROWS: usize = 1 << 15;

/// The most rows of several tiles that go through a graph together where the host computes: more
/// at once are no faster there.
const HOST_GROUP_ROWS: usize = 1 << 9;

/// The most tiles that do: each is a sequence, and those are looked up one by one.
const GROUP_TILES: usize = 64;

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
    /// See [`HOST_GROUP_ROWS`].
    group_rows: usize,
}

/// The choice of the tiles of a piece among those that are offered, in order.
struct Group<'t> {
    tower: &'t Tower,
    n_rows_left: usize,
    n_tiles: usize,
    /// The steps that are done of all of them.
    n_steps: usize,
}

impl Group<'_> {
    /// Takes a tile of which so many steps are done: the first one that is not done, and those at
    /// the same step for which there is room.
    fn takes(&mut self, tile: &Tile, n_steps: usize) -> bool {
        if n_steps >= self.tower.n_steps() {
            return false;
        }
        let n_rows = self.tower.n_rows(tile.places.len(), n_steps);
        let fits =
            n_steps == self.n_steps && n_rows <= self.n_rows_left && self.n_tiles < GROUP_TILES;
        if self.n_tiles > 0 && !fits {
            return false;
        }
        self.n_tiles += 1;
        self.n_steps = n_steps;
        self.n_rows_left = self.n_rows_left.saturating_sub(n_rows);
        true
    }
}

/// A tile that is being computed.
struct TileWork<'a> {
    tile: &'a Tile,
    partial: &'a mut PartialTile,
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
        let (piece_rows, group_rows) = if backend.prefers_candidates() {
            (DEVICE_PIECE_ROWS, DEVICE_PIECE_ROWS)
        } else {
            (HOST_PIECE_ROWS, HOST_GROUP_ROWS)
        };
        Ok(Self {
            piece_rows,
            group_rows,
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

    /// The same where at most so many rows of layers are computed in one piece, all together: of
    /// one tile, or of as many as there is room for.
    #[must_use]
    pub fn with_piece_rows(mut self, n: usize) -> Self {
        self.piece_rows = n;
        self.group_rows = n;
        self
    }

    fn group(&self) -> Group<'_> {
        Group {
            tower: &self.tower,
            n_rows_left: self.group_rows,
            n_tiles: 0,
            n_steps: 0,
        }
    }

    /// Computes a piece of some tiles, which are at the same step: some layers, or the projectors
    /// behind the last.
    fn piece(
        &mut self,
        works: &mut [TileWork<'_>],
        cancel: &CancelFlag,
    ) -> Result<(), PictureError> {
        let tower = Arc::clone(&self.tower);
        let n_steps = works.first().map_or(0, |work| work.partial.n_steps);
        let tiles: Vec<&Tile> = works.iter().map(|work| work.tile).collect();
        let n_rows_of = |tile: &&Tile| tower.n_rows(tile.places.len(), n_steps);
        let n_rows: usize = tiles.iter().map(n_rows_of).sum();
        let results = works
            .iter_mut()
            .map(|work| std::mem::take(&mut work.partial.results));
        let mut results: Vec<Vec<Vec<f32>>> = results.collect();
        let Some(stage) = tower.next_stage(n_steps, self.piece_rows / n_rows.max(1)) else {
            let rows = self.projected(&tiles, results, cancel)?;
            for (work, rows) in works.iter_mut().zip(rows) {
                work.partial.results = vec![rows];
                work.partial.n_steps += 1;
            }
            return Ok(());
        };
        let given = if n_steps == 0 {
            self.given(&tiles, cancel)?
        } else {
            let rows = tiles.iter().zip(&mut results).map(|(&tile, results)| {
                let values = results.first_mut().map(std::mem::take);
                // Behind a merger rows are no longer those of patches.
                TileRows {
                    values: Cow::Owned(values.unwrap_or_default()),
                    tile: (n_rows_of(&tile) == tile.places.len()).then_some(tile),
                }
            });
            rows.collect()
        };
        let new = self.run(stage, &given, cancel)?;
        for ((work, new), earlier) in works.iter_mut().zip(new).zip(results) {
            let mut new = new.into_iter();
            let rows = new.next();
            let earlier = earlier.into_iter().skip(1);
            work.partial.results = rows.into_iter().chain(earlier).chain(new).collect();
            work.partial.n_steps += stage.n_steps();
        }
        Ok(())
    }

    /// The input for the patches of tiles.
    fn given<'t>(
        &mut self,
        tiles: &[&'t Tile],
        cancel: &CancelFlag,
    ) -> Result<Vec<TileRows<'t>>, PictureError> {
        let tower = Arc::clone(&self.tower);
        let given = match tower.n_bins {
            None => tiles.iter().map(|&tile| TileRows::of(tile)).collect(),
            Some(n_bins) => self.stem(tiles, n_bins, cancel)?,
        };
        let placed = given.into_iter().zip(tiles).map(|(given, tile)| {
            let rows = match &self.positions {
                PositionRows::None => return Ok(given),
                PositionRows::Square(square, how) => how.rows(square, tower.dim, tile),
                PositionRows::OfAxes(axes) => axes.rows(tile)?,
            };
            let parts = vec![
                (given.values, tower.patch_len),
                (Cow::Owned(rows), tower.dim),
            ];
            let values = Cow::Owned(side_by_side(parts));
            Ok(TileRows { values, ..given })
        });
        placed.collect()
    }

    /// The rows of tiles in a prompt, of those behind their last layer and of DeepStack's.
    fn projected(
        &mut self,
        tiles: &[&Tile],
        mut rows: Vec<Vec<Vec<f32>>>,
        cancel: &CancelFlag,
    ) -> Result<Vec<Vec<f32>>, PictureError> {
        let tower = Arc::clone(&self.tower);
        let mut parts: Vec<Vec<_>> = tiles.iter().map(|_| Vec::new()).collect();
        for (number, steps) in tower.projectors().enumerate() {
            let merged = tiles.iter().zip(&mut rows).map(|(tile, rows)| {
                let rows = rows.get_mut(number).map(std::mem::take).unwrap_or_default();
                TileRows {
                    values: Cow::Owned(tower.arrangement.apply(rows, tower.dim, tile)),
                    tile: None,
                }
            });
            let merged: Vec<TileRows<'_>> = merged.collect();
            let projected: Vec<Cow<'_, [f32]>> = if steps.is_empty() {
                merged.into_iter().map(|rows| rows.values).collect()
            } else {
                let results = self.run(Stage::Projector(number), &merged, cancel)?;
                let first = |results: Vec<Vec<f32>>| results.into_iter().next();
                let rows = results.into_iter().map(first);
                rows.map(|rows| Cow::Owned(rows.unwrap_or_default()))
                    .collect()
            };
            for (parts, projected) in parts.iter_mut().zip(projected) {
                parts.push((projected, tower.projected_dim(steps)));
            }
        }
        Ok(parts.into_iter().map(side_by_side).collect())
    }

    /// What the first convolution makes of the frames of sounds, as the second one takes it.
    fn stem<'t>(
        &mut self,
        tiles: &[&'t Tile],
        n_bins: usize,
        cancel: &CancelFlag,
    ) -> Result<Vec<TileRows<'t>>, PictureError> {
        let dim = self.tower.dim;
        let frames = tiles.iter().map(|tile| TileRows {
            values: Cow::Owned(overlapping(&tile.patches, n_bins, 1)),
            tile: None,
        });
        let frames: Vec<TileRows<'_>> = frames.collect();
        let results = self.run(Stage::Stem, &frames, cancel)?;
        let second = tiles.iter().zip(results).map(|(&tile, results)| {
            // Before the first row there is an empty one.
            let mut rows = vec![0.0; dim];
            rows.extend(results.into_iter().next().unwrap_or_default());
            TileRows {
                values: Cow::Owned(overlapping(&rows, dim, 2)),
                tile: Some(tile),
            }
        });
        Ok(second.collect())
    }

    /// The results of a graph for the values of some tiles: of each tile, those of each output.
    fn run(
        &mut self,
        stage: Stage,
        tiles: &[TileRows<'_>],
        cancel: &CancelFlag,
    ) -> Result<Vec<Vec<Vec<f32>>>, PictureError> {
        let width = self.tower.stage_width(stage);
        let ubatch = ubatch_of(tiles, width)?;
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
        let mut of_tiles: Vec<Vec<Vec<f32>>> = tiles.iter().map(|_| Vec::new()).collect();
        let n_rows: Vec<usize> = tiles.iter().map(|tile| tile.n_rows(width)).collect();
        for output in std::mem::take(&mut self.outputs.values) {
            for (results, own) in of_tiles.iter_mut().zip(divided(output, &n_rows)) {
                results.push(own);
            }
        }
        Ok(of_tiles)
    }

    /// The rows of a picture in a prompt, all of whose tiles are done.
    fn laid_out(&self, picture: &Picture, tiles: &mut [PartialTile]) -> Vec<f32> {
        let done = tiles
            .iter_mut()
            .map(|tile| std::mem::take(&mut tile.results));
        let rows = done.flatten().collect::<Vec<_>>().concat();
        if picture.layout().is_empty() {
            return rows;
        }
        let width = self.tower.output_dim();
        let row = |row: &PictureRow| match *row {
            PictureRow::LineEnd => self.line_end.as_slice(),
            PictureRow::OfTile(number) => {
                let start = number as usize * width;
                rows.get(start..start + width).unwrap_or_default()
            }
        };
        picture.layout().iter().flat_map(row).copied().collect()
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
            let partial = &mut partial;
            self.encode_piece(&mut [PictureWork { picture, partial }], cancel)?;
            if let Some(rows) = partial.rows.take() {
                return Ok(rows);
            }
        }
    }

    fn picks(&self, works: &[PictureWork<'_>]) -> Vec<usize> {
        let mut group = self.group();
        let n_taken = |work: &PictureWork<'_>| {
            let tiles = work.picture.tiles().iter().enumerate();
            let takes = |&(number, tile): &(usize, &Tile)| {
                let partial = work.partial.tiles.get(number);
                group.takes(tile, partial.map_or(0, |partial| partial.n_steps))
            };
            tiles.filter(takes).count()
        };
        let counted = works.iter().map(n_taken).enumerate();
        let picked = counted.filter(|&(number, n_taken)| number == 0 || n_taken > 0);
        picked.map(|(number, _)| number).collect()
    }

    fn encode_piece(
        &mut self,
        works: &mut [PictureWork<'_>],
        cancel: &CancelFlag,
    ) -> Result<(), PictureError> {
        let mut group = self.group();
        let mut tiles = Vec::new();
        for PictureWork { picture, partial } in &mut *works {
            let n_tiles = picture.tiles().len();
            partial.tiles.resize_with(n_tiles, PartialTile::default);
            let offered = picture.tiles().iter().zip(&mut partial.tiles);
            let offered = offered.map(|(tile, partial)| TileWork { tile, partial });
            tiles.extend(offered.filter(|work| group.takes(work.tile, work.partial.n_steps)));
        }
        if !tiles.is_empty() {
            self.piece(&mut tiles, cancel)?;
        }
        let n_steps = self.tower.n_steps();
        for PictureWork { picture, partial } in works {
            if partial.tiles.iter().all(|tile| tile.n_steps >= n_steps) {
                partial.rows = Some(self.laid_out(picture, &mut partial.tiles));
            }
        }
        Ok(())
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
