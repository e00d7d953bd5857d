//! `cellar embed`: what sentence-transformers computes, from a directory and from the GGUF file
//! made of it, with an encoder and with a decoder.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::{Path, PathBuf};

use crate::support::{BACKENDS, cellar, failure, model, output};
use cellar_engine::{Engine, EngineConfig};
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use kv_graph::weights::WeightSource;
use model_core::architecture::{OutputKind, Registry};
use model_core::gguf::GgufFile;
use model_core::hf::HfTranslation;
use model_core::model_file::OpenModel;
use model_core::sentence::{Pooling, normalise};
use model_tests::{Recipe, cpu, fixture};

fn data(name: &str) -> PathBuf {
    fixture("encoders").join(name)
}

fn bert() -> String {
    data("bert_tiny").display().to_string()
}

struct Reference(serde_json::Value);

impl Reference {
    fn read() -> Self {
        Self::of("bert_tiny")
    }

    fn of(name: &str) -> Self {
        let text = std::fs::read(data(&format!("{name}.reference.json"))).unwrap();
        Self(serde_json::from_slice(&text).unwrap())
    }

    fn texts(&self) -> Vec<String> {
        serde_json::from_value(self.0["texts"].clone()).unwrap()
    }

    fn vectors(&self, key: &str) -> Vec<Vec<f32>> {
        serde_json::from_value(self.0[key].clone()).unwrap()
    }

    fn long_text(&self) -> &str {
        self.0["long_text"].as_str().unwrap()
    }
}

fn embed(args: &[&str]) -> Vec<Vec<f32>> {
    let (stdout, stderr) = output(&[&["embed"], args].concat());
    assert_eq!(stderr, "");
    let vectors: Vec<Vec<f32>> = serde_json::from_str(&stdout).unwrap();
    // One vector a line.
    assert_eq!(stdout.lines().count(), vectors.len());
    vectors
}

#[track_caller]
fn assert_close(got: &[Vec<f32>], wanted: &[Vec<f32>]) {
    assert_eq!(got.len(), wanted.len());
    for (got, wanted) in got.iter().zip(wanted) {
        assert_eq!(got.len(), wanted.len());
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-6;
        assert!(got.iter().zip(wanted).all(near), "{got:?}, not {wanted:?}");
    }
}

#[test]
fn texts_become_the_vectors_of_the_reference() {
    let reference = Reference::read();
    let (model, texts) = (bert(), reference.texts());
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    for backend in BACKENDS {
        for (flags, key) in [
            (&[][..], "mean"),
            (&["--pooling", "cls"], "cls"),
            (&["--pooling", "last", "--batch", "10"], "last"),
        ] {
            let before = ["-m", &model, "--backend", backend];
            let args = [&before[..], flags, &["--"], &texts].concat();
            assert_close(&embed(&args), &reference.vectors(key));
        }
    }
    let raw = embed(&["-m", &model, "--no-normalize", texts[0]]);
    let wanted: Vec<f32> = serde_json::from_value(reference.0["mean_as_it_is_0"].clone()).unwrap();
    let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5;
    assert!(raw[0].iter().zip(&wanted).all(near));
}

