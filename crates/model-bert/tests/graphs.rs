//! The graphs of encoders, for one token and for many, as snapshots that a person reads.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::{BERT, MODERN, data, registry};
use kv_core::layers::LayerMemory;
use kv_graph::{Graph, GraphShape};
use model_core::model_file::OpenModel;
use model_tests::{Recipe, checks};

const ONE: GraphShape = GraphShape {
    n_tokens: 1,
    n_outputs: 1,
};
const MANY: GraphShape = GraphShape {
    n_tokens: 7,
    n_outputs: 2,
};

fn graph(name: &str, shape: GraphShape) -> Graph {
    let file = OpenModel::open(data(name), &registry()).unwrap();
    file.model().graph(shape).unwrap()
}

/// Recipes of encoders with graphs of their own.
const RECIPES: &[&str] = &[
    "albert",
    "deberta_v2_reranker",
    "distilbert_classifier",
    "embedding_gemma",
    "eurobert",
    "jina_bert_v2",
    "jina_embeddings_v3",
    "modernbert_classifier",
    "mpnet",
    "neobert",
    "nomic_bert",
    "nomic_bert_moe",
    "xlm_roberta_reranker",
];

#[test]
fn graphs_of_recipes() {
    for name in RECIPES {
        let directory = Recipe::open(&data(name)).directory(&registry()).unwrap();
        let graph = |shape| directory.model().graph(shape).unwrap();
        checks::differ_in_rows_alone(&graph(ONE), &graph(MANY));
        insta::assert_snapshot!(format!("{name}-many"), graph(MANY).text());
    }
}

#[test]
fn graphs() {
    for name in [BERT, MODERN] {
        checks::differ_in_rows_alone(&graph(name, ONE), &graph(name, MANY));
        insta::assert_snapshot!(format!("{name}-many"), graph(name, MANY).text());
    }
}

#[test]
fn a_graph_survives_its_json_form() {
    for name in [BERT, MODERN] {
        let graph = graph(name, MANY);
        assert_eq!(Graph::from_json(&graph.to_json().unwrap()), Ok(graph));
    }
}

#[test]
fn encoders_remember_nothing() {
    for member in model_bert::FAMILY {
        let model = registry().get(member.name).unwrap().example().unwrap();
        assert!(model.graph(MANY).is_ok());
        let mut layers = model.layers().iter();
        assert!(layers.all(|(_, memory)| memory == LayerMemory::Nothing));
    }
}
