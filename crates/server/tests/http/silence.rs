//! Streams whose prompt takes long: clients and proxies that hear nothing give up, and ask again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use model_tests::http::{open, request};
use serde_json::{Value, json};

use crate::support::Setup;

#[test]
fn a_stream_whose_prompt_takes_long_is_not_silent() {
    let is_held = Arc::new(AtomicBool::new(false));
    let mut setup = Setup {
        is_held: Some(Arc::clone(&is_held)),
        ..Setup::default()
    };
    setup.server.longest_silence = Duration::from_millis(5);
    let server = setup.start();
    let messages = json!([{"role": "user", "content": "Hi"}]);
    for (path, body, sign, last) in [
        (
            "/v1/messages",
            json!({"messages": messages, "max_tokens": 3, "stream": true}),
            "event: ping\ndata: {\"type\":\"ping\"}\n\n",
            "event: message_stop",
        ),
        (
            "/v1/responses",
            json!({"input": "Hi", "max_output_tokens": 3, "stream": true}),
            "event: keepalive\ndata: {",
            "event: response.incomplete",
        ),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 3, "stream": true}),
            ":\n\n",
            "data: [DONE]",
        ),
        (
            "/v1/completions",
            json!({"prompt": "Hi", "max_tokens": 3, "stream": true}),
            ":\n\n",
            "data: [DONE]",
        ),
        (
            "/completion",
            json!({"prompt": "Hi", "n_predict": 3, "stream": true}),
            ":\n\n",
            "\"stop\":true",
        ),
    ] {
        is_held.store(true, Ordering::SeqCst);
        let headers = [("content-type", "application/json")];
        let sent = request("POST", path, &headers, &body.to_string());
        let mut reply = open(server.address, &sent);
        let mut waited = String::new();
        while waited.matches(sign).count() < 3 {
            waited += &reply.next_chunk().unwrap().expect(path);
        }
        is_held.store(false, Ordering::SeqCst);
        let rest = reply.finish().body;
        assert!(rest.contains(last), "{path}: {rest}");
        // Numbers of events have no gaps.
        let events = waited + &rest;
        let data = events
            .lines()
            .filter_map(|line| line.strip_prefix("data: "));
        let data = data.filter_map(|data| serde_json::from_str::<Value>(data).ok());
        let numbers = data.filter_map(|data| data["sequence_number"].as_u64());
        assert!(numbers.enumerate().all(|(at, number)| at as u64 == number));
    }
}

/// Clients of Ollama take each line for a part of the answer.
#[test]
fn a_stream_of_lines_has_nothing_but_lines() {
    let mut setup = Setup::default();
    setup.server.longest_silence = Duration::from_millis(1);
    let server = setup.start();
    let body = json!({"model": "stories", "prompt": "Hi", "options": {"num_predict": 20}});
    let headers = [("content-type", "application/json")];
    let sent = request("POST", "/api/generate", &headers, &body.to_string());
    let reply = open(server.address, &sent).finish();
    let lines = reply.body.lines();
    let lines: Vec<Value> = lines.map(|l| serde_json::from_str(l).unwrap()).collect();
    assert_eq!(lines.last().unwrap()["done"], true);
}
