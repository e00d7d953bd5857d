//! Files of requests over a socket.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cellar_server::{App, ServerConfig};
use model_tests::http::{Response, get, open, post, request};
use serde_json::{Value, json};

use crate::support::{Alone, Server, Setup};

/// The requests of a batch as lines.
fn lines(requests: &[Value]) -> String {
    let lines = requests.iter().enumerate().map(|(at, body)| {
        let line = json!({
            "custom_id": format!("line-{at}"), "method": "POST", "url": "/v1/completions", "body": body,
        });
        format!("{line}\n")
    });
    lines.collect()
}

fn send(server: &Server, method: &str, path: &str, key: &str) -> Response {
    let key = format!("Bearer {key}");
    let sent = request(method, path, &[("Authorization", &key)], "{}");
    open(server.address, &sent).finish()
}

fn upload_with(server: &Server, text: &str, key: &str) -> Response {
    let body = format!(
        "--XX\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--XX\r\n\
         Content-Disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\
         Content-Type: application/octet-stream\r\n\r\n{text}\r\n--XX--\r\n"
    );
    let key = format!("Bearer {key}");
    let headers = [
        ("Content-Type", "multipart/form-data; boundary=XX"),
        ("Authorization", &key),
    ];
    open(
        server.address,
        &request("POST", "/v1/files", &headers, &body),
    )
    .finish()
}

fn upload(server: &Server, text: &str) -> String {
    let reply = upload_with(server, text, "none");
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()["id"].as_str().unwrap().to_owned()
}

