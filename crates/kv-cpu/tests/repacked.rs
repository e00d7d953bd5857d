//! Repacked weights against the same weights as they are stored: every bit the same, on every instruction set of this
//! machine.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::num::NonZeroUsize;
use std::sync::Arc;

use half::{bf16, f16};
use kv_contract::Random;
use kv_core::backend::{Backend, BoxedBackend};
use kv_core::block::BlockFormat;
use kv_core::graph::{
    Graph, GraphBuilder, GraphInputs, GraphOutputs, GraphShape, Input, RouteGate, RouteSpec,
    RouteSum,
};
use kv_core::layers::RowLayout;
use kv_core::weights::{MemoryWeights, Weight};
use kv_cpu::activations::ActivationKind;
use kv_cpu::isa::Isa;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig, CpuWeights, RepackChoice, Repacking};

/// Random blocks; clear bits bound their scales. Floats are of eight significant bits, some of them zero: only those can be
/// repacked.
fn weight(name: &str, shape: &[usize], format: BlockFormat) -> Weight {
    let mut random = Random::new(17);
    let n_values: usize = shape.iter().product();
    if format.block_len() == 1 {
        let values = random.values(n_values).into_iter().enumerate();
        let bytes = values.flat_map(|(i, value)| {
            let value = if i % 19 == 0 { 0.0 } else { value * 0.3 };
            let value = bf16::from_f32(value);
            match format {
                BlockFormat::BF16 => value.to_le_bytes().to_vec(),
                BlockFormat::F16 => f16::from_f32(value.to_f32()).to_le_bytes().to_vec(),
                _ => value.to_f32().to_le_bytes().to_vec(),
            }
        });
        let bytes: Vec<u8> = bytes.collect();
        return Weight::new(name, shape.to_vec(), format, bytes.into()).unwrap();
    }
    let n = n_values / format.block_len() * format.block_bytes();
    let mut bytes: Vec<u8> = (0..n).map(|_| random.bits() as u8 & 0xb7).collect();
    if format == BlockFormat::MXFP4 {
        let scales = bytes.iter_mut().step_by(format.block_bytes());
        scales.for_each(|e| *e = 110 + *e % 20);
    }
    Weight::new(name, shape.to_vec(), format, bytes.into()).unwrap()
}

/// Runs of a program: what a graph makes of random rows, as bits, and how much was repacked after it.
type Runs = Vec<(Vec<u32>, Repacking)>;

/// As many runs as repacking takes.
fn computed(graph: &Graph, weights: &[Weight], columns: usize, config: CpuConfig) -> Runs {
    let backend = CpuBackend::new(config).unwrap();
    let mut source = MemoryWeights::new();
    weights.iter().for_each(|w| source.insert(w.clone()));
    let layout = RowLayout::default();
    let weights = backend.load_weights(Arc::new(source)).unwrap();
    let mut rows = backend.allocate(&layout).unwrap();
    let mut program = backend.compile(graph, &weights, &layout).unwrap();
    let n_tokens = graph.shape().n_tokens;
    let x = Random::new(3).values(n_tokens * columns);
    // Without embeddings, rows of a matrix of 48 (those of six tokens are below 38).
    let ids = (0..n_tokens as u32).map(|i| i * 17 % 48);
    let tokens: Vec<u32> = ids.filter(|_| columns == 0).collect();
    let inputs = GraphInputs {
        embeddings: &x,
        tokens: &tokens,
        ..GraphInputs::default()
    };
    let mut outputs = GraphOutputs::default();
    let mut runs = Runs::new();
    loop {
        backend
            .run(&mut program, &mut rows, &inputs, &mut outputs)
            .unwrap();
        let values = outputs.values.iter().flatten();
        let repacking = weights.repacking();
        runs.push((values.map(|v| v.to_bits()).collect(), repacking));
        // The first run repacks nothing; of few weights the second one does it all.
        if repacking.done == repacking.all {
            return runs;
        }
        assert!(runs.len() < 9, "{repacking:?}");
    }
}

/// Runs with weights as they are stored, and with repacked ones.
fn both(
    (graph, weights, columns): (&Graph, &[Weight], usize),
    isa: Isa,
    activations: ActivationChoice,
) -> [Runs; 2] {
    [RepackChoice::Never, RepackChoice::Auto].map(|repack| {
        let config = CpuConfig {
            n_threads: NonZeroUsize::new(3),
            isa: Some(isa),
            activations,
            repack,
        };
        computed(graph, weights, columns, config)
    })
}

