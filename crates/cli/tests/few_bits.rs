//! `cellar convert` to types of three bits a value and fewer: the files run, and a type that needs
//! an importance matrix is refused without.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::Path;

use crate::support::{edited, failure, json, model, output};
use kv_block::BlockFormat;
use kv_graph::weights::{Weight, WeightSource};
use model_core::gguf::{GgufFile, GgufWriter};
use model_tests::fixture;

/// The width that the model's feed-forward network gets, so that rows are whole blocks of 256.
const WIDE: usize = 512;

/// The small model, widened by rows and columns of 0: it computes the same.
fn widened(dir: &Path) -> String {
    let file = GgufFile::open(model()).unwrap();
    let mut writer = GgufWriter::with_metadata(file.metadata().clone());
    writer.set("llama.feed_forward_length", WIDE as u32);
    for tensor in file.tensors() {
        let weight = file.weight(tensor.name()).unwrap();
        let is_wide = tensor.name().contains("ffn_") && tensor.shape().len() == 2;
        writer
            .add(if is_wide {
                widened_matrix(&weight)
            } else {
                weight
            })
            .unwrap();
    }
    let path = dir.join("wide.gguf");
    std::fs::write(&path, writer.to_bytes().unwrap()).unwrap();
    path.display().to_string()
}

fn widened_matrix(weight: &Weight) -> Weight {
    let &[rows, columns] = weight.shape() else {
        panic!("{:?} is no matrix", weight.shape());
    };
    let values = weight.to_f32();
    let (values, shape) = if weight.name().contains("ffn_down") {
        let row = |row: &[f32]| [row, &vec![0.0; WIDE - columns]].concat();
        let values = values.chunks(columns).flat_map(row).collect();
        (values, vec![rows, WIDE])
    } else {
        let zeros = vec![0.0; (WIDE - rows) * columns];
        ([values, zeros].concat(), vec![WIDE, columns])
    };
    Weight::from_f32(weight.name(), shape, &values).unwrap()
}

fn stories() -> String {
    fixture("stories/stories.txt").display().to_string()
}

fn perplexity(model: &str) -> f64 {
    let text = stories();
    let args = ["perplexity", "-m", model, "-f", &text, "-c", "64", "--json"];
    json(&args)["perplexity"].as_f64().unwrap()
}

/// Each type is written in its formats, its file continues a text, and its perplexity is near that
/// of the original.
#[test]
fn files_of_few_bits_run() {
    let dir = tempfile::tempdir().unwrap();
    let from = widened(dir.path());
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (imatrix, to) = (path("imatrix.gguf"), path("to.gguf"));
    let text = stories();
    output(&[
        "imatrix", "-m", &from, "-f", &text, "-c", "64", "-o", &imatrix,
    ]);
    let exact = perplexity(&from);
    assert!((exact - 1.9136).abs() < 0.01, "{exact}");
    for (file_type, format, most) in [
        ("iq4_xs", BlockFormat::IQ4_XS, 1.02),
        ("iq3_s", BlockFormat::IQ3_S, 1.03),
        ("iq3_xxs", BlockFormat::IQ3_XXS, 1.04),
        ("iq2_m", BlockFormat::IQ2_S, 1.08),
        ("iq2_xs", BlockFormat::IQ2_XS, 1.06),
        ("iq2_xxs", BlockFormat::IQ2_XXS, 1.08),
        ("iq1_m", BlockFormat::IQ1_M, 1.15),
        ("iq1_s", BlockFormat::IQ1_S, 1.25),
    ] {
        let flags = ["--force", "--type", file_type, "--imatrix", &imatrix];
        output(&[&["convert", &from, &to], &flags[..]].concat());
        let file = GgufFile::open(&to).unwrap();
        let last = file.require("blk.3.ffn_down.weight").unwrap();
        assert_eq!(last.format(), format, "{file_type}");
        let rounded = perplexity(&to) / exact;
        eprintln!("{file_type}: {rounded:.4}");
        assert!(rounded < most, "{file_type}: {rounded}");
        let run = ["run", "-m", &to, "Once upon", "--temp", "0", "-n", "8"];
        assert!(output(&run).0.len() > 8, "{file_type}");
    }
}

#[test]
fn types_that_need_an_importance_matrix_are_refused_without() {
    let dir = tempfile::tempdir().unwrap();
    let from = widened(dir.path());
    let to = dir.path().join("to.gguf");
    let out = to.display().to_string();
    for file_type in ["iq2_m", "iq2_xs", "iq2_xxs", "iq1_s"] {
        let (code, message) = failure(&["convert", &from, &out, "--type", file_type]);
        assert_eq!(code, 1, "{message}");
        let wanted = format!("files of {file_type} need an importance matrix");
        assert!(message.contains(&wanted), "{message}");
        assert!(
            message.contains("cellar imatrix") && message.contains("blk."),
            "{message}"
        );
        assert!(!to.exists());
    }
    // More bits do without; so does iq3_xxs, whose FFN down is larger then.
    for file_type in ["iq3_s", "iq3_xxs"] {
        output(&["convert", &from, &out, "--force", "--type", file_type]);
    }
    let file = GgufFile::open(&to).unwrap();
    let down = file.require("blk.3.ffn_down.weight").unwrap();
    assert_eq!(down.format(), BlockFormat::Q3_K);
}

/// Weights that no file of the type can hold are named, not clipped.
#[test]
fn values_beyond_a_format_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let [from, to] = ["from.gguf", "to.gguf"].map(|name| dir.path().join(name));
    let name = "blk.8.ffn_down_extra.weight";
    let mut values = vec![0.5; 2 * 256];
    values[300] = 1e17;
    let bytes = edited(|writer| {
        let weight = Weight::from_f32(name, vec![2, 256], &values);
        writer.add(weight.unwrap()).unwrap();
    });
    std::fs::write(&from, bytes).unwrap();
    let paths = [&from, &to].map(|path| path.display().to_string());
    for file_type in ["q4_k", "iq3_s", "q8_0", "f16"] {
        let (code, message) = failure(&["convert", &paths[0], &paths[1], "--type", file_type]);
        assert_eq!(code, 1, "{message}");
        assert!(
            message.contains(name) && message.contains("value 300 of 512 is 1e17"),
            "{message}"
        );
        assert!(!to.exists());
    }
    output(&["convert", &paths[0], &paths[1], "--type", "bf16"]);
}
