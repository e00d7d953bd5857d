//! The indexer of sparse attention: scores the keys that tokens see, and chooses the largest.
//!
//! Invariant: a score depends on the query and the key only, bit for bit: not on where cells are,
//! on other tokens of the batch, or on threads. A token that sees no more than is chosen is not
//! scored. Does not know what is attended.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kv_backend::BackendError;
use kv_core::{CellIdx, Visibility};
use kv_graph::IndexSpec;

use super::Scratch;
use crate::kernels::Kernels;
use crate::kv_rows::KvRows;
use crate::team::TeamGuard;
use crate::values::SharedValues;

/// Keys that a task scores.
const KEYS_PER_TASK: usize = 256;
/// Scores that are kept at a time, unless one token sees more: 16 MiB.
const MAX_SCORES: usize = 1 << 22;

/// An indexer of one layer: what is read and written.
#[derive(Clone, Copy)]
pub(crate) struct Indexer<'a> {
    pub(crate) kernels: &'a Kernels,
    pub(crate) spec: IndexSpec,
    /// `[cells, 1, dim]`.
    pub(crate) keys: KvRows<'a>,
    /// `[tokens, heads, dim]`.
    pub(crate) q: &'a [f32],
    /// `[tokens, heads]`.
    pub(crate) weights: &'a [f32],
    pub(crate) visibility: &'a Visibility,
    /// `[tokens, top_k]`.
    pub(crate) out: SharedValues<'a>,
}

/// Task lists and scores of [`Indexer::choose`], kept for the next call.
#[derive(Debug, Default)]
pub(crate) struct IndexWorkspace {
    rows: Vec<IndexedRow>,
    tasks: Vec<ScoreTask>,
    scores: Vec<f32>,
}

/// A token, and where its scores are.
#[derive(Clone, Debug)]
struct IndexedRow {
    group: usize,
    /// Its place in the group.
    at: usize,
    n_seen: usize,
    /// Empty where it is not scored.
    scores: Range<usize>,
}

/// Keys of one token to score: some of its ranks.
#[derive(Clone, Debug)]
struct ScoreTask {
    row: usize,
    ranks: Range<usize>,
}

impl IndexWorkspace {
    /// Bytes of scores; the lists of tasks are small.
    pub(crate) fn n_bytes(&self) -> usize {
        self.scores.capacity() * size_of::<f32>()
    }

    /// Takes rows from `rows` until their scores fill the memory for them.
    fn plan(&mut self, rows: &mut std::iter::Peekable<impl Iterator<Item = IndexedRow>>) {
        self.rows.clear();
        self.tasks.clear();
        let mut n_scores = 0;
        while let Some(row) =
            rows.next_if(|row| self.rows.is_empty() || n_scores + row.scores.len() <= MAX_SCORES)
        {
            let scores = n_scores..n_scores + row.scores.len();
            let at = self.rows.len();
            let tasks = (0..scores.len()).step_by(KEYS_PER_TASK);
            self.tasks.extend(tasks.map(|first| ScoreTask {
                row: at,
                ranks: first..scores.len().min(first + KEYS_PER_TASK),
            }));
            n_scores = scores.end;
            self.rows.push(IndexedRow { scores, ..row });
        }
        self.scores.resize(self.scores.len().max(n_scores), 0.0);
    }
}

