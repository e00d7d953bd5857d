//! Requests and chat templates that are nearly right: values, members, bytes and heads of kept ones
//! are changed at random. Every request gets an answer in the shape of its API, none is the
//! server's fault, and nothing of them stays; every template is rendered or refused.
//!
//! `CELLAR_FUZZ_SECONDS=600` runs for as long, and `CELLAR_FUZZ_SEED` chooses what. A case that was
//! found goes into `tests/corpus`, which each run tries first as it is.

use std::time::{Duration, Instant};

use kv_contract::Random;
use model_core::chat_template::{ChatTemplate, GenerationPrompt, TemplateTokens};
use model_tests::http::{open, post, request};
use serde_json::{Map, Value, json};

use crate::support::{Server, Setup};

const REQUESTS: &str = include_str!("../corpus/requests.jsonl");
const TEMPLATES: &str = include_str!("../corpus/templates.jsonl");

/// Values that are of a wrong type, out of range, or strange.
fn odd_value(random: &mut Random) -> Value {
    let values = [
        json!(null),
        json!(true),
        json!(-1),
        json!(0),
        json!(1e308),
        json!(-0.0),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(""),
        json!("\u{0}\u{1b}[31m\u{202e}"),
        json!("a".repeat(5000)),
        json!("<|user|>"),
        json!([]),
        json!({}),
        json!([[[[[[[[[]]]]]]]]]),
        json!({"$ref": "#"}),
        json!({"type": "object", "additionalProperties": {"$ref": "#"}}),
        json!({"type": "string", "pattern": "(a*)*b{1000}"}),
        json!([null, 1, "a", {"a": []}]),
    ];
    values[random.below(values.len())].clone()
}

/// All places in a value: `/a/0/b`.
fn pointers(value: &Value, at: &str, found: &mut Vec<String>) {
    found.push(at.to_owned());
    match value {
        Value::Array(values) => {
            for (index, value) in values.iter().enumerate() {
                pointers(value, &format!("{at}/{index}"), found);
            }
        }
        Value::Object(members) => {
            for (name, value) in members {
                let name = name.replace('~', "~0").replace('/', "~1");
                pointers(value, &format!("{at}/{name}"), found);
            }
        }
        _ => {}
    }
}

/// Changes one place of a body.
fn change(body: &mut Value, others: &[Value], random: &mut Random) {
    let mut places = Vec::new();
    pointers(body, "", &mut places);
    let place = &places[random.below(places.len())];
    let other = &others[random.below(others.len())];
    let value = body.pointer_mut(place).unwrap();
    match (random.below(5), value) {
        (0, Value::Object(members)) => {
            let name = members.keys().nth(random.below(members.len())).cloned();
            name.map(|name| members.remove(&name));
        }
        (1, Value::Object(members)) => members.extend(other.as_object().unwrap().clone()),
        (2, Value::Array(values)) if values.len() < 64 => values.extend(values.clone()),
        (3, value) => {
            let mut places = Vec::new();
            pointers(other, "", &mut places);
            let place = &places[random.below(places.len())];
            *value = other.pointer(place).unwrap().clone();
        }
        (_, value) => *value = odd_value(random),
    }
}

/// Changes a few bytes.
fn damage(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..=random.below(3) {
        let at = random.below(bytes.len());
        match random.below(4) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, random.bits() as u8),
            2 if !bytes.is_empty() => bytes[at] = random.bits() as u8,
            _ => {
                let end = at + random.below(bytes.len() - at).min(40);
                let part = bytes[at..end].to_vec();
                bytes.splice(at..at, part);
            }
        }
    }
}

/// The time and the seed of a run.
struct Budget {
    until: Instant,
    random: Random,
}

impl Budget {
    fn of_run() -> Self {
        let number = |name: &str, usual: u64| {
            let given = std::env::var(name);
            given.map_or(usual, |given| given.parse().unwrap())
        };
        let seed = number("CELLAR_FUZZ_SEED", 1);
        println!("seed {seed}");
        Self {
            until: Instant::now() + Duration::from_secs(number("CELLAR_FUZZ_SECONDS", 4)),
            random: Random::new(seed),
        }
    }

    fn is_spent(&self) -> bool {
        Instant::now() >= self.until
    }
}

struct Case {
    path: String,
    body: Value,
}

fn cases() -> Vec<Case> {
    let cases = REQUESTS.lines().map(|line| {
        let mut case: Value = serde_json::from_str(line).unwrap();
        Case {
            path: case["path"].as_str().unwrap().to_owned(),
            body: case["body"].take(),
        }
    });
    cases.collect()
}

/// An answer is a success, or an error in the shape of its API that is not the server's fault.
#[track_caller]
fn assert_answered(path: &str, status: u16, body: &str, sent: &str) {
    if status == 200 {
        return;
    }
    let about = || format!("{path} {status}: {body}\nfor {sent}");
    // 501: what the model cannot do, as embeddings.
    assert!(matches!(status, 400..=499 | 501), "{}", about());
    let answer: Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{}", about()));
    let message = if path.starts_with("/api/") {
        &answer["error"]
    } else {
        &answer["error"]["message"]
    };
    let is_said = message.as_str().is_some_and(|message| !message.is_empty());
    assert!(is_said, "{}", about());
}

