//! Vectors of decoders: their rows times the output matrix are the logits of an independent
//! implementation, pooled and in batches as alone.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::Path;

use cellar::engine::{Normalization, Pooling};
use cellar::kv_backend::BoxedBackend;
use cellar::kv_block::dequantize;
use cellar::model_core::model_file::OpenModel;
use cellar::{
    BackendKind, BackendOptions, Embedder, EmbedderConfig, TokenId, architectures, embedder,
};
use model_tests::{Recipe, distance};

/// Models whose logits are final rows times a matrix and nothing else; of every kind of memory.
const RECIPES: &[&str] = &[
    "llama_gqa_tied",
    "mistral_swa8",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma3_iswa8",
    "llama4_chunk16",
    "phi3",
    "olmo2",
    "smollm3",
    "starcoder2",
    "gpt_oss_swa8",
    "mamba",
    "mamba2",
    "jamba",
    "rwkv4",
    "rwkv7",
];

fn expanded(recipe: &Recipe) -> (tempfile::TempDir, OpenModel) {
    let dir = tempfile::tempdir().unwrap();
    recipe.expand(dir.path());
    let file = OpenModel::open(dir.path(), &architectures()).unwrap();
    (dir, file)
}

fn embedder_of(
    file: &OpenModel,
    kind: BackendKind,
    config: EmbedderConfig,
) -> Embedder<BoxedBackend> {
    let backend = BackendOptions {
        kind: Some(kind),
        ..BackendOptions::default()
    };
    embedder(file, backend, &config).unwrap()
}

fn as_pooled(pooling: Pooling) -> EmbedderConfig {
    EmbedderConfig {
        pooling: Some(pooling),
        normalization: Some(Normalization::None),
        ..EmbedderConfig::default()
    }
}

/// The output matrix, `[vocab, dim]`.
fn output_matrix(file: &OpenModel) -> Vec<f32> {
    let weights = file.weights();
    let name = ["output.weight", "token_embd.weight"];
    let weight = name.iter().find_map(|name| weights.get(name)).unwrap();
    let n_values = weight.shape().iter().product();
    let mut values = vec![0.0; n_values];
    dequantize(weight.format(), weight.bytes(), &mut values);
    values
}

fn logits(matrix: &[f32], row: &[f32]) -> Vec<f32> {
    let product = |weights: &[f32]| -> f64 {
        let pairs = weights.iter().zip(row);
        pairs.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
    };
    matrix
        .chunks_exact(row.len())
        .map(|weights| product(weights) as f32)
        .collect()
}

fn tokens(ids: &[u32]) -> Vec<TokenId> {
    ids.iter().copied().map(TokenId).collect()
}

#[test]
fn rows_of_last_tokens_give_the_logits_of_the_reference() {
    for name in RECIPES {
        let recipe = Recipe::named(name);
        let (_dir, file) = expanded(&recipe);
        let matrix = output_matrix(&file);
        let reference = recipe.reference();
        for kind in [BackendKind::Cpu, BackendKind::Candle] {
            let mut embedder = embedder_of(&file, kind, as_pooled(Pooling::Last));
            for (prompt, ids) in reference.prompts().iter().enumerate() {
                let wanted = reference.logits(prompt);
                let vocab = wanted.values.len() / wanted.positions.len();
                let prefixes: Vec<_> = wanted
                    .positions
                    .iter()
                    .map(|&position| tokens(&ids[..=position]))
                    .collect();
                let rows = embedder.embed_tokens(&prefixes).unwrap();
                for (row, wanted) in rows.iter().zip(wanted.values.chunks_exact(vocab)) {
                    let off = distance(&logits(&matrix, row), wanted);
                    assert!(
                        off < 2e-4,
                        "{name}, {kind:?}, prompt {prompt}: off by {off}"
                    );
                }
            }
        }
    }
}

