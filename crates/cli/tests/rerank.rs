//! `cellar rerank`: the scores of the reference, from a directory and from the GGUF file made of
//! it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a test fails

use crate::support::{BACKENDS, cellar, failure, model, output};
use model_tests::{Recipe, fixture};
use serde::Deserialize;

/// What numpy computed.
#[derive(Debug, Deserialize)]
struct Reference {
    query: String,
    documents: Vec<String>,
    scores: Vec<[f32; 1]>,
    cut_score: [f32; 1],
}

/// A line of `--json`.
#[derive(Debug, PartialEq, Deserialize)]
struct Row {
    index: usize,
    score: f32,
    document: String,
}

const RERANKERS: [&str; 2] = ["bert_rerank_tiny", "xlm_roberta_rerank_tiny"];

fn data(name: &str) -> String {
    fixture("encoders").join(name).display().to_string()
}

fn reference(name: &str) -> Reference {
    let path = fixture("encoders").join(format!("{name}.reference.json"));
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn rows(args: &[&str]) -> Vec<Row> {
    let (stdout, stderr) = output(&[&["rerank", "--json"], args].concat());
    assert_eq!(stderr, "");
    serde_json::from_str(&stdout).unwrap()
}

#[track_caller]
fn assert_ranked(rows: &[Row], reference: &Reference) {
    assert_eq!(rows.len(), reference.documents.len());
    assert!(
        rows.windows(2).all(|two| two[0].score >= two[1].score),
        "{rows:?}"
    );
    for row in rows {
        let [wanted] = reference.scores[row.index];
        assert!((row.score - wanted).abs() <= 5e-6, "{row:?}, not {wanted}");
        assert_eq!(row.document, reference.documents[row.index]);
    }
}

#[test]
fn documents_get_the_scores_of_the_reference() {
    let dir = tempfile::tempdir().unwrap();
    for name in RERANKERS {
        let reference = reference(name);
        let gguf = dir
            .path()
            .join(format!("{name}.gguf"))
            .display()
            .to_string();
        output(&["convert", &data(name), &gguf, "--type", "f32"]);
        let documents: Vec<&str> = reference.documents.iter().map(String::as_str).collect();
        for model in [&data(name), &gguf] {
            for backend in BACKENDS {
                let before = [
                    "-m",
                    model,
                    "--query",
                    &reference.query,
                    "--backend",
                    backend,
                    "--",
                ];
                assert_ranked(&rows(&[&before[..], &documents].concat()), &reference);
            }
        }
    }
}

#[test]
fn a_table_has_scores_numbers_and_documents() {
    let (model, reference) = (data(RERANKERS[0]), reference(RERANKERS[0]));
    let mut command = cellar();
    let args = ["rerank", "-m", &model, "-q", &reference.query, "--top", "2"];
    let done = command
        .args(args)
        .write_stdin(reference.documents.join("\n"))
        .assert()
        .success();
    let table = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    assert_eq!(
        table,
        "  -0.0404  3  \n  -0.0986  2  A dog, a bird and a cat!\n"
    );
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("documents.txt");
    std::fs::write(&path, reference.documents.join("\n")).unwrap();
    let path = path.display().to_string();
    let (of_file, _) = output(&["rerank", "-m", &model, "-q", &reference.query, "-f", &path]);
    assert!(of_file.starts_with(&table), "{of_file}");
    assert_eq!(of_file.lines().count(), 5);
}

#[test]
fn a_long_document_is_refused_with_numbers_or_cut() {
    let (model, reference) = (data(RERANKERS[1]), reference(RERANKERS[1]));
    let args = ["-m", &model, "-q", &reference.query, "--ctx", "16", "a cat"];
    let args = [&args[..], &[&reference.documents[4]]].concat();
    let (code, said) = failure(&[&["rerank"], &args[..]].concat());
    assert_eq!(code, 1);
    assert!(said.starts_with("the query and document 2 have "), "{said}");
    assert!(
        said.ends_with(
            "takes 16; make them shorter, or cut off the end of documents with \
                            --truncate"
        ),
        "{said}"
    );
    let cut = rows(&[&["--truncate"], &args[..]].concat());
    let cut = cut.iter().find(|row| row.index == 1).unwrap();
    assert!(
        (cut.score - reference.cut_score[0]).abs() <= 5e-6,
        "{cut:?}"
    );
}

#[test]
fn models_of_the_other_kind_are_told_where_they_belong() {
    let (code, said) = failure(&[
        "rerank",
        "-m",
        &model().display().to_string(),
        "-q",
        "x",
        "y",
    ]);
    assert_eq!(code, 2);
    assert_eq!(
        said,
        "'llama' continues texts and scores none: 'cellar run' is for it; 'cellar rerank' takes a \
         cross-encoder (BertForSequenceClassification and the like)"
    );
    let (code, said) = failure(&["rerank", "-m", &data("bert_tiny"), "-q", "x", "y"]);
    assert_eq!(code, 2);
    assert!(
        said.starts_with("'bert' gives vectors and no scores: 'cellar embed'"),
        "{said}"
    );
    let dir = tempfile::tempdir().unwrap();
    Recipe::open(&fixture("encoders/roberta_classifier")).expand(dir.path());
    let classifier = dir.path().display().to_string();
    let (code, said) = failure(&["rerank", "-m", &classifier, "-q", "x", "y"]);
    assert_eq!(code, 2);
    assert!(said.contains("3 labels"), "{said}");
    let reranker = data(RERANKERS[0]);
    let wanted =
        "'bert' is a reranker: it scores texts and continues none; 'cellar rerank' is for it";
    for args in [
        &["run", "-m", &reranker, "a cat"][..],
        &["chat", "-m", &reranker],
        &["bench", "-m", &reranker],
    ] {
        assert_eq!(failure(args), (2, wanted.to_owned()), "{args:?}");
    }
    let (code, said) = failure(&["embed", "-m", &reranker, "a cat"]);
    assert_eq!(code, 2);
    assert!(
        said.ends_with("is a reranker and gives no vectors: 'cellar rerank' is for it"),
        "{said}"
    );
    // What does not compute takes it.
    output(&["plan", &reranker]);
    output(&["inspect", &reranker]);
    output(&["graph", "-m", &reranker]);
}

#[test]
fn nothing_to_rank_is_said() {
    let (code, said) = failure(&["rerank", "-m", &data(RERANKERS[0]), "-q", "x"]);
    assert_eq!(code, 2);
    assert!(said.starts_with("no documents: "), "{said}");
    let (code, said) = failure(&["rerank", "-m", &data(RERANKERS[0]), "y"]);
    assert_eq!(code, 2);
    assert!(said.contains("--query"), "{said}");
    let (code, said) = failure(&[
        "rerank",
        "-m",
        &data(RERANKERS[0]),
        "-q",
        "x",
        "--top",
        "0",
        "y",
    ]);
    assert_eq!(code, 2);
    assert!(said.contains("--top"), "{said}");
}
