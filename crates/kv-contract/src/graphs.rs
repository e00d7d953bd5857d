//! The contract of whole graphs: small models against the evaluator, and against themselves.

use super::evaluate::{Memory, evaluate, floats};
use super::rows::{dump, fill};
use super::scene::{
    SPEC, Scene, Step, VOCAB, WIDTH, memory_weights, rope, text, tiny_layout, tiny_llama,
};
use super::{Random, Subject, Token, Tolerance, assert_close};
use kv_backend::Backend;
use kv_core::{LayerIdx, PartIdx, Window};
use kv_graph::rope::RopeStyle;
use kv_graph::weights::MemoryWeights;
use kv_graph::{
    Activation, Affine, AttendSpec, Graph, GraphBuilder, GraphError, GraphShape, Input, NodeId,
};
use kv_rows::{KvType, RowLayout};

const N_CELLS: usize = 64;

/// A model in one backend's memory, and the same model in the evaluator's.
struct BackendPair<'a, B: Backend> {
    subject: &'a Subject<B>,
    graph_of: fn(GraphShape) -> Graph,
    weights: MemoryWeights,
    loaded: B::Weights,
    layout: RowLayout,
    rows: B::Rows,
    memory: Memory,
}

impl<'a, B: Backend> BackendPair<'a, B> {
    fn new(subject: &'a Subject<B>, graph_of: fn(GraphShape) -> Graph, kv_type: KvType) -> Self {
        let graph = graph_of(GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        });
        let weights = memory_weights(&graph, 41);
        let loaded = subject.load(&weights);
        let layout = tiny_layout(N_CELLS, kv_type);
        let rows = subject.backend.allocate(&layout).unwrap();
        Self {
            subject,
            graph_of,
            weights,
            loaded,
            layout,
            rows,
            memory: Memory::default(),
        }
    }

    fn graph(&self, step: &Step) -> Graph {
        let (n_tokens, n_outputs) = (step.tokens.len(), step.output_rows.len());
        (self.graph_of)(GraphShape {
            n_tokens,
            n_outputs,
        })
    }

    /// Runs on the backend only.
    fn run(&mut self, step: &Step) -> Vec<f32> {
        let (graph, inputs) = (self.graph(step), step.inputs());
        let (loaded, rows) = (&self.loaded, &mut self.rows);
        self.subject.run(&graph, loaded, rows, &inputs).remove(0)
    }

    /// Runs on both and compares; gives the wanted values.
    fn compare(&mut self, step: &Step) -> Vec<f64> {
        let got = self.run(step);
        let graph = self.graph(step);
        let inputs = step.inputs();
        let (weights, layout) = (&self.weights, &self.layout);
        let mut wanted = evaluate(&graph, weights, layout, &mut self.memory, &inputs);
        let wanted = wanted.swap_remove(0);
        assert_close("logits", &got, &wanted, self.tolerance());
        wanted
    }

    /// Stored values round to their type, and a rounding that falls the other way is an error of
    /// half a unit in the last place, or of half a step of a block. Twice as much where products
    /// are rough: then several values fall the other way.
    fn tolerance(&self) -> f64 {
        let storage = match self.layout.layers().first().map(|l| l.k.kv_type) {
            None | Some(KvType::F32) => 0.0,
            Some(KvType::F16) => 1e-3,
            Some(KvType::BF16 | KvType::Q8_0) => 1e-2,
            Some(KvType::Q5_0 | KvType::Q5_1) => 5e-2,
            Some(_) => 1e-1,
        };
        let graph = self.subject.tolerance.graph;
        let is_rough = graph > Tolerance::default().graph;
        graph + if is_rough { 2.0 * storage } else { storage }
    }
}

/// A prompt and then single tokens, all logits wanted.
fn prompt_and_decode<B: Backend>(subject: &Subject<B>, graph_of: fn(GraphShape) -> Graph) {
    for kv_type in subject.types_in_models() {
        let mut both = BackendPair::new(subject, graph_of, kv_type);
        let mut random = Random::new(42);
        let cells = random.permutation(N_CELLS);
        let tokens = text(&mut random, 0, 0, &cells[..40]);
        let mut scene = Scene::default();
        let rows: Vec<u32> = (0..36).collect();
        both.compare(&scene.step(&tokens[..36], Window::Full, &rows));
        for token in &tokens[36..] {
            both.compare(&scene.step(&[*token], Window::Full, &[0]));
        }
    }
}

