//! The contract of each operation: alone in a graph, against its definition.

use super::evaluate::{Memory, evaluate};
use super::scene::{Step, memory_weights, rope};
use super::{Random, Subject, assert_close};
use kv_backend::Backend;
use kv_block::BlockFormat;
use kv_graph::rope::{RopeScaling, RopeSections, RopeSpec, RopeStyle, SectionOrder, YarnRamp};
use kv_graph::weights::{MemoryWeights, Weight};
use kv_graph::{Activation, Affine, Graph, GraphBuilder, GraphShape, Input, NodeId, NormGain};
use kv_rows::RowLayout;

/// Rows of the graphs here, and how many of them are wanted.
const SIZES: [(usize, usize); 3] = [(1, 1), (5, 3), (34, 0)];

pub(super) fn builder(n_tokens: usize, n_outputs: usize) -> GraphBuilder {
    GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs,
    })
}

/// Random inputs for a graph whose embedding rows have `dim` values.
pub(super) fn step(n_tokens: usize, n_outputs: usize, dim: usize, vocab: usize) -> Step {
    let mut random = Random::new(31);
    Step {
        tokens: (0..n_tokens).map(|_| random.below(vocab) as u32).collect(),
        positions: (0..n_tokens).map(|_| random.below(3000) as u32).collect(),
        coordinates: (0..n_tokens)
            .map(|_| [3000, 40, 70].map(|n| random.below(n) as u32))
            .collect(),
        output_rows: (0..n_outputs as u32).map(|r| 2 * r).collect(),
        embeddings: random.values(n_tokens * dim),
        token_types: (0..n_tokens).map(|_| random.below(2) as u32).collect(),
        ..Step::default()
    }
}

/// Runs `graph` and compares every output with its definition.
pub(super) fn compare<B: Backend>(
    subject: &Subject<B>,
    graph: &Graph,
    weights: MemoryWeights,
    step: &Step,
    tolerance: f64,
) {
    let layout = RowLayout::default();
    let mut inputs = step.inputs();
    // A graph gets tokens or embeddings, as it wants.
    let wants = |f: fn(&Input) -> bool| {
        graph
            .nodes()
            .iter()
            .any(|n| matches!(&n.op, kv_graph::Op::Input(i) if f(i)))
    };
    if !wants(|i| matches!(i, Input::Tokens)) {
        inputs.tokens = &[];
    }
    if !wants(|i| matches!(i, Input::Embeddings { .. })) {
        inputs.embeddings = &[];
    }
    let wanted = evaluate(graph, &weights, &layout, &mut Memory::default(), &inputs);
    let mut compiled = subject.compile(graph, &weights, &layout).unwrap();
    let outputs = compiled.run(&inputs).unwrap();
    assert_eq!(outputs.len(), wanted.len());
    for (at, (got, wanted)) in outputs.iter().zip(&wanted).enumerate() {
        let what = format!("output {at} of\n{}", graph.text());
        assert_close(&what, got, wanted, tolerance);
    }
}

/// A graph of one operation on `inputs` embeddings of `dim` values, for every size.
pub(super) fn alone<B: Backend>(
    subject: &Subject<B>,
    dim: usize,
    tolerance: f64,
    build: impl Fn(&mut GraphBuilder, NodeId) -> NodeId,
) {
    for (n_tokens, n_outputs) in SIZES {
        let mut b = builder(n_tokens, n_outputs);
        let x = b.input(Input::Embeddings { dim }).unwrap();
        let y = build(&mut b, x);
        let graph = b.finish(&[y]).unwrap();
        let weights = memory_weights(&graph, 32);
        let step = step(n_tokens, n_outputs, dim, 1);
        compare(subject, &graph, weights, &step, tolerance);
    }
}

/// `Embed` gives the rows of the tokens.
pub fn embed_looks_rows_up<B: Backend>(subject: &Subject<B>) {
    for (n_tokens, n_outputs) in SIZES {
        let mut b = builder(n_tokens, n_outputs);
        let tokens = b.input(Input::Tokens).unwrap();
        let y = b.embed("y", tokens, "w", [11, 24]).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let weights = memory_weights(&graph, 33);
        let step = step(n_tokens, n_outputs, 0, 11);
        let tolerance = subject.tolerance.elementwise;
        compare(subject, &graph, weights, &step, tolerance);
    }
}

