//! The contract of custom operations: rows and states go in as they should, whatever is computed.

use super::attend_batch;
use super::compiled::CompiledGraph;
use super::evaluate::floats;
use super::ops::{builder, step};
use super::{Random, Subject, assert_close};
use kv_backend::GraphInputs;
use kv_backend::{Backend, BackendError, CustomOp, CustomOps, CustomRows, CustomShape};
use kv_core::{
    CellIdx, LayerIdx, Window,
    layers::{LayerMap, LayerMemory, RecurrentMemory},
    memory::{StateGroup, StateStore},
};
use kv_graph::weights::{MemoryWeights, WeightSource};
use kv_graph::{CustomScope, CustomSizes, CustomSpec, Graph, Input};
use kv_rows::{KvType, RowLayout, StateType};

const LAYER: LayerIdx = LayerIdx(1);
const WIDTH: usize = 6;

/// The operations that [`Subject::new`] gives to every backend, one after the other.
pub fn ops() -> [CustomOps; 2] {
    let rows = CustomOps::new().with(WeightedSum).with(RankedSum);
    [rows, CustomOps::new().with(Decay)]
}

/// `y = sum(x * w) + offset`, without a state.
#[derive(Debug)]
struct WeightedSum;

impl CustomOp for WeightedSum {
    fn name(&self) -> &str {
        "contract.weigh"
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match (node.widths, node.weights, node.width, node.n_state) {
            (&[x], &[&[w]], 1, 0) if x == w => Ok(()),
            _ => Err(format!("{:?} by {:?}", node.widths, node.weights)),
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        assert!(state.is_empty());
        let weight = &rows.weights[0];
        let x = rows.operands[0].chunks_exact(weight.len());
        assert_eq!((x.len(), out.len()), (rows.n_rows, rows.n_rows));
        for (y, x) in out.iter_mut().zip(x) {
            let sum: f32 = x.iter().zip(weight.iter()).map(|(x, w)| x * w).sum();
            *y = sum + rows.spec.param("offset").ok_or("no offset")?;
        }
        Ok(())
    }
}

/// `s = gamma s + x`, `y = s z`.
#[derive(Debug)]
struct Decay;

impl CustomOp for Decay {
    fn name(&self) -> &str {
        "contract.decay"
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match node.widths {
            &[x, z] if [x, z, node.width] == [node.n_state; 3] => Ok(()),
            _ => Err(format!(
                "{:?} with a state of {}",
                node.widths, node.n_state
            )),
        }
    }

    fn rows(
        &self,
        rows: &CustomRows<'_>,
        state: &mut [f32],
        out: &mut [f32],
    ) -> Result<(), String> {
        let gamma = rows.spec.param("gamma").ok_or("no gamma")?;
        let n = state.len();
        let operands = rows.operands[0].chunks(n).zip(rows.operands[1].chunks(n));
        for ((x, z), y) in operands.zip(out.chunks_mut(n)) {
            for (((s, x), z), y) in state.iter_mut().zip(x).zip(z).zip(y) {
                *s = gamma * *s + x;
                *y = *s * z;
            }
        }
        Ok(())
    }
}

/// `y = (sum of x over the sequence) + rank w`, where the last row has rank 0.
#[derive(Debug)]
struct RankedSum;

impl CustomOp for RankedSum {
    fn name(&self) -> &str {
        "contract.ranked"
    }

    fn check(&self, node: &CustomShape<'_>) -> Result<(), String> {
        match (node.widths, node.weights, node.spec.scope) {
            (&[x], &[&[w]], CustomScope::Sequence) if [x, w] == [node.width; 2] => Ok(()),
            _ => Err(node.refusal("whole sequences of rows, and a weight as wide")),
        }
    }

