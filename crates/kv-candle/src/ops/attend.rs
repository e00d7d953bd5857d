//! Attention over visible cells: gather a group's rows, then plain matrix products and softmax.
//!
//! Scaled dot products (Vaswani et al., arXiv 1706.03762) with grouped heads (Ainslie et al.,
//! arXiv 2305.13245). Invariant: only cells that some row of a group sees are read, and widened to
//! `f32`. Knows nothing of windows, sequences or storage types.

use candle_core::{D, DType, Result, Tensor};
use kv_core::{CellRun, Pos, PosRange, Visibility, VisibleGroup};
use kv_graph::{AttendSpec, BucketTable, ResultForm};

use crate::rows::{KvTensors, RowTensor};

/// Rows that are attended together: bounds the table of scores.
const MAX_ROWS: usize = 256;

/// The inputs of an attention besides keys and values.
#[derive(Clone)]
pub(crate) struct Queries<'a> {
    /// `[n, heads, k_dim]`.
    pub(crate) q: &'a Tensor,
    pub(crate) visibility: &'a Visibility,
    /// Position of each query, where there are linear biases.
    pub(crate) positions: &'a [u32],
    /// `[heads]`.
    pub(crate) sinks: Option<&'a Tensor>,
    /// The bias on scores by distance, where there is something.
    pub(crate) relative: Option<Buckets>,
    pub(crate) form: ResultForm,
}

impl Queries<'_> {
    /// Values of all heads of a query.
    fn width(&self, spec: &AttendSpec) -> usize {
        spec.n_heads * self.form.len(spec.v_dim)
    }

    /// The result of a row that sees nothing, `[1, width]`.
    fn of_nothing(&self, spec: &AttendSpec) -> Result<Tensor> {
        let device = self.q.device();
        let zeros = |width| Tensor::zeros((1, spec.n_heads, width), DType::F32, device);
        let logarithms = match (self.form, self.sinks) {
            (ResultForm::Whole, _) => return zeros(spec.v_dim)?.flatten_from(1),
            (ResultForm::Partial, Some(sinks)) => sinks.reshape((1, spec.n_heads, 1))?,
            (ResultForm::Partial, None) => {
                Tensor::full(f32::NEG_INFINITY, (1, spec.n_heads, 1), device)?
            }
        };
        Tensor::cat(&[zeros(spec.v_dim)?, logarithms], D::Minus1)?.flatten_from(1)
    }
}

/// The bias on scores by the distance of query and key.
#[derive(Clone)]
pub(crate) struct Buckets {
    pub(crate) table: BucketTable,
    /// Their number.
    pub(crate) n: usize,
    pub(crate) scores: BucketScores,
}

/// The bias of a bucket.
#[derive(Clone)]
pub(crate) enum BucketScores {
    /// `[buckets, heads]`.
    Heads(Vec<f32>),
    /// Of queries `[n, heads, buckets]` and of keys `[n, kv_heads, buckets]`.
    Tables([Vec<f32>; 2]),
}

impl Buckets {
    /// The bias on the score of a head of the query in row `query` and the key in row `key`, at
    /// these positions.
    fn of(&self, spec: &AttendSpec, head: usize, [query, key]: [(usize, u32); 2]) -> f32 {
        let bucket = self.table.of(query.1, key.1);
        let at = |values: &[f32], at: usize| values.get(at).copied().unwrap_or(0.0);
        match &self.scores {
            BucketScores::Heads(values) => at(values, bucket * spec.n_heads + head),
            BucketScores::Tables([of_query, of_key]) => {
                let kv_head = head / (spec.n_heads / spec.kv_heads).max(1);
                at(of_query, (query.0 * spec.n_heads + head) * self.n + bucket)
                    + at(of_key, (key.0 * spec.kv_heads + kv_head) * self.n + bucket)
            }
        }
    }
}

/// `softmax(scale q K^T) V`: `[n, heads * v_dim]`, zeros for rows that see nothing; or one value
/// more for each head, as the form says.
pub(crate) fn attend(rows: &KvTensors, spec: &AttendSpec, queries: Queries<'_>) -> Result<Tensor> {
    let (q, visibility) = (queries.q, queries.visibility);
    let n = q.dim(0)?;
    // Results in the order of groups, after one of nothing; and where each query row's is.
    let mut results = vec![queries.of_nothing(spec)?];
    let mut n_results = 1;
    let mut result_of = vec![0u32; n];
    for group in &visibility.groups {
        let (seeing, runs) = seen_by(group);
        if seeing.is_empty() {
            continue;
        }
        let seen = SeenRows::gather(rows, spec, runs)?;
        for block in seeing.chunks(MAX_ROWS) {
            for (row, _) in block {
                if let Some(result) = result_of.get_mut(*row as usize) {
                    *result = n_results;
                }
                n_results += 1;
            }
            results.push(seen.attend(spec, &queries, block)?);
        }
    }
    let in_order = (1..).zip(&result_of).all(|(i, &r)| i == r);
    if in_order && let [_, all] = results.as_slice() {
        return Ok(all.clone());
    }
    let result_of = Tensor::from_vec(result_of, n, q.device())?;
    Tensor::cat(&results, 0)?.index_select(&result_of, 0)
}

