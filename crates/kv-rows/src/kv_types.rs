//! [`KvTypes`]: which [`KvType`] the K and V rows of each layer have, and which [`StateType`]
//! recurrent states, as a person chooses it.
//!
//! Invariant: a choice for single layers wins over the choice for all, a later one over an earlier
//! one. Knows nothing of the layers that there are: [`crate::RowLayout`] refuses what does
//! not fit them.

use std::fmt;
use std::str::FromStr;

use kv_core::ids::LayerIdx;
use kv_core::layers::RecentTokens;
use serde::{Deserialize, Serialize};

use crate::{HeadRotation, KvType, KvTypeError, StateType};

/// The choice to rotate quantised rows, see [`HeadRotation`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvRotation {
    /// Rows of quantised types are, where the size of their heads allows it.
    #[default]
    On,
    /// No rows are.
    Off,
}

/// The types of the K and V rows and of the recurrent states of all layers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvTypes {
    /// Type of K rows.
    pub k: KvType,
    /// Type of V rows.
    pub v: KvType,
    /// The choice to rotate quantised rows.
    #[serde(default)]
    pub rotation: KvRotation,
    /// Layers with types of their own.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub layers: Vec<LayerKvTypes>,
    /// Types of the rows of old tokens, where they have their own: the types above are then those
    /// of recent ones. In layers that see everything and have no types of their own; layers with
    /// windows have no old tokens.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub old: Option<OldKvTypes>,
    /// Type of recurrent states.
    #[serde(default)]
    pub state: StateType,
}

/// The types of the rows of tokens that are no longer recent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OldKvTypes {
    /// Type of their K rows.
    pub k: KvType,
    /// Type of their V rows.
    pub v: KvType,
    /// The tokens that are no old ones.
    pub recent: RecentTokens,
}

/// The types of some neighbouring layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerKvTypes {
    /// The first of these layers.
    pub first: LayerIdx,
    /// The last of these layers.
    pub last: LayerIdx,
    /// Type of their K rows.
    pub k: KvType,
    /// Type of their V rows.
    pub v: KvType,
}

impl KvTypes {
    /// These types for all layers; quantised rows are rotated.
    pub const fn new(k: KvType, v: KvType) -> Self {
        Self {
            k,
            v,
            rotation: KvRotation::On,
            layers: Vec::new(),
            old: None,
            state: StateType::F32,
        }
    }

    /// The same with or without rotation of quantised rows.
    pub fn with_rotation(self, rotation: KvRotation) -> Self {
        Self { rotation, ..self }
    }

    /// The same with other types for some layers.
    pub fn with_layers(mut self, layers: LayerKvTypes) -> Self {
        self.layers.push(layers);
        self
    }

    /// The same with other types for tokens that are no longer recent.
    pub fn with_old(self, old: OldKvTypes) -> Self {
        let old = Some(old);
        Self { old, ..self }
    }

    /// The same with recurrent states of another type.
    pub fn with_state(self, state: StateType) -> Self {
        Self { state, ..self }
    }

    /// The types of K and V of `layer`, of recent tokens where old ones have their own.
    pub fn of_layer(&self, layer: LayerIdx) -> [KvType; 2] {
        self.of_this_layer(layer).unwrap_or([self.k, self.v])
    }

    /// The types of K and V of old tokens in `layer`: those chosen for this layer, at any age, else
    /// those of old tokens.
    pub fn of_old(&self, layer: LayerIdx) -> [KvType; 2] {
        let old = self.old.map_or([self.k, self.v], |old| [old.k, old.v]);
        self.of_this_layer(layer).unwrap_or(old)
    }

    fn of_this_layer(&self, layer: LayerIdx) -> Option<[KvType; 2]> {
        let mut chosen = self.layers.iter().rev();
        let own = chosen.find(|own| (own.first..=own.last).contains(&layer))?;
        Some([own.k, own.v])
    }

    /// The way heads of `dim` values that are stored as `kv_type` are rotated.
    pub const fn rotation_of(&self, kv_type: KvType, dim: usize) -> HeadRotation {
        match self.rotation {
            KvRotation::On if kv_type.is_quantised() => HeadRotation::for_dim(dim),
            _ => HeadRotation::None,
        }
    }
}

impl From<KvType> for KvTypes {
    fn from(kv_type: KvType) -> Self {
        Self::new(kv_type, kv_type)
    }
}

impl From<&Self> for KvTypes {
    fn from(types: &Self) -> Self {
        types.clone()
    }
}

