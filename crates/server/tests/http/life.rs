//! Many clients, clients that vanish, backends that fail, and the end of a server.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cellar_engine::sampler::SamplerConfig;
use model_tests::http::{get, open, post, request, send_raw};
use serde_json::{Value, json};

use crate::support::{Alone, Server, Setup};

const PROMPTS: [&str; 4] = [
    "Once upon a time",
    "Tom had a red ball",
    "The sun was",
    "One day",
];

/// A long text, which the model may not end.
pub(crate) fn long() -> Value {
    json!({"prompt": "Once upon a time", "max_tokens": 8000, "stream": true, "temperature": 0,
           "ignore_eos": true})
}

fn open_long(server: &Server) -> model_tests::http::Reply {
    let reply = open(
        server.address,
        &request("POST", "/v1/completions", &[], &long().to_string()),
    );
    assert_eq!(reply.status, 200);
    reply
}

/// Clients at once get the texts that they would get alone. `CELLAR_HTTP_CLIENTS` asks for more.
#[test]
fn texts_of_many_clients_are_those_of_each_alone() {
    let n: usize = std::env::var("CELLAR_HTTP_CLIENTS").map_or(12, |n| n.parse().unwrap());
    let setup = Setup {
        n_seqs: 8,
        n_ctx: 600,
        ..Setup::default()
    };
    let server = setup.start();
    let address = server.address;
    let temperature = |at: usize| [0.0, 0.8][at % 2];
    let prompt = |at: usize| PROMPTS[at % 4].repeat(1 + at % 3);
    let n_tokens = |at: usize| 10 + at * 7 % 30;
    let clients = (0..n).map(|at| {
        let body = json!({
            "prompt": prompt(at), "temperature": temperature(at), "seed": at,
            "max_tokens": n_tokens(at), "stream": at % 3 == 0,
        });
        std::thread::spawn(move || {
            let reply = post(address, "/v1/completions", &body);
            assert_eq!(reply.status, 200, "{}", reply.body);
            match at % 3 {
                0 => {
                    let events = reply.json_events();
                    let texts = events
                        .iter()
                        .filter_map(|e| e["choices"][0]["text"].as_str());
                    texts.collect::<String>()
                }
                _ => reply.json()["choices"][0]["text"]
                    .as_str()
                    .unwrap()
                    .to_owned(),
            }
        })
    });
    let clients: Vec<_> = clients.collect();
    let alone = Alone::new();
    for (at, client) in clients.into_iter().enumerate() {
        let sampler = SamplerConfig {
            temperature: temperature(at),
            seed: at as u64,
            ..SamplerConfig::default()
        };
        let expected = alone.text(&prompt(at), sampler, n_tokens(at)).text;
        assert_eq!(client.join().unwrap(), expected, "client {at}");
    }
}

#[test]
fn a_client_that_vanishes_frees_its_place() {
    let setup = Setup {
        n_seqs: 1,
        n_ctx: 8192,
        ..Setup::default()
    };
    let server = setup.start();
    // In the stream.
    let mut streaming = open_long(&server);
    assert!(streaming.next_chunk().unwrap().is_some());
    // In the queue, and waiting for a whole answer.
    let mut whole = long();
    whole["stream"] = json!(false);
    let text = request("POST", "/v1/completions", &[], &whole.to_string());
    let queued = send_raw(server.address, text.as_bytes()).unwrap();
    server.await_metric("cellar_requests_waiting{", 1.0);
    drop(queued);
    server.await_metric("cellar_requests_waiting{", 0.0);
    assert_eq!(server.metric("cellar_requests_running{"), 1.0);
    drop(streaming);
    server.await_metric("cellar_requests_running{", 0.0);
    server.await_metric("cellar_requests_total{end=\"cancelled\"}", 2.0);
    // What was computed for it counts.
    assert!(server.metric("cellar_generated_tokens_total") >= 1.0);
    assert!(server.metric("cellar_prompt_tokens_total") >= 1.0);
    assert_eq!(
        get(server.address, "/slots").json()[0]["is_processing"],
        false
    );
    // The only place is free for the next.
    let body = json!({"prompt": "One day", "max_tokens": 3});
    assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
}

