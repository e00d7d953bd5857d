//! What every model has to pass: logits, continuations and what its layers remember against the
//! reference, on both backends, whichever way the tokens come in; and what its graph is made of.

use std::collections::BTreeSet;

use kv_backend::{Backend, DetachedExperts, ExpertShare, RowKind, Split};
use kv_core::{
    LayerIdx, SeqId, TokenId, Window,
    batch::Batch,
    layers::{Part, RecentTokens},
    memory::Streams,
};
use kv_graph::{Graph, GraphError, GraphShape, Input, Node, NodeId, Op, SplitPoint};
use kv_rows::KvType;
use model_core::expert_tensors::expert_layer;

use crate::recorded::{RecordKey, RecordedValues};
use crate::{Case, Runner, Setup, candle, cpu, cpu_with};

/// Largest difference of a logit that f32 arithmetic in another order may make. llama.cpp's own is
/// up to 1.5e-4 for such models.
pub const TOLERANCE: f32 = 2e-4;

/// The same for a model whose reference itself moves by 4e-4 and more where its embeddings are off
/// by a millionth.
pub const NOISY_TOLERANCE: f32 = 5e-4;

/// The largest difference for the recipe of this name.
pub fn tolerance_of(recipe: &str) -> f32 {
    match recipe {
        "qwen3_5" | "gemma3n" | "zamba2" => NOISY_TOLERANCE,
        _ => TOLERANCE,
    }
}

/// Where the first two prompts are cut into two pieces: the places where transformers gave the same
/// for both pieces as for the whole.
const CUTS: [usize; 2] = [27, 19];

/// Models that read rows of any age: their indexers choose among all keys.
const READS_ANY_AGE: [&str; 2] = ["deepseek_v32", "glm_moe_dsa"];

/// The kinds of rows that a layer may have.
const KINDS: [RowKind; 4] = [RowKind::K, RowKind::V, RowKind::Conv, RowKind::State];

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

/// The pieces in which a prompt comes in.
#[derive(Clone, Copy, Debug)]
struct Pieces {
    /// Tokens of a batch.
    n_tokens: usize,
    /// Tokens of a ubatch, at most.
    n_ubatch: u32,
}

impl Pieces {
    const fn of(n_tokens: usize, n_ubatch: u32) -> Self {
        Self { n_tokens, n_ubatch }
    }
}

/// Each prompt alone, in pieces.
fn in_pieces<B: Backend>(
    backend: impl Fn() -> B,
    case: &Case,
    pieces: Pieces,
    setup: &Setup,
) -> Vec<Vec<f32>> {
    let one = |prompt: &Vec<u32>| {
        let mut runner = Runner::new(backend(), case, setup);
        let batches = prompt.chunks(pieces.n_tokens);
        batches
            .flat_map(|tokens| runner.feed(0, tokens, pieces.n_ubatch))
            .collect()
    };
    case.reference().prompts().iter().map(one).collect()
}

/// Each prompt alone, the first two in two pieces.
fn in_two_pieces<B: Backend>(backend: impl Fn() -> B, case: &Case) -> Vec<Vec<f32>> {
    let one = |(at, prompt): (usize, &Vec<u32>)| {
        let mut runner = Runner::new(backend(), case, &Setup::default());
        let cut = CUTS.get(at).map_or(0, |&cut| cut.min(prompt.len()));
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
    in_pieces(backend, case, Pieces::of(512, 512), &Setup::default())
}

fn alone_with(case: &Case, setup: &Setup) -> Vec<Vec<f32>> {
    in_pieces(cpu, case, Pieces::of(512, 512), setup)
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
        let wanted = reference.logits(prompt);
        let wanted = match case.fork_of(prompt) {
            Some(fork) => wanted.of_first(fork.token),
            None => wanted,
        };
        let off = wanted.distance(ours);
        assert!(
            off < case.tolerance,
            "{}, prompt {prompt}, {how}: off by {off}",
            case.name
        );
    }
}

/// The CPU backend's logits are the reference's, and the same bits whichever way the tokens come
/// in.
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
    for (n_tokens, n_ubatch) in [(1, 512), (7, 512), (27, 512), (48, 7)] {
        let pieces = Pieces::of(n_tokens, n_ubatch);
        let in_pieces = in_pieces(cpu, case, pieces, &Setup::default());
        assert!(in_pieces == whole, "{}: pieces of {pieces:?}", case.name);
    }
    assert!(in_two_pieces(cpu, case) == whole, "{}", case.name);
}

/// So many threads give the same bits as others.
pub fn threads_agree(case: &Case) {
    let one = alone(|| cpu_with(1), case);
    assert!(alone(|| cpu_with(3), case) == one, "{}", case.name);
}