/// `f16`, or `q8_0/q4_0` where K and V differ, the layers that have types of their own, the types
/// of old tokens, and that of states where they are not floats.
impl fmt::Display for KvTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_pair(f, self.k, self.v)?;
        for own in &self.layers {
            write!(f, ", {own}")?;
        }
        if let Some(OldKvTypes { k, v, recent }) = self.old {
            write!(f, "; all but {recent}: ")?;
            write_pair(f, k, v)?;
        }
        match self.state {
            StateType::F32 => Ok(()),
            state => write!(f, "; states: {state}"),
        }
    }
}

impl fmt::Display for LayerKvTypes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.first, self.last) {
            (first, last) if first == last => write!(f, "{first}=")?,
            (first, last) => write!(f, "{first}-{last}=")?,
        }
        write_pair(f, self.k, self.v)
    }
}

fn write_pair(f: &mut fmt::Formatter<'_>, k: KvType, v: KvType) -> fmt::Result {
    if k == v {
        write!(f, "{k}")
    } else {
        write!(f, "{k}/{v}")
    }
}

/// `0-3=f16` and `5=q8_0/q4_0`: layers, then the type of K and V, or of K and of V.
impl FromStr for LayerKvTypes {
    type Err = KvTypeError;

    fn from_str(s: &str) -> Result<Self, Self::Err> {
        let form = || KvTypeError::Form(s.to_owned());
        let layer = |s: &str| s.parse().map(LayerIdx).map_err(|_| form());
        let (layers, types) = s.split_once('=').ok_or_else(form)?;
        let (first, last) = layers.split_once('-').unwrap_or((layers, layers));
        let (first, last) = (layer(first)?, layer(last)?);
        if first > last {
            return Err(form());
        }
        let [k, v] = kv_pair(types)?;
        Ok(Self { first, last, k, v })
    }
}

/// The types of K and V: `q8_0/q4_0`, or `q8_0` for both.
///
/// # Errors
/// [`KvTypeError`] where one of them is none.
pub fn kv_pair(types: &str) -> Result<[KvType; 2], KvTypeError> {
    let (k, v) = types.split_once('/').unwrap_or((types, types));
    Ok([k.parse()?, v.parse()?])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_choice_for_a_layer_wins() {
        let types = KvTypes::from(KvType::Q8_0)
            .with_layers("0-3=f16".parse().unwrap())
            .with_layers("3=q4_0/bf16".parse().unwrap());
        let of = |layer| types.of_layer(LayerIdx(layer));
        assert_eq!(of(0), [KvType::F16; 2]);
        assert_eq!(of(3), [KvType::Q4_0, KvType::BF16]);
        assert_eq!(of(4), [KvType::Q8_0; 2]);
        assert_eq!(types.to_string(), "q8_0, 0-3=f16, 3=q4_0/bf16");
        let [k, v] = kv_pair("q8_0/q4_0").unwrap();
        let recent = RecentTokens::last(64);
        let types = KvTypes::from(KvType::F16).with_old(OldKvTypes { k, v, recent });
        assert_eq!(types.to_string(), "f16; all but the last 64: q8_0/q4_0");
        assert_eq!(types.of_layer(LayerIdx(0)), [KvType::F16; 2]);
        assert_eq!(types.of_old(LayerIdx(0)), [k, v]);
        let types = types.with_layers("0=bf16".parse().unwrap());
        assert_eq!(types.of_old(LayerIdx(0)), [KvType::BF16; 2]);
        let types = KvTypes::from(KvType::F16).with_state(StateType::BF16);
        assert_eq!(types.to_string(), "f16; states: bf16");
    }

    #[test]
    fn only_quantised_types_are_rotated() {
        let types = KvTypes::from(KvType::Q8_0);
        let group = |types: &KvTypes, kv_type, dim| types.rotation_of(kv_type, dim).group();
        assert_eq!(group(&types, KvType::Q8_0, 64), 64);
        assert_eq!(group(&types, KvType::Q4_0, 96), 32);
        assert_eq!(group(&types, KvType::F16, 64), 1);
        let off = types.with_rotation(KvRotation::Off);
        assert_eq!(group(&off, KvType::Q8_0, 64), 1);
    }

    #[test]
    fn what_names_no_layers_and_types_is_refused() {
        for wrong in [
            "",
            "f16",
            "=f16",
            "3-1=f16",
            "a=f16",
            "-1=f16",
            "1-=f16",
            "0-1-2=f16",
        ] {
            let error = wrong.parse::<LayerKvTypes>().unwrap_err();
            assert_eq!(error, KvTypeError::Form(wrong.to_owned()));
        }
        for wrong in ["0=", "0=q9", "0=f16/", "0=f16/q8_0/f32"] {
            let error = wrong.parse::<LayerKvTypes>().unwrap_err();
            assert!(matches!(error, KvTypeError::Unknown(_)), "{wrong}: {error}");
        }
    }
}
