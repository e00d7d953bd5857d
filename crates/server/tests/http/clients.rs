//! Requests of real clients, cut small: each has its status, and the members that its client reads.

use cellar_server::{App, ServerConfig};
use model_tests::http::{Response, open, request};
use serde_json::Value;

use crate::support::{Server, Setup};
use crate::vectors::{embedder, reranker};

const TEXTS: &str = include_str!("../corpus/clients_texts.jsonl");
/// Requests with schemas and grammars.
const SCHEMAS: &str = include_str!("../corpus/clients_schemas.jsonl");
/// Requests with names of models, and to addresses of other servers. `to` says what the server has
/// that they are sent to: a model for texts, an embedder or a reranker.
const NAMES: &str = include_str!("../corpus/clients_names.jsonl");

/// The objects of an answer: one, the lines of Ollama's, or the events of a stream.
fn objects(reply: &Response) -> Vec<Value> {
    let kind = reply.header("content-type").unwrap_or_default();
    if kind.contains("event-stream") {
        reply.json_events()
    } else {
        let lines = reply.body.lines();
        lines
            .filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }
}

/// The fault of the answer to a request of the corpus.
fn fault(server: &Server, case: &Value) -> Option<String> {
    let text = |name: &str| case[name].as_str().unwrap();
    let body = case.get("body").map_or_else(String::new, Value::to_string);
    let headers = [("content-type", "application/json")];
    let sent = request(text("method"), text("path"), &headers, &body);
    let reply = open(server.address, &sent).finish();
    let objects = objects(&reply);
    let mut members = case["has"].as_array().unwrap().iter();
    let missing = members.find(|path| {
        let path = path.as_str().unwrap();
        !objects.iter().any(|object| object.pointer(path).is_some())
    });
    let is_right = reply.status == case["status"] && missing.is_none();
    (!is_right).then(|| {
        let start: String = reply.body.chars().take(200).collect();
        format!(
            "{}: {} instead of {}, without {missing:?}: {start}",
            text("name"),
            reply.status,
            case["status"]
        )
    })
}

#[test]
fn requests_of_clients_are_answered() {
    let setup = Setup {
        n_ctx: 4096,
        n_seqs: 1,
        has_gap_marks: true,
        ..Setup::default()
    };
    let server = setup.start();
    let lines = TEXTS.lines().chain(SCHEMAS.lines());
    let cases = lines.map(|line| serde_json::from_str(line).unwrap());
    let faults: Vec<String> = cases.filter_map(|case| fault(&server, &case)).collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

#[test]
fn requests_with_other_names_and_addresses_are_answered() {
    let servers = [
        ("texts", Setup::default().start()),
        (
            "vectors",
            Server::start(App::new(vec![embedder()], ServerConfig::default())),
        ),
        (
            "scores",
            Server::start(App::new(vec![reranker()], ServerConfig::default())),
        ),
    ];
    let faults = NAMES.lines().filter_map(|line| {
        let case: Value = serde_json::from_str(line).unwrap();
        let (_, server) = servers.iter().find(|(to, _)| case["to"] == *to).unwrap();
        fault(server, &case)
    });
    let faults: Vec<String> = faults.collect();
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