/// `Embed` by positions and by types, as in models that learnt a row for each, added to rows of
/// tokens.
pub fn embed_looks_positions_and_types_up<B: Backend>(subject: &Subject<B>) {
    for (n_tokens, n_outputs) in SIZES {
        let mut b = builder(n_tokens, n_outputs);
        let inputs = [Input::Tokens, Input::Positions, Input::TokenTypes];
        let [tokens, positions, types] = inputs.map(|i| b.input(i).unwrap());
        let x = b.embed("x", tokens, "w", [11, 24]).unwrap();
        let p = b.embed("p", positions, "pos", [3000, 24]).unwrap();
        let t = b.embed("t", types, "types", [2, 24]).unwrap();
        let x = b.add("x_p", x, p).unwrap();
        let y = b.add("y", x, t).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let weights = memory_weights(&graph, 35);
        let step = step(n_tokens, n_outputs, 0, 11);
        let tolerance = subject.tolerance.elementwise;
        compare(subject, &graph, weights, &step, tolerance);
    }
}

/// A weight of random blocks with scales of a sensible size.
pub fn block_weight(name: &str, shape: &[usize], format: BlockFormat) -> Weight {
    let mut random = Random::new(34);
    let (n, len, size) = (
        shape.iter().product::<usize>(),
        format.block_len(),
        format.block_bytes(),
    );
    let mut bytes = Vec::new();
    for _ in 0..n / len {
        match format {
            BlockFormat::F32 => bytes.extend(random.value().to_le_bytes()),
            BlockFormat::F16 => bytes.extend(half::f16::from_f32(random.value()).to_le_bytes()),
            BlockFormat::BF16 => bytes.extend(half::bf16::from_f32(random.value()).to_le_bytes()),
            _ => {
                let mut block: Vec<u8> = (0..size).map(|_| random.bits() as u8).collect();
                set_scales(format, &mut block, || 0.01 + 0.005 * random.value());
                bytes.extend(block);
            }
        }
    }
    Weight::new(name, shape.to_vec(), format, bytes.into()).unwrap()
}

/// Gives each scale and minimum of a block a value: the nearest in half precision, or what a scale
/// of 8 bits has of it: the power of two below, or the float below.
pub fn set_scales(format: BlockFormat, block: &mut [u8], mut scale: impl FnMut() -> f32) {
    match format {
        // The exponent of a float, which has the same bias.
        BlockFormat::MXFP4 => block[0] = (scale().to_bits() >> 23) as u8,
        BlockFormat::NVFP4 => block[..4].fill_with(|| twice_in_e4m3(scale())),
        // Four bits in the upper half of each second byte.
        BlockFormat::IQ1_M => {
            let bits = half::f16::from_f32(scale()).to_bits();
            for (i, byte) in block[49..].iter_mut().step_by(2).enumerate() {
                *byte = (*byte & 15) | ((bits >> (4 * i) & 15) as u8) << 4;
            }
        }
        _ => {
            for &at in half_precision(format) {
                let scale = half::f16::from_f32(scale());
                block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
            }
        }
    }
}

/// The offsets of a block's numbers in half precision.
fn half_precision(format: BlockFormat) -> &'static [usize] {
    match format {
        BlockFormat::F32 | BlockFormat::BF16 => &[],
        BlockFormat::Q4_1 | BlockFormat::Q5_1 | BlockFormat::Q4_K | BlockFormat::Q5_K => &[0, 2],
        BlockFormat::Q2_K => &[80, 82],
        BlockFormat::Q3_K => &[108],
        BlockFormat::Q6_K => &[208],
        BlockFormat::TQ1_0 => &[52],
        BlockFormat::TQ2_0 => &[64],
        _ => &[0],
    }
}

/// Twice a magnitude as a float of 4 bits of exponent and 3 of mantissa, rounded down.
fn twice_in_e4m3(scale: f32) -> u8 {
    let x = (2.0 * scale.abs()).min(448.0);
    let exponent = (x.to_bits() >> 23) as i32 - 120;
    match exponent {
        ..=0 => (x * 512.0) as u8,
        _ => (exponent as u8) << 3 | (x.to_bits() >> 20 & 7) as u8,
    }
}

