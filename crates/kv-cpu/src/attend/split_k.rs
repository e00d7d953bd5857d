//! Split-K attention (flash-decoding: Dao et al., 2023) for few tokens and long contexts: splits of
//! positions are the tasks, and tokens of several sequences that see the same cells of a split
//! share its task (cascade attention).
//!
//! Invariant: the bits are those of [`super::attend`] without splitting (see [`super::partial`]).
//! Buffers are bounded and reserved beforehand: splits are processed in rounds of as many as fit.
//! Knows nothing of tiles.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kv_backend::BackendError;
use kv_core::{Pos, PosRange, Visibility, VisibleGroup};
use kv_graph::AttendSpec;

use super::fused::{FusedAttention, QueryTokens};
use super::partial::{Partial, SPLIT_POSITIONS, SoftmaxState, split_start};
use super::{Scratch, heads_per_kv};
use crate::team::TeamGuard;
use crate::values::SharedValues;

/// The largest number of tokens that are attended by splits: more give enough tasks without.
pub(super) const MAX_SPLIT_TOKENS: usize = 64;
/// The largest number of queries (tokens × heads) of a task, for which a KV tile is read once.
pub(super) const MAX_TASK_QUERIES: usize = 128;
/// The largest number of values of all partials of a round.
const MAX_PARTIAL_VALUES: usize = 1 << 18;
/// The largest number of splits of a round.
const MAX_ROUND_SPLITS: usize = 128;
/// Values of a softmax state at the start of each stored partial.
const STATE_LEN: usize = 2;

/// One split of some tokens that see the same cells of it.
#[derive(Clone, Debug)]
struct SplitTask {
    /// The visibility group whose runs are read.
    group: usize,
    positions: PosRange,
    /// Index of the split in its round.
    index: usize,
    /// Range of [`SplitK::rows`] and [`SplitK::limits`].
    tokens: Range<usize>,
}

/// Tasks and partials of a round; kept between calls.
#[derive(Debug, Default)]
pub(crate) struct SplitK {
    /// The positions that the tokens of each group see, `[groups]`.
    hulls: Vec<PosRange>,
    tasks: Vec<SplitTask>,
    rows: Vec<u32>,
    limits: Vec<PosRange>,
    /// Splits of the present round.
    n_splits: usize,
    /// `[tokens, n_heads, splits of a round, 2 + v_dim]`: softmax maximum and sum, weighted values.
    partials: Vec<f32>,
    /// `[tokens, n_heads, 2 + v_dim]`: the same over all rounds so far.
    totals: Vec<f32>,
}

/// Values of a stored partial.
fn partial_len(spec: &AttendSpec) -> usize {
    STATE_LEN + spec.v_dim
}

/// Splits for which there is room in a round.
fn splits_per_round(spec: &AttendSpec, n_tokens: usize) -> usize {
    let values_per_split = n_tokens * spec.n_heads * partial_len(spec);
    (MAX_PARTIAL_VALUES / values_per_split.max(1)).clamp(1, MAX_ROUND_SPLITS)
}

impl SplitK {
    /// Bytes of the partials.
    pub(crate) fn n_bytes(&self) -> usize {
        (self.partials.capacity() + self.totals.capacity()) * size_of::<f32>()
    }

    /// Makes room for `n_tokens` tokens, at most [`MAX_SPLIT_TOKENS`].
    pub(crate) fn reserve(&mut self, spec: &AttendSpec, n_tokens: usize) {
        let max_splits = splits_per_round(spec, n_tokens);
        let totals = n_tokens * spec.n_heads * partial_len(spec);
        let partials = totals * max_splits;
        self.totals.resize(self.totals.len().max(totals), 0.0);
        self.partials.resize(self.partials.len().max(partials), 0.0);
        self.hulls.clear();
        self.tasks.clear();
        self.rows.clear();
        self.limits.clear();
        self.hulls.reserve(n_tokens);
        self.tasks.reserve(2 * max_splits + n_tokens);
        self.rows.reserve(n_tokens * max_splits);
        self.limits.reserve(n_tokens * max_splits);
    }