    fn rows(&self, rows: &CustomRows<'_>, _: &mut [f32], out: &mut [f32]) -> Result<(), String> {
        let ([x], [w]) = (rows.all_operands()?, rows.all_weights()?);
        let mut sums = vec![0.0f32; w.len()];
        for x in x.chunks_exact(w.len()) {
            sums.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
        for (rank, out) in out.chunks_exact_mut(w.len()).rev().enumerate() {
            for ((y, sum), w) in out.iter_mut().zip(&sums).zip(w.iter()) {
                *y = sum + rank as f32 * w;
            }
        }
        Ok(())
    }
}

/// Sequences whose rows lie together, and such whose rows are mixed: one call for each, with all
/// its rows in order, and an operation after it uses the result.
pub fn custom_operations_see_whole_sequences<B: Backend>(subject: &Subject<B>) {
    let spec = CustomSpec {
        weights: vec!["w".to_owned()],
        scope: CustomScope::Sequence,
        ..CustomSpec::new("contract.ranked")
    };
    let w = weights().get("w").unwrap().to_f32();
    for seqs in [&[0][..], &[0, 0, 0, 1, 1], &[0, 1, 0, 2, 1, 0, 0]] {
        let mut b = builder(seqs.len(), 0);
        let x = b.input(Input::Embeddings { dim: WIDTH }).unwrap();
        let window = Window::Full;
        let seen = b.input(Input::BatchVisibility { window }).unwrap();
        let y = b.custom("y", &spec, &[x, seen], sizes(&[&[WIDTH]], WIDTH));
        let twice = b.scale("twice", y.unwrap(), 2.0).unwrap();
        let graph = b.finish(&[twice]).unwrap();
        let step = attend_batch::step(seqs, [window; 2], WIDTH);
        let inputs = step.inputs();
        let got = compile(subject, &graph).unwrap().run(&inputs).unwrap();
        let mut want = Vec::new();
        for (at, seq) in seqs.iter().enumerate() {
            let rows = seqs.iter().zip(inputs.embeddings.chunks_exact(WIDTH));
            let own: Vec<&[f32]> = rows.filter(|(s, _)| *s == seq).map(|(_, x)| x).collect();
            let rank = seqs[at + 1..].iter().filter(|s| *s == seq).count() as f64;
            for i in 0..WIDTH {
                let sum: f64 = own.iter().map(|x| f64::from(x[i])).sum();
                want.push(2.0 * (sum + rank * f64::from(w[i])));
            }
        }
        assert_close("rows", &got[0], &want, subject.tolerance.elementwise);
    }
}

fn weigh() -> CustomSpec {
    CustomSpec {
        params: [("offset".to_owned(), 0.25)].into(),
        weights: vec!["w".to_owned()],
        ..CustomSpec::new("contract.weigh")
    }
}

fn decay() -> CustomSpec {
    CustomSpec {
        params: [("gamma".to_owned(), 0.75)].into(),
        scope: CustomScope::State(LAYER),
        ..CustomSpec::new("contract.decay")
    }
}

fn layout(state_row: usize) -> RowLayout {
    let row = RecurrentMemory {
        conv_row: 0,
        state_row,
    };
    let map = LayerMap::new(vec![LayerMemory::Nothing, LayerMemory::Recurrent(row)]);
    let layout = RowLayout::new(&map, &[], KvType::F32).unwrap();
    layout.with_states(&map, 6).unwrap()
}

fn weigh_graph(n: usize, spec: &CustomSpec) -> Graph {
    let mut b = builder(n, 0);
    let x = b.input(Input::Embeddings { dim: WIDTH }).unwrap();
    let y = b.custom("y", spec, &[x], sizes(&[&[WIDTH]], 1)).unwrap();
    // An operation on a custom one's result, and the operand afterwards.
    let twice = b.scale("twice", y, 2.0).unwrap();
    b.finish(&[y, twice, x]).unwrap()
}

fn decay_graph(n: usize) -> Graph {
    let mut b = builder(n, 0);
    let all = b.input(Input::Embeddings { dim: 2 * WIDTH }).unwrap();
    let states = b.input(Input::States).unwrap();
    let x = b.columns("x", all, 0..WIDTH).unwrap();
    let z = b.columns("z", all, WIDTH..2 * WIDTH).unwrap();
    let y = b
        .custom("y", &decay(), &[x, z, states], sizes(&[], WIDTH))
        .unwrap();
    b.finish(&[y]).unwrap()
}

fn weights() -> MemoryWeights {
    let mut weights = MemoryWeights::new();
    let values = Random::new(3).values(WIDTH);
    weights.insert_f32("w", &[WIDTH], &values).unwrap();
    weights
}

fn compile<'a, B: Backend>(
    subject: &'a Subject<B>,
    graph: &Graph,
) -> Result<CompiledGraph<'a, B>, BackendError> {
    let compiled = subject.compile(graph, &weights(), &layout(WIDTH));
    assert!(subject.custom_ops.is_ok(), "{:?}", subject.custom_ops);
    compiled
}