/// The small model computes what its definition says, prompt and decode, for every type of row.
pub fn a_small_model_computes<B: Backend>(subject: &Subject<B>) {
    prompt_and_decode(subject, tiny_llama);
}

/// A model that uses what the first one does not: biases, norms of heads and after the attention,
/// a soft cap, GELU, scaled embeddings, partial RoPE of the other style, an own output matrix.
fn tiny_other(shape: GraphShape) -> Graph {
    let mut b = GraphBuilder::new(shape);
    other_logits(&mut b)
        .and_then(|logits| b.finish(&[logits]))
        .unwrap()
}

fn other_logits(b: &mut GraphBuilder) -> Result<NodeId, GraphError> {
    let (part, n, window) = (PartIdx(0), b.shape().n_tokens, Window::Sliding(12));
    let tokens = b.input(Input::Tokens)?;
    let wanted = b.input(Input::OutputRows)?;
    let visibility = b.input(Input::Visibility { part, window })?;
    let cells = b.input(Input::Cells { part })?;
    let positions = b.input(Input::Positions)?;
    let spec = AttendSpec {
        soft_cap: Some(1.5),
        ..SPEC
    };
    let (rope, eps) = (rope(RopeStyle::Neox, 8), 1e-6);
    let embd = b.embed("embd", tokens, "embd.w", [VOCAB, WIDTH])?;
    let mut x = b.scale("embd_scaled", embd, 8.0)?;
    for layer in (0..2).map(LayerIdx) {
        let b = &mut b.scope(layer);
        let norm = b.rms_norm("attn_norm", x, "attn_norm.w", eps)?;
        let heads = |b: &mut GraphBuilder, s: &str, heads: usize, dim: usize| {
            let (w, bias) = (format!("{s}.w"), format!("{s}.b"));
            let y = b.affine(s, norm, Affine::new(&w).bias(&bias), heads * dim)?;
            b.reshape(&format!("{s}_heads"), y, &[n, heads, dim])
        };
        let q = heads(b, "q", SPEC.n_heads, SPEC.k_dim)?;
        let q = b.rms_norm("q_norm", q, "q_norm.w", eps)?;
        let q = b.rope("q_rope", q, positions, &rope)?;
        let k = heads(b, "k", SPEC.kv_heads, SPEC.k_dim)?;
        let k = b.rms_norm("k_norm", k, "k_norm.w", eps)?;
        let k = b.rope("k_rope", k, positions, &rope)?;
        let v = heads(b, "v", SPEC.kv_heads, SPEC.v_dim)?;
        let stored = b.store_kv("store", layer, [k, v, cells])?;
        let kqv = b.attend("kqv", layer, spec, [q, stored, visibility])?;
        let out = b.affine("o", kqv, Affine::new("o.w").bias("o.b"), WIDTH)?;
        let out = b.rms_norm("post_norm", out, "post_norm.w", eps)?;
        let residual = b.add("attn_residual", x, out)?;
        // The feed-forward net takes the residual stream as it is.
        let up = b.linear("up", residual, "up.w", 96)?;
        let gate = b.linear("gate", residual, "gate.w", 96)?;
        let hidden = b.gate("gated", Activation::GeluTanh, gate, up)?;
        let down = b.linear("down", hidden, "down.w", WIDTH)?;
        x = b.add("ffn_residual", residual, down)?;
    }
    let x = b.rms_norm("norm", x, "norm.w", eps)?;
    let x = b.take_rows("wanted", x, wanted)?;
    let logits = b.linear("logits", x, "head.w", VOCAB)?;
    b.scale("logits_scaled", logits, 0.5)
}

/// The same for a model with every option.
pub fn a_small_model_with_every_option_computes<B: Backend>(subject: &Subject<B>) {
    prompt_and_decode(subject, tiny_other);
}

