//! Files of requests over a socket.

use std::time::{Duration, Instant};

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
