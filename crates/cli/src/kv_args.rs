//! The flags for the storage types of K, V and recurrent states, and the [`KvTypes`] they select.
//!
//! Knows no model: the row layout checks whether a model's rows fit the types.

use clap::{Args, ValueEnum, value_parser};
use kv_core::layers::RecentTokens;
use kv_rows::{
    KvRotation, KvType, KvTypeError, KvTypes, LayerKvTypes, OldKvTypes, StateType, kv_pair,
};

/// How K and V are stored.
#[derive(Clone, Debug, Args)]
pub(crate) struct KvArgs {
    /// Type of stored K and V: f32, f16, bf16, q8_0, q5_0, q5_1, q4_0, q4_1 or iq4_nl
    /// [default: f16; logits and kl: f32]
    #[arg(long, value_name = "TYPE")]
    pub(crate) kv_type: Option<KvType>,
    /// Type of stored K [default: as --kv-type]
    #[arg(long, alias = "cache-type-k", value_name = "TYPE")]
    pub(crate) kv_type_k: Option<KvType>,
    /// Type of stored V [default: as --kv-type]
    #[arg(long, alias = "cache-type-v", value_name = "TYPE")]
    pub(crate) kv_type_v: Option<KvType>,
    /// Type of K and V in some layers: 0-3=f16 or 5=q8_0/q4_0 (K/V); may be given several times,
    /// the last one for a layer counts
    #[arg(long, value_name = "LAYERS=TYPE", value_delimiter = ',')]
    pub(crate) kv_type_layer: Vec<LayerKvTypes>,
    /// Type of stored K and V (K/V where they differ) of old tokens: the last --kv-recent tokens
    /// keep the types above, in layers that see everything
    #[arg(long, value_name = "TYPE", value_parser = old_types)]
    pub(crate) kv_type_old: Option<OldTypes>,
    /// How many of a sequence's last tokens are not old: with --kv-type-old
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1024,
        value_parser = value_parser!(u32).range(1..), requires = "kv_type_old")]
    pub(crate) kv_recent: u32,
    /// How many of a sequence's first tokens, to which much attention goes (attention sinks), are
    /// not old either: with --kv-type-old
    #[arg(long, value_name = "N", default_value_t = 0, requires = "kv_type_old")]
    pub(crate) kv_sinks: u32,
    /// Rotate quantised KV rows (Hadamard), which spreads outliers
    #[arg(long, value_enum, value_name = "WHEN", default_value_t)]
    pub(crate) kv_rotation: RotationName,
    /// Type of stored recurrent states (delta rule, Mamba, Mamba-2, lightning attention): f32, f16
    /// or bf16; they are rounded after every token. Inputs of convolutions stay f32
    #[arg(long, value_name = "TYPE", default_value_t)]
    pub(crate) state_type: StateType,
}

/// Types of K and V.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OldTypes([KvType; 2]);

fn old_types(types: &str) -> Result<OldTypes, KvTypeError> {
    kv_pair(types).map(OldTypes)
}

/// [`KvRotation`] on the command line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum RotationName {
    /// Where the head size allows it.
    #[default]
    On,
    /// Never.
    Off,
}

impl KvArgs {
    /// The types of all layers; `default` where none is given.
    pub(crate) fn types(&self, default: KvType) -> KvTypes {
        let both = self.kv_type.unwrap_or(default);
        let of = |own: Option<KvType>| own.unwrap_or(both);
        let old = self.kv_type_old.map(|OldTypes([k, v])| OldKvTypes {
            k,
            v,
            recent: RecentTokens {
                n_last: self.kv_recent,
                n_first: self.kv_sinks,
            },
        });
        KvTypes {
            layers: self.kv_type_layer.clone(),
            old,
            state: self.state_type,
            ..KvTypes::new(of(self.kv_type_k), of(self.kv_type_v)).with_rotation(
                match self.kv_rotation {
                    RotationName::On => KvRotation::On,
                    RotationName::Off => KvRotation::Off,
                },
            )
        }
    }
}