/// The same bits, repacked or not.
fn same(graph: &Graph, weights: &[Weight], columns: usize, what: &str) {
    for isa in Isa::all_available() {
        let activations = ActivationChoice::Always(ActivationKind::Int8);
        let [stored, repacked] = both((graph, weights, columns), isa, activations);
        assert_eq!(stored.len(), 1, "{isa} {what}");
        let (stored, repacking) = &stored[0];
        assert_eq!(
            *repacking,
            Repacking::default(),
            "{isa} {what}: against the caller's will"
        );
        let is_repacked = is_repacked(isa, weights);
        assert_eq!(repacked.len() > 1, is_repacked, "{isa} {what}");
        assert!(
            !is_repacked || repacked[0].1.done == 0,
            "{isa} {what}: the first run waits"
        );
        assert!(
            stored.iter().any(|bits| f32::from_bits(*bits) != 0.0),
            "{isa} {what}"
        );
        assert!(
            stored.iter().all(|bits| f32::from_bits(*bits).is_finite()),
            "{isa} {what}"
        );
        for (run, (repacked, _)) in repacked.iter().enumerate() {
            assert!(stored == repacked, "{isa} {what}: run {run}");
        }
    }
}

/// Whether there is something to repack of some weights of this test: where there are kernels for it, matrices whose rows
/// come in sixteens, and large ones everywhere.
fn is_repacked(isa: Isa, weights: &[Weight]) -> bool {
    let has_kernels = isa.is_avx512();
    let is_large = |w: &Weight| cfg!(target_os = "linux") && w.bytes().len() >= 8 << 20;
    weights.iter().any(|w| {
        let n_out = w.shape()[w.shape().len() - 2];
        // What a matrix of its own has after the last sixteen rows stays as it is stored.
        let has_some = n_out.is_multiple_of(16) || (w.shape().len() == 2 && n_out > 16);
        let is_whole = w.format().block_len() > 1 || w.n_columns().is_multiple_of(64);
        is_large(w) || (has_kernels && has_some && is_whole)
    })
}

fn builder(n_tokens: usize, columns: usize) -> (GraphBuilder, kv_core::graph::NodeId) {
    let n_outputs = n_tokens;
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs,
    });
    let x = b.input(Input::Embeddings { dim: columns }).unwrap();
    (b, x)
}

/// Every format, rows that are no whole panel and no whole group, columns of one block and of several panels.
#[test]
fn matrices() {
    for format in BlockFormat::ALL {
        let columns = [1, 3, 4, 9, 38].map(|n| 32 * n);
        let columns = columns.into_iter().filter(|n| n % format.block_len() == 0);
        for columns in columns.chain([format.block_len(), 9 * 256]) {
            for (n_rows, n_tokens) in [
                (16, 1),
                (80, 1),
                (40, 1),
                (15, 1),
                (15, 5),
                (80, 2),
                (48, 7),
                (64, 41),
                (40, 9),
            ] {
                let (mut b, x) = builder(n_tokens, columns);
                let y = b.linear("y", x, "w", n_rows).unwrap();
                let graph = b.finish(&[y]).unwrap();
                let w = weight("w", &[n_rows, columns], format);
                let what = format!("{format}: {n_tokens} tokens, {n_rows} × {columns}");
                same(&graph, &[w], columns, &what);
            }
        }
    }
}

/// As many tokens as come together in every way, up to those that are multiplied by panels.
#[test]
fn few_tokens() {
    let columns = 3 * 256;
    for format in BlockFormat::ALL {
        for n_tokens in (2..=13).chain([17, 21, 64, 65]) {
            let (mut b, x) = builder(n_tokens, columns);
            let y = b.linear("y", x, "w", 48).unwrap();
            let graph = b.finish(&[y]).unwrap();
            let w = weight("w", &[48, columns], format);
            same(
                &graph,
                &[w],
                columns,
                &format!("{format}: {n_tokens} tokens"),
            );
        }
    }
}

/// F16 of eleven significant bits, below 2: as many tokens as come together in every way, several shapes, among which are columns
/// of no whole block.
#[test]
fn f16_of_all_bits() {
    let tokens = (1..=13).chain([17, 33, 65]).map(|n| (n, 48, 256));
    let shapes = [
        (1, 87, 128),
        (1, 16, 896),
        (5, 40, 1280),
        (3, 16, 64),
        (2, 32, 160),
    ];
    for (n_tokens, n_rows, columns) in tokens.chain(shapes) {
        let (mut b, x) = builder(n_tokens, columns);
        let y = b.linear("y", x, "w", n_rows).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let values = Random::new(23).values(n_rows * columns);
        let halves = values.iter().map(|v| f16::from_f32(v * 1.9).to_le_bytes());
        let bytes: Vec<u8> = halves.flatten().collect();
        let w = Weight::new("w", vec![n_rows, columns], BlockFormat::F16, bytes.into()).unwrap();
        for isa in Isa::all_available() {
            let of = (&graph, std::slice::from_ref(&w), columns);
            let [stored, repacked] = both(of, isa, ActivationChoice::Auto);
            let what = format!("{isa}: {n_tokens} tokens, {n_rows} × {columns}");
            for (bits, _) in &repacked {
                assert!(*bits == stored[0].0, "{what}");
            }
            let (_, repacking) = repacked.last().unwrap();
            let n_bytes = match isa.is_avx512() && columns.is_multiple_of(128) {
                true => n_rows / 16 * 16 * columns / 128 * 240,
                false => 0,
            };
            assert_eq!(repacking.all, n_bytes, "{what}");
        }
    }
}

