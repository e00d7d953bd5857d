//! [`RecordedValues`]: which keys, values and states the reference recorded, and where they are
//! among those that the memory holds after the same prompt.

use kv_backend::RowKind;
use kv_core::LayerIdx;

use crate::{Case, KeyOrder, Reference};

/// Some values of a state, or of the rows of keys or values of a prompt.
#[derive(Clone, Debug, PartialEq)]
pub struct RecordedValues {
    /// Indices among the values of the memory.
    pub at: Vec<usize>,
    /// The reference's values there.
    pub values: Vec<f32>,
}

/// The rows or the state that the values are of.
#[derive(Clone, Copy, Debug)]
pub struct RecordKey {
    /// The layer.
    pub layer: LayerIdx,
    /// Keys, values, convolution inputs or a state.
    pub kind: RowKind,
    /// The number of the prompt.
    pub prompt: usize,
}

/// Value heads of a delta rule, where those that share a key head lie `key_heads` apart in the
/// memory, and next to each other in the reference.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TiledHeads {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values.
    pub n_heads: usize,
    /// Values of a query or key.
    pub k_dim: usize,
    /// Values of a value head.
    pub v_dim: usize,
}

impl TiledHeads {
    /// The place in the memory of a value head of the reference.
    fn head(self, head: usize) -> usize {
        let shared = self.n_heads / self.key_heads;
        head % shared * self.key_heads + head / shared
    }

    /// The place in the memory of a channel of the convolution.
    fn channel(self, channel: usize) -> usize {
        let first = 2 * self.key_heads * self.k_dim;
        match channel.checked_sub(first) {
            None => channel,
            Some(value) => first + self.head(value / self.v_dim) * self.v_dim + value % self.v_dim,
        }
    }

    /// The place in the memory of a value of the state.
    fn state(self, at: usize) -> usize {
        let len = self.k_dim * self.v_dim;
        self.head(at / len) * len + at % len
    }
}

impl RecordedValues {
    /// The values that the reference has for a record; the memory holds `n_values` of them.
    pub(crate) fn of(
        case: &Case,
        reference: &Reference,
        key: RecordKey,
        n_values: usize,
    ) -> Option<Self> {
        let RecordKey { layer, prompt, .. } = key;
        match key.kind {
            RowKind::K | RowKind::V if case.keys.is_latent() => {
                latent_rows(reference, key, n_values, case.keys)
            }
            RowKind::K => last_rows(reference, &name("k", key), n_values, case.keys),
            RowKind::V => last_rows(reference, &name("v", key), n_values, KeyOrder::Same),
            RowKind::Conv => {
                let channel = |c| case.tiled_heads.map_or(c, |heads| heads.channel(c));
                conv_state(reference, &name("conv_state", key), n_values, channel)
            }
            RowKind::State => {
                let mut recorded = (case.states)(reference, layer, prompt)?;
                if let Some(heads) = case.tiled_heads {
                    recorded.at.iter_mut().for_each(|at| *at = heads.state(*at));
                }
                Some(recorded)
            }
        }
    }

    /// The keys of the indexer of a layer for the last tokens, `[tokens, dim]`.
    pub(crate) fn of_indexer(
        reference: &Reference,
        key: RecordKey,
        n_values: usize,
        order: KeyOrder,
    ) -> Option<Self> {
        let name = name("idxk", key);
        if let KeyOrder::IndexInPairs(n) = order {
            return last_rows(reference, &name, n_values, KeyOrder::FirstPairs(n));
        }
        let (_, values) = reference.values(&name)?;
        let at = (n_values - values.len()..n_values).collect();
        Some(Self { at, values })
    }

    /// Largest absolute difference from the values of the memory.
    pub fn distance(&self, ours: &[f32]) -> f32 {
        let ours: Vec<f32> = self.at.iter().map(|&at| ours[at]).collect();
        crate::distance(&ours, &self.values)
    }
}

fn name(what: &str, key: RecordKey) -> String {
    format!("{what}_l{}_{}", key.layer, key.prompt)
}

/// Keys or values of the last tokens, `[tokens, heads, dim]`.
fn last_rows(
    reference: &Reference,
    name: &str,
    n_values: usize,
    order: KeyOrder,
) -> Option<RecordedValues> {
    let (shape, mut values) = reference.values(name)?;
    let dim = shape.last().copied()?;
    let n = match order {
        KeyOrder::Same => 0,
        KeyOrder::Pairs => dim,
        KeyOrder::FirstPairs(n) => n,
        KeyOrder::Latents | KeyOrder::LatentsInPairs | KeyOrder::IndexInPairs(_) => return None,
    };
    for head in values.chunks_exact_mut(dim) {
        let halves = head.to_vec();
        for i in 0..n / 2 {
            (head[2 * i], head[2 * i + 1]) = (halves[i], halves[i + n / 2]);
        }
    }
    let at = (n_values - values.len()..n_values).collect();
    Some(RecordedValues { at, values })
}

