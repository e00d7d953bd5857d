//! `cellar imatrix` and `cellar convert --imatrix`: sums over a text are in the file, whichever way
//! it is evaluated; quantizing with them brings a model nearer to its original.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::Path;

use crate::support::{BACKENDS, cellar, directory, failure, model, output};
use kv_block::BlockFormat;
use kv_graph::weights::WeightSource;
use model_core::gguf::GgufFile;
use model_core::imatrix::{Importance, ImportanceMatrix};
use model_tests::fixture;

fn stories() -> String {
    fixture("stories/stories.txt").display().to_string()
}

/// The importance matrix of the small model on the stories, in a folder.
fn measured(dir: &Path, flags: &[&str]) -> (String, ImportanceMatrix, String) {
    let out = dir.join("imatrix.gguf").display().to_string();
    let (model, text) = (model().display().to_string(), stories());
    let args = ["imatrix", "-m", &model, "-f", &text, "-c", "64", "-o", &out];
    let (stdout, _) = output(&[&args[..], flags].concat());
    let matrix = ImportanceMatrix::open(&out).unwrap();
    (out, matrix, stdout)
}

fn assert_near(ours: &Importance, others: &Importance, tolerance: f32, what: &str) {
    assert_eq!(ours.counts, others.counts, "{what}");
    let largest = others.sums.iter().copied().fold(0.0, f32::max);
    for (a, b) in ours.sums.iter().zip(&others.sums) {
        assert!((a - b).abs() <= tolerance * largest, "{what}: {a}, not {b}");
    }
}

#[test]
fn the_file_has_the_sums_of_every_matrix_of_layers() {
    let dir = tempfile::tempdir().unwrap();
    let (path, matrix, stdout) = measured(dir.path(), &[]);
    let n = matrix.entries.len();
    assert_eq!(
        stdout,
        format!("{path}: {n} matrices, 6 chunks of 64 tokens\n")
    );
    assert_eq!((matrix.n_chunks, matrix.chunk_size), (6, Some(64)));
    assert_eq!(matrix.datasets, ["stories.txt"]);
    let file = GgufFile::open(model()).unwrap();
    let matrices = file
        .tensors()
        .iter()
        .filter(|tensor| tensor.name().starts_with("blk.") && tensor.shape().len() == 2);
    let names: Vec<&str> = matrices.map(|tensor| tensor.name()).collect();
    assert_eq!(names.len(), n);
    for name in names {
        let entry = &matrix.entries[name];
        let columns = *file.tensor(name).unwrap().shape().last().unwrap();
        assert_eq!(entry.sums.len(), columns, "{name}");
        assert_eq!(entry.counts, [6.0 * 64.0], "{name}");
        assert!(entry.sums.iter().any(|&sum| sum > 0.0), "{name}");
    }
    // Q, K and V multiply the same.
    let of = |name: &str| &matrix.entries[&format!("blk.0.{name}.weight")].sums;
    assert_eq!(of("attn_q"), of("attn_v"));
    assert_ne!(of("attn_q"), of("ffn_up"));
}

#[test]
fn sums_do_not_depend_on_how_a_chunk_is_evaluated() {
    let dir = tempfile::tempdir().unwrap();
    let (_, whole, _) = measured(dir.path(), &["--kv-type", "f32"]);
    for backend in BACKENDS {
        let flags = ["--kv-type", "f32", "--ubatch", "24", "--backend", backend];
        let (_, cut, _) = measured(dir.path(), &flags);
        assert!(cut.entries.keys().eq(whole.entries.keys()));
        for (name, entry) in &cut.entries {
            assert_near(entry, &whole.entries[name], 1e-3, name);
        }
    }
    let (_, first, stdout) = measured(dir.path(), &["--chunks", "2", "--process-output"]);
    assert!(stdout.contains("2 chunks of 64 tokens"), "{stdout}");
    let extra: Vec<&String> = first
        .entries
        .keys()
        .filter(|name| !whole.entries.contains_key(*name))
        .collect();
    assert!(matches!(extra[..], [name] if !name.starts_with("blk.")));
    assert!(first.entries.values().all(|entry| entry.counts == [128.0]));
}

