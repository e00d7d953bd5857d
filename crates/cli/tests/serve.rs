//! `cellar serve`: the program over real sockets, next to the other commands.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)] // a panic is how a test fails

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::{failure, json as run_json, output, with_template};
use model_tests::fixture;
use model_tests::http::{get, open, post, request};
use serde_json::{Value, json};

/// A server of the program, which ends with the test.
pub(crate) struct Server {
    process: Child,
    pub(crate) address: SocketAddr,
    /// The lines up to that of the address.
    pub(crate) log: Vec<String>,
    /// The lines after it, so far.
    pub(crate) said: Arc<Mutex<Vec<String>>>,
}

impl Server {
    pub(crate) fn start(args: &[&str]) -> Self {
        Self::start_with(&[], args)
    }

    /// The same with these variables.
    pub(crate) fn start_with(variables: &[(&str, &str)], args: &[&str]) -> Self {
        let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
        command.args(["serve", "--port", "0"]).args(args);
        command.envs(variables.iter().copied());
        command
            .env_remove("CELLAR_LOG")
            .env("CUDA_VISIBLE_DEVICES", "");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped());
        let mut process = command.spawn().unwrap();
        let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
        let mut log = Vec::new();
        let line = loop {
            let line = lines.next().unwrap_or_else(|| panic!("{log:?}")).unwrap();
            log.push(line.clone());
            if line.contains(" served at http") {
                break line;
            }
        };
        let address = line.split("://").nth(1).unwrap();
        let address = address.split(' ').next().unwrap().parse().unwrap();
        let said = Arc::<Mutex<Vec<_>>>::default();
        let saying = Arc::clone(&said);
        // What it prints later must not fill the pipe.
        std::thread::spawn(move || {
            lines.for_each(|line| saying.lock().unwrap().push(line.unwrap()));
        });
        Self {
            process,
            address,
            log,
            said,
        }
    }

    /// A line that it prints after that of the address, once it is there.
    #[track_caller]
    pub(crate) fn await_line(&self, part: &str) -> String {
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let said = self.said.lock().unwrap();
            if let Some(line) = said.iter().find(|line| line.contains(part)) {
                return line.clone();
            }
            assert!(Instant::now() < until, "no '{part}' in {said:?}");
            drop(said);
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Ends it by a signal, and gives its exit code.
    #[cfg(unix)]
    pub(crate) fn signal(&self, name: &str) {
        let id = self.process.id().to_string();
        let sent = Command::new("kill")
            .args([&format!("-{name}"), &id])
            .status();
        assert!(sent.unwrap().success());
    }

    pub(crate) fn terminate(mut self) -> Option<i32> {
        self.signal("TERM");
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(status) = self.process.try_wait().unwrap() {
                return status.code();
            }
            assert!(Instant::now() < until, "it does not end");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ended = self.process.kill();
        let _status = self.process.wait();
    }
}

#[test]
fn texts_are_those_of_cellar_run() {
    let server = Server::start(&["-c", "600", "--parallel", "4", "--alias", "tiny"]);
    for (seed, temperature) in [(1, "0"), (2, "0.8"), (3, "1.3")] {
        let seed_text = seed.to_string();
        let args = [
            "run",
            "--raw",
            "--json",
            "Once upon a time",
            "-n",
            "24",
            "--temp",
            temperature,
        ];
        let alone = run_json(&[&args[..], &["--seed", &seed_text]].concat());
        let body = json!({
            "model": "tiny", "prompt": "Once upon a time", "max_tokens": 24, "seed": seed,
            "temperature": (temperature.parse::<f64>().unwrap()),
        });
        let answer = post(server.address, "/v1/completions", &body).json();
        assert_eq!(answer["choices"][0]["text"], alone["text"], "{alone}");
    }
    let models = get(server.address, "/v1/models").json();
    assert_eq!(models["data"][0]["id"], "tiny");
    #[cfg(unix)]
    assert_eq!(server.terminate(), Some(0));
}

