//! The contract of attention as a node of a graph: among the tokens of a ubatch, and with sinks and
//! linear biases, which come from weights and positions.

use super::evaluate::{Memory, evaluate, floats};
use super::ops::builder;
use super::scene::{Scene, Step, Token, layout, memory_weights};
use super::{Random, Subject, assert_close};
use kv_backend::{Backend, BackendError};
use kv_core::{
    LayerIdx, PartIdx, SeqId, TokenId, Window,
    batch::{Batch, BatchRules, SplitPolicy, validate},
    memory::{BatchVisibility, batch_visibility},
};
use kv_graph::{
    Alibi, AttendSpec, Attention, DistanceBuckets, DistanceScores, Distances, Graph, Input, NodeId,
};
use kv_rows::RowLayout;

/// An attention with the weight of sinks.
fn with_sinks(spec: AttendSpec) -> Attention<'static> {
    Attention {
        spec,
        sinks: Some("sinks.w"),
    }
}

const SPEC: AttendSpec = AttendSpec {
    n_heads: 6,
    kv_heads: 3,
    k_dim: 8,
    v_dim: 12,
    scale: 0.4,
    soft_cap: None,
    alibi: None,
};
const DIM: usize = 6 * 8 + 3 * 8 + 3 * 12;
const N_CELLS: usize = 48;

/// Queries, keys and values, cut from embedding rows.
fn qkv(b: &mut kv_graph::GraphBuilder) -> [NodeId; 3] {
    let n = b.shape().n_tokens;
    let x = b.input(Input::Embeddings { dim: DIM }).unwrap();
    let mut first = 0;
    [("q", 6, 8), ("k", 3, 8), ("v", 3, 12)].map(|(name, heads, dim)| {
        let flat = b.columns(&format!("{name}.flat"), x, first..first + heads * dim);
        first += heads * dim;
        b.reshape(name, flat.unwrap(), &[n, heads, dim]).unwrap()
    })
}

/// Two attentions through different windows, added, so that neither can be another's.
fn within(spec: AttendSpec, n: usize, windows: [Window; 2]) -> Graph {
    let mut b = builder(n, 0);
    let qkv = qkv(&mut b);
    let near = b.attend_batch("near", with_sinks(spec), qkv, windows[0]);
    let far = b.attend_batch("far", spec, qkv, windows[1]);
    let (near, far) = (near.unwrap(), far.unwrap());
    let sum = b.add("sum", near, far).unwrap();
    b.finish(&[near, sum]).unwrap()
}

/// Tokens of these sequences as one ubatch, with what they see through `windows`.
pub(super) fn step(seqs: &[u32], windows: [Window; 2], dim: usize) -> Step {
    let mut batch = Batch::new();
    for &seq in seqs {
        batch.push_token(TokenId(0)).in_sequence(SeqId(seq));
    }
    let rules = BatchRules {
        n_batch: 512,
        n_seqs: 8,
        n_vocab: 1,
        n_embd: 1,
    };
    let valid = validate(&batch, &rules, |_| None).unwrap();
    let ubatches = SplitPolicy::WholeSequences.split(&valid, 512).unwrap();
    let seen = windows.map(|window| {
        let mut seen = BatchVisibility {
            window,
            ..BatchVisibility::default()
        };
        batch_visibility(&ubatches[0], &mut seen);
        seen
    });
    Step {
        positions: ubatches[0].positions.clone(),
        embeddings: Random::new(61).values(seqs.len() * dim),
        batch: seen.into(),
        ..Step::default()
    }
}

/// A token of one of two texts in turn.
fn token(at: u32, pos: u32, cell: u32) -> Token {
    let text = at as usize % 2;
    Token {
        id: 0,
        text,
        pos,
        cell,
    }
}

/// Runs `graph` over `layout` and compares every output with its definition.
fn compare<B: Backend>(subject: &Subject<B>, graph: &Graph, layout: &RowLayout, step: &Step) {
    let weights = memory_weights(graph, 62);
    let memory = &mut Memory::default();
    let wanted = evaluate(graph, &weights, layout, memory, &step.inputs());
    for (got, wanted) in run(subject, graph, layout, step).iter().zip(&wanted) {
        assert_close("attention", got, wanted, subject.tolerance.attend);
    }
}

/// The outputs of `graph` over fresh rows of `layout`, the same at a second run.
fn run<B: Backend>(
    subject: &Subject<B>,
    graph: &Graph,
    layout: &RowLayout,
    step: &Step,
) -> Vec<Vec<f32>> {
    let weights = memory_weights(graph, 62);
    let mut compiled = subject.compile(graph, &weights, layout).unwrap();
    let [first, second] = [(); 2].map(|()| compiled.run(&step.inputs()).unwrap());
    assert_eq!(first, second, "nothing is remembered from run to run");
    first
}

