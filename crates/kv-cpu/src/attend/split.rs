//! Few rows over many cells: spans of positions are the tasks, and rows of several sequences that see
//! the same cells of a span share one.
//!
//! Invariant: a row's result has the bits that [`super::attend`] would give it (see
//! [`super::spans`]). Memory is bounded and taken beforehand: spans are worked off in rounds of as
//! many as there is room for. Knows nothing of tiles.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use kv_core::backend::BackendError;
use kv_core::graph::AttendSpec;
use kv_core::{PosRange, Visibility, VisibleGroup};

use super::spans::{SPAN, Softmax, span_of};
use super::{Attention, Rows, Scratch, heads_per_kv};
use crate::team::Lead;
use crate::values::SharedValues;

/// Rows up to which spans are tasks: prompts of more have tasks enough.
pub(super) const MAX_ROWS: usize = 64;
/// Query vectors that are attended together: what a tile is read for once.
pub(super) const QUERIES: usize = 128;
/// Values of all partial results of a round.
const MAX_PARTIALS: usize = 1 << 18;

/// The rows of some groups that see the same cells of one span.
#[derive(Clone, Debug)]
struct Item {
    /// Whose runs are walked.
    group: usize,
    span: PosRange,
    /// Which span of the round.
    number: usize,
    /// Which of [`Split::rows`] and [`Split::limits`].
    rows: Range<usize>,
}

/// Work that was divided by spans, and memory for it.
#[derive(Debug, Default)]
pub(crate) struct Split {
    /// What the rows of each group see at most.
    seen: Vec<PosRange>,
    items: Vec<Item>,
    rows: Vec<u32>,
    limits: Vec<PosRange>,
    /// Spans of the present round.
    n_spans: usize,
    /// `[tokens, n_heads, spans of a round, 2 + v_dim]`: largest score, sum of weights, weighted
    /// values.
    partials: Vec<f32>,
    /// `[tokens, n_heads, 2 + v_dim]`: the same over the spans so far.
    totals: Vec<f32>,
}

/// Values that one query needs.
fn width(spec: &AttendSpec) -> usize {
    2 + spec.v_dim
}

/// Spans that a round has room for.
fn room(spec: &AttendSpec, n_rows: usize) -> usize {
    (MAX_PARTIALS / (n_rows * spec.n_heads * width(spec)).max(1)).clamp(1, 128)
}

impl Split {
    /// Makes room for `n_rows` rows.
    pub(crate) fn reserve(&mut self, spec: &AttendSpec, n_rows: usize) {
        if n_rows > MAX_ROWS {
            return;
        }
        let totals = n_rows * spec.n_heads * width(spec);
        let partials = totals * room(spec, n_rows);
        self.totals.resize(self.totals.len().max(totals), 0.0);
        self.partials.resize(self.partials.len().max(partials), 0.0);
        self.seen.clear();
        self.items.clear();
        self.rows.clear();
        self.limits.clear();
        self.seen.reserve(n_rows);
        self.items.reserve(2 * room(spec, n_rows) + n_rows);
        self.rows.reserve(n_rows * room(spec, n_rows));
        self.limits.reserve(n_rows * room(spec, n_rows));
    }

    /// Whether the rows are few and some see more than a span; makes ready for these rows if so.
    pub(super) fn suits(&mut self, spec: &AttendSpec, visibility: &Visibility) -> bool {
        if visibility.n_rows as usize > MAX_ROWS {
            return false;
        }
        self.reserve(spec, visibility.n_rows as usize);
        let hull = |limits: &[PosRange]| limits.iter().fold(PosRange::EMPTY, |a, &l| a.hull(l));
        let groups = visibility.groups.iter();
        self.seen.extend(groups.map(|group| hull(&group.limits)));
        let more_than_one = |(group, seen): (&VisibleGroup, &PosRange)| {
            let first = first_seen(group, *seen, 0);
            let last = group
                .runs
                .last()
                .map(|run| run.last_pos().0.min(seen.last.0));
            first
                .zip(last)
                .is_some_and(|(first, last)| span_of(first) < span_of(last))
        };
        visibility.groups.iter().zip(&self.seen).any(more_than_one)
    }