#[test]
fn a_failure_in_the_middle_is_an_error_event_and_a_closed_connection() {
    let is_broken = Arc::new(AtomicBool::new(false));
    let setup = Setup {
        n_ctx: 8192,
        is_broken: Some(Arc::clone(&is_broken)),
        ..Setup::default()
    };
    let server = setup.start();
    let mut streaming = open_long(&server);
    assert!(streaming.next_chunk().unwrap().is_some());
    is_broken.store(true, Ordering::Relaxed);
    let rest = streaming.finish();
    assert!(!rest.is_complete, "the connection must be cut");
    let events = rest.json_events();
    let error = &events.last().unwrap()["error"];
    assert_eq!(error["type"], "server_error", "{}", rest.body);
    assert!(
        error["message"].as_str().unwrap().contains("as told"),
        "{error}"
    );
    assert!(!rest.body.contains("[DONE]") && !rest.body.contains("\"finish_reason\":\"stop\""));
    let body = json!({"prompt": "One day", "max_tokens": 3});
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(
        (reply.status, &reply.json()["error"]["type"]),
        (500, &json!("server_error"))
    );
    is_broken.store(false, Ordering::Relaxed);
    assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
    assert_eq!(server.metric("cellar_requests_total{end=\"failed\"}"), 2.0);
}

#[test]
fn a_lost_device_fails_all_requests_and_shows_in_the_health() {
    let is_lost = Arc::new(AtomicBool::new(false));
    let setup = Setup {
        n_ctx: 8192,
        is_lost: Some(Arc::clone(&is_lost)),
        ..Setup::default()
    };
    let server = setup.start();
    let mut streaming = [open_long(&server), open_long(&server)];
    for streaming in &mut streaming {
        assert!(streaming.next_chunk().unwrap().is_some());
    }
    assert_eq!(get(server.address, "/health").status, 200);
    is_lost.store(true, Ordering::Relaxed);
    for streaming in streaming {
        let rest = streaming.finish();
        let message = rest.json_events().last().unwrap()["error"]["message"].to_string();
        assert!(message.contains("lost its device: as told"), "{message}");
    }
    let health = get(server.address, "/health");
    let message = &health.json()["error"]["message"];
    assert_eq!(health.status, 503);
    assert!(
        message
            .as_str()
            .unwrap()
            .contains("is lost: restart the server"),
        "{message}"
    );
    // The server still answers, with the reason.
    assert_eq!(get(server.address, "/livez").status, 200);
    let body = json!({"prompt": "One day", "max_tokens": 3});
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(reply.status, 500);
    assert!(reply.body.contains("lost its device"), "{}", reply.body);
}

#[test]
fn a_server_that_ends_finishes_what_it_has() {
    let mut server = Setup::default().start();
    let mut streaming = open(
        server.address,
        &request(
            "POST",
            "/v1/completions",
            &[],
            &json!({
                "prompt": "Once upon a time", "max_tokens": 60, "stream": true, "temperature": 0,
            })
            .to_string(),
        ),
    );
    let first = streaming.next_chunk().unwrap().unwrap();
    server.stop();
    let rest = streaming.finish();
    assert!(
        rest.is_complete && rest.body.ends_with("data: [DONE]\n\n"),
        "{}",
        rest.body
    );
    assert!(first.starts_with("data: "));
    server.join();
}

#[test]
fn a_server_that_waits_no_longer_says_so() {
    let mut setup = Setup {
        n_ctx: 8192,
        ..Setup::default()
    };
    setup.server.drain = Duration::from_secs(3);
    let mut server = setup.start();
    let mut streaming = open_long(&server);
    assert!(streaming.next_chunk().unwrap().is_some());
    server.stop();
    while server.app.phase() == cellar_server::Phase::Open {
        std::thread::sleep(Duration::from_millis(1));
    }
    let reply = post(
        server.address,
        "/v1/completions",
        &json!({"prompt": "One day"}),
    );
    assert_eq!(
        (reply.status, &reply.json()["error"]["code"]),
        (503, &json!("shutting_down"))
    );
    assert_eq!(get(server.address, "/health").status, 503);
    assert_eq!(get(server.address, "/readyz").status, 503);
    assert_eq!(get(server.address, "/livez").status, 200);
    let rest = streaming.finish();
    let error = rest.json_events().last().unwrap()["error"].clone();
    assert_eq!(error["code"], "shutting_down");
    assert!(!rest.is_complete && !rest.body.contains("[DONE]"));
    server.join();
}
