//! Texts that branch off from another request's, by its id.

use model_tests::http::{Response, open, post, request};
use serde_json::{Value, json};

use crate::support::{Server, Setup};

const PROMPT: &str = "Once upon a time there was a little girl. She had a";
const SUFFIX: &str = " But then";

/// Sends a body with an id of the request, and perhaps a key.
fn send(id: &str, key: Option<&str>, body: &Value) -> String {
    let key = key.map(|key| format!("Bearer {key}"));
    let mut headers = vec![("X-Request-Id", id)];
    headers.extend(key.iter().map(|key| ("Authorization", &**key)));
    request("POST", "/completion", &headers, &body.to_string())
}

fn branch(server: &Server, fork_of: &str, prompt: &Value) -> Response {
    let body = json!({"fork_of": fork_of, "prompt": prompt, "temperature": 0, "n_predict": 9});
    post(server.address, "/completion", &body)
}

/// The tokens of a text that begins a prompt.
fn prompt_tokens(server: &Server, text: &str) -> Vec<Value> {
    tokens_of(server, &json!({"content": text, "add_special": true}))
}

/// The tokens of a text that goes on.
fn tokens(server: &Server, text: &str) -> Vec<Value> {
    tokens_of(server, &json!({"content": text}))
}

fn tokens_of(server: &Server, body: &Value) -> Vec<Value> {
    let answer = post(server.address, "/tokenize", body).json();
    answer["tokens"].as_array().unwrap().clone()
}

/// What these tokens go on with in a server that has seen nothing.
fn alone(prompt: &[Value]) -> Value {
    let server = Setup::default().start();
    let body = json!({"prompt": prompt, "temperature": 0, "n_predict": 9});
    post(server.address, "/completion", &body).json()["content"].clone()
}

#[test]
fn a_running_text_is_branched_from_without_computing_it_again() {
    let server = Setup::default().start();
    let long = json!({"prompt": PROMPT, "temperature": 0, "n_predict": 120, "ignore_eos": true,
                      "stream": true, "return_tokens": true});
    let mut running = open(server.address, &send("plan-1", None, &long));
    assert_eq!(running.status, 200);
    let mut events = running.next_chunk().unwrap().unwrap();
    events += &running.next_chunk().unwrap().unwrap();

    let reply = branch(&server, "plan-1", &json!(SUFFIX));
    assert_eq!(reply.status, 200, "{}", reply.body);
    let branched = reply.json();
    while let Some(chunk) = running.next_chunk().unwrap() {
        events += &chunk;
    }
    let events = events
        .lines()
        .filter_map(|line| line.strip_prefix("data: "));
    let events: Vec<Value> = events
        .map(|event| serde_json::from_str(event).unwrap())
        .collect();
    let text: String = events
        .iter()
        .filter_map(|e| e["content"].as_str())
        .collect();
    // The text that it left went on as it would have.
    let mut undisturbed = long;
    undisturbed["stream"] = json!(false);
    let other = Setup::default().start();
    let whole_text = post(other.address, "/completion", &undisturbed).json();
    assert_eq!(text, whole_text["content"]);
    let written = whole_text["tokens"].as_array().unwrap();

    // Where it branched off is what the number of its prompt's tokens says.
    let (begun, suffix) = (prompt_tokens(&server, PROMPT), tokens(&server, SUFFIX));
    let n_prompt = branched["tokens_evaluated"].as_u64().unwrap() as usize;
    let n_written = n_prompt - begun.len() - suffix.len();
    assert!((1..=written.len()).contains(&n_written), "{n_written}");
    let whole = [&begun[..], &written[..n_written], &suffix[..]].concat();
    assert_eq!(branched["content"], alone(&whole));
    // The last token of what there was may not be computed yet.
    let n_cached = branched["tokens_cached"].as_u64().unwrap() as usize;
    assert!(n_cached + 1 >= begun.len() + n_written, "{branched}");
}

#[test]
fn a_text_that_has_ended_is_branched_from_several_times() {
    let server = Setup::default().start();
    let body = json!({"prompt": PROMPT, "temperature": 0, "n_predict": 12, "return_tokens": true});
    let first = open(server.address, &send("a", None, &body))
        .finish()
        .json();
    let mut whole = prompt_tokens(&server, PROMPT);
    whole.extend(first["tokens"].as_array().unwrap().clone());
    for suffix in [SUFFIX, " The end."] {
        let mut branch_tokens = whole.clone();
        branch_tokens.extend(tokens(&server, suffix));
        let text = alone(&branch_tokens);
        for prompt in [json!(suffix), json!(tokens(&server, suffix))] {
            let branched = branch(&server, "a", &prompt).json();
            assert_eq!(branched["content"], text);
        }
    }
    // Without an id of the client's, the one of the answer is taken.
    let reply = post(server.address, "/completion", &body);
    let id = reply.header("x-request-id").unwrap();
    assert_eq!(branch(&server, id, &json!(SUFFIX)).status, 200);
}

#[test]
fn what_cannot_be_branched_from_is_refused() {
    let mut setup = Setup::with_keys("first\nsecond");
    setup.key = Some("first".to_owned());
    let server = setup.start();
    let body = json!({"prompt": PROMPT, "n_predict": 3});
    let reply = open(server.address, &send("mine", Some("first"), &body)).finish();
    assert_eq!(reply.status, 200);
    let ask = |key: &str, fork_of: &str, prompt: Value| {
        let body = json!({"fork_of": fork_of, "prompt": prompt, "n_predict": 1});
        let reply = open(server.address, &send("other", Some(key), &body)).finish();
        let message = reply.json()["error"]["message"].as_str().map(str::to_owned);
        (reply.status, message.unwrap_or_default())
    };
    let (status, message) = ask("second", "mine", json!("x"));
    assert_eq!(status, 404, "{message}");
    let (status, message) = ask("first", "no such", json!("x"));
    assert!(status == 404 && message.contains("'no such'"), "{message}");
    let (status, message) = ask("first", "mine", json!(["x", "y"]));
    assert!(
        status == 400 && message.contains("one 'prompt'"),
        "{message}"
    );
    assert_eq!(ask("first", "mine", json!("x")).0, 200);
}
