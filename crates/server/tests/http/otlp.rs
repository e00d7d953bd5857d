//! Spans of requests, as a collector of OTLP gets them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant, SystemTime};

use axum::http::{Method, StatusCode};
use cellar_server::{ObserveRequests, RequestReport, ServerConfig};
use cellar_telemetry::otlp::Spans;
use model_tests::http::{open, post, request};
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value as AnyValue;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::{Value, json};

use crate::support::{Server, Setup};

/// Takes spans, and keeps them.
struct Collector {
    endpoint: String,
    taken: Arc<Mutex<Vec<ExportTraceServiceRequest>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let taken = Arc::<Mutex<Vec<_>>>::default();
        let keep = Arc::clone(&taken);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let mut stream = BufReader::new(stream.unwrap());
                while let Some(body) = read_request(&mut stream) {
                    let taken = ExportTraceServiceRequest::decode(&body[..]).unwrap();
                    keep.lock().unwrap().push(taken);
                    let answer = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n";
                    stream.get_mut().write_all(answer).unwrap();
                }
            }
        });
        Self { endpoint, taken }
    }

    /// All spans, once the exporter has sent them.
    fn spans(&self, of: &Spans) -> Vec<Span> {
        of.close();
        let taken = self.taken.lock().unwrap();
        let mut spans = Vec::new();
        for resource in taken.iter().flat_map(|request| &request.resource_spans) {
            let service = &resource.resource.as_ref().unwrap().attributes;
            let service = service.iter().find(|one| one.key == "service.name");
            let service = service.unwrap().value.clone().unwrap().value.unwrap();
            assert_eq!(service, AnyValue::StringValue("cellar".to_owned()));
            spans.extend(
                resource
                    .scope_spans
                    .iter()
                    .flat_map(|scope| scope.spans.clone()),
            );
        }
        spans
    }
}

/// The body of a request to the path of traces; `None` where the connection ends.
fn read_request(stream: &mut BufReader<std::net::TcpStream>) -> Option<Vec<u8>> {
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        if stream.read_line(&mut line).ok()? == 0 {
            return None;
        }
        match line.trim() {
            "" => break,
            line => lines.push(line.to_ascii_lowercase()),
        }
    }
    assert_eq!(lines[0], "post /v1/traces http/1.1");
    assert!(lines.contains(&"content-type: application/x-protobuf".to_owned()));
    let length = lines
        .iter()
        .find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.unwrap().parse().unwrap()];
    stream.read_exact(&mut body).unwrap();
    Some(body)
}

fn start(endpoint: &str) -> (Server, Arc<Spans>) {
    let spans = Arc::new(Spans::export(Some(endpoint)).unwrap());
    let setup = Setup {
        server: ServerConfig {
            observers: vec![Arc::clone(&spans) as Arc<dyn ObserveRequests>],
            ..ServerConfig::default()
        },
        ..Setup::default()
    };
    (setup.start(), spans)
}

/// An attribute, as JSON.
fn attribute(span: &Span, name: &str) -> Value {
    let found = span.attributes.iter().find(|one| one.key == name);
    match found.and_then(|one| one.value.clone()?.value) {
        Some(AnyValue::StringValue(text)) => json!(text),
        Some(AnyValue::IntValue(number)) => json!(number),
        Some(AnyValue::DoubleValue(number)) => json!(number),
        Some(AnyValue::ArrayValue(list)) => {
            let texts = list.values.into_iter().map(|one| match one.value {
                Some(AnyValue::StringValue(text)) => text,
                other => panic!("{other:?}"),
            });
            json!(texts.collect::<Vec<_>>())
        }
        other => panic!("{name}: {other:?}"),
    }
}