/// One text in one batch, in chunks, and token by token, gives the same logits.
pub fn chunks_give_what_the_whole_gives<B: Backend>(subject: &Subject<B>) {
    // Single tokens at the beginning and behind a tile of 32.
    let chunks = [&[1, 1, 1, 28, 1, 1, 1, 1, 1, 4][..], &[7, 33], &[32, 1, 7]];
    let mut random = Random::new(43);
    let cells: Vec<u32> = (0..40).collect();
    let tokens = text(&mut random, 0, 0, &cells);
    let logits = |kv_type: KvType, sizes: &[usize]| {
        let mut both = BackendPair::new(subject, tiny_llama, kv_type);
        let (mut scene, mut rest, mut all) = (Scene::default(), &tokens[..], Vec::new());
        for &size in sizes {
            let (now, later) = rest.split_at(size);
            let rows: Vec<u32> = (0..size as u32).collect();
            all.extend(both.run(&scene.step(now, Window::Full, &rows)));
            rest = later;
        }
        (all, both.tolerance())
    };
    let pairs = subject.combine(&subject.types_in_models(), &chunks);
    for of_type in pairs.chunk_by(|one, next| one.0 == next.0) {
        let (whole, tolerance) = logits(of_type[0].0, &[40]);
        for (kv_type, sizes) in of_type {
            let what = format!("{kv_type}: chunks of {sizes:?}");
            let (logits, _) = logits(*kv_type, sizes);
            assert_close(&what, &logits, &floats(&whole), tolerance);
        }
    }
}

/// Several texts in one batch, in any cells, give what each gives alone.
pub fn strangers_do_not_matter<B: Backend>(subject: &Subject<B>) {
    for kv_type in subject.types_in_models() {
        let mut random = Random::new(44);
        let cells = random.permutation(N_CELLS);
        let texts: Vec<Vec<Token>> = (0..3)
            .map(|t| text(&mut random, t, 0, &cells[t * 20..][..10 + 3 * t]))
            .collect();
        let mut together = BackendPair::new(subject, tiny_llama, kv_type);
        // Interleaved: a token of each text in turn.
        let mut mixed: Vec<Token> = texts.iter().flatten().copied().collect();
        mixed.sort_by_key(|t| (t.pos, t.text));
        let rows: Vec<u32> = (0..mixed.len() as u32).collect();
        let got = together.run(&Scene::default().step(&mixed, Window::Full, &rows));
        for tokens in &texts {
            let mut alone = BackendPair::new(subject, tiny_llama, kv_type);
            let rows: Vec<u32> = (0..tokens.len() as u32).collect();
            let wanted = alone.run(&Scene::default().step(tokens, Window::Full, &rows));
            let own: Vec<f32> = mixed
                .iter()
                .zip(got.chunks_exact(VOCAB))
                .filter(|(t, _)| t.text == tokens[0].text)
                .flat_map(|(_, logits)| logits.iter().copied())
                .collect();
            assert_close(
                "one of three texts",
                &own,
                &floats(&wanted),
                alone.tolerance(),
            );
        }
    }
}

/// A run writes the cells of its tokens in every layer, and no other.
pub fn a_run_changes_only_its_own_cells<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for kv_type in subject.types_in_models() {
        let mut both = BackendPair::new(subject, tiny_llama, kv_type);
        let before = fill(backend, &mut both.rows, 45);
        let own = [9u32, 3, 60, 10];
        let tokens = text(&mut Random::new(46), 0, 0, &own);
        both.run(&Scene::default().step(&tokens, Window::Full, &[3]));
        let after = dump(backend, &both.rows);
        let row = kv_type.row_bytes(SPEC.kv_heads * SPEC.k_dim);
        for (was, is) in before.iter().zip(&after) {
            for (cell, (was, is)) in (0u32..).zip(was.chunks(row).zip(is.chunks(row))) {
                assert_eq!(was != is, own.contains(&cell), "{kv_type}: cell {cell}");
            }
        }
    }
}