/// Two backends that share a model's blocks give the bits of one, wherever the model is split; it
/// is not where later blocks use the rows of earlier ones.
pub fn splits_agree(case: &Case) {
    let graph = case.model().graph(ONE).unwrap();
    let whole = alone(cpu, case);
    let mut n_points = 0;
    for n_first in 1..graph.n_blocks() {
        match SplitPoint::new(&graph, n_first) {
            Ok(point) => {
                let split = || Split::new(cpu(), cpu_with(1), point.clone());
                assert!(alone(split, case) == whole, "{}: {n_first}", case.name);
                n_points += 1;
            }
            Err(error) => {
                let error = error.to_string();
                assert!(error.contains("both must be on one side"), "{error}");
            }
        }
    }
    assert!(n_points > 0, "{}: {} blocks", case.name, graph.n_blocks());
    let share = expert_share(case, |_| true);
    if share.n_layers > 0 {
        detached_experts_agree(case, &share, &whole);
    }
}

/// A backend that leaves experts to another gives the bits of one.
fn detached_experts_agree(case: &Case, share: &ExpertShare, whole: &[Vec<f32>]) {
    let detached = || DetachedExperts::new(cpu(), cpu_with(1), share.clone()).unwrap();
    assert!(alone(detached, case) == whole, "{}: experts", case.name);
    let mixed = together(detached(), case, &Setup::default(), 7);
    assert!(mixed == whole, "{}: together", case.name);
}

/// The experts of these layers of a model.
pub fn expert_share(case: &Case, is_one: impl Fn(u32) -> bool) -> ExpertShare {
    experts_among(case.open().0.names(), is_one)
}

/// The same of a model whose weights have these names.
pub fn experts_among(names: Vec<String>, is_one: impl Fn(u32) -> bool) -> ExpertShare {
    let of_layer = names
        .into_iter()
        .filter_map(|name| Some((expert_layer(&name)?, name)));
    let wanted: Vec<(u32, String)> = of_layer.filter(|(layer, _)| is_one(*layer)).collect();
    let layers: BTreeSet<u32> = wanted.iter().map(|(layer, _)| *layer).collect();
    ExpertShare {
        weights: wanted.into_iter().map(|(_, name)| name).collect(),
        n_layers: layers.len(),
    }
}

/// With the rows of recent tokens apart, logits are the reference's, and with any types of old rows
/// the same bits whichever way the tokens come in. Models without old rows, and those that read
/// rows of any age, say so.
pub fn ages_agree(case: &Case) {
    let model = case.model();
    let some_last = RecentTokens::last(5);
    let Some(layers) = model.layers().with_recent(some_last) else {
        let sees_all = |part: &Part| part.window == Window::Full;
        assert!(
            !model.layers().parts().iter().any(sees_all),
            "{}",
            case.name
        );
        return;
    };
    if let Err(error) = model.graph(ONE).unwrap().with_recent(&layers) {
        assert!(matches!(error, GraphError::AnyAge { .. }), "{error}");
        assert!(READS_ANY_AGE.contains(&case.name), "{}: {error}", case.name);
        return;
    }
    let with_first = RecentTokens {
        n_first: 2,
        ..some_last
    };
    for recent in [some_last, with_first] {
        let same_type = Setup::with_old(KvType::F32, recent);
        let what = format!("rows of {recent} tokens apart");
        assert_close(case, &what, &alone_with(case, &same_type));
        let setup = Setup::with_old(KvType::F16, recent);
        let whole = alone_with(case, &setup);
        let mixed = together(cpu(), case, &setup, 7);
        assert!(mixed == whole, "{}: {what}, together", case.name);
        let pieces = in_pieces(cpu, case, Pieces::of(7, 512), &setup);
        assert!(pieces == whole, "{}: {what}, in pieces", case.name);
    }
}

/// The reference backend's logits are the reference's.
pub fn candle_agrees(case: &Case) {
    assert_close(case, "alone", &alone(candle, case));
    let setup = Setup::with_streams(Streams::PerSequence);
    let together = together(candle(), case, &setup, 7);
    assert_close(case, "together", &together);
    assert_close(
        case,
        "token by token",
        &in_pieces(candle, case, Pieces::of(1, 512), &Setup::default()),
    );
}

/// The likeliest continuations are the reference's: all of them on the CPU, a shorter one on
/// candle.
pub fn continuations_agree(case: &Case) {
    let reference = case.reference();
    let prompts = reference.prompts();
    let is_one = |(prompt, _): &(usize, &Vec<u32>)| case.fork_of(*prompt).is_none();
    let of_one = || prompts.iter().enumerate().filter(is_one);
    for (prompt, tokens) in of_one() {
        let wanted = reference.greedy(prompt);
        assert!(wanted.len() > 20);
        let mut runner = Runner::new(cpu(), case, &Setup::default());
        let ours = runner.greedy(tokens, wanted.len());
        assert_eq!(ours, wanted, "{}, prompt {prompt}", case.name);
    }
    let mut runner = Runner::new(candle(), case, &Setup::default());
    let (prompt, tokens) = of_one().next_back().unwrap();
    let ours = runner.greedy(tokens, 12);
    let wanted = &reference.greedy(prompt)[..12];
    assert_eq!(ours, wanted, "{}, candle", case.name);
}

