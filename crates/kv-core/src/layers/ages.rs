//! Rows by age: layers that see everything keep the rows of recent tokens apart from those of all,
//! so that each can have types of its own.
//!
//! Such a layer stores every token twice: in its own rows, over which tokens attend that came `n`
//! or more positions later, and in the rows of a further layer, whose window slides over the last
//! `n`. The first tokens, on which much attention falls (attention sinks: Xiao et al., arXiv
//! 2309.17453), can stay among the rows of the further layer for good. Which of the two a token
//! reads depends on positions alone, and so not on what else is in a batch. Invariant: further
//! layers are behind those of the model. Knows no types.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{LayerMap, LayerMemory};
use crate::ids::LayerIdx;
use crate::window::Window;

/// A layer of a model and the further one with the rows of its recent tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentRows {
    /// The layer of the model. Its own rows are read of tokens that are no longer recent.
    pub of: LayerIdx,
    /// The further layer.
    pub layer: LayerIdx,
}

/// The tokens whose rows are no old ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecentTokens {
    /// The last ones, the token itself included.
    pub n_last: u32,
    /// The first ones of each sequence, by position.
    #[serde(default)]
    pub n_first: u32,
}

impl RecentTokens {
    /// The last `n`.
    pub const fn last(n: u32) -> Self {
        Self {
            n_last: n,
            n_first: 0,
        }
    }

    /// The window that shows them, together with [`Window::first`]. Without first ones it is one
    /// that models have, too, which then share a part.
    pub const fn window(self) -> Window {
        let Self { n_last, n_first } = self;
        match n_first {
            0 => Window::Sliding(n_last),
            first => Window::Ends {
                first,
                last: n_last,
            },
        }
    }

    /// The tokens for which a window is.
    pub const fn through(window: Window) -> Option<Self> {
        match window {
            Window::Sliding(n) => Some(Self::last(n)),
            Window::Ends { first, last } => Some(Self {
                n_last: last,
                n_first: first,
            }),
            _ => None,
        }
    }
}

impl fmt::Display for RecentTokens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self { n_last, n_first: 0 } => write!(f, "the last {n_last}"),
            Self { n_last, n_first } => write!(f, "the first {n_first} and the last {n_last}"),
        }
    }
}

impl LayerMap {
    /// The same layers, where those that see everything keep the rows of these tokens apart; `None`
    /// where there are no such layers, or a layer needs a memory of its own kind.
    pub fn with_recent(&self, tokens: RecentTokens) -> Option<Self> {
        let is_custom = |memory: &LayerMemory| matches!(memory, LayerMemory::Custom(_));
        if self.layers.iter().any(is_custom) {
            return None;
        }
        let (mut layers, mut further, mut recent) = (Vec::new(), Vec::new(), Vec::new());
        for (of, mut memory) in self.iter() {
            if let Some(rows) = split_by_age(&mut memory, tokens) {
                let number = self.layers.len() + further.len();
                let layer = LayerIdx(u32::try_from(number).ok()?);
                recent.push(RecentRows { of, layer });
                further.push(rows);
            }
            layers.push(memory);
        }
        layers.append(&mut further);
        (!recent.is_empty()).then_some(Self { layers, recent })
    }

    /// The layers whose recent rows are kept apart.
    pub fn recent(&self) -> &[RecentRows] {
        &self.recent
    }

    /// The layer with the recent rows of `layer`, or of the layer whose rows it shares.
    pub fn recent_of(&self, layer: LayerIdx) -> Option<LayerIdx> {
        let of = self.attends_over(layer);
        let found = self.recent.iter().find(|recent| recent.of == of);
        found.map(|recent| recent.layer)
    }

    /// Number of layers of the model: without those that have recent rows of others.
    pub fn n_model_layers(&self) -> usize {
        self.layers.len() - self.recent.len()
    }
}

/// Leaves a layer that sees everything only what is old, and returns the rest.
fn split_by_age(memory: &mut LayerMemory, tokens: RecentTokens) -> Option<LayerMemory> {
    let (LayerMemory::Attention(old) | LayerMemory::Latent(old) | LayerMemory::Both(old, _)) =
        memory
    else {
        return None;
    };
    if old.window != Window::Full {
        return None;
    }
    let mut recent = *old;
    recent.window = tokens.window();
    old.window = Window::Older {
        by: tokens.n_last,
        from: tokens.n_first,
    };
    Some(match memory {
        LayerMemory::Latent(_) => LayerMemory::Latent(recent),
        _ => LayerMemory::Attention(recent),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::PartIdx;
    use crate::layers::{AttentionMemory, RecurrentMemory};

    #[test]
    fn layers_that_see_everything_get_a_layer_of_recent_rows() {
        let own = AttentionMemory {
            kv_heads: 2,
            k_dim: 8,
            v_dim: 4,
            window: Window::Full,
        };
        let through = |window| AttentionMemory { window, ..own };
        let state = RecurrentMemory {
            conv_row: 3,
            state_row: 5,
        };
        let map = LayerMap::new(vec![
            LayerMemory::Attention(through(Window::Sliding(4))),
            LayerMemory::Both(own, state),
            LayerMemory::Nothing,
            LayerMemory::Latent(own),
            LayerMemory::SharedWith(LayerIdx(3)),
        ]);
        let aged = map.with_recent(RecentTokens::last(7)).unwrap();
        let (old, recent) = (
            through(Window::Older { by: 7, from: 0 }),
            through(Window::Sliding(7)),
        );
        let layers: Vec<LayerMemory> = aged.iter().map(|(_, memory)| memory).collect();
        assert_eq!(layers[1], LayerMemory::Both(old, state));
        assert_eq!(layers[3], LayerMemory::Latent(old));
        let further = [LayerMemory::Attention(recent), LayerMemory::Latent(recent)];
        assert_eq!(layers[5..], further);
        assert_eq!((aged.n_layers(), aged.n_model_layers()), (7, 5));
        let of = |layer| aged.recent_of(LayerIdx(layer));
        assert_eq!([of(1), of(3)], [Some(LayerIdx(5)), Some(LayerIdx(6))]);
        assert_eq!([of(4), of(0)], [Some(LayerIdx(6)), None]);
        assert_eq!(aged.part_of(LayerIdx(3)), map.part_of(LayerIdx(3)));
        assert_eq!(aged.part_of(LayerIdx(6)), Some(PartIdx(2)));
        let as_wide = map.with_recent(RecentTokens::last(4)).unwrap();
        assert_eq!(as_wide.part_of(LayerIdx(6)), Some(PartIdx(0)));
        assert_eq!(aged.with_recent(RecentTokens::last(7)), None);
        let with_first = RecentTokens {
            n_last: 7,
            n_first: 4,
        };
        let ends = map.with_recent(with_first).unwrap();
        let window = |layer| ends.attention(LayerIdx(layer)).unwrap().window;
        assert_eq!(window(1), Window::Older { by: 7, from: 4 });
        assert_eq!(window(5), Window::Ends { first: 4, last: 7 });
        let custom = LayerMap::new(vec![LayerMemory::Attention(own), LayerMemory::Custom(own)]);
        assert_eq!(custom.with_recent(RecentTokens::last(7)), None);
    }
}
