//! The contract of sparse attention: an indexer with keys of its own, and attention over what it
//! chose.

use super::evaluate::{Memory, evaluate};
use super::scene::{memory_weights, text};
use super::{Random, Scene, Subject, assert_close};
use kv_backend::{Backend, BackendError};
use kv_core::{
    LayerIdx, PartIdx, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
};
use kv_graph::{AttendSpec, Graph, GraphBuilder, GraphShape, IndexSpec, Input};
use kv_rows::{KvType, RowLayout};

/// Latents that six heads share.
const SPEC: AttendSpec = AttendSpec {
    n_heads: 6,
    kv_heads: 1,
    k_dim: 40,
    v_dim: 32,
    scale: 0.2,
    soft_cap: None,
    alibi: None,
};
const INDEX: IndexSpec = IndexSpec {
    n_heads: 3,
    dim: 20,
    top_k: 7,
};
/// The layers of the latents and of the indexer's keys.
const LAYERS: [LayerIdx; 2] = [LayerIdx(0), LayerIdx(1)];
const N_CELLS: usize = 70;

fn layout(index_dim: usize, kv_type: KvType) -> RowLayout {
    let memory = |k_dim, v_dim| {
        LayerMemory::Latent(AttentionMemory {
            kv_heads: 1,
            k_dim,
            v_dim,
            window: Window::Full,
        })
    };
    let layers = vec![memory(SPEC.k_dim, SPEC.v_dim), memory(index_dim, 0)];
    RowLayout::new(&LayerMap::new(layers), &[N_CELLS], kv_type).unwrap()
}

/// The choices of an indexer, attention over them, and attention over everything.
fn graph(n_tokens: usize, index: IndexSpec) -> Graph {
    let (part, window) = (PartIdx(0), Window::Full);
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs: 0,
    });
    let tokens = b.input(Input::Tokens).unwrap();
    let cells = b.input(Input::Cells { part }).unwrap();
    let visibility = b.input(Input::Visibility { part, window }).unwrap();
    let x = b.embed("x", tokens, "embd", [96, 32]).unwrap();
    let heads = |b: &mut GraphBuilder, what: &str, n: usize, dim: usize| {
        let y = b.linear(what, x, &format!("{what}.w"), n * dim).unwrap();
        b.reshape(&format!("{what}_heads"), y, &[n_tokens, n, dim])
            .unwrap()
    };
    let row = heads(&mut b, "row", 1, SPEC.k_dim);
    let key = heads(&mut b, "key", 1, index.dim);
    let q = heads(&mut b, "q", SPEC.n_heads, SPEC.k_dim);
    let index_q = heads(&mut b, "index_q", index.n_heads, index.dim);
    let weights = b.linear("weights", x, "weights.w", index.n_heads).unwrap();
    let rows = b.store_k("rows", LAYERS[0], [row, cells]).unwrap();
    let keys = b.store_k("keys", LAYERS[1], [key, cells]).unwrap();
    let operands = [index_q, weights, keys, visibility];
    let chosen = b.index("chosen", LAYERS[1], index, operands).unwrap();
    let operands = [q, rows, visibility, chosen];
    let sparse = b
        .attend_sparse("sparse", LAYERS[0], SPEC, operands)
        .unwrap();
    let operands = [q, rows, visibility];
    let dense = b.attend("dense", LAYERS[0], SPEC, operands).unwrap();
    b.finish(&[chosen, sparse, dense]).unwrap()
}

