//! Checks of heads that draft, which are behind the models of other recipes (`fixtures/heads`).

use std::path::Path;
use std::sync::Arc;

use kv_backend::{Backend, DetachedExperts};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{
    Pos, SeqId, TokenId,
    batch::{Batch, BatchRules, PositionRule, validate_with},
    memory::{Composite, Memory, MemoryInputs},
};
use kv_graph::weights::WeightSource;
use kv_graph::{Graph, GraphShape};
use kv_rows::{KvType, KvTypes, RowLayout};
use model_core::architecture::{HeadRows, Model, ModelError, Registry, with_draft_head};
use model_core::head_file::HeadFile;
use model_core::model_file::OpenModel;

use crate::checks::{TOLERANCE, experts_among};
use crate::{Case, Recipe, Reference, Setup, candle, cpu, fixture};

/// A model with its head, and what the head gives.
struct HeadCase {
    name: String,
    model: Arc<dyn Model>,
    weights: Arc<dyn WeightSource>,
    /// The rows that the head reads of the tokens before, where not the model gives them.
    rows: Option<Vec<f32>>,
    reference: Reference,
}

/// The head gives the reference's logits and rows on both backends, in one piece and in several.
pub fn gives_reference(case: &Case) {
    let recipe = case.generated();
    let directory = recipe.directory(&case.registry()).unwrap();
    let (plain, weights) = (directory.model(), directory.weights());
    let model = with_draft_head(&**plain, &**weights).unwrap().unwrap();
    // Its layer has rows of its own.
    assert!(model.layers().iter().count() > plain.layers().iter().count());
    check_all(&HeadCase {
        name: recipe.name(),
        model,
        weights: weights.clone(),
        rows: Some(recipe.rows_before()),
        reference: recipe.reference(),
    });
}

/// The head of a recipe of its own in `fixtures/heads`, written into a folder.
pub fn own_head(recipe: &Recipe, folder: &Path, registry: &Registry) -> HeadFile {
    recipe.expand(folder);
    HeadFile::open(folder, registry).unwrap().unwrap()
}

/// A model with a head of `fixtures/heads`, which is a file of its own, written into a folder.
fn joined_case(case: &Case, head: &str, folder: &Path) -> HeadCase {
    let registry = case.registry();
    let directory = case.generated().directory(&registry).unwrap();
    let recipe = Recipe::open(&fixture("heads").join(head));
    let own = own_head(&recipe, folder, &registry);
    let joined = own.join(&**directory.model(), directory.weights().clone(), &registry);
    let joined = joined.unwrap();
    HeadCase {
        name: recipe.name(),
        model: joined.model,
        weights: joined.weights,
        rows: None,
        reference: recipe.reference(),
    }
}

/// The same for a head of a file of its own, which reads rows of the model's layers.
pub fn own_head_gives_reference(case: &Case, head: &str, folder: &Path) {
    let joined = joined_case(case, head, folder);
    let plain = case.generated().directory(&case.registry()).unwrap();
    let n_layers = plain.model().layers().iter().count();
    assert!(joined.model.layers().iter().count() > n_layers);
    check_all(&joined);
}

fn check_all(case: &HeadCase) {
    for n_ubatch in [512, 4, 1] {
        check(case, cpu(), n_ubatch);
    }
    check(case, candle(), 512);
    let share = experts_among(case.weights.names(), |_| true);
    if share.n_layers > 0 {
        let left = DetachedExperts::new(cpu(), cpu(), share).unwrap();
        check(case, left, 4);
    }
}

