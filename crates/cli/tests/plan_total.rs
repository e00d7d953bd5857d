//! The total of `cellar plan` is what a process takes whose context is full.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::json;
use half::f16;
use kv_block::BlockFormat;
use kv_graph::weights::Weight;
use model_core::gguf::{Array, GgufWriter, Value};
use serde_json::Value as Json;

const N_VOCAB: usize = 32_768;
const N_EMBD: usize = 1024;
const N_FF: usize = 2048;
const N_LAYERS: usize = 2;

/// How far a total may be off.
const TOLERANCE: f64 = 0.03;

/// How far it may always be off, in bytes: how many pages of its own code a process has depends on
/// what the system reads ahead.
const CODE_PAGES: f64 = (4 << 20) as f64;

/// Which matrix the logits are computed with.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Output {
    /// That of the embeddings.
    Tied,
    /// One of its own.
    Untied,
}

/// Where the models are.
struct Models {
    folder: tempfile::TempDir,
}

impl Models {
    /// A llama with a large vocabulary, most of whose bytes no prompt multiplies with.
    fn write(&self, format: BlockFormat, output: Output) -> PathBuf {
        let mut writer = GgufWriter::new();
        writer
            .set("general.architecture", "llama")
            .set("llama.block_count", N_LAYERS as u32)
            .set("llama.context_length", 8192u32)
            .set("llama.embedding_length", N_EMBD as u32)
            .set("llama.feed_forward_length", N_FF as u32)
            .set("llama.attention.head_count", 8u32)
            .set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
        set_tokenizer(&mut writer);
        let mut add = |name: &str, shape: &[usize], format: BlockFormat| {
            let bytes = values(shape, format);
            let weight = Weight::new(name, shape.to_vec(), format, bytes.into()).unwrap();
            writer.add(weight).unwrap();
        };
        add("token_embd.weight", &[N_VOCAB, N_EMBD], format);
        if output == Output::Untied {
            add("output.weight", &[N_VOCAB, N_EMBD], format);
        }
        add("output_norm.weight", &[N_EMBD], BlockFormat::F32);
        for layer in 0..N_LAYERS {
            let name = |tensor: &str| format!("blk.{layer}.{tensor}.weight");
            for norm in ["attn_norm", "ffn_norm"] {
                add(&name(norm), &[N_EMBD], BlockFormat::F32);
            }
            for matrix in ["attn_q", "attn_k", "attn_v", "attn_output"] {
                add(&name(matrix), &[N_EMBD, N_EMBD], format);
            }
            for matrix in ["ffn_gate", "ffn_up"] {
                add(&name(matrix), &[N_FF, N_EMBD], format);
            }
            add(&name("ffn_down"), &[N_EMBD, N_FF], format);
        }
        let name = format!("{format}-{}.gguf", output == Output::Tied);
        let path = self.folder.path().join(name);
        fs::write(&path, writer.to_bytes().unwrap()).unwrap();
        path
    }
}

/// Bytes of a weight.
fn values(shape: &[usize], format: BlockFormat) -> Vec<u8> {
    let n: usize = shape.iter().product();
    match format {
        BlockFormat::F32 => (0..n).flat_map(|_| 1f32.to_le_bytes()).collect(),
        BlockFormat::F16 => {
            let value = |i: usize| f16::from_f32(((i % 251) as f32 - 125.0) / 4000.0);
            let some: Vec<u8> = (0..251).flat_map(|i| value(i).to_le_bytes()).collect();
            let mut bytes = some.repeat(n.div_ceil(251));
            bytes.truncate(2 * n);
            bytes
        }
        // Scales and quants of zero.
        _ => vec![0; n / format.block_len() * format.block_bytes()],
    }
}

