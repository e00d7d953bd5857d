//! Rows of pictures in steps: a tower computes them, piece by piece, when they are due, and they
//! are kept by name.
//!
//! Invariant: a picture whose rows are all in the memory, or are kept here, is not computed again,
//! and one that several texts wait for is computed once. What is kept is within a budget of bytes;
//! what a text waits for is its own until its tokens are computed. Knows no tower.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cellar_scheduler::{PrefixUse, RequestId, Salt};
use kv_backend::{BackendError, CancelFlag};
use kv_core::batch::{PositionRule, UBatch};
use kv_core::{Pos, SeqId, TokenId};
use kv_graph::{Graph, Input, Node, Op};
use model_core::picture::{
    PartialPicture, Picture, PictureEncoder, PictureError, PictureName, PictureRun,
};

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
    picture: SeenPicture,
}

/// The rows of a picture that wait for the step that needs them, whether they are kept or not.
#[derive(Clone, Debug)]
pub(crate) struct SeenPicture {
    name: PictureName,
    rows: Arc<[f32]>,
}

/// A picture that is being computed.
struct Job {
    viewers: Viewers,
    picture: Arc<Picture>,
    /// The texts that wait for it.
    texts: BTreeSet<RequestId>,
    partial: PartialPicture,
}

/// The encoder of the pictures of a session's prompts, with the rows that it keeps.
pub struct Tower {
    encoder: Box<dyn PictureEncoder>,
    /// The least recently used first.
    kept: VecDeque<KeptRows>,
    n_bytes: usize,
    /// In the order in which they are computed.
    jobs: VecDeque<Job>,
    n_computed: u64,
    n_pieces: u64,
}

impl Tower {
    /// A tower that keeps rows of at most so many bytes.
    pub fn new(encoder: Box<dyn PictureEncoder>, n_bytes: usize) -> Self {
        Self {
            encoder,
            kept: VecDeque::new(),
            n_bytes,
            jobs: VecDeque::new(),
            n_computed: 0,
            n_pieces: 0,
        }
    }

    /// Number of pictures that were computed so far.
    pub fn n_computed(&self) -> u64 {
        self.n_computed
    }

    /// Number of pieces of pictures that were computed so far. Other texts get their tokens between
    /// two of them.
    pub fn n_pieces(&self) -> u64 {
        self.n_pieces
    }

    /// The rows of a picture, where they are kept; they are the last to go then.
    fn use_kept(&mut self, name: PictureName, viewers: Viewers) -> Option<Arc<[f32]>> {
        let is_it = |kept: &KeptRows| (kept.viewers, kept.picture.name) == (viewers, name);
        let at = self.kept.iter().position(is_it)?;
        let found = self.kept.remove(at)?;
        let rows = Arc::clone(&found.picture.rows);
        self.kept.push_back(found);
        Some(rows)
    }

    /// The needs of a step: of the pictures of a sequence, of which it computes the tokens
    /// `places`. `seen` are the rows that wait for the sequence; those that it needs no more go.
    ///
    /// # Errors
    /// The first picture that is to be computed before ([`Tower::want`]).
    pub(crate) fn of_step(
        &mut self,
        pictures: &[PictureRun],
        viewers: Viewers,
        places: Range<usize>,
        seen: &mut Vec<SeenPicture>,
    ) -> Result<Vec<StepRun>, Arc<Picture>> {
        let is_due = |run: &&PictureRun| run.places().end > places.start;
        let is_of = |name| move |run: &PictureRun| run.picture.name() == name;
        seen.retain(|seen| pictures.iter().filter(is_due).any(is_of(seen.name)));
        let before = pictures.iter().take_while(|run| run.at < places.end);
        let step_run = |run: &PictureRun| {
            let name = run.picture.name();
            let values = if is_due(&run) {
                let found = seen.iter().find(|seen| seen.name == name);
                let found = found.map(|seen| Arc::clone(&seen.rows));
                let found = found.or_else(|| self.use_kept(name, viewers));
                Some(found.ok_or_else(|| Arc::clone(&run.picture))?)
            } else {
                None
            };
            let run = run.clone();
            Ok(StepRun { run, values })
        };
        before.map(step_run).collect()
    }

