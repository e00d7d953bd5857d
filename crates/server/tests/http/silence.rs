//! Streams whose prompt takes long: clients and proxies that hear nothing give up, and ask again.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use model_tests::http::{open, post, request};
use serde_json::{Value, json};

use crate::support::{Setup, with};

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

/// llama-server's `return_progress`: its clients draw a bar.
#[test]
fn a_stream_tells_how_much_of_its_prompt_is_computed() {
    let server = Setup::default().start();
    let long = "Once upon a time there was a dog. ".repeat(20);
    let messages = json!([{"role": "user", "content": long}]);
    let chat = json!({"messages": messages, "max_tokens": 3, "stream": true});
    let completion = json!({"prompt": long, "n_predict": 3, "stream": true});
    for (path, body) in [("/v1/chat/completions", chat), ("/completion", completion)] {
        let events = |asks: bool| {
            let body = with(body.clone(), &json!({"return_progress": asks}));
            let events = post(server.address, path, &body).json_events();
            let reports = events.iter().map(|event| event["prompt_progress"].clone());
            reports.collect::<Vec<Value>>()
        };
        let mut reports = events(true);
        assert!(reports.pop().is_some_and(|last| last.is_null()), "{path}");
        reports.retain(|report| !report.is_null());
        let number = |report: &Value, name: &str| report[name].as_u64().unwrap();
        let done: Vec<u64> = reports.iter().map(|r| number(r, "processed")).collect();
        assert!(done.is_sorted(), "{path}: {done:?}");
        let last = reports.last().expect(path);
        assert_eq!(number(last, "processed"), number(last, "total"), "{path}");
        assert!(number(last, "total") > 150, "{path}: {last}");
        assert_eq!(number(last, "cache"), 0, "{path}: {last}");
        // The same prompt again: all but its last token was there.
        let again = events(true)
            .into_iter()
            .rev()
            .find(|report| !report.is_null());
        assert!(number(&again.unwrap(), "cache") > 150, "{path}");
        assert!(events(false).iter().all(Value::is_null), "{path}");
    }
}
