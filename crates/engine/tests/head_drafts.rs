//! A head drafts what an independent forward pass of model and head drafts
//! (`fixtures/heads/eagle3.py`, `fixtures/heads/gemma4_assistant.py`), whatever it drafted before.

use std::path::Path;

use cellar_engine::{CancelFlag, Engine, EngineConfig, HeadTurn};
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_cpu::CpuBackend;
use kv_rows::KvType;
use model_core::architecture::Registry;
use model_tests::{Recipe, cpu, fixture, heads};

/// A model with a head that is a file of its own.
fn engine(model: &str, recipe: &Recipe, folder: &Path) -> Engine<CpuBackend> {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let directory = Recipe::named(model).directory(&registry);
    let directory = directory.unwrap();
    let own = heads::own_head(recipe, folder, &registry);
    let joined = own.join(&**directory.model(), directory.weights().clone(), &registry);
    let joined = joined.unwrap();
    let config = EngineConfig {
        n_ctx: Some(64),
        n_seqs: 2,
        n_ubatch: 4,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    Engine::new(cpu(), joined.model, joined.weights, &config).unwrap()
}

#[test]
fn drafts_are_those_of_the_reference() {
    let folder = tempfile::tempdir().unwrap();
    for (model, name) in [
        ("llama_gqa_untied", "eagle3"),
        ("llama_gqa_untied", "eagle3_normed"),
        ("gemma4_e", "gemma4_assistant"),
        ("gemma4_e", "gemma4_assistant_ordered"),
    ] {
        let recipe = Recipe::open(&fixture("heads").join(name));
        let mut engine = engine(model, &recipe, &folder.path().join(name));
        let reference = recipe.reference();
        let tokens = |of: &str| {
            let ids = reference.ids(of).unwrap().into_iter();
            ids.map(TokenId).collect::<Vec<_>>()
        };
        let (ids, wanted) = (tokens("ids"), tokens("drafted"));
        let (&token, prompt) = ids.split_last().unwrap();
        let seqs = [SeqId(0), SeqId(1)];
        // In pieces, and of two texts at the same time.
        for piece in prompt.chunks(3) {
            let mut batch = Batch::new();
            for seq in seqs {
                for &token in piece {
                    batch.push_token(token).in_sequence(seq).with_output();
                }
            }
            engine.decode(&batch).unwrap();
        }
        for n in [wanted.len(), 1, 2] {
            let turns = seqs.map(|seq| HeadTurn { seq, token, n });
            let drafted = engine.draft_with_head(&turns, &CancelFlag::default());
            let wanted = wanted[..n].to_vec();
            assert_eq!(drafted.unwrap(), [wanted.clone(), wanted], "{name}");
        }
    }
}