    /// Computes a picture, too, for these texts, which wait for it.
    pub(crate) fn want(
        &mut self,
        picture: Arc<Picture>,
        viewers: Viewers,
        texts: impl Iterator<Item = RequestId>,
    ) {
        let is_it = |job: &&mut Job| job.viewers == viewers && job.picture.name() == picture.name();
        if let Some(job) = self.jobs.iter_mut().find(is_it) {
            job.texts.extend(texts);
            return;
        }
        self.jobs.push_back(Job {
            viewers,
            picture,
            texts: texts.collect(),
            partial: PartialPicture::default(),
        });
    }

    /// The texts that wait for the picture that is computed next. Those that do not wait any more
    /// are forgotten, and pictures that none waits for, however much of them was computed.
    pub(crate) fn next_texts(&mut self, waits: impl Fn(RequestId) -> bool) -> BTreeSet<RequestId> {
        for job in &mut self.jobs {
            job.texts.retain(|&text| waits(text));
        }
        self.jobs.retain(|job| !job.texts.is_empty());
        let next = self.jobs.front();
        next.map(|job| job.texts.clone()).unwrap_or_default()
    }

    /// Computes a piece of the picture that is computed next, and gives it with the last one. When
    /// that fails, it is computed no more.
    pub(crate) fn advance(
        &mut self,
        cancel: &CancelFlag,
    ) -> Result<Option<SeenPicture>, EngineError> {
        let Some(mut job) = self.jobs.pop_front() else {
            return Ok(None);
        };
        let piece = self
            .encoder
            .encode_piece(&job.picture, &mut job.partial, cancel);
        self.n_pieces += 1;
        let Some(rows) = piece? else {
            self.jobs.push_front(job);
            return Ok(None);
        };
        self.n_computed += 1;
        let seen = SeenPicture {
            name: job.picture.name(),
            rows: rows.into(),
        };
        self.kept.push_back(KeptRows {
            viewers: job.viewers,
            picture: seen.clone(),
        });
        let bytes_of = |kept: &KeptRows| size_of_val(&kept.picture.rows[..]);
        while self.kept.iter().map(bytes_of).sum::<usize>() > self.n_bytes {
            self.kept.pop_front();
        }
        Ok(Some(seen))
    }
}