/// Begins a batch, and waits for its end.
fn run(server: &Server, text: &str) -> Value {
    let body = json!({
        "input_file_id": upload(server, text), "endpoint": "/v1/completions",
        "completion_window": "24h", "metadata": {"a": "b"},
    });
    let reply = post(server.address, "/v1/batches", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    finished(server, reply.json()["id"].as_str().unwrap())
}

fn finished(server: &Server, id: &str) -> Value {
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        let batch = get(server.address, &format!("/v1/batches/{id}")).json();
        if !["in_progress", "cancelling"].contains(&batch["status"].as_str().unwrap()) {
            return batch;
        }
        assert!(Instant::now() < until, "{batch}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// The lines of a file.
fn content(server: &Server, id: &Value) -> Vec<Value> {
    let path = format!("/v1/files/{}/content", id.as_str().unwrap());
    let text = get(server.address, &path).body;
    let lines = text.lines().map(|line| serde_json::from_str(line).unwrap());
    lines.collect()
}

#[test]
fn the_lines_of_a_batch_are_answered_as_alone_and_in_order() {
    let mut setup = Setup {
        n_seqs: 2,
        ..Setup::default()
    };
    // The queue is full most of the time.
    setup.service.max_queued = 1;
    let server = setup.start();
    let prompts: Vec<String> = (0..12)
        .map(|n| format!("Once there were {n} cats"))
        .collect();
    let mut requests: Vec<Value> = prompts
        .iter()
        .map(|prompt| json!({"prompt": prompt, "temperature": 0, "max_tokens": 10}))
        .collect();
    requests.push(json!({"prompt": "wrong", "temperature": -1}));
    let batch = run(&server, &lines(&requests));
    assert_eq!(batch["status"], "completed", "{batch}");
    assert_eq!(
        batch["request_counts"],
        json!({"total": 13, "completed": 12, "failed": 1})
    );
    assert_eq!(batch["metadata"], json!({"a": "b"}));
    let answers = content(&server, &batch["output_file_id"]);
    assert_eq!(answers.len(), 12);
    let alone = Alone::new();
    for (at, (answer, prompt)) in answers.iter().zip(&prompts).enumerate() {
        assert_eq!(answer["custom_id"], format!("line-{at}"));
        assert_eq!(answer["response"]["status_code"], 200);
        let body = &answer["response"]["body"];
        assert_eq!(
            body["choices"][0]["text"],
            alone.greedy(prompt, 10),
            "{prompt}"
        );
        assert_eq!(body["object"], "text_completion");
    }
    let errors = content(&server, &batch["error_file_id"]);
    assert_eq!(errors.len(), 1);
    assert_eq!(errors[0]["custom_id"], "line-12");
    assert_eq!(errors[0]["response"]["status_code"], 400);
    let error = &errors[0]["response"]["body"]["error"];
    assert_eq!(error["param"], "temperature");
    let list = get(server.address, "/v1/batches").json();
    assert_eq!(list["data"], json!([batch]));
}

#[test]
fn a_file_that_is_wrong_fails_its_batch_with_the_lines() {
    let server = Setup::default().start();
    let batch = run(&server, "{\"custom_id\": \"a\", \"body\": {}}\nnonsense\n");
    assert_eq!(batch["status"], "failed");
    assert_eq!(batch["errors"]["data"][0]["line"], 2, "{batch}");
    let refused = |body: Value, status: u16, reason: &str| {
        let reply = post(server.address, "/v1/batches", &body);
        assert_eq!(reply.status, status, "{}", reply.body);
        assert!(reply.body.contains(reason), "{}", reply.body);
    };
    let file = upload(&server, "{}");
    refused(
        json!({"input_file_id": file, "endpoint": "/v1/files"}),
        400,
        "batches are for",
    );
    refused(
        json!({"input_file_id": "file-0", "endpoint": "/v1/completions"}),
        404,
        "there is no file 'file-0'",
    );
    let no_form = post(server.address, "/v1/files", &json!({"file": "a"}));
    assert_eq!(no_form.status, 400);
    assert!(
        no_form.body.contains("multipart/form-data"),
        "{}",
        no_form.body
    );
}

#[test]
fn a_batch_can_be_cancelled() {
    let server = Setup {
        n_seqs: 1,
        ..Setup::default()
    }
    .start();
    let requests = vec![json!({"prompt": "Once", "max_tokens": 400, "ignore_eos": true}); 40];
    let body = json!({
        "input_file_id": upload(&server, &lines(&requests)), "endpoint": "/v1/completions",
    });
    let id = post(server.address, "/v1/batches", &body).json()["id"].clone();
    let path = format!("/v1/batches/{}/cancel", id.as_str().unwrap());
    let cancelled = post(server.address, &path, &json!({})).json();
    assert_eq!(cancelled["status"], "cancelling", "{cancelled}");
    let batch = finished(&server, id.as_str().unwrap());
    assert_eq!(batch["status"], "cancelled");
    assert!(
        batch["request_counts"]["completed"].as_u64() < Some(40),
        "{batch}"
    );
    assert_eq!(
        post(server.address, "/v1/batches/x/cancel", &json!({})).status,
        404
    );
}

#[test]
fn a_key_has_its_own_files_and_batches() {
    let server = Setup::with_keys("first\nsecond").start();
    let file = upload_with(&server, "{}", "first").json();
    let id = file["id"].as_str().unwrap();
    assert_eq!(
        (&file["bytes"], &file["purpose"]),
        (&json!(2), &json!("batch"))
    );
    assert_eq!(file["filename"], "in.jsonl");
    for (method, path, status) in [
        ("GET", format!("/v1/files/{id}"), 404),
        ("GET", format!("/v1/files/{id}/content"), 404),
        ("DELETE", format!("/v1/files/{id}"), 404),
        ("GET", "/v1/files".to_owned(), 200),
    ] {
        let other = send(&server, method, &path, "second");
        assert_eq!(other.status, status, "{path}");
        assert!(!other.body.contains("in.jsonl"), "{}", other.body);
    }
    assert_eq!(
        send(&server, "GET", "/v1/files", "first").json()["data"],
        json!([file])
    );
    let path = format!("/v1/files/{id}");
    let content = send(&server, "GET", &format!("{path}/content"), "first");
    assert_eq!(content.body, "{}");
    assert_eq!(
        send(&server, "DELETE", &path, "first").json()["deleted"],
        true
    );
    assert_eq!(send(&server, "GET", &path, "first").status, 404);
}

/// A server whose files are in a directory, of a setup with an end that waits for nothing.
fn start_in(dir: &Path, mut setup: Setup) -> Server {
    setup.server.drain = Duration::ZERO;
    let model = setup.served("stories", &[]);
    let app = App::new(vec![model], setup.server);
    app.keep_files_in(dir).unwrap();
    Server::start(app)
}

fn ids(list: &Value) -> Vec<&str> {
    let data = list["data"].as_array().unwrap();
    data.iter().map(|one| one["id"].as_str().unwrap()).collect()
}

#[test]
fn files_and_batches_outlive_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let server = start_in(dir.path(), Setup::default());
    let request = json!({"prompt": "Once upon a time", "temperature": 0, "max_tokens": 4});
    let batch = run(&server, &lines(&[request]));
    assert_eq!(batch["status"], "completed", "{batch}");
    let other = upload(&server, "other");
    let list = |server: &Server| get(server.address, "/v1/files").json();
    let before = list(&server);
    assert_eq!((ids(&before).len(), ids(&before)[0]), (3, other.as_str()));
    let answers = content(&server, &batch["output_file_id"]);
    let taken = App::new(Vec::new(), ServerConfig::default()).keep_files_in(dir.path());
    let taken = taken.unwrap_err().to_string();
    assert!(taken.contains("another server uses it"), "{taken}");
    server.join();

    let server = start_in(dir.path(), Setup::default());
    assert_eq!(list(&server), before);
    let batches = get(server.address, "/v1/batches").json();
    assert_eq!(batches["data"], json!([batch]));
    assert_eq!(content(&server, &batch["output_file_id"]), answers);
    let path = format!("/v1/files/{}", batch["input_file_id"].as_str().unwrap());
    assert_eq!(send(&server, "DELETE", &path, "none").status, 200);
    // Lists begin with the newest file, of clients and of batches alike.
    let last = upload(&server, "last");
    let page = get(server.address, "/v1/files?limit=2").json();
    assert_eq!(ids(&page), [last.as_str(), &other]);
    assert_eq!(
        (&page["has_more"], &page["last_id"]),
        (&json!(true), &json!(other))
    );
    // A damaged file is an error that names it.
    let kept = dir.path().join(format!("{other}.file"));
    let mut bytes = std::fs::read(&kept).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&kept, bytes).unwrap();
    let damaged = get(server.address, &format!("/v1/files/{other}/content"));
    assert_eq!(damaged.status, 500);
    assert!(
        damaged.body.contains(&other) && damaged.body.contains("checksum"),
        "{}",
        damaged.body
    );
    let body = json!({"input_file_id": other, "endpoint": "/v1/completions"});
    assert_eq!(post(server.address, "/v1/batches", &body).status, 500);
    server.join();

    let server = start_in(dir.path(), Setup::default());
    let output = batch["output_file_id"].as_str().unwrap();
    assert_eq!(ids(&list(&server)), [last.as_str(), output]);
    assert!(kept.exists(), "it stays for who can mend it");
}

#[test]
fn a_batch_that_was_not_over_goes_on_with_the_next_server() {
    let dir = tempfile::tempdir().unwrap();
    let is_held = Arc::new(AtomicBool::new(true));
    let setup = Setup {
        is_held: Some(Arc::clone(&is_held)),
        n_seqs: 1,
        ..Setup::default()
    };
    let mut server = start_in(dir.path(), setup);
    let prompts = ["Once", "One day", "The sun", "Tom", "Lily", "A cat"];
    let requests =
        prompts.map(|prompt| json!({"prompt": prompt, "temperature": 0, "max_tokens": 6}));
    let begin = |text: &str| {
        let body = json!({"input_file_id": upload(&server, text), "endpoint": "/v1/completions"});
        post(server.address, "/v1/batches", &body).json()["id"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let goes_on = begin(&lines(&requests));
    let cancelled = begin(&lines(&requests));
    post(
        server.address,
        &format!("/v1/batches/{cancelled}/cancel"),
        &json!({}),
    );
    server.stop();
    is_held.store(false, Ordering::Release);
    server.join();

    let server = start_in(dir.path(), Setup::default());
    let batch = finished(&server, &goes_on);
    assert_eq!(batch["status"], "completed", "{batch}");
    let counts = json!({"total": 6, "completed": 6, "failed": 0});
    assert_eq!(batch["request_counts"], counts);
    let alone = Alone::new();
    for (answer, prompt) in content(&server, &batch["output_file_id"])
        .iter()
        .zip(prompts)
    {
        let text = &answer["response"]["body"]["choices"][0]["text"];
        assert_eq!(*text, alone.greedy(prompt, 6), "{prompt}");
    }
    assert_eq!(finished(&server, &cancelled)["status"], "cancelled");
    server.join();

    // Its file is gone when it is to go on.
    let kept = dir.path().join(format!("{goes_on}.batch"));
    let mut setup = Setup::default();
    is_held.store(true, Ordering::Release);
    setup.is_held = Some(Arc::clone(&is_held));
    let mut server = start_in(dir.path(), setup);
    let file = upload(&server, &lines(&requests));
    let body = json!({"input_file_id": file, "endpoint": "/v1/completions"});
    let id = post(server.address, "/v1/batches", &body).json()["id"]
        .as_str()
        .unwrap()
        .to_owned();
    server.stop();
    is_held.store(false, Ordering::Release);
    server.join();
    assert!(kept.exists());
    std::fs::remove_file(dir.path().join(format!("{file}.file"))).unwrap();
    let server = start_in(dir.path(), Setup::default());
    let batch = finished(&server, &id);
    assert_eq!(batch["status"], "failed");
    let message = batch["errors"]["data"][0]["message"].as_str().unwrap();
    assert!(message.contains(&file), "{batch}");
}

#[test]
fn files_in_a_directory_keep_to_their_keys() {
    let dir = tempfile::tempdir().unwrap();
    let start = |keys: &str| start_in(dir.path(), Setup::with_keys(keys));
    let server = start("first\nsecond");
    let file = upload_with(&server, "{}", "first").json();
    server.join();
    // Its limits are others, and it is not the first any more.
    let server = start("second\nfirst weight=2");
    let list = |key: &str| send(&server, "GET", "/v1/files", key).json()["data"].clone();
    assert_eq!(list("first"), json!([file]));
    assert_eq!(list("second"), json!([]));
}
