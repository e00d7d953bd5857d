//! What every model has to pass: logits, continuations and what its layers remember against the
//! reference, on both backends, whichever way the tokens come in; and what its graph is made of.

use std::collections::BTreeSet;

use kv_core::LayerIdx;
use kv_core::backend::{Backend, RowKind};
use kv_core::batch::Batch;
use kv_core::graph::{Graph, GraphShape};
use kv_core::memory::Streams;
use kv_core::{SeqId, TokenId};

use crate::{Case, KeyOrder, Reference, Runner, Setup, candle, cpu, cpu_with, distance, last_rows};

/// Largest difference of a logit that f32 arithmetic in another order may make. llama.cpp's own is up
/// to 1.5e-4 for such models.
pub const TOLERANCE: f32 = 2e-4;

/// Where the reference cut the first two prompts when it fed them in two pieces.
const RECORDED_CUTS: [usize; 2] = [27, 19];

/// One token.
pub const ONE: GraphShape = GraphShape {
    n_tokens: 1,
    n_outputs: 1,
};
/// Many tokens, of which some are wanted.
pub const MANY: GraphShape = GraphShape {
    n_tokens: 7,
    n_outputs: 2,
};

/// Each prompt alone, cut into pieces of so many tokens, in ubatches of so many.
fn in_pieces<B: Backend>(
    backend: impl Fn() -> B,
    case: &Case,
    (piece, n_ubatch): (usize, u32),
) -> Vec<Vec<f32>> {
    let one = |prompt: &Vec<u32>| {
        let mut runner = Runner::new(backend(), case, &Setup::default());
        let pieces = prompt.chunks(piece);
        pieces
            .flat_map(|tokens| runner.feed(0, tokens, n_ubatch))
            .collect()
    };
    case.reference().prompts().iter().map(one).collect()
}

/// Each prompt alone, in the two pieces in which the reference was fed, where it was.
fn in_recorded_pieces<B: Backend>(backend: impl Fn() -> B, case: &Case) -> Vec<Vec<f32>> {
    let one = |(at, prompt): (usize, &Vec<u32>)| {
        let mut runner = Runner::new(backend(), case, &Setup::default());
        let cut = RECORDED_CUTS
            .get(at)
            .map_or(0, |&cut| cut.min(prompt.len()));
        let (first, second) = prompt.split_at(cut);
        let pieces = [first, second].into_iter().filter(|p| !p.is_empty());
        pieces
            .flat_map(|tokens| runner.feed(0, tokens, 512))
            .collect()
    };
    let prompts = case.reference().prompts();
    prompts.iter().enumerate().map(one).collect()
}

fn alone<B: Backend>(backend: impl Fn() -> B, case: &Case) -> Vec<Vec<f32>> {
    in_pieces(backend, case, (512, 512))
}

/// All three prompts in one batch, their tokens interleaved.
fn together<B: Backend>(backend: B, case: &Case, setup: &Setup, n_ubatch: u32) -> Vec<Vec<f32>> {
    let prompts = case.reference().prompts();
    let mut runner = Runner::new(backend, case, setup);
    let (mut batch, mut owners) = (Batch::new(), Vec::new());
    for at in 0..prompts.iter().map(Vec::len).max().unwrap() {
        for (seq, prompt) in prompts.iter().enumerate().filter(|(_, p)| at < p.len()) {
            batch
                .push_token(TokenId(prompt[at]))
                .in_sequence(SeqId(u32::try_from(seq).unwrap()))
                .with_output();
            owners.push(seq);
        }
    }
    let mut logits = vec![Vec::new(); 3];
    for (owner, row) in owners.into_iter().zip(runner.decode(&batch, n_ubatch)) {
        logits[owner].extend(row);
    }
    logits
}

fn assert_close(case: &Case, how: &str, logits: &[Vec<f32>]) {
    let reference = case.reference();
    for (prompt, ours) in logits.iter().enumerate() {
        let theirs = reference.logits(prompt);
        let off = distance(last_rows(ours, theirs.len()), &theirs);
        assert!(
            off < TOLERANCE,
            "{}, prompt {prompt}, {how}: off by {off}",
            case.name
        );
    }
}

/// The CPU backend's logits are the reference's, and the same bits whichever way the tokens come in.
pub fn cpu_agrees(case: &Case) {
    let whole = alone(cpu, case);
    assert_close(case, "alone", &whole);
    for n_ubatch in [512, 7] {
        for streams in [Streams::Shared, Streams::PerSequence] {
            let mixed = together(cpu(), case, &Setup::with_streams(streams), n_ubatch);
            assert!(
                mixed == whole,
                "{}: together, {streams:?}, ubatch {n_ubatch}",
                case.name
            );
        }
    }
    for pieces in [(1, 512), (7, 512), (27, 512), (48, 7)] {
        let in_pieces = in_pieces(cpu, case, pieces);
        assert!(in_pieces == whole, "{}: pieces of {pieces:?}", case.name);
    }
    assert!(in_recorded_pieces(cpu, case) == whole, "{}", case.name);
}

/// So many threads give the same bits as others.
pub fn threads_agree(case: &Case) {
    let one = alone(|| cpu_with(1), case);
    assert!(alone(|| cpu_with(3), case) == one, "{}", case.name);
}

/// The reference backend's logits are the reference's.
pub fn candle_agrees(case: &Case) {
    assert_close(case, "alone", &alone(candle, case));
    for (streams, n_ubatch) in [(Streams::Shared, 512), (Streams::PerSequence, 7)] {
        let setup = Setup::with_streams(streams);
        let together = together(candle(), case, &setup, n_ubatch);
        assert_close(case, &format!("together, {streams:?}"), &together);
    }
    assert_close(case, "in two", &in_recorded_pieces(candle, case));
    assert_close(case, "token by token", &in_pieces(candle, case, (1, 512)));
}