impl Indexer<'_> {
    /// Writes what every token chooses.
    ///
    /// # Errors
    /// [`BackendError::Device`] if a task panicked.
    pub(crate) fn choose(
        &self,
        lead: &mut TeamGuard<'_>,
        workspace: &mut IndexWorkspace,
        scratch: &[Mutex<Scratch>],
    ) -> Result<(), BackendError> {
        let mut rows = self.rows().peekable();
        while rows.peek().is_some() {
            workspace.plan(&mut rows);
            let IndexWorkspace {
                rows,
                tasks,
                scores,
            } = &mut *workspace;
            let shared = SharedValues::new(scores);
            lead.each(tasks.len(), &|thread, task| {
                let task = &tasks[task];
                let row = &rows[task.row];
                let first = row.scores.start;
                let mut scratch = scratch[thread]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                // SAFETY: the ranks of a token are divided among its tasks.
                let scores =
                    unsafe { shared.range(first + task.ranks.start..first + task.ranks.end) };
                self.score(row, task.ranks.clone(), scores, &mut scratch);
                Ok(())
            })?;
            let scores = &*scores;
            lead.each(rows.len(), &|thread, at| {
                let mut scratch = scratch[thread]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                self.choose_of_row(&rows[at], scores, &mut scratch);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// All tokens, with ranges of as many scores as they need.
    fn rows(&self) -> impl Iterator<Item = IndexedRow> {
        let groups = self.visibility.groups.iter().enumerate();
        let top_k = self.spec.top_k;
        groups.flat_map(move |(group, visible)| {
            visible.limits.iter().enumerate().map(move |(at, &limits)| {
                let runs = visible.runs.iter().filter_map(|run| run.clip(limits));
                let n_seen = runs.map(|run| run.len as usize).sum();
                let n_scores = if n_seen > top_k { n_seen } else { 0 };
                IndexedRow {
                    group,
                    at,
                    n_seen,
                    scores: 0..n_scores,
                }
            })
        })
    }

    /// The scores of the cells of these ranks.
    fn score(
        &self,
        row: &IndexedRow,
        ranks: Range<usize>,
        scores: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let IndexSpec { n_heads, dim, .. } = self.spec;
        let group = &self.visibility.groups[row.group];
        let (token, limits) = (group.rows[row.at] as usize, group.limits[row.at]);
        let q = &self.q[token * n_heads * dim..][..n_heads * dim];
        let weights = &self.weights[token * n_heads..][..n_heads];
        let key = scratch.row(dim);
        let mut first = 0;
        for run in group.runs.iter().filter_map(|run| run.clip(limits)) {
            let end = first + run.len as usize;
            for rank in ranks.start.max(first)..ranks.end.min(end) {
                let CellIdx(cell) = run.cell.offset((rank - first) as u32);
                self.keys.decode_cell(cell as usize, key);
                let heads = q.chunks_exact(dim.max(1)).zip(weights);
                let of_head =
                    |(q, weight): (&[f32], &f32)| weight * (self.kernels.dot_f32)(q, key).max(0.0);
                scores[rank - ranks.start] = heads.map(of_head).sum();
            }
            first = end;
        }
    }

    fn choose_of_row(&self, row: &IndexedRow, scores: &[f32], scratch: &mut Scratch) {
        let top_k = self.spec.top_k;
        let token = self.visibility.groups[row.group].rows[row.at] as usize;
        // SAFETY: each token is in one group, and one task.
        let out = unsafe { self.out.range(token * top_k..(token + 1) * top_k) };
        if row.scores.is_empty() {
            for (rank, out) in out.iter_mut().enumerate() {
                *out = if rank < row.n_seen { rank as f32 } else { -1.0 };
            }
            return;
        }
        IndexSpec::choose(&scores[row.scores.clone()], &mut scratch.order, out);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use kv_core::{CellRun, Pos, PosRange, VisibleGroup};

    use super::*;
    use crate::attend::Workspace;
    use crate::isa::Isa;
    use crate::team::Team;

    fn row(at: usize, n_scores: usize) -> IndexedRow {
        IndexedRow {
            group: 0,
            at,
            n_seen: n_scores,
            scores: 0..n_scores,
        }
    }

    /// The end of the scores of each token begin and, and the tokens and ranks of tasks.
    type Round = (Vec<(usize, usize)>, Vec<(usize, Range<usize>)>);

    /// The tokens that are scored together.
    fn planned(n_scores: &[usize]) -> Vec<Round> {
        let rows = n_scores.iter().enumerate();
        let mut rows = rows.map(|(at, &n)| row(at, n)).peekable();
        let (mut workspace, mut rounds) = (IndexWorkspace::default(), Vec::new());
        while rows.peek().is_some() {
            workspace.plan(&mut rows);
            let scores = workspace
                .rows
                .iter()
                .map(|r| (r.scores.start, r.scores.end));
            let scores: Vec<_> = scores.collect();
            assert!(workspace.scores.len() >= scores.last().unwrap().1);
            let tasks = workspace.tasks.iter().map(|t| (t.row, t.ranks.clone()));
            rounds.push((scores, tasks.collect()));
        }
        rounds
    }

    #[test]
    fn keys_of_a_token_are_divided_and_a_token_that_is_not_scored_has_no_tasks() {
        let got = planned(&[300, 0, 256]);
        let tasks = vec![(0, 0..256), (0, 256..300), (2, 0..256)];
        assert_eq!(got, [(vec![(0, 300), (300, 300), (300, 556)], tasks)]);
    }

    #[test]
    fn scores_fill_their_memory_before_the_next_tokens_are_taken() {
        let half = MAX_SCORES / 2;
        let rounds = planned(&[half, half, 1, MAX_SCORES + 1, 2]);
        let scores: Vec<_> = rounds.into_iter().map(|(scores, _)| scores).collect();
        let wanted = [
            vec![(0, half), (half, MAX_SCORES)],
            vec![(0, 1)],
            vec![(0, MAX_SCORES + 1)],
            vec![(0, 2)],
        ];
        assert_eq!(scores, wanted);
    }

    /// Tokens of which one sees more keys than a task scores, some see as many as are chosen or
    /// fewer, in cells out of order: what is chosen is what a plain computation chooses.
    #[test]
    fn tokens_choose_by_scores_of_all_that_they_see() {
        let spec = IndexSpec {
            n_heads: 2,
            dim: 4,
            top_k: 20,
        };
        let wave =
            |n: usize, step: f32| -> Vec<f32> { (0..n).map(|i| (i as f32 * step).sin()).collect() };
        let (keys, q, weights) = (wave(900 * 4, 0.61), wave(5 * 8, 0.37), wave(5 * 2, 1.3));
        let run = |cell, pos, len| CellRun {
            cell: CellIdx(cell),
            pos: Pos(pos),
            len,
        };
        let upto = |first, last| PosRange::new(Pos(first), Pos(last));
        let long = VisibleGroup::new(
            vec![0, 3],
            vec![run(200, 0, 500), run(0, 500, 200), run(700, 700, 70)],
            vec![upto(0, 769), upto(480, 500)],
        );
        let short = VisibleGroup::new(
            vec![1, 2, 4],
            vec![run(800, 5, 30)],
            vec![upto(0, 24), upto(8, 8), PosRange::EMPTY],
        );
        let visibility = Visibility::new(5, vec![long, short]);
        let kernels = Kernels::for_isa(Isa::Scalar).unwrap();
        let mut out = vec![f32::NAN; 5 * spec.top_k];
        for n_threads in [1, 3] {
            let team = Team::new(NonZeroUsize::new(n_threads).unwrap()).unwrap();
            let mut scratch: Vec<Scratch> = (0..n_threads).map(|_| Scratch::default()).collect();
            scratch.iter_mut().for_each(|s| s.reserve_row(spec.dim));
            let scratch: Vec<_> = scratch.into_iter().map(Mutex::new).collect();
            let mut workspace = IndexWorkspace::default();
            let indexer = Indexer {
                kernels,
                spec,
                keys: KvRows::from_f32(&keys, 1, spec.dim),
                q: &q,
                weights: &weights,
                visibility: &visibility,
                out: SharedValues::new(&mut out),
            };
            indexer
                .choose(&mut team.lead(), &mut workspace, &scratch)
                .unwrap();
            assert!(workspace.n_bytes() >= (770 + 21) * size_of::<f32>());
            let all = Workspace {
                index: workspace,
                ..Workspace::default()
            };
            assert_eq!(all.n_bytes(), all.index.n_bytes());
            for (token, got) in (0..).zip(out.chunks(spec.top_k)) {
                let score = |(CellIdx(cell), _)| -> f32 {
                    let key = &keys[cell as usize * 4..][..4];
                    let q = q[token * 8..][..8].chunks(4);
                    let dots = q.map(|q| q.iter().zip(key).map(|(q, k)| q * k).sum::<f32>());
                    let weights = &weights[token * 2..][..2];
                    dots.zip(weights).map(|(dot, w)| w * dot.max(0.0)).sum()
                };
                let scores: Vec<f32> = visibility.row(token as u32).map(score).collect();
                let mut wanted = vec![0.0; spec.top_k];
                IndexSpec::choose(&scores, &mut Vec::new(), &mut wanted);
                assert_eq!(got, wanted, "token {token}, {n_threads} threads");
            }
        }
    }
}
