//! Directories that others quantized: logits are those of the values that the tools themselves
//! unpack (`fixtures/quantized/make.py`), matrices have the formats that hold these as they are,
//! and broken ones are refused by sentences.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use cellar_engine::{Engine, EngineConfig};
use kv_backend::Backend;
use kv_block::BlockFormat;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_cpu::activations::ActivationKind;
use kv_cpu::{ActivationChoice, CpuBackend, CpuConfig};
use kv_rows::KvType;
use model_core::architecture::Registry;
use model_core::gguf::GgufWriter;
use model_core::model_file::OpenModel;
use model_tests::quantized::{QuantizedDirectory, StoredTensor};
use model_tests::{Recipe, Reference, candle, distance, fixture};
use safetensors::tensor::Dtype;
use serde_json::json;

/// Largest difference of a logit.
const TOLERANCE: f32 = 2e-4;
/// The fixtures, and the format that their matrices take.
const FIXTURES: [(&str, BlockFormat); 14] = [
    ("awq", BlockFormat::Q5_0),
    ("bitnet", BlockFormat::Q2_0),
    ("bitnet_inverse", BlockFormat::F32),
    ("fp8", BlockFormat::F32),
    ("gptq_3bit", BlockFormat::Q4_0),
    ("gptq_4bit", BlockFormat::Q4_0),
    ("gptq_4bit_asym", BlockFormat::Q5_0),
    ("gptq_4bit_order", BlockFormat::F32),
    ("gptq_8bit", BlockFormat::Q8_0),
    ("int4_channel", BlockFormat::Q4_0),
    ("int4_group_asym", BlockFormat::Q5_0),
    ("int8", BlockFormat::Q8_0),
    ("mxfp4", BlockFormat::MXFP4),
    ("nvfp4", BlockFormat::F32),
];
const PACKED_QUERY: &str = "model.layers.0.self_attn.q_proj";

/// The model of a directory, or why there is none.
fn opened(directory: &QuantizedDirectory) -> Result<OpenModel, String> {
    let folder = tempfile::tempdir().unwrap();
    directory.write(folder.path());
    OpenModel::open(folder.path(), &registry()).map_err(|error| error.to_string())
}

/// A part of the queries' matrix.
fn named(part: &str) -> String {
    format!("{PACKED_QUERY}.{part}")
}

/// The same in a directory.
fn part<'a>(directory: &'a mut QuantizedDirectory, part: &str) -> &'a mut StoredTensor {
    directory.tensors.get_mut(&named(part)).unwrap()
}

fn registry() -> Registry {
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    registry
}

fn on_cpu(activations: ActivationKind) -> CpuBackend {
    CpuBackend::new(CpuConfig {
        activations: ActivationChoice::Always(activations),
        ..CpuConfig::default()
    })
    .unwrap()
}

fn reference_of(name: &str) -> Reference {
    Reference::open(
        &fixture("quantized")
            .join(name)
            .join("reference.safetensors"),
    )
}

/// The logits of the tokens that have some in the reference.
fn logits<B: Backend>(backend: B, open: &OpenModel, reference: &Reference) -> Vec<f32> {
    let config = EngineConfig {
        n_ctx: Some(64),
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    };
    let (model, weights) = (open.model().clone(), open.weights());
    let mut engine = Engine::new(backend, model, weights, &config).unwrap();
    let rows = reference.logits(0).positions;
    let mut batch = Batch::new();
    for (position, id) in reference.ids("ids_0").unwrap().into_iter().enumerate() {
        let token = batch.push_token(TokenId(id)).in_sequence(SeqId(0));
        if rows.contains(&position) {
            token.with_output();
        }
    }
    engine.decode(&batch).unwrap().values().to_vec()
}

#[test]
fn logits_are_those_of_the_values_that_the_tools_unpack() {
    for (name, format) in FIXTURES {
        let open = opened(&QuantizedDirectory::named(name)).unwrap();
        let query = open.weights().describe("blk.0.attn_q.weight").unwrap();
        assert_eq!(query.format, format, "{name}");
        let reference = reference_of(name);
        let wanted = reference.logits(0).values;
        let exact = logits(on_cpu(ActivationKind::F32), &open, &reference);
        let off = distance(&exact, &wanted);
        assert!(off < TOLERANCE, "{name}: off by {off}");
        let off = distance(&logits(candle(), &open, &reference), &wanted);
        assert!(off < TOLERANCE, "{name} on candle: off by {off}");
        // 8 bits of activations lose something, but not the meaning of a weight.
        let int8 = logits(on_cpu(ActivationKind::Int8), &open, &reference);
        let off = distance(&int8, &wanted);
        assert!(off < 1.5, "{name} with int8: off by {off}");
    }
}

