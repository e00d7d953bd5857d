//! Greedy text of a model of each kind of memory: windows, and states.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod support;

use std::path::Path;

use support::{BACKENDS, output, references_in};

/// The models of other crates' tests, without the ending.
const MODELS: [&str; 2] = [
    "model-llama/tests/data/stories-gemma3",
    "model-mamba/tests/data/stories-mamba",
];

#[test]
fn greedy_text_is_the_reference_s_for_windows_and_states() {
    let ways = [
        ["--kv-type", "f32", "--ubatch", "512"],
        ["--kv-type", "f16", "--ubatch", "7"],
        ["--kv-type", "f32", "--ubatch", "1"],
    ];
    for model in MODELS {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(model);
        let file = format!("{}-f16.gguf", path.display());
        let references = references_in(format!("{}.reference.json", path.display()));
        for backend in BACKENDS {
            for (reference, way) in references.iter().zip(ways) {
                let n = reference.greedy_ids.len().to_string();
                let mut args = vec!["run", &reference.prompt, "-m", &file, "--temp", "0"];
                args.extend(["-n", &n, "--backend", backend]);
                args.extend(way);
                let wanted = format!("{}{}\n", reference.prompt, reference.continuation);
                assert_eq!(output(&args).0, wanted, "{args:?}");
            }
        }
    }
}