/// `Embed` reads every block format.
pub fn embed_on_blocks<B: Backend>(subject: &Subject<B>) {
    for format in subject.formats() {
        let mut b = builder(6, 0);
        let tokens = b.input(Input::Tokens).unwrap();
        let y = b.embed("y", tokens, "w", [9, 512]).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let mut weights = MemoryWeights::new();
        weights.insert(block_weight("w", &[9, 512], format));
        let tolerance = subject.tolerance.elementwise;
        compare(subject, &graph, weights, &step(6, 0, 0, 9), tolerance);
    }
}

/// A matrix in a format that a backend does not compute with is refused, and the error names both.
pub fn other_formats_are_refused<B: Backend>(subject: &Subject<B>) {
    let known: Vec<BlockFormat> = subject.formats().collect();
    for format in BlockFormat::ALL.into_iter().filter(|f| !known.contains(f)) {
        let mut b = builder(1, 0);
        let x = b.input(Input::Embeddings { dim: 512 }).unwrap();
        let y = b.linear("y", x, "w", 37).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let mut weights = MemoryWeights::new();
        weights.insert(block_weight("w", &[37, 512], format));
        let refused = subject.compile(&graph, &weights, &RowLayout::default());
        let error = refused.err().unwrap().to_string();
        assert!(
            error.contains("'w'") && error.contains(format.name()),
            "{format}: {error}"
        );
    }
}

/// `Linear` multiplies with every block format, one row and many.
pub fn linear_on_blocks<B: Backend>(subject: &Subject<B>) {
    for format in subject.formats() {
        let tolerance = subject.tolerance.linear_of(format);
        for n_tokens in [0, 1, 2, 7, 40] {
            let mut b = builder(n_tokens, 0);
            let x = b.input(Input::Embeddings { dim: 512 }).unwrap();
            let y = b.linear("y", x, "w", 37).unwrap();
            let graph = b.finish(&[y]).unwrap();
            let mut weights = MemoryWeights::new();
            weights.insert(block_weight("w", &[37, 512], format));
            let step = step(n_tokens, 0, 512, 1);
            compare(subject, &graph, weights, &step, tolerance);
        }
    }
}

/// `Linear` multiplies with plain floats of any width.
pub fn linear_multiplies<B: Backend>(subject: &Subject<B>) {
    for (dim, n_out) in [(64, 48), (7, 5), (1, 1), (33, 130)] {
        alone(subject, dim, subject.tolerance.linear, |b, x| {
            b.linear("y", x, "w", n_out).unwrap()
        });
    }
}

/// `Linear` adds its bias; matrices of one input keep apart.
pub fn linear_adds_a_bias<B: Backend>(subject: &Subject<B>) {
    alone(subject, 32, subject.tolerance.linear, |b, x| {
        b.affine("y", x, Affine::new("w").bias("b"), 20).unwrap()
    });
    alone(subject, 32, subject.tolerance.linear, |b, x| {
        let q = b.affine("q", x, Affine::new("wq").bias("bq"), 20).unwrap();
        let k = b.linear("k", x, "wk", 20).unwrap();
        let v = b.affine("v", x, Affine::new("wv").bias("bv"), 20).unwrap();
        let qk = b.mul("qk", q, k).unwrap();
        b.add("qkv", qk, v).unwrap()
    });
}

/// `RmsNorm` over rows and over heads.
pub fn rms_norm_divides<B: Backend>(subject: &Subject<B>) {
    alone(subject, 40, subject.tolerance.elementwise, |b, x| {
        b.rms_norm("y", x, "w", 1e-6).unwrap()
    });
    alone(subject, 40, subject.tolerance.elementwise, |b, x| {
        let n = b.shape().n_tokens;
        let heads = b.reshape("heads", x, &[n, 5, 8]).unwrap();
        b.rms_norm("y", heads, "w", 0.5).unwrap()
    });
    for gain in [NormGain::None, NormGain::PerGroup("w")] {
        alone(subject, 40, subject.tolerance.elementwise, |b, x| {
            let n = b.shape().n_tokens;
            let groups = b.reshape("groups", x, &[n, 2, 20]).unwrap();
            b.rms_norm_with("y", groups, gain, 1e-3).unwrap()
        });
    }
}

