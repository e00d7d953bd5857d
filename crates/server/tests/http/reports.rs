//! Reports of requests: one for each, whatever became of it, under the id that its answer has.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cellar_server::{ObserveRequests, RequestReport};
use model_tests::http::{get, open, post, request};
use serde_json::{Value, json};

use crate::support::{Server, Setup};

#[derive(Debug, Default)]
struct Kept(Mutex<Vec<RequestReport>>);

impl ObserveRequests for Kept {
    fn ended(&self, report: &RequestReport) {
        self.0.lock().unwrap().push(report.clone());
    }
}

impl Kept {
    /// The report of the request with this id, once it has ended.
    #[track_caller]
    fn of(&self, id: &str) -> RequestReport {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let kept = self.0.lock().unwrap();
            if let Some(report) = kept.iter().find(|report| report.id == id) {
                return report.clone();
            }
            assert!(Instant::now() < until, "no report of {id}: {kept:?}");
            drop(kept);
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn start(mut setup: Setup) -> (Server, Arc<Kept>) {
    let kept = Arc::<Kept>::default();
    setup.server.observers = vec![Arc::clone(&kept) as Arc<dyn ObserveRequests>];
    (setup.start(), kept)
}

/// The report of a request with this body, as JSON and as a line.
fn report(server: &Server, kept: &Kept, path: &str, body: &Value) -> (Value, String) {
    let id = format!("test-{}", kept.0.lock().unwrap().len());
    let headers = [("X-Request-Id", id.as_str())];
    let sent = request("POST", path, &headers, &body.to_string());
    let answer = open(server.address, &sent).finish();
    assert_eq!(answer.header("x-request-id"), Some(id.as_str()));
    let report = kept.of(&id);
    assert_eq!(report.json()["status"], answer.status);
    (report.json(), report.to_string())
}

#[test]
fn a_text_is_reported_with_its_tokens() {
    let (server, kept) = start(Setup::default());
    let prompt = "Once upon a time there was a little girl. ".repeat(3);
    let body = json!({"prompt": prompt, "max_tokens": 7, "ignore_eos": true});
    let answer = post(server.address, "/v1/completions", &body).json();
    let n_prompt = answer["usage"]["prompt_tokens"].clone();
    let streamed = json!({"prompt": prompt, "max_tokens": 7, "ignore_eos": true, "stream": true});
    let (again, line) = report(&server, &kept, "/v1/completions", &streamed);
    assert_eq!(again["model"], "stories");
    assert_eq!(again["prompt_tokens"], n_prompt);
    assert!(again["cached_tokens"].as_u64().unwrap() > 10, "{again}");
    assert_eq!(again["generated_tokens"], 7);
    assert_eq!(again["end"], "length");
    assert_eq!(again.get("reason"), None);
    for part in [
        "POST /v1/completions 200 ",
        "model=stories",
        "generated=7 end=length",
    ] {
        assert!(line.contains(part), "{line}");
    }
    // No word of the text.
    assert!(!line.contains("Once") && !again.to_string().contains("Once"));
}

#[test]
fn what_is_refused_is_reported_with_the_reason() {
    let mut setup = Setup::default();
    setup.server.strict = true;
    let (server, kept) = start(setup);
    let none = json!({"model": "other", "prompt": "One day"});
    let wrong = json!({"model": "stories", "messages": "Hello"});
    for (path, body, status) in [
        ("/v1/completions", none, 404),
        ("/v1/chat/completions", wrong.clone(), 400),
        ("/v1/messages", wrong, 400),
        ("/v1/nowhere", json!({}), 404),
    ] {
        let answer = post(server.address, path, &body);
        let (json, line) = report(&server, &kept, path, &body);
        assert_eq!(json["status"], status, "{json}");
        let error = answer.json()["error"]["message"].clone();
        assert_eq!(json["reason"], error);
        assert!(line.ends_with(error.as_str().unwrap()), "{line}");
    }
    // A body that is read on a thread of its own, too.
    let large = json!({"model": "other", "prompt": "a ".repeat(50_000)});
    let (json, _) = report(&server, &kept, "/v1/completions", &large);
    assert!(
        json["reason"]
            .as_str()
            .unwrap()
            .contains("no model 'other'"),
        "{json}"
    );
}

#[test]
fn those_who_may_not_use_it_are_reported() {
    let (server, kept) = start(Setup::with_keys("secret"));
    let (json, _) = report(&server, &kept, "/v1/completions", &json!({"prompt": "a"}));
    assert_eq!(json["status"], 401);
    let report = kept.0.lock().unwrap().last().unwrap().clone();
    assert!(!report.is_let_in);
}

#[test]
fn ids_are_given_where_a_client_has_none_or_a_bad_one() {
    let (server, kept) = start(Setup::default());
    let mut given = Vec::new();
    let long = "a".repeat(129);
    for id in ["", "two words", long.as_str()] {
        let sent = request("GET", "/v1/models", &[("X-Request-Id", id)], "");
        let answer = open(server.address, &sent).finish();
        given.push(answer.header("x-request-id").unwrap().to_owned());
    }
    given.push(
        get(server.address, "/health")
            .header("x-request-id")
            .unwrap()
            .to_owned(),
    );
    for id in &given {
        assert!(id.starts_with("req_") && id.len() == 28, "{id}");
        assert_eq!(kept.of(id).status.unwrap(), 200);
    }
    given.sort();
    given.dedup();
    assert_eq!(given.len(), 4);
}
