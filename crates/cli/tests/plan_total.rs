//! The total of `cellar plan` is what a process takes whose context is full.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::support::json;
use half::f16;
use kv_core::block::BlockFormat;
use kv_core::weights::Weight;
use model_core::gguf::GgufWriter;

const N_VOCAB: usize = 65_536;
const N_EMBD: usize = 512;
const N_FF: usize = 1024;
const N_LAYERS: usize = 2;

/// A llama with a large vocabulary, most of whose bytes no prompt multiplies with.
fn write_model(path: &Path) {
    let mut writer = GgufWriter::new();
    writer
        .set("general.architecture", "llama")
        .set("llama.block_count", N_LAYERS as u32)
        .set("llama.context_length", 8192u32)
        .set("llama.embedding_length", N_EMBD as u32)
        .set("llama.feed_forward_length", N_FF as u32)
        .set("llama.attention.head_count", 8u32)
        .set("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
    let mut add = |name: &str, shape: &[usize], format: BlockFormat| {
        let n: usize = shape.iter().product();
        let value = |i: usize| ((i % 251) as f32 - 125.0) / 4000.0;
        let bytes: Vec<u8> = match format {
            BlockFormat::F32 => (0..n).flat_map(|_| 1f32.to_le_bytes()).collect(),
            _ => (0..n)
                .flat_map(|i| f16::from_f32(value(i)).to_le_bytes())
                .collect(),
        };
        let weight = Weight::new(name, shape.to_vec(), format, bytes.into()).unwrap();
        writer.add(weight).unwrap();
    };
    add("token_embd.weight", &[N_VOCAB, N_EMBD], BlockFormat::F16);
    add("output_norm.weight", &[N_EMBD], BlockFormat::F32);
    for layer in 0..N_LAYERS {
        let name = |tensor: &str| format!("blk.{layer}.{tensor}.weight");
        for norm in ["attn_norm", "ffn_norm"] {
            add(&name(norm), &[N_EMBD], BlockFormat::F32);
        }
        for matrix in ["attn_q", "attn_k", "attn_v", "attn_output"] {
            add(&name(matrix), &[N_EMBD, N_EMBD], BlockFormat::F16);
        }
        for matrix in ["ffn_gate", "ffn_up"] {
            add(&name(matrix), &[N_FF, N_EMBD], BlockFormat::F16);
        }
        add(&name("ffn_down"), &[N_EMBD, N_FF], BlockFormat::F16);
    }
    fs::write(path, writer.to_bytes().unwrap()).unwrap();
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

#[test]
fn the_total_is_what_a_process_takes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    write_model(&path);
    let path = path.to_str().unwrap();
    let flags = ["-c", "2048", "--kv-type", "f32", "--threads", "2"];
    for more in [&[][..], &["--repack", "never"], &["--kv-type-k", "q8_0"]] {
        let flags = [&flags[..], more].concat();
        let planned = json(&[&["plan", path, "--json"], &flags[..]].concat());
        let wanted = planned["total"].as_u64().unwrap();
        let child = Command::new(assert_cmd::cargo::cargo_bin!("cellar"))
            .args(["bench", "-m", path, "-p", "2048", "-n", "8", "-r", "1"])
            .args(&flags)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let got = peak(child);
        let off = got as f64 / wanted as f64 - 1.0;
        println!("{more:?}: {got} bytes, off by {:.2} %", 100.0 * off);
        assert!(
            off.abs() < 0.03,
            "{more:?}: {got} instead of {wanted}, {planned}"
        );
    }
}
