//! The graph of every architecture, for one token and for many, as snapshots that a person reads.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::{CASES, case};
use kv_core::layers::LayerMemory;
use model_tests::Case;
use model_tests::checks::{self, MANY, ONE};

/// Those that are not another with other settings.
const SNAPSHOTS: [&str; 22] = [
    "mamba",
    "falcon_mamba",
    "mamba2",
    "bamba",
    "falcon_h1",
    "jamba",
    "granitemoehybrid",
    "nemotron_h",
    "nemotron_h_moe",
    "rwkv4",
    "rwkv6",
    "rwkv7",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "lfm2",
    "lfm2_moe",
    "kimi_linear",
    "recurrent_gemma",
    "zamba2",
    "xlstm",
    "minimax",
];

#[test]
fn graphs() {
    for name in SNAPSHOTS {
        let model = Case::named(CASES, name).model();
        let [one, many] = [ONE, MANY].map(|shape| model.graph(shape).unwrap());
        checks::differ_in_rows_alone(&one, &many);
        insta::assert_snapshot!(format!("{name}-many"), many.text().to_string());
    }
}

#[test]
fn tied_and_untied_differ_in_the_output_matrix_alone() {
    let [tied, untied] = ["mamba", "mamba_untied"].map(|name| Case::named(CASES, name));
    checks::differ_in_the_output_matrix_alone(tied, untied);
}

#[test]
fn the_example_builds_and_remembers_114_kib_a_layer() {
    let model = case("mamba")
        .registry()
        .get("mamba")
        .unwrap()
        .example()
        .unwrap();
    assert!(model.graph(MANY).is_ok());
    for (_, memory) in model.layers().iter() {
        let LayerMemory::Recurrent(row) = memory else {
            panic!("{memory:?}");
        };
        assert_eq!((row.conv_row + row.state_row) * 4, 114 * 1024);
    }
}
