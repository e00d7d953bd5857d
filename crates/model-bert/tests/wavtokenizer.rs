//! WavTokenizer's decoder gives the rows that an independent implementation computed in float64,
//! and says which key or tensor of a file is not as it should be.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::common::registry;
use crate::common::subject::{RequestedRows, Subject, assert_close};
use kv_backend::Backend;
use kv_block::BlockFormat;
use kv_candle::CandleBackend;
use kv_core::layers::LayerMemory;
use kv_graph::weights::{MemoryWeights, Weight, WeightSource};
use kv_graph::{Graph, GraphShape};
use model_core::architecture::OutputKind;
use model_core::gguf::{GgufFile, Metadata};
use model_tests::{cpu, cpu_with, fixture};

const TOLERANCE: f32 = 2e-4;

fn subject() -> Subject {
    let folder = fixture("gguf");
    let reference = folder.join("wavtokenizer_dec.reference.safetensors");
    Subject::file(&folder.join("wavtokenizer_dec.gguf"), &reference)
}

/// Sequences alone and together differ by `alike` at most.
fn check<B: Backend>(how: &str, alike: f32, backend: impl Fn() -> B) {
    let subject = subject();
    let wanted = |at: usize| {
        let (shape, values) = subject.reference.values(&format!("hidden_{at}")).unwrap();
        assert_eq!(shape[1], subject.model.embedding_dim());
        values
    };
    let together = subject.rows(backend(), &[0, 1, 2], RequestedRows::All);
    for (at, got) in together.iter().enumerate() {
        assert_close(
            &format!("{how}, sequence {at}"),
            got,
            &wanted(at),
            TOLERANCE,
        );
        let alone = subject.rows(backend(), &[at], RequestedRows::All);
        assert_close(
            &format!("{how}, sequence {at} alone"),
            &alone[0],
            got,
            alike,
        );
        let width = subject.model.embedding_dim();
        let first = subject.rows(backend(), &[at], RequestedRows::First);
        assert_close(
            &format!("{how}, first row"),
            &first[0],
            &got[..width],
            alike,
        );
    }
}

#[test]
fn rows_are_those_of_the_reference_alone_and_in_a_batch() {
    check("kv-cpu", 0.0, cpu);
    check("kv-cpu, one thread", 0.0, || cpu_with(1));
    check("kv-candle", 1e-5, CandleBackend::cpu);
}

