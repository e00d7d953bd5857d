//! Checks of heads that draft, which are behind the models of other recipes (`fixtures/heads`).

use kv_backend::Backend;
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::batch::{Batch, BatchRules, PositionRule, validate_with};
use kv_core::layers::RowLayout;
use kv_core::memory::{Composite, Memory, MemoryInputs};
use kv_core::{KvType, KvTypes, SeqId, TokenId};
use kv_graph::GraphShape;
use model_core::architecture::{ModelError, with_draft_head};

use crate::checks::TOLERANCE;
use crate::{Case, Recipe, Setup, candle, cpu};

/// The head gives the reference's logits and rows on both backends, in one piece and in several.
pub fn gives_reference(case: &Case) {
    for n_ubatch in [512, 4, 1] {
        check(case, cpu(), n_ubatch);
    }
    check(case, candle(), 512);
}

fn check<B: Backend>(case: &Case, backend: B, n_ubatch: u32) {
    let recipe = case.generated();
    let reference = recipe.reference();
    let directory = recipe.directory(&case.registry()).unwrap();
    let plain = directory.model();
    let model = with_draft_head(&**plain, &**directory.weights())
        .unwrap()
        .unwrap();
    // Its layer has rows of its own.
    assert!(model.layers().iter().count() > plain.layers().iter().count());
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
    let weights = backend.load_weights(directory.weights().clone(), Default::default());
    let weights = weights.unwrap();
    let mut stored = backend.allocate(&layout).unwrap();

    let (ids, rows) = (reference.ids("ids").unwrap(), recipe.rows_before());
    let (n_vocab, dim) = (model.vocab_size(), model.embedding_dim());
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
        n_vocab: n_vocab as u32,
        n_embd: dim as u32,
    };
    let valid = validate_with(&batch, &rules, PositionRule::Linear, |seq| {
        memory.positions(seq)
    });
    let valid = valid.unwrap();
    let (mut inputs, mut outputs) = (MemoryInputs::default(), GraphOutputs::default());
    let (mut logits, mut last_rows) = (Vec::new(), Vec::new());
    let mut steps = memory.begin(&valid, n_ubatch).unwrap();
    while let Some(ubatch) = steps.next(&mut inputs) {
        let shape = GraphShape {
            n_tokens: ubatch.n_tokens() as usize,
            n_outputs: ubatch.output_rows.len(),
        };
        let graph = head.graph(shape).unwrap();
        let mut program = backend.compile(&graph, &weights, &layout).unwrap();
        let before = ubatch
            .entries
            .iter()
            .flat_map(|&e| &rows[e as usize * dim..][..dim]);
        let before: Vec<f32> = before.copied().collect();
        let coordinates: Vec<[u32; 3]> = ubatch.coordinates().collect();
        let graph_inputs = GraphInputs {
            tokens: &ubatch.tokens,
            embeddings: &before,
            positions: &ubatch.positions,
            coordinates: &coordinates,
            output_rows: &ubatch.output_rows,
            parts: &inputs.parts,
            states: &inputs.states,
            ..GraphInputs::default()
        };
        backend
            .run(&mut program, &mut stored, &graph_inputs, &mut outputs)
            .unwrap();
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