    /// Prepares for these tokens and returns true if they are few and some see more than a split.
    pub(super) fn plan(&mut self, spec: &AttendSpec, visibility: &Visibility) -> bool {
        if visibility.n_rows as usize > MAX_SPLIT_TOKENS {
            return false;
        }
        self.reserve(spec, visibility.n_rows as usize);
        let hull = |limits: &[PosRange]| limits.iter().fold(PosRange::EMPTY, |a, &l| a.hull(l));
        let groups = visibility.groups.iter();
        self.hulls.extend(groups.map(|group| hull(&group.limits)));
        let sees_several_splits = |(group, hull): (&VisibleGroup, &PosRange)| {
            let first = first_visible(group, *hull, 0);
            let last = group
                .runs
                .last()
                .map(|run| run.last_pos().0.min(hull.last.0));
            first
                .zip(last)
                .is_some_and(|(first, last)| split_start(first) < split_start(last))
        };
        let mut groups = visibility.groups.iter().zip(&self.hulls);
        groups.any(sees_several_splits)
    }

    /// Makes the tasks of the next splits from position `from` on; returns the position after
    /// them, or `None` if no token sees anything there.
    fn plan_round(&mut self, spec: &AttendSpec, visibility: &Visibility, from: u64) -> Option<u64> {
        self.tasks.clear();
        self.rows.clear();
        self.limits.clear();
        let mut from = u32::try_from(from).ok()?;
        let mut after = None;
        for index in 0..splits_per_round(spec, visibility.n_rows as usize) {
            let groups = visibility.groups.iter().zip(&self.hulls);
            let firsts = groups.filter_map(|(group, hull)| first_visible(group, *hull, from));
            let Some(first) = firsts.min().map(split_start) else {
                break;
            };
            let last = first + (SPLIT_POSITIONS - 1);
            self.add_tasks(
                spec,
                visibility,
                Split {
                    positions: PosRange::new(Pos(first), Pos(last)),
                    index,
                },
            );
            self.n_splits = index + 1;
            after = Some(u64::from(last) + 1);
            match last.checked_add(1) {
                Some(next) => from = next,
                None => break,
            }
        }
        // The splits of a group follow each other, so that a thread prefetches what it needs next.
        self.tasks.sort_unstable_by_key(|t| (t.group, t.index));
        after
    }

    /// Adds tasks for all groups that see something of `split`; groups with the same cells there
    /// share one.
    fn add_tasks(&mut self, spec: &AttendSpec, visibility: &Visibility, split: Split) {
        let first_task = self.tasks.len();
        let max_tokens = (MAX_TASK_QUERIES / heads_per_kv(spec)).max(1);
        let positions = split.positions;
        for group in 0..visibility.groups.len() {
            let own = &visibility.groups[group];
            let sees_split = |hull: &PosRange| {
                first_visible(own, *hull, positions.first.0)
                    .is_some_and(|pos| pos <= positions.last.0)
            };
            let is_shared = self.tasks[first_task..]
                .iter()
                .any(|task| has_same_cells(&visibility.groups[task.group], own, positions));
            if !self.hulls.get(group).is_some_and(sees_split) || is_shared {
                continue;
            }
            // The tokens of this group and of all later ones with the same cells.
            let start = self.rows.len();
            let later = visibility.groups[group..].iter().zip(&self.hulls[group..]);
            for (other, hull) in later {
                let is_same = std::ptr::eq(other, own) || has_same_cells(own, other, positions);
                if is_same && hull.first <= positions.last && positions.first <= hull.last {
                    self.rows.extend(&other.rows);
                    self.limits.extend(&other.limits);
                }
            }
            for first in (start..self.rows.len()).step_by(max_tokens) {
                self.tasks.push(SplitTask {
                    group,
                    positions,
                    index: split.index,
                    tokens: first..self.rows.len().min(first + max_tokens),
                });
            }
        }
    }