/// A tokenizer whose tokens are bytes, and words that no text has.
fn set_tokenizer(writer: &mut GgufWriter) {
    let special = ["<unk>", "<s>", "</s>"].map(str::to_owned);
    let bytes = (0..256).map(|byte| format!("<0x{byte:02X}>"));
    let words = (0..).map(|n| format!("{n}-{n}"));
    let tokens: Vec<String> = special
        .into_iter()
        .chain(bytes)
        .chain(words)
        .take(N_VOCAB)
        .collect();
    let kinds = [vec![2, 3, 3], vec![6; 256], vec![1; N_VOCAB - 259]].concat();
    writer
        .set("tokenizer.ggml.model", "llama")
        .set("tokenizer.ggml.tokens", Value::Array(Array::String(tokens)))
        .set(
            "tokenizer.ggml.scores",
            Value::Array(Array::F32(vec![0.0; N_VOCAB])),
        )
        .set("tokenizer.ggml.token_type", Value::Array(Array::I32(kinds)));
}

/// The largest memory that a process had, in bytes.
fn peak(mut child: Child) -> u64 {
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB"));
        peak = peak.max(kib.map_or(0, |kib| kib.parse::<u64>().unwrap() * 1024));
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(child.wait().unwrap().success());
    peak
}

/// The plan of a model, and what a process takes that computes it.
fn planned_and_taken(model: &Path, command: &[&str], flags: &[&str]) -> (Json, u64) {
    let model = model.to_str().unwrap();
    let sizes = [
        "-c",
        "256",
        "--ubatch",
        "128",
        "--kv-type",
        "f32",
        "-t",
        "2",
    ];
    let flags = [&sizes[..], flags].concat();
    let planned = json(&[&["plan", model, "--json"], &flags[..]].concat());
    let child = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
        .args(command)
        .args(["-m", model])
        .args(&flags)
        .env("CUDA_VISIBLE_DEVICES", "")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    (planned, peak(child))
}

#[track_caller]
fn check(wanted: u64, (planned, got): &(Json, u64)) {
    let off = *got as f64 - wanted as f64;
    println!("{got} bytes, off by {:.2} %", 100.0 * off / wanted as f64);
    let allowed = (TOLERANCE * wanted as f64).max(CODE_PAGES);
    assert!(off.abs() < allowed, "{got} instead of {wanted}, {planned}");
}

fn total(planned: &Json) -> u64 {
    planned["total"].as_u64().unwrap()
}

const BENCH: [&str; 7] = ["bench", "-p", "256", "-n", "4", "-r", "1"];

#[test]
fn the_total_is_what_a_process_takes() {
    let models = Models {
        folder: tempfile::tempdir().unwrap(),
    };
    let text = models.folder.path().join("text");
    fs::write(&text, "a-long-text,".repeat(20)).unwrap();
    // Few tokens are drawn: those of such a model are everywhere, like those of bench.
    let run = ["run", "--raw", "-n", "8", "-f", text.to_str().unwrap()];
    let tied = models.write(BlockFormat::F16, Output::Tied);
    for more in [&[][..], &["--repack", "never"], &["--kv-type-k", "q8_0"]] {
        let measured = planned_and_taken(&tied, &run, more);
        assert_eq!(measured.0["looked_up"], 0);
        check(total(&measured.0), &measured);
    }
    let quantised = models.write(BlockFormat::Q8_0, Output::Tied);
    let measured = planned_and_taken(&quantised, &run, &[]);
    check(total(&measured.0), &measured);

    // Of its embeddings, only the rows of tokens are read. How many of their pages come with them
    // is the system's choice and depends on how the file lies in its cache: at least those of the
    // tokens, at most all. The tokens of bench are everywhere, those of the text are few.
    let untied = models.write(BlockFormat::F16, Output::Untied);
    let n_looked_up = (N_VOCAB * N_EMBD * 2) as u64;
    for command in [&run[..], &BENCH] {
        let (planned, got) = planned_and_taken(&untied, command, &[]);
        assert_eq!(planned["looked_up"], n_looked_up);
        let least = total(&planned) as f64 * (1.0 - TOLERANCE);
        let most = (total(&planned) + n_looked_up) as f64 * (1.0 + TOLERANCE);
        println!("{got} bytes, between {least} and {most}");
        assert!((least..most).contains(&(got as f64)), "{got}: {planned}");
    }
}
