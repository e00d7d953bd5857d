//! What each layer of a model remembers, declared as data, and the storage that follows from it.
//!
//! Invariant: attention layers with the same window belong to the same part, parts are numbered in
//! the order in which their first layer occurs. Knows nothing of cells' contents or of backends.

use serde::{Deserialize, Serialize};

use crate::hadamard::{HeadRotation, MAX_GROUP};
use crate::ids::{LayerIdx, PartIdx};
use crate::kv_type::KvType;
use crate::kv_types::KvTypes;
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

/// The state of one recurrent layer: two rows of `f32` values a sequence, however long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecurrentMemory {
    /// Values of the last inputs of the layer's convolution, `[width - 1, channels]`, oldest first;
    /// 0 without a convolution.
    pub conv_row: usize,
    /// Values of the state itself, `[channels, d_state]`.
    pub state_row: usize,
}

/// What one layer remembers of each token, or of all together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum LayerMemory {
    /// Keys and values of every token that its window can still see.
    Attention(AttentionMemory),
    /// One state of everything that the sequence has taken in.
    Recurrent(RecurrentMemory),
    /// Keys of every token, of which the first `v_dim` values of a head are its values too, so that
    /// they are stored once: the latents of multi-head latent attention (DeepSeek-V2,
    /// arXiv 2405.04434).
    Latent(AttentionMemory),
    /// Nothing of its own: the layer attends over the rows of this one, which is an earlier layer
    /// with rows of its own (the last layers of Gemma 3n).
    SharedWith(LayerIdx),
    /// Both, in a layer where attention and recurrence stand side by side.
    Both(AttentionMemory, RecurrentMemory),
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

    /// The attention memory of `layer`, or `None` where it has none of its own.
    pub fn attention(&self, layer: LayerIdx) -> Option<AttentionMemory> {
        match self.layers.get(layer.as_usize())? {
            LayerMemory::Attention(attention)
            | LayerMemory::Latent(attention)
            | LayerMemory::Both(attention, _) => Some(*attention),
            LayerMemory::SharedWith(_) | LayerMemory::Recurrent(_) | LayerMemory::Nothing => None,
        }
    }

    /// The layer over whose rows `layer` attends: itself, or the one that it shares them with.
    pub fn attends_over(&self, layer: LayerIdx) -> LayerIdx {
        match self.layers.get(layer.as_usize()) {
            Some(LayerMemory::SharedWith(with)) => *with,
            _ => layer,
        }
    }

    /// Whether layers that say something of other layers or of their own widths make sense.
    ///
    /// # Errors
    /// [`LayerMapError`], for the first that does not.
    pub fn check(&self) -> Result<(), LayerMapError> {
        for (layer, memory) in self.iter() {
            match memory {
                LayerMemory::SharedWith(with) if with >= layer => {
                    return Err(LayerMapError::SharedWithLater { layer, with });
                }
                LayerMemory::SharedWith(with) if self.attention(with).is_none() => {
                    return Err(LayerMapError::NothingToShare { layer, with });
                }
                LayerMemory::Latent(AttentionMemory { k_dim, v_dim, .. }) if v_dim > k_dim => {
                    return Err(LayerMapError::LatentTooNarrow {
                        layer,
                        k_dim,
                        v_dim,
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The recurrent memory of `layer`, or `None` where it has none.
    pub fn recurrent(&self, layer: LayerIdx) -> Option<RecurrentMemory> {
        match self.layers.get(layer.as_usize())? {
            LayerMemory::Recurrent(recurrent) | LayerMemory::Both(_, recurrent) => Some(*recurrent),
            LayerMemory::Attention(_)
            | LayerMemory::Latent(_)
            | LayerMemory::SharedWith(_)
            | LayerMemory::Nothing => None,
        }
    }

    /// The parts of the memory: one for each window that occurs.
    pub fn parts(&self) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        for (layer, _) in self.iter() {
            let Some(AttentionMemory { window, .. }) = self.attention(layer) else {
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

    /// The part over which `layer` attends, or `None` where it does not.
    pub fn part_of(&self, layer: LayerIdx) -> Option<PartIdx> {
        let layer = self.attends_over(layer);
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
    /// How heads are rotated before that.
    #[serde(default, skip_serializing_if = "is_unrotated")]
    pub rotation: HeadRotation,
}

/// The blocks that hold one head of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadBlocks {
    /// Bytes of the row before them.
    pub first_byte: usize,
    /// Their bytes.
    pub n_bytes: usize,
    /// Their values: more than the head's where it begins or ends inside a block.
    pub n_values: usize,
    /// Values of other heads before the head's.
    pub skip: usize,
}

const fn is_unrotated(rotation: &HeadRotation) -> bool {
    rotation.is_none()
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

    /// The blocks of a row that hold its `head`-th head: its own where heads are whole blocks.
    pub const fn head(&self, head: usize) -> HeadBlocks {
        let (len, bytes) = (self.kv_type.block_len(), self.kv_type.row_bytes(1));
        let (first, last) = (head * self.dim / len, ((head + 1) * self.dim).div_ceil(len));
        HeadBlocks {
            first_byte: first * bytes,
            n_bytes: (last - first) * bytes,
            n_values: (last - first) * len,
            skip: head * self.dim - first * len,
        }
    }

    /// Stores `values`, `[heads, dim]`, as one row: what every backend must write.
    pub fn encode(&self, values: &[f32], row: &mut [u8]) {
        let group = self.rotation.group();
        if self.rotation.is_none() || group > MAX_GROUP {
            return self.kv_type.encode_row(values, row);
        }
        let mut rotated = [0.0; MAX_GROUP];
        let rotated = &mut rotated[..group];
        let groups = row.chunks_exact_mut(self.kv_type.row_bytes(group));
        for (values, row) in values.chunks_exact(group).zip(groups) {
            rotated.copy_from_slice(values);
            self.rotation.apply(rotated);
            self.kv_type.encode_row(rotated, row);
        }
    }

    /// Reads one row into `values`, `[heads, dim]`: the mirror of [`RowShape::encode`].
    pub fn decode(&self, row: &[u8], values: &mut [f32]) {
        self.kv_type.decode_row(row, values);
        self.rotation.apply(values);
    }
}

/// Layers that cannot be as they are declared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerMapError {
    /// Rows of a layer that has not been computed yet.
    #[error("layer {layer} shares the rows of layer {with}, which does not come before it")]
    SharedWithLater {
        /// The layer.
        layer: LayerIdx,
        /// The layer whose rows it would share.
        with: LayerIdx,
    },
    /// A layer without rows of its own.
    #[error("layer {layer} shares the rows of layer {with}, which has none of its own")]
    NothingToShare {
        /// The layer.
        layer: LayerIdx,
        /// The layer whose rows it would share.
        with: LayerIdx,
    },
    /// Keys that are too narrow to hold the values.
    #[error("layer {layer}: {v_dim} values of a head cannot be among the {k_dim} of its key")]
    LatentTooNarrow {
        /// The layer.
        layer: LayerIdx,
        /// Values of a key head.
        k_dim: usize,
        /// Values of a value head.
        v_dim: usize,
    },
}

/// Where the values of an attention layer are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ValueRows {
    /// In rows of their own.
    #[default]
    Own,
    /// In the key rows: the first values of each head.
    InKeys,
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
    /// The value rows, as attention sees them.
    pub v: RowShape,
    /// Where those are.
    #[serde(default, skip_serializing_if = "are_own")]
    pub values: ValueRows,
}

fn are_own(values: &ValueRows) -> bool {
    *values == ValueRows::Own
}

impl LayerRows {
    /// The value rows that are stored; `None` where values are in the key rows.
    pub const fn stored_v(&self) -> Option<RowShape> {
        match self.values {
            ValueRows::Own => Some(self.v),
            ValueRows::InKeys => None,
        }
    }

    /// Bytes of all K and V rows of this layer.
    pub const fn bytes(&self) -> usize {
        let v = match self.stored_v() {
            Some(v) => v.bytes(),
            None => 0,
        };
        self.n_rows * (self.k.bytes() + v)
    }
}

/// Storage of one recurrent layer: `n_rows` states, always `f32`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StateRows {
    /// Whose states these are.
    pub layer: LayerIdx,
    /// Number of states: all that the sequences are at, their snapshots, and room for new ones.
    pub n_rows: usize,
    /// What one state consists of.
    pub row: RecurrentMemory,
}

impl StateRows {
    /// Bytes of all states of this layer.
    pub const fn bytes(&self) -> usize {
        self.n_rows * (self.row.conv_row + self.row.state_row) * size_of::<f32>()
    }
}

/// Storage of all layers that remember something: what a backend allocates.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowLayout {
    layers: Vec<LayerRows>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    states: Vec<StateRows>,
    /// Layers without rows, with those whose rows they attend over.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    shared: Vec<(LayerIdx, LayerIdx)>,
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
    /// Layers that cannot be as they are declared.
    #[error(transparent)]
    Layers(#[from] LayerMapError),
    /// A row is no whole number of blocks.
    #[error(
        "layer {layer}: {kind} rows of {heads} heads of {dim} values cannot be stored as {kv_type}, \
         whose blocks hold {block_len} values", block_len = .kv_type.block_len()
    )]
    PartialBlocks {
        /// The layer.
        layer: LayerIdx,
        /// `"K"` or `"V"`.
        kind: &'static str,
        /// Heads of a row.
        heads: usize,
        /// Values of a head.
        dim: usize,
        /// How they were to be stored.
        kv_type: KvType,
    },
    /// Types were chosen for a layer that the model does not have.
    #[error("types were chosen for layer {layer}, but the model has {n_layers} layers")]
    NoSuchLayer {
        /// The last layer that was named.
        layer: LayerIdx,
        /// Layers there are.
        n_layers: usize,
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
    /// The rows that `map` needs when part `p` has `cells[p]` cells. `types` is a [`KvType`] for
    /// all rows, or [`KvTypes`].
    ///
    /// # Errors
    /// [`LayoutError`] where `cells` does not name every part, rows are no whole blocks of the
    /// types chosen, types are chosen for layers that are not there, layers cannot be as declared,
    /// or sizes overflow.
    pub fn new(
        map: &LayerMap,
        cells: &[usize],
        types: impl Into<KvTypes>,
    ) -> Result<Self, LayoutError> {
        map.check()?;
        let types = types.into();
        let n_layers = map.n_layers();
        let mut named = types.layers.iter().map(|own| own.last);
        if let Some(layer) = named.find(|last| last.as_usize() >= n_layers) {
            return Err(LayoutError::NoSuchLayer { layer, n_layers });
        }
        let parts = map.parts();
        if parts.len() != cells.len() {
            return Err(LayoutError::WrongPartCount {
                wanted: parts.len(),
                got: cells.len(),
            });
        }
        let mut layers = Vec::new();
        for (layer, memory) in map.iter() {
            let (Some(a), Some(part)) = (map.attention(layer), map.part_of(layer)) else {
                continue;
            };
            let n_rows = cells[part.as_usize()];
            let [k_type, v_type] = types.of_layer(layer);
            let shape = |kind: &'static str, dim: usize, kv_type: KvType| {
                let heads = a.kv_heads;
                let rotation = types.rotation_of(kv_type, dim);
                let shape = RowShape {
                    heads,
                    dim,
                    kv_type,
                    rotation,
                };
                if shape.len().is_multiple_of(kv_type.block_len()) {
                    return Ok(shape);
                }
                Err(LayoutError::PartialBlocks {
                    layer,
                    kind,
                    heads,
                    dim,
                    kv_type,
                })
            };
            let k = shape("K", a.k_dim, k_type)?;
            let (k, v, values) = match memory {
                LayerMemory::Latent(_) => {
                    // A rotation would mix values with what of a key is none.
                    let rotation = HeadRotation::None;
                    let k = RowShape { rotation, ..k };
                    let v = RowShape { dim: a.v_dim, ..k };
                    (k, v, ValueRows::InKeys)
                }
                _ => (k, shape("V", a.v_dim, v_type)?, ValueRows::Own),
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
                values,
            });
        }
        let shared = map
            .iter()
            .map(|(layer, _)| (layer, map.attends_over(layer)));
        Ok(Self {
            layers,
            states: Vec::new(),
            shared: shared.filter(|(layer, with)| layer != with).collect(),
        })
    }

    /// The same, with `n_rows` states for every recurrent layer of `map`.
    ///
    /// # Errors
    /// [`LayoutError::TooLarge`] where sizes overflow.
    pub fn with_states(self, map: &LayerMap, n_rows: usize) -> Result<Self, LayoutError> {
        let mut states = Vec::new();
        for (layer, _) in map.iter() {
            let Some(row) = map.recurrent(layer) else {
                continue;
            };
            let bytes = row
                .conv_row
                .checked_add(row.state_row)
                .and_then(|n| n.checked_mul(size_of::<f32>())?.checked_mul(n_rows));
            if bytes.is_none_or(|bytes| bytes >= 1 << 62) {
                let n_cells = n_rows;
                return Err(LayoutError::TooLarge { layer, n_cells });
            }
            states.push(StateRows { layer, n_rows, row });
        }
        Ok(Self { states, ..self })
    }

    /// The recurrent layers that have states, ascending.
    pub fn states(&self) -> &[StateRows] {
        &self.states
    }

    /// The states of `layer`, or `None` where it has none.
    pub fn state(&self, layer: LayerIdx) -> Option<&StateRows> {
        self.states.iter().find(|s| s.layer == layer)
    }

    /// The layers that have K and V rows, ascending.
    pub fn layers(&self) -> &[LayerRows] {
        &self.layers
    }

    /// The rows over which `layer` attends, its own or another layer's, with their number in
    /// [`RowLayout::layers`]; `None` where there are none.
    pub fn attended(&self, layer: LayerIdx) -> Option<(usize, &LayerRows)> {
        let shared = self.shared.iter().find(|(own, _)| *own == layer);
        let with = shared.map_or(layer, |(_, with)| *with);
        self.layers
            .iter()
            .enumerate()
            .find(|(_, l)| l.layer == with)
    }

    /// The K and V rows of `layer`, or `None` where it has none.
    pub fn layer(&self, layer: LayerIdx) -> Option<&LayerRows> {
        self.layers.iter().find(|l| l.layer == layer)
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        let rows = self.layers.iter().map(LayerRows::bytes);
        let states = self.states.iter().map(StateRows::bytes);
        // Beyond all memory anyway where it saturates.
        rows.chain(states).fold(0, usize::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r2_states_of_a_mamba_130m_layer_take_114_kib_a_sequence() {
        let (width, d_inner, d_state) = (4, 1536, 16);
        let row = RecurrentMemory {
            conv_row: (width - 1) * d_inner,
            state_row: d_inner * d_state,
        };
        let map = LayerMap::new(vec![LayerMemory::Nothing, LayerMemory::Recurrent(row)]);
        assert!(map.parts().is_empty());
        let layout = RowLayout::new(&map, &[], KvType::F16).unwrap();
        let layout = layout.with_states(&map, 3).unwrap();
        assert_eq!(layout.layers(), []);
        assert_eq!(layout.state(LayerIdx(0)), None);
        assert_eq!(layout.state(LayerIdx(1)).unwrap().row, row);
        assert_eq!(layout.bytes(), 3 * 114 * 1024);
    }

    fn attention(k_dim: usize, v_dim: usize) -> LayerMemory {
        LayerMemory::Attention(AttentionMemory {
            kv_heads: 2,
            k_dim,
            v_dim,
            window: Window::Full,
        })
    }

    #[test]
    fn types_go_by_layer_and_kind() {
        let map = LayerMap::new(vec![attention(64, 96), attention(64, 96)]);
        let types = KvTypes::new(KvType::Q8_0, KvType::Q4_1).with_layers("1=f16".parse().unwrap());
        let layout = RowLayout::new(&map, &[10], &types).unwrap();
        let [first, second] = layout.layers() else {
            panic!("two layers")
        };
        assert_eq!([first.k.bytes(), first.v.bytes()], [2 * 2 * 34, 2 * 3 * 20]);
        assert_eq!(
            [first.k.rotation.group(), first.v.rotation.group()],
            [64, 32]
        );
        assert_eq!(
            [second.k.bytes(), second.v.bytes()],
            [2 * 64 * 2, 2 * 96 * 2]
        );
        assert!(second.k.rotation.is_none() && second.v.rotation.is_none());
        assert_eq!(layout.bytes(), 10 * (136 + 120 + 256 + 384));
        let json = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<RowLayout>(&json).unwrap(), layout);
    }

    #[test]
    fn heads_begin_inside_blocks_where_rows_are_whole_blocks() {
        let shape = |heads, dim, kv_type| RowShape {
            heads,
            dim,
            kv_type,
            rotation: HeadRotation::None,
        };
        let blocks = |first_byte, n_bytes, n_values, skip| HeadBlocks {
            first_byte,
            n_bytes,
            n_values,
            skip,
        };
        let small = shape(4, 16, KvType::Q8_0);
        let heads = [0, 1, 2, 3].map(|h| small.head(h));
        let wanted = [(0, 0), (0, 16), (34, 0), (34, 16)].map(|(b, s)| blocks(b, 34, 32, s));
        assert_eq!(heads, wanted);
        assert_eq!(shape(2, 80, KvType::Q4_0).head(1), blocks(36, 54, 96, 16));
        assert_eq!(shape(2, 64, KvType::Q5_1).head(1), blocks(48, 48, 64, 0));
        assert_eq!(shape(3, 5, KvType::F16).head(2), blocks(20, 10, 5, 0));
    }

    #[test]
    fn rows_that_are_no_whole_blocks_are_refused() {
        let map = LayerMap::new(vec![attention(64, 64), attention(16, 40)]);
        let refused = RowLayout::new(&map, &[10], KvType::Q5_0).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "layer 1: V rows of 2 heads of 40 values cannot be stored as q5_0, whose blocks hold 32 \
             values"
        );
        let types = KvTypes::from(KvType::F16).with_layers("1-2=f32".parse().unwrap());
        let refused = RowLayout::new(&map, &[10], types).unwrap_err();
        let (layer, n_layers) = (LayerIdx(2), 2);
        assert_eq!(refused, LayoutError::NoSuchLayer { layer, n_layers });
    }

    /// A rotated row gives back what was stored, as well as its type can, and heads do not mix.
    #[test]
    fn rotated_rows_decode_to_what_they_were() {
        let map = LayerMap::new(vec![attention(96, 64)]);
        let mut values: Vec<f32> = (0..192).map(|i| (i as f32 * 0.37).sin()).collect();
        values[7] = 20.0;
        for kv_type in KvType::ALL {
            let layout = RowLayout::new(&map, &[1], kv_type).unwrap();
            let shape = layout.layers()[0].k;
            let mut row = vec![0; shape.bytes()];
            shape.encode(&values, &mut row);
            let mut back = vec![f32::NAN; 192];
            shape.decode(&row, &mut back);
            let off = |range: std::ops::Range<usize>| {
                let pairs = values[range.clone()].iter().zip(&back[range]);
                pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
            };
            // The outlier costs its own group of 32 accuracy, not the second head.
            let (first, second) = match kv_type {
                KvType::F32 => (0.0, 0.0),
                KvType::F16 | KvType::BF16 => (0.05, 0.005),
                KvType::Q8_0 => (0.05, 0.02),
                _ => (2.0, 0.5),
            };
            assert!(off(0..32) <= first, "{kv_type}: {}", off(0..32));
            assert!(off(96..192) <= second, "{kv_type}: {}", off(96..192));
        }
    }

    #[test]
    fn states_that_cannot_be_counted_are_refused() {
        let (conv_row, state_row) = (usize::MAX, 1);
        let row = RecurrentMemory {
            conv_row,
            state_row,
        };
        let map = LayerMap::new(vec![LayerMemory::Recurrent(row)]);
        let refused = RowLayout::default().with_states(&map, 2).unwrap_err();
        let (layer, n_cells) = (LayerIdx(0), 2);
        assert_eq!(refused, LayoutError::TooLarge { layer, n_cells });
    }

    #[test]
    fn shared_layers_have_no_rows_and_latents_have_one_kind() {
        let attention = AttentionMemory {
            kv_heads: 1,
            k_dim: 12,
            v_dim: 8,
            window: Window::Full,
        };
        let sliding = AttentionMemory {
            window: Window::Sliding(4),
            ..attention
        };
        let map = LayerMap::new(vec![
            LayerMemory::Latent(attention),
            LayerMemory::Attention(sliding),
            LayerMemory::SharedWith(LayerIdx(0)),
            LayerMemory::SharedWith(LayerIdx(1)),
        ]);
        assert_eq!(map.parts()[1].layers, [LayerIdx(1)]);
        assert_eq!(map.part_of(LayerIdx(3)), Some(PartIdx(1)));
        assert_eq!(map.attention(LayerIdx(2)), None);
        let layout = RowLayout::new(&map, &[5, 3], KvType::F32).unwrap();
        assert_eq!(layout.layers().len(), 2);
        assert_eq!(layout.layer(LayerIdx(3)), None);
        assert_eq!(layout.attended(LayerIdx(3)), layout.attended(LayerIdx(1)));
        let (at, rows) = layout.attended(LayerIdx(2)).unwrap();
        assert_eq!((at, rows.n_rows, rows.stored_v()), (0, 5, None));
        assert_eq!(layout.bytes(), 5 * 12 * 4 + 3 * 20 * 4);
        let json = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<RowLayout>(&json).unwrap(), layout);
    }

    #[test]
    fn layers_that_cannot_share_are_refused() {
        let latent = |k_dim, v_dim| {
            LayerMemory::Latent(AttentionMemory {
                kv_heads: 1,
                k_dim,
                v_dim,
                window: Window::Full,
            })
        };
        let with = |layer| LayerMemory::SharedWith(LayerIdx(layer));
        let cases = [
            (vec![with(0)], "layer 0 shares the rows of layer 0, which"),
            (vec![with(1), latent(4, 4)], "does not come before it"),
            (vec![LayerMemory::Nothing, with(0)], "has none of its own"),
            (vec![latent(4, 4), with(0), with(1)], "has none of its own"),
            (
                vec![latent(4, 5)],
                "5 values of a head cannot be among the 4",
            ),
        ];
        for (layers, wanted) in cases {
            let map = LayerMap::new(layers);
            let refused = map.check().unwrap_err();
            assert!(refused.to_string().contains(wanted), "{refused}");
            let of_layout = RowLayout::new(&map, &[1], KvType::F32).unwrap_err();
            assert_eq!(of_layout, LayoutError::Layers(refused));
        }
    }

    #[test]
    fn a_layer_with_both_has_rows_and_states() {
        let attention = AttentionMemory {
            kv_heads: 2,
            k_dim: 4,
            v_dim: 4,
            window: Window::Full,
        };
        let row = RecurrentMemory {
            conv_row: 6,
            state_row: 8,
        };
        let map = LayerMap::new(vec![LayerMemory::Both(attention, row); 2]);
        assert_eq!(map.parts().len(), 1);
        assert_eq!(map.parts()[0].layers, [LayerIdx(0), LayerIdx(1)]);
        let layout = RowLayout::new(&map, &[5], KvType::F16).unwrap();
        let layout = layout.with_states(&map, 3).unwrap();
        let layer = LayerIdx(1);
        assert_eq!(map.attention(layer), Some(attention));
        assert_eq!(map.recurrent(layer), Some(row));
        assert_eq!(layout.layer(layer).unwrap().n_rows, 5);
        assert_eq!(layout.state(layer).unwrap().n_rows, 3);
        assert_eq!(layout.bytes(), 2 * (5 * 2 * 8 * 2 + 3 * 14 * 4));
    }
}
