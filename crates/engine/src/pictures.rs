//! Rows of pictures in steps: a tower computes them when they are due, and they are kept by name.
//!
//! Invariant: a picture whose rows are all in the memory, or are kept here, is not computed again.
//! What is kept is within a budget of bytes, but for the picture of the step. Knows no tower.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cellar_scheduler::{PrefixUse, RequestId, Salt};
use kv_backend::{BackendError, CancelFlag};
use kv_core::batch::{PositionRule, UBatch};
use kv_core::{Pos, SeqId, TokenId};
use kv_graph::{Graph, Input, Node, Op};
use model_core::picture::{Picture, PictureEncoder, PictureError, PictureName, PictureRun};

use crate::error::EngineError;

/// The bytes of rows that a [`Tower`] keeps where nothing else is said.
pub const DEFAULT_PICTURE_BYTES: usize = 64 << 20;

/// The requests that may find the rows of a picture kept: how long a picture takes tells whether
/// somebody showed it before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Viewers {
    /// Those that share cached prefixes.
    Within(Salt),
    /// This one.
    Alone(RequestId),
}

impl Viewers {
    /// Those of a request.
    pub(crate) fn of(prefix: PrefixUse, id: RequestId) -> Self {
        match prefix {
            PrefixUse::Within(salt) => Self::Within(salt),
            PrefixUse::Off => Self::Alone(id),
        }
    }
}

/// Rows that are kept.
#[derive(Clone, Debug)]
struct KeptRows {
    viewers: Viewers,
    name: PictureName,
    rows: Arc<[f32]>,
}

/// The encoder of the pictures of a session's prompts, with the rows that it keeps.
pub struct Tower {
    encoder: Box<dyn PictureEncoder>,
    /// The least recently used first.
    kept: VecDeque<KeptRows>,
    n_bytes: usize,
    n_computed: u64,
}

impl Tower {
    /// A tower that keeps rows of at most so many bytes.
    pub fn new(encoder: Box<dyn PictureEncoder>, n_bytes: usize) -> Self {
        Self {
            encoder,
            kept: VecDeque::new(),
            n_bytes,
            n_computed: 0,
        }
    }

    /// Number of pictures that were computed so far.
    pub fn n_computed(&self) -> u64 {
        self.n_computed
    }

    /// The rows of a picture.
    fn rows(
        &mut self,
        picture: &Picture,
        viewers: Viewers,
        cancel: &CancelFlag,
    ) -> Result<Arc<[f32]>, EngineError> {
        let name = picture.name();
        let is_it = |kept: &KeptRows| (kept.viewers, kept.name) == (viewers, name);
        if let Some(at) = self.kept.iter().position(is_it)
            && let Some(found) = self.kept.remove(at)
        {
            let rows = Arc::clone(&found.rows);
            self.kept.push_back(found);
            return Ok(rows);
        }
        let rows: Arc<[f32]> = self.encoder.encode(picture, cancel)?.into();
        self.n_computed += 1;
        self.kept.push_back(KeptRows {
            viewers,
            name,
            rows: Arc::clone(&rows),
        });
        let bytes_of = |kept: &KeptRows| size_of_val(&kept.rows[..]);
        while self.kept.iter().map(bytes_of).sum::<usize>() > self.n_bytes {
            self.kept.pop_front();
        }
        Ok(rows)
    }

    /// The needs of a step: of the pictures of a sequence, of which it computes the tokens
    /// `places`.
    pub(crate) fn of_step(
        &mut self,
        pictures: &[PictureRun],
        viewers: Viewers,
        places: Range<usize>,
        cancel: &CancelFlag,
    ) -> Result<Vec<StepRun>, EngineError> {
        let before = pictures.iter().take_while(|run| run.at < places.end);
        let step_run = |run: &PictureRun| {
            let values = if run.places().end > places.start {
                Some(self.rows(&run.picture, viewers, cancel)?)
            } else {
                None
            };
            let run = run.clone();
            Ok::<_, EngineError>(StepRun { run, values })
        };
        before.map(step_run).collect()
    }
}

impl fmt::Debug for Tower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tower")
            .field("n_kept", &self.kept.len())
            .field("n_computed", &self.n_computed)
            .finish_non_exhaustive()
    }
}

/// The pictures of the sequences of a step, in order.
pub(crate) type StepPictures = BTreeMap<SeqId, Vec<StepRun>>;

/// Rows of a picture in a sequence.
#[derive(Clone, Debug)]
pub(crate) struct StepRun {
    run: PictureRun,
    /// The rows of the whole picture, where the step computes some of the run.
    values: Option<Arc<[f32]>>,
}

/// The rows that stand in place of the names in a ubatch, written over what `to` held: none where
/// it has tokens.
///
/// # Errors
/// [`EngineError::UnknownRow`] for a name that is none of a picture of the step;
/// [`EngineError::WrongRows`].
pub(crate) fn write_rows(
    ubatch: &UBatch,
    pictures: &StepPictures,
    width: usize,
    to: &mut Vec<f32>,
) -> Result<(), EngineError> {
    to.clear();
    if !ubatch
        .tokens
        .first()
        .is_some_and(|&token| TokenId(token).names_row())
    {
        return Ok(());
    }
    for (&seq, &pos) in ubatch.first_seqs.iter().zip(&ubatch.positions) {
        let unknown = || EngineError::UnknownRow { seq, pos: Pos(pos) };
        let at = pos as usize;
        let runs = pictures.get(&seq).ok_or_else(unknown)?;
        let found = runs.iter().find(|run| run.run.places().contains(&at));
        let StepRun { run, values } = found.ok_or_else(unknown)?;
        let values = values.as_ref().ok_or_else(unknown)?;
        let n_rows = run.picture.n_rows();
        if values.len() != n_rows * width {
            let (got, wanted) = (values.len(), n_rows * width);
            return Err(EngineError::WrongRows { wanted, got });
        }
        let row = run.rows.start + at - run.at;
        let row = values.get(row * width..(row + 1) * width);
        to.extend_from_slice(row.ok_or_else(unknown)?);
    }
    Ok(())
}