/// `RopeSections` in both orders and styles, whole and partial, added to a rotation of text.
pub fn rope_sections_rotate<B: Backend>(subject: &Subject<B>) {
    let consecutive = SectionOrder::Consecutive;
    let cases = [
        (RopeStyle::Neox, [2, 3, 3], consecutive),
        (RopeStyle::Norm, [1, 0, 4], consecutive),
        (RopeStyle::Neox, [4, 2, 2], SectionOrder::Interleaved),
    ];
    for (style, pairs, order) in cases {
        let sections = RopeSections { pairs, order };
        let spec = rope(style, 2 * sections.n_pairs());
        alone(subject, 3 * 18, subject.tolerance.elementwise, |b, x| {
            let n = b.shape().n_tokens;
            let coordinates = b.input(Input::Coordinates).unwrap();
            let positions = b.input(Input::Positions).unwrap();
            let heads = b.reshape("heads", x, &[n, 3, 18]).unwrap();
            let image = b.rope_sections("image", [heads, coordinates], &spec, sections);
            let text = b.rope("text", heads, positions, &spec).unwrap();
            b.add("y", image.unwrap(), text).unwrap()
        });
    }
}

/// `Rope` in both styles, whole and partial, with every kind of scaling.
pub fn rope_rotates<B: Backend>(subject: &Subject<B>) {
    let yarn = RopeScaling::Yarn {
        factor: 4.0,
        original_context: 512,
        beta_fast: 32.0,
        beta_slow: 1.0,
        attention_factor: 1.138,
        ramp: YarnRamp::Whole,
    };
    let specs = [
        rope(RopeStyle::Norm, 16),
        rope(RopeStyle::Neox, 16),
        rope(RopeStyle::Norm, 10),
        rope(RopeStyle::Neox, 6),
        RopeSpec {
            scaling: RopeScaling::Linear { factor: 8.0 },
            ..rope(RopeStyle::Neox, 16)
        },
        RopeSpec {
            scaling: yarn,
            base: 5e5,
            ..rope(RopeStyle::Neox, 16)
        },
        RopeSpec {
            factors: Some("factors".into()),
            ..rope(RopeStyle::Norm, 16)
        },
    ];
    for spec in &specs {
        alone(subject, 48, subject.tolerance.elementwise, |b, x| {
            let n = b.shape().n_tokens;
            let heads = b.reshape("heads", x, &[n, 3, 16]).unwrap();
            let positions = b.input(Input::Positions).unwrap();
            b.rope("y", heads, positions, spec).unwrap()
        });
    }
    // Two rotations in one graph keep apart.
    alone(subject, 48, subject.tolerance.elementwise, |b, x| {
        let n = b.shape().n_tokens;
        let heads = b.reshape("heads", x, &[n, 3, 16]).unwrap();
        let positions = b.input(Input::Positions).unwrap();
        let local = b.rope("local", heads, positions, &specs[1]).unwrap();
        let global = b.rope("global", heads, positions, &specs[5]).unwrap();
        let sum = b.add("sum", local, global).unwrap();
        b.add("y", sum, heads).unwrap()
    });
}

/// `Reshape` keeps the values.
pub fn reshape_keeps_values<B: Backend>(subject: &Subject<B>) {
    alone(subject, 24, 0.0, |b, x| {
        let n = b.shape().n_tokens;
        b.reshape("y", x, &[n, 4, 6]).unwrap()
    });
}

/// `Add`, also of a value with itself.
pub fn add_adds<B: Backend>(subject: &Subject<B>) {
    alone(subject, 24, subject.tolerance.elementwise, |b, x| {
        let y = b.scale("y", x, 3.0).unwrap();
        let sum = b.add("sum", x, y).unwrap();
        b.add("twice", sum, sum).unwrap()
    });
}

/// `Mul`, also of a value with itself.
pub fn mul_multiplies<B: Backend>(subject: &Subject<B>) {
    alone(subject, 24, subject.tolerance.elementwise, |b, x| {
        let y = b.scale("y", x, 3.0).unwrap();
        let product = b.mul("product", x, y).unwrap();
        b.mul("square", product, product).unwrap()
    });
}

/// `Scale` multiplies every value.
pub fn scale_scales<B: Backend>(subject: &Subject<B>) {
    alone(subject, 24, subject.tolerance.elementwise, |b, x| {
        b.scale("y", x, -0.3).unwrap()
    });
}

