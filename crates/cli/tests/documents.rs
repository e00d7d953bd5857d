//! Code in documents is code of the project, word for word but for its indentation.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

use std::path::{Path, PathBuf};

/// A document, and the files that its code is from.
const DOCUMENTS: [(&str, &[&str]); 4] = [
    (
        "CONTRIBUTING.md",
        &[
            "crates/model-llama/src/family.rs",
            "crates/model-llama/src/hf/mod.rs",
        ],
    ),
    (
        "docs/how-to/own-model.md",
        &[
            "crates/kv-candle/tests/backend.rs",
            "crates/model-mamba/src/rwkv/mod.rs",
            "examples/third-party-model/src/model.rs",
            "examples/third-party-model/src/retention.rs",
            "examples/third-party-model/examples/run.rs",
        ],
    ),
    (
        "docs/how-to/own-memory.md",
        &[
            "examples/third-party-memory/src/lib.rs",
            "examples/third-party-memory/src/contract.rs",
            "examples/third-party-memory/tests/streaming.rs",
        ],
    ),
    (
        "docs/how-to/own-backend.md",
        &[
            "examples/third-party-backend/src/lib.rs",
            "examples/third-party-backend/src/compute.rs",
            "examples/third-party-backend/tests/contract.rs",
        ],
    ),
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn lines_of(path: &str) -> String {
    let text = std::fs::read_to_string(root().join(path)).unwrap();
    text.lines().map(str::trim).collect::<Vec<_>>().join("\n")
}

#[test]
fn code_in_documents_is_that_of_the_project() {
    for (document, sources) in DOCUMENTS {
        let text = lines_of(document);
        let sources: Vec<String> = sources.iter().map(|source| lines_of(source)).collect();
        let blocks = text.split("```rust").skip(1);
        let mut n_blocks = 0;
        for block in blocks.map(|rest| rest.split("```").next().unwrap()) {
            let (_, code) = block.split_once('\n').unwrap();
            n_blocks += 1;
            assert!(
                sources
                    .iter()
                    .any(|source| source.contains(code.trim_end())),
                "{document} has code that is not there:\n{code}"
            );
        }
        assert!(n_blocks > 0, "{document}");
    }
}

#[test]
fn the_files_on_the_way_from_prompt_to_token_exist() {
    let page = lines_of("docs/explanation/prompt-to-token.md");
    let files: Vec<&str> = page
        .split('`')
        .filter(|word| word.starts_with("crates/") && word.ends_with(".rs"))
        .collect();
    assert!(files.len() > 15, "{files:?}");
    for file in files {
        assert!(root().join(file).is_file(), "{file}");
    }
}
