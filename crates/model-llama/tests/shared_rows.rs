//! Gemma 3n and 4: which layers attend over the rows of which, and files that would come out wrong.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::CASES;
use kv_core::LayerIdx;
use kv_core::Window;
use kv_core::layers::LayerMemory;
use kv_graph::weights::MemoryWeights;
use kv_graph::{GraphShape, Input, Op};
use model_core::gguf::{Array, Metadata};
use model_tests::checks::ONE;
use model_tests::{Case, refusal, remove_key};

/// The layers of a model that share rows, with their owners.
fn sharing(name: &str) -> Vec<(u32, u32)> {
    let model = Case::named(CASES, name).model();
    let layers = model.layers().iter();
    let shares = layers.filter_map(|(layer, memory)| match memory {
        LayerMemory::SharedWith(owner) => Some((layer.0, owner.0)),
        _ => None,
    });
    shares.collect()
}

#[test]
fn the_last_layers_share_those_of_the_last_owner_with_their_window() {
    // Sliding, sliding, sliding, full; then sliding, sliding, full.
    assert_eq!(sharing("gemma4_e"), [(4, 2), (5, 2), (6, 3)]);
    assert_eq!(sharing("gemma4_moe"), []);
    // Sliding, sliding, full, sliding; then sliding, sliding, full.
    assert_eq!(sharing("gemma3n"), [(4, 3), (5, 3), (6, 2)]);
    let model = Case::named(CASES, "gemma4_e").model();
    let graph = model.graph(ONE).unwrap();
    let count = |is: fn(&Op) -> bool| graph.nodes().iter().filter(|n| is(&n.op)).count();
    assert_eq!(count(|op| matches!(op, Op::StoreKv { .. })), 4);
    assert_eq!(count(|op| matches!(op, Op::Attend { .. })), 7);
    // Heads of 12 values in windows, of 16 without.
    let sizes = |layer| {
        let memory = model.layers().attention(LayerIdx(layer)).unwrap();
        (memory.k_dim, memory.v_dim, memory.window)
    };
    assert_eq!(sizes(2), (12, 12, Window::Sliding(8)));
    assert_eq!(sizes(3), (16, 16, Window::Full));
}

/// With per-layer inputs a graph for rows in place of tokens has an input of tokens, too.
#[test]
fn per_layer_inputs_need_tokens() {
    for (name, needs) in [("gemma4_e", true), ("gemma4_moe", false)] {
        let model = Case::named(CASES, name).model().of_rows().unwrap();
        let shape = GraphShape {
            n_tokens: 2,
            n_outputs: 1,
        };
        let graph = model.graph(shape).unwrap();
        let tokens = graph
            .nodes()
            .iter()
            .filter(|node| node.op == Op::Input(Input::Tokens));
        assert_eq!(tokens.count() > 0, needs, "{name}");
    }
    let streams = Case::named(CASES, "gemma3n").model();
    assert!(streams.of_rows().is_none(), "its rows are several");
}

fn error(name: &str, edit: impl FnOnce(&mut Metadata)) -> String {
    refusal(Case::named(CASES, name), edit, "")
}

#[test]
fn settings_that_cannot_be_are_refused_by_their_key() {
    for (key, value) in [
        ("attention.shared_kv_layers", 7u32),
        // No full layer is left before them.
        ("attention.shared_kv_layers", 4),
        ("attention.key_length_swa", 0),
        ("attention.value_length_swa", 0),
        ("rope.dimension_count_swa", 14),
        ("rope.dimension_count_swa", 7),
        ("rope.dimension_count", 18),
        ("feed_forward_length", 0),
    ] {
        let key = format!("gemma4.{key}");
        let error = error("gemma4_e", |metadata| drop(metadata.insert(&key, value)));
        assert!(error.contains(&key), "{key}: {error}");
    }
    let key = "gemma4.feed_forward_length";
    let widths = |n: u32| Array::U32(vec![56, 56, 56, 56, 112, 112, n]);
    let text = error("gemma4_e", |metadata| drop(metadata.insert(key, widths(0))));
    assert!(text.contains(key) && text.contains("layer 6"), "{text}");
    let text = error("gemma4_e", |metadata| {
        drop(metadata.insert(key, widths(56)))
    });
    assert!(text.contains("blk.6.ffn_gate.weight"), "{text}");
    let key = "gemma4.attn_logit_softcapping";
    let text = error("gemma4_e", |metadata| drop(metadata.insert(key, 30f32)));
    assert!(text.contains("no soft caps"), "{text}");
}