#[test]
fn a_mean_is_that_of_the_rows_of_all_prefixes() {
    for name in ["qwen3", "gemma3_iswa8", "mamba2", "jamba"] {
        let recipe = Recipe::named(name);
        let (_dir, file) = expanded(&recipe);
        let ids = recipe.reference().prompts().swap_remove(0);
        let mut last = embedder_of(&file, BackendKind::Cpu, as_pooled(Pooling::Last));
        let prefixes: Vec<_> = (1..=ids.len()).map(|n| tokens(&ids[..n])).collect();
        let rows = last.embed_tokens(&prefixes).unwrap();
        let mut mean = embedder_of(&file, BackendKind::Cpu, as_pooled(Pooling::Mean));
        let got = mean.embed_tokens(&[tokens(&ids)]).unwrap().swap_remove(0);
        let wanted = Pooling::Mean.pool(&rows.concat(), got.len());
        assert!(got == wanted, "{name}: off by {}", distance(&got, &wanted));
    }
}

#[test]
fn on_the_cpu_neighbours_and_batches_change_no_bit() {
    for name in RECIPES {
        let recipe = Recipe::named(name);
        let (_dir, file) = expanded(&recipe);
        let mut texts: Vec<_> = recipe
            .reference()
            .prompts()
            .iter()
            .map(|ids| tokens(ids))
            .collect();
        let first = texts[0].clone();
        texts.extend((1..40).map(|n| first[..n].to_vec()));
        let config = as_pooled(Pooling::Mean);
        let mut embedder = embedder_of(&file, BackendKind::Cpu, config);
        let together = embedder.embed_tokens(&texts).unwrap();
        for n_batch in [1, 100] {
            let config = EmbedderConfig { n_batch, ..config };
            let mut embedder = embedder_of(&file, BackendKind::Cpu, config);
            assert!(
                embedder.embed_tokens(&texts).unwrap() == together,
                "{name}, {n_batch}"
            );
        }
        for (text, wanted) in texts.iter().zip(&together).rev() {
            assert_eq!(
                &embedder.embed_tokens(&[text]).unwrap()[0],
                wanted,
                "{name}"
            );
        }
    }
}

/// A class without an output matrix gives vectors only, from a directory and from the file made of
/// it.
#[test]
fn a_class_without_an_output_matrix_continues_no_text() {
    let fixture = model_tests::fixture("encoders/qwen3_embed_tiny");
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors", "tokenizer.json"] {
        std::fs::copy(fixture.join(name), dir.path().join(name)).unwrap();
    }
    edit(&dir.path().join("config.json"), |config| {
        config["architectures"] = serde_json::json!(["Qwen3Model"]);
        config["tie_word_embeddings"] = serde_json::json!(false);
    });
    let file = OpenModel::open(dir.path(), &architectures()).unwrap();
    let output = cellar::model_core::architecture::OutputKind::Embeddings;
    assert_eq!(file.model().output(), output);
    let with_head = OpenModel::open(&fixture, &architectures()).unwrap();
    let text = [tokens(&[3, 1, 4, 1, 5])];
    let vector = |file| {
        let mut embedder = embedder_of(file, BackendKind::Cpu, as_pooled(Pooling::Last));
        embedder.embed_tokens(&text).unwrap()
    };
    assert_eq!(vector(&file), vector(&with_head));
}

#[test]
fn a_decoder_whose_tokens_see_later_ones_is_refused() {
    let fixture = model_tests::fixture("encoders/qwen3_embed_tiny");
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(fixture.join(name), dir.path().join(name)).unwrap();
    }
    edit(&dir.path().join("config.json"), |config| {
        config["is_causal"] = serde_json::json!(false);
    });
    let error = OpenModel::open(dir.path(), &architectures()).unwrap_err();
    let error = error.to_string();
    assert!(error.ends_with("'is_causal' is false, not true"), "{error}");
}

fn edit(path: &Path, change: impl FnOnce(&mut serde_json::Value)) {
    let mut json = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut json);
    std::fs::write(path, serde_json::to_vec(&json).unwrap()).unwrap();
}
