//! `/openapi.json` against the routes and what they read.

use cellar_server::api::endpoints;
use model_tests::http::{get, open, post, request};
use serde_json::{Value, json};

use crate::support::Setup;

fn operations(document: &Value) -> Vec<(String, String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let operations = paths.iter().flat_map(|(path, operations)| {
        let operations = operations.as_object().unwrap();
        operations
            .iter()
            .map(|(method, operation)| (method.to_uppercase(), path.clone(), operation.clone()))
    });
    operations.collect()
}

#[test]
fn each_route_is_described_and_each_description_is_a_route() {
    let server = Setup::default().start();
    let document = get(server.address, "/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    let described = operations(&document);
    let routes: Vec<(String, String)> = endpoints()
        .map(|endpoint| {
            let path = endpoint.path.replace('*', "");
            (endpoint.method.to_string(), path)
        })
        .collect();
    for route in &routes {
        let is_it =
            |(method, path, _): &(String, String, Value)| (method, path) == (&route.0, &route.1);
        assert!(described.iter().any(is_it), "{route:?} is not described");
    }
    assert_eq!(described.len(), routes.len());
    for (method, path, operation) in &described {
        assert_eq!(
            operation.get("requestBody").is_some(),
            method == "POST",
            "{path}"
        );
        // An id that does not exist: the error is the endpoint's own.
        let path = path.replace("{id}", "nothing");
        let ask = |method: &str| {
            let headers = [("content-type", "application/json")];
            open(server.address, &request(method, &path, &headers, "{}"))
        };
        let reply = ask(method);
        if path == "/view/events" {
            assert_eq!(reply.status, 200); // it does not end
            continue;
        }
        let reply = reply.finish();
        assert_ne!(reply.status, 405, "{method} {path}");
        assert!(
            !reply.body.contains("there is nothing at"),
            "{method} {path}"
        );
        let wrong = ask("PATCH").finish();
        assert_eq!(wrong.status, 405, "PATCH {path}");
        assert!(wrong.header("allow").unwrap().contains(method));
    }
}

/// A value that no field of this schema takes.
fn wrong_value(schema: &Value) -> Option<Value> {
    let is_any = schema.as_object().unwrap().is_empty();
    (!is_any).then(|| match schema["type"].as_str() {
        Some("string" | "boolean" | "object") => json!(17),
        _ => json!(true),
    })
}

#[test]
fn fields_that_are_described_are_read_with_their_type() {
    let setup = Setup {
        has_gap_marks: true,
        ..Setup::default()
    };
    let server = setup.start();
    let document = get(server.address, "/openapi.json").json();
    let sampling = &document["components"]["schemas"]["Sampling"]["properties"];
    let mut n_checked = 0;
    for (_, path, operation) in operations(&document) {
        let schema = &operation["requestBody"]["content"]["application/json"]["schema"];
        let (own, common) = match schema["allOf"].as_array() {
            Some(parts) => (&parts[0], sampling),
            None => (schema, &Value::Null),
        };
        let fields = own["properties"].as_object().into_iter().flatten();
        let fields = fields.chain(common.as_object().into_iter().flatten());
        for (name, schema) in fields {
            let Some(wrong) = wrong_value(schema) else {
                continue;
            };
            let mut body = json!({
                "model": "stories", "messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi",
                "input": "Hi", "content": "Hi", "tokens": [1], "query": "Hi", "documents": ["Hi"],
                "texts": ["Hi"], "text_1": "Hi", "text_2": "Hi", "inputs": "Hi",
                "input_prefix": "Hi", "input_suffix": "Hi", "max_tokens": 1, "n_predict": 1,
                "max_output_tokens": 1, "options": {"num_predict": 1}, "stream": false,
            });
            if path.starts_with("/v1/chat/completions") || path == "/apply-template" {
                body["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
            }
            let properties = own["properties"].as_object().unwrap();
            let members = body.as_object_mut().unwrap();
            members.retain(|name, _| properties.contains_key(name));
            if path == "/tokenize" && (name.ends_with("_prompt") || name.ends_with("_message")) {
                // They are of messages, where there is no text.
                members.retain(|name, _| name != "content" && name != "prompt");
            }
            if name == "return_documents" {
                // With texts, scores are of an API that does not have it.
                members.remove("texts");
            }
            body[name] = wrong;
            let reply = post(server.address, &path, &body);
            assert_eq!(reply.status, 400, "{path} {name}: {}", reply.body);
            assert!(
                reply.body.contains(name.as_str()),
                "{path} {name}: {}",
                reply.body
            );
            n_checked += 1;
        }
    }
    assert!(n_checked > 200, "{n_checked}");
}