fn check<B: Backend>(case: &HeadCase, backend: B, n_ubatch: u32) {
    let (model, reference) = (&case.model, &case.reference);
    let head = model.draft_head().unwrap();
    let setup = Setup::default().memory;
    let mut memory = Composite::new(model.layers(), &setup).unwrap();
    let mut cells = vec![0; model.layers().parts().len()];
    for part in memory.parts() {
        cells[part.config().part.as_usize()] = part.n_cells() as usize;
    }
    let types = KvTypes::from(KvType::F32);
    let layout = RowLayout::new(model.layers(), &cells, types).unwrap();
    let layout = layout
        .with_states(model.layers(), setup.n_state_rows())
        .unwrap();
    let weights = backend.load_weights(case.weights.clone(), Default::default());
    let weights = weights.unwrap();
    let mut stored = backend.allocate(&layout).unwrap();

    let ids = reference.ids("ids").unwrap();
    let dim = head.embedding_dim();
    let mut batch = Batch::new();
    for (at, &id) in ids.iter().enumerate() {
        let entry = batch.push_token(TokenId(id)).in_sequence(SeqId(1));
        if at + 2 >= ids.len() {
            entry.with_output();
        }
    }
    let rules = BatchRules {
        n_batch: 512,
        n_seqs: setup.n_seqs,
        n_vocab: model.vocab_size() as u32,
        n_embd: model.embedding_dim() as u32,
    };
    let valid = validate_with(&batch, &rules, PositionRule::Linear, |seq| {
        memory.positions(seq)
    });
    let valid = valid.unwrap();
    let (mut inputs, mut outputs) = (MemoryInputs::default(), GraphOutputs::default());
    let (mut logits, mut last_rows) = (Vec::new(), Vec::new());
    // That of the token before the ubatch.
    let mut last = vec![0.0; dim];
    let mut steps = memory.begin(&valid, n_ubatch).unwrap();
    while let Some(ubatch) = steps.next(&mut inputs) {
        let shape = GraphShape {
            n_tokens: ubatch.n_tokens() as usize,
            n_outputs: ubatch.output_rows.len(),
        };
        let coordinates: Vec<[u32; 3]> = ubatch.coordinates().collect();
        let mut graph_inputs = GraphInputs {
            tokens: &ubatch.tokens,
            positions: &ubatch.positions,
            coordinates: &coordinates,
            output_rows: &ubatch.output_rows,
            parts: &inputs.parts,
            states: &inputs.states,
            ..GraphInputs::default()
        };
        let mut run = |graph: Graph, given: &GraphInputs<'_>, outputs: &mut GraphOutputs| {
            let mut program = backend.compile(&graph, &weights, &layout).unwrap();
            let ran = backend.run(&mut program, &mut stored, given, outputs);
            ran.unwrap();
        };
        let before: Vec<f32> = match &case.rows {
            Some(rows) => {
                let of = |&e: &u32| &rows[e as usize * dim..][..dim];
                ubatch.entries.iter().flat_map(of).copied().collect()
            }
            None => {
                run(model.graph(shape).unwrap(), &graph_inputs, &mut outputs);
                let mut rows = std::mem::take(&mut last);
                rows.extend_from_slice(&outputs.values[1]);
                last = rows.split_off(rows.len() - dim);
                rows
            }
        };
        // The first token has none before it.
        let mut parts = inputs.parts.clone();
        let groups = parts.iter_mut().flat_map(|p| &mut p.visibility.groups);
        for limits in groups.flat_map(|group| &mut group.limits) {
            limits.first = limits.first.max(head.head_reading().first);
        }
        graph_inputs.parts = &parts;
        graph_inputs.embeddings = &before;
        run(head.graph(shape).unwrap(), &graph_inputs, &mut outputs);
        logits.extend_from_slice(&outputs.values[0]);
        last_rows.extend_from_slice(&outputs.values[1]);
    }
    for (name, found) in [("logits", logits), ("rows", last_rows)] {
        let (_, wanted) = reference.values(name).unwrap();
        assert_eq!(found.len(), wanted.len(), "{} {name}", case.name);
        let off = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
        let off = off.fold(0.0, f32::max);
        assert!(
            off <= TOLERANCE,
            "{} {name}: {off} in pieces of {n_ubatch}",
            case.name
        );
    }
}

/// An assistant of a file of its own, which attends over the model's keys and values, gives the
/// reference's logits and rows, one draft after the other, on both backends.
pub fn assistant_gives_reference(case: &Case, head: &str, folder: &Path) {
    let joined = joined_case(case, head, folder);
    check_assistant(&joined, cpu());
    check_assistant(&joined, candle());
}

