//! The graph of every architecture, for one token and for many, as snapshots that a person reads.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::{CASES, Case, registry};
use kv_core::graph::{Graph, GraphShape};
use kv_core::weights::WeightSource;

const ONE: GraphShape = GraphShape {
    n_tokens: 1,
    n_outputs: 1,
};
const MANY: GraphShape = GraphShape {
    n_tokens: 7,
    n_outputs: 2,
};

fn case(name: &str) -> &'static Case {
    CASES.iter().find(|case| case.name == name).unwrap()
}

fn graph(name: &str, shape: GraphShape) -> Graph {
    case(name).model().graph(shape).unwrap()
}

/// Those that are not another with other settings.
const SNAPSHOTS: [&str; 7] = [
    "mamba",
    "falcon_mamba",
    "mamba2",
    "bamba",
    "falcon_h1",
    "jamba",
    "granitemoehybrid",
];

#[test]
fn graphs() {
    for name in SNAPSHOTS {
        insta::assert_snapshot!(format!("{name}-one"), graph(name, ONE).text());
        insta::assert_snapshot!(format!("{name}-many"), graph(name, MANY).text());
    }
}

#[test]
fn every_tensor_of_the_file_is_used_and_no_other_is_wanted() {
    for case in CASES {
        let mut in_file = case.open().0.names();
        let graph = graph(case.name, ONE);
        let mut used: Vec<_> = graph.weights().iter().map(|w| w.name.clone()).collect();
        in_file.sort();
        used.sort();
        assert_eq!(in_file, used, "{}", case.name);
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
    for name in SNAPSHOTS {
        let graph = graph(name, MANY);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}

#[test]
fn the_example_builds_and_remembers_114_kib_a_layer() {
    let model = registry().get("mamba").unwrap().example().unwrap();
    assert!(model.graph(MANY).is_ok());
    for (_, memory) in model.layers().iter() {
        let kv_core::layers::LayerMemory::Recurrent(row) = memory else {
            panic!("{memory:?}");
        };
        assert_eq!((row.conv_row + row.state_row) * 4, 114 * 1024);
    }
}