/// The check of positions of tokens: those of pictures have rows and columns, where the graph
/// takes them.
pub(crate) fn position_rule(graph: &Graph) -> PositionRule {
    let takes_places = |node: &Node| node.op == Op::Input(Input::Coordinates);
    if graph.nodes().iter().any(takes_places) {
        PositionRule::Grid
    } else {
        PositionRule::Linear
    }
}

/// Position, row and column of each token of a ubatch: a picture counts as many positions as it is
/// high or wide (M-RoPE: Wang et al., arXiv 2409.12191).
pub(crate) fn coordinates<'a>(
    ubatch: &'a UBatch,
    pictures: &'a StepPictures,
) -> impl Iterator<Item = [u32; 3]> + 'a {
    let own = ubatch.coordinates().zip(&ubatch.first_seqs);
    own.map(move |(own, seq)| match pictures.get(seq) {
        Some(runs) => behind(runs, own),
        None => own,
    })
}

/// The place of a token that would be at `own` if each row of the pictures before it counted.
fn behind(runs: &[StepRun], own: [u32; 3]) -> [u32; 3] {
    let mut saved = 0;
    for StepRun { run, .. } in runs {
        let Some(grid) = run.picture.grid() else {
            continue;
        };
        let (at, n) = (run.at as u32, run.rows.len() as u32);
        if own[0] < at {
            break;
        }
        if own[0] < at + n {
            let (start, row, width) = (at - saved, own[0] - at, grid.width.max(1) as u32);
            return [start, start + row / width, start + row % width];
        }
        saved += n.saturating_sub(grid.height.max(grid.width) as u32);
    }
    own.map(|pos| pos.saturating_sub(saved))
}

impl From<PictureError> for EngineError {
    fn from(error: PictureError) -> Self {
        match error {
            PictureError::Backend(BackendError::Cancelled) => Self::Cancelled,
            PictureError::Backend(error) => Self::Backend(error),
            error => Self::Picture(Box::new(error)),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use model_core::picture::PictureGrid;

    use super::*;

    fn picture(first: u8, height: usize, width: usize) -> Arc<Picture> {
        let grid = PictureGrid { height, width };
        let name = PictureName([first; 16]);
        Arc::new(Picture::new(name, Vec::new(), height * width, Some(grid)))
    }

    fn run(at: usize, picture: &Arc<Picture>) -> PictureRun {
        PictureRun {
            at,
            picture: Arc::clone(picture),
            rows: 0..picture.n_rows(),
        }
    }

    /// Gives rows of two values, the first byte of the name and the row.
    struct CountingEncoder;

    impl PictureEncoder for CountingEncoder {
        fn encode(&mut self, picture: &Picture, _: &CancelFlag) -> Result<Vec<f32>, PictureError> {
            let first = f32::from(picture.name().0[0]);
            let rows = (0..picture.n_rows()).flat_map(|row| [first, row as f32]);
            Ok(rows.collect())
        }
    }

    #[test]
    fn rows_are_computed_once_within_the_budget() {
        let (a, b) = (picture(1, 2, 3), picture(2, 2, 3));
        // 6 rows of 2 values of 4 bytes.
        let mut tower = Tower::new(Box::new(CountingEncoder), 48);
        let cancel = CancelFlag::default();
        let mut step = |run: &PictureRun, places| {
            let (run, viewers) = (std::slice::from_ref(run), Viewers::Within(Salt(0)));
            let runs = tower.of_step(run, viewers, places, &cancel).unwrap();
            let has_values = runs.iter().map(|run| run.values.is_some());
            (has_values.collect::<Vec<_>>(), tower.n_computed)
        };
        assert_eq!(step(&run(4, &a), 0..4), (vec![], 0));
        assert_eq!(step(&run(4, &a), 0..5), (vec![true], 1));
        assert_eq!(step(&run(9, &a), 10..12), (vec![true], 1));
        assert_eq!(step(&run(4, &a), 10..12), (vec![false], 1));
        assert_eq!(step(&run(4, &b), 4..10), (vec![true], 2));
        assert_eq!(step(&run(4, &a), 4..10), (vec![true], 3));
        // Others do not find it.
        let (run, viewers) = ([run(4, &a)], Viewers::Alone(RequestId(1)));
        tower.of_step(&run, viewers, 4..10, &cancel).unwrap();
        assert_eq!(tower.n_computed, 4);
    }

    #[test]
    fn pictures_count_as_many_positions_as_they_are_high_or_wide() {
        let (a, b) = (picture(1, 2, 3), picture(2, 4, 1));
        let runs = [run(2, &a), run(10, &b)].map(|run| StepRun { run, values: None });
        let at = |pos| behind(&runs, [pos; 3]);
        assert_eq!([at(0), at(1)], [[0; 3], [1; 3]]);
        assert_eq!([at(2), at(4), at(5)], [[2, 2, 2], [2, 2, 4], [2, 3, 2]]);
        // Six rows count as three.
        assert_eq!([at(8), at(9)], [[5; 3], [6; 3]]);
        assert_eq!([at(10), at(13)], [[7, 7, 7], [7, 10, 7]]);
        assert_eq!(at(14), [11; 3]);
    }
}
