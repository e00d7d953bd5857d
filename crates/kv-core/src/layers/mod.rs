//! What each layer of a model remembers, declared as data.
//!
//! [`LayerMap`] is the declaration. Invariant: attention layers with the same window belong to the
//! same part, parts are numbered in the order in which their first layer occurs. Knows nothing of
//! cells' contents, of how rows are stored (`kv-rows`) or of backends.

mod ages;

use serde::{Deserialize, Serialize};

use crate::ids::{LayerIdx, PartIdx};
use crate::window::Window;

pub use ages::{RecentRows, RecentTokens};

/// K and V of one attention layer: `kv_heads` heads of `k_dim` and `v_dim` values a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct AttentionMemory {
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Values of one key head.
    pub k_dim: usize,
    /// Values of one value head.
    pub v_dim: usize,
    /// The window of the layers.
    pub window: Window,
}

/// The state of one recurrent layer: two rows of values a sequence, however long it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RecurrentMemory {
    /// Values of the last inputs of the layer's convolution, `[width - 1, channels]`, oldest first;
    /// 0 without a convolution.
    pub conv_row: usize,
    /// Values of the state itself, `[channels, d_state]`.
    pub state_row: usize,
}

/// The memory of one layer: of each token, or of all together.
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
    /// Both, in a layer with attention and recurrence in parallel.
    Both(AttentionMemory, RecurrentMemory),
    /// Keys and values whose cells a memory outside this crate gives out, which the caller brings:
    /// [`Composite`](crate::memory::Composite) refuses such a layer.
    Custom(AttentionMemory),
    /// Nothing: a feed-forward layer, or a layer of an encoder.
    Nothing,
}

/// The memory of all layers, in the order of the model.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerMap {
    layers: Vec<LayerMemory>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    recent: Vec<RecentRows>,
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
        let recent = Vec::new();
        Self { layers, recent }
    }

    /// Number of layers.
    pub fn n_layers(&self) -> usize {
        self.layers.len()
    }

    /// The memory of each layer, in order.
    pub fn iter(&self) -> impl Iterator<Item = (LayerIdx, LayerMemory)> + '_ {
        (0u32..).map(LayerIdx).zip(self.layers.iter().copied())
    }

    /// The attention memory of `layer`, or `None` where it has none of its own.
    pub fn attention(&self, layer: LayerIdx) -> Option<AttentionMemory> {
        match self.layers.get(layer.as_usize())? {
            LayerMemory::Attention(attention)
            | LayerMemory::Latent(attention)
            | LayerMemory::Custom(attention)
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

    /// The recurrent memory of `layer`, or `None` where it has none.
    pub fn recurrent(&self, layer: LayerIdx) -> Option<RecurrentMemory> {
        match self.layers.get(layer.as_usize())? {
            LayerMemory::Recurrent(recurrent) | LayerMemory::Both(_, recurrent) => Some(*recurrent),
            LayerMemory::Attention(_)
            | LayerMemory::Latent(_)
            | LayerMemory::Custom(_)
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
        let own = self.attention(layer)?.window;
        // Parts are numbered in the order in which their windows first occur.
        let mut windows: Vec<Window> = Vec::new();
        for (other, _) in self.iter() {
            match self.attention(other).map(|attention| attention.window) {
                Some(window) if window == own => break,
                Some(window) if !windows.contains(&window) => windows.push(window),
                _ => {}
            }
        }
        u32::try_from(windows.len()).ok().map(PartIdx)
    }
}