/// Partial results over different rows as one, `[n, heads * dim]`, or `[n, heads, dim + 1]` with
/// logarithms.
pub(crate) fn merge_partials([a, b]: [&Tensor; 2], form: ResultForm) -> Result<Tensor> {
    let (n, heads, dim) = (a.dim(0)?, a.dim(1)?, a.dim(2)? - 1);
    // Of two that saw nothing, both weights are finite, and the values zeros.
    let logarithms = |x: &Tensor| x.narrow(2, dim, 1)?.maximum(-1e30);
    let (log_a, log_b) = (logarithms(a)?, logarithms(b)?);
    let max = log_a.maximum(&log_b)?;
    let (weight_a, weight_b) = ((log_a - &max)?.exp()?, (log_b - &max)?.exp()?);
    let values = |x: &Tensor, weight: &Tensor| x.narrow(2, 0, dim)?.broadcast_mul(weight);
    let sum = (values(a, &weight_a)? + values(b, &weight_b)?)?;
    let weights = (weight_a + weight_b)?;
    let merged = sum.broadcast_div(&weights)?;
    match form {
        ResultForm::Whole => merged.reshape((n, heads * dim)),
        // That of nothing again, where both saw nothing.
        ResultForm::Partial => {
            let logarithm = (weights.log()? + max)?;
            let is_nothing = logarithm.lt(-1e29)?;
            let nothing = logarithm.ones_like()?.affine(f64::NEG_INFINITY, 0.0)?;
            Tensor::cat(&[merged, is_nothing.where_cond(&nothing, &logarithm)?], 2)
        }
    }
}

/// A query row with the positions that it sees.
type SeeingRow = (u32, PosRange);

/// The rows of `group` that see something, and the runs that cover what they see.
fn seen_by(group: &VisibleGroup) -> (Vec<SeeingRow>, Vec<CellRun>) {
    let rows = group.rows.iter().copied().zip(group.limits.iter().copied());
    let sees = |limits: PosRange| group.runs.iter().any(|run| run.clip(limits).is_some());
    let seeing: Vec<SeeingRow> = rows.filter(|&(_, limits)| sees(limits)).collect();
    let all = seeing
        .iter()
        .fold(PosRange::EMPTY, |all, &(_, limits)| all.hull(limits));
    (
        seeing,
        group.runs.iter().filter_map(|run| run.clip(all)).collect(),
    )
}

/// The query rows of `block`.
fn select(q: &Tensor, block: &[SeeingRow]) -> Result<Tensor> {
    let first = block.first().map_or(0, |&(row, _)| row);
    if (first..).zip(block).all(|(i, &(row, _))| i == row) {
        return q.narrow(0, first as usize, block.len());
    }
    let rows: Vec<u32> = block.iter().map(|&(row, _)| row).collect();
    q.index_select(&Tensor::from_vec(rows, block.len(), q.device())?, 0)
}

/// Keys and values of some cells, by head.
struct SeenRows {
    /// `[kv_heads, cells, k_dim]`.
    keys: Tensor,
    /// `[kv_heads, cells, v_dim]`.
    values: Tensor,
    positions: Vec<Pos>,
    cells: Vec<u32>,
}

impl SeenRows {
    fn gather(rows: &KvTensors, spec: &AttendSpec, runs: Vec<CellRun>) -> Result<Self> {
        let cells = || runs.iter().flat_map(|run| run.iter());
        let positions: Vec<Pos> = cells().map(|(_, pos)| pos).collect();
        let all_cells: Vec<u32> = cells().map(|(cell, _)| cell.0).collect();
        let n = positions.len();
        let gathered = |rows: &RowTensor, dim| {
            let all = &rows.tensor;
            let seen = match runs.as_slice() {
                [run] => all.narrow(0, run.cell.as_usize(), n)?,
                _ => {
                    let cells = Tensor::from_vec(all_cells.clone(), n, all.device())?;
                    all.index_select(&cells, 0)?
                }
            };
            let by_head = rows.values(&seen)?.reshape((n, spec.kv_heads, dim))?;
            by_head.transpose(0, 1)?.contiguous()
        };
        let keys: Tensor = gathered(&rows.k, spec.k_dim)?;
        // Rows without room for values have them in the keys, at the beginning of each head.
        let values = match rows.v.tensor.dim(1)? {
            0 => keys.narrow(2, 0, spec.v_dim)?.contiguous()?,
            _ => gathered(&rows.v, spec.v_dim)?,
        };
        Ok(Self {
            keys,
            values,
            positions,
            cells: all_cells,
        })
    }