    /// Merges the partials of a round, in order, into each query's total.
    fn merge_partials(
        &mut self,
        lead: &mut TeamGuard<'_>,
        attention: &FusedAttention<'_>,
        n_tokens: usize,
    ) -> Result<(), BackendError> {
        let spec = &attention.of.spec;
        let (kv_heads, heads, len) = (spec.kv_heads, heads_per_kv(spec), partial_len(spec));
        let (max_splits, n_splits) = (splits_per_round(spec, n_tokens), self.n_splits);
        let (totals, partials) = (SharedValues::new(&mut self.totals), &self.partials);
        lead.each(n_tokens * kv_heads, &|_, task| {
            let first = task / kv_heads * spec.n_heads + task % kv_heads * heads;
            for query in first..first + heads {
                // SAFETY: each query belongs to one task.
                let total = unsafe { totals.range(query * len..(query + 1) * len) };
                let (state, values) = total.split_at_mut(STATE_LEN);
                let mut softmax = SoftmaxState {
                    max: state[0],
                    sum: state[1],
                };
                let own = &partials[query * max_splits * len..][..n_splits * len];
                for partial in own.chunks_exact(len) {
                    let later = Partial {
                        softmax: SoftmaxState {
                            max: partial[0],
                            sum: partial[1],
                        },
                        values: &partial[STATE_LEN..],
                    };
                    softmax.merge(attention.of.kernels, values, later);
                }
                [state[0], state[1]] = [softmax.max, softmax.sum];
            }
            Ok(())
        })
    }
}

/// A split of a round.
#[derive(Clone, Copy)]
struct Split {
    positions: PosRange,
    /// Index in the round.
    index: usize,
}

/// The first position from `from` on at which `group` has a cell within `hull`.
fn first_visible(group: &VisibleGroup, hull: PosRange, from: u32) -> Option<u32> {
    let from = from.max(hull.first.0);
    let run = group.runs.partition_point(|run| run.last_pos().0 < from);
    let first = group.runs.get(run)?.pos.0.max(from);
    (!hull.is_empty() && first <= hull.last.0).then_some(first)
}

/// True if both groups have the same cells at `positions`.
fn has_same_cells(a: &VisibleGroup, b: &VisibleGroup, positions: PosRange) -> bool {
    let cut = |group: &VisibleGroup| {
        let first = group
            .runs
            .partition_point(|run| run.last_pos() < positions.first);
        let end = group.runs.partition_point(|run| run.pos <= positions.last);
        first..end.max(first)
    };
    let (in_a, in_b) = (cut(a), cut(b));
    in_a.len() == in_b.len()
        && a.runs[in_a]
            .iter()
            .zip(&b.runs[in_b])
            .all(|(a, b)| a == b || a.clip(positions) == b.clip(positions))
}

/// The values that the tasks of a round share.
struct Round<'a> {
    attention: &'a FusedAttention<'a>,
    tasks: &'a [SplitTask],
    rows: &'a [u32],
    limits: &'a [PosRange],
    partials: SharedValues<'a>,
    /// Splits for which each query has room.
    max_splits: usize,
}

