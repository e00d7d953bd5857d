//! Rows of pictures in steps: a tower computes them, piece by piece, when they are due, and they
//! are kept by name.
//!
//! Invariant: a picture whose rows are all in the memory, or are kept here, is not computed again,
//! and one that several texts wait for is computed once. What is kept is within a budget of bytes;
//! what a text waits for is its own until its tokens are computed. Knows no tower.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use cellar_scheduler::{PrefixUse, RequestId, Salt};
use kv_backend::{BackendError, CancelFlag};
use model_core::picture::{
    PartialPicture, Picture, PictureEncoder, PictureError, PictureName, PictureRun, PictureWork,
};

use crate::error::EngineError;
use crate::picture_rows::StepRun;

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
    company: Company,
}

impl Job {
    fn work(&mut self) -> PictureWork<'_> {
        PictureWork {
            picture: &self.picture,
            partial: &mut self.partial,
        }
    }
}

/// The pictures that one may be computed together with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Company {
    /// Any.
    Others,
    /// None: a piece of it failed together with others. Alone it tells whose fault that was.
    Alone,
}

/// A picture that was computed, and the texts that waited for it.
#[derive(Debug)]
pub(crate) struct FinishedPicture {
    pub(crate) seen: SeenPicture,
    pub(crate) texts: BTreeSet<RequestId>,
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
    /// The pictures that are to be computed before ([`Tower::want`]).
    pub(crate) fn of_step(
        &mut self,
        pictures: &[PictureRun],
        viewers: Viewers,
        places: Range<usize>,
        seen: &mut Vec<SeenPicture>,
    ) -> Result<Vec<StepRun>, Vec<Arc<Picture>>> {
        let is_due = |run: &&PictureRun| run.places().end > places.start;
        let is_of = |name| move |run: &PictureRun| run.picture.name() == name;
        seen.retain(|seen| pictures.iter().filter(is_due).any(is_of(seen.name)));
        let mut missing = Vec::new();
        let before = pictures.iter().take_while(|run| run.at < places.end);
        let step_run = |run: &PictureRun| {
            let name = run.picture.name();
            let values = if is_due(&run) {
                let found = seen.iter().find(|seen| seen.name == name);
                let found = found.map(|seen| Arc::clone(&seen.rows));
                let found = found.or_else(|| self.use_kept(name, viewers));
                if found.is_none() {
                    missing.push(Arc::clone(&run.picture));
                }
                found
            } else {
                None
            };
            let run = run.clone();
            StepRun { run, values }
        };
        let runs = before.map(step_run).collect();
        if missing.is_empty() {
            Ok(runs)
        } else {
            Err(missing)
        }
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
            company: Company::Others,
        });
    }

    /// True if the text waits for a picture.
    pub(crate) fn is_awaited_by(&self, text: RequestId) -> bool {
        self.jobs.iter().any(|job| job.texts.contains(&text))
    }

    /// The texts that wait for the pictures of which the next piece is. Those that do not wait any
    /// more are forgotten, and pictures that none waits for, however much of them was computed.
    pub(crate) fn next_texts(&mut self, waits: impl Fn(RequestId) -> bool) -> BTreeSet<RequestId> {
        for job in &mut self.jobs {
            job.texts.retain(|&text| waits(text));
        }
        self.jobs.retain(|job| !job.texts.is_empty());
        let picked = self.picked();
        let jobs = picked.iter().filter_map(|&number| self.jobs.get(number));
        jobs.flat_map(|job| job.texts.iter().copied()).collect()
    }

    /// The numbers of the jobs of which the next piece is.
    fn picked(&mut self) -> Vec<usize> {
        let in_company = |job: &&Job| job.company == Company::Others;
        let n_offered = self.jobs.iter().take_while(in_company).count().max(1);
        let offered = self.jobs.iter_mut().take(n_offered).map(Job::work);
        self.encoder.picks(&offered.collect::<Vec<_>>())
    }

    /// Computes the next piece, of one picture or of several together, and gives those that it
    /// ends. Where it fails for several, each of them begins again alone.
    ///
    /// # Errors
    /// The failure of a piece of one picture, or its end by `cancel`: that picture is given up.
    pub(crate) fn advance(
        &mut self,
        cancel: &CancelFlag,
    ) -> Result<Vec<FinishedPicture>, EngineError> {
        let picked = self.picked();
        let mut jobs: Vec<Job> = Vec::with_capacity(picked.len());
        for &number in picked.iter().rev() {
            jobs.extend(self.jobs.remove(number));
        }
        jobs.reverse();
        if jobs.is_empty() {
            return Ok(Vec::new());
        }
        let mut works: Vec<PictureWork<'_>> = jobs.iter_mut().map(Job::work).collect();
        let piece = self.encoder.encode_piece(&mut works, cancel);
        self.n_pieces += 1;
        if let Err(error) = piece {
            if jobs.len() == 1 || cancel.is_cancelled() {
                return Err(error.into());
            }
            tracing::warn!(%error, n_pictures = jobs.len(), "pictures are computed one by one");
            for job in &mut jobs {
                job.partial = PartialPicture::default();
                job.company = Company::Alone;
            }
        }
        let mut finished = Vec::new();
        for (number, mut job) in picked.into_iter().zip(jobs) {
            match job.partial.rows.take() {
                Some(rows) => finished.push(self.keep(job, rows)),
                None => self.jobs.insert(number - finished.len(), job),
            }
        }
        Ok(finished)
    }

    /// Keeps the rows of a picture within the budget.
    fn keep(&mut self, job: Job, rows: Vec<f32>) -> FinishedPicture {
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
        let texts = job.texts;
        FinishedPicture { seen, texts }
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
pub(crate) mod tests {
    use model_core::media::MediaKind;
    use model_core::picture::{PartialTile, PictureGrid};

    use super::*;

    pub(crate) fn picture(first: u8, height: usize, width: usize) -> Arc<Picture> {
        let grid = PictureGrid { height, width };
        let name = PictureName([first; 16]);
        Arc::new(Picture::new(name, Vec::new(), height * width, Some(grid)))
    }

    pub(crate) fn run(at: usize, picture: &Arc<Picture>) -> PictureRun {
        PictureRun {
            at,
            picture: Arc::clone(picture),
            rows: 0..picture.n_rows(),
        }
    }

    /// Gives rows of two values, the first byte of the name and the row, one row a piece, of so
    /// many pictures together. Those whose names begin with 0 are too dark.
    struct CountingEncoder(usize);

    impl PictureEncoder for CountingEncoder {
        fn encode(&mut self, _: &Picture, _: &CancelFlag) -> Result<Vec<f32>, PictureError> {
            let reason = "whole".to_owned();
            let media = MediaKind::Picture;
            Err(PictureError::Unreadable { media, reason })
        }

        fn picks(&self, works: &[PictureWork<'_>]) -> Vec<usize> {
            (0..works.len().min(self.0)).collect()
        }

        fn encode_piece(
            &mut self,
            works: &mut [PictureWork<'_>],
            cancel: &CancelFlag,
        ) -> Result<(), PictureError> {
            if cancel.is_cancelled() {
                return Err(PictureError::Backend(BackendError::Cancelled));
            }
            for PictureWork { picture, partial } in works {
                let first = picture.name().0[0];
                partial.tiles.resize_with(1, PartialTile::default);
                let tile = &mut partial.tiles[0];
                tile.results
                    .push(vec![f32::from(first), tile.n_steps as f32]);
                tile.n_steps += 1;
                if first == 0 {
                    let reason = "it is too dark".to_owned();
                    let media = MediaKind::Picture;
                    return Err(PictureError::Unreadable { media, reason });
                }
                if tile.n_steps == picture.n_rows() {
                    partial.rows = Some(tile.results.concat());
                }
            }
            Ok(())
        }
    }

    /// Computes all that is waited for, and gives it.
    fn finish(tower: &mut Tower) -> Vec<SeenPicture> {
        let mut all = Vec::new();
        while !tower.next_texts(|_| true).is_empty() {
            let finished = tower.advance(&CancelFlag::default()).unwrap();
            all.extend(finished.into_iter().map(|finished| finished.seen));
        }
        all
    }

    #[test]
    fn rows_are_computed_once_within_the_budget() {
        let (a, b) = (picture(1, 2, 3), picture(2, 2, 3));
        // 6 rows of 2 values of 4 bytes.
        let mut tower = Tower::new(Box::new(CountingEncoder(1)), 48);
        let mut step = |run: &PictureRun, places: Range<usize>| {
            let (run, viewers) = (std::slice::from_ref(run), Viewers::Within(Salt(0)));
            let mut seen = Vec::new();
            let runs = loop {
                match tower.of_step(run, viewers, places.clone(), &mut seen) {
                    Ok(runs) => break runs,
                    Err(missing) => {
                        for picture in missing {
                            tower.want(picture, viewers, std::iter::once(RequestId(7)));
                        }
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
        let run = [run(4, &a)];
        for viewers in [Viewers::Alone(RequestId(1)), Viewers::Within(Salt(1))] {
            let missing = tower.of_step(&run, viewers, 4..10, &mut Vec::new());
            assert_eq!(missing.unwrap_err()[0].name(), a.name());
        }
    }

    #[test]
    fn rows_wait_for_their_text_without_any_budget() {
        let a = picture(1, 1, 4);
        let mut tower = Tower::new(Box::new(CountingEncoder(1)), 0);
        let (runs, viewers) = ([run(2, &a)], Viewers::Within(Salt(0)));
        tower.want(Arc::clone(&a), viewers, std::iter::once(RequestId(1)));
        let mut seen = finish(&mut tower);
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
        let mut tower = Tower::new(Box::new(CountingEncoder(1)), 48);
        let viewers = Viewers::Within(Salt(0));
        for text in [1, 2] {
            tower.want(Arc::clone(&a), viewers, std::iter::once(RequestId(text)));
        }
        let cancel = CancelFlag::default();
        assert!(tower.advance(&cancel).unwrap().is_empty());
        let waiting = tower.next_texts(|text| text == RequestId(2));
        assert_eq!(Vec::from_iter(waiting), [RequestId(2)]);
        assert!(tower.advance(&cancel).unwrap().is_empty());
        assert!(tower.next_texts(|_| false).is_empty());
        assert!(tower.advance(&cancel).unwrap().is_empty());
        assert_eq!((tower.n_pieces, tower.n_computed), (2, 0));
        // A piece that is cancelled ends its picture.
        tower.want(a, viewers, std::iter::once(RequestId(3)));
        cancel.cancel();
        let error = tower.advance(&cancel).unwrap_err();
        assert!(matches!(error, EngineError::Cancelled));
        assert!(tower.next_texts(|_| true).is_empty());
    }

    /// All pictures of a step, of several texts.
    fn wanted_by(tower: &mut Tower, pictures: &[&Arc<Picture>]) {
        for (text, picture) in (1..).map(RequestId).zip(pictures) {
            let viewers = Viewers::Within(Salt(0));
            tower.want(Arc::clone(picture), viewers, std::iter::once(text));
        }
    }

    #[test]
    fn pictures_that_are_computed_together_are_as_alone() {
        let pictures = [picture(1, 1, 4), picture(2, 1, 2), picture(3, 1, 3)];
        let [a, b, c] = &pictures;
        let mut tower = Tower::new(Box::new(CountingEncoder(2)), 0);
        wanted_by(&mut tower, &[a, b, c]);
        let cancel = CancelFlag::default();
        let mut ends = Vec::new();
        loop {
            let waiting: Vec<u64> = tower.next_texts(|_| true).iter().map(|id| id.0).collect();
            if waiting.is_empty() {
                break;
            }
            let finished = tower.advance(&cancel).unwrap();
            for FinishedPicture { seen, texts } in finished {
                assert!(texts.iter().all(|&text| !tower.is_awaited_by(text)));
                let first = f32::from(seen.name.0[0]);
                let rows = seen.rows.chunks_exact(2).enumerate();
                assert!(rows.into_iter().all(|(row, of)| *of == [first, row as f32]));
                ends.push((seen.name.0[0], seen.rows.len() / 2, waiting.clone()));
            }
        }
        // The third takes the place of the second.
        let wanted = [(2, 2, vec![1, 2]), (1, 4, vec![1, 3]), (3, 3, vec![3])];
        assert_eq!(ends, wanted);
        assert_eq!((tower.n_pieces, tower.n_computed), (5, 3));
    }

    #[test]
    fn a_picture_that_fails_in_company_fails_alone() {
        let pictures = [picture(1, 1, 2), picture(0, 1, 2), picture(2, 1, 2)];
        let [a, dark, b] = &pictures;
        let mut tower = Tower::new(Box::new(CountingEncoder(3)), 0);
        wanted_by(&mut tower, &[a, dark, b]);
        let cancel = CancelFlag::default();
        let (mut seen, mut failed) = (Vec::new(), Vec::new());
        for n_pieces in 1.. {
            let waiting = tower.next_texts(|_| true);
            if waiting.is_empty() {
                // One together, two of each that can be seen, one of the other.
                assert_eq!(n_pieces, 1 + 1 + 2 + 1 + 2);
                break;
            }
            match tower.advance(&cancel) {
                Ok(finished) => seen.extend(finished.into_iter().map(|one| one.seen.name)),
                Err(error) => failed.push((error.to_string(), waiting)),
            }
        }
        assert_eq!(seen, [a.name(), b.name()]);
        assert_eq!(failed.len(), 1);
        assert!(failed[0].0.contains("it is too dark"));
        assert_eq!(failed[0].1, BTreeSet::from([RequestId(2)]));
        // All of them are cancelled: none begins again.
        wanted_by(&mut tower, &[a, b]);
        cancel.cancel();
        let error = tower.advance(&cancel).unwrap_err();
        assert!(matches!(error, EngineError::Cancelled));
        assert!(tower.next_texts(|_| true).is_empty());
    }

    #[test]
    fn a_step_names_all_pictures_that_it_needs() {
        let (a, b, c) = (picture(1, 1, 2), picture(2, 1, 2), picture(3, 1, 2));
        let runs = [run(0, &a), run(3, &b), run(6, &a), run(9, &c)];
        let mut tower = Tower::new(Box::new(CountingEncoder(1)), 0);
        let viewers = Viewers::Within(Salt(0));
        let missing = tower.of_step(&runs, viewers, 1..8, &mut Vec::new());
        let names = missing.unwrap_err().into_iter().map(|one| one.name());
        assert_eq!(Vec::from_iter(names), [a.name(), b.name(), a.name()]);
        let names = tower.of_step(&runs, viewers, 8..10, &mut Vec::new());
        assert_eq!(names.unwrap_err()[0].name(), c.name());
    }
}
