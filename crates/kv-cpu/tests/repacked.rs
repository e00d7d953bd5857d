//! Packed weights against the same weights as stored: every bit the same, on every instruction set
//! of this machine.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use half::{bf16, f16};
use kv_backend::{Backend, LoadProgress, OnProgress};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_block::BlockFormat;
use kv_contract::Random;
use kv_cpu::activations::ActivationKind;
use kv_cpu::isa::Isa;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig, RepackChoice};
use kv_graph::weights::{MemoryWeights, Weight};
use kv_graph::{Affine, Graph, GraphBuilder, GraphShape, Input, RouteGate, RouteSpec, RouteSum};
use kv_rows::RowLayout;

/// Random blocks; clear bits bound their scales. Floats have eight significant bits, and some are
/// zero: only those can be packed.
pub(crate) fn weight(name: &str, shape: &[usize], format: BlockFormat) -> Weight {
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

/// The result of a graph on random rows, as bits, and the bytes of its weights that were packed.
struct PackedRun {
    bits: Vec<u32>,
    packed_bytes: usize,
}

/// Compiles and runs a graph.
fn computed(graph: &Graph, weights: &[Weight], columns: usize, config: CpuConfig) -> PackedRun {
    let backend = CpuBackend::new(config).unwrap();
    let mut source = MemoryWeights::new();
    weights.iter().for_each(|w| source.insert(w.clone()));
    let layout = RowLayout::default();
    let weights = backend
        .load_weights(Arc::new(source), Default::default())
        .unwrap();
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
    backend
        .run(&mut program, &mut rows, &inputs, &mut outputs)
        .unwrap();
    let values = outputs.values.iter().flatten();
    PackedRun {
        bits: values.map(|v| v.to_bits()).collect(),
        packed_bytes: weights.packed_bytes(),
    }
}

/// With weights as stored, and with packed ones.
fn both(
    (graph, weights, columns): (&Graph, &[Weight], usize),
    isa: Isa,
    activations: ActivationChoice,
) -> [PackedRun; 2] {
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

/// The same bits, packed or not.
fn same(graph: &Graph, weights: &[Weight], columns: usize, what: &str) {
    for isa in Isa::all_available() {
        let activations = ActivationChoice::Always(ActivationKind::Int8);
        let [stored, packed] = both((graph, weights, columns), isa, activations);
        assert_eq!(stored.packed_bytes, 0, "{isa} {what}: `Never`");
        let is_packed = is_packed(isa, weights);
        assert_eq!(packed.packed_bytes > 0, is_packed, "{isa} {what}");
        let values = || stored.bits.iter().map(|bits| f32::from_bits(*bits));
        assert!(values().any(|v| v != 0.0), "{isa} {what}");
        assert!(values().all(f32::is_finite), "{isa} {what}");
        assert!(stored.bits == packed.bits, "{isa} {what}");
    }
}

/// True if some weights of this test are packed: where there are kernels for it, matrices whose
/// rows come in sixteens, and large ones everywhere (copied to huge pages).
fn is_packed(isa: Isa, weights: &[Weight]) -> bool {
    let has_kernels = isa.is_avx512();
    let is_large = |w: &Weight| cfg!(target_os = "linux") && w.bytes().len() >= 8 << 20;
    weights.iter().any(|w| {
        let n_out = w.shape()[w.shape().len() - 2];
        // Rows of a matrix after the last sixteen stay stored.
        let has_some = n_out.is_multiple_of(16) || (w.shape().len() == 2 && n_out > 16);
        let is_whole = w.format().block_len() > 1 || w.n_columns().is_multiple_of(64);
        // Formats after this one are read as stored.
        let has_layout = w.format() <= BlockFormat::MXFP4;
        is_large(w) || (has_kernels && has_some && is_whole && has_layout)
    })
}

fn builder(n_tokens: usize, columns: usize) -> (GraphBuilder, kv_graph::NodeId) {
    let n_outputs = n_tokens;
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs,
    });
    let x = b.input(Input::Embeddings { dim: columns }).unwrap();
    (b, x)
}

/// Every format, rows that are no whole panel and no whole group, columns of one block and of
/// several panels.
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

