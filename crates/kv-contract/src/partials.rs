//! The contract of partial attention: results with logarithms, and merged ones over rows of two
//! ages.

use super::evaluate::evaluate;
use super::larger::Program;
use super::one_op::read_memory;
use super::scene::{fitting, memory_weights, runs};
use super::{Random, Subject, assert_close};
use kv_backend::GraphInputs;
use kv_backend::{Backend, RowStorage};
use kv_core::{
    Causality, CellIdx, LayerIdx, PartIdx, Pos, Visibility, VisibleGroup, Window,
    layers::{AttentionMemory, LayerMap, LayerMemory, RecentTokens},
    memory::PartInputs,
};
use kv_graph::{
    Alibi, AttendSpec, Attention, Graph, GraphBuilder, GraphShape, Input, NodeId, ResultForm,
};
use kv_rows::{KvType, KvTypes, OldKvTypes, RowLayout};

/// The number of tokens that are recent.
const N_RECENT: u32 = 20;
/// Cells of each part: those of the tokens that are seen, then those of the rows themselves.
const N_SEEN: u32 = 330;

/// A layer that keeps its recent rows apart, and what its rows see.
struct RecentRowsLayer {
    spec: AttendSpec,
    layers: LayerMap,
    layout: RowLayout,
    /// Of old rows and of recent ones.
    parts: Vec<PartInputs>,
    n_rows: u32,
}

impl RecentRowsLayer {
    /// The last `n_rows` of `n_seen` tokens.
    fn new(
        spec: AttendSpec,
        tokens: RecentTokens,
        [recent, old]: [KvType; 2],
        [n_seen, n_rows]: [u32; 2],
    ) -> Self {
        let kv_heads = spec.kv_heads;
        let fits = |dim| fitting(kv_heads, fitting(kv_heads, dim, recent), old);
        let (k_dim, v_dim) = (fits(spec.k_dim), fits(spec.v_dim));
        let spec = AttendSpec {
            k_dim,
            v_dim,
            ..spec
        };
        let memory = AttentionMemory {
            kv_heads,
            k_dim,
            v_dim,
            window: Window::Full,
        };
        let layers = LayerMap::new(vec![LayerMemory::Attention(memory)]);
        let layers = layers.with_recent(tokens).unwrap();
        let types = KvTypes::from(recent).with_old(OldKvTypes {
            k: old,
            v: old,
            recent: tokens,
        });
        let n_cells = (N_SEEN + n_rows) as usize;
        let parts = layers.parts();
        let parts = parts.iter().map(|part| PartInputs {
            cells: (0..n_rows).map(|row| CellIdx(N_SEEN + row)).collect(),
            visibility: Visibility::new(n_rows, vec![last(n_seen, n_rows, part.window)]),
            first: match part.window.first() {
                Some(window) => Visibility::new(n_rows, vec![last(n_seen, n_rows, window)]),
                None => Visibility::default(),
            },
        });
        Self {
            layout: RowLayout::new(&layers, &[n_cells; 2], types).unwrap(),
            parts: parts.collect(),
            layers,
            spec,
            n_rows,
        }
    }

