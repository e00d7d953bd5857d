//! The contract of layers without rows of their own, and of layers whose values are in their keys.

use super::evaluate::{Memory, evaluate};
use super::one_op::read_memory;
use super::scene::{memory_weights, runs, text};
use super::{Attend, OneOp, Random, Scene, StoreRows, Subject, assert_close};
use kv_backend::state::{Fingerprint, SavedState, StateToSave, save};
use kv_backend::{Backend, BackendError, RowKind, RowSpan, RowStorage};
use kv_core::{
    CellIdx, LayerIdx, PartIdx, Pos, PosRange, SeqId, SeqSet, Visibility, VisibleGroup, Window,
    cells::Cell,
    layers::{AttentionMemory, LayerMap, LayerMemory},
    memory::{CellRecord, PartSnapshot, Restoration, RowCopy, RowWrite, Snapshot},
};
use kv_graph::weights::MemoryWeights;
use kv_graph::{AttendSpec, Graph, GraphBuilder, GraphShape, Input};
use kv_rows::{KvType, MemoryPlan, RowLayout};

/// A latent of 40 values with 8 more for positions, read by four heads.
const LATENT: AttendSpec = AttendSpec {
    n_heads: 4,
    kv_heads: 1,
    k_dim: 48,
    v_dim: 40,
    scale: 0.2,
    soft_cap: None,
    alibi: None,
};
/// Two heads whose values are the first 5 of 9.
const NARROW: AttendSpec = AttendSpec {
    n_heads: 2,
    kv_heads: 2,
    k_dim: 9,
    v_dim: 5,
    ..LATENT
};
const N_CELLS: usize = 70;

fn memory(spec: &AttendSpec) -> AttentionMemory {
    AttentionMemory {
        kv_heads: spec.kv_heads,
        k_dim: spec.k_dim,
        v_dim: spec.v_dim,
        window: Window::Full,
    }
}

fn layout(layers: &[LayerMemory], kv_type: KvType) -> RowLayout {
    RowLayout::new(&LayerMap::new(layers.to_vec()), &[N_CELLS], kv_type).unwrap()
}

/// Types that rows of such heads can be stored in by any backend.
const PLAIN: [KvType; 2] = [KvType::F32, KvType::F16];

fn visibility() -> Visibility {
    let cells: Vec<(u32, u32)> = (0..60u32).map(|pos| (pos * 7 % 61, pos)).collect();
    let limits = (0..3).map(|r| PosRange::new(Pos(0), Pos(40 + 9 * r)));
    let group = VisibleGroup::new(vec![0, 1, 2], runs(&cells), limits.collect());
    Visibility::new(3, vec![group])
}

/// Attends and compares with the definition.
fn attend<B: Backend>(
    subject: &Subject<B>,
    rows: &mut B::Rows,
    layer: u32,
    spec: AttendSpec,
    q: &[f32],
) -> Vec<f32> {
    let layout = rows.layout().clone();
    let args = Attend {
        layer: LayerIdx(layer),
        spec,
        q,
        visibility: &visibility(),
        positions: &[],
        sinks: None,
        spare: CellIdx(64),
    };
    let op = OneOp::attend(&layout, &args);
    let backend = &subject.backend;
    let wanted = op.wanted(&layout, &mut read_memory(backend, rows));
    let out = op.run(backend, rows).unwrap();
    let allowed = subject.tolerance.attend.max(1e-4);
    assert_close("attention by the definition", &out, &wanted, allowed);
    out
}

/// Stores the same random keys in a layer, and their beginnings as values where it stores those.
fn fill<B: Backend>(backend: &B, rows: &mut B::Rows, spec: &AttendSpec, layer: u32) {
    let cells: Vec<CellIdx> = (0..N_CELLS as u32).map(CellIdx).collect();
    let k: Vec<f32> = Random::new(3).values(N_CELLS * spec.kv_heads * spec.k_dim);
    let layer = LayerIdx(layer);
    let layout = rows.layout().clone();
    let heads = k.chunks_exact(spec.k_dim);
    let v: Vec<f32> = match layout.layer(layer).unwrap().stored_v() {
        Some(_) => heads.flat_map(|head| head[..spec.v_dim].to_vec()).collect(),
        None => Vec::new(),
    };
    let args = StoreRows {
        layer,
        k: &k,
        v: &v,
        cells: &cells,
    };
    OneOp::store(&layout, &args).run(backend, rows).unwrap();
}