#[test]
fn streams_and_sparsities_that_cannot_be_are_refused_by_their_key() {
    for (key, value) in [
        ("altup.num_inputs", 1u32),
        ("altup.active_idx", 4),
        ("attention.shared_kv_layers", 7),
        ("embedding_length_per_layer_input", 0),
    ] {
        let key = format!("gemma3n.{key}");
        let error = error("gemma3n", |metadata| drop(metadata.insert(&key, value)));
        assert!(error.contains(&key), "{key}: {error}");
    }
    let key = "gemma3n.activation_sparsity_scale";
    let scales = |n| Array::F32(vec![0.5; n]);
    let text = error("gemma3n", |metadata| drop(metadata.insert(key, scales(6))));
    assert!(text.contains(key), "{text}");
    let text = error("gemma3n", |metadata| remove_key(metadata, key));
    assert!(text.contains(key), "{text}");
    // Other matrices than streams.
    let key = "gemma3n.altup.num_inputs";
    let text = error("gemma3n", |metadata| drop(metadata.insert(key, 3u32)));
    assert!(text.contains("altup"), "{text}");
}

/// A gate is cut where the config says: three layers and one more.
#[test]
fn sparse_layers_are_those_of_the_file() {
    let graph = Case::named(CASES, "gemma3n").model().graph(ONE).unwrap();
    let sparse = graph.nodes().iter().filter_map(|node| match node.op {
        Op::GaussianTopK { deviations } => Some((node.name.as_str(), deviations)),
        _ => None,
    });
    let sparse: Vec<(&str, f32)> = sparse.collect();
    let wanted = [
        ("ffn_gate_sparse-0", 1.281_551_6),
        ("ffn_gate_sparse-1", 0.841_621_2),
        ("ffn_gate_sparse-2", 0.0),
        ("ffn_gate_sparse-5", 0.524_400_5),
    ];
    assert_eq!(sparse.len(), wanted.len());
    for ((name, deviations), (wanted_name, wanted)) in sparse.into_iter().zip(wanted) {
        assert_eq!(name, wanted_name);
        assert!((deviations - wanted).abs() < 1e-6, "{name}: {deviations}");
    }
}

/// What only some architectures know is refused by the others.
#[test]
fn others_have_no_shared_rows_and_no_inputs_of_layers() {
    for key in [
        "attention.shared_kv_layers",
        "embedding_length_per_layer_input",
    ] {
        let key = format!("gemma3.{key}");
        let error = error("gemma3_iswa8", |metadata| drop(metadata.insert(&key, 2u32)));
        assert!(error.contains(&key), "{error}");
    }
}

/// Published files have keys and values for layers that do not use them; a tensor of another kind
/// is missed.
#[test]
fn keys_of_layers_that_share_are_without_use() {
    let case = Case::named(CASES, "gemma4_e");
    let (file, metadata) = case.open();
    let mut weights = MemoryWeights::new();
    let names = file.names().into_iter();
    names.for_each(|name| weights.insert(file.require(&name).unwrap()));
    for tensor in ["attn_k.weight", "attn_v.weight", "attn_k_norm.weight"] {
        let name = format!("blk.5.{tensor}");
        weights.insert_f32(&name, &[1], &[1.0]).unwrap();
    }
    let before = case.model().graph(ONE).unwrap();
    let model = case.registry().model(&metadata, &weights).unwrap();
    assert_eq!(model.graph(ONE).unwrap(), before);
    weights
        .insert_f32("blk.5.attn_v.bias", &[1], &[1.0])
        .unwrap();
    let error = case.registry().model(&metadata, &weights).unwrap_err();
    assert!(error.to_string().contains("blk.5.attn_v.bias"), "{error}");
}
