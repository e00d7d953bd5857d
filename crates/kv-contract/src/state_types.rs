//! The contract of the types of recurrent states: a state is rounded to its type after every token,
//! whose outputs read it before.

use super::evaluate::Memory;
use super::recurrent::{LAYER, Layer, RecurrentPair};
use super::{Subject, custom, delta_rule, recurrent, scan_heads};
use kv_backend::{Backend, BackendError, RowKind, RowSpan, RowStorage};
use kv_core::{
    CellIdx,
    layers::{LayerMap, LayerMemory, RecurrentMemory},
};
use kv_rows::{KvType, RowLayout, StateType};

/// A check of one recurrent layer with states of one type.
type Check<B, L> = fn(&Subject<B>, L, StateType);

/// Runs the checks for every type that the backend stores.
fn with_every_type<B: Backend>(
    subject: &Subject<B>,
    scan: Check<B, recurrent::Sizes>,
    heads: Check<B, scan_heads::Heads>,
    delta: Check<B, delta_rule::Delta>,
) {
    let types = subject.backend.info().state_types;
    assert!(types.contains(&StateType::F32), "{types:?}");
    for state_type in types {
        for sizes in recurrent::SIZES {
            scan(subject, sizes, state_type);
        }
        for sizes in scan_heads::SIZES {
            heads(subject, sizes, state_type);
        }
        for sizes in delta_rule::SIZES {
            delta(subject, sizes, state_type);
        }
    }
}

/// Types that are not declared cannot be allocated.
pub fn undeclared_state_types_are_refused<B: Backend>(subject: &Subject<B>) {
    let declared = subject.backend.info().state_types;
    let row = RecurrentMemory {
        conv_row: 3,
        state_row: 8,
    };
    let map = LayerMap::new(vec![LayerMemory::Recurrent(row)]);
    let layout = RowLayout::new(&map, &[], KvType::F32).unwrap();
    let layout = layout.with_states(&map, 2).unwrap();
    for state_type in StateType::ALL {
        let layout = layout.clone().with_state_type(state_type);
        match subject.backend.allocate(&layout) {
            Ok(_) => assert!(
                declared.contains(&state_type),
                "{state_type} works but is not declared"
            ),
            Err(BackendError::UnsupportedStateType {
                state_type: named, ..
            }) => {
                assert_eq!(named, state_type);
                assert!(!declared.contains(&state_type), "{state_type} is declared");
            }
            Err(error) => panic!("{state_type}: {error}"),
        }
    }
}

/// Prompts and single tokens of several sequences, mixed in any order, over several runs; the
/// states that they leave behind are stored in their type.
pub fn states_of_every_type_compute<B: Backend>(subject: &Subject<B>) {
    with_every_type(subject, compute, compute, compute);
}

fn compute<B: Backend, L: Layer>(subject: &Subject<B>, sizes: L, state_type: StateType) {
    let mut both = RecurrentPair::with_state_type(subject, sizes, state_type);
    both.run_mixed();
    let n_checked = check_states(subject, both.rows(), both.evaluated(), state_type);
    assert!(n_checked >= 3, "{n_checked} states");
}

/// Compares the states of the rows with those of the evaluator, and returns how many there were.
fn check_states<B: Backend>(
    subject: &Subject<B>,
    rows: &B::Rows,
    evaluated: &Memory,
    state_type: StateType,
) -> usize {
    let states = *rows.layout().state(LAYER).unwrap();
    let n_values = states.row.state_row;
    let row_bytes = n_values * state_type.value_bytes();
    let allocated = rows.allocated_bytes(LAYER, RowKind::State).unwrap();
    assert_eq!(allocated, states.n_rows * row_bytes);
    let tolerance = match state_type {
        StateType::F32 => subject.tolerance.recurrent,
        StateType::F16 => 2e-3,
        StateType::BF16 => 1.6e-2,
    };
    let (mut bytes, mut values) = (vec![0; row_bytes], vec![0.0; n_values]);
    let mut n_checked = 0;
    for row in (0..states.n_rows as u32).map(CellIdx) {
        let Some(wanted) = evaluated.state(LAYER, row) else {
            continue;
        };
        let span = RowSpan {
            layer: LAYER,
            kind: RowKind::State,
            first: row,
            len: 1,
        };
        subject.backend.read_rows(rows, span, &mut bytes).unwrap();
        state_type.kv_type().decode_row(&bytes, &mut values);
        // A value may be rounded the other way, and the largest values are off the most then.
        let largest = wanted.iter().fold(0.0f64, |max, w| max.max(w.abs()));
        for (&got, want) in values.iter().zip(wanted) {
            let off = (f64::from(got) - want).abs();
            assert!(off <= tolerance * largest, "{got}, not {want}");
        }
        n_checked += 1;
    }
    n_checked
}

/// The same bits, whether a prompt is computed at once or token by token; and the outputs of a
/// token do not see how its own state is rounded.
pub fn states_of_every_type_continue_however_they_are_cut<B: Backend>(subject: &Subject<B>) {
    with_every_type(subject, continue_cut, continue_cut, continue_cut);
}

fn continue_cut<B: Backend, L: Layer>(subject: &Subject<B>, sizes: L, state_type: StateType) {
    let run = |state_type, pieces: &[usize]| {
        let both = RecurrentPair::with_state_type(subject, sizes, state_type);
        let mut both = both.by_single_tokens();
        let mut outputs: Vec<Vec<f32>> = Vec::new();
        for &n in pieces {
            let step = both.step(&vec![0; n]);
            let of_piece = both.run(&step);
            outputs.resize(of_piece.len(), Vec::new());
            for (all, own) in outputs.iter_mut().zip(of_piece) {
                all.extend(own);
            }
        }
        outputs
    };
    let whole = run(state_type, &[7]);
    assert_eq!(run(state_type, &[1; 7]), whole, "{state_type}");
    assert_eq!(run(state_type, &[2, 4, 1]), whole, "{state_type}");
    let first = run(state_type, &[1]);
    assert_eq!(run(StateType::F32, &[1]), first, "{state_type}");
}

/// Custom operations take states as floats: others are refused when a graph is compiled.
pub fn states_of_custom_operations_are_floats<B: Backend>(subject: &Subject<B>) {
    for state_type in subject.backend.info().state_types {
        let compiled = custom::compile_with_state_type(subject, state_type);
        match (state_type, compiled) {
            (StateType::F32, Ok(_)) => {}
            (
                named,
                Err(BackendError::StateTypeOfOp {
                    layer: LAYER,
                    state_type,
                    ..
                }),
            ) => assert_eq!(named, state_type),
            (_, Ok(_)) => panic!("states of {state_type} are taken as floats"),
            (_, Err(error)) => panic!("{state_type}: {error}"),
        }
    }
}