/// Rows as they are, whose mean is the vector of before; the same of tokens in place of texts.
#[test]
fn without_pooling_a_text_has_a_row_for_every_token() {
    let reference = Reference::read();
    let (model, texts) = (bert(), reference.texts());
    let rows = |args: &[&str]| -> Vec<Vec<Vec<f32>>> {
        let before = ["embed", "-m", &model, "--pooling", "none"];
        serde_json::from_str(&output(&[&before[..], args].concat()).0).unwrap()
    };
    let ids: Vec<Vec<u32>> = serde_json::from_value(reference.0["ids"].clone()).unwrap();
    let of_texts = rows(&texts.iter().map(String::as_str).collect::<Vec<_>>());
    let ids_as_text = |ids: &Vec<u32>| {
        let ids: Vec<String> = ids.iter().map(u32::to_string).collect();
        ["--tokens".to_owned(), ids.join(", ")]
    };
    let flags: Vec<String> = ids.iter().flat_map(ids_as_text).collect();
    let of_tokens = rows(&flags.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(of_texts, of_tokens);
    let mean = |rows: &Vec<Vec<f32>>| {
        let mut mean = Pooling::Mean.pool(&rows.concat(), rows[0].len());
        normalise(&mut mean);
        mean
    };
    let lens: Vec<usize> = of_texts.iter().map(Vec::len).collect();
    assert_eq!(lens, ids.iter().map(Vec::len).collect::<Vec<_>>());
    let means: Vec<Vec<f32>> = of_texts.iter().map(mean).collect();
    assert_close(&means, &reference.vectors("mean"));
}

/// As Qwen3-Embedding is published: the last token's row, of a class of texts.
#[test]
fn texts_become_the_vectors_of_a_decoder() {
    let reference = Reference::of("qwen3_embed_tiny");
    let directory = data("qwen3_embed_tiny").display().to_string();
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join("qwen3.gguf").display().to_string();
    output(&["convert", &directory, &gguf, "--type", "f32"]);
    let texts = reference.texts();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    for model in [&directory, &gguf] {
        for backend in BACKENDS {
            for (flags, key) in [
                (&[][..], "last"),
                (&["--pooling", "mean", "--batch", "40"], "mean"),
            ] {
                let before = ["-m", model, "--backend", backend];
                let args = [&before[..], flags, &["--"], &texts].concat();
                assert_close(&embed(&args), &reference.vectors(key));
            }
        }
    }
}

#[test]
fn vectors_are_as_long_as_the_files_or_flags_say() {
    let reference = Reference::of("qwen3_embed_tiny");
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("qwen3");
    std::fs::create_dir_all(copy.join("1_Pooling")).unwrap();
    let original = data("qwen3_embed_tiny");
    for name in [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ] {
        std::fs::copy(original.join(name), copy.join(name)).unwrap();
    }
    let model = copy.display().to_string();
    let text = reference.texts().swap_remove(0);
    let raw: Vec<f32> = serde_json::from_value(reference.0["last_as_it_is_0"].clone()).unwrap();
    let unit = reference.vectors("last").swap_remove(0);
    let check = |flags: &[&str], wanted: &[f32]| {
        let got = embed(&[&["-m", &model], flags, &[&text]].concat());
        let near = |(a, b): (&f32, &f32)| (a - b).abs() <= 2e-5;
        assert!(got[0].iter().zip(wanted).all(near), "{flags:?}: {got:?}");
    };
    // Nothing says it.
    check(&[], &unit);
    check(&["--normalize", "none"], &raw);
    check(&["--no-normalize"], &raw);
    // The list of modules has no normalisation.
    let modules = r#"[{"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]"#;
    std::fs::write(copy.join("modules.json"), modules).unwrap();
    check(&[], &raw);
    check(&["--normalize", "unit"], &unit);
    let gguf = dir.path().join("qwen3.gguf").display().to_string();
    output(&["convert", &model, &gguf, "--type", "f32"]);
    let got = embed(&["-m", &gguf, &text]);
    assert_close(&got, &embed(&["-m", &model, &text]));
    let (code, said) = failure(&["embed", "-m", &model, "--normalize", "2", "x"]);
    assert_eq!(code, 2);
    assert!(said.contains("--normalize"), "{said}");
}

#[test]
fn the_longest_text_of_a_decoder_is_a_choice() {
    let model = data("qwen3_embed_tiny").display().to_string();
    let text = "the cat ".repeat(20);
    let (code, said) = failure(&["embed", "-m", &model, "--ctx", "9", &text]);
    assert_eq!(code, 1);
    assert!(
        said.contains("but the model takes 9; make it shorter"),
        "{said}"
    );
    let cut = embed(&["-m", &model, "--ctx", "9", "--truncate", &text]);
    assert_eq!(cut.len(), 1);
    let (code, said) = failure(&["embed", "-m", &model, &"zq ".repeat(60)]);
    assert_eq!(code, 1);
    assert!(said.contains("takes 96"), "{said}");
}

#[test]
fn lines_of_a_file_and_of_a_pipe_are_texts() {
    let reference = Reference::read();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("lines.txt");
    let lines = reference.texts().join("\n");
    std::fs::write(&path, format!("{lines}\n")).unwrap();
    let path = path.display().to_string();
    let of_file = embed(&["-m", &bert(), "-f", &path]);
    assert_close(&of_file, &reference.vectors("mean"));
    let mut command = cellar();
    let command = command.args(["embed", "-m", &bert()]).write_stdin(lines);
    let done = command.assert().success();
    let of_pipe: Vec<Vec<f32>> = serde_json::from_slice(&done.get_output().stdout).unwrap();
    assert_eq!(of_pipe, of_file);
}

#[test]
fn a_file_that_was_made_of_a_directory_gives_its_vectors() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("bert.gguf").display().to_string();
    output(&["convert", &bert(), &out, "--type", "f32"]);
    let reference = Reference::read();
    let texts = reference.texts();
    let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
    let args = [&["-m", &out, "--"], &texts[..]].concat();
    assert_close(&embed(&args), &reference.vectors("mean"));
    // The longest text is known to it too.
    let (_, said) = failure(&["embed", "-m", &out, reference.long_text()]);
    assert!(said.contains("takes 24"), "{said}");
}

