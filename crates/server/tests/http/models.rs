//! Models that come and go: loaded when they are needed, by one of those that wait; unloaded when
//! they are idle, or another needs the memory; never under a request.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use cellar_server::{
    ApiError, App, Job, KeepLoaded, LoadModel, MemoryBudget, ModelBytes, ModelEntry, ModelFacts,
    PlannedModel, ServerConfig,
};
use model_tests::http::{Reply, get, open, post, request};
use serde_json::{Value, json};

use crate::support::{Alone, Server, Setup};

const PROMPT: &str = "Once upon a time";

/// Loads the stories model, when it may.
#[derive(Debug)]
struct Loader {
    id: &'static str,
    n_bytes: u64,
    /// Loads wait while it is set.
    is_held: AtomicBool,
    is_broken: AtomicBool,
    /// Panics in place of a plan.
    is_panicking: AtomicBool,
    /// Panics in place of a load.
    is_panicking_late: AtomicBool,
    n_plans: AtomicUsize,
    n_loads: AtomicUsize,
    /// Runs of each engine wait while it is set; only engines hold it.
    engines: Mutex<Vec<Weak<AtomicBool>>>,
}

impl Loader {
    fn new(id: &'static str, n_bytes: u64) -> Arc<Self> {
        Arc::new(Self {
            id,
            n_bytes,
            is_held: AtomicBool::new(false),
            is_broken: AtomicBool::new(false),
            is_panicking: AtomicBool::new(false),
            is_panicking_late: AtomicBool::new(false),
            n_plans: AtomicUsize::new(0),
            n_loads: AtomicUsize::new(0),
            engines: Mutex::default(),
        })
    }

    fn hold(&self) {
        self.is_held.store(true, Ordering::Relaxed);
    }

    fn let_go(&self) {
        self.is_held.store(false, Ordering::Relaxed);
    }

    fn n_loads(&self) -> usize {
        self.n_loads.load(Ordering::Relaxed)
    }

    /// Engines that are in memory.
    fn n_engines(&self) -> usize {
        let engines = self.engines.lock().unwrap();
        engines
            .iter()
            .filter(|engine| engine.strong_count() > 0)
            .count()
    }

    /// Has the runs of the engines wait.
    fn hold_runs(&self) {
        self.each_engine(|engine| engine.store(true, Ordering::Relaxed));
    }

    fn let_runs_go(&self) {
        self.each_engine(|engine| engine.store(false, Ordering::Relaxed));
    }

    fn each_engine(&self, act: impl Fn(&AtomicBool)) {
        let engines = self.engines.lock().unwrap();
        let engines = engines.iter().filter_map(Weak::upgrade);
        engines.for_each(|engine| act(&engine));
    }

    fn entry(self: &Arc<Self>, keep: KeepLoaded) -> ModelEntry {
        ModelEntry {
            id: self.id.to_owned(),
            aliases: vec![format!("{}-alias", self.id)],
            facts: ModelFacts {
                architecture: "llama".to_owned(),
                job: Some(Job::Texts),
                file_bytes: 7,
                ..ModelFacts::default()
            },
            loader: Some(Arc::new(Shared(Arc::clone(self)))),
            keep,
            loaded: None,
        }
    }
}

#[derive(Debug)]
struct Shared(Arc<Loader>);