/// A layer that shares rows gives what their owner gives; it has none to read, write or allocate.
pub fn a_shared_layer_attends_over_another_s_rows<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for kv_type in PLAIN {
        let layers = [
            LayerMemory::Nothing,
            LayerMemory::Attention(memory(&NARROW)),
            LayerMemory::Attention(memory(&NARROW)),
            LayerMemory::SharedWith(LayerIdx(1)),
        ];
        let layout = layout(&layers, kv_type);
        let mut rows = backend.allocate(&layout).unwrap();
        fill(backend, &mut rows, &NARROW, 1);
        let q = Random::new(4).values(3 * NARROW.n_heads * NARROW.k_dim);
        let own = attend(subject, &mut rows, 1, NARROW, &q);
        let [shared, other] = [3, 2].map(|l| attend(subject, &mut rows, l, NARROW, &q));
        assert_eq!(shared, own, "{kv_type}");
        assert_ne!(other, own, "{kv_type}");
        let layer = LayerIdx(3);
        let span = RowSpan {
            layer,
            kind: RowKind::K,
            first: CellIdx(0),
            len: 1,
        };
        let is_refused = |result: Result<(), BackendError>| {
            assert!(
                matches!(&result, Err(BackendError::NoRows { layer: l }) if *l == layer),
                "{result:?}"
            );
        };
        is_refused(backend.read_rows(&rows, span, &mut [0; 4]));
        is_refused(backend.write_rows(&mut rows, span, &[0; 4]));
        is_refused(rows.allocated_bytes(layer, RowKind::K).map(drop));
        let args = StoreRows {
            layer,
            k: &[0.5; 18],
            v: &[0.5; 10],
            cells: &[CellIdx(0)],
        };
        let stored = OneOp::store(&layout, &args).run(backend, &mut rows);
        is_refused(stored.map(drop));
    }
}

/// Values that are the beginnings of keys are stored once, and give what they give apart.
pub fn values_can_be_the_beginnings_of_keys<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for (spec, kv_type) in [LATENT, NARROW]
        .into_iter()
        .flat_map(|s| PLAIN.map(|t| (s, t)))
    {
        let layers = [
            LayerMemory::Latent(memory(&spec)),
            LayerMemory::Attention(memory(&spec)),
            LayerMemory::SharedWith(LayerIdx(0)),
        ];
        let layout = layout(&layers, kv_type);
        let mut rows = backend.allocate(&layout).unwrap();
        let bytes = |layer, kind| rows.allocated_bytes(LayerIdx(layer), kind);
        let plan = MemoryPlan::new(&layout);
        assert_eq!(
            bytes(0, RowKind::K).unwrap() as u64,
            plan.bytes_of_layer(LayerIdx(0))
        );
        assert!(matches!(
            bytes(0, RowKind::V),
            Err(BackendError::NoRows { .. })
        ));
        assert!(plan.bytes_of_layer(LayerIdx(0)) < plan.bytes_of_layer(LayerIdx(1)));
        for layer in [0, 1] {
            fill(backend, &mut rows, &spec, layer);
        }
        let q = Random::new(5).values(3 * spec.n_heads * spec.k_dim);
        let apart = attend(subject, &mut rows, 1, spec, &q);
        let out = attend(subject, &mut rows, 0, spec, &q);
        assert_eq!(out, apart, "{kv_type}");
        let out = attend(subject, &mut rows, 2, spec, &q);
        assert_eq!(out, apart, "{kv_type}");
        // Rows move whole.
        let copy = RowCopy {
            part: PartIdx(0),
            from: CellIdx(3),
            to: CellIdx(50),
            len: 4,
        };
        backend.copy_rows(&mut rows, &[copy]).unwrap();
        let apart = attend(subject, &mut rows, 1, spec, &q);
        let out = attend(subject, &mut rows, 0, spec, &q);
        assert_eq!(out, apart, "{kv_type}");
    }
}