/// A file that is written to, if only its time, is read again, and no request fails.
#[test]
fn a_model_whose_file_was_written_to_is_loaded_again() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("tiny.gguf");
    std::fs::copy(crate::support::model(), &path).unwrap();
    let server = Server::start(&["-m", &path.display().to_string(), "-c", "64"]);
    let body = json!({"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0});
    let text = || {
        let answer = post(server.address, "/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["choices"][0]["text"].clone()
    };
    let n_loads = || {
        let metrics = get(server.address, "/metrics").body;
        let mut lines = metrics.lines();
        let line = lines.find(|line| line.starts_with("cellar_model_loads_total{"));
        line.and_then(|line| line.rsplit(' ').next())
            .unwrap()
            .to_owned()
    };
    let first = text();
    assert_eq!(n_loads(), "1");
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    let later = file.metadata().unwrap().modified().unwrap() + Duration::from_secs(5);
    file.set_modified(later).unwrap();
    drop(file);
    assert_eq!(text(), first);
    assert_eq!(n_loads(), "2");
    assert_eq!(text(), first);
    assert_eq!(n_loads(), "2", "once is enough");
}

#[test]
fn chats_use_the_template_of_the_model_or_of_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(
        &dir,
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}",
    );
    let body = json!({"messages": [{"role": "user", "content": "Hello"}]});
    let prompt = |server: &Server| post(server.address, "/apply-template", &body).json();
    let server = Server::start(&["-m", &model]);
    assert_eq!(prompt(&server)["prompt"], "[user] Hello");
    assert_eq!(
        get(server.address, "/v1/models").json()["data"][0]["id"],
        "chat"
    );
    let file = dir.path().join("template.jinja");
    std::fs::write(&file, "{{ messages[0].content }}!").unwrap();
    let server = Server::start(&["-m", &model, "--chat-template", file.to_str().unwrap()]);
    assert_eq!(prompt(&server)["prompt"], "Hello!");
}

#[test]
fn keys_of_a_file_open_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys");
    std::fs::write(&file, "# mine\nsecret\n").unwrap();
    let server = Server::start(&[
        "--host",
        "0.0.0.0",
        "--api-key-file",
        file.to_str().unwrap(),
    ]);
    let address = SocketAddr::from(([127, 0, 0, 1], server.address.port()));
    assert_eq!(get(address, "/v1/models").status, 401);
    let key = [("Authorization", "Bearer secret"), ("Host", "any.example")];
    let reply = open(address, &request("GET", "/v1/models", &key, "")).finish();
    assert_eq!(reply.status, 200);
}

#[test]
fn encoders_give_the_vectors_of_cellar_embed() {
    let model = fixture("encoders").join("bert_tiny").display().to_string();
    let texts = ["How is the weather today?", "Is it raining?"];
    let (expected, _) = output(&["embed", "-m", &model, texts[0], texts[1]]);
    let expected: Vec<Vec<f64>> = serde_json::from_str(&expected).unwrap();
    let server = Server::start(&["-m", &model]);
    let answer = post(server.address, "/v1/embeddings", &json!({"input": texts})).json();
    for (at, vector) in expected.iter().enumerate() {
        let data = &answer["data"][at];
        assert_eq!(data["index"], at);
        let given = data["embedding"].as_array().unwrap();
        assert_eq!(given.len(), vector.len());
        let pairs = given.iter().zip(vector);
        assert!(
            pairs
                .into_iter()
                .all(|(a, b)| (a.as_f64().unwrap() - b).abs() < 1e-6)
        );
    }
    assert!(answer["usage"]["prompt_tokens"].as_u64().unwrap() > 4);
    let base64 = json!({"input": texts[0], "encoding_format": "base64"});
    let text = post(server.address, "/v1/embeddings", &base64).json();
    let text = text["data"][0]["embedding"].as_str().unwrap().to_owned();
    assert_eq!(text.len(), (expected[0].len() * 4).div_ceil(3) * 4);
    let long = json!({"input": ["a", "word ".repeat(2000)]});
    let error = post(server.address, "/v1/embeddings", &long);
    assert_eq!(error.status, 400);
    assert_eq!(error.json()["error"]["param"], "input[1]");
    assert_eq!(error.json()["error"]["code"], "context_length_exceeded");
    let chat = json!({"messages": [{"role": "user", "content": "Hello"}]});
    let error = post(server.address, "/v1/chat/completions", &chat);
    assert_eq!(error.status, 400);
    assert!(error.body.contains("/v1/embeddings"), "{}", error.body);
}