    /// The queries of `block` → `[rows, heads * v_dim]`. Heads that share keys and values become
    /// rows of one product instead of copies of those.
    fn attend(
        &self,
        spec: &AttendSpec,
        queries: &Queries<'_>,
        block: &[SeeingRow],
    ) -> Result<Tensor> {
        let (n, cells) = (block.len(), self.positions.len());
        let (kv_heads, shared) = (spec.kv_heads, spec.n_heads / spec.kv_heads);
        let q = select(queries.q, block)?
            .reshape((n, kv_heads, shared, spec.k_dim))?
            .transpose(0, 1)?
            .contiguous()?;
        let q = q.reshape((kv_heads, n * shared, spec.k_dim))?;
        let mut scores = q
            .matmul(&self.keys.t()?)?
            .affine(f64::from(spec.scale), 0.0)?;
        if let Some(cap) = spec.soft_cap.map(f64::from) {
            scores = scores.affine(1.0 / cap, 0.0)?.tanh()?.affine(cap, 0.0)?;
        }
        let by_head = (kv_heads, n, shared, cells);
        if let Some(alibi) = spec.alibi {
            let slopes = alibi.slopes(spec.n_heads);
            let slopes = Tensor::from_vec(slopes, (kv_heads, 1, shared, 1), q.device())?;
            let distances = self.distances(block, queries.positions);
            let distances = Tensor::from_vec(distances, (1, n, 1, cells), q.device())?;
            let biases = slopes.broadcast_mul(&distances)?;
            scores = scores.reshape(by_head)?.sub(&biases)?;
            scores = scores.reshape((kv_heads, n * shared, cells))?;
        }
        if let Some(relative) = &queries.relative {
            let added = self.by_distance(spec, relative, (block, queries.positions));
            let added = Tensor::from_vec(added, by_head, q.device())?;
            scores = (scores.reshape(by_head)? + added)?;
            scores = scores.reshape((kv_heads, n * shared, cells))?;
        }
        if let Some(mask) = self.mask(block) {
            let mask = Tensor::from_vec(mask, (1, n, 1, cells), q.device())?;
            scores = scores.reshape(by_head)?.broadcast_add(&mask)?;
            scores = scores.reshape((kv_heads, n * shared, cells))?;
        }
        if let Some(sinks) = queries.sinks {
            let sinks = sinks.reshape((kv_heads, 1, shared, 1))?;
            let sinks = sinks.broadcast_as((kv_heads, n, shared, 1))?;
            let sinks = sinks.reshape((kv_heads, n * shared, 1))?;
            scores = Tensor::cat(&[scores, sinks], D::Minus1)?;
        }
        let weights = candle_nn::ops::softmax_last_dim(&scores)?;
        let weights = weights.narrow(D::Minus1, 0, cells)?.contiguous()?;
        let mut out = weights.matmul(&self.values)?;
        if queries.form == ResultForm::Partial {
            let logarithms = scores.log_sum_exp(D::Minus1)?.unsqueeze(D::Minus1)?;
            out = Tensor::cat(&[out, logarithms], D::Minus1)?;
        }
        let out = out
            .reshape((kv_heads, n, shared, out.dim(D::Minus1)?))?
            .transpose(0, 1)?
            .contiguous()?;
        out.reshape((n, queries.width(spec)))
    }

    /// The bias on scores by distance, `[kv_heads, rows, shared heads, cells]`.
    fn by_distance(
        &self,
        spec: &AttendSpec,
        relative: &Buckets,
        (block, positions): (&[SeeingRow], &[u32]),
    ) -> Vec<f32> {
        let shared = spec.n_heads / spec.kv_heads;
        let mut added = Vec::with_capacity(spec.n_heads * block.len() * self.cells.len());
        for kv_head in 0..spec.kv_heads {
            for &(row, _) in block {
                let row = row as usize;
                let query = (row, positions.get(row).copied().unwrap_or(0));
                for head in kv_head * shared..(kv_head + 1) * shared {
                    let keys = self.cells.iter().zip(&self.positions);
                    let keys = keys.map(|(&cell, pos)| (cell as usize, pos.0));
                    added.extend(keys.map(|key| relative.of(spec, head, [query, key])));
                }
            }
        }
        added
    }

    /// From each row's query to each cell's key, `[rows, cells]`.
    fn distances(&self, block: &[SeeingRow], positions: &[u32]) -> Vec<f32> {
        let of_row = |&(row, _): &SeeingRow| {
            let query = positions.get(row as usize).copied().unwrap_or(0);
            let keys = self.positions.iter();
            keys.map(move |key| query.abs_diff(key.0) as f32)
        };
        block.iter().flat_map(of_row).collect()
    }