/// Every token sees the whole of its sequence, or what a window leaves of it, and no other
/// sequence.
pub fn tokens_attend_within_their_ubatch<B: Backend>(subject: &Subject<B>) {
    let alibi = Some(Alibi::new(8.0));
    let windows = [Window::Symmetric(5), Window::Full];
    for spec in [SPEC, AttendSpec { alibi, ..SPEC }] {
        for seqs in [&[0][..], &[0; 70], &[1, 0, 0, 1, 2, 2, 2, 1, 0, 5, 1, 1]] {
            let graph = within(spec, seqs.len(), windows);
            let layout = RowLayout::default();
            compare(subject, &graph, &layout, &step(seqs, windows, DIM));
        }
    }
}

/// Scores get added what the bucket of a distance says: out of a weight, or of tables that rows of
/// queries and keys have.
pub fn scores_by_distance_add<B: Backend>(subject: &Subject<B>) {
    let windows = [Window::Symmetric(9), Window::Full];
    for buckets in [
        DistanceBuckets::Halves {
            n: 8,
            max_distance: 20,
        },
        DistanceBuckets::Signed {
            span: 4,
            max_distance: 16,
        },
        DistanceBuckets::Single { span: 4 },
    ] {
        for seqs in [&[0][..], &[0; 70], &[1, 0, 0, 1, 2, 2, 2, 1, 0, 5, 1, 1]] {
            let graph = by_distance(buckets, seqs.len(), windows);
            compare(
                subject,
                &graph,
                &RowLayout::default(),
                &step(seqs, windows, DIM),
            );
        }
    }
}

/// The same over a memory, out of a weight.
pub fn stored_keys_have_scores_by_distance<B: Backend>(subject: &Subject<B>) {
    let kv_type = subject.backend.info().kv_types[0];
    let layout = layout(2, N_CELLS, (SPEC.kv_heads, SPEC.k_dim, SPEC.v_dim), kv_type);
    let (part, layer, window) = (PartIdx(0), LayerIdx(1), Window::Full);
    let cells = Random::new(63).permutation(N_CELLS);
    let token = |(at, &cell)| token(at, 100 + at, cell);
    let tokens: Vec<Token> = (0..).zip(&cells[..31]).map(token).collect();
    for buckets in [
        DistanceBuckets::Earlier {
            n: 8,
            max_distance: 20,
        },
        DistanceBuckets::Halves {
            n: 8,
            max_distance: 20,
        },
    ] {
        let mut b = builder(tokens.len(), 0);
        let [q, k, v] = qkv(&mut b);
        let cells = b.input(Input::Cells { part }).unwrap();
        let seen = b.input(Input::Visibility { part, window }).unwrap();
        let stored = b.store_kv("store", layer, [k, v, cells]).unwrap();
        let scores = DistanceScores::Weight("rel.w");
        let distances = Distances { buckets, scores };
        let y = b.attend_relative("kqv", layer, SPEC, [q, stored, seen], distances);
        let graph = b.finish(&[y.unwrap()]).unwrap();
        let mut step = Scene::default().step(&tokens, window, &[]);
        step.embeddings = Random::new(64).values(tokens.len() * DIM);
        compare(subject, &graph, &layout, &step);
    }
}

/// Attention by a weight of buckets through the first window, and by tables, which are the queries
/// and keys themselves, through the second.
fn by_distance(buckets: DistanceBuckets, n: usize, windows: [Window; 2]) -> Graph {
    let mut b = builder(n, 0);
    let [q, k, v] = qkv(&mut b);
    let spec = AttendSpec {
        soft_cap: Some(3.0),
        ..SPEC
    };
    let weight = Distances {
        buckets,
        scores: DistanceScores::Weight("rel.w"),
    };
    let tables = Distances {
        buckets,
        scores: DistanceScores::Tables([q, k]),
    };
    let near = b.attend_batch_relative("near", spec, [q, k, v], windows[0], weight);
    let far = b.attend_batch_relative("far", spec, [q, k, v], windows[1], tables);
    b.finish(&[near.unwrap(), far.unwrap()]).unwrap()
}

