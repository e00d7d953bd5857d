//! RWKV-6 and 7 in GGUF files as llama.cpp's converter writes them: shares in one tensor, weights
//! that are halved with the rows, tensors that nothing reads. The logits are those of the
//! directory.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::path::Path;

use crate::common::{CASES, case};
use kv_graph::weights::{Weight, WeightSource};
use model_core::gguf::GgufWriter;
use model_tests::checks::cpu_agrees;
use model_tests::{Case, Source};

const N_BLOCKS: usize = 3;
const PARTS: [&str; 5] = ["w", "k", "v", "r", "g"];

fn weight(name: &str, shape: Vec<usize>, values: &[f32]) -> Weight {
    Weight::from_f32(name, shape, values).unwrap()
}

/// The tensors of a directory, but for those that `replaced` gives in their place.
fn file(
    name: &'static str,
    replaced: impl Fn(&dyn WeightSource, usize) -> Vec<Weight>,
    settings: &[(&str, u32)],
) -> tempfile::TempDir {
    let (weights, metadata) = case(name).open();
    let mut writer = GgufWriter::with_metadata(metadata);
    for (key, value) in settings {
        writer.set(&format!("{name}.{key}"), *value);
    }
    let replaced: Vec<Weight> = (0..N_BLOCKS).flat_map(|l| replaced(&*weights, l)).collect();
    let is_fused = |name: &str| {
        let letters = name.rsplit_once("time_mix_lerp_").map(|(_, rest)| rest);
        let part = letters.and_then(|rest| rest.strip_suffix(".weight"));
        part.is_some_and(|part| PARTS.contains(&part))
    };
    for name in weights.names() {
        if !is_fused(&name) && replaced.iter().all(|w| w.name() != name) {
            writer.add(weights.require(&name).unwrap()).unwrap();
        }
    }
    for weight in replaced {
        writer.add(weight).unwrap();
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(
        dir.path().join(format!("{name}.gguf")),
        writer.to_bytes().unwrap(),
    )
    .unwrap();
    let reference = dir
        .path()
        .join(format!("{name}.reference.safetensors.lzma"));
    let recipe = model_tests::fixture("recipes").join(name);
    std::fs::copy(recipe.join("reference.safetensors.lzma"), reference).unwrap();
    dir
}

fn agrees(name: &'static str, dir: &Path) {
    let folder: &'static str = dir.to_string_lossy().into_owned().leak();
    let case = Case {
        source: Source::Gguf(folder),
        ..*Case::named(CASES, name)
    };
    cpu_agrees(&case);
}

#[test]
fn fused_shares_and_halved_rows_give_the_same_logits() {
    let halved_every = 2;
    let replaced = |weights: &dyn WeightSource, block: usize| {
        let values = |name: &str| weights.require(&format!("blk.{block}.{name}")).unwrap();
        let shares = PARTS.map(|part| values(&format!("time_mix_lerp_{part}.weight")).to_f32());
        let dim = shares[0].len();
        let fused = weight(
            &format!("blk.{block}.time_mix_lerp_fused.weight"),
            vec![PARTS.len(), 1, 1, dim],
            &shares.concat(),
        );
        let factor = 0.5f32.powi((block / halved_every) as i32);
        let halved = ["time_mix_output.weight", "channel_mix_value.weight"].map(|name| {
            let matrix = values(name);
            let all: Vec<f32> = matrix.to_f32().iter().map(|x| x * factor).collect();
            weight(matrix.name(), matrix.shape().to_vec(), &all)
        });
        [fused].into_iter().chain(halved).collect()
    };
    let settings = [
        ("rescale_every_n_layers", halved_every as u32),
        ("attention.head_count", 0),
    ];
    let dir = file("rwkv6", replaced, &settings);
    agrees("rwkv6", dir.path());
}

#[test]
fn shares_that_the_first_block_does_not_read_may_be_there() {
    let replaced = |weights: &dyn WeightSource, block: usize| {
        let unread = |part: &str| {
            let name = format!("blk.{block}.time_mix_a{part}.weight");
            let other = weights.require(&name).unwrap();
            let name = name.replace("time_mix_a", "time_mix_v");
            weight(&name, other.shape().to_vec(), &other.to_f32())
        };
        match block {
            0 => ["0", "1", "2"].map(unread).into(),
            _ => Vec::new(),
        }
    };
    let settings = [("attention.head_count", 0), ("token_shift_count", 2)];
    let dir = file("rwkv7", replaced, &settings);
    agrees("rwkv7", dir.path());
}