/// Latents of every type that the backend can store.
pub fn latents_of_every_type_are_attended<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let spec = AttendSpec {
        k_dim: 96,
        v_dim: 64,
        ..LATENT
    };
    for kv_type in backend.info().kv_types {
        let layout = layout(&[LayerMemory::Latent(memory(&spec))], kv_type);
        let mut rows = backend.allocate(&layout).unwrap();
        fill(backend, &mut rows, &spec, 0);
        let q = Random::new(8).values(3 * spec.n_heads * spec.k_dim);
        let out = attend(subject, &mut rows, 0, spec, &q);
        assert!(out.iter().any(|o| o.abs() > 0.01), "{kv_type}");
    }
}

/// A graph with a latent layer, one with values of its own, and one that shares the first one's
/// rows.
fn graph(n_tokens: usize) -> Graph {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs: 0,
    });
    let part = PartIdx(0);
    let tokens = b.input(Input::Tokens).unwrap();
    let cells = b.input(Input::Cells { part }).unwrap();
    let window = Window::Full;
    let visibility = b.input(Input::Visibility { part, window }).unwrap();
    let x = b.embed("x", tokens, "embd", [96, 32]).unwrap();
    let heads = |b: &mut GraphBuilder, what: &str, n: usize, dim: usize| {
        let y = b.linear(what, x, &format!("{what}.w"), n * dim).unwrap();
        b.reshape(&format!("{what}_heads"), y, &[n_tokens, n, dim])
            .unwrap()
    };
    let k = heads(&mut b, "k", LATENT.kv_heads, LATENT.k_dim);
    let latent = b.store_k("latent", LayerIdx(0), [k, cells]).unwrap();
    let k = heads(&mut b, "k1", NARROW.kv_heads, NARROW.k_dim);
    let v = heads(&mut b, "v1", NARROW.kv_heads, NARROW.v_dim);
    let own = b.store_kv("own", LayerIdx(1), [k, v, cells]).unwrap();
    let mut outputs = Vec::new();
    for (layer, spec, stored) in [(0, LATENT, latent), (1, NARROW, own), (2, LATENT, latent)] {
        let q = heads(&mut b, &format!("q{layer}"), spec.n_heads, spec.k_dim);
        let name = format!("kqv{layer}");
        let operands = [q, stored, visibility];
        outputs.push(b.attend(&name, LayerIdx(layer), spec, operands).unwrap());
    }
    b.finish(&outputs).unwrap()
}

fn layers() -> [LayerMemory; 3] {
    [
        LayerMemory::Latent(memory(&LATENT)),
        LayerMemory::Attention(memory(&NARROW)),
        LayerMemory::SharedWith(LayerIdx(0)),
    ]
}

/// Graphs store latents and attend over shared rows, in one ubatch and over several.
pub fn graphs_with_shared_and_latent_layers_compute<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let mut random = Random::new(6);
    for kv_type in PLAIN {
        let layout = layout(&layers(), kv_type);
        let mut rows = backend.allocate(&layout).unwrap();
        let (mut scene, mut memory) = (Scene::default(), Memory::default());
        let weights = memory_weights(&graph(1), 7);
        let loaded = subject.load(&weights);
        let mut first = 0;
        for n in [5usize, 1, 34] {
            let graph = graph(n);
            let read_back = Graph::from_json(&graph.to_json().unwrap());
            assert_eq!(read_back.as_ref(), Ok(&graph));
            let cells: Vec<u32> = (first..first + n as u32).map(|c| c * 3 % 67).collect();
            let tokens = text(&mut random, 0, first, &cells);
            let step = scene.step(&tokens, Window::Full, &[]);
            let inputs = step.inputs();
            let wanted = evaluate(&graph, &weights, &layout, &mut memory, &inputs);
            let outputs = subject.run(&graph, &loaded, &mut rows, &inputs);
            for (got, wanted) in outputs.iter().zip(&wanted) {
                let what = format!("{kv_type}, {n} tokens");
                assert_close(&what, got, wanted, subject.tolerance.graph.max(1e-4));
            }
            first += n as u32;
        }
    }
}

