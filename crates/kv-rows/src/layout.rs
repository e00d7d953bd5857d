//! The storage of all layers: what follows from a [`LayerMap`], a number of cells and KV types.
//!
//! Invariant: every layer that the map gives rows or states has them here once, ascending; the
//! bytes of a layout can be counted. Allocates nothing.

use kv_core::ids::LayerIdx;
use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory};
use kv_core::memory::MemoryConfig;
use serde::{Deserialize, Serialize};

use crate::{
    HeadRotation, KvType, KvTypes, LayerRows, LayoutError, RowShape, StateRows, StateType,
    ValueRows,
};

/// Bytes of one layer that can be counted, and summed up, without overflow.
const MAX_BYTES: u64 = 1 << 62;

/// Key rows, value rows and where the values are.
type Shapes = (RowShape, RowShape, ValueRows);

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
        MemoryConfig::check_layers(map)?;
        let types = types.into();
        if types.old.is_some() && map.recent().is_empty() {
            return Err(LayoutError::NoOldRows);
        }
        let n_layers = map.n_model_layers();
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
            let (Some(attention), Some(part)) = (map.attention(layer), map.part_of(layer)) else {
                continue;
            };
            let n_rows = cells[part.as_usize()];
            let rows = TypedRows {
                layer,
                attention,
                types: types_of(map, layer, &types),
                rotation: &types,
            };
            let (k, v, values) = match memory {
                LayerMemory::Latent(_) => rows.latent()?,
                _ => rows.own()?,
            };
            let row_bytes = k.bytes() as u64 + v.bytes() as u64;
            let bytes = (n_rows as u64).checked_mul(row_bytes);
            if bytes.is_none_or(|bytes| bytes >= MAX_BYTES) {
                let n_cells = n_rows;
                return Err(LayoutError::TooLarge { layer, n_cells });
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

    /// The same, with `n_rows` states for every recurrent layer of `map`, stored
    /// as `f32`.
    ///
    /// # Errors
    /// [`LayoutError::TooLarge`] where sizes overflow.
    pub fn with_states(self, map: &LayerMap, n_rows: usize) -> Result<Self, LayoutError> {
        let mut states = Vec::new();
        for (layer, _) in map.iter() {
            let Some(row) = map.recurrent(layer) else {
                continue;
            };
            let bytes = (row.conv_row as u64)
                .checked_add(row.state_row as u64)
                .and_then(|n| n.checked_mul(size_of::<f32>() as u64))
                .and_then(|bytes| bytes.checked_mul(n_rows as u64));
            if bytes.is_none_or(|bytes| bytes >= MAX_BYTES) {
                let n_cells = n_rows;
                return Err(LayoutError::TooLarge { layer, n_cells });
            }
            states.push(StateRows {
                layer,
                n_rows,
                row,
                state_type: StateType::F32,
            });
        }
        Ok(Self { states, ..self })
    }

    /// The same with all states stored as `state_type`.
    pub fn with_state_type(mut self, state_type: StateType) -> Self {
        for states in &mut self.states {
            states.state_type = state_type;
        }
        self
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

    /// The rows and states of the layers for which `is_first` holds, and those of the others.
    pub fn partition(&self, is_first: impl Fn(LayerIdx) -> bool) -> (Self, Self) {
        let half = |first: bool| Self {
            layers: self
                .layers
                .iter()
                .copied()
                .filter(|l| is_first(l.layer) == first)
                .collect(),
            states: self
                .states
                .iter()
                .copied()
                .filter(|s| is_first(s.layer) == first)
                .collect(),
            // Where the rows are that are shared.
            shared: self
                .shared
                .iter()
                .copied()
                .filter(|(_, with)| is_first(*with) == first)
                .collect(),
        };
        (half(true), half(false))
    }

    /// Bytes of all rows: of any machine's memory, so that a plan can be made on a small one.
    pub fn bytes(&self) -> u64 {
        let rows = self.layers.iter().map(LayerRows::bytes);
        let states = self.states.iter().map(StateRows::bytes);
        // Beyond all memory anyway where it saturates.
        rows.chain(states).fold(0, u64::saturating_add)
    }
}

/// The types of K and V of a layer's own rows, by their age.
fn types_of(map: &LayerMap, layer: LayerIdx, types: &KvTypes) -> [KvType; 2] {
    let mut recent = map.recent().iter();
    match recent.find(|rows| rows.layer == layer || rows.of == layer) {
        Some(rows) if rows.of == layer => types.of_old(layer),
        Some(rows) => types.of_layer(rows.of),
        None => types.of_layer(layer),
    }
}

/// The rows of a layer and their types.
struct TypedRows<'a> {
    layer: LayerIdx,
    attention: AttentionMemory,
    /// Of K and of V.
    types: [KvType; 2],
    /// The way the types are rotated.
    rotation: &'a KvTypes,
}