/// The likeliest continuations are the reference's: all of them on the CPU, a shorter one on candle.
pub fn continuations_agree(case: &Case) {
    let reference = case.reference();
    for (prompt, tokens) in reference.prompts().iter().enumerate() {
        let wanted = reference.greedy(prompt);
        assert!(wanted.len() > 20);
        let mut runner = Runner::new(cpu(), case, &Setup::default());
        let ours = runner.greedy(tokens, wanted.len());
        assert_eq!(ours, wanted, "{}, prompt {prompt}", case.name);
    }
    let mut runner = Runner::new(candle(), case, &Setup::default());
    let ours = runner.greedy(&reference.prompts()[2], 12);
    assert_eq!(ours, reference.greedy(2)[..12], "{}, candle", case.name);
}

/// The last inputs of a convolution, `[width - 1, channels]`: the reference keeps one more, as
/// `[channels, width]`.
fn conv_state(reference: &Reference, layer: LayerIdx) -> Option<Vec<f32>> {
    let (shape, values) = reference.values(&format!("conv_state_l{layer}_0"))?;
    let &[channels, width] = &*shape else {
        return None;
    };
    let at = (1..width).flat_map(|k| (0..channels).map(move |c| c * width + k));
    Some(at.map(|at| values[at]).collect())
}

/// Keys of every token, `[tokens, heads, dim]`, in the order of the file.
fn keys(case: &Case, reference: &Reference, layer: LayerIdx) -> Option<Vec<f32>> {
    let (shape, mut values) = reference.values(&format!("k_l{layer}_0"))?;
    let n = match case.keys {
        KeyOrder::Same => 0,
        KeyOrder::Pairs => shape[2],
        KeyOrder::FirstPairs(n) => n,
    };
    for head in values.chunks_exact_mut(shape[2]) {
        let halves = head.to_vec();
        for i in 0..n / 2 {
            (head[2 * i], head[2 * i + 1]) = (halves[i], halves[i + n / 2]);
        }
    }
    Some(values)
}

fn memories_on<B: Backend>(backend: B, case: &Case, tolerance: f32) -> usize {
    let reference = case.reference();
    let mut runner = Runner::new(backend, case, &Setup::with_snapshots(3));
    runner.feed(0, &reference.prompts()[0], 512);
    let mut n_compared = 0;
    for (layer, _) in runner.model.layers().iter() {
        let values = |what: &str| Some(reference.values(&format!("{what}_l{layer}_0"))?.1);
        for (kind, wanted) in [
            (RowKind::Conv, conv_state(&reference, layer)),
            (RowKind::State, values("ssm_state")),
            (RowKind::K, keys(case, &reference, layer)),
            (RowKind::V, values("v")),
        ] {
            let Some(wanted) = wanted else { continue };
            let off = distance(&runner.rows(layer, kind), &wanted);
            assert!(
                off < tolerance,
                "{}, layer {layer}, {kind:?}: off by {off}",
                case.name
            );
            n_compared += 1;
        }
    }
    n_compared
}

/// What layers remember of the first prompt is what the reference recorded, on both backends. Returns
/// how many tensors it recorded.
pub fn memories_agree(case: &Case, tolerance: f32) -> usize {
    let n_compared = memories_on(cpu(), case, tolerance);
    assert_eq!(memories_on(candle(), case, tolerance), n_compared);
    n_compared
}

/// The graph uses every tensor of the file, in short contexts or in long ones, and wants no other.
pub fn every_tensor_is_used(case: &Case) {
    let in_file: BTreeSet<String> = case.open().0.names().into_iter().collect();
    let model = case.model();
    let contexts = [1, usize::MAX].map(|n_tokens| model.for_context(n_tokens));
    let models = contexts.into_iter().flatten().chain([model]);
    let graphs = models.map(|model| model.graph(ONE).unwrap());
    let names = |graph: Graph| -> Vec<String> {
        let weights = graph.weights().iter();
        weights.map(|w| w.name.clone()).collect()
    };
    let used: BTreeSet<String> = graphs.flat_map(names).collect();
    assert_eq!(in_file, used, "{}", case.name);
}

/// The graph is the same after a way through JSON.
pub fn survives_json(case: &Case) {
    let graph = case.model().graph(MANY).unwrap();
    assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
}

/// Two models whose only difference is where the output matrix comes from.
pub fn differ_in_the_output_matrix_alone(tied: &Case, untied: &Case) {
    let [tied, untied] = [tied, untied].map(|case| case.model().graph(ONE).unwrap());
    let diff = tied.diff(&untied);
    assert!(
        diff.only_left.is_empty() && diff.only_right.is_empty(),
        "{diff}"
    );
    let names: Vec<_> = diff.changed.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["result_output"]);
}

/// Tests of cases that every crate with models has: logits and continuations on both backends, threads,
/// and the graphs.
#[macro_export]
macro_rules! standard_tests {
    ($cases:expr) => {
        $crate::standard_tests! {
            $cases =>
            cpu_agrees_with_the_reference_and_bit_for_bit_with_itself: cpu_agrees,
            threads_do_not_change_a_bit: threads_agree,
            candle_agrees_with_the_reference: candle_agrees,
            the_likeliest_continuations_are_the_references: continuations_agree,
            every_tensor_of_the_file_is_used_and_no_other_is_wanted: every_tensor_is_used,
            graphs_survive_their_json_form: survives_json,
        }
    };
    ($cases:expr => $($test:ident: $check:ident,)*) => {
        $(
            #[test]
            fn $test() {
                $cases.iter().for_each($crate::checks::$check);
            }
        )*
    };
}
