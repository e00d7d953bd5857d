//! The contract of programs that run with fewer tokens and outputs than their graph has, and of
//! those that do not.

use super::scene::{memory_weights, text, tiny_layout, tiny_llama};
use super::{Random, Scene, Subject};
use kv_backend::GraphInputs;
use kv_backend::{Backend, BackendError};
use kv_core::Window;
use kv_graph::GraphShape;

/// The most tokens and outputs of the program under test.
const CAPACITY: GraphShape = GraphShape {
    n_tokens: 40,
    n_outputs: 5,
};

/// Tokens and outputs of runs, in an order in which sizes grow and shrink.
const RUNS: [[usize; 2]; 11] = [
    [40, 5],
    [1, 1],
    [7, 0],
    [7, 5],
    [33, 1],
    [2, 2],
    [39, 4],
    [1, 0],
    [5, 5],
    [32, 3],
    [9, 2],
];

/// The numbers of tokens that are worth a program ascend, from one token on.
pub fn program_capacities_ascend<B: Backend>(subject: &Subject<B>) {
    let capacities = subject.backend.program_capacities();
    assert!(!capacities.contains(&0), "{capacities:?}");
    assert!(capacities.is_sorted_by(|a, b| a < b), "{capacities:?}");
}

/// One program of a small model runs with other numbers of tokens and outputs in turns, and gives
/// the bits of programs of exactly these; a backend without capacities refuses all but its own.
pub fn one_program_runs_many_shapes<B: Backend>(subject: &Subject<B>) {
    let weights = memory_weights(&tiny_llama(CAPACITY), 51);
    let n_cells = RUNS.iter().map(|[n, _]| n).sum();
    let layout = tiny_layout(n_cells, subject.backend.info().kv_types[0]);
    let takes_fewer = !subject.backend.program_capacities().is_empty();
    let mut one = subject
        .compile(&tiny_llama(CAPACITY), &weights, &layout)
        .unwrap();
    let cells: Vec<u32> = (0..n_cells as u32).collect();
    let tokens = text(&mut Random::new(52), 0, 0, &cells);
    let (mut scene, mut rest) = (Scene::default(), &tokens[..]);
    for [n_tokens, n_outputs] in RUNS {
        let (now, later) = rest.split_at(n_tokens);
        rest = later;
        let wanted: Vec<u32> = (0..n_outputs as u32).collect();
        let step = scene.step(now, Window::Full, &wanted);
        let shape = GraphShape {
            n_tokens,
            n_outputs,
        };
        let inputs = GraphInputs {
            shape: Some(shape),
            ..step.inputs()
        };
        let got = one.run(&inputs);
        if shape == CAPACITY && !takes_fewer {
            got.unwrap();
        } else if takes_fewer {
            let loaded = subject.load(&weights);
            let wanted = subject.run(&tiny_llama(shape), &loaded, &mut one.rows, &step.inputs());
            assert!(got.unwrap() == wanted, "{shape:?}");
        } else {
            assert_refused(&got.map(drop), shape);
        }
    }
}

/// A run of more tokens or outputs than the program's is refused.
pub fn runs_beyond_a_program_are_refused<B: Backend>(subject: &Subject<B>) {
    let weights = memory_weights(&tiny_llama(CAPACITY), 51);
    let layout = tiny_layout(64, subject.backend.info().kv_types[0]);
    let small = GraphShape {
        n_tokens: 3,
        n_outputs: 1,
    };
    let tokens = text(&mut Random::new(52), 0, 0, &[0, 1, 2, 3]);
    for (n_tokens, n_outputs) in [(4, 1), (3, 2)] {
        let wanted: Vec<u32> = (0..n_outputs).collect();
        let step = Scene::default().step(&tokens[..n_tokens], Window::Full, &wanted);
        let shape = GraphShape {
            n_tokens,
            n_outputs: wanted.len(),
        };
        let inputs = GraphInputs {
            shape: Some(shape),
            ..step.inputs()
        };
        // Of this graph alone: a larger one has room.
        let loaded = subject.load(&weights);
        let program = subject
            .backend
            .compile(&tiny_llama(small), &loaded, &layout);
        let mut rows = subject.backend.allocate(&layout).unwrap();
        let (mut program, mut outputs) = (program.unwrap(), Default::default());
        let run = (subject.backend).run(&mut program, &mut rows, &inputs, &mut outputs);
        assert_refused(&run, shape);
    }
}

fn assert_refused(run: &Result<(), BackendError>, shape: GraphShape) {
    let is_refused = matches!(run, Err(BackendError::Input { input: "shape", .. }));
    assert!(is_refused, "{shape:?}: {run:?}");
}