fn check_assistant<B: Backend>(case: &HeadCase, backend: B) {
    let (model, reference) = (&case.model, &case.reference);
    let head = model.draft_head().unwrap();
    assert_eq!(head.head_reading().rows, HeadRows::OfModel);
    let setup = Setup::default().memory;
    let mut memory = Composite::new(model.layers(), &setup).unwrap();
    let mut cells = vec![0; model.layers().parts().len()];
    for part in memory.parts() {
        cells[part.config().part.as_usize()] = part.n_cells() as usize;
    }
    let types = KvTypes::from(KvType::F32);
    let layout = RowLayout::new(model.layers(), &cells, types).unwrap();
    let weights = backend.load_weights(case.weights.clone(), Default::default());
    let weights = weights.unwrap();
    let mut stored = backend.allocate(&layout).unwrap();
    let rules = BatchRules {
        n_batch: 512,
        n_seqs: setup.n_seqs,
        n_vocab: model.vocab_size() as u32,
        n_embd: model.embedding_dim() as u32,
    };
    let (mut inputs, mut outputs) = (MemoryInputs::default(), GraphOutputs::default());
    // The tokens of a batch of one ubatch through a graph, which sees all but them or all.
    let mut run = |memory: &mut Composite, of: &dyn Model, tokens: &[u32], rows: &[f32]| {
        let mut batch = Batch::new();
        for &token in tokens {
            batch
                .push_token(TokenId(token))
                .in_sequence(SeqId(1))
                .with_output();
        }
        let valid = validate_with(&batch, &rules, PositionRule::Linear, |seq| {
            memory.positions(seq)
        });
        let mut steps = memory.begin(&valid.unwrap(), 512).unwrap();
        let ubatch = steps.next(&mut inputs).unwrap();
        let shape = GraphShape {
            n_tokens: tokens.len(),
            n_outputs: tokens.len(),
        };
        let mut parts = inputs.parts.clone();
        if !rows.is_empty() {
            let groups = parts.iter_mut().flat_map(|p| &mut p.visibility.groups);
            for limits in groups.flat_map(|group| &mut group.limits) {
                limits.last = limits.last.min(Pos(ubatch.positions[0] - 1));
            }
        }
        let given = GraphInputs {
            tokens: &ubatch.tokens,
            positions: &ubatch.positions,
            output_rows: &ubatch.output_rows,
            parts: &parts,
            states: &inputs.states,
            embeddings: rows,
            ..GraphInputs::default()
        };
        let graph = of.graph(shape).unwrap();
        let mut program = backend.compile(&graph, &weights, &layout).unwrap();
        let ran = backend.run(&mut program, &mut stored, &given, &mut outputs);
        ran.unwrap();
        assert!(steps.next(&mut MemoryInputs::default()).is_none());
        outputs.values.clone()
    };
    let ids = reference.ids("ids").unwrap();
    let (&last, prompt) = ids.split_last().unwrap();
    let dim = model.embedding_dim();
    let of_model = run(&mut memory, &**model, prompt, &[]);
    let mut row = of_model[1][of_model[1].len() - dim..].to_vec();
    let mut token = last;
    let (mut logits, mut rows) = (Vec::new(), Vec::new());
    for &drafted in &reference.ids("drafted").unwrap() {
        // All stand at the same position.
        let of_head = run(&mut memory.clone(), &*head, &[token], &row);
        logits.extend_from_slice(&of_head[0]);
        row.clone_from(&of_head[1]);
        rows.extend_from_slice(&row);
        token = drafted;
    }
    let off = |found: &[f32], name: &str| {
        let (_, wanted) = reference.values(name).unwrap();
        assert_eq!(found.len(), wanted.len(), "{} {name}", case.name);
        let off = found.iter().zip(&wanted).map(|(a, b)| (a - b).abs());
        off.fold(0.0, f32::max)
    };
    let mut found = vec![("rows", off(&rows, "rows"))];
    // Most logits of one that chooses groups have no value.
    if head.head_reading().groups.is_none() {
        found.push(("chain", off(&logits, "chain")));
    }
    for (name, off) in found {
        assert!(off <= TOLERANCE, "{} {name}: {off}", case.name);
    }
}