    /// The mask that is added to the scores, `[rows, cells]`; `None` where every row sees every
    /// cell.
    fn mask(&self, block: &[SeeingRow]) -> Option<Vec<f32>> {
        let sees_all = |limits: PosRange| self.positions.iter().all(|&pos| limits.contains(pos));
        if block.iter().all(|&(_, limits)| sees_all(limits)) {
            return None;
        }
        let row = |&(_, limits): &SeeingRow| {
            let hidden = move |&pos| {
                if limits.contains(pos) {
                    0.0
                } else {
                    f32::NEG_INFINITY
                }
            };
            self.positions.iter().map(hidden)
        };
        Some(block.iter().flat_map(row).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;
    use kv_core::CellIdx;
    use kv_rows::{HeadRotation, KvType, RowShape};

    const SPEC: AttendSpec = AttendSpec {
        n_heads: 4,
        kv_heads: 2,
        k_dim: 3,
        v_dim: 2,
        scale: 0.6,
        soft_cap: Some(1.5),
        alibi: None,
    };

    fn wave(n: usize, step: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * step).sin()).collect()
    }

    fn naive(q: &[f32], k: &[f32], v: &[f32], cells: &[(CellIdx, Pos)]) -> Vec<f64> {
        let dot = |a: &[f32], b: &[f32]| -> f64 {
            a.iter()
                .zip(b)
                .map(|(a, b)| f64::from(*a) * f64::from(*b))
                .sum()
        };
        let mut out = Vec::new();
        for head in 0..4 {
            let weight = |cell: &(CellIdx, Pos)| {
                let key = &k[cell.0.as_usize() * 6 + head / 2 * 3..][..3];
                (1.5 * (dot(&q[head * 3..][..3], key) * f64::from(0.6f32) / 1.5).tanh()).exp()
            };
            let sum: f64 = cells.iter().map(weight).sum();
            for j in 0..2 {
                let value =
                    |c: &(CellIdx, Pos)| f64::from(v[c.0.as_usize() * 4 + head / 2 * 2 + j]);
                let all: f64 = cells.iter().map(|c| weight(c) * value(c)).sum();
                out.push(if cells.is_empty() { 0.0 } else { all / sum });
            }
        }
        out
    }

    #[test]
    fn blocks_of_interleaved_groups_come_back_in_order() {
        // More rows than one block; even rows see one text, odd ones another, some nothing.
        let n = 2 * MAX_ROWS as u32 + 90;
        let group = |parity: u32, cell: u32, window: u32| {
            let rows: Vec<u32> = (0..n).filter(|r| r % 2 == parity).collect();
            let len = rows.len() as u32;
            let runs = vec![
                CellRun {
                    cell: CellIdx(cell + 20),
                    pos: Pos(5),
                    len: 20,
                },
                CellRun {
                    cell: CellIdx(cell),
                    pos: Pos(25),
                    len: len - 20,
                },
            ];
            let limits =
                (0..len).map(|p| PosRange::new(Pos((p + 1).saturating_sub(window)), Pos(p)));
            VisibleGroup::new(rows, runs, limits.collect())
        };
        let visibility = Visibility::new(n, vec![group(1, 400, 7), group(0, 0, 1000)]);
        visibility.check(800).unwrap();
        let (q, k, v) = (
            wave(n as usize * 12, 0.37),
            wave(800 * 6, 0.71),
            wave(800 * 4, 1.3),
        );
        let tensor = |x: &[f32], len| Tensor::from_slice(x, (x.len() / len, len), &Device::Cpu);
        let rows = |x: &[f32], dim| RowTensor {
            shape: RowShape {
                heads: 2,
                dim,
                kv_type: KvType::F32,
                rotation: HeadRotation::None,
            },
            tensor: tensor(x, 2 * dim).unwrap(),
        };
        let rows = KvTensors {
            k: rows(&k, 3),
            v: rows(&v, 2),
        };
        let q_rows = tensor(&q, 12).unwrap().reshape((n as usize, 4, 3)).unwrap();
        let queries = Queries {
            q: &q_rows,
            visibility: &visibility,
            positions: &[],
            sinks: None,
            relative: None,
            form: ResultForm::Whole,
        };
        let got = attend(&rows, &SPEC, queries)
            .unwrap()
            .to_vec2::<f32>()
            .unwrap();
        for (row, got) in (0u32..).zip(&got) {
            let cells: Vec<_> = visibility.row(row).collect();
            assert_eq!(cells.is_empty(), row / 2 < 5);
            let wanted = naive(&q[row as usize * 12..][..12], &k, &v, &cells);
            for (got, wanted) in got.iter().zip(wanted) {
                assert!(
                    (f64::from(*got) - wanted).abs() < 2e-6,
                    "row {row}: {got} {wanted}"
                );
            }
        }
    }
}
