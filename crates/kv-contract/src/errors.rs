//! The contract of refusals: what is wrong is named, and nothing has changed.

use super::ops::{builder, step};
use super::rows::{dump, fill};
use super::scene::{SPEC, Scene, Step, layout, memory_weights, text, tiny_layout};
use super::{Random, Subject, tiny_llama};
use kv_backend::{Backend, BackendError};
use kv_core::{CellIdx, Pos, Visibility, Window};
use kv_graph::weights::{MemoryWeights, WeightSource};
use kv_graph::{Graph, GraphShape, Input};
use kv_rows::RowLayout;

const N_CELLS: usize = 16;

fn graph() -> Graph {
    tiny_llama(GraphShape {
        n_tokens: 3,
        n_outputs: 2,
    })
}

/// A run of three tokens that is right.
fn good_step() -> Step {
    let tokens = text(&mut Random::new(51), 0, 0, &[4, 5, 9]);
    Scene::default().step(&tokens, Window::Full, &[0, 2])
}

fn compile_error<B: Backend>(
    subject: &Subject<B>,
    weights: &MemoryWeights,
    layout: &RowLayout,
) -> BackendError {
    subject.compile(&graph(), weights, layout).err().unwrap()
}

/// A weight that is not there is an error with its name, node and shape.
pub fn a_missing_weight_is_named<B: Backend>(subject: &Subject<B>) {
    let all = memory_weights(&graph(), 52);
    let layout = tiny_layout(N_CELLS, subject.backend.info().kv_types[0]);
    for missing in all.names() {
        let mut weights = MemoryWeights::new();
        let others = all.names().into_iter().filter(|n| *n != missing);
        others.for_each(|n| weights.insert(all.get(&n).unwrap()));
        let wanted = all.get(&missing).unwrap().shape().to_vec();
        match compile_error(subject, &weights, &layout) {
            BackendError::MissingWeight { name, node, shape } => {
                assert!(name == missing && shape == wanted && graph().find(&node).is_some());
            }
            other => panic!("{missing}: {other}"),
        }
    }
}

/// A weight of another shape is an error with its name and both shapes.
pub fn a_weight_of_another_shape_is_named<B: Backend>(subject: &Subject<B>) {
    let all = memory_weights(&graph(), 53);
    let layout = tiny_layout(N_CELLS, subject.backend.info().kv_types[0]);
    for wrong in all.names() {
        let mut weights = all.clone();
        let right = all.get(&wrong).unwrap().shape().to_vec();
        let mut shape = right.clone();
        shape[0] += 1;
        weights
            .insert_f32(&wrong, &shape, &vec![0.5; shape.iter().product()])
            .unwrap();
        match compile_error(subject, &weights, &layout) {
            BackendError::WeightShape { name, wanted, got } => {
                assert!(name == wrong && wanted == right && got == shape);
            }
            other => panic!("{wrong}: {other}"),
        }
    }
}

/// A graph that stores in a layer without rows cannot be compiled.
pub fn a_layer_without_rows_is_refused<B: Backend>(subject: &Subject<B>) {
    let weights = memory_weights(&graph(), 54);
    let kv_type = subject.backend.info().kv_types[0];
    let dims = (SPEC.kv_heads, SPEC.k_dim, SPEC.v_dim);
    let error = compile_error(subject, &weights, &layout(1, N_CELLS, dims, kv_type));
    let is_named = matches!(error, BackendError::NoRows { layer } if layer.0 == 1);
    assert!(is_named, "{error}");
}

/// A graph whose rows have another shape than the memory's cannot be compiled.
pub fn rows_of_another_shape_are_refused<B: Backend>(subject: &Subject<B>) {
    let kv_type = subject.backend.info().kv_types[0];
    let (heads, k, v) = (SPEC.kv_heads, SPEC.k_dim, SPEC.v_dim);
    for dims in [
        (heads * 2, k, v),
        (heads, k * 2, v),
        (heads, k, v / 2),
        (1, k * 2, v * 2),
    ] {
        let weights = memory_weights(&graph(), 55);
        let error = compile_error(subject, &weights, &layout(2, N_CELLS, dims, kv_type));
        let is_shape = matches!(error, BackendError::RowShape { .. });
        assert!(is_shape, "{dims:?}: {error}");
    }
}

/// Runs `edit`ed inputs and wants an input error (or one about rows) that leaves no trace.
fn refused<B: Backend>(subject: &Subject<B>, what: &str, edit: impl Fn(&mut Step)) {
    let backend = &subject.backend;
    let weights = memory_weights(&graph(), 56);
    let layout = tiny_layout(N_CELLS, backend.info().kv_types[0]);
    let mut compiled = subject.compile(&graph(), &weights, &layout).unwrap();
    let before = fill(backend, &mut compiled.rows, 57);
    let mut step = good_step();
    edit(&mut step);
    let error = compiled.run(&step.inputs()).expect_err(what);
    let is_input = matches!(error, BackendError::Input { .. });
    assert!(is_input, "{what}: {error:?}");
    let numbers = error.to_string();
    let numbers = numbers.chars().any(|c| c.is_ascii_digit());
    assert!(numbers, "no numbers: {error}");
    let after = dump(backend, &compiled.rows);
    assert!(after == before, "{what}: rows changed");
    // The program is still good.
    compiled.run(&good_step().inputs()).unwrap();
}

