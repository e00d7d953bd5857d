//! Attention over stored rows: for every query the softmax over what it sees, in double precision.
//!
//! Invariant: a row reads the cells that its visibility shows and no others. Knows no windows and
//! no sequences: the visibility says it all.

use kv_backend::checks::{part_inputs, part_of};
use kv_backend::null::HostRows;
use kv_backend::{BackendError, RowKind, RowStorage};
use kv_core::{CellIdx, LayerIdx};
use kv_graph::{AttendSpec, Node};
use kv_rows::{RowShape, ValueRows};

use crate::compute::{Run, dot, one_row};

/// A token that a query sees.
struct SeenToken {
    /// Its position.
    pos: u32,
    /// `[kv_heads, k_dim]`.
    key: Vec<f32>,
    /// `[kv_heads, v_dim]`.
    value: Vec<f32>,
}

/// The needs of one head's attention besides rows.
struct Head<'a> {
    spec: &'a AttendSpec,
    /// The number of its K/V head.
    kv_head: usize,
    /// Of its linear bias; 0 without.
    slope: f64,
    /// Position of the query, where there is a linear bias.
    position: u32,
    /// A score without a value.
    sink: Option<f64>,
}

impl Run<'_> {
    pub(crate) fn attend(
        &self,
        node: &Node,
        layer: LayerIdx,
        spec: &AttendSpec,
        sinks: Option<&str>,
        rows: &HostRows,
    ) -> Result<Vec<f32>, BackendError> {
        let part = part_of(self.graph(), node, 2)?;
        let visibility = &part_inputs(self.inputs, part)?.visibility;
        let slopes = spec.alibi.map(|alibi| alibi.slopes(spec.n_heads));
        let sinks = sinks.map(|name| self.weight(name));
        let queries = self
            .operand(node, 0)
            .chunks_exact(spec.n_heads * spec.k_dim);
        let mut out = Vec::with_capacity(node.n_values());
        for (row, heads) in (0u32..).zip(queries) {
            let cells = visibility.row(row);
            let seen = cells.map(|(cell, pos)| read(rows, layer, cell, pos.0));
            let seen = seen.collect::<Result<Vec<_>, _>>()?;
            let position = self.inputs.positions.get(row as usize);
            for (at, q) in heads.chunks_exact(spec.k_dim).enumerate() {
                let head = Head {
                    spec,
                    kv_head: at / (spec.n_heads / spec.kv_heads),
                    slope: slopes.as_ref().map_or(0.0, |slopes| f64::from(slopes[at])),
                    position: position.copied().unwrap_or(0),
                    sink: sinks.map(|sinks| f64::from(sinks[at])),
                };
                out.extend(head.attend(q, &seen));
            }
        }
        Ok(out)
    }
}

/// Decodes K and V of a cell that `layer` attends over.
fn read(
    rows: &HostRows,
    layer: LayerIdx,
    cell: CellIdx,
    pos: u32,
) -> Result<SeenToken, BackendError> {
    let attended = rows.layout().attended(layer);
    let (_, stored) = attended.ok_or(BackendError::NoRows { layer })?;
    let decode = |kind, shape: RowShape| {
        let mut values = vec![0.0; shape.len()];
        shape.decode(rows.span(one_row(stored.layer, kind, cell))?, &mut values);
        Ok::<_, BackendError>(values)
    };
    let key = decode(RowKind::K, stored.k)?;
    let value = match stored.values {
        ValueRows::Own => decode(RowKind::V, stored.v)?,
        ValueRows::InKeys => {
            let heads = key.chunks_exact(stored.k.dim.max(1));
            let values = heads.flat_map(|head| &head[..stored.v.dim]);
            values.copied().collect()
        }
    };
    Ok(SeenToken { pos, key, value })
}

impl Head<'_> {
    /// `softmax(scale q K^T) V`, `[v_dim]`; zeros where nothing is seen.
    fn attend(&self, q: &[f32], seen: &[SeenToken]) -> Vec<f32> {
        let AttendSpec { k_dim, v_dim, .. } = *self.spec;
        let score = |seen: &SeenToken| {
            let key = &seen.key[self.kv_head * k_dim..][..k_dim];
            let score = dot(q, key) * f64::from(self.spec.scale);
            let capped = match self.spec.soft_cap.map(f64::from) {
                Some(cap) => cap * (score / cap).tanh(),
                None => score,
            };
            capped - self.slope * f64::from(self.position.abs_diff(seen.pos))
        };
        let scores: Vec<f64> = seen.iter().map(score).collect();
        let all = || scores.iter().copied().chain(self.sink);
        let max = all().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = all().map(|s| (s - max).exp()).sum();
        let mut out = vec![0.0; v_dim];
        for (score, seen) in scores.iter().zip(seen) {
            let weight = (score - max).exp() / sum;
            let values = &seen.value[self.kv_head * v_dim..][..v_dim];
            for (out, value) in out.iter_mut().zip(values) {
                *out += weight * f64::from(*value);
            }
        }
        out.into_iter().map(|v| v as f32).collect()
    }
}