/// The latents of the last tokens, which the reference has as keys, or the keys that all heads
/// share, which it has as values: both are in rows of K, one behind the other.
fn latent_rows(
    reference: &Reference,
    key: RecordKey,
    n_values: usize,
    order: KeyOrder,
) -> Option<RecordedValues> {
    let order = match order {
        KeyOrder::LatentsInPairs | KeyOrder::IndexInPairs(_) => KeyOrder::Pairs,
        _ => KeyOrder::Same,
    };
    let (latents, shared) = (name("k", key), name("v", key));
    let [rank, dim] = [&latents, &shared].map(|name| Some(reference.values(name)?.0[2]));
    let (rank, width) = (rank?, rank? + dim?);
    let (columns, recorded) = match key.kind {
        RowKind::K => (
            0..rank,
            last_rows(reference, &latents, n_values, KeyOrder::Same)?,
        ),
        _ => (rank..width, last_rows(reference, &shared, n_values, order)?),
    };
    let n_rows = recorded.values.len() / columns.len();
    let rows = (0..n_rows).map(|row| n_values - (n_rows - row) * width);
    let at = rows.flat_map(|row| columns.clone().map(move |column| row + column));
    Some(RecordedValues {
        at: at.collect(),
        ..recorded
    })
}

/// Indices along axis 0 that a reference kept of a tensor.
fn kept(reference: &Reference, name: &str, n: usize) -> Vec<usize> {
    match reference.ids(&format!("{name}_rows")) {
        Some(rows) => rows.into_iter().map(|row| row as usize).collect(),
        None => (0..n).collect(),
    }
}

/// The last inputs of a convolution, `[width - 1, channels]` in the memory: the reference has one
/// more, as `[channels, width]`, and may have kept some channels only, or it has the same
/// (RecurrentGemma), of all channels. `place` is where the memory has a channel.
fn conv_state(
    reference: &Reference,
    name: &str,
    n_values: usize,
    place: impl Fn(usize) -> usize,
) -> Option<RecordedValues> {
    let (shape, values) = reference.values(name)?;
    let n_columns = shape[1];
    let is_cut = reference.ids(&format!("{name}_rows")).is_some();
    let is_same = values.len() == n_values && !is_cut;
    let further = usize::from(!is_same);
    let width = n_columns + 1 - further;
    let n_channels = n_values / (width - 1);
    let channels = kept(reference, name, shape[0]);
    let inputs = || (0..width - 1).flat_map(|k| channels.iter().zip(0..).map(move |c| (k, c)));
    Some(RecordedValues {
        at: inputs()
            .map(|(k, (&c, _))| k * n_channels + place(c))
            .collect(),
        values: inputs()
            .map(|(k, (_, row))| values[row * n_columns + k + further])
            .collect(),
    })
}

/// `ssm_state_lL_P`, of which some indices along axis 0 may have been kept only.
pub fn ssm_state(reference: &Reference, layer: LayerIdx, prompt: usize) -> Option<RecordedValues> {
    let name = format!("ssm_state_l{layer}_{prompt}");
    let (shape, values) = reference.values(&name)?;
    let len = values.len() / shape[0];
    let rows = kept(reference, &name, shape[0]);
    let at = rows.iter().flat_map(|row| row * len..(row + 1) * len);
    Some(RecordedValues {
        at: at.collect(),
        values,
    })
}

/// The same of a delta rule, `[heads, keys, values]`, which the memory has as
/// `[heads, values, keys]`.
pub fn delta_state(
    reference: &Reference,
    layer: LayerIdx,
    prompt: usize,
) -> Option<RecordedValues> {
    let name = format!("ssm_state_l{layer}_{prompt}");
    let (shape, values) = reference.values(&name)?;
    let &[_, k_dim, v_dim] = &shape[..] else {
        return None;
    };
    let transposed = |at: usize| {
        let (head, inside) = (at / (k_dim * v_dim), at % (k_dim * v_dim));
        (head * v_dim + inside % v_dim) * k_dim + inside / v_dim
    };
    let recorded = ssm_state(reference, layer, prompt)?;
    Some(RecordedValues {
        at: recorded.at.into_iter().map(transposed).collect(),
        values,
    })
}

/// The states of the heads of an mLSTM: `mlstm_c_lL_P [heads, keys, values]`, of which some heads
/// may have been kept only, `mlstm_n_lL_P [heads, keys]` and `mlstm_m_lL_P [heads, 1]`. The memory
/// has the three of one head together.
pub fn mlstm_state(
    reference: &Reference,
    layer: LayerIdx,
    prompt: usize,
) -> Option<RecordedValues> {
    let name = |part: &str| format!("mlstm_{part}_l{layer}_{prompt}");
    let (shape, c) = reference.values(&name("c"))?;
    let &[_, k_dim, v_dim] = &shape[..] else {
        return None;
    };
    let (n_shape, n) = reference.values(&name("n"))?;
    let (_, m) = reference.values(&name("m"))?;
    let n_heads = n_shape[0];
    let len = k_dim * v_dim + k_dim + 1;
    let part = |heads: Vec<usize>, first: usize, width: usize| {
        let of_head = move |head: usize| (0..width).map(move |at| head * len + first + at);
        heads.into_iter().flat_map(of_head)
    };
    let all = || (0..n_heads).collect::<Vec<_>>();
    let at = part(kept(reference, &name("c"), shape[0]), 0, k_dim * v_dim)
        .chain(part(all(), k_dim * v_dim, k_dim))
        .chain(part(all(), k_dim * v_dim + k_dim, 1));
    Some(RecordedValues {
        at: at.collect(),
        values: [c, n, m].concat(),
    })
}