#[test]
fn rerankers_give_the_scores_of_cellar_rerank() {
    let model = fixture("encoders")
        .join("bert_rerank_tiny")
        .display()
        .to_string();
    let documents = [
        "It is cold.",
        "Press escape, then type :q!",
        "Vim is an editor.",
    ];
    let query = "How do I exit vim?";
    let args = ["rerank", "--json", "-m", &model, "--query", query];
    let (expected, _) = output(&[&args[..], &documents[..]].concat());
    let expected: Vec<Value> = serde_json::from_str(&expected).unwrap();
    let server = Server::start(&["-m", &model]);
    let body =
        json!({"query": query, "documents": documents, "return_documents": true, "top_n": 2});
    let answer = post(server.address, "/v1/rerank", &body).json();
    let results = answer["results"].as_array().unwrap();
    assert_eq!(results.len(), 2);
    for (given, expected) in results.iter().zip(&expected) {
        assert_eq!(given["index"], expected["index"]);
        assert_eq!(given["document"]["text"], expected["document"]);
        let [a, logit] =
            [&given["relevance_score"], &expected["score"]].map(|x| x.as_f64().unwrap());
        let b = 1.0 / (1.0 + (-logit).exp());
        assert!((a - b).abs() < 1e-6, "{a}, not {b}");
    }
}

#[cfg(unix)]
#[test]
fn a_socket_serves_its_user_alone() {
    use std::io::{Read, Write};
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixListener, UnixStream};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    // A socket without a listener is replaced.
    drop(UnixListener::bind(&path).unwrap());
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
    command.args(["serve", "--socket"]).arg(&path);
    command
        .env("CUDA_VISIBLE_DEVICES", "")
        .stderr(Stdio::piped());
    let mut process = command.spawn().unwrap();
    let mut lines = BufReader::new(process.stderr.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert!(line.contains(path.to_str().unwrap()), "{line}");
    let server = Server {
        process,
        address: SocketAddr::from(([127, 0, 0, 1], 1)),
        log: Vec::new(),
        said: Arc::default(),
    };
    let mode = std::fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let mut stream = UnixStream::connect(&path).unwrap();
    let head = "GET /health HTTP/1.1\r\nHost: any\r\nConnection: close\r\n\r\n";
    stream.write_all(head.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    assert!(
        reply.starts_with("HTTP/1.1 200") && reply.ends_with("{\"status\":\"ok\"}"),
        "{reply}"
    );
    let (code, message) = failure(&["serve", "--socket", path.to_str().unwrap()]);
    assert_eq!(code, 1, "{message}");
    assert_eq!(server.terminate(), Some(0));
    assert!(!path.exists());
}

/// How many tokens of a prompt were cached, and the text.
#[cfg(unix)]
fn continued(server: &Server, prompt: &str, key: &str) -> (u64, String) {
    let body = json!({"prompt": prompt, "max_tokens": 12, "temperature": 0}).to_string();
    let key = format!("Bearer {key}");
    let headers = [("Authorization", key.as_str())];
    let reply = open(
        server.address,
        &request("POST", "/v1/completions", &headers, &body),
    );
    let answer = reply.finish().json();
    let cached = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
    let text = answer["choices"][0]["text"].as_str().unwrap();
    (cached.as_u64().unwrap_or(0), text.to_owned())
}

#[cfg(unix)]
#[test]
fn cached_prefixes_outlive_the_server() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "first\nsecond\n").unwrap();
    let cache = dir.path().join("cache");
    let args = |n_ctx: &'static str, more: &[&'static str]| {
        let own = [
            "--save-cache",
            cache.to_str().unwrap(),
            "--api-key-file",
            keys.to_str().unwrap(),
        ];
        let sizes = ["-c", n_ctx, "--parallel", "2"];
        let args = own.iter().chain(sizes.iter().chain(more));
        args.map(|&arg| arg.to_owned()).collect::<Vec<String>>()
    };
    let start_with = |n_ctx, more: &[&'static str]| {
        let args = args(n_ctx, more);
        Server::start(&args.iter().map(String::as_str).collect::<Vec<_>>())
    };
    let start = |more: &[&'static str]| start_with("600", more);
    let prompt = "Once upon a time there was a little girl named Lily. ".repeat(8);
    let other = format!("{prompt}The dog");

    let server = start(&[]);
    let (cached, text) = continued(&server, &prompt, "first");
    assert_eq!(cached, 0);
    let (shared, other_text) = continued(&server, &other, "first");
    assert!(shared > 50, "{shared}");
    assert_eq!(server.terminate(), Some(0));
    let files = || std::fs::read_dir(&cache).unwrap().flatten();
    let is_group = |path: &Path| path.extension().is_some_and(|end| end == "group");
    assert!(files().filter(|file| is_group(&file.path())).count() > 2);
    for file in files() {
        let mode = file.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{file:?}");
    }

    // The same key finds them, with the same text; another key does not. Less than a group is
    // computed again.
    let server = start(&[]);
    assert_eq!(continued(&server, &prompt, "second"), (0, text.clone()));
    let (cached, again) = continued(&server, &prompt, "first");
    assert!(cached + 17 > shared && again == text, "{cached}: {again}");
    let (cached, again) = continued(&server, &other, "first");
    assert!(
        cached + 17 > shared && again == other_text,
        "{cached}: {again}"
    );
    assert_eq!(server.terminate(), Some(0));
    // So does a memory with less room.
    let server = start_with("200", &[]);
    let (cached, again) = continued(&server, &prompt, "first");
    assert!(cached + 17 > shared && again == text, "{cached}: {again}");
    drop(server);

    // What would not be the same to the bit is not found, and what is damaged is not taken.
    let computed = |server: Server| {
        assert_eq!(continued(&server, &prompt, "first"), (0, text.clone()));
        server
    };
    drop(computed(start(&["--backend", "candle"])));
    drop(computed(start(&["--kv-type", "f32"])));
    for file in files().filter(|file| is_group(&file.path())) {
        let bytes = std::fs::read(file.path()).unwrap();
        std::fs::write(file.path(), &bytes[..bytes.len() - 1]).unwrap();
    }
    let server = computed(start(&[]));
    let headers = [("Authorization", "Bearer first")];
    let asked = request("GET", "/metrics", &headers, "");
    let metrics = open(server.address, &asked).finish().body;
    let refused = metrics
        .lines()
        .find(|line| line.starts_with("cellar_store_refused_total"))
        .unwrap();
    assert!(!refused.ends_with(" 0"), "{refused}");
}