fn memories_on<B: Backend>(backend: impl Fn() -> B, case: &Case, tolerance: f32) -> usize {
    let reference = case.reference();
    let mut n_compared = 0;
    for (prompt, tokens) in reference.prompts().iter().enumerate() {
        let mut runner = Runner::new(backend(), case, &Setup::that_keeps_all_rows());
        runner.feed(0, tokens, 512);
        let layers: Vec<LayerIdx> = runner.model.layers().iter().map(|(l, _)| l).collect();
        for (layer, kind) in layers.iter().flat_map(|&l| KINDS.map(|kind| (l, kind))) {
            let key = RecordKey {
                layer,
                kind,
                prompt,
            };
            // Latents have their values in their keys.
            let kind = match kind {
                RowKind::V if case.keys.is_latent() => RowKind::K,
                _ => kind,
            };
            let Some(n_values) = runner.n_values(layer, kind) else {
                continue;
            };
            // The keys of indexers are behind those of the layers, one for each.
            let of_indexer = layer.0.checked_sub(layers.len() as u32 / 2);
            let of_indexer = of_indexer
                .filter(|_| runner.is_indexer(layer))
                .map(LayerIdx);
            let recorded = match of_indexer {
                Some(layer) if key.kind == RowKind::K => {
                    let key = RecordKey { layer, ..key };
                    RecordedValues::of_indexer(&reference, key, n_values, case.keys)
                }
                _ => RecordedValues::of(case, &reference, key, n_values),
            };
            let Some(recorded) = recorded else {
                continue;
            };
            n_compared += 1;
            let block = of_indexer.unwrap_or(layer);
            if case.fork_of(prompt).is_some_and(|fork| block > fork.layer) {
                continue;
            }
            let off = recorded.distance(&runner.rows(layer, kind));
            assert!(off < tolerance, "{}, {key:?}: off by {off}", case.name);
        }
    }
    n_compared
}

/// The keys, values and states that layers hold after each prompt are those that the reference
/// recorded, on both backends. Returns how many rows or states were compared; those behind a fork
/// of the reference count, too.
pub fn memories_agree(case: &Case, tolerance: f32) -> usize {
    let n_compared = memories_on(cpu, case, tolerance);
    assert_eq!(memories_on(candle, case, tolerance), n_compared);
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

/// Checks that a graph of one token is the graph of many with fewer rows: the same nodes, and the
/// same shapes but for their first dimension. The many also choose the rows that are wanted. So a
/// snapshot of them is one of both.
pub fn differ_in_rows_alone(one: &Graph, many: &Graph) {
    let chooses = |node: &Node| matches!(node.op, Op::TakeRows | Op::Input(Input::OutputRows));
    let name = |graph: &Graph, id| graph.node(id).unwrap().name.clone();
    // What a node reads, before rows were chosen.
    let source = |&id: &NodeId| {
        let node = many.node(id).unwrap();
        let from = if chooses(node) { node.operands[0] } else { id };
        name(many, from)
    };
    let rows = |shape: &[usize]| match shape.split_first() {
        Some((&n, rest)) if [MANY.n_tokens, MANY.n_outputs].contains(&n) => [&[1], rest].concat(),
        _ => shape.to_vec(),
    };
    let kept: Vec<_> = many.nodes().iter().filter(|node| !chooses(node)).collect();
    assert_eq!(one.nodes().len(), kept.len());
    for (of_one, of_many) in one.nodes().iter().zip(kept) {
        let sources: Vec<_> = of_one.operands.iter().map(|&id| name(one, id)).collect();
        let wanted: Vec<_> = of_many.operands.iter().map(source).collect();
        assert_eq!(sources, wanted, "{}", of_one.name);
        let [a, b] = [of_one, of_many].map(|node| (&node.name, &node.op, node.dtype));
        assert_eq!(a, b);
        assert_eq!(of_one.shape, rows(&of_many.shape), "{}", of_one.name);
    }
}

/// Tests of cases that every crate with models has: logits and continuations on both backends,
/// threads, and the graphs.
#[macro_export]
macro_rules! standard_tests {
    ($cases:expr) => {
        $crate::standard_tests! {
            $cases =>
            cpu_agrees_with_the_reference_and_bit_for_bit_with_itself: cpu_agrees,
            threads_do_not_change_a_bit: threads_agree,
            two_backends_give_the_bits_of_one: splits_agree,
            old_rows_have_types_of_their_own: ages_agree,
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