/// The same attention over a memory: sinks are a weight, biases follow the positions.
pub fn sinks_and_biases_come_from_the_graph<B: Backend>(subject: &Subject<B>) {
    let kv_type = subject.backend.info().kv_types[0];
    let layout = layout(2, N_CELLS, (SPEC.kv_heads, SPEC.k_dim, SPEC.v_dim), kv_type);
    let part = PartIdx(0);
    let window = Window::Sliding(20);
    let spec = AttendSpec {
        alibi: Some(Alibi::new(4.0)),
        ..SPEC
    };
    let cells = Random::new(63).permutation(N_CELLS);
    let token = |(at, &cell)| token(at, 100 + at / 2, cell);
    let tokens: Vec<Token> = (0..).zip(&cells[..31]).map(token).collect();
    let mut b = builder(tokens.len(), 0);
    let [q, k, v] = qkv(&mut b);
    let cells = b.input(Input::Cells { part }).unwrap();
    let seen = b.input(Input::Visibility { part, window }).unwrap();
    let layer = LayerIdx(1);
    let stored = b.store_kv("store", layer, [k, v, cells]).unwrap();
    let y = b.attend("kqv", layer, with_sinks(spec), [q, stored, seen]);
    let graph = b.finish(&[y.unwrap()]).unwrap();
    let mut step = Scene::default().step(&tokens, window, &[]);
    step.embeddings = Random::new(64).values(tokens.len() * DIM);
    compare(subject, &graph, &layout, &step);
    // In three nodes, over some of the cells: the same, and the tables are as defined.
    let n_kv = step.parts[0].cells.iter().map(|c| c.as_usize() + 1).max();
    for n_kv in [n_kv.unwrap(), N_CELLS] {
        let plain = graph.with_plain_attention(|_| n_kv).unwrap();
        compare(subject, &plain, &layout, &step);
        let [got, wanted] = [&plain, &graph].map(|graph| run(subject, graph, &layout, &step));
        let (wanted, allowed) = (floats(&wanted[0]), 2.0 * subject.tolerance.attend);
        assert_close("plain and fused", &got[0], &wanted, allowed);
    }
}

/// Scores, weights and sums are what they are defined to be, also for rows that see nothing; a
/// table that does not reach what a row sees is refused.
pub fn plain_attention_is_three_nodes<B: Backend>(subject: &Subject<B>) {
    let kv_type = subject.backend.info().kv_types[0];
    let layout = layout(2, N_CELLS, (SPEC.kv_heads, SPEC.k_dim, SPEC.v_dim), kv_type);
    let (part, layer, window) = (PartIdx(0), LayerIdx(1), Window::Sliding(4));
    let soft_cap = Some(2.0);
    for (spec, sinks) in [
        (SPEC, None),
        (AttendSpec { soft_cap, ..SPEC }, Some("sinks.w")),
    ] {
        let graph = |n_kv: usize| {
            let mut b = builder(5, 0);
            let [q, k, v] = qkv(&mut b);
            let cells = b.input(Input::Cells { part }).unwrap();
            let seen = b.input(Input::Visibility { part, window }).unwrap();
            let stored = b.store_kv("store", layer, [k, v, cells]).unwrap();
            let kq = b.kq("kq", layer, spec, [q, stored], n_kv).unwrap();
            let attention = Attention { spec, sinks };
            let weights = b.kq_soft_max("kq_soft_max", attention, [kq, seen]);
            let weights = weights.unwrap();
            let kqv = b.kqv("kqv", layer, spec, [weights, stored]).unwrap();
            b.finish(&[kq, weights, kqv]).unwrap()
        };
        let tokens = [0, 1, 2, 3, 4].map(|pos| token(pos, pos, 3 * pos));
        let mut step = Scene::default().step(&tokens, window, &[]);
        step.embeddings = Random::new(65).values(tokens.len() * DIM);
        let group = &mut step.parts[0].visibility.groups[1];
        group.limits[0] = kv_core::PosRange::EMPTY;
        compare(subject, &graph(17), &layout, &step);
        compare(subject, &graph(13), &layout, &step);
        let (short, weights) = (graph(12), memory_weights(&graph(12), 62));
        let mut short = subject.compile(&short, &weights, &layout).unwrap();
        let error = short.run(&step.inputs()).unwrap_err();
        assert!(matches!(error, BackendError::Input { .. }), "{error:?}");
    }
}

/// A window that was not given, rows that are not there, too few positions.
pub fn unsound_batch_visibilities_are_refused<B: Backend>(subject: &Subject<B>) {
    let windows = [Window::Symmetric(5), Window::Full];
    let alibi = Some(Alibi::new(8.0));
    let graph = within(AttendSpec { alibi, ..SPEC }, 4, windows);
    let (weights, layout) = (memory_weights(&graph, 62), RowLayout::default());
    let mut compiled = subject.compile(&graph, &weights, &layout).unwrap();
    let mut run = |change: fn(&mut Step)| {
        let mut step = step(&[0, 0, 1, 1], windows, DIM);
        change(&mut step);
        compiled.run(&step.inputs())
    };
    run(|_| {}).unwrap();
    let wrong: [fn(&mut Step); 5] = [
        |s| s.batch.clear(),
        |s| s.batch[1].window = Window::Sliding(3),
        |s| s.batch[0].visibility.groups[0].runs[0].len += 3,
        |s| s.batch[1].visibility.groups.truncate(1),
        |s| s.positions.truncate(3),
    ];
    for change in wrong {
        let error = run(change).unwrap_err();
        assert!(matches!(error, BackendError::Input { .. }), "{error:?}");
    }
}