impl Round<'_> {
    /// Computes the partials of `task` for all query heads of `kv_head`.
    ///
    /// # Safety
    /// The visibility is sound for the queries and the stored cells, and no other thread works on
    /// the same task and KV head.
    unsafe fn attend(&self, task: &SplitTask, kv_head: usize, scratch: &mut Scratch) {
        let spec = &self.attention.of.spec;
        let (heads, len) = (heads_per_kv(spec), partial_len(spec));
        let tokens = QueryTokens {
            rows: &self.rows[task.tokens.clone()],
            limits: &self.limits[task.tokens.clone()],
            kv_head,
        };
        let group = &self.attention.of.visibility.groups[task.group];
        self.attention
            .attend_split(group, &tokens, task.positions, scratch);
        for (at, &row) in tokens.rows.iter().enumerate() {
            for head in 0..heads {
                let query = row as usize * spec.n_heads + kv_head * heads + head;
                let start = (query * self.max_splits + task.index) * len;
                // SAFETY: a row is in one group, so the row and the split are in one task, whose KV
                // heads are computed by one thread each.
                let stored = unsafe { self.partials.range(start..start + len) };
                let partial = scratch.partial(at * heads + head, spec.v_dim);
                [stored[0], stored[1]] = [partial.softmax.max, partial.softmax.sum];
                stored[STATE_LEN..].copy_from_slice(partial.values);
            }
        }
    }
}