#[test]
fn a_gguf_file_of_them_computes_the_same_bits() {
    for (name, _) in FIXTURES {
        let open = opened(&QuantizedDirectory::named(name)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut writer = GgufWriter::with_metadata(open.metadata().clone());
        let weights = open.weights();
        for tensor in weights.names() {
            writer.add(weights.require(&tensor).unwrap()).unwrap();
        }
        std::fs::write(&path, writer.to_bytes().unwrap()).unwrap();
        let file = OpenModel::open(&path, &registry()).unwrap();
        let reference = reference_of(name);
        let [ours, theirs] =
            [&open, &file].map(|model| logits(on_cpu(ActivationKind::Int8), model, &reference));
        assert!(ours == theirs, "{name}: other bits");
    }
}

/// Changes a directory.
type Edit = fn(&mut QuantizedDirectory);

/// A fixture, what is changed of it, and parts of the sentence that refuses it.
type BrokenFixture<'a> = (&'a str, Edit, &'a [&'a str]);

fn refused(edits: &[BrokenFixture<'_>]) {
    for (at, (name, edit, words)) in edits.iter().enumerate() {
        let mut directory = QuantizedDirectory::named(name);
        edit(&mut directory);
        let Err(error) = opened(&directory) else {
            panic!("edit {at} of {name} is not refused");
        };
        for word in *words {
            assert!(error.contains(word), "edit {at} of {name}: {error}");
        }
    }
}

#[test]
fn broken_matrices_of_gptq_and_awq_are_refused_by_sentences() {
    refused(&[
        (
            "gptq_4bit",
            |d| drop(d.tensors.remove(&named("scales"))),
            &["q_proj.scales'", "it is missing"],
        ),
        (
            "gptq_4bit",
            |d| drop(d.tensors.remove(&named("qzeros"))),
            &["q_proj.qzeros'", "it is missing"],
        ),
        (
            "gptq_4bit",
            |d| d.config["quantization_config"]["bits"] = json!(8),
            &["down_proj.qzeros'", "[4, 8]", "not 8 bits"],
        ),
        (
            "gptq_4bit",
            |d| drop(d.config.remove("quantization_config")),
            &["down_proj.qweight'", "no 'quantization_config'"],
        ),
        (
            "gptq_4bit",
            |d| d.config["quantization_config"]["bits"] = json!(77),
            &["weights in gptq 77-bit,"],
        ),
        (
            "gptq_4bit",
            |d| part(d, "qweight").shape = vec![16, 32],
            &["q_proj.scales'", "32 rows"],
        ),
        (
            "gptq_4bit",
            |d| part(d, "qweight").dtype = Dtype::F32,
            &["q_proj.qweight'", "F32", "I32"],
        ),
        (
            "gptq_4bit",
            |d| part(d, "scales").shape = vec![1, 128],
            &["q_proj.scales'", "[1, 128]", "64 rows"],
        ),
        (
            "gptq_4bit",
            |d| part(d, "scales").dtype = Dtype::I16,
            &["q_proj.scales'", "I16"],
        ),
        (
            "gptq_4bit",
            |d| part(d, "scales").bytes[1] = 0x7e,
            &["q_proj.scales'", "NaN", "group 0 of row 0"],
        ),
        (
            "gptq_4bit",
            |d| *part(d, "qweight") = StoredTensor::of_i32(&[0, 64], []),
            &["q_proj.qweight'", "[0, 64]"],
        ),
        (
            "gptq_4bit_order",
            |d| part(d, "g_idx").bytes[4] = 9,
            &["q_proj.g_idx'", "group 9 of column 1", "2 groups"],
        ),
        (
            "gptq_4bit_order",
            |d| part(d, "g_idx").bytes[3] = 0x80,
            &["q_proj.g_idx'", "group -21474836", "2 groups"],
        ),
        (
            "gptq_4bit_order",
            |d| *part(d, "g_idx") = StoredTensor::of_i32(&[3], [0; 3]),
            &["q_proj.g_idx'", "3 groups for 64 columns"],
        ),
        (
            "gptq_4bit",
            |d| {
                let bias = d.tensors.get_mut(&named("bias")).unwrap();
                bias.bytes[1] = 0x3c;
            },
            &["q_proj.bias'", "no such tensor"],
        ),
        (
            "awq",
            |d| part(d, "qzeros").shape = vec![8, 1],
            &["q_proj.qzeros'", "[8, 1]", "[1, 8]"],
        ),
        (
            "awq",
            |d| drop(d.tensors.remove(&named("qzeros"))),
            &["q_proj.qzeros'", "it is missing"],
        ),
    ]);
}

#[test]
fn broken_matrices_of_compressed_tensors_are_refused_by_sentences() {
    refused(&[
        (
            "int4_channel",
            |d| {
                let weight = StoredTensor::of_i32(&[1, 1], [7]);
                d.tensors.insert(named("weight"), weight);
            },
            &["q_proj.weight'", "and so is its packed form"],
        ),
        (
            "int4_channel",
            |d| drop(d.tensors.remove(&named("weight_shape"))),
            &["q_proj.weight_shape'", "it is missing"],
        ),
        (
            "int4_channel",
            |d| part(d, "weight_shape").bytes[8] = 17,
            &["q_proj.weight_shape'", "[64, 17]", "[64, 8]"],
        ),
        (
            "int4_group_asym",
            |d| part(d, "weight_zero_point").shape = vec![2, 8],
            &["q_proj.weight_zero_point'", "[2, 8]", "64 rows"],
        ),
        (
            "int8",
            |d| drop(d.tensors.remove(&named("weight_scale"))),
            &["q_proj.weight_scale'", "it is missing"],
        ),
        (
            "nvfp4",
            |d| drop(d.tensors.remove(&named("weight_global_scale"))),
            &["q_proj.weight_global_scale'", "it is missing"],
        ),
        (
            "nvfp4",
            |d| part(d, "weight_global_scale").bytes.fill(0),
            &["q_proj.weight_scale'", "group 0 of row 0"],
        ),
    ]);
}

#[test]
fn broken_matrices_of_bitnet_are_refused_by_sentences() {
    refused(&[
        (
            "bitnet",
            |d| drop(d.tensors.remove(&named("weight_scale"))),
            &["q_proj.weight_scale'", "it is missing"],
        ),
        (
            "bitnet",
            |d| {
                let scale = part(d, "weight_scale");
                (scale.shape, scale.bytes) = (vec![2], vec![0; 4]);
            },
            &["q_proj.weight_scale'", "2 scales"],
        ),
        (
            "bitnet_inverse",
            |d| part(d, "weight_scale").bytes.fill(0),
            &["q_proj.weight_scale'", "inf", "finite"],
        ),
        (
            "bitnet",
            |d| part(d, "weight").shape = vec![4, 4, 64],
            &["q_proj.weight'", "[4, 4, 64]", "U8"],
        ),
        (
            "bitnet",
            |d| part(d, "weight").shape = vec![32, 32],
            &["q_proj.weight", "[128, 32]", "[64, 64]"],
        ),
        (
            "bitnet",
            |d| drop(d.config.remove("quantization_config")),
            &["down_proj.weight'", "no 'quantization_config'"],
        ),
        (
            "bitnet",
            |d| d.config["quantization_config"]["quantization_mode"] = json!("online"),
            &["weights in bitnet online,"],
        ),
    ]);
}

/// Rows of 256 ternary numbers take the smallest format. A pair of bits that no tool writes is 2,
/// as transformers unpacks it.
#[test]
fn long_rows_of_bitnet_are_stored_in_two_bits() {
    let width = |recipe: Recipe, layer: usize| {
        let name = |part: &str| format!("model.layers.{layer}.mlp.{part}.weight");
        let recipe = recipe.reshaped(&name("gate_proj"), &[256, 64]);
        let recipe = recipe.reshaped(&name("up_proj"), &[256, 64]);
        let recipe = recipe.reshaped(&name("down_proj"), &[64, 256]);
        recipe.reshaped(&name("ffn_sub_norm"), &[256])
    };
    let recipe = (0..3).fold(Recipe::named("bitnet"), width);
    let recipe = recipe.with_config(|config| {
        config.insert("intermediate_size".to_owned(), json!(256));
        let settings = json!({"quant_method": "bitnet", "linear_class": "autobitlinear"});
        config.insert("quantization_config".to_owned(), settings);
    });
    let module = "model.layers.0.mlp.down_proj";
    let mut directory = QuantizedDirectory::without(&recipe, |name| name == module);
    let byte = |row: usize, column: usize| (row * 256 + column).wrapping_mul(2_654_435_761) >> 9;
    let bytes = (0..16 * 256).map(|i| byte(i / 256, i % 256) as u8);
    let packed = StoredTensor {
        dtype: Dtype::U8,
        shape: vec![16, 256],
        bytes: bytes.collect(),
    };
    let scale = StoredTensor {
        dtype: Dtype::F32,
        shape: Vec::new(),
        bytes: 0.375f32.to_le_bytes().to_vec(),
    };
    directory.tensors.insert(format!("{module}.weight"), packed);
    let name = format!("{module}.weight_scale");
    directory.tensors.insert(name, scale);
    let open = opened(&directory).unwrap();
    let down = open.weights().require("blk.0.ffn_down.weight").unwrap();
    assert_eq!(down.format(), BlockFormat::TQ2_0);
    let value = |i: usize| {
        let code = byte(i / 256 % 16, i % 256) >> (2 * (i / 256 / 16)) & 3;
        0.375 * (code as f32 - 1.0)
    };
    let wanted: Vec<f32> = (0..64 * 256).map(value).collect();
    assert!(down.to_f32() == wanted, "other values");
}

/// Experts of one layer may need formats of their own: together they take the widest.
#[test]
fn stacked_experts_take_a_format_that_holds_all() {
    let recipe = Recipe::named("qwen3_moe");
    let place = "model.layers.0.mlp.experts.";
    let is_packed = |module: &str| module.starts_with(place) && module.ends_with("up_proj");
    let mut directory = QuantizedDirectory::without(&recipe, is_packed);
    let settings = json!({"quant_method": "gptq", "bits": 4, "group_size": 32});
    let key = "quantization_config".to_owned();
    directory.config.insert(key, settings);
    let weights = recipe.weights();
    let packed = weights.names().into_iter();
    let packed = packed.filter(|name| name.strip_suffix(".weight").is_some_and(is_packed));
    let mut wanted = Vec::new();
    for (expert, name) in packed.enumerate() {
        let &[n_rows, n_columns] = weights.require(&name).unwrap().shape() else {
            panic!("{name} is no matrix");
        };
        assert!(n_columns.is_multiple_of(32) && name.contains(&format!(".{expert}.")));
        let n_words = n_columns / 8 * n_rows;
        let words =
            (0..n_words as u32).map(|i| i.wrapping_add(expert as u32).wrapping_mul(0x9E37_79B1));
        // Stored as one less: 8 for the first, 6 for the others.
        let (zero, stored) = if expert == 0 {
            (8, 0x7777_7777)
        } else {
            (6, 0x5555_5555)
        };
        let n_groups = n_columns / 32;
        // 0.5 in half precision.
        let scales = vec![[0, 0x38]; n_groups * n_rows];
        for row in 0..n_rows {
            for column in 0..n_columns {
                let word = words.clone().nth(column / 8 * n_rows + row).unwrap();
                wanted.push(0.5 * ((word >> (column % 8 * 4) & 15) as i32 - zero) as f32);
            }
        }
        let module = name.trim_end_matches(".weight");
        let parts = [
            (
                "qweight",
                StoredTensor::of_i32(&[n_columns / 8, n_rows], words.map(|w| w as i32)),
            ),
            (
                "qzeros",
                StoredTensor::of_i32(&[n_groups, n_rows / 8], vec![stored; n_groups * n_rows / 8]),
            ),
            (
                "scales",
                StoredTensor {
                    dtype: Dtype::F16,
                    shape: vec![n_groups, n_rows],
                    bytes: scales.concat(),
                },
            ),
        ];
        let parts = parts.map(|(part, tensor)| (format!("{module}.{part}"), tensor));
        directory.tensors.extend(parts);
    }
    let open = opened(&directory).unwrap();
    let experts = open.weights().require("blk.0.ffn_up_exps.weight").unwrap();
    assert_eq!(experts.format(), BlockFormat::Q5_0);
    assert!(experts.to_f32() == wanted, "other values");
}

/// A scale of the keys that another cache would have is left out; a tensor of that name is not.
#[test]
fn scales_of_a_cache_are_not_needed() {
    let mut directory = QuantizedDirectory::named("fp8");
    let name = "model.layers.0.self_attn.k_scale";
    let scale = StoredTensor {
        dtype: Dtype::F32,
        shape: vec![1],
        bytes: vec![0; 4],
    };
    directory.tensors.insert(name.to_owned(), scale.clone());
    assert!(opened(&directory).is_ok());
    let two = StoredTensor {
        shape: vec![2],
        bytes: vec![0; 8],
        ..scale
    };
    directory.tensors.insert(name.to_owned(), two);
    let error = opened(&directory).unwrap_err();
    assert!(
        error.contains(name) && error.contains("no such tensor"),
        "{error}"
    );
}

/// ModelOpt names the parts of NVFP4 otherwise, and multiplies where others divide.
#[test]
fn names_of_modelopt_mean_the_same_matrix() {
    let mut directory = QuantizedDirectory::named("nvfp4");
    let wanted = opened(&directory).unwrap();
    let settings = json!({"quant_method": "modelopt", "quant_algo": "NVFP4"});
    directory.config["quantization_config"] = settings;
    let renamed = std::mem::take(&mut directory.tensors).into_iter();
    let renamed = renamed.map(|(name, mut tensor)| {
        let name = name.replace("weight_packed", "weight");
        if name.ends_with("weight_global_scale") {
            let divisor = f32::from_le_bytes(*tensor.bytes.first_chunk().unwrap());
            tensor.bytes = (1.0 / divisor).to_le_bytes().to_vec();
            tensor.shape = Vec::new();
        }
        (
            name.replace("weight_global_scale", "weight_scale_2"),
            tensor,
        )
    });
    directory.tensors = renamed.collect();
    let open = opened(&directory).unwrap();
    for name in wanted.weights().names() {
        let values = [&wanted, &open].map(|model| model.weights().require(&name).unwrap().to_f32());
        let off = distance(&values[0], &values[1]);
        assert!(off < 1e-6, "{name}: off by {off}");
    }
}

/// The experts of gpt-oss as they were published: rows of gate and up take turns.
#[test]
fn blocks_of_gpt_oss_stay_what_they_are() {
    let recipe = Recipe::named("gpt_oss_swa8");
    let mut directory = QuantizedDirectory::without(&recipe, |_| false);
    let settings = json!({"quant_method": "mxfp4"});
    directory
        .config
        .insert("quantization_config".to_owned(), settings);
    let place = "model.layers.0.mlp.experts.";
    let byte = |at: usize| ((at * 2_654_435_761) >> 7) as u8;
    let value = |n_columns: usize, row: usize, column: usize| {
        let float = byte((row * n_columns + column) / 2) >> (column % 2 * 4) & 15;
        let magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0][usize::from(float & 7)];
        let exponent = byte((row * n_columns + column) / 32) % 4;
        let signed = if float < 8 { magnitude } else { -magnitude };
        signed * 2f32.powi(i32::from(exponent) - 2)
    };
    for (matrix, n_rows, n_blocks) in [("gate_up_proj", 64, 2), ("down_proj", 64, 1)] {
        directory
            .tensors
            .remove(&format!("{place}{matrix}"))
            .unwrap();
        let n = 4 * n_rows * n_blocks;
        for (part, shape, bytes) in [
            (
                "blocks",
                vec![4, n_rows, n_blocks, 16],
                (0..n * 16).map(byte).collect(),
            ),
            (
                "scales",
                vec![4, n_rows, n_blocks],
                (0..n).map(|at| 125 + byte(at) % 4).collect(),
            ),
        ] {
            let dtype = Dtype::U8;
            let stored = StoredTensor {
                dtype,
                shape,
                bytes,
            };
            directory
                .tensors
                .insert(format!("{place}{matrix}_{part}"), stored);
        }
    }
    let open = opened(&directory).unwrap();
    for (name, n_columns, first, step) in [
        ("blk.0.ffn_gate_exps.weight", 64, 0, 2),
        ("blk.0.ffn_up_exps.weight", 64, 1, 2),
        ("blk.0.ffn_down_exps.weight", 32, 0, 1),
    ] {
        let experts = open.weights().require(name).unwrap();
        assert_eq!(experts.format(), BlockFormat::MXFP4, "{name}");
        assert_eq!(experts.shape(), [4, 64 / step, n_columns], "{name}");
        let rows = (first..4 * 64).step_by(step);
        let wanted =
            rows.flat_map(|row| (0..n_columns).map(move |column| value(n_columns, row, column)));
        assert!(
            experts.to_f32() == wanted.collect::<Vec<_>>(),
            "{name}: other values"
        );
    }
    let broken = format!("{place}down_proj_scales");
    directory.tensors.get_mut(&broken).unwrap().shape = vec![4, 1, 64];
    let error = opened(&directory).unwrap_err();
    assert!(
        error.contains("down_proj_blocks'") && error.contains("[4, 1, 64]"),
        "{error}"
    );
}