#[test]
fn floats_that_turn_out_to_be_longer() {
    // Where the first rows say so, fifteen bits are kept.
    with_longer_float(
        BlockFormat::F16,
        [13, 15],
        [|value| value, |value| value | 1],
    );
}

#[test]
fn floats_that_turn_out_to_be_larger() {
    with_longer_float(BlockFormat::F16, [15, 16], [|value| value | 1, |_| 0x4000]);
}

#[test]
fn bf16_that_turns_out_to_be_too_small() {
    with_longer_float(BlockFormat::BF16, [13, 16], [|value| value, |_| 1]);
}

/// Floats that take the first number of bits (made of others by the first function) and among them one that takes more: the
/// piece that it is in is read as it is stored. Where the first rows have it, all take the second number.
fn with_longer_float(
    format: BlockFormat,
    [bits, more_bits]: [usize; 2],
    [all, odd]: [fn(u16) -> u16; 2],
) {
    let (n_rows, columns) = (9 << 10, 1024);
    let (mut b, x) = builder(1, columns);
    let y = b.linear("y", x, "w", n_rows).unwrap();
    let graph = b.finish(&[y]).unwrap();
    let all_bytes = 2 * n_rows * columns;
    for odd_row in [n_rows / 2, n_rows / 3, 0] {
        let mut bytes = weight("w", &[n_rows, columns], format).bytes().to_vec();
        for (i, value) in bytes.as_chunks_mut().0.iter_mut().enumerate() {
            let make = if i == odd_row * columns + 5 { odd } else { all };
            *value = make(u16::from_le_bytes(*value)).to_le_bytes();
        }
        let w = Weight::new("w", vec![n_rows, columns], format, bytes.into()).unwrap();
        for isa in Isa::all_available() {
            let of = (&graph, std::slice::from_ref(&w), columns);
            let [stored, repacked] = both(of, isa, ActivationChoice::Auto);
            for (bits, _) in &repacked {
                assert!(*bits == stored[0].0, "{isa}: row {odd_row}");
            }
            let (_, repacking) = repacked.last().unwrap();
            let has_kernels = isa.is_avx512();
            let n_bytes = match has_kernels {
                true if odd_row == 0 => all_bytes * more_bits / 16,
                // Without a piece of 256 KiB.
                true => all_bytes * bits / 16 - (256 << 10),
                false => all_bytes,
            };
            let is_copied = has_kernels && n_bytes < all_bytes || cfg!(target_os = "linux");
            let off = repacking.all as f64 - if is_copied { n_bytes as f64 } else { 0.0 };
            // Scales of rows, and pieces of whole rows.
            assert!(
                off.abs() < 0.005 * all_bytes as f64,
                "{isa}: {repacking:?}, {n_bytes}"
            );
        }
    }
}

/// Parts of a matrix, at rows that are side by side with others and at rows that are not.
#[test]
fn parts_of_matrices() {
    for format in [BlockFormat::Q5_0, BlockFormat::Q6_K, BlockFormat::BF16] {
        for (n_tokens, parts) in [
            (1, [0, 32, 80]),
            (5, [0, 32, 80]),
            (1, [0, 24, 80]),
            (5, [0, 24, 80]),
            (1, [0, 32, 87]),
            (5, [0, 32, 87]),
            (70, [0, 80, 87]),
        ] {
            let (mut b, x) = builder(n_tokens, 512);
            let y = b.linear("y", x, "w", parts[2]).unwrap();
            let each = parts.windows(2).map(|p| {
                let name = format!("part {}", p[0]);
                b.columns(&name, y, p[0]..p[1]).unwrap()
            });
            let each: Vec<_> = each.collect();
            let graph = b.finish(&each).unwrap();
            let w = weight("w", &[parts[2], 512], format);
            same(
                &graph,
                &[w],
                512,
                &format!("{format}: {n_tokens} tokens, parts {parts:?}"),
            );
        }
    }
}