/// Per-expert sums of a mixture; what is converted with them is by expert, too.
#[test]
fn experts_are_measured_one_by_one() {
    let from = directory("mixtral");
    let dir = tempfile::tempdir().unwrap();
    let paths = ["i.gguf", "text", "q4_0.gguf"].map(|n| dir.path().join(n).display().to_string());
    let [imatrix, text, to] = &paths;
    std::fs::write(text, "Once upon a time, there was a girl. ".repeat(20)).unwrap();
    let from = from.path().display().to_string();
    let args = [
        "imatrix", "-m", &from, "-f", text, "-c", "32", "-o", imatrix,
    ];
    output(&args);
    let matrix = ImportanceMatrix::open(imatrix).unwrap();
    let name = "blk.0.ffn_up_exps.weight";
    let entry = &matrix.entries[name];
    assert!(entry.counts.len() > 1, "{:?}", entry.counts);
    // Every token goes to two experts.
    let n_tokens = matrix.entries["blk.0.attn_q.weight"].counts[0];
    assert_eq!(entry.counts.iter().sum::<f32>(), 2.0 * n_tokens);
    let args = ["convert", &from, to, "--type", "q4_0", "--imatrix", imatrix];
    output(&args);
    let stored = GgufFile::open(to).unwrap().require(name).unwrap();
    assert_eq!(stored.format(), BlockFormat::Q4_0);
}

/// On the text that was measured, matrices are off less; and the file says what it was made with.
#[test]
fn a_weighted_model_is_nearer_to_its_original() {
    let dir = tempfile::tempdir().unwrap();
    let (imatrix, matrix, _) = measured(dir.path(), &[]);
    let from = model().display().to_string();
    let original = GgufFile::open(model()).unwrap();
    for file_type in ["q4_0", "q4_1", "q5_0", "q5_1"] {
        let [plain, weighted] = ["plain", "weighted"].map(|name| {
            dir.path()
                .join(format!("{name}.gguf"))
                .display()
                .to_string()
        });
        output(&["convert", &from, &plain, "--force", "--type", file_type]);
        let flags = ["--force", "--type", file_type, "--imatrix", &imatrix];
        let (_, stderr) = output(&[&["convert", &from, &weighted], &flags[..]].concat());
        assert_eq!(stderr, "", "the output matrix is Q8_0");
        let [plain, weighted] = [plain, weighted].map(|path| GgufFile::open(path).unwrap());
        let error = |file: &GgufFile, name: &str| -> f64 {
            let [a, b] = [file, &original].map(|f| f.require(name).unwrap().to_f32());
            let importance = matrix.entries[name].sums.iter().cycle();
            let each = a.iter().zip(&b).zip(importance);
            each.map(|((a, b), w)| f64::from(w * (a - b) * (a - b)))
                .sum()
        };
        let names = matrix.entries.keys();
        let better = names
            .clone()
            .filter(|n| error(&weighted, n) < error(&plain, n));
        assert_eq!(better.count(), names.len(), "{file_type}");
        let metadata = weighted.metadata();
        let key = |name: &str| format!("quantize.imatrix.{name}");
        assert_eq!(metadata.get(&key("file")), Ok("imatrix.gguf"));
        assert_eq!(metadata.get(&key("dataset")), Ok("stories.txt"));
        assert_eq!(metadata.get(&key("chunks_count")), Ok(6u32));
        let n_entries = matrix.entries.len() as u32;
        assert_eq!(metadata.get(&key("entries_count")), Ok(n_entries));
        assert!(!plain.metadata().contains(&key("file")));
    }
}

