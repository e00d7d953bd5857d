//! The table of `docs/architectures.md` that compares real files of each architecture with
//! other programs, made of what `scripts/corpus.sh write` found.

#![allow(clippy::unwrap_used)] // helpers of tests may fail the test

use std::collections::BTreeMap;
use std::fmt::Write as _;

use crate::architectures::root;

/// Numbers of comparisons and of those that differ, by kind and name.
type Results = BTreeMap<(String, String), (usize, usize)>;

fn lines(name: &str) -> Vec<Vec<String>> {
    let path = root().join("scripts/corpus").join(name);
    let text = std::fs::read_to_string(path).unwrap();
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.split('\t').map(str::to_owned).collect())
        .collect()
}

fn results() -> Results {
    let entry = |line: Vec<String>| {
        let number = |at: usize| line[at].parse().unwrap();
        ((line[0].clone(), line[1].clone()), (number(2), number(3)))
    };
    lines("results.tsv").into_iter().map(entry).collect()
}

/// `qwen2 (93)`, or `gpt-4o (93, 3 on purpose)` where some differ, for each name.
fn cell(results: &Results, kind: &str, names: &str) -> String {
    let names = names.split(", ").filter(|name| !name.is_empty());
    let shown = names.filter_map(|name| {
        let found = results.get(&(kind.to_owned(), name.to_owned()))?;
        Some(match found {
            (n, 0) => format!("{name} ({n})"),
            (n, n_different) => format!("{name} ({n}, {n_different} on purpose)"),
        })
    });
    shown.collect::<Vec<_>>().join(", ")
}

/// The section of the page.
pub(crate) fn section() -> String {
    let results = results();
    let mut page = String::from(
        "\n## Real files\n\n\
         `scripts/corpus.sh` compares published files with the programs that they were made for. A \
         cell has the number of comparisons, and of those that differ on purpose (docs/testing.md \
         says why). Tokenizers are compared on texts, with llama.cpp and the library `tokenizers`; \
         chat templates on chats, with Jinja2; calls of tools are written by the template and read \
         back.\n\n\
         | architecture | tokenizers | chat templates | calls of tools |\n| --- | --- | --- | --- |\n",
    );
    for line in lines("architectures.tsv") {
        let column = |at: usize| line.get(at).map_or("", String::as_str);
        let _ = writeln!(
            page,
            "| {} | {} | {} | {} |",
            column(0),
            cell(&results, "tokenizer", column(1)),
            cell(&results, "template", column(2)),
            cell(&results, "calls", column(2)),
        );
    }
    page
}

#[test]
fn every_name_of_the_table_is_compared() {
    let results = results();
    for line in lines("architectures.tsv") {
        for (kind, names) in [("tokenizer", line.get(1)), ("template", line.get(2))] {
            for name in names.into_iter().flat_map(|names| names.split(", ")) {
                let key = (kind.to_owned(), name.to_owned());
                assert!(results.contains_key(&key), "{}: {kind} {name}", line[0]);
            }
        }
    }
}