    /// Divides the next spans from position `from` on among items; gives the position after them, or
    /// `None` where nobody sees anything there.
    fn round(&mut self, spec: &AttendSpec, visibility: &Visibility, from: u64) -> Option<u64> {
        self.items.clear();
        self.rows.clear();
        self.limits.clear();
        let mut from = u32::try_from(from).ok()?;
        let mut after = None;
        for number in 0..room(spec, visibility.n_rows as usize) {
            let groups = visibility.groups.iter().zip(&self.seen);
            let firsts = groups.filter_map(|(group, seen)| first_seen(group, *seen, from));
            let Some(first) = firsts.min().map(span_of) else {
                break;
            };
            let last = first + (SPAN - 1);
            let span = PosRange::new(kv_core::Pos(first), kv_core::Pos(last));
            self.items_of(spec, visibility, (span, number));
            self.n_spans = number + 1;
            after = Some(u64::from(last) + 1);
            match last.checked_add(1) {
                Some(next) => from = next,
                None => break,
            }
        }
        // Spans of a group follow each other: what is asked for ahead is what comes next.
        self.items.sort_unstable_by_key(|i| (i.group, i.number));
        after
    }

    /// Items for all groups that see something of `span`; groups with the same cells share one.
    fn items_of(
        &mut self,
        spec: &AttendSpec,
        visibility: &Visibility,
        (span, number): (PosRange, usize),
    ) {
        let first_item = self.items.len();
        let at_once = (QUERIES / heads_per_kv(spec)).max(1);
        for group in 0..visibility.groups.len() {
            let own = &visibility.groups[group];
            let sees = |seen: &PosRange| {
                first_seen(own, *seen, span.first.0).is_some_and(|pos| pos <= span.last.0)
            };
            let earlier = |at: usize| &visibility.groups[at];
            let is_first = !self.items[first_item..]
                .iter()
                .any(|item| same_cells(earlier(item.group), own, span));
            if !self.seen.get(group).is_some_and(sees) || !is_first {
                continue;
            }
            // The rows of this group and of all later ones with the same cells.
            let start = self.rows.len();
            let later = visibility.groups[group..].iter().zip(&self.seen[group..]);
            for (other, seen) in later {
                let alike = std::ptr::eq(other, own) || same_cells(own, other, span);
                if alike && seen.first <= span.last && span.first <= seen.last {
                    self.rows.extend(&other.rows);
                    self.limits.extend(&other.limits);
                }
            }
            for first in (start..self.rows.len()).step_by(at_once) {
                self.items.push(Item {
                    group,
                    span,
                    number,
                    rows: first..self.rows.len().min(first + at_once),
                });
            }
        }
    }

    /// Adds what the spans of a round gave to each query's total.
    fn merge(
        &mut self,
        lead: &mut Lead<'_>,
        attention: &Attention<'_>,
        n_rows: usize,
    ) -> Result<(), BackendError> {
        let spec = &attention.spec;
        let (kv_heads, heads, width) = (spec.kv_heads, heads_per_kv(spec), width(spec));
        let (room, n_spans) = (room(spec, n_rows), self.n_spans);
        let (totals, partials) = (SharedValues::new(&mut self.totals), &self.partials);
        lead.each(n_rows * kv_heads, &|_, task| {
            let first = task / kv_heads * spec.n_heads + task % kv_heads * heads;
            for query in first..first + heads {
                // SAFETY: each query belongs to one task.
                let total = unsafe { totals.range(query * width..(query + 1) * width) };
                let (state, values) = total.split_at_mut(2);
                let mut softmax = Softmax {
                    max: state[0],
                    sum: state[1],
                };
                let own = &partials[query * room * width..][..n_spans * width];
                for partial in own.chunks_exact(width) {
                    let later = Softmax {
                        max: partial[0],
                        sum: partial[1],
                    };
                    softmax.merge(attention.kernels, values, (later, &partial[2..]));
                }
                [state[0], state[1]] = [softmax.max, softmax.sum];
            }
            Ok(())
        })
    }
}

/// The first position from `from` on at which `group` has a cell within `seen`.
fn first_seen(group: &VisibleGroup, seen: PosRange, from: u32) -> Option<u32> {
    let from = from.max(seen.first.0);
    let run = group.runs.partition_point(|run| run.last_pos().0 < from);
    let first = group.runs.get(run)?.pos.0.max(from);
    (!seen.is_empty() && first <= seen.last.0).then_some(first)
}

