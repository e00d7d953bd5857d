//! What each layer of a model remembers, declared as data, and the storage that follows from it.
//!
//! Invariant: attention layers with the same window belong to the same part, parts are numbered in
//! the order in which their first layer occurs. Knows nothing of cells' contents or of backends.

use serde::{Deserialize, Serialize};

use crate::ids::{LayerIdx, PartIdx};
use crate::kv_type::KvType;
use crate::window::Window;

/// K and V of one attention layer: `kv_heads` heads of `k_dim` and `v_dim` values a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttentionMemory {
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Values of one key head.
    pub k_dim: usize,
    /// Values of one value head.
    pub v_dim: usize,
    /// Which earlier tokens a token sees.
    pub window: Window,
}

/// What one layer remembers of each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LayerMemory {
    /// Keys and values of every token that its window can still see.
    Attention(AttentionMemory),
    /// Nothing: a feed-forward layer, or a layer of an encoder.
    Nothing,
}

/// The memory of all layers, in the order of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerMap {
    layers: Vec<LayerMemory>,
}

/// Attention layers that share one window, and therefore one set of cells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The window of all these layers.
    pub window: Window,
    /// The layers, ascending.
    pub layers: Vec<LayerIdx>,
}

impl LayerMap {
    /// A map with these layers.
    pub fn new(layers: Vec<LayerMemory>) -> Self {
        Self { layers }
    }

    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// What each layer remembers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (LayerIdx, LayerMemory)> + '_ {
        (0u32..).map(LayerIdx).zip(self.layers.iter().copied())
    }

    /// The attention memory of `layer`, or `None` where it has none.
    pub fn attention(&self, layer: LayerIdx) -> Option<AttentionMemory> {
        match self.layers.get(layer.as_usize())? {
            LayerMemory::Attention(attention) => Some(*attention),
            LayerMemory::Nothing => None,
        }
    }

    /// The parts of the memory: one for each window that occurs.
    pub fn parts(&self) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for (layer, memory) in self.iter() {
            let LayerMemory::Attention(AttentionMemory { window, .. }) = memory else {
                continue;
            };
            match parts.iter_mut().find(|p| p.window == window) {
                Some(part) => part.layers.push(layer),
                None => parts.push(Part {
                    window,
                    layers: vec![layer],
                }),
            }
        }
        parts
    }

    /// The part that `layer` belongs to, or `None` where it remembers nothing.
    pub fn part_of(&self, layer: LayerIdx) -> Option<PartIdx> {
        let at = self
            .parts()
            .iter()
            .position(|p| p.layers.contains(&layer))?;
        u32::try_from(at).ok().map(PartIdx)
    }
}

/// Shape and type of the K or V rows of one layer: a row is `[heads, dim]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowShape {
    /// Number of heads in a row.
    pub heads: usize,
    /// Values of one head.
    pub dim: usize,
    /// How values are stored.
    pub kv_type: KvType,
}

impl RowShape {
    /// Values of one row.
    pub const fn len(&self) -> usize {
        self.heads * self.dim
    }

    /// Whether a row holds no values at all.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of one row.
    pub const fn bytes(&self) -> usize {
        self.kv_type.row_bytes(self.len())
    }
}

/// Storage of one attention layer: `n_rows` rows of K and as many of V, one for each cell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerRows {
    /// Whose rows these are.
    pub layer: LayerIdx,
    /// The part whose cells number them.
    pub part: PartIdx,
    /// Number of rows: the cells of the part, over all streams.
    pub n_rows: usize,
    /// The key rows.
    pub k: RowShape,
    /// The value rows.
    pub v: RowShape,
}

impl LayerRows {
    /// Bytes of all K and V rows of this layer.
    pub const fn bytes(&self) -> usize {
        self.n_rows * (self.k.bytes() + self.v.bytes())
    }
}

/// Storage of all layers that remember keys and values: what a backend allocates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowLayout {
    layers: Vec<LayerRows>,
}

/// A layout that cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum LayoutError {
    /// The number of cells was not given for every part.
    #[error("the layers need {wanted} parts, but cells were given for {got}")]
    WrongPartCount {
        /// Parts that the layers need.
        wanted: usize,
        /// Parts that cells were given for.
        got: usize,
    },
    /// The bytes of all rows overflow.
    #[error("{n_cells} cells of layer {layer} take more bytes than can be counted")]
    TooLarge {
        /// The layer.
        layer: LayerIdx,
        /// Its number of cells.
        n_cells: usize,
    },
}

impl RowLayout {
    /// The rows that `map` needs when part `p` has `cells[p]` cells.
    ///
    /// # Errors
    /// [`LayoutError`] where `cells` does not name every part, or sizes overflow.
    pub fn new(map: &LayerMap, cells: &[usize], kv_type: KvType) -> Result<Self, LayoutError> {
        let parts = map.parts();
        if parts.len() != cells.len() {
            return Err(LayoutError::WrongPartCount {
                wanted: parts.len(),
                got: cells.len(),
            });
        }
        let mut layers = Vec::new();
        for (layer, memory) in map.iter() {
            let (LayerMemory::Attention(a), Some(part)) = (memory, map.part_of(layer)) else {
                continue;
            };
            let n_rows = cells[part.as_usize()];
            let k = RowShape {
                heads: a.kv_heads,
                dim: a.k_dim,
                kv_type,
            };
            let v = RowShape {
                heads: a.kv_heads,
                dim: a.v_dim,
                kv_type,
            };
            let fits = n_rows
                .checked_mul(k.bytes() + v.bytes())
                .is_some_and(|b| b < 1 << 62);
            if !fits {
                return Err(LayoutError::TooLarge {
                    layer,
                    n_cells: n_rows,
                });
            }
            layers.push(LayerRows {
                layer,
                part,
                n_rows,
                k,
                v,
            });
        }
        Ok(Self { layers })
    }

    /// The layers that have rows, ascending.
    pub fn layers(&self) -> &[LayerRows] {
        &self.layers
    }

    /// The rows of `layer`, or `None` where it has none.
    pub fn layer(&self, layer: LayerIdx) -> Option<&LayerRows> {
        self.layers.iter().find(|l| l.layer == layer)
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerRows::bytes).sum()
    }
}