/// Inputs that are longer or shorter than the graph's shape.
pub fn inputs_of_the_wrong_length_are_refused<B: Backend>(subject: &Subject<B>) {
    let refuse = |what: &str, edit: fn(&mut Step)| refused(subject, what, edit);
    refuse("a token too many", |s| s.tokens.push(1));
    refuse("no tokens", |s| s.tokens.clear());
    refuse("a position too few", |s| s.positions.truncate(2));
    refuse("an output row too few", |s| s.output_rows.truncate(1));
    refuse("a cell too many", |s| s.parts[0].cells.push(CellIdx(1)));
    refuse("no cells", |s| s.parts[0].cells.clear());
}

/// Token ids beyond the vocabulary.
pub fn tokens_out_of_range_are_refused<B: Backend>(subject: &Subject<B>) {
    let refuse = |what: &str, edit: fn(&mut Step)| refused(subject, what, edit);
    refuse("token 96 of 96", |s| s.tokens[1] = 96);
    refuse("the largest token", |s| s.tokens[2] = u32::MAX);
}

/// Positions beyond the rows that were learnt for them.
pub fn positions_without_a_row_are_refused<B: Backend>(subject: &Subject<B>) {
    let mut b = builder(3, 3);
    let positions = b.input(Input::Positions).unwrap();
    let y = b.embed("y", positions, "pos", [8, 4]).unwrap();
    let graph = b.finish(&[y]).unwrap();
    let (weights, layout) = (memory_weights(&graph, 3), RowLayout::default());
    let mut compiled = subject.compile(&graph, &weights, &layout).unwrap();
    let mut step = step(3, 3, 0, 1);
    for (positions, is_sound) in [
        ([7, 0, 1], true),
        ([0, 8, 1], false),
        ([0, 1, u32::MAX], false),
    ] {
        step.positions = positions.into();
        let mut inputs = step.inputs();
        inputs.tokens = &[];
        let run = compiled.run(&inputs);
        let refused = matches!(run, Err(BackendError::Input { .. }));
        assert_eq!(refused, !is_sound, "{positions:?}: {run:?}");
    }
}

/// Cells beyond the memory.
pub fn cells_out_of_range_are_refused<B: Backend>(subject: &Subject<B>) {
    let refuse = |what: &str, edit: fn(&mut Step)| refused(subject, what, edit);
    refuse("cell 16 of 16", |s| s.parts[0].cells[0] = CellIdx(16));
    refuse("the largest cell", |s| {
        s.parts[0].cells[2] = CellIdx(u32::MAX)
    });
}

/// Output rows beyond the tokens.
pub fn output_rows_out_of_range_are_refused<B: Backend>(subject: &Subject<B>) {
    let refuse = |what: &str, edit: fn(&mut Step)| refused(subject, what, edit);
    refuse("row 3 of 3", |s| s.output_rows[1] = 3);
    refuse("the largest row", |s| s.output_rows[1] = u32::MAX);
}

/// Visibilities that name rows or cells that there are none of, or break their own rules.
pub fn unsound_visibilities_are_refused<B: Backend>(subject: &Subject<B>) {
    let refuse = |what: &str, edit: fn(&mut Visibility)| {
        refused(subject, what, |s| edit(&mut s.parts[0].visibility));
    };
    refuse("row 3 of 3", |v| v.groups[0].rows[2] = 3);
    refuse("a row twice", |v| v.groups[0].rows[1] = 0);
    refuse("a row in two groups", |v| {
        v.groups.push(v.groups[0].clone())
    });
    refuse("a row in no group", |v| v.groups.clear());
    refuse("a limit too few", |v| v.groups[0].limits.truncate(2));
    refuse("a run beyond the cells", |v| v.groups[0].runs[0].len = 13);
    refuse("a run of the largest length", |v| {
        v.groups[0].runs[0].len = u32::MAX;
    });
    refuse("an empty run", |v| v.groups[0].runs[0].len = 0);
    refuse("a position beyond the largest", |v| {
        v.groups[0].runs.last_mut().unwrap().pos = Pos(u32::MAX);
    });
    refuse("runs that are not in order", |v| v.groups[0].runs.reverse());
    refuse("another number of rows", |v| v.n_rows = 4);
}

/// A part of the memory that no inputs are given for.
pub fn a_missing_part_is_refused<B: Backend>(subject: &Subject<B>) {
    refused(subject, "no part", |s| s.parts.clear());
}

/// Rows of another layout than the program's are refused and stay as they are.
pub fn a_refused_run_changes_nothing<B: Backend>(subject: &Subject<B>) {
    let (backend, weights) = (&subject.backend, memory_weights(&graph(), 58));
    let kv_type = backend.info().kv_types[0];
    let layout = tiny_layout(N_CELLS, kv_type);
    let mut compiled = subject.compile(&graph(), &weights, &layout).unwrap();
    for layout in [tiny_layout(4, kv_type), RowLayout::default()] {
        compiled.rows = backend.allocate(&layout).unwrap();
        let before = fill(backend, &mut compiled.rows, 59);
        compiled.run(&good_step().inputs()).unwrap_err();
        assert!(dump(backend, &compiled.rows) == before);
    }
}