/// Whether both have the same cells at the positions of `span`.
fn same_cells(a: &VisibleGroup, b: &VisibleGroup, span: PosRange) -> bool {
    let cut = |group: &VisibleGroup| {
        let first = group
            .runs
            .partition_point(|run| run.last_pos() < span.first);
        let end = group.runs.partition_point(|run| run.pos <= span.last);
        first..end.max(first)
    };
    let (in_a, in_b) = (cut(a), cut(b));
    in_a.len() == in_b.len()
        && a.runs[in_a]
            .iter()
            .zip(&b.runs[in_b])
            .all(|(a, b)| a == b || a.clip(span) == b.clip(span))
}

/// What the items of a round have in common.
struct Parts<'a> {
    attention: &'a Attention<'a>,
    items: &'a [Item],
    rows: &'a [u32],
    limits: &'a [PosRange],
    partials: SharedValues<'a>,
    /// Spans that each query has room for.
    room: usize,
}

impl Parts<'_> {
    /// All heads of one key/value head for the rows of an item.
    ///
    /// # Safety
    /// The visibility is sound for the queries and the stored cells, and no other thread works on the
    /// same item and head.
    unsafe fn attend(&self, item: &Item, kv_head: usize, scratch: &mut Scratch) {
        let spec = &self.attention.spec;
        let (heads, width) = (heads_per_kv(spec), width(spec));
        let rows = Rows {
            numbers: &self.rows[item.rows.clone()],
            limits: &self.limits[item.rows.clone()],
            kv_head,
        };
        let group = &self.attention.visibility.groups[item.group];
        self.attention.span(group, &rows, item.span, scratch);
        for (at, &row) in rows.numbers.iter().enumerate() {
            for head in 0..heads {
                let query = row as usize * spec.n_heads + kv_head * heads + head;
                let start = (query * self.room + item.number) * width;
                // SAFETY: a row is in one group, so it and the span are in one item, whose key/value
                // heads are taken by one thread each.
                let partial = unsafe { self.partials.range(start..start + width) };
                let (softmax, values) = scratch.partial(at * heads + head, spec.v_dim);
                [partial[0], partial[1]] = [softmax.max, softmax.sum];
                partial[2..].copy_from_slice(values);
            }
        }
    }
}

/// Attention of all rows by spans.
///
/// # Safety
/// The visibility is sound for the queries, which are prepared, and the stored cells; `split` suits it.
pub(super) unsafe fn attend(
    lead: &mut Lead<'_>,
    attention: &Attention<'_>,
    split: &mut Split,
    scratch: &[Mutex<Scratch>],
) -> Result<(), BackendError> {
    let (spec, visibility) = (&attention.spec, attention.visibility);
    let (n_rows, kv_heads, width) = (visibility.n_rows as usize, spec.kv_heads, width(spec));
    for (query, total) in split.totals.chunks_exact_mut(width).enumerate() {
        let none = attention.before_all(query % spec.n_heads.max(1));
        total.fill(0.0);
        [total[0], total[1]] = [none.max, none.sum];
    }
    let room = room(spec, n_rows);
    let mut from = Some(0);
    while let Some(next) = from.and_then(|from| split.round(spec, visibility, from)) {
        from = Some(next);
        let n_spans = split.n_spans;
        for query in split.partials.chunks_exact_mut(room * width) {
            for partial in query.chunks_exact_mut(width).take(n_spans) {
                [partial[0], partial[1]] = [Softmax::EMPTY.max, Softmax::EMPTY.sum];
            }
        }
        let parts = Parts {
            attention,
            items: &split.items,
            rows: &split.rows,
            limits: &split.limits,
            partials: SharedValues::new(&mut split.partials),
            room,
        };
        // The heads of a span are neighbouring tasks: their rows lie side by side.
        lead.each(parts.items.len() * kv_heads, &|thread, task| {
            let mut scratch = scratch[thread]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            let (item, kv_head) = (&parts.items[task / kv_heads], task % kv_heads);
            // SAFETY: the caller promises a sound visibility; each item and head is in one task.
            unsafe { parts.attend(item, kv_head, &mut scratch) };
            Ok(())
        })?;
        split.merge(lead, attention, n_rows)?;
    }
    for (query, total) in split
        .totals
        .chunks_exact(width)
        .take(n_rows * spec.n_heads)
        .enumerate()
    {
        // SAFETY: all tasks are done: nobody else writes.
        let out = unsafe {
            attention
                .out
                .range(query * spec.v_dim..(query + 1) * spec.v_dim)
        };
        attention.finish(total[1], &total[2..], out);
    }
    Ok(())
}