fn children<'s>(spans: &'s [Span], of: &Span) -> Vec<&'s Span> {
    let children = spans
        .iter()
        .filter(|span| span.parent_span_id == of.span_id);
    children.collect()
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn trace_of(span: &Span) -> String {
    span.trace_id
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[test]
fn a_request_is_a_span_in_the_trace_that_it_names() {
    let collector = Collector::start();
    let (server, spans) = start(&collector.endpoint);
    let body = json!({"prompt": "Once upon a time there was a little girl.", "max_tokens": 5,
                      "temperature": 0, "n": 2});
    let parent = format!("00-{TRACE}-00f067aa0ba902b7-01");
    let headers = [("traceparent", parent.as_str())];
    let sent = request("POST", "/v1/completions", &headers, &body.to_string());
    let answer = open(server.address, &sent).finish().json();
    let again = post(server.address, "/v1/completions", &body).json();
    // Not recorded by its caller, so not here either; and no request but a POST is told.
    let parent = format!("00-{}-00f067aa0ba902b7-00", "ab".repeat(16));
    let headers = [("traceparent", parent.as_str())];
    for method in ["POST", "GET"] {
        let sent = request(method, "/v1/completions", &headers, &body.to_string());
        open(server.address, &sent).finish();
    }
    drop(server);
    let spans = collector.spans(&spans);
    assert_eq!(spans.len(), 2 * (1 + 2 * 4));
    let roots: Vec<&Span> = spans
        .iter()
        .filter(|span| span.name.starts_with("POST"))
        .collect();
    assert_eq!(roots.len(), 2);
    assert_eq!(trace_of(roots[0]), TRACE);
    assert_eq!(
        roots[0].parent_span_id,
        0x00f0_67aa_0ba9_02b7_u64.to_be_bytes()
    );
    assert!(roots[1].parent_span_id.is_empty() && trace_of(roots[1]) != TRACE);
    for (root, answer) in roots.iter().zip([&answer, &again]) {
        assert_eq!(root.name, "POST /v1/completions");
        assert_eq!(root.kind, 2, "server");
        assert_eq!(attribute(root, "http.response.status_code"), 200);
        let texts = children(&spans, root);
        assert_eq!(texts.len(), 2);
        for text in texts {
            check_text(&spans, root, text, answer);
        }
    }
}

/// A text's span against the usage of the answer, and its stages against its time.
fn check_text(spans: &[Span], root: &Span, text: &Span, answer: &Value) {
    let usage = &answer["usage"];
    assert_eq!(text.trace_id, root.trace_id);
    assert_eq!(attribute(text, "gen_ai.request.model"), "stories");
    assert_eq!(
        attribute(text, "gen_ai.usage.input_tokens"),
        usage["prompt_tokens"]
    );
    assert_eq!(attribute(text, "gen_ai.usage.output_tokens"), 5);
    assert_eq!(
        attribute(text, "gen_ai.response.finish_reasons"),
        json!(["length"])
    );
    let stages = children(spans, text);
    let names: Vec<&str> = stages.iter().map(|stage| stage.name.as_str()).collect();
    assert_eq!(names, ["queue", "prefill", "decode"]);
    let mut at = text.start_time_unix_nano;
    for stage in stages {
        assert_eq!(stage.start_time_unix_nano, at, "{}", stage.name);
        assert!(stage.end_time_unix_nano >= at);
        at = stage.end_time_unix_nano;
    }
    assert!(
        at > text.start_time_unix_nano && text.start_time_unix_nano >= root.start_time_unix_nano
    );
    assert!(text.end_time_unix_nano <= root.end_time_unix_nano);
}

#[test]
fn what_was_cached_and_who_left_is_told() {
    let collector = Collector::start();
    let (server, spans) = start(&collector.endpoint);
    let messages =
        json!([{"role": "user", "content": "Once upon a time there was a little girl."}]);
    let body = json!({"messages": messages, "max_tokens": 3, "temperature": 0, "stream": true});
    let ask = |path: &str, body: &Value| post(server.address, path, body);
    assert_eq!(ask("/v1/chat/completions", &body).status, 200);
    assert_eq!(ask("/v1/chat/completions", &body).status, 200);
    assert_eq!(ask("/v1/chat/completions", &json!({})).status, 400);
    let long = json!({"prompt": "One day", "max_tokens": 900, "stream": true, "temperature": 0});
    let sent = request("POST", "/v1/completions", &[], &long.to_string());
    let mut leaving = open(server.address, &sent);
    assert!(leaving.next_chunk().unwrap().is_some());
    drop(leaving);
    server.await_metric("cellar_requests_running{", 0.0);
    drop(server);
    let spans = collector.spans(&spans);
    let texts = spans
        .iter()
        .filter(|span| span.name == "text_completion stories");
    let texts: Vec<&Span> = texts.collect();
    assert_eq!(texts.len(), 3);
    let cached = |text| {
        attribute(text, "gen_ai.usage.cache_read.input_tokens")
            .as_i64()
            .unwrap()
    };
    assert_eq!(cached(texts[0]), 0);
    let n_prompt = attribute(texts[1], "gen_ai.usage.input_tokens")
        .as_i64()
        .unwrap();
    assert_eq!(cached(texts[1]), n_prompt - 1);
    assert_eq!(
        attribute(texts[2], "gen_ai.response.finish_reasons"),
        json!(["cancelled"])
    );
    assert!(children(&spans, texts[2]).is_empty());
    let codes = spans
        .iter()
        .filter(|span| span.name == "POST /v1/chat/completions");
    let codes: Vec<Value> = codes
        .map(|span| attribute(span, "http.response.status_code"))
        .collect();
    assert_eq!(codes, [json!(200), json!(200), json!(400)]);
}

#[test]
fn a_collector_that_is_gone_or_silent_changes_nothing() {
    let gone = {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}", listener.local_addr().unwrap())
    };
    let (server, spans) = start(&gone);
    let body = json!({"prompt": "One day", "max_tokens": 2});
    assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
    drop(server);
    spans.close();

    // One that takes a batch and never answers: what comes meanwhile is queued, then dropped.
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silent.local_addr().unwrap());
    let spans = Spans::export(Some(&endpoint)).unwrap();
    let report = RequestReport {
        id: "a".to_owned(),
        method: Method::POST,
        path: "/v1/completions".to_owned(),
        route: "/v1/completions".to_owned(),
        is_let_in: true,
        parent: None,
        status: Some(StatusCode::OK),
        reason: None,
        model: None,
        began: SystemTime::now(),
        took: Duration::ZERO,
        texts: Vec::new(),
    };
    let since = Instant::now();
    for _ in 0..20_000 {
        spans.ended(&report);
    }
    assert!(
        since.elapsed() < Duration::from_secs(8),
        "{:?}",
        since.elapsed()
    );
    // Its thread still waits for the answer.
    std::mem::forget(spans);
}

#[test]
fn an_endpoint_that_is_none_is_refused() {
    let error = Spans::export(Some("no endpoint")).unwrap_err().to_string();
    assert!(
        error.contains("no endpoint") || error.contains("URI"),
        "{error}"
    );
}
