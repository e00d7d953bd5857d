//! Attention from its definition, over rows read from the backend: slow, in `f64`, obviously right.
//!
//! It is the body that a backend gets for nothing, and the oracle of the contract suite.

use super::args::{Attend, RowKind, RowSpan, attended_rows, expect_len, layer_rows};
use super::{Backend, BackendError};
use crate::graph::AttendSpec;
use crate::ids::{CellIdx, Pos};
use crate::layers::{LayerRows, ValueRows};

/// Attention by its definition, in `f64`, over rows read from `backend`.
///
/// # Errors
/// As [`Backend::attend`].
pub fn by_reading_rows<B: Backend + ?Sized>(
    backend: &B,
    rows: &B::Rows,
    args: Attend<'_>,
    out: &mut [f32],
) -> Result<(), BackendError> {
    let AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        v_dim,
        ..
    } = args.spec;
    let layer = attended_rows(backend.layout(rows), args.layer)?;
    if [layer.k.heads, layer.k.dim, layer.v.dim] != [kv_heads, k_dim, v_dim] {
        return Err(BackendError::RowShape {
            layer: args.layer,
            wanted: format!("{kv_heads} heads of {k_dim}/{v_dim}"),
            got: format!("{} heads of {}/{}", layer.k.heads, layer.k.dim, layer.v.dim),
        });
    }
    let n_rows = args.q.len() / (n_heads * k_dim).max(1);
    expect_len("attention output", n_rows * n_heads * v_dim, out.len())?;
    args.check_extras()?;
    let slopes = args.spec.alibi.map(|alibi| alibi.slopes(n_heads));
    out.fill(0.0);
    for group in &args.visibility.groups {
        for (at, &row) in group.rows.iter().enumerate() {
            let (cells, at): (Vec<CellIdx>, Vec<Pos>) = group.cells_of(at).unzip();
            let keys = read(backend, rows, (layer.layer, RowKind::K), &cells)?;
            let values = match layer.values {
                ValueRows::Own => read(backend, rows, (layer.layer, RowKind::V), &cells)?,
                ValueRows::InKeys => keys.iter().map(|key| values_in(key, &layer)).collect(),
            };
            let row = row as usize;
            let q = args
                .q
                .get(row * n_heads * k_dim..(row + 1) * n_heads * k_dim);
            let o = out.get_mut(row * n_heads * v_dim..(row + 1) * n_heads * v_dim);
            let (Some(q), Some(o)) = (q, o) else {
                let (wanted, got) = (row + 1, n_rows);
                return Err(BackendError::WrongLength {
                    what: "query rows",
                    wanted,
                    got,
                });
            };
            let position = args.positions.get(row).copied().unwrap_or(0);
            for head in 0..n_heads {
                let kv_head = head / (n_heads / kv_heads);
                let q = &q[head * k_dim..][..k_dim];
                let o = &mut o[head * v_dim..][..v_dim];
                let slope = slopes.as_ref().map_or(0.0, |slopes| slopes[head]);
                let biases = at.iter().map(|pos| bias(slope, position, *pos)).collect();
                let beside = Beside {
                    biases,
                    sink: args.sinks.map(|sinks| f64::from(sinks[head])),
                };
                attend_head(&args.spec, (q, kv_head), (&keys, &values), (&beside, o));
            }
        }
    }
    Ok(())
}

fn read<B: Backend + ?Sized>(
    backend: &B,
    rows: &B::Rows,
    (layer, kind): (crate::ids::LayerIdx, RowKind),
    cells: &[CellIdx],
) -> Result<Vec<Vec<f32>>, BackendError> {
    let of_layer = layer_rows(backend.layout(rows), layer)?;
    let shape = match kind {
        RowKind::K => of_layer.k,
        RowKind::V => of_layer.v,
        RowKind::Conv | RowKind::State => return Err(BackendError::NoRows { layer }),
    };
    let mut bytes = vec![0; shape.bytes()];
    let one = |&first: &CellIdx| {
        backend.read_rows(
            rows,
            RowSpan {
                layer,
                kind,
                first,
                len: 1,
            },
            &mut bytes,
        )?;
        let mut values = vec![0.0; shape.len()];
        shape.decode(&bytes, &mut values);
        Ok(values)
    };
    cells.iter().map(one).collect()
}

/// The values that a key row begins each of its heads with.
fn values_in(key: &[f32], layer: &LayerRows) -> Vec<f32> {
    let heads = key.chunks_exact(layer.k.dim.max(1));
    let values = heads.flat_map(|head| head.iter().take(layer.v.dim));
    values.copied().collect()
}

/// What ALiBi adds to a score.
fn bias(slope: f32, query: u32, key: Pos) -> f64 {
    -f64::from(slope) * f64::from(query.abs_diff(key.0))
}

/// What a head has beside queries, keys and values.
struct Beside {
    /// Added to the score of each key.
    biases: Vec<f64>,
    sink: Option<f64>,
}

/// `softmax(scale q K^T) V` for one head.
fn attend_head(
    spec: &AttendSpec,
    (q, kv_head): (&[f32], usize),
    (keys, values): (&[Vec<f32>], &[Vec<f32>]),
    (beside, out): (&Beside, &mut [f32]),
) {
    let score = |(key, bias): (&Vec<f32>, &f64)| {
        let key = &key[kv_head * spec.k_dim..][..spec.k_dim];
        let dot: f64 = q
            .iter()
            .zip(key)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum();
        let score = dot * f64::from(spec.scale);
        let capped = match spec.soft_cap.map(f64::from) {
            Some(cap) => cap * (score / cap).tanh(),
            None => score,
        };
        capped + bias
    };
    let scores: Vec<f64> = keys.iter().zip(&beside.biases).map(score).collect();
    let all = scores.iter().copied().chain(beside.sink);
    let max = all.clone().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let sum: f64 = all.map(|s| (s - max).exp()).sum();
    for (j, o) in out.iter_mut().enumerate() {
        let at = kv_head * spec.v_dim + j;
        let weighted: f64 = weights
            .iter()
            .zip(values)
            .map(|(w, v)| w * f64::from(v[at]))
            .sum();
        *o = if sum > 0.0 {
            (weighted / sum) as f32
        } else {
            0.0
        };
    }
}