impl LoadModel for Shared {
    fn plan(&self) -> Result<PlannedModel, ApiError> {
        let loader = Arc::clone(&self.0);
        loader.n_plans.fetch_add(1, Ordering::Relaxed);
        if loader.is_broken.load(Ordering::Relaxed) {
            return Err(ApiError::load_failed("the file is broken"));
        }
        assert!(!loader.is_panicking.load(Ordering::Relaxed), "a plan broke");
        Ok(PlannedModel {
            bytes: ModelBytes {
                host: loader.n_bytes,
                ..ModelBytes::default()
            },
            load: Box::new(move || {
                let is_panicking = loader.is_panicking_late.load(Ordering::Relaxed);
                assert!(!is_panicking, "a load broke");
                let until = Instant::now() + Duration::from_secs(60);
                while loader.is_held.load(Ordering::Relaxed) && Instant::now() < until {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let is_held = Arc::default();
                loader
                    .engines
                    .lock()
                    .unwrap()
                    .push(Arc::downgrade(&is_held));
                loader.n_loads.fetch_add(1, Ordering::Relaxed);
                let setup = Setup {
                    is_held: Some(is_held),
                    n_ctx: 256,
                    ..Setup::default()
                };
                Ok(setup.served(loader.id, &[]))
            }),
        })
    }
}

fn start(loaders: &[&Arc<Loader>], keep: KeepLoaded, budget: u64) -> Server {
    let entries = loaders.iter().map(|loader| loader.entry(keep));
    let budget = MemoryBudget {
        host: Some(budget),
        ..MemoryBudget::default()
    };
    Server::start(App::with_models(
        entries.collect(),
        budget,
        ServerConfig::default(),
    ))
}

fn completion(model: &str) -> Value {
    json!({"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0})
}

fn status(server: &Server, model: &str) -> Value {
    get(server.address, &format!("/v1/models/{model}")).json()["status"].clone()
}

#[track_caller]
fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < until, "not so after a minute: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// A streamed request that has begun: its model computes, and waits.
fn held_stream(server: &Server, loader: &Arc<Loader>) -> Reply {
    post(server.address, "/models/load", &json!({"model": loader.id}));
    loader.hold_runs();
    let mut body = completion(loader.id);
    body["stream"] = json!(true);
    let text = request("POST", "/v1/completions", &[], &body.to_string());
    open(server.address, &text)
}

#[test]
fn a_model_is_loaded_by_its_first_request_and_unloaded_when_idle() {
    let loader = Loader::new("lazy", 100);
    let keep = KeepLoaded::For(Duration::from_millis(300));
    let server = start(&[&loader], keep, 1000);
    assert_eq!(status(&server, "lazy"), json!({"value": "unloaded"}));
    assert_eq!(get(server.address, "/api/ps").json()["models"], json!([]));
    let tags = get(server.address, "/api/tags").json();
    assert_eq!(tags["models"][0]["name"], "lazy");
    assert_eq!(tags["models"][0]["size"], 7);
    assert_eq!(get(server.address, "/slots").json(), json!([]));
    assert_eq!(get(server.address, "/props").json()["role"], "router");
    assert_eq!(get(server.address, "/health").status, 200);
    assert_eq!(
        server.metric("cellar_model_loaded{model_name=\"lazy\"}"),
        0.0
    );
    assert_eq!(loader.n_loads(), 0);

    let text = Alone::new().greedy(PROMPT, 8);
    for n_loads in 1..=2 {
        // By an alias too.
        let answer = post(server.address, "/v1/completions", &completion("lazy-alias"));
        assert_eq!(answer.json()["choices"][0]["text"], text, "{}", answer.body);
        assert_eq!(answer.json()["model"], "lazy");
        assert_eq!(loader.n_loads(), n_loads);
        wait_until("the engine is gone", || loader.n_engines() == 0);
        wait_until("unloaded", || {
            status(&server, "lazy")["value"] == "unloaded"
        });
        server.await_metric("cellar_model_bytes{model_name=\"lazy\"}", 0.0);
    }
    let name = "_total{model_name=\"lazy\"}";
    assert_eq!(server.metric(&format!("cellar_model_loads{name}")), 2.0);
    assert_eq!(server.metric(&format!("cellar_model_unloads{name}")), 2.0);
    assert_eq!(
        server.metric("cellar_requests_total{end=\"finished\"}"),
        2.0
    );
}

#[test]
fn requests_wait_for_one_load() {
    let loader = Loader::new("lazy", 100);
    loader.hold();
    let server = start(&[&loader], KeepLoaded::Forever, 1000);
    let mut body = completion("lazy");
    body["stream"] = json!(true);
    let address = server.address;
    let wait = |body: Value| std::thread::spawn(move || post(address, "/v1/completions", &body));
    let waiting: Vec<_> = [body.clone(), body, completion("lazy")].map(wait).into();
    wait_until("loading", || status(&server, "lazy")["value"] == "loading");
    // Lists and health do not wait, and no client has anything.
    assert_eq!(get(address, "/health").status, 200);
    assert_eq!(get(address, "/api/ps").json()["models"], json!([]));
    std::thread::sleep(Duration::from_millis(100));
    assert!(waiting.iter().all(|thread| !thread.is_finished()));
    loader.let_go();
    for thread in waiting {
        let reply = thread.join().unwrap();
        assert_eq!(reply.status, 200, "{}", reply.body);
    }
    assert_eq!(loader.n_loads(), 1);
    let loaded = status(&server, "lazy");
    assert_eq!(loaded["value"], "loaded");
    assert_eq!(loaded["bytes"], 100);
    assert_eq!(loaded["unloads_in_seconds"], Value::Null);
    let ps = get(address, "/api/ps").json();
    assert_eq!(ps["models"][0]["size"], 100);
    assert_eq!(ps["models"][0]["expires_at"], "9999-12-31T23:59:59Z");
    assert_eq!(get(address, "/slots").json().as_array().unwrap().len(), 4);
    assert_eq!(get(address, "/props").json()["model_alias"], "lazy");
}

#[test]
fn a_load_that_fails_is_an_error_and_is_tried_again() {
    let loader = Loader::new("lazy", 100);
    loader.is_broken.store(true, Ordering::Relaxed);
    let server = start(&[&loader], KeepLoaded::Forever, 1000);
    for _ in 0..2 {
        let error = post(server.address, "/v1/completions", &completion("lazy"));
        assert_eq!(error.status, 500);
        assert_eq!(error.json()["error"]["code"], "model_load_failed");
        assert_eq!(error.json()["error"]["message"], "the file is broken");
    }
    assert_eq!(loader.n_plans.load(Ordering::Relaxed), 2);
    let failed = status(&server, "lazy");
    assert_eq!(failed["failed"], true, "{failed}");
    assert_eq!(failed["error"], "the file is broken");
    let name = "cellar_model_load_failures_total{model_name=\"lazy\"}";
    assert_eq!(server.metric(name), 2.0);
    loader.is_broken.store(false, Ordering::Relaxed);
    let answer = post(server.address, "/v1/completions", &completion("lazy"));
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(status(&server, "lazy").get("failed"), None);
}

#[test]
fn a_load_that_panics_is_an_error_of_its_model_alone() {
    let (bad, good) = (Loader::new("bad", 600), Loader::new("good", 600));
    let server = start(&[&bad, &good], KeepLoaded::Forever, 1000);
    for (flag, reason) in [
        (&bad.is_panicking, "a plan broke"),
        (&bad.is_panicking_late, "a load broke"),
    ] {
        flag.store(true, Ordering::Relaxed);
        let error = post(server.address, "/v1/completions", &completion("bad"));
        assert_eq!(error.status, 500, "{}", error.body);
        assert_eq!(error.json()["error"]["code"], "model_load_failed");
        let message = format!("loading it panicked, a bug of Cellar: {reason}");
        assert_eq!(error.json()["error"]["message"], message);
        assert_eq!(status(&server, "bad")["error"], message);
        flag.store(false, Ordering::Relaxed);
    }
    // Its bytes are free: both do not fit.
    let answer = post(server.address, "/v1/completions", &completion("good"));
    assert_eq!(answer.status, 200, "{}", answer.body);
    let answer = post(server.address, "/v1/completions", &completion("bad"));
    assert_eq!(answer.status, 200, "{}", answer.body);
}

#[test]
fn the_least_recently_used_idle_model_makes_room() {
    let [a, b, c, huge] = [("a", 40), ("b", 40), ("c", 40), ("huge", 101)]
        .map(|(id, n_bytes)| Loader::new(id, n_bytes));
    let server = start(&[&a, &b, &c, &huge], KeepLoaded::Forever, 100);
    let address = server.address;
    let ask = |model: &str| post(address, "/v1/completions", &completion(model));
    for model in ["a", "b", "a", "c"] {
        let answer = ask(model);
        assert_eq!(answer.status, 200, "{}", answer.body);
    }
    let loaded = || [&a, &b, &c].map(|loader| loader.n_engines());
    assert_eq!(loaded(), [1, 0, 1], "b was used least recently");
    // A model that can never fit evicts no other.
    let error = ask("huge");
    assert_eq!(error.status, 507, "{}", error.body);
    assert_eq!(loaded(), [1, 0, 1]);

    // Neither does one that computes.
    let mut streams = [held_stream(&server, &a), held_stream(&server, &c)];
    let error = ask("b");
    assert_eq!(error.status, 507);
    let error = error.json()["error"].clone();
    assert_eq!(error["code"], "insufficient_memory");
    assert_eq!(error["needed_bytes"], 40);
    assert_eq!(error["available_bytes"], 20);
    let holder = |model: &str| json!({"model": model, "bytes": 40, "requests": 1});
    assert_eq!(error["held_by"], json!([holder("a"), holder("c")]));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("'b' takes 40 bytes"), "{message}");
    assert!(message.contains("'a' 40 bytes (1 request)"), "{message}");
    // In the shape of each API.
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let body = json!({"model": "b", "messages": messages, "max_tokens": 4});
    let anthropic = post(address, "/v1/messages", &body);
    assert_eq!(anthropic.status, 507);
    assert_eq!(anthropic.json()["error"]["type"], "api_error");
    let ollama = post(address, "/api/chat", &body);
    assert_eq!(ollama.status, 507);
    assert!(
        ollama.json()["error"]
            .as_str()
            .unwrap()
            .contains("'b' takes")
    );
    a.let_runs_go();
    c.let_runs_go();
    for stream in &mut streams {
        while stream.next_chunk().unwrap().is_some() {}
    }
    assert_eq!(ask("b").status, 200);
    assert_eq!([b.n_loads(), b.n_engines()], [2, 1]);
}

#[test]
fn a_model_is_unloaded_once_no_request_uses_it() {
    let loader = Loader::new("lazy", 100);
    let server = start(&[&loader], KeepLoaded::Forever, 1000);
    let address = server.address;
    let mut stream = held_stream(&server, &loader);
    assert_eq!(status(&server, "lazy")["requests"], 1);
    let unloading =
        std::thread::spawn(move || post(address, "/models/unload", &json!({"model": "lazy"})));
    // A request that comes then waits, and loads it again.
    wait_until("draining", || {
        std::thread::sleep(Duration::from_millis(50));
        !unloading.is_finished()
    });
    let next = std::thread::spawn(move || post(address, "/v1/completions", &completion("lazy")));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!((loader.n_loads(), loader.n_engines()), (1, 1));
    loader.let_runs_go();
    let mut text = String::new();
    while let Some(chunk) = stream.next_chunk().unwrap() {
        text += &chunk;
    }
    assert!(text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(unloading.join().unwrap().json(), json!({"success": true}));
    assert_eq!(next.join().unwrap().status, 200);
    assert_eq!((loader.n_loads(), loader.n_engines()), (2, 1));
    for _ in 0..2 {
        // One that is not loaded is unloaded.
        let reply = post(address, "/models/unload", &json!({"model": "lazy"}));
        assert_eq!(reply.json(), json!({"success": true}));
        assert_eq!(loader.n_engines(), 0);
    }
    let loaded = post(
        address,
        "/models/load",
        &json!({"model": "lazy", "keep_alive": 0.2}),
    );
    assert_eq!(loaded.json(), json!({"success": true}));
    wait_until("unloaded", || loader.n_engines() == 0);
    let unknown = post(address, "/models/load", &json!({"model": "x"}));
    assert_eq!(unknown.status, 404);
    assert!(
        unknown.body.contains("this server has 'lazy'"),
        "{}",
        unknown.body
    );
}

#[test]
fn ollamas_keep_alive_is_kept_to() {
    let loader = Loader::new("lazy", 100);
    let server = start(&[&loader], KeepLoaded::Forever, 1000);
    let ask = |extra: Value| {
        let mut body = json!({"model": "lazy", "stream": false, "options": {"num_predict": 4}});
        let members = extra.as_object().unwrap().clone();
        body.as_object_mut().unwrap().extend(members);
        let reply = post(server.address, "/api/generate", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    };
    let expires = || {
        let ps = get(server.address, "/api/ps").json();
        ps["models"][0]["expires_at"].as_str().map(str::to_owned)
    };
    assert_eq!(ask(json!({"keep_alive": "10m"}))["done_reason"], "load");
    assert!(!expires().unwrap().starts_with("9999"));
    let answer = ask(json!({"prompt": PROMPT, "keep_alive": -1}));
    assert_eq!(answer["done"], true);
    assert!(expires().unwrap().starts_with("9999"));
    ask(json!({"prompt": PROMPT, "keep_alive": 0}));
    wait_until("unloaded after the request", || loader.n_engines() == 0);
    let loaded = ask(json!({"prompt": PROMPT}));
    assert!(loaded["load_duration"].as_u64().unwrap() > 0);
    assert_eq!(ask(json!({"keep_alive": 0}))["done_reason"], "unload");
    assert_eq!((loader.n_loads(), loader.n_engines()), (2, 0));
    // Nothing is loaded to be unloaded.
    assert_eq!(ask(json!({"keep_alive": "0s"}))["done_reason"], "unload");
    assert_eq!(loader.n_loads(), 2);
}

#[test]
fn what_a_model_cannot_do_does_not_load_it() {
    let loader = Loader::new("lazy", 100);
    let server = start(&[&loader], KeepLoaded::Forever, 1000);
    let body = json!({"model": "lazy", "input": "Hello"});
    let error = post(server.address, "/v1/embeddings", &body);
    assert_eq!(error.status, 400);
    assert!(
        error.body.contains("does not give embeddings"),
        "{}",
        error.body
    );
    let error = post(server.address, "/v1/completions", &completion("x"));
    assert_eq!(error.status, 404);
    assert!(
        error.body.contains("this server has 'lazy'"),
        "{}",
        error.body
    );
    assert_eq!(
        post(server.address, "/api/show", &json!({"model": "lazy"})).status,
        200
    );
    assert_eq!(
        get(server.address, "/v1/models/lazy-alias").json()["id"],
        "lazy"
    );
    let refused = get(server.address, "/props?model=lazy%2Dalias");
    assert_eq!(refused.status, 409);
    let message = refused.json()["error"]["message"].to_string();
    assert!(message.contains("POST /models/load"), "{message}");
    assert_eq!(get(server.address, "/props?model=nobody").status, 404);
    assert_eq!(loader.n_plans.load(Ordering::Relaxed), 0);
    let load = post(server.address, "/models/load", &json!({"model": "lazy"}));
    assert_eq!(load.status, 200);
    let props = get(server.address, "/props?model=lazy%2Dalias").json();
    assert_eq!(props["model_alias"], "lazy");
    assert_eq!(loader.n_loads(), 1);
}

#[test]
fn a_viewer_follows_the_loaded_model() {
    let [a, b] = ["a", "b"].map(|id| Loader::new(id, 60));
    let server = start(&[&a, &b], KeepLoaded::Forever, 100);
    let mut viewer = open(server.address, &request("GET", "/view/events", &[], ""));
    let mut next_layout = || loop {
        let chunk = viewer.next_chunk().unwrap().unwrap();
        if let Some(data) = chunk.strip_prefix("event: layout\ndata: ") {
            let layout: Value = serde_json::from_str(data.trim()).unwrap();
            return layout;
        }
    };
    assert_eq!(
        post(server.address, "/v1/completions", &completion("b")).status,
        200
    );
    let first = next_layout();
    assert_eq!(first["model"], "b");
    // A viewer does not keep a model loaded.
    assert_eq!(
        post(server.address, "/v1/completions", &completion("a")).status,
        200
    );
    let second = next_layout();
    assert_eq!(second["model"], "a");
    assert_ne!(first["instance"], second["instance"]);
    assert_eq!((a.n_engines(), b.n_engines()), (1, 0));
    let unknown = get(server.address, "/view/events?model=x");
    assert_eq!(unknown.status, 404);
}

/// Viewers of two models at once: each sees its own, and both learn which there are.
#[test]
fn a_viewer_learns_which_models_it_can_watch() {
    let [a, b] = ["a", "b"].map(|id| Loader::new(id, 60));
    let server = start(&[&a, &b], KeepLoaded::Forever, 200);
    let load = |model: &str| {
        let reply = post(server.address, "/models/load", &json!({"model": model}));
        assert_eq!(reply.status, 200, "{}", reply.body);
    };
    let watch = |path: &str| open(server.address, &request("GET", path, &[], ""));
    // The data of the next event of a kind; others may come before it.
    let next = |viewer: &mut Reply, kind: &str| loop {
        let chunk = viewer.next_chunk().unwrap().unwrap();
        if let Some(data) = chunk.strip_prefix(&format!("event: {kind}\ndata: ")) {
            return serde_json::from_str::<Value>(data.trim()).unwrap();
        }
    };
    load("a");
    let mut of_any = watch("/view/events");
    let mut of_b = watch("/view/events?model=b");
    let layout = next(&mut of_any, "layout");
    assert_eq!(
        (&layout["model"], &layout["models"]),
        (&json!("a"), &json!(["a"]))
    );
    assert_eq!(next(&mut of_b, "models"), json!({"models": ["a"]}));
    load("b");
    assert_eq!(next(&mut of_any, "models"), json!({"models": ["a", "b"]}));
    let layout = next(&mut of_b, "layout");
    assert_eq!(
        (&layout["model"], &layout["models"]),
        (&json!("b"), &json!(["a", "b"]))
    );
    let body = json!({"model": "a"});
    assert_eq!(post(server.address, "/models/unload", &body).status, 200);
    assert_eq!(next(&mut of_b, "models"), json!({"models": ["b"]}));
    assert_eq!(next(&mut of_any, "layout")["model"], "b");
}

#[test]
fn a_server_that_ends_does_not_wait_for_a_load() {
    let loader = Loader::new("lazy", 100);
    loader.hold();
    let mut server = start(&[&loader], KeepLoaded::Forever, 1000);
    let address = server.address;
    let waiting = std::thread::spawn(move || post(address, "/v1/completions", &completion("lazy")));
    wait_until("loading", || status(&server, "lazy")["value"] == "loading");
    server.stop();
    let reply = waiting.join().unwrap();
    assert_eq!(reply.status, 503, "{}", reply.body);
    server.join();
    loader.let_go();
}