/// The head of a changed recipe: the model itself is as before.
fn changed(case: &Case, change: impl FnOnce(Recipe) -> Recipe) -> ModelError {
    let recipe = change(case.generated());
    let directory = recipe.directory(&case.registry());
    let directory = directory.unwrap_or_else(|error| panic!("{}: {error}", case.name));
    let weights = directory.weights();
    with_draft_head(&**directory.model(), &**weights).unwrap_err()
}

/// A head that lacks a tensor, or that is of another width or vocabulary, is named, and the model
/// is the same without it.
pub fn wrong_heads_are_named(case: &Case, matrix: &str, gate: &str) {
    let missing = changed(case, |recipe| recipe.without(gate)).to_string();
    assert!(missing.contains("is missing"), "{missing}");
    let narrow = changed(case, |recipe| recipe.reshaped(matrix, &[7, 24])).to_string();
    assert!(narrow.contains("shape [7, 24], but"), "{narrow}");
}

/// A head of a file of its own that lacks a tensor, or that does not fit the model, is named with
/// both numbers.
pub fn wrong_own_heads_are_named(case: &Case, folder: &Path) {
    let registry = case.registry();
    let directory = case.generated().directory(&registry).unwrap();
    let refused = |name: &str, change: &dyn Fn(Recipe) -> Recipe| {
        let recipe = change(Recipe::open(&fixture("heads/eagle3")));
        let own = own_head(&recipe, &folder.join(name), &registry);
        let joined = own.join(&**directory.model(), directory.weights().clone(), &registry);
        joined.unwrap_err().to_string()
    };
    let set = |key: &'static str, value: u64| {
        move |recipe: Recipe| {
            recipe.with_config(|config| {
                config.insert(key.to_owned(), value.into());
            })
        }
    };
    let without = |name: &'static str| move |recipe: Recipe| recipe.without(name);
    for tensor in [
        "fc.weight",
        "midlayer.mlp.up_proj.weight",
        "norm.weight",
        "lm_head.weight",
        "d2t",
    ] {
        let message = refused(tensor, &without(tensor));
        assert!(message.contains("is missing"), "{message}");
    }
    let message = refused("known", &set("draft_vocab_size", 161));
    assert!(
        message.contains("161 tokens, but 'd2t' names 160"),
        "{message}"
    );
    let message = refused("width", &set("target_hidden_size", 96));
    assert!(
        message.contains("96, but rows of the model have 64"),
        "{message}"
    );
    let message = refused("vocabulary", &set("vocab_size", 500));
    assert!(
        message.contains("500 tokens, but the model has 512"),
        "{message}"
    );
    let message = refused("fc", &|recipe| recipe.reshaped("fc.weight", &[64, 96]));
    assert!(
        message.contains("fc.weight") && message.contains("[64, 192]"),
        "{message}"
    );
    let message = refused("layers", &|recipe| {
        recipe.with_config(|config| {
            let key = "eagle_aux_hidden_state_layer_ids".to_owned();
            config.insert(key, serde_json::json!([1, 2, 4]));
        })
    });
    assert!(
        message.contains("[1, 2, 4], but the model has 3 layers"),
        "{message}"
    );
    let message = refused("tokens", &|recipe| recipe.with_step("d2t", 4));
    assert!(
        message.contains("but the model has 512 tokens"),
        "{message}"
    );
    let message = refused("twice", &|recipe| recipe.with_step("d2t", -1));
    assert!(message.contains("token 1 is there twice"), "{message}");
    // It is no model of its own.
    let alone = OpenModel::open(folder.join("width"), &registry).unwrap_err();
    assert!(
        alone
            .to_string()
            .contains("a head that drafts for another model"),
        "{alone}"
    );
    // A model is no head.
    let model = folder.join("model");
    case.generated().expand(&model);
    assert!(HeadFile::open(&model, &registry).unwrap().is_none());
}
