//! Attention: over a layer's rows, within the ubatch, and in the three steps of plain attention.
//!
//! Does not know how scores are computed: that is [`crate::attend`]'s.

use std::sync::PoisonError;

use kv_backend::BackendError;
use kv_core::Visibility;
use kv_graph::{AttendSpec, ResultForm};

use crate::attend::{
    Attention, ByDistance, Indexer, PlainAttention, ScoreMods, SoftmaxRow, attend, merge_results,
};
use crate::kv_rows::KvRows;
use crate::plan::{AttentionOp, HeadWeights, PlainAttentionOp, PlainStep, Step};
use crate::storage::CpuRows;
use crate::store_rows::{self, NewRows};
use crate::values::Buf;

use super::{Run, VALUES_PER_TASK, piece};

/// The operands of one step of attention.
#[derive(Clone, Copy)]
struct AttendStep<'a> {
    spec: &'a AttendSpec,
    heads: &'a HeadWeights,
    /// Keys and values.
    kv: [KvRows<'a>; 2],
    visibility: &'a Visibility,
    /// Tables of queries and keys by distance.
    tables: Option<[&'a [f32]; 2]>,
    form: ResultForm,
}

impl Run<'_> {
    /// Stores or attends, in one step.
    pub(super) fn attention(
        &mut self,
        op: &AttentionOp,
        step: &Step<Buf>,
        rows: &mut CpuRows,
    ) -> Result<(), BackendError> {
        let (x, out, inputs) = (step.read(0), step.write(), self.inputs);
        // SAFETY: allocation lets no step write what it reads.
        let read = |buf: &Buf| unsafe { self.frame.read(*buf) };
        match op {
            AttentionOp::Store { layer, part } => {
                let new = NewRows {
                    layer: *layer,
                    k: read(&x),
                    v: step.reads.get(1).map_or(&[][..], read),
                    cells: &inputs.parts[*part].cells,
                };
                store_rows::store(self.kernels, &mut self.lead, rows, new)
            }
            AttentionOp::Attend {
                layer,
                seen,
                spec,
                heads,
                form,
            } => {
                let Some(kv) = rows.stored(*layer) else {
                    return Ok(());
                };
                let step = AttendStep {
                    spec,
                    heads,
                    kv,
                    visibility: seen.of(inputs),
                    tables: None,
                    form: *form,
                };
                self.attend(step, [x, out])
            }
            AttentionOp::Index { layer, seen, index } => {
                let Some([keys, _]) = rows.stored(*layer) else {
                    return Ok(());
                };
                let indexer = Indexer {
                    kernels: self.kernels,
                    spec: *index,
                    keys,
                    q: read(&x),
                    weights: read(&step.read(1)),
                    visibility: seen.of(inputs),
                    out: self.frame.write(out),
                };
                indexer.choose(&mut self.lead, &mut self.attention.index, self.scratch)
            }
            AttentionOp::AttendSparse { layer, seen, spec } => {
                let Some(kv) = rows.stored(*layer) else {
                    return Ok(());
                };
                let chosen = step.read(1);
                let mut kept = std::mem::take(&mut self.attention.kept);
                let visibility = seen.of(inputs);
                visibility.keep_chosen(read(&chosen), chosen.width, &mut kept);
                let step = AttendStep {
                    spec,
                    heads: &HeadWeights::default(),
                    kv,
                    visibility: &kept,
                    tables: None,
                    form: ResultForm::Whole,
                };
                let attended = self.attend(step, [x, out]);
                self.attention.kept = kept;
                attended
            }
            AttentionOp::AttendBatch {
                window,
                spec,
                heads,
            } => {
                let Some(visibility) = inputs.batch_visibility(*window) else {
                    return Ok(());
                };
                let fresh = |at, dim| KvRows::from_f32(read(&step.read(at)), spec.kv_heads, dim);
                let step = AttendStep {
                    spec,
                    heads,
                    kv: [fresh(1, spec.k_dim), fresh(2, spec.v_dim)],
                    visibility,
                    tables: match step.reads.get(3..5) {
                        Some([queries, keys]) => Some([read(queries), read(keys)]),
                        _ => None,
                    },
                    form: ResultForm::Whole,
                };
                self.attend(step, [x, out])
            }
            AttentionOp::Merge { n_heads } => {
                let with = step.read(1);
                self.merge(*n_heads, [x, with], out)
            }
            AttentionOp::Plain(of) => self.plain(of, rows, [x, out]),
        }
    }

    fn score_mods<'v>(&self, heads: &'v HeadWeights) -> ScoreMods<'v>
    where
        Self: 'v,
    {
        ScoreMods {
            sinks: heads.sinks.as_deref(),
            slopes: heads.slopes.as_deref(),
            positions: self.inputs.positions,
            by_distance: None,
        }
    }

    /// Attention of the queries `q`.
    fn attend(&mut self, step: AttendStep<'_>, [q, out]: [Buf; 2]) -> Result<(), BackendError> {
        let AttendStep {
            spec,
            heads,
            kv,
            visibility,
            tables,
            form,
        } = step;
        let mut score_mods = self.score_mods(heads);
        score_mods.by_distance = heads
            .buckets
            .as_deref()
            .map(|buckets| ByDistance { buckets, tables });
        let attention = Attention {
            kernels: self.kernels,
            spec: *spec,
            kv,
            // SAFETY: allocation lets no step write what it reads.
            q: unsafe { self.frame.read(q) },
            visibility,
            score_mods,
            form,
            out: self.frame.write(out),
        };
        // SAFETY: the inputs were validated, so the visibility is sound for these rows and cells.
        unsafe { attend(&mut self.lead, &attention, self.attention, self.scratch) }
    }

    /// Merges partial results of `n_heads` heads a row.
    fn merge(&mut self, n_heads: usize, partial: [Buf; 2], out: Buf) -> Result<(), BackendError> {
        // SAFETY: allocation lets no step write what it reads.
        let [a, b] = partial.map(|buf| unsafe { self.frame.read(buf) });
        let [len, dim] = [partial[0].width, out.width].map(|width| width / n_heads.max(1));
        self.rows(out, &|row, to| {
            for (head, to) in to.chunks_mut(dim.max(1)).enumerate() {
                let start = (row * n_heads + head) * len;
                let [a, b] = [a, b].map(|values| &values[start..start + len]);
                merge_results(a, b, to);
            }
            Ok(())
        })
    }

    /// One step of plain attention in one layer.
    fn plain(
        &mut self,
        of: &PlainAttentionOp,
        rows: &CpuRows,
        [x, out]: [Buf; 2],
    ) -> Result<(), BackendError> {
        let plain = PlainAttention {
            kernels: self.kernels,
            spec: &of.spec,
            n_kv: of.n_kv,
        };
        // SAFETY: allocation lets no step write what it reads.
        let values = unsafe { self.frame.read(x) };
        let of_row = |row: usize| &values[row * x.width..(row + 1) * x.width];
        let layer = match &of.step {
            PlainStep::SoftMax { seen, heads } => {
                let score_mods = self.score_mods(heads);
                let visibility = seen.of(self.inputs);
                return self.rows(out, &|row, to| {
                    let softmax = SoftmaxRow {
                        visibility,
                        row: row as u32,
                        score_mods,
                    };
                    plain.softmax(softmax, of_row(row), to);
                    Ok(())
                });
            }
            PlainStep::Scores { layer } | PlainStep::Sum { layer } => *layer,
        };
        let Some([keys, stored_values]) = rows.stored(layer) else {
            return Ok(());
        };
        let (to, scratch) = (self.frame.write(out), self.scratch);
        // A row reads every cell.
        let per_row = of.n_kv * of.spec.n_heads;
        let per_task = (VALUES_PER_TASK / per_row.max(1)).max(1);
        self.lead
            .each(out.rows.div_ceil(per_task), &|thread, task| {
                let mut scratch = scratch[thread]
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner);
                for row in piece(task, per_task, out.rows) {
                    // SAFETY: each row belongs to one task, and allocation lets no step read what
                    // it writes.
                    let to = unsafe { to.range(row * out.width..(row + 1) * out.width) };
                    match of.step {
                        PlainStep::Sum { .. } => {
                            plain.weighted_sum(stored_values, of_row(row), to, &mut scratch);
                        }
                        _ => plain.scores(keys, of_row(row), to, &mut scratch),
                    }
                }
                Ok(())
            })
    }
}
