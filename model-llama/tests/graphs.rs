//! The graph of every member, for one token and for many, as snapshots that a person reads.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CASES, Case};
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

fn graph(name: &str, shape: GraphShape) -> Graph {
    Case::named(name).model().graph(shape).unwrap()
}

#[test]
fn graphs_are_as_they_were_read() {
    for Case { name, .. } in CASES {
        insta::assert_snapshot!(format!("{name}-one"), graph(name, ONE).text());
        insta::assert_snapshot!(format!("{name}-many"), graph(name, MANY).text());
    }
}

#[test]
fn every_tensor_of_the_file_is_used_and_no_other_is_wanted() {
    for case in CASES {
        let mut in_file = case.open().0.names();
        let graph = case.model().graph(ONE).unwrap();
        let mut used: Vec<_> = graph.weights().iter().map(|w| w.name.clone()).collect();
        in_file.sort();
        used.sort();
        assert_eq!(in_file, used, "{}", case.name);
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
fn graphs_survive_their_json_form() {
    for Case { name, .. } in CASES {
        let graph = graph(name, MANY);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}