/// A graph with a state, over states of a type.
pub(super) fn compile_with_state_type<B: Backend>(
    subject: &Subject<B>,
    state_type: StateType,
) -> Result<CompiledGraph<'_, B>, BackendError> {
    let layout = layout(WIDTH).with_state_type(state_type);
    let compiled = subject.compile(&decay_graph(2), &weights(), &layout);
    assert!(subject.custom_ops.is_ok(), "{:?}", subject.custom_ops);
    compiled
}

/// Every row is computed, once, and other operations use the result.
pub fn custom_rows_compute<B: Backend>(subject: &Subject<B>) {
    for n in [1, 3, 50] {
        let mut compiled = compile(subject, &weigh_graph(n, &weigh())).unwrap();
        let inputs = step(n, 0, WIDTH, 9);
        let inputs = inputs.inputs();
        let outputs = compiled.run(&inputs).unwrap();
        let w = weights().get("w").unwrap().to_f32();
        let dot = |x: &[f32]| {
            let pairs = floats(x).into_iter().zip(floats(&w));
            pairs.map(|(x, w)| x * w).sum::<f64>() + 0.25
        };
        let want: Vec<f64> = inputs.embeddings.chunks_exact(WIDTH).map(dot).collect();
        let twice: Vec<f64> = want.iter().map(|y| 2.0 * y).collect();
        let tolerance = subject.tolerance.elementwise;
        assert_close("rows", &outputs[0], &want, tolerance);
        assert_close("twice", &outputs[1], &twice, tolerance);
        assert_eq!(outputs[2], inputs.embeddings);
    }
}

fn group(rows: &[u32], source: Option<u32>, stores: &[(u32, u32)]) -> StateGroup {
    StateGroup {
        rows: rows.to_vec(),
        source: source.map(CellIdx),
        stores: stores
            .iter()
            .map(|&(n_rows, to)| StateStore {
                n_rows,
                to: CellIdx(to),
            })
            .collect(),
    }
}