/// `Gate` with every activation, far into both tails.
pub fn gate_activates<B: Backend>(subject: &Subject<B>) {
    for activation in [Activation::Silu, Activation::GeluTanh, Activation::GeluErf] {
        for factor in [1.0, 6.0, 300.0] {
            alone(subject, 24, subject.tolerance.elementwise, |b, x| {
                let gate = b.scale("gate", x, factor).unwrap();
                b.gate("y", activation, gate, x).unwrap()
            });
            alone(subject, 24, subject.tolerance.elementwise, |b, x| {
                let up = b.scale("up", x, factor).unwrap();
                b.gate("y", activation, x, up).unwrap()
            });
        }
    }
}

/// `TakeRows` takes the wanted rows, also none.
pub fn take_rows_takes<B: Backend>(subject: &Subject<B>) {
    alone(subject, 24, 0.0, |b, x| {
        let rows = b.input(Input::OutputRows).unwrap();
        b.take_rows("y", x, rows).unwrap()
    });
}

/// The largest values, the first of equal ones, and the logarithm of the sum of all exponentials.
pub fn top_k_finds<B: Backend>(subject: &Subject<B>) {
    for (width, k) in [(1, 1), (37, 37), (300, 5), (5000, 64), (9001, 200)] {
        for n in [1, 3] {
            let graph = |sorted: bool| {
                let mut b = GraphBuilder::new(GraphShape {
                    n_tokens: n,
                    n_outputs: 0,
                });
                let x = b.input(Input::Embeddings { dim: width }).unwrap();
                // Zeros of one sign: many equal values.
                let zeros = b.scale("zeros", x, 0.0).unwrap();
                let equal = b.mul("equal_values", zeros, zeros).unwrap();
                let outputs = [(x, "x"), (equal, "equal")].map(|(of, name)| {
                    let top = b.top_k(&format!("{name}_top"), of, k).unwrap();
                    let columns = if sorted { 0..2 * k } else { 2 * k..2 * k + 1 };
                    b.columns(name, top, columns).unwrap()
                });
                b.finish(&outputs).unwrap()
            };
            let step = step(n, 0, width, 1);
            compare(subject, &graph(true), MemoryWeights::new(), &step, 0.0);
            let tolerance = subject.tolerance.elementwise;
            compare(
                subject,
                &graph(false),
                MemoryWeights::new(),
                &step,
                tolerance,
            );
        }
    }
}

/// An operand that is used again later still has its values then.
pub fn operands_survive<B: Backend>(subject: &Subject<B>) {
    alone(subject, 24, subject.tolerance.elementwise * 10.0, |b, x| {
        let a = b.scale("a", x, 2.0).unwrap();
        let c = b.scale("c", a, 3.0).unwrap();
        let d = b.gate("d", Activation::Silu, a, c).unwrap();
        let e = b.mul("e", a, d).unwrap();
        let n = b.shape().n_tokens;
        let heads = b.reshape("heads", a, &[n, 3, 8]).unwrap();
        let positions = b.input(Input::Positions).unwrap();
        let f = b
            .rope("f", heads, positions, &rope(RopeStyle::Neox, 8))
            .unwrap();
        let f = b.reshape("f_rows", f, &[n, 24]).unwrap();
        let g = b.add("g", f, e).unwrap();
        let h = b.add("h", c, g).unwrap();
        b.add("i", h, a).unwrap()
    });
}

/// Several outputs: one of them twice, one that later nodes use, one that is an input.
pub fn outputs_may_repeat<B: Backend>(subject: &Subject<B>) {
    let mut b = builder(5, 0);
    let x = b.input(Input::Embeddings { dim: 24 }).unwrap();
    let a = b.scale("a", x, 2.0).unwrap();
    let heads = b.reshape("heads", a, &[5, 3, 8]).unwrap();
    let c = b.scale("c", a, 3.0).unwrap();
    let d = b.add("d", c, a).unwrap();
    let graph = b.finish(&[d, a, x, d, heads]).unwrap();
    let (weights, tolerance) = (MemoryWeights::new(), subject.tolerance.elementwise);
    compare(subject, &graph, weights, &step(5, 0, 24, 1), tolerance);
}