#[test]
fn graphs() {
    let model = subject().model;
    for (name, shape) in [("one", [1, 1]), ("many", [7, 2])] {
        let [n_tokens, n_outputs] = shape;
        let shape = GraphShape {
            n_tokens,
            n_outputs,
        };
        let graph = model.graph(shape).unwrap();
        insta::assert_snapshot!(format!("wavtokenizer_dec-{name}"), graph.text());
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}

#[test]
fn it_gives_rows_and_remembers_nothing() {
    let example = registry()
        .get("wavtokenizer-dec")
        .unwrap()
        .example()
        .unwrap();
    for model in [subject().model, example] {
        assert_eq!(model.output(), OutputKind::Embeddings);
        let mut layers = model.layers().iter();
        assert!(layers.all(|(_, memory)| memory == LayerMemory::Nothing));
    }
}

/// The model in memory, after `change`.
fn opened(change: impl FnOnce(&mut Metadata, &mut MemoryWeights)) -> Result<(), String> {
    let file = GgufFile::open(fixture("gguf").join("wavtokenizer_dec.gguf")).unwrap();
    let mut weights = MemoryWeights::new();
    for name in file.names() {
        weights.insert(file.require(&name).unwrap());
    }
    let mut metadata = file.metadata().clone();
    change(&mut metadata, &mut weights);
    let model = registry().model(&metadata, &weights);
    model.map(drop).map_err(|error| error.to_string())
}

#[track_caller]
fn refused(change: impl FnOnce(&mut Metadata, &mut MemoryWeights)) -> String {
    opened(change).unwrap_err()
}

fn without(metadata: &Metadata, key: &str) -> Metadata {
    let mut kept = Metadata::new();
    for (name, value) in metadata.iter().filter(|(name, _)| *name != key) {
        kept.insert(name, value.clone());
    }
    kept
}

#[test]
fn missing_keys_are_named() {
    opened(|_, _| {}).unwrap();
    for key in [
        "features_length",
        "embedding_length",
        "feed_forward_length",
        "context_length",
        "posnet.embedding_length",
        "posnet.block_count",
        "convnext.embedding_length",
        "convnext.block_count",
        "attention.layer_norm_epsilon",
        "attention.group_norm_epsilon",
        "attention.group_norm_groups",
    ] {
        let key = format!("wavtokenizer-dec.{key}");
        let error = refused(|metadata, _| *metadata = without(metadata, &key));
        assert!(error.contains(&key), "{key}: {error}");
    }
}

#[test]
fn wrong_settings_are_named() {
    for (key, value, reason) in [
        ("posnet.block_count", 5u32, "5 blocks; 6 are supported"),
        (
            "convnext.embedding_length",
            31,
            "31, but wavtokenizer-dec.posnet.embedding_length is 32",
        ),
        (
            "convnext.block_count",
            1_000_000,
            "it is 1000000, but there are only 80 tensors",
        ),
        (
            "attention.group_norm_groups",
            5,
            "5 groups do not divide the width 32",
        ),
    ] {
        let key = format!("wavtokenizer-dec.{key}");
        let error = refused(|metadata, _| drop(metadata.insert(&key, value)));
        assert_eq!(error, format!("{key}: {reason}"));
    }
    let error = refused(|metadata, _| {
        metadata.insert("wavtokenizer-dec.attention.causal", true);
    });
    assert!(
        error.starts_with("wavtokenizer-dec.attention.causal: true"),
        "{error}"
    );
}

fn zeros(name: &str, shape: Vec<usize>, format: BlockFormat) -> Weight {
    let n: usize = shape.iter().product();
    let bytes = vec![0; format.row_bytes(n).unwrap()];
    Weight::new(name, shape, format, bytes.into()).unwrap()
}

#[test]
fn wrong_tensors_are_named() {
    let (matrix, f32) = ("posnet.3.conv2.weight", BlockFormat::F32);
    let replaced = |weight: Weight| refused(|_, weights| weights.insert(weight));
    assert_eq!(
        replaced(zeros(matrix, vec![32, 96], BlockFormat::Q8_0)),
        format!("tensor '{matrix}' is stored as Q8_0; expected F32, F16 or BF16")
    );
    assert_eq!(
        replaced(zeros(matrix, vec![32, 93], f32)),
        format!("tensor '{matrix}' has shape [32, 31, 3], but the metadata asks for [32, 32, 3]")
    );
    // As a file has it whose kernel is not known.
    assert_eq!(
        replaced(zeros("conv1d.weight", vec![32, 12, 5], f32)),
        "tensor 'conv1d.weight' has shape [32, 12, 5], but the metadata asks for [32, 12, 7]"
    );
    assert_eq!(
        replaced(zeros("convnext.1.dw.weight", vec![32, 3], f32)),
        "tensor 'convnext.1.dw.weight' has shape [32, 3], but the metadata asks for [32, 1, 7]"
    );
    assert_eq!(
        replaced(zeros("posnet.5.attn_norm.bias", vec![31], f32)),
        "tensor 'posnet.5.attn_norm.bias' has shape [31], but the metadata asks for [32]"
    );
    let missing = |name: &str| {
        refused(|_, weights| {
            let mut kept = MemoryWeights::new();
            let names = weights.names().into_iter().filter(|other| other != name);
            names.for_each(|name| kept.insert(weights.get(&name).unwrap()));
            *weights = kept;
        })
    };
    for (name, shape) in [
        ("posnet.2.attn_k.weight", "[32, 32, 1]"),
        ("posnet.5.attn_norm.weight", "[32]"),
        ("convnext.2.gamma.weight", "[32]"),
        ("output.bias", "[18]"),
    ] {
        let wanted = format!("tensor '{name}' is missing; the model needs it as {shape}");
        assert_eq!(missing(name), wanted);
    }
}

/// The last norm of the position net under its own name, which the specification of names has.
#[test]
fn the_last_norm_may_have_its_own_name() {
    opened(|_, weights| {
        let mut renamed = MemoryWeights::new();
        for name in weights.names() {
            let weight = weights.get(&name).unwrap();
            let name = name.replace("posnet.5.attn_norm.", "posnet.5.norm.");
            let (shape, bytes) = (weight.shape().to_vec(), weight.bytes().clone());
            renamed.insert(Weight::new(name, shape, weight.format(), bytes).unwrap());
        }
        *weights = renamed;
    })
    .unwrap();
}
