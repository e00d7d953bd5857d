//! The order of the rows of Qwen's recurrent layers, in the files and in GGUF.
//!
//! Invariant: every row of a tensor has one place in GGUF's.

use std::ops::Range;

use model_core::hf::{HfConfig, ModelFileError, PickedRows, TensorStep};

/// Of Qwen3-Next: queries, keys and values without their gate, each together.
pub(super) const QKV: TensorStep =
    TensorStep::PickedRows(|config| Ok(Sizes::read(config)?.qkv_by_kind()));
/// The gate.
pub(super) const GATE: TensorStep =
    TensorStep::PickedRows(|config| Ok(Sizes::read(config)?.gates()));

/// Of Qwen 3.5: queries and keys as they are, and values with heads in GGUF's order.
pub(super) const QKV_TILED: TensorStep = TensorStep::PickedRows(|config| {
    let sizes = Sizes::read(config)?;
    Ok(sizes.tiled(2 * sizes.key_heads * sizes.k_dim, sizes.v_dim))
});
/// Values alone.
pub(super) const VALUES_TILED: TensorStep = TensorStep::PickedRows(|config| {
    let sizes = Sizes::read(config)?;
    Ok(sizes.tiled(0, sizes.v_dim))
});
/// One row for each value head.
pub(super) const HEADS_TILED: TensorStep =
    TensorStep::PickedRows(|config| Ok(Sizes::read(config)?.tiled(0, 1)));
/// Values as columns.
pub(super) const VALUE_COLUMNS_TILED: &[TensorStep] =
    &[TensorStep::Transposed, VALUES_TILED, TensorStep::Transposed];

/// Sizes of a recurrent layer.
#[derive(Clone, Copy)]
struct Sizes {
    key_heads: usize,
    /// Value heads that share a key head.
    shared: usize,
    k_dim: usize,
    v_dim: usize,
}

impl Sizes {
    fn read(config: &HfConfig) -> Result<Self, ModelFileError> {
        let key_heads = config.count("linear_num_key_heads")?;
        Ok(Self {
            key_heads,
            shared: config.count("linear_num_value_heads")? / key_heads,
            k_dim: config.count("linear_key_head_dim")?,
            v_dim: config.count("linear_value_head_dim")?,
        })
    }

    /// Values of the value heads of one key head.
    fn values(self) -> usize {
        self.shared * self.v_dim
    }

    /// Some rows of every key head, which each have a query, a key, values and their gate.
    fn of_key_heads(self, rows: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let n_rows = 2 * self.k_dim + 2 * self.values();
        (0..self.key_heads).map(move |head| head * n_rows + rows.start..head * n_rows + rows.end)
    }

    fn picked(self, rows: Vec<Range<usize>>) -> PickedRows {
        let n_rows = self.key_heads * (2 * self.k_dim + 2 * self.values());
        PickedRows { n_rows, rows }
    }

    fn qkv_by_kind(self) -> PickedRows {
        let (k_dim, values) = (self.k_dim, self.values());
        let kinds = [0..k_dim, k_dim..2 * k_dim, 2 * k_dim..2 * k_dim + values];
        let rows = kinds.into_iter().flat_map(|rows| self.of_key_heads(rows));
        self.picked(rows.collect())
    }

    fn gates(self) -> PickedRows {
        let first = 2 * self.k_dim + self.values();
        self.picked(self.of_key_heads(first..first + self.values()).collect())
    }

    /// The rows before `first` as they are, then value heads of `dim` rows in GGUF's order: the
    /// first of every key head, then the second of every one.
    fn tiled(self, first: usize, dim: usize) -> PickedRows {
        let Self {
            key_heads, shared, ..
        } = self;
        let order = (0..shared).flat_map(|at| (0..key_heads).map(move |k| k * shared + at));
        let heads = order.map(|head| first + head * dim..first + (head + 1) * dim);
        PickedRows {
            n_rows: first + key_heads * shared * dim,
            rows: std::iter::once(0..first).chain(heads).collect(),
        }
    }
}