impl TypedRows<'_> {
    /// Rows of K and of V, each as its type has it.
    fn own(&self) -> Result<Shapes, LayoutError> {
        let (a, [k_type, v_type]) = (self.attention, self.types);
        let shape = |dim, kv_type: KvType| RowShape {
            heads: a.kv_heads,
            dim,
            kv_type,
            rotation: self.rotation.rotation_of(kv_type, dim),
        };
        let k = whole_blocks(self.layer, "K", shape(a.k_dim, k_type))?;
        let v = whole_blocks(self.layer, "V", shape(a.v_dim, v_type))?;
        Ok((k, v, ValueRows::Own))
    }

    /// Rows of K, in which the values are.
    fn latent(&self) -> Result<Shapes, LayoutError> {
        let (a, [kv_type, _]) = (self.attention, self.types);
        let shape = |dim| RowShape {
            heads: a.kv_heads,
            dim,
            kv_type,
            // A rotation would mix values with what of a key is none.
            rotation: HeadRotation::None,
        };
        let k = whole_blocks(self.layer, "K", shape(a.k_dim))?;
        Ok((k, shape(a.v_dim), ValueRows::InKeys))
    }
}

/// The same shape, if a row of it is a whole number of blocks.
fn whole_blocks(
    layer: LayerIdx,
    kind: &'static str,
    shape: RowShape,
) -> Result<RowShape, LayoutError> {
    let RowShape {
        heads,
        dim,
        kv_type,
        ..
    } = shape;
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::OldKvTypes;
    use kv_core::ids::PartIdx;
    use kv_core::layers::{RecentTokens, RecurrentMemory};
    use kv_core::window::Window;

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
        // Inputs of convolutions stay as they are.
        let layout = layout.with_state_type(StateType::BF16);
        assert_eq!(layout.bytes(), 3 * (18 + 48) * 1024);
        let json = serde_json::to_string(&layout).unwrap();
        assert_eq!(serde_json::from_str::<RowLayout>(&json).unwrap(), layout);
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
    fn rows_that_cannot_be_counted_are_refused() {
        let map = LayerMap::new(vec![attention(64, 96)]);
        let error = RowLayout::new(&map, &[10, 20], KvType::F16).unwrap_err();
        let (wanted, got) = (1, 2);
        assert_eq!(error, LayoutError::WrongPartCount { wanted, got });
        for n_cells in [usize::MAX, usize::MAX / 1024] {
            let layer = LayerIdx(0);
            let error = RowLayout::new(&map, &[n_cells], KvType::F16).unwrap_err();
            assert_eq!(error, LayoutError::TooLarge { layer, n_cells });
        }
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
    fn types_go_by_age() {
        let map = LayerMap::new(vec![attention(64, 64), attention(64, 64)]);
        let types = KvTypes::from(KvType::F16).with_layers("1=f32".parse().unwrap());
        let [k, v] = [KvType::Q8_0, KvType::Q4_0];
        let types = types.with_old(OldKvTypes {
            k,
            v,
            recent: RecentTokens::last(8),
        });
        let refused = RowLayout::new(&map, &[10], &types).unwrap_err();
        assert_eq!(refused, LayoutError::NoOldRows);
        let map = map.with_recent(RecentTokens::last(8)).unwrap();
        let layout = RowLayout::new(&map, &[100, 20], &types).unwrap();
        let rows = layout.layers().iter();
        let rows: Vec<_> = rows.map(|l| (l.n_rows, l.k.kv_type, l.v.kv_type)).collect();
        let wanted = [
            (100, k, v),
            (100, KvType::F32, KvType::F32),
            (20, KvType::F16, KvType::F16),
            (20, KvType::F32, KvType::F32),
        ];
        assert_eq!(rows, wanted);
        let types = types.with_layers("2=f16".parse().unwrap());
        let refused = RowLayout::new(&map, &[100, 20], types).unwrap_err();
        let (layer, n_layers) = (LayerIdx(2), 2);
        assert_eq!(refused, LayoutError::NoSuchLayer { layer, n_layers });
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
            let refused = MemoryConfig::check_layers(&map).unwrap_err();
            assert!(refused.to_string().contains(wanted), "{refused}");
            let of_layout = RowLayout::new(&map, &[1], KvType::F32).unwrap_err();
            assert_eq!(of_layout, refused.into());
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