#[test]
fn a_long_text_is_refused_with_numbers_or_cut() {
    let (model, reference) = (bert(), Reference::read());
    let long = reference.long_text();
    let (code, said) = failure(&["embed", "-m", &model, "a cat", long]);
    assert_eq!(code, 1);
    assert_eq!(
        said,
        "text 2 has 42 tokens, but the model takes 24; make it shorter, or cut its end off with \
         --truncate"
    );
    let vectors = embed(&["-m", &model, "--truncate", "a cat", long]);
    let wanted =
        vec![serde_json::from_value(reference.0["mean_of_long_text_cut"].clone()).unwrap()];
    assert_close(&vectors[1..], &wanted);
}

#[test]
fn models_of_the_other_kind_are_told_where_they_belong() {
    let (generative, encoder) = (model().display().to_string(), bert());
    let (code, said) = failure(&["embed", "-m", &generative, "a cat"]);
    assert_eq!(code, 1);
    assert_eq!(
        said,
        "the model does not say how the rows of a text become one vector ('llama.pooling_type' is \
         missing); choose with --pooling: most encoders were made for mean or cls, decoders for last; \
         none prints a row for every token"
    );
    assert_eq!(
        embed(&["-m", &generative, "--pooling", "mean", "a cat"]).len(),
        1
    );
    let wanted = "'bert' gives vectors here and continues no text; 'cellar embed' prints them";
    for args in [
        &["run", "-m", &encoder, "a cat"][..],
        &["run", "-m", &encoder, "--chat", "a cat"],
        &["chat", "-m", &encoder],
        &["kl", "-m", &encoder, "a cat"],
        &["bench", "-m", &encoder],
        &[
            "perplexity",
            "-m",
            &encoder,
            "-f",
            &format!("{encoder}/config.json"),
        ],
    ] {
        assert_eq!(failure(args), (2, wanted.to_owned()), "{args:?}");
    }
    // What does not compute takes both.
    let (plan, _) = output(&["plan", &encoder]);
    assert!(plan.contains("bert"), "{plan}");
    output(&["inspect", &encoder]);
    output(&["graph", "-m", &encoder]);
}

#[test]
fn nothing_to_embed_is_said() {
    let model = bert();
    let (code, said) = failure(&["embed", "-m", &model]);
    assert_eq!(code, 2);
    assert!(said.starts_with("no texts: "), "{said}");
    let (code, said) = failure(&["embed", "a cat"]);
    assert_eq!(code, 2);
    assert!(said.contains("--model"), "{said}");
    let (code, said) = failure(&[
        "embed",
        "-m",
        &data("modern_bert_tiny").display().to_string(),
        "x",
    ]);
    assert_eq!(code, 1);
    assert!(said.contains("there is no 'tokenizer.json'"), "{said}");
}

/// Rows or scores of the first sequence of a recipe.
fn first_rows(path: &Path, recipe: &Recipe) -> Vec<f32> {
    let mut registry = Registry::new();
    model_bert::register(&mut registry);
    let open = OpenModel::open(path, &registry).unwrap();
    let is_scorer = matches!(open.model().output(), OutputKind::Scores { .. });
    let mut batch = Batch::new();
    for (at, &id) in recipe.reference().prompts()[0].iter().enumerate() {
        let entry = batch.push_token(TokenId(id)).in_sequence(SeqId(0));
        if at == 0 || !is_scorer {
            entry.with_output();
        }
    }
    let (model, weights) = (open.model().clone(), open.weights());
    let mut engine = Engine::new(cpu(), model, weights, &EngineConfig::default()).unwrap();
    engine.embed(&batch).unwrap().values().to_vec()
}

/// The file of every encoder has the keys and tensors of the directory, and computes the same bits.
#[test]
fn every_encoder_becomes_a_file_that_computes_the_same() {
    let mut registry = Registry::new();
    model_bert::register(&mut registry);
    for recipe in Recipe::all_in(&fixture("encoders")) {
        let (name, dir) = (recipe.name(), tempfile::tempdir().unwrap());
        recipe.expand(dir.path());
        let to = dir.path().join("model.gguf");
        let paths = [dir.path(), &to].map(|path| path.display().to_string());
        output(&["convert", &paths[0], &paths[1], "--type", "f32"]);
        let source = HfTranslation::open(dir.path(), registry.hf_classes()).unwrap();
        let file = GgufFile::open(&to).unwrap();
        assert_eq!(
            file.tensors().len(),
            source.weights().names().len(),
            "{name}"
        );
        for tensor in source.weights().names() {
            let [ours, theirs] = [file.require(&tensor), source.weights().require(&tensor)];
            let (ours, theirs) = (ours.unwrap(), theirs.unwrap());
            assert_eq!(ours.info(), theirs.info(), "{name}: {tensor}");
            assert!(**ours.bytes() == **theirs.bytes(), "{name}: {tensor}");
        }
        let [of_file, of_directory] = [&*to, dir.path()].map(|path| first_rows(path, &recipe));
        assert!(of_file == of_directory, "{name}: other bits");
    }
}
