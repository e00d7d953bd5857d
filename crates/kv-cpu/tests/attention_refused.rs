//! Operations of attention on rows that they do not suit are refused when they are compiled.

#![allow(clippy::unwrap_used)]

use kv_backend::{Backend, BackendError};
use kv_contract::tiny_weights;
use kv_core::{
    LayerIdx, PartIdx, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory},
};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::{AttendSpec, GraphBuilder, GraphShape, IndexSpec, Input, NodeId};
use kv_rows::{KvType, RowLayout};

const N: usize = 2;
const N_CELLS: usize = 16;
const SPEC: AttendSpec = AttendSpec {
    n_heads: 4,
    kv_heads: 2,
    k_dim: 8,
    v_dim: 6,
    scale: 0.5,
    soft_cap: None,
    alibi: None,
};
/// Two heads that hold keys and values, seen whole.
const WHOLE: LayerIdx = LayerIdx(0);
/// The same in another part of the memory, through a window.
const SLIDING: LayerIdx = LayerIdx(1);
/// One head of 8 whose first 6 are the values.
const LATENT: LayerIdx = LayerIdx(2);

fn layout() -> RowLayout {
    let memory = |kv_heads, window| AttentionMemory {
        kv_heads,
        k_dim: SPEC.k_dim,
        v_dim: SPEC.v_dim,
        window,
    };
    let layers = vec![
        LayerMemory::Attention(memory(2, Window::Full)),
        LayerMemory::Attention(memory(2, Window::Sliding(4))),
        LayerMemory::Latent(memory(1, Window::Full)),
    ];
    RowLayout::new(&LayerMap::new(layers), &[N_CELLS; 2], KvType::F32).unwrap()
}

/// A graph of some embeddings as heads, and what else there is.
struct Nodes(GraphBuilder);

impl Nodes {
    fn rows(&mut self, name: &str, heads: usize, dim: usize) -> NodeId {
        let dims = heads * dim;
        let x = self.0.input(Input::Embeddings { dim: 96 }).unwrap();
        let flat = self.0.columns(&format!("{name}.flat"), x, 0..dims).unwrap();
        self.0.reshape(name, flat, &[N, heads, dim]).unwrap()
    }

    fn cells(&mut self, part: u32) -> NodeId {
        let part = PartIdx(part);
        self.0.input(Input::Cells { part }).unwrap()
    }

    fn seen(&mut self, part: u32, window: Window) -> NodeId {
        let part = PartIdx(part);
        self.0.input(Input::Visibility { part, window }).unwrap()
    }

    /// Keys and values of `WHOLE` and `LATENT`.
    fn stored(&mut self) -> [NodeId; 2] {
        let (k, v) = (self.rows("k", 2, 8), self.rows("v", 2, 6));
        let latent = self.rows("latent", 1, 8);
        let cells = self.cells(0);
        let stored = self.0.store_kv("stored", WHOLE, [k, v, cells]).unwrap();
        let latent = self.0.store_k("latents", LATENT, [latent, cells]);
        [stored, latent.unwrap()]
    }
}

/// The result of compiling a graph whose output is the node that `make` adds.
fn compiled(make: impl Fn(&mut Nodes) -> NodeId) -> Result<(), BackendError> {
    let mut nodes = Nodes(GraphBuilder::new(GraphShape {
        n_tokens: N,
        n_outputs: 0,
    }));
    let made = make(&mut nodes);
    let has_result = !nodes.0.shape_of(made).is_empty();
    let output = if has_result {
        made
    } else {
        nodes.rows("output", 1, 1)
    };
    let graph = nodes.0.finish(&[output]).unwrap();
    let backend = CpuBackend::new(CpuConfig::default()).unwrap();
    let weights = backend.load_weights(tiny_weights(&graph, 1), Default::default());
    let program = backend.compile(&graph, &weights.unwrap(), &layout());
    program.map(|_| ())
}

fn has_other_rows(result: Result<(), BackendError>) -> bool {
    matches!(result, Err(BackendError::RowShape { .. }))
}

fn is_unsupported(result: Result<(), BackendError>) -> bool {
    matches!(result, Err(BackendError::UnsupportedOp { .. }))
}

#[test]
fn stores_of_other_widths() {
    let store = |k_dim, v_dim| {
        compiled(|n| {
            let (k, v) = (n.rows("k", 2, k_dim), n.rows("v", 2, v_dim));
            let cells = n.cells(0);
            n.0.store_kv("stored", WHOLE, [k, v, cells]).unwrap()
        })
    };
    store(8, 6).unwrap();
    assert!(has_other_rows(store(9, 6)) && has_other_rows(store(8, 5)));
}

