//! [`CASES`]: one row for every model with a reference.

#![allow(dead_code)] // each test file uses a part of this

use model_tests::{Case, KeyOrder, Setting};

pub(crate) const fn case(name: &'static str) -> Case {
    Case {
        folder: concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data"),
        register: model_mamba::register,
        name,
        file: name,
        keys: KeyOrder::Same,
        settings: &[],
        vectors: &[],
    }
}

/// The directories that are tested as such.
const DIRECTORIES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/tests/data/directories");

/// Every model with a reference of logits.
pub(crate) const CASES: &[Case] = &[
    case("mamba"),
    case("mamba_untied"),
    // The same weights with two settings; the file has the same for all norms.
    Case {
        file: "falcon_mamba",
        ..case("falcon_mamba_eps5")
    },
    Case {
        settings: &[("mamba.ssm.dt_b_c_rms_epsilon", Setting::Number(1e-6))],
        ..case("falcon_mamba")
    },
    case("mamba2"),
    Case {
        keys: KeyOrder::FirstPairs(8),
        ..case("bamba")
    },
    case("falcon_h1"),
    case("jamba"),
    // Its keys do not rotate, but lie as if they did.
    Case {
        keys: KeyOrder::Pairs,
        ..case("granitemoehybrid")
    },
    Case {
        folder: DIRECTORIES,
        ..case("rwkv4")
    },
];
