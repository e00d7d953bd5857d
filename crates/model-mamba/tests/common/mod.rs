//! [`CASES`]: one row for every model with a reference.

#![allow(dead_code)] // each test file uses a part of this

use kv_core::LayerIdx;
use model_tests::checks::NOISY_TOLERANCE;
use model_tests::recorded::{RecordedValues, TiledHeads, delta_state, mlstm_state};
use model_tests::{Case, KeyOrder, Reference, Source};

pub(crate) const fn case(name: &'static str) -> Case {
    Case::recipe(name, model_mamba::register)
}

/// The trained model, without a reference of logits.
pub(crate) const STORIES: Case = Case {
    source: Source::Gguf("stories"),
    ..case("stories-mamba-f16")
};

/// The states of RWKV-4 in the reference: `stateS_P`, `[width, blocks]`, where S counts the channel
/// mix's last input, the time mix's, and numerator, denominator and maximum of the average. A block
/// has three layers of memory here: the time mix's last input, the average, the channel mix's.
fn rwkv_state(reference: &Reference, layer: LayerIdx, prompt: usize) -> Option<RecordedValues> {
    let (block, part) = (layer.as_usize() / 3, layer.as_usize() % 3);
    let states: &[usize] = [&[1][..], &[2, 3, 4], &[0]][part];
    let mut values = Vec::new();
    for state in states {
        let (shape, all) = reference.values(&format!("state{state}_{prompt}"))?;
        values.extend(all.chunks(shape[1]).map(|blocks| blocks[block]));
    }
    Some(RecordedValues {
        at: (0..values.len()).collect(),
        values,
    })
}

/// A hybrid of delta rules.
const fn delta(name: &'static str) -> Case {
    Case {
        states: delta_state,
        ..case(name)
    }
}

/// The same with value heads in GGUF's order.
const fn tiled(name: &'static str) -> Case {
    Case {
        tiled_heads: Some(TiledHeads {
            key_heads: 2,
            n_heads: 6,
            k_dim: 12,
            v_dim: 12,
        }),
        ..delta(name)
    }
}

/// The text decoder of a model that sees images, whose prompts have rows of them.
pub(crate) const IMAGES: Case = Case {
    source: Source::RecipeIn("images"),
    states: delta_state,
    tiled_heads: Some(TiledHeads {
        key_heads: 2,
        n_heads: 4,
        k_dim: 12,
        v_dim: 12,
    }),
    ..case("qwen3_5_vl_text")
};

/// Every model with a reference of logits.
pub(crate) const CASES: &[Case] = &[
    case("mamba"),
    case("mamba_untied"),
    case("falcon_mamba"),
    case("falcon_mamba_eps5"),
    case("mamba2"),
    Case {
        keys: KeyOrder::FirstPairs(8),
        ..case("bamba")
    },
    case("falcon_h1"),
    case("jamba"),
    case("nemotron_h"),
    case("nemotron_h_moe"),
    case("nemotron_h_groups"),
    case("lfm2_bias"),
    // Its keys do not rotate, but have the order of keys that do.
    Case {
        keys: KeyOrder::Pairs,
        ..case("granitemoehybrid")
    },
    Case {
        states: rwkv_state,
        ..case("rwkv4")
    },
    case("rwkv6"),
    case("rwkv7"),
    delta("qwen3_next"),
    Case {
        tolerance: NOISY_TOLERANCE,
        ..tiled("qwen3_5")
    },
    tiled("qwen3_5_moe"),
    case("recurrent_gemma"),
    Case {
        tolerance: NOISY_TOLERANCE,
        ..case("zamba2")
    },
    delta("minimax"),
    Case {
        states: mlstm_state,
        ..case("xlstm")
    },
    case("lfm2"),
    case("lfm2_moe"),
    Case {
        keys: KeyOrder::Latents,
        ..delta("kimi_linear")
    },
    Case {
        keys: KeyOrder::Latents,
        ..delta("kimi_linear_heads")
    },
];