impl fmt::Debug for Tower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tower")
            .field("n_kept", &self.kept.len())
            .field("n_waiting", &self.jobs.len())
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
    use model_core::media::MediaKind;
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

    /// Gives rows of two values, the first byte of the name and the row, one row a piece.
    struct CountingEncoder;

    impl PictureEncoder for CountingEncoder {
        fn encode(&mut self, _: &Picture, _: &CancelFlag) -> Result<Vec<f32>, PictureError> {
            let reason = "whole".to_owned();
            let media = MediaKind::Picture;
            Err(PictureError::Unreadable { media, reason })
        }

        fn encode_piece(
            &mut self,
            picture: &Picture,
            partial: &mut PartialPicture,
            cancel: &CancelFlag,
        ) -> Result<Option<Vec<f32>>, PictureError> {
            if cancel.is_cancelled() {
                return Err(PictureError::Backend(BackendError::Cancelled));
            }
            let first = f32::from(picture.name().0[0]);
            partial.rows.extend([first, partial.n_stages as f32]);
            partial.n_stages += 1;
            let is_done = partial.n_stages == picture.n_rows();
            Ok(is_done.then(|| std::mem::take(&mut partial.rows)))
        }
    }

    /// Computes all that is waited for, and gives the last one.
    fn finish(tower: &mut Tower) -> Option<SeenPicture> {
        let mut last = None;
        while !tower.next_texts(|_| true).is_empty() {
            last = tower.advance(&CancelFlag::default()).unwrap().or(last);
        }
        last
    }

    #[test]
    fn rows_are_computed_once_within_the_budget() {
        let (a, b) = (picture(1, 2, 3), picture(2, 2, 3));
        // 6 rows of 2 values of 4 bytes.
        let mut tower = Tower::new(Box::new(CountingEncoder), 48);
        let mut step = |run: &PictureRun, places: Range<usize>| {
            let (run, viewers) = (std::slice::from_ref(run), Viewers::Within(Salt(0)));
            let mut seen = Vec::new();
            let runs = loop {
                match tower.of_step(run, viewers, places.clone(), &mut seen) {
                    Ok(runs) => break runs,
                    Err(picture) => {
                        tower.want(picture, viewers, std::iter::once(RequestId(7)));
                        seen.extend(finish(&mut tower));
                    }
                }
            };
            let has_values = runs.iter().map(|run| run.values.is_some());
            (has_values.collect::<Vec<_>>(), tower.n_computed)
        };
        assert_eq!(step(&run(4, &a), 0..4), (vec![], 0));
        assert_eq!(step(&run(4, &a), 0..5), (vec![true], 1));
        assert_eq!(step(&run(9, &a), 10..12), (vec![true], 1));
        assert_eq!(step(&run(4, &a), 10..12), (vec![false], 1));
        assert_eq!(step(&run(4, &b), 4..10), (vec![true], 2));
        assert_eq!(step(&run(4, &a), 4..10), (vec![true], 3));
        assert_eq!(tower.n_pieces, 18);
        // Others do not find it.
        let (run, viewers) = ([run(4, &a)], Viewers::Alone(RequestId(1)));
        let missing = tower.of_step(&run, viewers, 4..10, &mut Vec::new());
        assert_eq!(missing.unwrap_err().name(), a.name());
    }

    #[test]
    fn rows_wait_for_their_text_without_any_budget() {
        let a = picture(1, 1, 4);
        let mut tower = Tower::new(Box::new(CountingEncoder), 0);
        let (runs, viewers) = ([run(2, &a)], Viewers::Within(Salt(0)));
        tower.want(Arc::clone(&a), viewers, std::iter::once(RequestId(1)));
        let mut seen = vec![finish(&mut tower).unwrap()];
        for places in [0..4, 4..5, 5..6] {
            let runs = tower.of_step(&runs, viewers, places, &mut seen).unwrap();
            assert_eq!(
                runs[0].values.as_deref().unwrap()[..4],
                [1.0, 0.0, 1.0, 1.0]
            );
        }
        assert!(tower.of_step(&runs, viewers, 6..7, &mut seen).is_ok());
        assert!(seen.is_empty(), "its tokens are computed");
        assert!(tower.of_step(&runs, viewers, 5..6, &mut seen).is_err());
    }

    #[test]
    fn a_picture_that_none_waits_for_stops_between_pieces() {
        let a = picture(1, 2, 3);
        let mut tower = Tower::new(Box::new(CountingEncoder), 48);
        let viewers = Viewers::Within(Salt(0));
        for text in [1, 2] {
            tower.want(Arc::clone(&a), viewers, std::iter::once(RequestId(text)));
        }
        let cancel = CancelFlag::default();
        assert!(tower.advance(&cancel).unwrap().is_none());
        let waiting = tower.next_texts(|text| text == RequestId(2));
        assert_eq!(Vec::from_iter(waiting), [RequestId(2)]);
        assert!(tower.advance(&cancel).unwrap().is_none());
        assert!(tower.next_texts(|_| false).is_empty());
        assert!(tower.advance(&cancel).unwrap().is_none());
        assert_eq!((tower.n_pieces, tower.n_computed), (2, 0));
        // A piece that is cancelled ends its picture.
        tower.want(a, viewers, std::iter::once(RequestId(3)));
        cancel.cancel();
        let error = tower.advance(&cancel).unwrap_err();
        assert!(matches!(error, EngineError::Cancelled));
        assert!(tower.next_texts(|_| true).is_empty());
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
