//! A GGUF file in each block format: what is read computes the same on both backends, and the same
//! bits however a prompt is split. A directory of 8-bit floats computes what its values do.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::path::Path;

use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_block::BlockFormat;
use kv_contract::block_weight;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_cpu::activations::ActivationKind;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig};
use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};
use kv_graph::weights::{SharedBytes, Weight};
use kv_rows::KvType;
use model_core::architecture::Registry;
use model_core::gguf::GgufWriter;
use model_core::model_file::OpenModel;
use model_tests::{Recipe, candle, distance};
use safetensors::tensor::{Dtype, TensorView};

const WIDTH: usize = 256;
const N_VOCAB: usize = 64;

/// A llama of two layers, all of whose matrices have this format.
fn write(path: &Path, format: BlockFormat) {
    let mut writer = GgufWriter::new();
    writer
        .set("general.architecture", "llama")
        .set("llama.block_count", 2u32)
        .set("llama.context_length", 64u32)
        .set("llama.embedding_length", WIDTH as u32)
        .set("llama.feed_forward_length", WIDTH as u32)
        .set("llama.attention.head_count", 4u32)
        .set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
    let norm = |name: &str| Weight::from_f32(name, vec![WIDTH], &[1.0; WIDTH]).unwrap();
    let mut weights = vec![
        block_weight("token_embd.weight", &[N_VOCAB, WIDTH], format),
        norm("output_norm.weight"),
    ];
    for layer in 0..2 {
        let name = |tensor: &str| format!("blk.{layer}.{tensor}.weight");
        weights.extend(["attn_norm", "ffn_norm"].map(|n| norm(&name(n))));
        let attention = ["attn_q", "attn_k", "attn_v", "attn_output"];
        let matrices = attention
            .into_iter()
            .chain(["ffn_gate", "ffn_up", "ffn_down"]);
        weights.extend(matrices.map(|m| block_weight(&name(m), &[WIDTH, WIDTH], format)));
    }
    for weight in weights {
        writer.add(weight).unwrap();
    }
    std::fs::write(path, writer.to_bytes().unwrap()).unwrap();
}