/// A run without wanted rows gives an empty output and still stores its tokens.
pub fn no_outputs_are_no_error<B: Backend>(subject: &Subject<B>) {
    for kv_type in subject.types_in_models() {
        let mut both = BackendPair::new(subject, tiny_llama, kv_type);
        let cells: Vec<u32> = (0..12).collect();
        let tokens = text(&mut Random::new(47), 0, 0, &cells);
        let mut scene = Scene::default();
        assert!(
            both.compare(&scene.step(&tokens[..11], Window::Full, &[]))
                .is_empty()
        );
        both.compare(&scene.step(&tokens[11..], Window::Full, &[0]));
    }
}

/// One program runs for many steps and gives what fresh ones give.
pub fn a_program_runs_again_and_again<B: Backend>(subject: &Subject<B>) {
    let kv_type = subject.backend.info().kv_types[0];
    let cells: Vec<u32> = (0..20).collect();
    let tokens = text(&mut Random::new(48), 0, 0, &cells);
    let mut both = BackendPair::new(subject, tiny_llama, kv_type);
    let graph = tiny_llama(GraphShape {
        n_tokens: 2,
        n_outputs: 1,
    });
    let compiled = subject.compile(&graph, &both.weights, &both.layout);
    let (mut scene, mut compiled) = (Scene::default(), compiled.unwrap());
    for pair in tokens.chunks_exact(2) {
        let step = scene.step(pair, Window::Full, &[1]);
        let (wanted, tolerance) = (floats(&both.run(&step)), subject.tolerance.graph);
        let got = compiled.run(&step.inputs()).unwrap();
        assert_close("the same program", &got[0], &wanted, tolerance);
    }
}

/// Random graphs of elementwise operations, norms, products and rotations.
pub fn random_graphs_compute<B: Backend>(subject: &Subject<B>) {
    for seed in 0..40 {
        let mut random = Random::new(1000 + seed);
        let (n, dim) = (1 + random.below(6), 32);
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: n,
            n_outputs: 0,
        });
        let positions = b.input(Input::Positions).unwrap();
        let mut nodes = vec![b.input(Input::Embeddings { dim }).unwrap()];
        for at in 0..14 {
            let name = format!("n{at}");
            let pick = |r: &mut Random| nodes[nodes.len() - 1 - r.below(nodes.len().min(5))];
            let (x, y) = (pick(&mut random), pick(&mut random));
            let weight = format!("w{at}");
            let node = match random.below(7) {
                0 => b.linear(&name, x, &weight, dim),
                1 => b.rms_norm(&name, x, &weight, 1e-5),
                2 => b.add(&name, x, y),
                3 => b.scale(&name, x, 0.7),
                4 => b.gate(&name, Activation::Silu, x, y),
                5 => b.affine(&name, x, Affine::new(&weight).bias(&format!("b{at}")), dim),
                _ => {
                    let heads = b.reshape(&format!("h{at}"), x, &[n, 2, 16]).unwrap();
                    let r = b.rope(
                        &format!("r{at}"),
                        heads,
                        positions,
                        &rope(RopeStyle::Neox, 16),
                    );
                    b.reshape(&name, r.unwrap(), &[n, dim])
                }
            };
            nodes.push(node.unwrap());
        }
        let outputs = [nodes[nodes.len() - 1], nodes[random.below(nodes.len())]];
        let graph = b.finish(&outputs).unwrap();
        let weights = memory_weights(&graph, seed);
        let step = Step {
            positions: (0..n as u32).map(|i| i * 5).collect(),
            embeddings: random.values(n * dim),
            ..Step::default()
        };
        let (layout, inputs) = (RowLayout::default(), step.inputs());
        let wanted = evaluate(&graph, &weights, &layout, &mut Memory::default(), &inputs);
        let mut compiled = subject.compile(&graph, &weights, &layout).unwrap();
        for (got, wanted) in compiled.run(&inputs).unwrap().iter().zip(&wanted) {
            let what = format!("seed {seed}:\n{}", graph.text());
            assert_close(&what, got, wanted, subject.tolerance.graph);
        }
    }
}