/// Attention of all tokens by splits, in rounds.
///
/// # Safety
/// The visibility is sound for the queries, which are prepared, and the stored cells; `split_k` was
/// planned for it.
pub(super) unsafe fn attend(
    lead: &mut TeamGuard<'_>,
    attention: &FusedAttention<'_>,
    split_k: &mut SplitK,
    scratch: &[Mutex<Scratch>],
) -> Result<(), BackendError> {
    let (spec, visibility) = (&attention.of.spec, attention.of.visibility);
    let (n_tokens, kv_heads, len) = (visibility.n_rows as usize, spec.kv_heads, partial_len(spec));
    for (query, total) in split_k.totals.chunks_exact_mut(len).enumerate() {
        let state = attention.initial_state(query % spec.n_heads.max(1));
        total.fill(0.0);
        [total[0], total[1]] = [state.max, state.sum];
    }
    let max_splits = splits_per_round(spec, n_tokens);
    let mut from = Some(0);
    while let Some(next) = from.and_then(|from| split_k.plan_round(spec, visibility, from)) {
        from = Some(next);
        let n_splits = split_k.n_splits;
        for query in split_k.partials.chunks_exact_mut(max_splits * len) {
            for partial in query.chunks_exact_mut(len).take(n_splits) {
                [partial[0], partial[1]] = [SoftmaxState::EMPTY.max, SoftmaxState::EMPTY.sum];
            }
        }
        let round = Round {
            attention,
            tasks: &split_k.tasks,
            rows: &split_k.rows,
            limits: &split_k.limits,
            partials: SharedValues::new(&mut split_k.partials),
            max_splits,
        };
        // The KV heads of a split are neighbouring tasks: their rows are adjacent in memory.
        lead.each(round.tasks.len() * kv_heads, &|thread, task| {
            let mut scratch = scratch[thread]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let (task, kv_head) = (&round.tasks[task / kv_heads], task % kv_heads);
            // SAFETY: the caller promises a sound visibility; each task and KV head is taken once.
            unsafe { round.attend(task, kv_head, &mut scratch) };
            Ok(())
        })?;
        split_k.merge_partials(lead, attention, n_tokens)?;
    }
    let totals = split_k.totals.chunks_exact(len);
    for (query, total) in totals.take(n_tokens * spec.n_heads).enumerate() {
        let len = attention.of.form.len(spec.v_dim);
        let range = query * len..(query + 1) * len;
        // SAFETY: all tasks are done, so no other thread writes.
        let out = unsafe { attention.of.out.range(range) };
        let softmax = SoftmaxState {
            max: total[0],
            sum: total[1],
        };
        attention.finish(softmax, &total[STATE_LEN..], out);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kv_core::{CellIdx, CellRun};

    use super::*;

    /// 64 tokens leave room for 8 splits in a round.
    const SPEC: AttendSpec = AttendSpec {
        n_heads: 4,
        kv_heads: 1,
        k_dim: 8,
        v_dim: 126,
        scale: 1.0,
        soft_cap: None,
        alibi: None,
    };

    fn run(cell: u32, pos: u32, len: u32) -> CellRun {
        let (cell, pos) = (CellIdx(cell), Pos(pos));
        CellRun { cell, pos, len }
    }

    fn within(first: u32, last: u32) -> PosRange {
        PosRange::new(Pos(first), Pos(last))
    }

    /// Rows that see the same runs within the same limits.
    fn group(rows: std::ops::Range<u32>, runs: &[CellRun], limits: PosRange) -> VisibleGroup {
        let limits = vec![limits; rows.len()];
        VisibleGroup::new(rows.collect(), runs.to_vec(), limits)
    }

    fn visibility(groups: &[VisibleGroup]) -> Visibility {
        let n_rows = groups.iter().map(|group| group.rows.len() as u32).sum();
        let visibility = Visibility::new(n_rows, groups.to_vec());
        visibility.check(1 << 16).unwrap();
        visibility
    }

    /// The positions that a row sees, as all rows of its group do.
    fn limits_of(visibility: &Visibility, row: u32) -> PosRange {
        let mut groups = visibility.groups.iter();
        groups.find(|g| g.rows.contains(&row)).unwrap().limits[0]
    }

    /// The tasks of each round: first position, number in the round, group, rows.
    type Task = (u32, usize, usize, Vec<u32>);

    fn rounds(visibility: &Visibility) -> Vec<Vec<Task>> {
        let (mut split_k, mut rounds, mut from) = (SplitK::default(), Vec::new(), 0);
        // What was planned before makes no difference.
        let other = group(0..3, &[run(0, 0, 9000)], within(7000, 8999));
        assert!(split_k.plan(&SPEC, &self::visibility(&[other])));
        assert!(split_k.plan(&SPEC, visibility));
        while let Some(next) = split_k.plan_round(&SPEC, visibility, from) {
            let tasks = split_k.tasks.iter().map(|task| {
                let (first, last) = (task.positions.first.0, task.positions.last.0);
                assert_eq!((first % 256, last), (0, first + 255));
                assert!(task.index < split_k.n_splits && u64::from(last) < next);
                let rows = split_k.rows[task.tokens.clone()].to_vec();
                let limits = rows.iter().map(|row| limits_of(visibility, *row));
                assert!(limits.eq(split_k.limits[task.tokens.clone()].iter().copied()));
                (first, task.index, task.group, rows)
            });
            rounds.push(tasks.collect());
            from = next;
        }
        rounds
    }

    #[test]
    fn rounds_have_as_many_splits_as_there_is_room_for() {
        let seen = visibility(&[group(0..64, &[run(0, 0, 2500)], within(0, 2303))]);
        let numbers: Vec<Vec<(u32, usize)>> = rounds(&seen)
            .iter()
            .map(|tasks| tasks.iter().map(|task| (task.0, task.1)).collect())
            .collect();
        // Two tasks of 32 tokens with 4 heads each.
        let twice = |splits: std::ops::Range<u32>, before: u32| -> Vec<(u32, usize)> {
            let splits = splits.flat_map(|split| [split; 2]);
            splits.map(|s| (s * 256, (s - before) as usize)).collect()
        };
        assert_eq!(numbers, [twice(0..8, 0), twice(8..9, 8)]);
        assert_eq!(splits_per_round(&SPEC, 1), MAX_ROUND_SPLITS);
        let wide = AttendSpec {
            v_dim: 1 << 20,
            ..SPEC
        };
        assert_eq!(splits_per_round(&wide, 64), 1);
    }

    #[test]
    fn a_round_has_the_tokens_of_its_own_splits() {
        let seen = visibility(&[
            group(0..1, &[run(0, 0, 2048)], within(0, 2047)),
            group(1..64, &[run(3000, 2048, 1)], PosRange::ALL),
        ]);
        let rounds = rounds(&seen);
        let first: Vec<_> = (0..8).map(|i| (i * 256, i as usize, 0, vec![0])).collect();
        let second = [
            (2048, 0, 1, (1..33).collect()),
            (2048, 0, 1, (33..64).collect()),
        ];
        assert_eq!(rounds, [first, second.to_vec()]);
    }

    #[test]
    fn splits_without_visible_cells_are_skipped() {
        let runs = [run(0, 300, 4), run(10, 5000, 4), run(20, u32::MAX - 3, 3)];
        let seen = visibility(&[group(0..1, &runs, PosRange::ALL)]);
        let firsts: Vec<u32> = rounds(&seen)[0].iter().map(|task| task.0).collect();
        assert_eq!(firsts, [256, 4864, u32::MAX - 255]);
        // The last position of a split, and the first of one.
        let seen = visibility(&[group(0..1, &[run(0, 0, 900)], within(255, 512))]);
        let firsts: Vec<u32> = rounds(&seen)[0].iter().map(|task| task.0).collect();
        assert_eq!(firsts, [0, 256, 512]);
        let seen = visibility(&[group(0..1, &runs, within(303, 5002))]);
        let firsts: Vec<u32> = rounds(&seen)[0].iter().map(|task| task.0).collect();
        assert_eq!(firsts, [256, 4864]);
    }

    #[test]
    fn groups_share_the_splits_in_which_their_cells_are_the_same() {
        let groups = [
            group(0..2, &[run(0, 0, 600)], within(0, 599)),
            group(2..3, &[run(0, 0, 300), run(900, 300, 9)], PosRange::ALL),
            // Sees nothing of the first split, and all that the first group sees of the second.
            group(
                3..4,
                &[run(700, 0, 256), run(256, 256, 300)],
                within(256, 599),
            ),
            group(4..5, &[run(0, 0, 601)], within(0, 511)),
            group(
                5..6,
                &[run(700, 0, 256), run(256, 256, 344)],
                within(256, 599),
            ),
        ];
        let got = rounds(&visibility(&groups)).concat();
        let wanted = [
            (0, 0, 0, vec![0, 1, 2, 4]),
            (256, 1, 0, vec![0, 1, 3, 4, 5]),
            (512, 2, 0, vec![0, 1, 5]),
            (256, 1, 1, vec![2]),
            (512, 2, 2, vec![3]),
        ];
        assert_eq!(got, wanted);
    }

    #[test]
    fn few_tokens_that_see_several_splits_are_divided() {
        let plans = |n: u32, first: u32, last: u32| {
            let runs = [run(0, 200, 400)];
            let seen = visibility(&[group(0..n, &runs, within(first, last))]);
            SplitK::default().plan(&SPEC, &seen)
        };
        assert!(plans(1, 0, 256) && plans(64, 255, 999));
        assert!(!plans(65, 0, 999));
        let short = group(0..1, &[run(0, 0, 9)], PosRange::ALL);
        let long = group(1..2, &[run(0, 0, 900)], PosRange::ALL);
        assert!(SplitK::default().plan(&SPEC, &visibility(&[short, long])));
        assert!(!plans(1, 0, 255) && !plans(1, 256, 511) && !plans(1, 0, 199));
    }

    #[test]
    fn cells_are_the_same_within_positions_alone() {
        let all = |runs: &[CellRun]| group(0..1, runs, PosRange::ALL);
        let a = all(&[run(0, 0, 10), run(100, 10, 10)]);
        let before = all(&[run(50, 0, 10), run(100, 10, 10)]);
        let behind = all(&[run(0, 0, 10), run(200, 10, 10)]);
        let shorter = all(&[run(0, 0, 10)]);
        let same = |other, first, last| has_same_cells(&a, other, within(first, last));
        assert_eq!((same(&before, 10, 19), same(&before, 9, 19)), (true, false));
        assert_eq!((same(&behind, 0, 9), same(&behind, 0, 10)), (true, false));
        assert_eq!(
            (same(&behind, 19, 25), same(&behind, 20, 25)),
            (false, true)
        );
        assert_eq!((same(&shorter, 0, 9), same(&shorter, 5, 10)), (true, false));
    }
}