/// The logits of all tokens, computed in pieces of these lengths.
fn logits<B: Backend>(backend: B, open: &OpenModel, lengths: &[u32]) -> Vec<f32> {
    let config = EngineConfig {
        n_ctx: Some(64),
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    let (model, weights) = (open.model().clone(), open.weights());
    let mut engine = Engine::new(backend, model, weights, &config).unwrap();
    let (mut all, mut start) = (Vec::new(), 0);
    for n in lengths {
        let mut batch = Batch::new();
        for i in start..start + n {
            let id = TokenId((i * i + 7 * i) % N_VOCAB as u32);
            batch.push_token(id).in_sequence(SeqId(0)).with_output();
        }
        start += n;
        all.extend_from_slice(engine.decode(&batch).unwrap().values());
    }
    all
}

fn on_cpu(activations: ActivationKind) -> CpuBackend {
    CpuBackend::new(CpuConfig {
        activations: ActivationChoice::Always(activations),
        ..CpuConfig::default()
    })
    .unwrap()
}

/// A file of each format, opened.
fn files() -> impl Iterator<Item = (BlockFormat, OpenModel)> {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let folder = tempfile::tempdir().unwrap();
    BlockFormat::ALL.into_iter().map(move |format| {
        let path = folder.path().join(format.name());
        write(&path, format);
        (format, OpenModel::open(&path, &registry).unwrap())
    })
}

#[test]
fn files_of_every_format_compute_the_same_everywhere_however_split() {
    for (format, open) in files() {
        let stored = open.weights().describe("blk.1.ffn_up.weight").unwrap();
        assert_eq!(stored.format, format);
        let wanted = logits(candle(), &open, &[23]);
        let exact = logits(on_cpu(ActivationKind::F32), &open, &[23]);
        let largest = wanted.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        assert!(largest > 0.0 && largest.is_finite(), "{format}: {largest}");
        let off = distance(&exact, &wanted);
        assert!(off < 1e-4 * largest, "{format}: off by {off} of {largest}");
        let int8 = || on_cpu(ActivationKind::Int8);
        let together = logits(int8(), &open, &[23]);
        let split = logits(int8(), &open, &[1, 1, 7, 13, 1]);
        assert!(together == split, "{format}: other bits where it is split");
        let off = distance(&together, &wanted);
        assert!(off < 0.1 * largest, "{format}, int8: off by {off}");
    }
}

/// A prompt for tensor cores, then one token and a few, with floats and as fast as possible.
#[test]
fn files_of_every_format_compute_the_same_on_a_gpu() {
    for (format, open) in files() {
        let wanted = logits(on_cpu(ActivationKind::F32), &open, &[14]);
        let largest = wanted.iter().fold(0.0f32, |most, x| most.max(x.abs()));
        for (precision, tolerance) in [(Precision::Precise, 1e-4), (Precision::Fast, 0.1)] {
            let device = Sim::new(Order::Forward);
            let gpu = GpuBackend::new(device, GpuConfig { precision });
            let off = distance(&logits(gpu, &open, &[10, 1, 3]), &wanted);
            assert!(
                off < tolerance * largest,
                "{format}, {precision:?}: off by {off} of {largest}"
            );
        }
    }
}

/// A byte for each value, and the scale of each 128 rows and columns, with which the largest
/// becomes 448.
struct Fp8Matrix {
    floats: Vec<u8>,
    scales: Vec<f32>,
    scale_shape: [usize; 2],
    values: Vec<f32>,
}

/// The float of 4 bits of exponent and 3 of mantissa below a magnitude of at most 448, and its
/// value.
fn e4m3(value: f32) -> (u8, f32) {
    let exponent = value.abs().log2().floor().clamp(-6.0, 8.0);
    let steps = (value.abs() / exponent.exp2() * 8.0).floor().min(15.0);
    let byte = if steps >= 8.0 {
        ((exponent as i32 + 7) << 3) as u8 | (steps as u8 - 8)
    } else {
        steps as u8
    };
    let sign = u8::from(value.is_sign_negative()) << 7;
    (byte | sign, (steps / 8.0 * exponent.exp2()).copysign(value))
}

fn in_fp8(values: &[f32], n_columns: usize) -> Fp8Matrix {
    let n_rows = values.len() / n_columns;
    let scale_shape = [n_rows.div_ceil(128), n_columns.div_ceil(128)];
    let place = |i: usize| i / n_columns / 128 * scale_shape[1] + i % n_columns / 128;
    let mut scales = vec![0f32; scale_shape[0] * scale_shape[1]];
    for (i, value) in values.iter().enumerate() {
        scales[place(i)] = scales[place(i)].max(value.abs() / 448.0);
    }
    let both = |(i, value): (usize, &f32)| {
        let (byte, float) = e4m3(value / scales[place(i)]);
        (byte, float * scales[place(i)])
    };
    let (floats, values) = values.iter().enumerate().map(both).unzip();
    Fp8Matrix {
        floats,
        scales,
        scale_shape,
        values,
    }
}

/// A directory whose matrices are 8-bit floats computes what one with the same values does.
#[test]
fn directories_of_8_bit_floats_compute_what_their_values_do() {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    let recipe = Recipe::named("mistral_swa8");
    let folder = tempfile::tempdir().unwrap();
    let [plain, fp8] = ["plain", "fp8"].map(|name| folder.path().join(name));
    for path in [&plain, &fp8] {
        recipe.expand(path);
    }
    let weights = recipe.weights();
    let (mut rounded, mut stored) = (Vec::new(), Vec::new());
    for name in weights.names() {
        let weight = weights.require(&name).unwrap();
        let (shape, values) = (weight.shape().to_vec(), weight.to_f32());
        let bytes = |values: &[f32]| SharedBytes::from_f32(values).to_vec();
        let Some(module) = name.strip_suffix("_proj.weight") else {
            let entry = (name, Dtype::F32, shape, bytes(&values));
            rounded.push(entry.clone());
            stored.push(entry);
            continue;
        };
        let matrix = in_fp8(&values, shape[1]);
        rounded.push((
            name.clone(),
            Dtype::F32,
            shape.clone(),
            bytes(&matrix.values),
        ));
        let scales = format!("{module}_proj.weight_scale_inv");
        let scale_shape = matrix.scale_shape.to_vec();
        stored.push((scales, Dtype::F32, scale_shape, bytes(&matrix.scales)));
        stored.push((name, Dtype::F8_E4M3, shape, matrix.floats));
    }
    for (path, tensors) in [(&plain, &rounded), (&fp8, &stored)] {
        let views = tensors.iter().map(|(name, dtype, shape, bytes)| {
            let view = TensorView::new(*dtype, shape.clone(), bytes).unwrap();
            (name.as_str(), view)
        });
        let bytes = safetensors::serialize(views, None).unwrap();
        std::fs::write(path.join("model.safetensors"), bytes).unwrap();
    }
    let config = std::fs::read_to_string(fp8.join("config.json")).unwrap();
    let quantization = r#"{"quantization_config": {"quant_method": "fp8"}, "#;
    let config = config.replacen('{', quantization, 1);
    std::fs::write(fp8.join("config.json"), config).unwrap();
    let [wanted, got] = [&plain, &fp8].map(|path| {
        let open = OpenModel::open(path, &registry).unwrap();
        logits(on_cpu(ActivationKind::F32), &open, &[23])
    });
    let original = {
        recipe.expand(&plain);
        let open = OpenModel::open(&plain, &registry).unwrap();
        logits(on_cpu(ActivationKind::F32), &open, &[23])
    };
    let off = distance(&got, &wanted);
    assert!(off < 1e-5, "off by {off}");
    let lost = distance(&got, &original);
    assert!(lost > 1e-3, "8 bits lose something, not {lost}");
}
