//! Sparse attention: what an indexer remembers, what it leaves out, and files that would come out
//! wrong.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::sync::Arc;

use crate::common::CASES;
use kv_core::layers::LayerMemory;
use kv_graph::Op;
use kv_rows::KvType;
use model_core::architecture::Model;
use model_core::gguf::{Array, Metadata};
use model_tests::checks::ONE;
use model_tests::{Case, Recipe, Runner, Setup, candle, cpu, refusal, remove_key};

const NAME: &str = "deepseek_v32";
/// Rows that it chooses.
const TOP_K: usize = 9;

fn case() -> &'static Case {
    Case::named(CASES, NAME)
}

/// The model where its indexers choose so many rows.
fn choosing(top_k: u32) -> Arc<dyn Model> {
    let (weights, mut metadata) = case().open();
    metadata.insert("deepseek32.attention.indexer.top_k", top_k);
    case().registry().model(&metadata, &*weights).unwrap()
}

#[test]
fn indexers_remember_their_keys_behind_the_latents() {
    let model = case().model();
    let sizes = model.layers().iter().map(|(layer, memory)| {
        let LayerMemory::Latent(rows) = memory else {
            panic!("{memory:?}");
        };
        // One part: the same cells.
        assert_eq!(model.layers().part_of(layer).map(|part| part.0), Some(0));
        (rows.kv_heads, rows.k_dim, rows.v_dim)
    });
    let sizes: Vec<_> = sizes.collect();
    assert_eq!(sizes, [vec![(1, 28, 20); 4], vec![(1, 64, 0); 4]].concat());
    let graph = model.graph(ONE).unwrap();
    let count = |is: fn(&Op) -> bool| graph.nodes().iter().filter(|n| is(&n.op)).count();
    assert_eq!(count(|op| matches!(op, Op::StoreK { .. })), 8);
    assert_eq!(count(|op| matches!(op, Op::Index { .. })), 4);
    assert_eq!(count(|op| matches!(op, Op::AttendSparse { .. })), 4);
    // Neither latents nor keys of indexers move to other positions.
    let (weights, _) = case().open();
    let error = graph.key_ropes(&*weights).unwrap_err().to_string();
    assert!(error.contains("values"), "{error}");
}

#[test]
fn contexts_that_are_no_longer_than_the_choice_are_attended_whole() {
    let prompt = &case().reference().prompts()[0];
    let logits = |top_k, n| {
        let setup = Setup::default();
        let mut runner = Runner::new(cpu(), case(), &setup).with_model(choosing(top_k));
        runner.feed(0, &prompt[..n], 512)
    };
    let (few, all) = (logits(TOP_K as u32, 20), logits(4096, 20));
    let n_vocab = few.len() / 20;
    let whole = TOP_K * n_vocab;
    assert_eq!(few[..whole], all[..whole]);
    assert_ne!(few[whole..], all[whole..]);
}

/// What a token sees is chosen, and attended, to the same bits however the prompt came and
/// whichever cells it is in.
#[test]
fn choices_are_the_same_in_pieces_and_beside_others() {
    let reference = case().reference();
    let prompts = reference.prompts();
    let setup = Setup::default();
    let whole = Runner::new(cpu(), case(), &setup).feed(0, &prompts[0], 512);
    for n_ubatch in [1, 7] {
        let mut runner = Runner::new(cpu(), case(), &setup);
        runner.feed(1, &prompts[1], 512);
        assert_eq!(runner.feed(0, &prompts[0], n_ubatch), whole, "{n_ubatch}");
    }
}

/// The bound on the change of the likeliest tokens by the type of rows: mean divergence of their
/// distribution from the reference's, in nats a token. A near-tie turns: then another row is
/// attended over.
const TYPES: [(KvType, f64); 2] = [(KvType::F16, 0.1), (KvType::BF16, 0.17)];

#[test]
fn narrow_types_choose_nearly_the_same() {
    let reference = case().reference();
    let (prompt, theirs) = (&reference.prompts()[0], reference.logits(0));
    for (kv_type, wanted) in TYPES {
        let setup = Setup::with_type(kv_type);
        for logits in [
            Runner::new(cpu(), case(), &setup).feed(0, prompt, 512),
            Runner::new(candle(), case(), &setup).feed(0, prompt, 512),
        ] {
            let off = theirs.divergence(&logits);
            println!("{kv_type}: {off}, {}", theirs.distance(&logits));
            assert!(off < wanted, "{kv_type}: {off} nats a token");
        }
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused_by_their_key() {
    for (key, value) in [
        ("attention.indexer.head_count", 0u32),
        ("attention.indexer.key_length", 0),
        ("attention.indexer.key_length", 6),
        ("attention.indexer.top_k", 0),
        ("attention.q_lora_rank", 0),
    ] {
        let key = format!("deepseek32.{key}");
        let edit = |metadata: &mut Metadata| {
            drop(metadata.insert(&key, value));
        };
        let error = refusal(case(), edit, "");
        assert!(error.contains(&key), "{key}: {error}");
    }
    for key in ["head_count", "key_length", "top_k"] {
        let key = format!("deepseek32.attention.indexer.{key}");
        let error = refusal(case(), |metadata| remove_key(metadata, &key), "");
        assert!(error.contains(&key), "{error}");
    }
}

#[test]
fn layers_that_take_an_earlier_choice_are_refused_by_their_number() {
    let key = "glm-dsa.attention.indexer.types";
    let of_types = |types: Vec<bool>| {
        let edit = |metadata: &mut Metadata| drop(metadata.insert(key, Array::Bool(types)));
        refusal(Case::named(CASES, "glm_moe_dsa"), edit, "")
    };
    let error = of_types(vec![true, false, true]);
    assert!(error.contains(key) && error.contains("layer 1"), "{error}");
    let error = of_types(vec![true; 2]);
    assert!(error.contains(key), "{error}");
}

#[test]
fn configs_whose_layers_share_a_choice_are_refused_by_their_setting() {
    let registry = Case::named(CASES, "glm_moe_dsa").registry();
    for (key, value) in [
        ("indexer_types", r#"["full", "shared", "full"]"#),
        ("indexer_types", r#"["full", "full"]"#),
        ("index_topk_freq", "4"),
    ] {
        let other = Recipe::named("glm_moe_dsa").with_config(|config| {
            config.remove("indexer_types");
            config.insert(key.to_owned(), serde_json::from_str(value).unwrap());
        });
        let error = other.directory(&registry).unwrap_err();
        assert!(error.to_string().contains("indexer_types"), "{error}");
    }
}
