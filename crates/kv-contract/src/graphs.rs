//! The contract of whole graphs: small models against the evaluator, and against themselves.

use std::sync::Arc;

use super::evaluate::{Memory, evaluate};
use super::rows::{dump, fill};
use super::scene::{
    SPEC, Scene, Step, VOCAB, WIDTH, memory_weights, rope, text, tiny_layout, tiny_llama,
};
use super::{Random, Subject, Token, assert_close};
use kv_core::backend::Backend;
use kv_core::graph::{
    Activation, Affine, AttendSpec, Graph, GraphBuilder, GraphOutputs, GraphShape, Input, NodeId,
};
use kv_core::layers::RowLayout;
use kv_core::rope::RopeStyle;
use kv_core::weights::MemoryWeights;
use kv_core::{KvType, LayerIdx, PartIdx, Window};

const N_CELLS: usize = 64;

/// A model in one backend's memory beside the same model in the evaluator's.
struct Both<'a, B: Backend> {
    subject: &'a Subject<B>,
    graph_of: fn(GraphShape) -> Graph,
    weights: MemoryWeights,
    loaded: B::Weights,
    layout: RowLayout,
    rows: B::Rows,
    memory: Memory,
}

impl<'a, B: Backend> Both<'a, B> {
    fn new(subject: &'a Subject<B>, graph_of: fn(GraphShape) -> Graph, kv_type: KvType) -> Self {
        let graph = graph_of(GraphShape {
            n_tokens: 1,
            n_outputs: 1,
        });
        let weights = memory_weights(&graph, 41);
        let loaded = subject
            .backend
            .load_weights(Arc::new(weights.clone()), Default::default())
            .unwrap();
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
        let backend = &self.subject.backend;
        let mut program = backend
            .compile(&self.graph(step), &self.loaded, &self.layout)
            .unwrap();
        let mut outputs = GraphOutputs::default();
        backend
            .run(&mut program, &mut self.rows, &step.inputs(), &mut outputs)
            .unwrap();
        outputs.values.swap_remove(0)
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
    /// half a unit in the last place, or of half a step of a block.
    fn tolerance(&self) -> f64 {
        let storage = match self.layout.layers().first().map(|l| l.k.kv_type) {
            None | Some(KvType::F32) => 0.0,
            Some(KvType::F16) => 1e-3,
            Some(KvType::BF16 | KvType::Q8_0) => 1e-2,
            Some(KvType::Q5_0 | KvType::Q5_1) => 5e-2,
            Some(_) => 1e-1,
        };
        self.subject.tolerance.graph + storage
    }
}

fn kv_types<B: Backend>(subject: &Subject<B>) -> Vec<KvType> {
    subject.backend.info().kv_types
}

/// A prompt and then single tokens, all logits wanted.
fn prompt_and_decode<B: Backend>(subject: &Subject<B>, graph_of: fn(GraphShape) -> Graph) {
    for kv_type in kv_types(subject) {
        let mut both = Both::new(subject, graph_of, kv_type);
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
    let (part, n) = (PartIdx(0), shape.n_tokens);
    let window = Window::Sliding(12);
    let tokens = b.input(Input::Tokens).unwrap();
    let wanted = b.input(Input::OutputRows).unwrap();
    let visibility = b.input(Input::Visibility { part, window }).unwrap();
    let cells = b.input(Input::Cells { part }).unwrap();
    let positions = b.input(Input::Positions).unwrap();
    let AttendSpec {
        n_heads,
        kv_heads,
        k_dim,
        v_dim,
        ..
    } = SPEC;
    let embd = b.embed("embd", tokens, "embd.w", [VOCAB, WIDTH]).unwrap();
    let mut x = b.scale("embd_scaled", embd, 8.0).unwrap();
    for l in 0..2 {
        let named = |s: &str| format!("{s}-{l}");
        let spec = AttendSpec {
            soft_cap: Some(1.5),
            ..SPEC
        };
        let rope = rope(RopeStyle::Neox, 8);
        let norm = b
            .rms_norm(&named("attn_norm"), x, &named("attn_norm.w"), 1e-6)
            .unwrap();
        let heads = |b: &mut GraphBuilder, s: &str, heads: usize, dim: usize| -> NodeId {
            let (w, bias) = (named(&format!("{s}.w")), named(&format!("{s}.b")));
            let y = b
                .affine(&named(s), norm, Affine::new(&w).bias(&bias), heads * dim)
                .unwrap();
            b.reshape(&named(&format!("{s}_heads")), y, &[n, heads, dim])
                .unwrap()
        };
        let q = heads(&mut b, "q", n_heads, k_dim);
        let q = b
            .rms_norm(&named("q_norm"), q, &named("q_norm.w"), 1e-6)
            .unwrap();
        let q = b.rope(&named("q_rope"), q, positions, &rope).unwrap();
        let k = heads(&mut b, "k", kv_heads, k_dim);
        let k = b
            .rms_norm(&named("k_norm"), k, &named("k_norm.w"), 1e-6)
            .unwrap();
        let k = b.rope(&named("k_rope"), k, positions, &rope).unwrap();
        let v = heads(&mut b, "v", kv_heads, v_dim);
        let stored = b
            .store_kv(&named("store"), LayerIdx(l), [k, v, cells])
            .unwrap();
        let kqv = b
            .attend(&named("kqv"), LayerIdx(l), spec, [q, stored, visibility])
            .unwrap();
        let out = b
            .affine(
                &named("o"),
                kqv,
                Affine::new(&named("o.w")).bias(&named("o.b")),
                WIDTH,
            )
            .unwrap();
        let out = b
            .rms_norm(&named("post_norm"), out, &named("post_norm.w"), 1e-6)
            .unwrap();
        let residual = b.add(&named("attn_residual"), x, out).unwrap();
        // Feed-forward beside the residual stream, from the same input.
        let up = b
            .linear(&named("up"), residual, &named("up.w"), 96)
            .unwrap();
        let gate = b
            .linear(&named("gate"), residual, &named("gate.w"), 96)
            .unwrap();
        let hidden = b
            .gate(&named("gated"), Activation::GeluTanh, gate, up)
            .unwrap();
        let down = b
            .linear(&named("down"), hidden, &named("down.w"), WIDTH)
            .unwrap();
        x = b.add(&named("ffn_residual"), residual, down).unwrap();
    }
    let x = b.rms_norm("norm", x, "norm.w", 1e-6).unwrap();
    let x = b.take_rows("wanted", x, wanted).unwrap();
    let logits = b.linear("logits", x, "head.w", VOCAB).unwrap();
    let logits = b.scale("logits_scaled", logits, 0.5).unwrap();
    b.finish(&[logits]).unwrap()
}

/// The same for a model with every option.
pub fn a_small_model_with_every_option_computes<B: Backend>(subject: &Subject<B>) {
    prompt_and_decode(subject, tiny_other);
}

/// One text in one batch, in chunks, and token by token, gives the same logits.
pub fn chunks_give_what_the_whole_gives<B: Backend>(subject: &Subject<B>) {
    for kv_type in kv_types(subject) {
        let mut random = Random::new(43);
        let cells: Vec<u32> = (0..40).collect();
        let tokens = text(&mut random, 0, 0, &cells);
        let logits = |sizes: &[usize]| {
            let mut both = Both::new(subject, tiny_llama, kv_type);
            let (mut scene, mut rest, mut all) = (Scene::default(), &tokens[..], Vec::new());
            for &size in sizes {
                let (now, later) = rest.split_at(size);
                let rows: Vec<u32> = (0..size as u32).collect();
                all.extend(both.run(&scene.step(now, Window::Full, &rows)));
                rest = later;
            }
            (all, both.tolerance())
        };
        let (whole, tolerance) = logits(&[40]);
        let wanted: Vec<f64> = whole.iter().map(|&v| f64::from(v)).collect();
        for sizes in [&[1; 40][..], &[7, 33], &[32, 1, 7]] {
            assert_close(
                &format!("chunks of {sizes:?}"),
                &logits(sizes).0,
                &wanted,
                tolerance,
            );
        }
    }
}

/// Several texts in one batch, in any cells, give what each gives alone.
pub fn strangers_do_not_matter<B: Backend>(subject: &Subject<B>) {
    for kv_type in kv_types(subject) {
        let mut random = Random::new(44);
        let cells = random.permutation(N_CELLS);
        let texts: Vec<Vec<Token>> = (0..3)
            .map(|t| text(&mut random, t, 0, &cells[t * 20..][..10 + 3 * t]))
            .collect();
        let mut together = Both::new(subject, tiny_llama, kv_type);
        // Interleaved: a token of each text in turn.
        let mut mixed: Vec<Token> = texts.iter().flatten().copied().collect();
        mixed.sort_by_key(|t| (t.pos, t.text));
        let rows: Vec<u32> = (0..mixed.len() as u32).collect();
        let got = together.run(&Scene::default().step(&mixed, Window::Full, &rows));
        for tokens in &texts {
            let mut alone = Both::new(subject, tiny_llama, kv_type);
            let rows: Vec<u32> = (0..tokens.len() as u32).collect();
            let wanted = alone.run(&Scene::default().step(tokens, Window::Full, &rows));
            let wanted: Vec<f64> = wanted.iter().map(|&v| f64::from(v)).collect();
            let own: Vec<f32> = mixed
                .iter()
                .zip(got.chunks_exact(VOCAB))
                .filter(|(t, _)| t.text == tokens[0].text)
                .flat_map(|(_, logits)| logits.iter().copied())
                .collect();
            assert_close("a text among strangers", &own, &wanted, alone.tolerance());
        }
    }
}

/// A run writes the cells of its tokens in every layer, and no other.
pub fn a_run_changes_only_its_own_cells<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
    for kv_type in kv_types(subject) {
        let mut both = Both::new(subject, tiny_llama, kv_type);
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
    for kv_type in kv_types(subject) {
        let mut both = Both::new(subject, tiny_llama, kv_type);
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
    let kv_type = kv_types(subject)[0];
    let cells: Vec<u32> = (0..20).collect();
    let tokens = text(&mut Random::new(48), 0, 0, &cells);
    let mut both = Both::new(subject, tiny_llama, kv_type);
    let mut other = Both::new(subject, tiny_llama, kv_type);
    let backend = &subject.backend;
    let graph = tiny_llama(GraphShape {
        n_tokens: 2,
        n_outputs: 1,
    });
    let mut program = backend
        .compile(&graph, &other.loaded, &other.layout)
        .unwrap();
    let (mut scene, mut outputs) = (Scene::default(), GraphOutputs::default());
    for pair in tokens.chunks_exact(2) {
        let step = scene.step(pair, Window::Full, &[1]);
        let wanted: Vec<f64> = both.run(&step).iter().map(|&v| f64::from(v)).collect();
        backend
            .run(&mut program, &mut other.rows, &step.inputs(), &mut outputs)
            .unwrap();
        assert_close(
            "the same program",
            outputs.first(),
            &wanted,
            subject.tolerance.graph,
        );
    }
}

/// Random graphs of elementwise operations, norms, products and rotations.
pub fn random_graphs_compute<B: Backend>(subject: &Subject<B>) {
    let backend = &subject.backend;
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
        let layout = RowLayout::default();
        let wanted = evaluate(
            &graph,
            &weights,
            &layout,
            &mut Memory::default(),
            &step.inputs(),
        );
        let loaded = backend
            .load_weights(Arc::new(weights), Default::default())
            .unwrap();
        let mut program = backend.compile(&graph, &loaded, &layout).unwrap();
        let mut rows = backend.allocate(&layout).unwrap();
        let mut got = GraphOutputs::default();
        backend
            .run(&mut program, &mut rows, &step.inputs(), &mut got)
            .unwrap();
        for (got, wanted) in got.values.iter().zip(&wanted) {
            let what = format!("seed {seed}:\n{}", graph.text());
            assert_close(&what, got, wanted, subject.tolerance.graph);
        }
    }
}