/// F16 with eleven significant bits is not packed, and so are matrices that have one value too long
/// or too small, wherever it stands.
#[test]
fn floats_with_one_value_that_cannot_be_packed() {
    let (n_rows, columns) = (9 << 10, 1024);
    let (mut b, x) = builder(1, columns);
    let y = b.linear("y", x, "w", n_rows).unwrap();
    let graph = b.finish(&[y]).unwrap();
    let stored_bytes = 2 * n_rows * columns;
    // An eleventh bit; a subnormal number.
    for (format, odd) in [(BlockFormat::F16, 0x3801), (BlockFormat::BF16, 1_u16)] {
        for odd_row in [None, Some(n_rows / 2), Some(n_rows - 1), Some(0)] {
            let mut bytes = weight("w", &[n_rows, columns], format).bytes().to_vec();
            if let Some(row) = odd_row {
                let at = 2 * (row * columns + 5);
                bytes[at..at + 2].copy_from_slice(&odd.to_le_bytes());
            }
            let w = Weight::new("w", vec![n_rows, columns], format, bytes.into()).unwrap();
            for isa in Isa::all_available() {
                let of = (&graph, std::slice::from_ref(&w), columns);
                let [stored, packed] = both(of, isa, ActivationChoice::Auto);
                let what = format!("{format} {isa}: row {odd_row:?}");
                assert!(stored.bits == packed.bits, "{what}");
                // Thirteen bits a value, and a scale for each row.
                let wanted = match (isa.is_avx512(), odd_row) {
                    (true, None) => stored_bytes / 16 * 13 + 4 * n_rows,
                    _ if cfg!(target_os = "linux") => stored_bytes,
                    _ => 0,
                };
                assert_eq!(packed.packed_bytes, wanted, "{what}");
            }
        }
    }
}

/// Parts of a matrix that begin at a group of interleaved rows, and inside of one.
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

/// A matrix whose rows are embeddings, too: both read packed rows.
#[test]
fn rows_of_matrices() {
    // Of 38 rows six stay stored, two of them among the embeddings.
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
        sum: RouteSum::One,
        ..RouteSpec::plain(2, RouteGate::Softmax)
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
                .expert_linear("y", [x, routes], Affine::new("w"), n_out)
                .unwrap();
            let graph = b.finish(&[y]).unwrap();
            let router = weight("router", &[5, 256], BlockFormat::Q8_0);
            let w = weight("w", &[5, n_out, 256], format);
            let what = format!("{format}: {n_tokens} tokens, {n_out} outputs of each expert");
            same(&graph, &[router, w], 256, &what);
        }
    }
}

/// Two programs share the matrices that both multiply with, and each has some of its own. Each
/// matrix is packed once, and reported once.
#[test]
fn programs_share_packed_matrices() {
    let backend = CpuBackend::new(CpuConfig {
        isa: Isa::all_available().last().copied(),
        ..CpuConfig::default()
    });
    let backend = backend.unwrap();
    let mut source = MemoryWeights::new();
    for name in ["a", "b", "c"] {
        source.insert(weight(name, &[9 << 10, 1024], BlockFormat::Q8_0));
    }
    let reports = Arc::<Mutex<Vec<LoadProgress>>>::default();
    let observed = Arc::clone(&reports);
    let on_progress = OnProgress::new(move |progress| observed.lock().unwrap().push(progress));
    let weights = backend.load_weights(Arc::new(source), on_progress).unwrap();
    let layout = RowLayout::default();
    let mut packed_bytes = vec![];
    for names in [["a", "b"], ["b", "c"], ["a", "c"]] {
        let (mut b, x) = builder(1, 1024);
        let outputs = names.map(|name| b.linear(name, x, name, 9 << 10).unwrap());
        let graph = b.finish(&outputs).unwrap();
        backend.compile(&graph, &weights, &layout).unwrap();
        packed_bytes.push(weights.packed_bytes());
    }
    let n = if is_packed(
        Isa::detect(),
        &[weight("a", &[9 << 10, 1024], BlockFormat::Q8_0)],
    ) {
        (9 << 10) * 1024 / 32 * 34
    } else {
        0
    };
    assert_eq!(packed_bytes, [2 * n, 3 * n, 3 * n]);
    let n = n as u64;
    let report = |done, total| LoadProgress { done, total };
    let expected = match n {
        0 => vec![],
        _ => vec![report(n, 2 * n), report(2 * n, 2 * n), report(n, n)],
    };
    assert_eq!(*reports.lock().unwrap(), expected);
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
    let weights = scalar
        .load_weights(Arc::new(source), Default::default())
        .unwrap();
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