    /// Attention of rows whose queries, keys and values are given. The outputs are its result and
    /// the partial ones, of old rows and of recent ones.
    fn graph(&self, sinks: Option<&str>) -> Graph {
        let AttendSpec {
            n_heads,
            kv_heads,
            k_dim,
            v_dim,
            ..
        } = self.spec;
        let n = self.n_rows as usize;
        let widths = [n_heads * k_dim, kv_heads * k_dim, kv_heads * v_dim];
        let (part, window, layer) = (PartIdx(0), Window::Full, LayerIdx(0));
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: n,
            n_outputs: 0,
        });
        let dim = widths.iter().sum();
        let x = b.input(Input::Embeddings { dim }).unwrap();
        let cells = b.input(Input::Cells { part }).unwrap();
        let seen = b.input(Input::Visibility { part, window }).unwrap();
        let mut first = 0;
        let shapes = [(n_heads, k_dim), (kv_heads, k_dim), (kv_heads, v_dim)];
        let names = ["q", "k", "v"].into_iter().zip(shapes);
        let heads = names.map(|(name, (heads, dim))| {
            let columns = first..first + heads * dim;
            first = columns.end;
            let flat = b.columns(&format!("{name}.flat"), x, columns).unwrap();
            b.reshape(name, flat, &[n, heads, dim]).unwrap()
        });
        let heads: Vec<_> = heads.collect();
        let stored = [heads[1], heads[2], cells];
        let stored = b.store_kv("store", layer, stored).unwrap();
        let attention = Attention {
            spec: self.spec,
            sinks,
        };
        let operands = [heads[0], stored, seen];
        let kqv = b.attend("kqv", layer, attention, operands).unwrap();
        let graph = b.finish(&[kqv]).unwrap();
        let aged = graph.with_recent(&self.layers).unwrap();
        let partial = (0u32..).zip(aged.nodes());
        let partial = partial.filter(|(_, node)| ResultForm::of(&node.op) == ResultForm::Partial);
        let partial: Vec<NodeId> = partial.map(|(at, _)| NodeId(at)).collect();
        aged.with_outputs(&partial).unwrap()
    }

    /// The outputs of a backend and those of the definition.
    fn run<B: Backend>(&self, subject: &Subject<B>, graph: &Graph) -> Vec<(Vec<f32>, Vec<f64>)> {
        let backend = &subject.backend;
        let mut rows = backend.allocate(&self.layout).unwrap();
        super::rows::fill(backend, &mut rows, 21);
        let n = self.n_rows as usize;
        let width = graph.nodes()[0].row_len();
        let embeddings = Random::new(22).values(n * width);
        let positions: Vec<u32> = (0..self.n_rows).map(|row| 37 * row % 61).collect();
        let inputs = GraphInputs {
            embeddings: &embeddings,
            positions: &positions,
            parts: &self.parts,
            ..GraphInputs::default()
        };
        let weights = memory_weights(graph, 23);
        let mut memory = read_memory(backend, &rows);
        let wanted = evaluate(graph, &weights, &self.layout, &mut memory, &inputs);
        let weights = std::sync::Arc::new(weights);
        let weights = backend.load_weights(weights, Default::default()).unwrap();
        let mut program = Program::compile(backend, graph, &weights, rows.layout()).unwrap();
        let got = program.run(backend, &mut rows, &inputs).unwrap();
        got.into_iter().zip(wanted).collect()
    }
}

/// The last `n_rows` of `n_seen` tokens, in cells that do not follow each other.
fn last(n_seen: u32, n_rows: u32, window: Window) -> VisibleGroup {
    let cells: Vec<(u32, u32)> = (0..n_seen).map(|pos| (pos * 7 % N_SEEN, pos)).collect();
    let first = n_seen - n_rows;
    let limits = (0..n_rows).map(|r| window.visible_keys(Pos(first + r), Causality::Causal));
    VisibleGroup::new((0..n_rows).collect(), runs(&cells), limits.collect())
}

const SPEC: AttendSpec = AttendSpec {
    n_heads: 4,
    kv_heads: 2,
    k_dim: 8,
    v_dim: 8,
    scale: 0.35,
    soft_cap: None,
    alibi: None,
};

