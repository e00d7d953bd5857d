//! The graph of the architecture, for one token and for many, as snapshots that a person reads.

#![allow(clippy::unwrap_used)] // helpers of tests

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

fn file(name: &str) -> GgufFile {
    let path = format!("{}/tests/data/{name}.gguf", env!("CARGO_MANIFEST_DIR"));
    GgufFile::open(path).unwrap()
}

fn graph(name: &str, shape: GraphShape) -> Graph {
    let file = file(name);
    let mut registry = Registry::new();
    model_mamba::register(&mut registry);
    registry
        .model(file.metadata(), &file)
        .unwrap()
        .graph(shape)
        .unwrap()
}

#[test]
fn mamba() {
    insta::assert_snapshot!("mamba-one", graph("mamba", ONE).text());
    insta::assert_snapshot!("mamba-many", graph("mamba", MANY).text());
}

#[test]
fn every_tensor_of_the_file_is_used_and_no_other_is_wanted() {
    for name in ["mamba", "mamba_untied", "stories-mamba-f16"] {
        let mut in_file = file(name).names();
        let graph = graph(name, ONE);
        let mut used: Vec<_> = graph.weights().iter().map(|w| w.name.clone()).collect();
        in_file.sort();
        used.sort();
        assert_eq!(in_file, used, "{name}");
    }
}

#[test]
fn tied_and_untied_differ_in_the_output_matrix_alone() {
    let diff = graph("mamba", ONE).diff(&graph("mamba_untied", ONE));
    assert!(
        diff.only_left.is_empty() && diff.only_right.is_empty(),
        "{diff}"
    );
    let names: Vec<_> = diff.changed.iter().map(|c| c.name.as_str()).collect();
    assert_eq!(names, ["result_output"]);
}

#[test]
fn a_graph_survives_its_json_form() {
    let graph = graph("mamba", MANY);
    assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
}

#[test]
fn the_example_builds_and_remembers_114_kib_a_layer() {
    let mut registry = Registry::new();
    model_mamba::register(&mut registry);
    let model = registry.get("mamba").unwrap().example().unwrap();
    assert!(model.graph(MANY).is_ok());
    for (_, memory) in model.layers().iter() {
        let kv_core::layers::LayerMemory::Recurrent(row) = memory else {
            panic!("{memory:?}");
        };
        assert_eq!((row.conv_row + row.state_row) * 4, 114 * 1024);
    }
}