/// A tensor without an entry is quantized as without --imatrix, and counted in one line.
#[test]
fn tensors_without_an_entry_are_counted() {
    let dir = tempfile::tempdir().unwrap();
    let (path, mut matrix, _) = measured(dir.path(), &["--chunks", "1"]);
    let all = matrix.entries.len();
    for name in ["blk.0.attn_q.weight", "blk.1.ffn_up.weight"] {
        matrix.entries.remove(name).unwrap();
    }
    let from = model().display().to_string();
    let [plain, weighted] = ["a", "b"].map(|n| dir.path().join(n).display().to_string());
    output(&["convert", &from, &plain, "--type", "q4_0"]);
    let args = [
        "convert",
        &from,
        &weighted,
        "--type",
        "q4_0",
        "--imatrix",
        "-",
    ];
    let bytes = matrix.to_bytes().unwrap();
    let done = cellar().args(args).write_stdin(bytes).assert().success();
    let stderr = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    let wanted = format!(
        "warning: 2 of {all} quantized tensors have no entry in '-' and are quantized without \
         weights, the first 'blk.0.attn_q.weight'\n"
    );
    assert_eq!(stderr, wanted, "{path}");
    let [plain, weighted] = [plain, weighted].map(|path| GgufFile::open(path).unwrap());
    let is_same = |name: &str| {
        let [a, b] = [&plain, &weighted].map(|file| file.require(name).unwrap());
        **a.bytes() == **b.bytes()
    };
    assert!(is_same("blk.0.attn_q.weight") && is_same("blk.1.ffn_up.weight"));
    assert!(!is_same("blk.0.attn_k.weight"));
}

#[test]
fn types_that_take_no_weights_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let (imatrix, _, _) = measured(dir.path(), &["--chunks", "1"]);
    let from = model().display().to_string();
    let [plain, same] = ["a", "b"].map(|n| dir.path().join(n).display().to_string());
    output(&["convert", &from, &plain, "--type", "q8_0"]);
    let args = [
        "convert",
        &from,
        &same,
        "--type",
        "q8_0",
        "--imatrix",
        &imatrix,
    ];
    let (_, stderr) = output(&args);
    assert!(
        stderr.contains("the importance matrix changes nothing"),
        "{stderr}"
    );
    let [plain, same] = [plain, same].map(|path| GgufFile::open(path).unwrap());
    for tensor in plain.tensors() {
        let [a, b] = [&plain, &same].map(|f| f.require(tensor.name()).unwrap());
        assert!(**a.bytes() == **b.bytes(), "{}", tensor.name());
    }
}

/// What is refused leaves no file behind.
#[test]
fn what_cannot_be_is_refused_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let (imatrix, _, _) = measured(dir.path(), &["--chunks", "1"]);
    let (model, text) = (model().display().to_string(), stories());
    let out = dir.path().join("out").display().to_string();
    let refused = |args: &[&str], wanted: &str| {
        let (code, message) = failure(args);
        assert!(message.contains(wanted), "{message}");
        assert!(!Path::new(&out).exists(), "{args:?}");
        code
    };
    let measure = ["imatrix", "-m", &model, "-f", &text, "-o", &out];
    let code = refused(
        &[&measure[..], &["-c", "4096"]].concat(),
        "a chunk has 4096; choose",
    );
    assert_eq!(code, 1);
    let code = refused(
        &["imatrix", "-m", &model, "-o", &out],
        "no text: give one with -f",
    );
    assert_eq!(code, 2);
    let other = directory("mistral_swa8");
    let other = other.path().display().to_string();
    let convert = |from: &str, imatrix: &str, wanted: &str| {
        let args = [
            "convert",
            from,
            &out,
            "--type",
            "q4_0",
            "--imatrix",
            imatrix,
        ];
        refused(&args, wanted)
    };
    convert(&other, &imatrix, "imatrix.gguf' is of another model: ");
    convert(&model, &model, "no importance matrix: general.type is ");
    convert(&model, &text, "no importance matrix");
    convert(&model, "/absent/i.gguf", "cannot read '/absent/i.gguf'");
    // A pipe takes the file, too.
    let args = [
        "imatrix", "-m", &model, "-f", &text, "-c", "64", "--chunks", "1",
    ];
    let done = cellar().args(args).args(["-o", "-"]).assert().success();
    let bytes = &done.get_output().stdout;
    assert!(bytes.starts_with(b"GGUF"));
    assert_eq!(bytes, &std::fs::read(&imatrix).unwrap());
}