/// Specifications with everything that changes scores, and a weight of sinks or none.
fn variants() -> [(AttendSpec, Option<&'static str>); 4] {
    let alibi = Some(Alibi::new(8.0));
    [
        (SPEC, None),
        (SPEC, Some("sinks.w")),
        (AttendSpec { alibi, ..SPEC }, None),
        (
            AttendSpec {
                soft_cap: Some(1.5),
                v_dim: 24,
                ..SPEC
            },
            Some("sinks.w"),
        ),
    ]
}

/// Positions seen and rows: nothing is old yet, some rows see old ones, all do.
const SIZES: [[u32; 2]; 5] = [[9, 4], [27, 12], [70, 3], [330, 1], [130, 37]];

/// The tokens that are no old ones.
const RECENT: [RecentTokens; 2] = [
    RecentTokens::last(N_RECENT),
    RecentTokens {
        n_last: N_RECENT,
        n_first: 7,
    },
];

/// A specification with its sinks, how much is seen, and which tokens are no old ones.
type Case = ((AttendSpec, Option<&'static str>), ([u32; 2], RecentTokens));

/// Every specification with every size and both kinds of recent tokens.
fn cases() -> Vec<Case> {
    let sizes = SIZES.into_iter().flat_map(|s| RECENT.map(|r| (s, r)));
    sizes
        .flat_map(|size| variants().map(|v| (v, size)))
        .collect()
}

/// Partial results are those of attention over their rows, with the logarithm of the sum of
/// exponentials behind each head; `-inf` where nothing was seen.
pub fn partial_results_have_logarithms<B: Backend>(subject: &Subject<B>) {
    let types = subject.backend.info().kv_types;
    for (kv_type, ((spec, sinks), (size, recent))) in subject.combine(&types, &cases()) {
        let aged = RecentRowsLayer::new(spec, recent, [kv_type; 2], size);
        let graph = aged.graph(sinks);
        let v_dim = aged.spec.v_dim;
        let what = format!("{kv_type}, {size:?}, {recent}");
        for (got, wanted) in aged.run(subject, &graph).into_iter().skip(1) {
            compare(&what, (&got, &wanted), v_dim, subject.tolerance.attend);
        }
    }
}

/// Compares partial results, results and logarithms each by their own measure.
fn compare(what: &str, (got, wanted): (&[f32], &[f64]), v_dim: usize, tolerance: f64) {
    assert_eq!(got.len(), wanted.len(), "{what}: number of values");
    let pairs = got.iter().copied().zip(wanted.iter().copied());
    let is_logarithm = |at: usize| at % (v_dim + 1) == v_dim;
    let (logarithms, results): (Vec<_>, Vec<_>) =
        pairs.enumerate().partition(|(at, _)| is_logarithm(*at));
    let of_nothing = |&(_, (_, wanted)): &(usize, (f32, f64))| wanted == f64::NEG_INFINITY;
    for (at, (got, _)) in logarithms.iter().filter(|pair| of_nothing(pair)) {
        assert_eq!(*got, f32::NEG_INFINITY, "{what}: value {at}");
    }
    let finite = logarithms.into_iter().filter(|pair| !of_nothing(pair));
    for pairs in [results, finite.collect()] {
        let (got, wanted): (Vec<f32>, Vec<f64>) = pairs.into_iter().map(|(_, pair)| pair).unzip();
        assert_close(what, &got, &wanted, tolerance);
    }
}

/// Merged partial results over recent and old rows, of any two types, are the attention over both.
pub fn recent_and_old_rows_merge<B: Backend>(subject: &Subject<B>) {
    let types = subject.backend.info().kv_types;
    let pairs: Vec<[KvType; 2]> = (types.iter().zip(types.iter().rev()))
        .map(|(&recent, &old)| [recent, old])
        .collect();
    for ([recent, old], ((spec, sinks), (size, tokens))) in subject.combine(&pairs, &cases()) {
        let aged = RecentRowsLayer::new(spec, tokens, [recent, old], size);
        let graph = aged.graph(sinks);
        let (got, wanted) = aged.run(subject, &graph).swap_remove(0);
        let what = format!("{recent} and {old}, {size:?}, {tokens}");
        assert_close(&what, &got, &wanted, subject.tolerance.attend);
    }
}

/// Rows that see neither recent nor old ones get zeros.
pub fn rows_that_see_nothing_merge_to_zero<B: Backend>(subject: &Subject<B>) {
    let kv_type = subject.backend.info().kv_types[0];
    let mut aged = RecentRowsLayer::new(SPEC, RECENT[1], [kv_type; 2], [70, 3]);
    for part in &mut aged.parts {
        let both = [&mut part.visibility, &mut part.first];
        both.into_iter()
            .flat_map(|seen| &mut seen.groups)
            .for_each(|group| group.runs.clear());
    }
    let graph = aged.graph(None);
    let (got, _) = aged.run(subject, &graph).swap_remove(0);
    assert!(got.iter().all(|&value| value == 0.0), "{got:?}");
}