/// A matrix whose rows are embeddings, too: both read what was repacked.
#[test]
fn rows_of_matrices() {
    // Of 38 rows six stay as they are stored, two of them among the embeddings.
    for (format, n_rows) in BlockFormat::ALL
        .into_iter()
        .flat_map(|format| [(format, 48), (format, 38)])
    {
        let columns = 2 * 256;
        let mut b = GraphBuilder::new(GraphShape {
            n_tokens: 6,
            n_outputs: 6,
        });
        let ids = b.input(Input::Tokens).unwrap();
        let rows = b.embed("rows", ids, "w", [n_rows, columns]).unwrap();
        let y = b.linear("y", rows, "w", n_rows).unwrap();
        let graph = b.finish(&[rows, y]).unwrap();
        same(
            &graph,
            &[weight("w", &[n_rows, columns], format)],
            0,
            &format!("{format}: {n_rows} rows"),
        );
    }
}

/// A matrix for each expert out of one weight.
#[test]
fn experts() {
    let spec = RouteSpec {
        n_used: 2,
        gate: RouteGate::Softmax,
        sum: RouteSum::One,
    };
    for format in [
        BlockFormat::Q4_0,
        BlockFormat::MXFP4,
        BlockFormat::Q4_K,
        BlockFormat::Q3_K,
        BlockFormat::BF16,
    ] {
        for (n_tokens, n_out) in [(1, 48), (9, 48), (3, 40)] {
            let (mut b, x) = builder(n_tokens, 256);
            let logits = b.linear("logits", x, "router", 5).unwrap();
            let routes = b.route("routes", logits, spec).unwrap();
            let y = b
                .expert_linear("y", [x, routes], ("w", None), n_out)
                .unwrap();
            let graph = b.finish(&[y]).unwrap();
            let router = weight("router", &[5, 256], BlockFormat::Q8_0);
            let w = weight("w", &[5, n_out, 256], format);
            let what = format!("{format}: {n_tokens} tokens, {n_out} outputs of each expert");
            same(&graph, &[router, w], 256, &what);
        }
    }
}

/// A matrix that several runs repack: the first rows of it are read in another order than the last ones meanwhile.
#[test]
fn a_few_rows_in_each_run() {
    let (columns, n_rows) = (1024, 150 << 10);
    for n_tokens in [1, 3] {
        let (mut b, x) = builder(n_tokens, columns);
        let y = b.linear("y", x, "w", n_rows).unwrap();
        let graph = b.finish(&[y]).unwrap();
        let w = weight("w", &[n_rows, columns], BlockFormat::Q4_0);
        same(&graph, &[w], columns, &format!("{n_tokens} tokens, 84 MB"));
    }
}

/// Who has time repacks everything before the first run, through any backend.
#[test]
fn settled_before_the_first_run() {
    let (mut b, x) = builder(1, 1024);
    let y = b.linear("y", x, "w", 9 << 10).unwrap();
    let graph = b.finish(&[y]).unwrap();
    let x = Random::new(3).values(1024);
    let run = |is_settled| {
        let backend = BoxedBackend::new(CpuBackend::new(CpuConfig::default()).unwrap());
        let mut source = MemoryWeights::new();
        source.insert(weight("w", &[9 << 10, 1024], BlockFormat::Q8_0));
        let weights = backend.load_weights(Arc::new(source)).unwrap();
        let layout = RowLayout::default();
        let mut program = backend.compile(&graph, &weights, &layout).unwrap();
        if is_settled {
            while backend.settle(&weights).unwrap() {}
            let own: &CpuWeights = weights.downcast_ref().unwrap();
            let repacking = own.repacking();
            assert_eq!(repacking.done, repacking.all);
            assert_eq!(repacking.all > 0, cfg!(target_os = "linux"));
        }
        let inputs = GraphInputs {
            embeddings: &x,
            ..GraphInputs::default()
        };
        let mut rows = backend.allocate(&layout).unwrap();
        let mut outputs = GraphOutputs::default();
        let done = backend.run(&mut program, &mut rows, &inputs, &mut outputs);
        done.unwrap();
        outputs.values
    };
    assert_eq!(run(true), run(false));
}

/// Weights are of the backend that loaded them: another one may want another order.
#[test]
fn other_instruction_sets_are_refused() {
    let with = |isa| CpuConfig {
        isa: Some(isa),
        ..CpuConfig::default()
    };
    let (mut b, x) = builder(1, 32);
    let y = b.linear("y", x, "w", 16).unwrap();
    let graph = b.finish(&[y]).unwrap();
    let mut source = MemoryWeights::new();
    source.insert(weight("w", &[16, 32], BlockFormat::Q8_0));
    let scalar = CpuBackend::new(with(Isa::Scalar)).unwrap();
    let weights = scalar.load_weights(Arc::new(source)).unwrap();
    for isa in Isa::all_available() {
        let compiled =
            CpuBackend::new(with(isa))
                .unwrap()
                .compile(&graph, &weights, &RowLayout::default());
        match isa {
            Isa::Scalar => assert!(compiled.is_ok()),
            _ => {
                let said = compiled.unwrap_err().to_string();
                assert!(
                    said.contains("scalar") && said.contains(&isa.to_string()),
                    "{said}"
                );
            }
        }
    }
}