/// What was cached is cached when a model is loaded again that was unloaded by hand or by time, or
/// whose process was killed while it was idle.
#[cfg(unix)]
#[test]
fn cached_prefixes_outlive_the_model_and_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let models = ["one", "two"].map(|name| {
        let path = dir.path().join(format!("{name}.gguf"));
        std::fs::write(&path, cellar_stories::STORIES_LLAMA).unwrap();
        path.to_str().unwrap().to_owned()
    });
    let cache = dir.path().join("cache");
    let cache = cache.to_str().unwrap();
    let base = ["-c", "256", "--cache-dir", cache];
    let start = |more: &[&str]| Server::start(&[&base, more].concat());
    let prompt = "Once upon a time there was a little girl named Lily. ".repeat(4);
    let ask = |server: &Server, model: &str| {
        let body = json!({"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0});
        let answer = post(server.address, "/v1/completions", &body).json();
        let reused = &answer["usage"]["prompt_tokens_details"]["cached_tokens"];
        let text = answer["choices"][0]["text"].as_str();
        let text = text.unwrap_or_else(|| panic!("{answer}")).to_owned();
        (text, reused.as_u64().unwrap())
    };
    let server = start(&["-m", &models[0], "-m", &models[1]]);
    let is_loaded = |server: &Server, model: &str| {
        let loaded = get(server.address, "/api/ps").json();
        let loaded = loaded["models"].as_array().unwrap().iter();
        loaded
            .map(|loaded| &loaded["name"])
            .any(|name| name == model)
    };
    let (text, reused) = ask(&server, "one");
    assert_eq!(reused, 0);
    // By hand.
    let unload = post(server.address, "/models/unload", &json!({"model": "one"}));
    assert_eq!(unload.json(), json!({"success": true}));
    let (again, reused) = ask(&server, "one");
    assert!(again == text && reused > 40, "{reused}: {again}");
    // By its time.
    post(
        server.address,
        "/api/generate",
        &json!({"model": "one", "keep_alive": 0}),
    );
    let until = Instant::now() + Duration::from_secs(60);
    while is_loaded(&server, "one") {
        assert!(Instant::now() < until, "it stays");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (again, reused) = ask(&server, "one");
    assert!(again == text && reused > 40, "{reused}: {again}");
    let (of_two, _) = ask(&server, "two");
    assert_eq!(of_two, text);
    assert_eq!(server.terminate(), Some(0));

    // A process that is killed at any moment keeps what it stored before; no byte of it is wrong,
    // and nothing of what it was writing is left.
    std::fs::remove_dir_all(cache).unwrap();
    let one = ["-m", models[0].as_str()];
    let server = start(&one);
    ask(&server, "one");
    let with_end = |end: &'static str| {
        let files = std::fs::read_dir(cache).unwrap().flatten();
        let paths = files.map(|file| file.path());
        let ends = paths.filter(move |path| path.extension().is_some_and(|of| of == end));
        ends.count()
    };
    let until = Instant::now() + Duration::from_secs(60);
    while with_end("group") < 3 {
        assert!(Instant::now() < until, "nothing is stored");
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(server);
    for round in 0..6 {
        let server = start(&one);
        assert_eq!(with_end("part"), 0, "round {round}");
        let (again, reused) = ask(&server, "one");
        assert!(again == text && reused > 40, "{reused}: {again}");
        let address = server.address;
        let other = format!("Round {round}. {prompt}");
        let under_way = std::thread::spawn(move || {
            let body = json!({"prompt": other, "max_tokens": 100}).to_string();
            let sent = request("POST", "/v1/completions", &[], &body);
            // The server is killed meanwhile.
            let _cut_off = std::net::TcpStream::connect(address).and_then(|mut stream| {
                stream.write_all(sent.as_bytes())?;
                stream.read_to_end(&mut Vec::new())
            });
        });
        std::thread::sleep(Duration::from_millis(round * 23));
        drop(server);
        under_way.join().unwrap();
    }
}

#[test]
fn several_models_do_what_each_can() {
    let dir = tempfile::tempdir().unwrap();
    let chat = with_template(&dir, "{{ messages[0].content }}");
    let encoder = fixture("encoders").join("bert_tiny").display().to_string();
    let reranker = fixture("encoders").join("bert_rerank_tiny");
    let reranker = reranker.display().to_string();
    // The chat model is not the first.
    let server = Server::start(&["-m", &encoder, "-m", &chat, "-m", &reranker, "-c", "256"]);
    let models = get(server.address, "/v1/models").json();
    let ids = models["data"].as_array().unwrap().iter();
    let ids: Vec<&Value> = ids.map(|model| &model["id"]).collect();
    assert_eq!(json!(ids), json!(["bert_tiny", "chat", "bert_rerank_tiny"]));
    let ask = |path: &str, body: Value| post(server.address, path, &body);
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let answer = ask(
        "/v1/chat/completions",
        json!({"messages": messages, "max_tokens": 4}),
    );
    assert_eq!(answer.json()["model"], "chat", "{}", answer.body);
    let vectors = ask("/v1/embeddings", json!({"input": "Hello"}));
    assert_eq!(vectors.json()["model"], "bert_tiny", "{}", vectors.body);
    let scores = ask(
        "/v1/rerank",
        json!({"query": "Hello", "documents": ["Hi", "No"]}),
    );
    assert_eq!(scores.json()["results"].as_array().unwrap().len(), 2);
    let named = json!({"model": "bert_tiny", "messages": messages});
    let wrong = ask("/v1/chat/completions", named);
    assert_eq!(wrong.status, 400, "{}", wrong.body);
    let unknown = ask("/v1/embeddings", json!({"model": "x", "input": "Hello"}));
    assert_eq!(unknown.status, 404);
    assert!(
        unknown
            .body
            .contains("'bert_tiny', 'chat', 'bert_rerank_tiny'")
    );

    let (code, message) = failure(&["serve", "-m", &chat, "-m", &chat]);
    assert_eq!(code, 2);
    assert!(
        message.contains("two models are called 'chat'"),
        "{message}"
    );
    let aliased = failure(&["serve", "-m", &chat, "-m", &encoder, "--alias", "x"]);
    assert_eq!(aliased.0, 2, "{}", aliased.1);
    // More than any machine has: refused before anything is loaded.
    let huge = [
        "serve",
        "-m",
        &chat,
        "-m",
        &encoder,
        "-c",
        "1000000000",
        "--port",
        "0",
    ];
    let (code, message) = failure(&huge);
    assert_eq!(code, 2);
    assert!(
        message.contains("the models take") && message.contains("'chat'"),
        "{message}"
    );
}

fn copy_all(from: &Path, to: &Path) {
    std::fs::create_dir(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let from = entry.unwrap().path();
        let to = to.join(from.file_name().unwrap());
        if from.is_dir() {
            copy_all(&from, &to);
        } else {
            let _bytes = std::fs::copy(&from, &to).unwrap();
        }
    }
}

/// A directory with a model of each kind, and one that is broken.
fn models_dir() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    with_template(&dir, "{{ messages[0].content }}");
    let from = fixture("encoders").join("bert_tiny");
    let to = dir.path().join("bert_tiny");
    copy_all(&from, &to);
    std::fs::write(dir.path().join("broken.gguf"), b"GGUF and no more").unwrap();
    std::fs::write(dir.path().join("notes.txt"), b"no model").unwrap();
    dir
}

#[test]
fn models_of_a_directory_are_loaded_when_they_are_needed() {
    let dir = models_dir();
    let path = dir.path().to_str().unwrap();
    let server = Server::start(&[
        "--models",
        path,
        "-c",
        "256",
        "--alias",
        "gpt=chat",
        "--idle-unload",
        "-1",
    ]);
    let warned = |line: &String| line.contains("'broken' cannot be served");
    assert!(server.log.iter().any(warned), "{:?}", server.log);
    let states = || {
        let models = get(server.address, "/v1/models").json();
        let models = models["data"].as_array().unwrap().iter();
        let state = |model: &Value| (model["id"].clone(), model["status"]["value"].clone());
        json!(models.map(state).collect::<Vec<_>>())
    };
    let with = |bert: &str, chat: &str| {
        json!([["bert_tiny", bert], ["broken", "unloaded"], ["chat", chat]])
    };
    assert_eq!(states(), with("unloaded", "unloaded"));
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let body = json!({"model": "gpt", "messages": messages, "max_tokens": 4});
    let answer = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(answer.json()["model"], "chat", "{}", answer.body);
    assert_eq!(states(), with("unloaded", "loaded"));
    // Without a name, the one that can.
    let vectors = post(server.address, "/v1/embeddings", &json!({"input": "Hello"}));
    assert_eq!(vectors.json()["model"], "bert_tiny", "{}", vectors.body);
    assert_eq!(states(), with("loaded", "loaded"));
    let ps = get(server.address, "/api/ps").json();
    let sizes = ps["models"].as_array().unwrap().iter();
    let sizes: Vec<u64> = sizes.map(|model| model["size"].as_u64().unwrap()).collect();
    assert!(
        sizes.len() == 2 && sizes.iter().all(|size| *size > 10_000),
        "{sizes:?}"
    );
    let tags = get(server.address, "/api/tags").json();
    let chat = &tags["models"][2];
    let file = std::fs::metadata(dir.path().join("chat.gguf")).unwrap();
    assert_eq!(chat["size"], file.len());
    assert_eq!(chat["details"]["format"], "gguf");
    // Known without loading it.
    assert_eq!(chat["details"]["quantization_level"], "F16");
    let size = chat["details"]["parameter_size"].as_str().unwrap();
    assert!(size.ends_with('M'), "{size}");
    assert_eq!(tags["models"][1]["details"]["parameter_size"], "");
    let bert = &tags["models"][0]["details"];
    assert_eq!(bert["parameter_size"], "20K");
    assert_eq!(bert["quantization_level"], "F32");
    let broken = json!({"model": "broken", "prompt": "Hello"});
    let error = post(server.address, "/v1/completions", &broken);
    assert_eq!(error.status, 500);
    assert_eq!(
        error.json()["error"]["code"],
        "model_load_failed",
        "{}",
        error.body
    );
    let unload = post(server.address, "/models/unload", &json!({"model": "chat"}));
    assert_eq!(unload.json(), json!({"success": true}));
    assert_eq!(states(), with("loaded", "unloaded"));
    #[cfg(unix)]
    assert_eq!(server.terminate(), Some(0));
}

#[test]
fn a_directory_of_models_is_looked_at_again() {
    let dir = models_dir();
    let path = dir.path().to_str().unwrap();
    let server = Server::start(&["--models", path, "-c", "256"]);
    let names = || {
        let models = get(server.address, "/v1/models").json();
        let models = models["data"].as_array().unwrap().iter();
        json!(models.map(|model| &model["id"]).collect::<Vec<_>>())
    };
    let ask = |model: &str| {
        let body = json!({"model": model, "prompt": "Once", "max_tokens": 4});
        post(server.address, "/v1/completions", &body)
    };
    assert_eq!(names(), json!(["bert_tiny", "broken", "chat"]));
    assert_eq!(ask("added").status, 404);
    // A file that was added is found by its name, before any list was asked for.
    let (chat, added) = (dir.path().join("chat.gguf"), dir.path().join("added.gguf"));
    std::fs::copy(&chat, &added).unwrap();
    assert_eq!(ask("added").status, 200);
    assert_eq!(names(), json!(["added", "bert_tiny", "broken", "chat"]));
    // One that was broken is whole now.
    std::fs::copy(&chat, dir.path().join("broken.gguf")).unwrap();
    assert_eq!(ask("broken").status, 200);
    // One that was removed vanishes, and is unloaded.
    std::fs::remove_file(&added).unwrap();
    std::fs::remove_file(&chat).unwrap();
    assert_eq!(names(), json!(["bert_tiny", "broken"]));
    let gone = ask("added");
    assert_eq!(gone.status, 404, "{}", gone.body);
    assert!(!gone.body.contains("chat"), "{}", gone.body);
    let until = Instant::now() + Duration::from_secs(30);
    let loaded = || {
        let ps = get(server.address, "/api/ps").json();
        ps["models"].as_array().unwrap().len()
    };
    while loaded() != 1 {
        assert!(
            Instant::now() < until,
            "{}",
            get(server.address, "/api/ps").body
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn models_stay_within_the_memory_that_they_may_take() {
    let dir = models_dir();
    let path = dir.path().to_str().unwrap();
    std::fs::copy(dir.path().join("chat.gguf"), dir.path().join("twin.gguf")).unwrap();
    let size_of_one = {
        let server = Server::start(&["--models", path, "-c", "256"]);
        post(server.address, "/models/load", &json!({"model": "chat"}));
        let ps = get(server.address, "/api/ps").json();
        ps["models"][0]["size"].as_u64().unwrap()
    };
    // Room for one, not for two.
    let room = (size_of_one * 3 / 2).to_string();
    let server = Server::start(&["--models", path, "-c", "256", "--memory", &room]);
    let loaded = || {
        let ps = get(server.address, "/api/ps").json();
        let models = ps["models"].as_array().unwrap().iter();
        json!(models.map(|model| &model["name"]).collect::<Vec<_>>())
    };
    for name in ["chat", "twin", "chat"] {
        let body = json!({"model": name, "prompt": "Once", "max_tokens": 4});
        let answer = post(server.address, "/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        assert_eq!(loaded(), json!([name]));
    }
    drop(server);
    // Room for none.
    let small = (size_of_one / 2).to_string();
    let server = Server::start(&["--models", path, "-c", "256", "--memory", &small]);
    let body = json!({"model": "chat", "prompt": "Once"});
    let error = post(server.address, "/v1/completions", &body);
    assert_eq!(error.status, 507, "{}", error.body);
    assert_eq!(error.json()["error"]["needed_bytes"], size_of_one);
    assert_eq!(error.json()["error"]["available_bytes"], size_of_one / 2);
    // At the start, before anything is loaded.
    let chat = dir.path().join("chat.gguf");
    let args = ["serve", "-m", chat.to_str().unwrap(), "-c", "256"];
    let (code, message) = failure(&[&args[..], &["--memory", &small, "--port", "0"]].concat());
    assert_eq!(code, 2);
    assert!(message.contains("but --memory allows"), "{message}");
}

/// A draft model drafts for what is served, and counts in what the model takes; it can be off for a
/// request.
#[test]
fn a_draft_model_is_served_and_counted() {
    let dir = models_dir();
    let chat = dir.path().join("chat.gguf");
    let chat = chat.to_str().unwrap();
    let args = [
        "-m",
        chat,
        "-c",
        "256",
        "--parallel",
        "2",
        "--backend",
        "cpu",
    ];
    let draft = ["--speculate", "draft", "--draft-model", chat];
    let size = |server: &Server| {
        let ps = get(server.address, "/api/ps").json();
        ps["models"][0]["size"].as_u64().unwrap()
    };
    let with = [&args[..], &draft].concat();
    let (plain, server) = (Server::start(&args), Server::start(&with));
    let answer = |server: &Server, how: &str| {
        let body = json!({"prompt": "Once upon a time", "n_predict": 30, "temperature": 0.8,
                          "seed": 3, "speculate": how});
        let answer = post(server.address, "/completion", &body).json();
        (
            answer["content"].clone(),
            answer["timings"]["draft_n"].as_u64(),
        )
    };
    let (text, _) = answer(&plain, "off");
    assert_eq!(answer(&server, "off"), (text.clone(), None));
    let (drafted, n_drafted) = answer(&server, "draft");
    assert_eq!(drafted, text);
    assert!(n_drafted.unwrap() > 0);
    let (own, both) = (size(&plain), size(&server));
    assert!(
        both > own * 3 / 2,
        "{both} with a draft model, {own} without"
    );
    // Before anything is loaded.
    let small = (own * 5 / 4).to_string();
    let budget = ["--memory", &small, "--port", "0"];
    let (code, message) = failure(&[&["serve"], &with[..], &budget].concat());
    assert!(
        code == 2 && message.contains("but --memory allows"),
        "{message}"
    );
    let dir = dir.path().to_str().unwrap();
    let (code, message) = failure(&[&["serve", "--models", dir], &draft[..]].concat());
    assert!(
        code == 2 && message.contains("without --models"),
        "{message}"
    );
}

#[test]
fn wrong_directories_and_names_of_models_are_refused() {
    let dir = models_dir();
    let path = dir.path().to_str().unwrap();
    let empty = tempfile::tempdir().unwrap();
    let empty = empty.path().to_str().unwrap();
    for (args, wanted) in [
        (&["--models", empty][..], "there is no model in"),
        (&["--models", "/nowhere"], "cannot read the directory"),
        (&["--models", path, "--alias", "x"], "NAME=MODEL"),
        (&["--models", path, "--alias", "x=y"], "no model 'y'"),
        (
            &["--models", path, "--alias", "chat=broken"],
            "called 'chat'",
        ),
        (&["--memory", "much"], "a size above 0"),
        (&["--memory", "0"], "a size above 0"),
        (&["--idle-unload", "-2"], "-2"),
    ] {
        let (code, message) = failure(&[&["serve", "--port", "0"], args].concat());
        assert!(code > 0 && message.contains(wanted), "{args:?}: {message}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn what_cannot_be_served_or_saved_is_said_at_the_start() {
    // Nobody may create files here, root neither.
    let (code, message) = failure(&["serve", "--port", "0", "--cache-dir", "/proc/1"]);
    assert_eq!(code, 1, "{message}");
    assert!(
        message.contains("--cache-dir") && message.contains("'/proc/1'"),
        "{message}"
    );
    for n in 5..=9 {
        let program = env!("CARGO_BIN_EXE_cellar");
        let limited = format!("ulimit -n {n}; exec '{program}' serve --port 0");
        let output = std::process::Command::new("sh")
            .args(["-c", &limited])
            .output();
        let output = output.unwrap();
        let message = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{n}: {message}");
        assert!(message.contains("ulimit -n"), "{n}: {message}");
    }
}

#[test]
fn wrong_flags_are_refused_in_one_line() {
    let (code, message) = failure(&["serve", "--host", "0.0.0.0"]);
    assert_eq!(code, 2);
    assert!(
        message.contains("--api-key-file FILE") && message.contains("--no-auth"),
        "{message}"
    );
    let (code, message) = failure(&["serve", "--api-key-file", "/nowhere/keys"]);
    assert_eq!(code, 1);
    assert!(message.contains("'/nowhere/keys'"), "{message}");
    for args in [
        &["serve", "--port", "70000"][..],
        &["serve", "--host", "nowhere"],
        &["serve", "--parallel", "0"],
        &["serve", "--no-auth", "--api-key-file", "keys"],
        &["serve", "--alias", ""],
    ] {
        assert_eq!(failure(args).0, 2, "{args:?}");
    }
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let (code, message) = failure(&["serve", "--port", &port]);
    assert_eq!(code, 1);
    assert!(
        message.contains(&format!("cannot listen on 127.0.0.1:{port}")),
        "{message}"
    );
}