/// Two sequences, rows mixed, with a snapshot in between and going back to it: every result is that
/// of the recurrence from its beginning, bit for bit.
pub fn custom_states_continue_however_they_are_cut<B: Backend>(subject: &Subject<B>) {
    let mut rows = subject.backend.allocate(&layout(WIDTH)).unwrap();
    let loaded = subject.load(&weights());
    let values = Random::new(5).values(16 * 2 * WIDTH);
    // Inputs by number, so that a row can be fed again.
    let mut feed = |inputs: &[usize], groups: &[StateGroup]| {
        let row = |&at: &usize| values[at * 2 * WIDTH..][..2 * WIDTH].to_vec();
        let embeddings: Vec<f32> = inputs.iter().flat_map(row).collect();
        let graph = decay_graph(inputs.len());
        let inputs = GraphInputs {
            embeddings: &embeddings,
            states: groups,
            ..GraphInputs::default()
        };
        subject.run(&graph, &loaded, &mut rows, &inputs).remove(0)
    };
    let alone = |inputs: &[usize]| {
        let mut state = [0.0f32; WIDTH];
        let mut out = Vec::new();
        for &at in inputs {
            let row = &values[at * 2 * WIDTH..][..2 * WIDTH];
            for i in 0..WIDTH {
                state[i] = 0.75 * state[i] + row[i];
                out.push(state[i] * row[WIDTH + i]);
            }
        }
        out
    };
    // Sequence A: inputs 0 to 4, state in row 0, snapshot after two in row 3. B: 8 to 10, row 1.
    let groups = [
        group(&[0, 2, 3, 4, 6], None, &[(2, 3), (5, 0)]),
        group(&[1, 5, 7], None, &[(3, 1)]),
    ];
    let got = feed(&[0, 8, 1, 2, 3, 9, 4, 10], &groups);
    let rows_of = |got: &[f32], rows: &[usize]| -> Vec<f32> {
        rows.iter()
            .flat_map(|r| got[r * WIDTH..][..WIDTH].to_vec())
            .collect()
    };
    assert_eq!(rows_of(&got, &[0, 2, 3, 4, 6]), alone(&[0, 1, 2, 3, 4]));
    assert_eq!(rows_of(&got, &[1, 5, 7]), alone(&[8, 9, 10]));
    // B goes on; A goes back to its snapshot and continues otherwise; then on from row 0.
    let groups = [
        group(&[0], Some(1), &[(1, 2)]),
        group(&[1, 2], Some(3), &[(2, 4)]),
    ];
    let got = feed(&[11, 5, 6], &groups);
    assert_eq!(rows_of(&got, &[0]), alone(&[8, 9, 10, 11])[3 * WIDTH..]);
    assert_eq!(rows_of(&got, &[1, 2]), alone(&[0, 1, 5, 6])[2 * WIDTH..]);
    let got = feed(&[7], &[group(&[0], Some(0), &[(1, 5)])]);
    assert_eq!(got, alone(&[0, 1, 2, 3, 4, 7])[5 * WIDTH..]);
}

/// An implementation's objection comes out when compiling, its failure when running.
pub fn what_custom_operations_refuse_is_reported<B: Backend>(subject: &Subject<B>) {
    let mut b = builder(2, 0);
    let x = b.input(Input::Embeddings { dim: WIDTH }).unwrap();
    let y = b
        .custom("y", &weigh(), &[x], sizes(&[&[WIDTH]], 3))
        .unwrap();
    let graph = b.finish(&[y]).unwrap();
    let text = compile(subject, &graph).err().unwrap().to_string();
    assert_eq!(
        text,
        "custom operation 'contract.weigh' (node 'y'): [6] by [[6]]"
    );
    let without_offset = CustomSpec {
        params: Default::default(),
        ..weigh()
    };
    let mut compiled = compile(subject, &weigh_graph(2, &without_offset)).unwrap();
    let failed = compiled.run(&step(2, 0, WIDTH, 9).inputs());
    let text = failed.unwrap_err().to_string();
    assert_eq!(
        text,
        "custom operation 'contract.weigh' (node 'y'): no offset"
    );
}

/// A name that is not registered, and a layer without states.
pub fn unregistered_operations_are_refused<B: Backend>(subject: &Subject<B>) {
    let unknown = CustomSpec {
        name: "unknown".into(),
        ..weigh()
    };
    let compiled = compile(subject, &weigh_graph(1, &unknown));
    let text = compiled.err().unwrap().to_string();
    assert!(
        text.starts_with("custom operation 'unknown' (node 'y'): not registered"),
        "{text}"
    );
    let known = "contract.decay, contract.ranked, contract.weigh";
    assert!(text.contains(known), "{text}");
    let compiled = subject.compile(&decay_graph(1), &weights(), &RowLayout::default());
    let none = compiled.err().unwrap();
    assert!(
        matches!(none, BackendError::NoRows { layer: LAYER }),
        "{none}"
    );
}

fn sizes<'a>(weights: &'a [&'a [usize]], width: usize) -> CustomSizes<'a> {
    CustomSizes { weights, width }
}
