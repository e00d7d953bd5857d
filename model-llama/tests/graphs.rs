//! The graph of every member, for one token and for many, as snapshots that a person reads.

#![allow(clippy::unwrap_used)]

use kv_core::graph::{Graph, GraphShape};
use kv_core::weights::WeightSource;
use model_core::architecture::Registry;
use model_core::gguf::GgufFile;

const ONE: GraphShape = GraphShape {
    n_tokens: 1,
    n_outputs: 1,
};
const MANY: GraphShape = GraphShape {
    n_tokens: 7,
    n_outputs: 2,
};

fn graph(name: &str, shape: GraphShape) -> Graph {
    let path = format!("{}/tests/data/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
    let file = GgufFile::open(path).unwrap();
    let mut registry = Registry::new();
    model_llama::register(&mut registry);
    registry
        .model(file.metadata(), &file)
        .unwrap()
        .graph(shape)
        .unwrap()
}

macro_rules! snapshots {
    ($($name:ident),*) => {$(
        #[test]
        fn $name() {
            let name = stringify!($name);
            insta::assert_snapshot!(format!("{name}-one"), graph(name, ONE).text());
            insta::assert_snapshot!(format!("{name}-many"), graph(name, MANY).text());
        }
    )*};
}

snapshots!(
    llama_gqa_tied,
    llama_gqa_untied,
    llama_rope_linear,
    llama_rope_llama3,
    llama_rope_yarn,
    qwen2,
    gemma3_iswa8,
    mixtral,
    qwen3_moe
);

#[test]
fn every_tensor_of_the_file_is_used_and_no_other_is_wanted() {
    for name in [
        "llama_gqa_tied",
        "llama_gqa_untied",
        "llama_rope_llama3",
        "qwen2",
        "gemma3_iswa8",
        "mixtral",
        "qwen3_moe",
    ] {
        let path = format!("{}/tests/data/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
        let mut in_file = GgufFile::open(path).unwrap().names();
        let mut used: Vec<_> = graph(name, ONE)
            .weights()
            .iter()
            .map(|w| w.name.clone())
            .collect();
        in_file.sort();
        used.sort();
        assert_eq!(in_file, used, "{name}");
    }
}

#[test]
fn tied_and_untied_differ_in_the_output_matrix_alone() {
    let diff = graph("llama_gqa_tied", ONE).diff(&graph("llama_gqa_untied", ONE));
    assert!(
        diff.only_left.is_empty() && diff.only_right.is_empty(),
        "{diff}"
    );
    let names: Vec<_> = diff.changed.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["result_output"]);
}

#[test]
fn a_graph_survives_its_json_form() {
    let graph = graph("llama_rope_yarn", MANY);
    assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
}