#[test]
fn stores_to_cells_of_another_part() {
    let store = |layer, part| {
        compiled(|n| {
            let (k, v) = (n.rows("k", 2, 8), n.rows("v", 2, 6));
            let cells = n.cells(part);
            n.0.store_kv("stored", layer, [k, v, cells]).unwrap()
        })
    };
    store(WHOLE, 0).unwrap();
    store(SLIDING, 1).unwrap();
    assert!(is_unsupported(store(WHOLE, 1)) && is_unsupported(store(SLIDING, 0)));
    let store_k = |part| {
        compiled(|n| {
            let (k, cells) = (n.rows("k", 1, 8), n.cells(part));
            n.0.store_k("stored", LATENT, [k, cells]).unwrap()
        })
    };
    store_k(0).unwrap();
    assert!(is_unsupported(store_k(1)));
}

#[test]
fn attention_through_what_is_seen_of_another_part() {
    let attend = |part, window| {
        compiled(|n| {
            let ([stored, _], q) = (n.stored(), n.rows("q", 4, 8));
            let operands = [q, stored, n.seen(part, window)];
            n.0.attend("y", WHOLE, SPEC, operands).unwrap()
        })
    };
    attend(0, Window::Full).unwrap();
    assert!(is_unsupported(attend(1, Window::Sliding(4))));
}

#[test]
fn choices_among_keys_of_other_widths_or_heads() {
    let index = |layer, dim| {
        compiled(|n| {
            let ([_, stored], q) = (n.stored(), n.rows("q", 3, dim));
            let weights = n.rows("weights", 1, 3);
            let weights = n.0.reshape("weights.flat2", weights, &[N, 3]).unwrap();
            let spec = IndexSpec {
                n_heads: 3,
                dim,
                top_k: 2,
            };
            let operands = [q, weights, stored, n.seen(0, Window::Full)];
            n.0.index("chosen", layer, spec, operands).unwrap()
        })
    };
    index(LATENT, 8).unwrap();
    assert!(is_unsupported(index(LATENT, 7)) && is_unsupported(index(WHOLE, 8)));
}

#[test]
fn sparse_attention_over_rows_of_other_heads() {
    let attend = |spec: AttendSpec| {
        compiled(|n| {
            let ([_, stored], key) = (n.stored(), n.rows("index_q", 1, 8));
            let weights = n.rows("weights", 1, 1);
            let weights = n.0.reshape("weights.flat2", weights, &[N, 1]).unwrap();
            let seen = n.seen(0, Window::Full);
            let index = IndexSpec {
                n_heads: 1,
                dim: 8,
                top_k: 2,
            };
            let chosen =
                n.0.index("chosen", LATENT, index, [key, weights, stored, seen]);
            let operands = [n.rows("q", 4, 8), stored, seen, chosen.unwrap()];
            n.0.attend_sparse("y", LATENT, spec, operands).unwrap()
        })
    };
    let one = AttendSpec {
        kv_heads: 1,
        ..SPEC
    };
    attend(one).unwrap();
    assert!(has_other_rows(attend(SPEC)));
    assert!(has_other_rows(attend(AttendSpec { v_dim: 7, ..one })));
}

#[test]
fn plain_attention_over_other_rows_or_more_cells_than_there_are() {
    let scores = |spec: AttendSpec, n_kv| {
        compiled(|n| {
            let ([stored, _], q) = (n.stored(), n.rows("q", 4, spec.k_dim));
            n.0.kq("kq", WHOLE, spec, [q, stored], n_kv).unwrap()
        })
    };
    scores(SPEC, N_CELLS).unwrap();
    assert!(has_other_rows(scores(SPEC, N_CELLS + 1)));
    assert!(has_other_rows(scores(AttendSpec { k_dim: 9, ..SPEC }, 5)));
    let sums = |spec, n_kv| {
        compiled(|n| {
            let ([stored, _], weights) = (n.stored(), n.rows("weights", 4, n_kv));
            n.0.kqv("kqv", WHOLE, spec, [weights, stored]).unwrap()
        })
    };
    sums(SPEC, N_CELLS).unwrap();
    assert!(has_other_rows(sums(SPEC, N_CELLS + 1)));
    assert!(has_other_rows(sums(AttendSpec { v_dim: 5, ..SPEC }, 5)));
}

/// Only the last of the three operations may have heads that are no groups: the others are not
/// built.
#[test]
fn sums_over_heads_that_are_no_groups() {
    let sums = |n_heads| {
        let spec = AttendSpec { n_heads, ..SPEC };
        compiled(|n| {
            let ([stored, _], weights) = (n.stored(), n.rows("weights", n_heads, 5));
            n.0.kqv("kqv", WHOLE, spec, [weights, stored]).unwrap()
        })
    };
    sums(4).unwrap();
    assert!(has_other_rows(sums(5)));
}