/// Runs texts over scattered cells and hands out each step's outputs and those of the definition.
fn run<B: Backend>(
    subject: &Subject<B>,
    index: IndexSpec,
    kv_type: KvType,
    mut check: impl FnMut(&[Vec<f32>], &[Vec<f64>]),
) {
    let layout = layout(index.dim, kv_type);
    let mut rows = subject.backend.allocate(&layout).unwrap();
    let (mut scene, mut memory) = (Scene::default(), Memory::default());
    let mut random = Random::new(61);
    let weights = memory_weights(&graph(1, index), 62);
    let loaded = subject.load(&weights);
    let mut first = [0; 2];
    // The second text is short: it sees less than is chosen at first.
    for (n, of) in [(5usize, 0), (1, 0), (4, 1), (30, 0), (1, 1), (1, 0), (9, 1)] {
        let graph = graph(n, index);
        let before: u32 = first.iter().sum();
        let cells: Vec<u32> = (before..before + n as u32).map(|c| c * 3 % 67).collect();
        let mut tokens = text(&mut random, of, first[of], &cells);
        // No token twice: equal keys have equal scores, but for how a product rounds its columns.
        for (token, at) in tokens.iter_mut().zip(before..) {
            token.id = at * 53 % 96;
        }
        first[of] += n as u32;
        let step = scene.step(&tokens, Window::Full, &[]);
        let inputs = step.inputs();
        let wanted = evaluate(&graph, &weights, &layout, &mut memory, &inputs);
        check(&subject.run(&graph, &loaded, &mut rows, &inputs), &wanted);
    }
}

/// An indexer names the rows with the largest scores, and attention reads those alone. Of keys that
/// were rounded by another sum, one of nearly equal scores may be the larger.
pub fn indexers_choose_what_is_attended<B: Backend>(subject: &Subject<B>) {
    for (kv_type, n_near) in [(KvType::F32, 0), (KvType::F16, 2)] {
        let (mut n_left_out, mut n_other) = (0, 0);
        run(subject, INDEX, kv_type, |outputs, wanted| {
            let tolerance = subject.tolerance.graph.max(1e-4);
            let ranks = outputs[0].chunks(INDEX.top_k);
            let wanted_ranks = wanted[0].chunks(INDEX.top_k);
            let width = SPEC.n_heads * SPEC.v_dim;
            let attended = outputs[1].chunks(width).zip(wanted[1].chunks(width));
            for ((ours, theirs), (out, wanted)) in ranks.zip(wanted_ranks).zip(attended) {
                let is_same = ours.iter().zip(theirs).all(|(a, b)| f64::from(*a) == *b);
                if is_same {
                    assert_close("sparse attention", out, wanted, tolerance);
                } else {
                    n_other += 1;
                }
            }
            let off = outputs[1]
                .iter()
                .zip(&outputs[2])
                .map(|(a, b)| (a - b).abs());
            n_left_out += usize::from(off.fold(0.0, f32::max) > 0.01);
        });
        assert!(
            n_other <= n_near,
            "{kv_type}: {n_other} of 51 tokens choose others"
        );
        // The steps after which a text is longer than the choice.
        assert_eq!(n_left_out, 3);
    }
}

/// Where an indexer may choose all that a token sees, its attention is that over everything.
pub fn indexers_that_may_choose_everything_leave_nothing_out<B: Backend>(subject: &Subject<B>) {
    let all = IndexSpec { top_k: 45, ..INDEX };
    run(subject, all, KvType::F32, |outputs, _| {
        let dense: Vec<f64> = outputs[2].iter().map(|&x| f64::from(x)).collect();
        assert_close(
            "sparse attention",
            &outputs[1],
            &dense,
            subject.tolerance.attend,
        );
    });
}

/// Keys of another width than an indexer's are refused before anything runs.
pub fn indexers_need_keys_of_their_width<B: Backend>(subject: &Subject<B>) {
    let graph = graph(2, INDEX);
    let weights = memory_weights(&graph, 62);
    let compile = |dim| subject.compile(&graph, &weights, &layout(dim, KvType::F32));
    let error = compile(INDEX.dim + 1).err();
    assert!(
        matches!(error, Some(BackendError::RowShape { .. })),
        "{error:?}"
    );
    assert!(compile(INDEX.dim).is_ok());
}
