//! The dense modules of sentence encoders (EmbeddingGemma): matrices behind the pooling.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::path::Path;

use crate::common::subject::{RequestedRows, Subject, VECTOR_TOLERANCE, assert_close};
use crate::common::{data, registry};
use cellar_tasks::{Embedder, EmbedderConfig};
use kv_candle::CandleBackend;
use kv_core::TokenId;
use model_core::model_file::OpenModel;
use model_core::sentence::{Pooling, normalise};
use model_tests::{Distribution, Recipe, TensorKey, cpu};
use serde_json::{Value, json};

/// Width of the recipe's rows, and of those between the modules.
const DIM: usize = 48;
const INNER: usize = 80;

fn matrix(name: &str, n_out: usize, n_in: usize) -> Vec<f32> {
    let distribution = Distribution {
        mean: 0.0,
        scale: 0.2,
    };
    let values = TensorKey::new(name, 5).values(n_out * n_in, distribution);
    values.collect()
}

/// A safetensors file of one matrix.
fn write_matrix(path: &Path, values: &[f32], n_out: usize) {
    let n_bytes = values.len() * 4;
    let header = json!({"linear.weight": {
        "dtype": "F32", "shape": [n_out, values.len() / n_out], "data_offsets": [0, n_bytes],
    }});
    let header = header.to_string().into_bytes();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(values.iter().flat_map(|v| v.to_le_bytes()));
    std::fs::write(path, file).unwrap();
}

fn dense_config() -> Value {
    json!({
        "in_features": 1, "out_features": 1, "bias": false,
        "activation_function": "torch.nn.modules.linear.Identity",
    })
}

/// The recipe with a mean and two dense modules.
fn directory() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    Recipe::open(&data("embedding_gemma")).expand(dir.path());
    let kinds = ["", "1_Pooling", "2_Dense", "3_Dense", "4_Normalize"];
    let module = |path: &&str| {
        let kind = path.rsplit('_').next().filter(|kind| !kind.is_empty());
        let kind = kind.unwrap_or("Transformer");
        json!({"path": path, "type": format!("sentence_transformers.models.{kind}")})
    };
    let write = |name: &str, json: &Value| {
        let path = dir.path().join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, json.to_string()).unwrap();
    };
    let modules: Vec<Value> = kinds.iter().map(module).collect();
    write("modules.json", &json!(modules));
    write(
        "1_Pooling/config.json",
        &json!({"pooling_mode_mean_tokens": true}),
    );
    for (folder, n_out, n_in) in [("2_Dense", INNER, DIM), ("3_Dense", DIM, INNER)] {
        write(&format!("{folder}/config.json"), &dense_config());
        let path = dir.path().join(folder).join("model.safetensors");
        write_matrix(&path, &matrix(folder, n_out, n_in), n_out);
    }
    dir
}

fn applied(matrix: &[f32], x: &[f32]) -> Vec<f32> {
    let rows = matrix.chunks_exact(x.len());
    let dot = |row: &[f32]| -> f64 {
        let pairs = row.iter().zip(x);
        pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    rows.map(|row| dot(row) as f32).collect()
}

#[test]
fn dense_modules_follow_the_mean() {
    let subject = Subject::recipe("embedding_gemma");
    let rows = subject.rows(cpu(), &[0, 1, 2], RequestedRows::All);
    let dir = directory();
    let file = OpenModel::open(dir.path(), &registry()).unwrap();
    let texts: Vec<Vec<TokenId>> = subject
        .reference
        .prompts()
        .into_iter()
        .map(|ids| ids.into_iter().map(TokenId).collect())
        .collect();
    let config = EmbedderConfig::default();
    let on_cpu = Embedder::new(cpu(), &file, &config)
        .unwrap()
        .embed_tokens(&texts)
        .unwrap();
    let on_candle = Embedder::new(CandleBackend::cpu(), &file, &config)
        .unwrap()
        .embed_tokens(&texts)
        .unwrap();
    for (at, rows) in rows.iter().enumerate() {
        let mean = Pooling::Mean.pool(rows, DIM);
        let inner = applied(&matrix("2_Dense", INNER, DIM), &mean);
        let mut wanted = applied(&matrix("3_Dense", DIM, INNER), &inner);
        normalise(&mut wanted);
        assert_close("kv-cpu", &on_cpu[at], &wanted, VECTOR_TOLERANCE);
        assert_close("kv-candle", &on_candle[at], &wanted, VECTOR_TOLERANCE);
        let mut without = mean;
        normalise(&mut without);
        assert!(model_tests::distance(&without, &wanted) > 0.1);
    }
}

#[test]
fn modules_that_are_more_than_a_matrix_are_refused() {
    let said = |change: &dyn Fn(&Path)| {
        let dir = directory();
        change(dir.path());
        let error = OpenModel::open(dir.path(), &registry()).unwrap_err();
        let path = dir.path().display().to_string();
        error.to_string().replace(&path, "DIR")
    };
    let with = |key: &'static str, value: Value| {
        said(&move |dir| {
            let mut config = dense_config();
            config[key] = value.clone();
            std::fs::write(dir.join("2_Dense/config.json"), config.to_string()).unwrap();
        })
    };
    assert_eq!(
        with("bias", json!(true)),
        "'DIR/2_Dense/config.json': 'bias' is true, not false"
    );
    assert_eq!(
        with(
            "activation_function",
            json!("torch.nn.modules.activation.Tanh")
        ),
        "'DIR/2_Dense/config.json': 'activation_function' is \"torch.nn.modules.activation.Tanh\", not \
         torch.nn.modules.linear.Identity"
    );
    let wide = said(&|dir| {
        let path = dir.join("3_Dense/model.safetensors");
        write_matrix(&path, &matrix("wide", 64, INNER), 64);
    });
    assert!(wide.contains("dense_3"), "{wide}");
    let missing = said(&|dir| std::fs::remove_file(dir.join("2_Dense/model.safetensors")).unwrap());
    assert!(missing.contains("2_Dense"), "{missing}");
}