/// A state of latents and shared rows is read from a backend's rows and written to others:
/// attention over them gives the same bits, and no row is read that is not there.
pub fn states_of_latents_come_back<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    let mirrored = |i: u32| CellIdx(N_CELLS as u32 - 1 - i);
    let tokens = (0..N_CELLS as u32).map(|i| CellRecord {
        row: mirrored(i),
        cell: Cell::new(Pos(i), SeqSet::one(SeqId(0))),
    });
    let part = PartSnapshot {
        part: PartIdx(0),
        window: Window::Full,
        cells: tokens.collect(),
        forgotten: Vec::new(),
    };
    let snapshot = Snapshot::new(vec![part], None).unwrap();
    // Row `i` of the state is a row from the end, and goes back to there.
    let row_writes = (0..N_CELLS as u32).map(|i| RowWrite {
        part: PartIdx(0),
        from: CellIdx(i),
        to: mirrored(i),
        len: 1,
    });
    let restored = Restoration {
        row_writes: row_writes.collect(),
        ..Restoration::default()
    };
    let map = LayerMap::new(layers().to_vec());
    let fingerprint = Fingerprint::new("test", 1, &map, &graph(1), &MemoryWeights::new());
    for kv_type in PLAIN {
        let layout = layout(&layers(), kv_type);
        let mut rows = backend.allocate(&layout).unwrap();
        fill(backend, &mut rows, &LATENT, 0);
        fill(backend, &mut rows, &NARROW, 1);
        let state = StateToSave {
            fingerprint: &fingerprint,
            snapshot: &snapshot,
            tokens: &[],
            layout: &layout,
            kv_type: None,
            state_type: None,
            note: "",
        };
        let mut bytes = Vec::new();
        let mut read = |span: RowSpan, out: &mut [u8]| backend.read_rows(&rows, span, out);
        save(&state, &mut read, &mut bytes).unwrap();
        let state = SavedState::parse(&bytes).unwrap();
        state.check_rows(&layout).unwrap();
        let mut others = backend.allocate(&layout).unwrap();
        let mut write = |span: RowSpan, bytes: &[u8]| backend.write_rows(&mut others, span, bytes);
        state.write_rows(&restored, &layout, &mut write).unwrap();
        for (layer, spec) in [(0, LATENT), (1, NARROW), (2, LATENT)] {
            let q = Random::new(9).values(3 * spec.n_heads * spec.k_dim);
            let of = |rows: &mut B::Rows| attend(subject, rows, layer, spec, &q);
            let (restored, saved) = (of(&mut others), of(&mut rows));
            assert_eq!(restored, saved, "{kv_type}, layer {layer}");
        }
    }
}

/// Storing to a layer in another way than its rows are laid out is refused before anything runs.
pub fn stores_that_do_not_suit_their_rows_are_refused<B: Backend>(subject: &Subject<B>) {
    let (graph, weights) = (graph(2), memory_weights(&graph(2), 7));
    let compile =
        |layers: &[LayerMemory]| subject.compile(&graph, &weights, &layout(layers, KvType::F32));
    let own = LayerMemory::Attention;
    let latent = LayerMemory::Latent;
    let cases = [
        // A latent where K and V are stored, and the other way round.
        [own(memory(&LATENT)), own(memory(&NARROW)), layers()[2]],
        [
            latent(memory(&LATENT)),
            latent(memory(&NARROW)),
            layers()[2],
        ],
        // A layer that has no rows to store to.
        [
            latent(memory(&LATENT)),
            LayerMemory::SharedWith(LayerIdx(0)),
            layers()[2],
        ],
    ];
    for layers in cases {
        let error = compile(&layers).err();
        let is_refused = matches!(error, Some(BackendError::NoRows { .. }));
        assert!(is_refused, "{layers:?}");
    }
    assert!(compile(&layers()).is_ok());
}