fn small_server() -> Server {
    let setup = Setup {
        n_ctx: 256,
        has_gap_marks: true,
        ..Setup::default()
    };
    setup.start()
}

#[test]
fn requests_that_are_nearly_right_are_answered() {
    let server = small_server();
    let cases = cases();
    let bodies: Vec<Value> = cases.iter().map(|case| case.body.clone()).collect();
    let ask = |case: &Case, body: &Value| {
        let reply = post(server.address, &case.path, body);
        assert_answered(&case.path, reply.status, &reply.body, &body.to_string());
        reply.status
    };
    cases.iter().for_each(|case| {
        ask(case, &case.body);
    });
    let mut budget = Budget::of_run();
    let mut counts = Map::new();
    while !budget.is_spent() {
        let random = &mut budget.random;
        let case = &cases[random.below(cases.len())];
        let mut body = case.body.clone();
        for _ in 0..=random.below(3) {
            change(&mut body, &bodies, random);
        }
        let status = ask(case, &body).to_string();
        let count = counts.entry(status).or_insert(json!(0));
        *count = json!(count.as_u64().unwrap() + 1);
    }
    println!("answers by status: {counts:?}");
    assert!(counts.contains_key("200") && counts.contains_key("400"));
    assert_nothing_stays(&server);
}

#[test]
fn damaged_requests_end() {
    let server = small_server();
    let (cases, mut budget) = (cases(), Budget::of_run());
    let mut n = 0;
    while !budget.is_spent() {
        let random = &mut budget.random;
        let case = &cases[random.below(cases.len())];
        let mut body = case.body.to_string().into_bytes();
        damage(&mut body, random);
        let body = String::from_utf8_lossy(&body);
        let mut sent = request("POST", &case.path, &[], &body).into_bytes();
        match random.below(2) {
            // JSON that is damaged.
            0 => {
                let reply = open(server.address, std::str::from_utf8(&sent).unwrap()).finish();
                assert_answered(&case.path, reply.status, &reply.body, &body);
            }
            // A head or a length that is damaged: it may be no HTTP, or end early. The connection
            // ends.
            _ => {
                damage(&mut sent, random);
                let answer = exchange(&server, &sent);
                let is_http = answer.is_empty() || answer.starts_with(b"HTTP/1.");
                assert!(is_http, "{answer:?} for {sent:?}");
                assert!(!answer.starts_with(b"HTTP/1.1 500"), "{sent:?}");
            }
        }
        n += 1;
    }
    println!("{n} damaged requests");
    assert!(n > 0);
    assert_nothing_stays(&server);
}

/// Sends bytes, says that no more come, and reads until the connection ends.
fn exchange(server: &Server, sent: &[u8]) -> Vec<u8> {
    use std::io::{Read, Write};
    let mut stream = model_tests::http::send_raw(server.address, b"").unwrap();
    // The server may hang up before all is sent.
    let _gone = stream.write_all(sent);
    let _gone = stream.shutdown(std::net::Shutdown::Write);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => answer,
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => answer,
        Err(error) => panic!("{error} for {:?}", String::from_utf8_lossy(sent)),
    }
}

fn assert_nothing_stays(server: &Server) {
    server.await_metric("cellar_requests_running{", 0.0);
    server.await_metric("cellar_requests_waiting{", 0.0);
    let body = json!({"prompt": "One day", "max_tokens": 3});
    assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
}

#[test]
fn templates_that_are_nearly_right_are_rendered_or_refused() {
    let templates: Vec<String> = TEMPLATES
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let lists: Vec<Value> = cases()
        .into_iter()
        .filter_map(|mut case| case.body.get_mut("messages").map(Value::take))
        .collect();
    let mut budget = Budget::of_run();
    let (mut n_rendered, mut n_refused, mut n_wrong) = (0, 0, 0);
    while !budget.is_spent() {
        let random = &mut budget.random;
        let mut source = templates[random.below(templates.len())]
            .clone()
            .into_bytes();
        if random.below(8) > 0 {
            damage(&mut source, random);
        }
        let mut messages = lists[random.below(lists.len())].clone();
        if random.below(2) == 0 {
            change(&mut messages, &[json!({"role": "user"})], random);
        }
        let Ok(template) = ChatTemplate::new(&String::from_utf8_lossy(&source)) else {
            n_wrong += 1;
            continue;
        };
        let messages = messages.as_array().cloned().unwrap_or_default();
        let mut extra = Map::new();
        extra.insert("tools".to_owned(), odd_value(random));
        let tokens = TemplateTokens::default();
        let rendered = template.render_json(&messages, &extra, GenerationPrompt::Add, tokens);
        match rendered {
            Ok(_) => n_rendered += 1,
            Err(error) => {
                assert!(!error.to_string().is_empty());
                n_refused += 1;
            }
        }
    }
    println!("{n_rendered} rendered, {n_refused} refused, {n_wrong} no templates");
    assert!(n_rendered > 0 && n_refused > 0 && n_wrong > 0);
}
