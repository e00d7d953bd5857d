//! Adapters: by number and scale, by name, and for all requests that do not say any.

use model_tests::http::{get, post};
use serde_json::{Value, json};

use crate::support::{Server, Setup, with};

/// Long enough to be cached.
const PROMPT: &str = "Once upon a time there was a little girl named Lily who had a red ball";

fn server() -> Server {
    let adapters = vec![("pirate", 0.0), ("poet", 0.0)];
    Setup {
        adapters,
        ..Setup::default()
    }
    .start()
}

/// The text of a request with these members, and how much of its prompt was cached.
fn text(server: &Server, extra: &Value) -> (String, u64) {
    let body = json!({"prompt": PROMPT, "temperature": 0, "max_tokens": 16});
    let reply = post(server.address, "/v1/completions", &with(body, extra));
    assert_eq!(reply.status, 200, "{extra}: {}", reply.body);
    let reply = reply.json();
    let cached = &reply["usage"]["prompt_tokens_details"]["cached_tokens"];
    let text = reply["choices"][0]["text"].as_str().unwrap().to_owned();
    (text, cached.as_u64().unwrap_or(0))
}

fn lora(list: &Value) -> Value {
    json!({"lora": list})
}

#[test]
fn a_request_names_its_adapters() {
    let server = server();
    let bare = Setup::default().start();
    let (base, _) = text(&bare, &json!({}));
    assert_eq!(text(&server, &json!({})).0, base);
    let (first, cached) = text(&server, &lora(&json!([{"id": 0, "scale": 1}])));
    assert_eq!(cached, 0, "rows without the adapter are of no use");
    assert_ne!(first, base);
    // The same adapter is found in the cache.
    let (again, cached) = text(&server, &lora(&json!([{"id": 0, "scale": 1}])));
    assert_eq!(again, first);
    assert!(cached > 0);
    let (second, _) = text(&server, &lora(&json!([{"id": 1, "scale": 1.0}])));
    assert!(second != base && second != first);
    let (both, _) = text(
        &server,
        &lora(&json!([{"id": 1, "scale": 1}, {"id": 0, "scale": 1}])),
    );
    assert!(both != first && both != second);
    // Nothing is mixed up by then.
    let (again, _) = text(&server, &lora(&json!([{"id": 0, "scale": 1}])));
    assert_eq!(again, first);
    assert_eq!(text(&server, &lora(&json!([]))).0, base);
    assert_eq!(text(&server, &json!({})).0, base);
    // The name of an adapter as that of the model.
    assert_eq!(text(&server, &json!({"model": "poet"})).0, second);
    assert_eq!(text(&server, &json!({"model": "stories"})).0, base);
    let body = json!({
        "model": "pirate", "prompt": PROMPT, "raw": true, "stream": false,
        "options": {"temperature": 0, "num_predict": 16},
    });
    let ollama = post(server.address, "/api/generate", &body).json();
    assert_eq!(ollama["response"], json!(first));
    let body = json!({
        "prompt": PROMPT, "temperature": 0, "n_predict": 16,
        "lora": [{"id": 1, "scale": 1}],
    });
    let completion = post(server.address, "/completion", &body).json();
    assert_eq!(completion["content"], json!(second));
}

#[test]
fn scales_of_all_requests_are_set_at_run_time() {
    let server = server();
    let (base, _) = text(&server, &json!({}));
    let (first, _) = text(&server, &json!({"model": "pirate"}));
    let list = get(server.address, "/lora-adapters").json();
    assert_eq!(list[0]["name"], "pirate");
    assert!(
        list[1]["path"].as_str().unwrap().ends_with("poet"),
        "{list}"
    );
    assert_eq!(
        (&list[0]["id"], &list[0]["scale"]),
        (&json!(0), &json!(0.0))
    );
    let set = |list: Value| post(server.address, "/lora-adapters", &list);
    assert_eq!(
        set(json!([{"id": 0, "scale": 1}])).json(),
        json!({"success": true})
    );
    assert_eq!(
        get(server.address, "/lora-adapters").json()[0]["scale"],
        1.0
    );
    assert_eq!(text(&server, &json!({})).0, first);
    // Those that are not in a list are left out.
    assert_eq!(text(&server, &lora(&json!([]))).0, base);
    for (wrong, what) in [
        (json!([{"id": 2, "scale": 1}]), "no adapter 2"),
        (
            json!([{"id": 0, "scale": 1}, {"id": 0, "scale": 2}]),
            "twice",
        ),
        (json!([{"id": 0, "scale": 1e39}]), "scale"),
        (json!([{"id": 0}]), "scale"),
        (json!({}), "list"),
    ] {
        let reply = set(wrong.clone());
        assert_eq!(reply.status, 400, "{wrong}");
        assert!(reply.body.contains(what), "{wrong}: {}", reply.body);
    }
    assert_eq!(text(&server, &json!({})).0, first, "nothing has changed");
    assert_eq!(set(json!([])).status, 200);
    assert_eq!(text(&server, &json!({})).0, base);
}

#[test]
fn adapters_that_there_are_not_are_refused() {
    let bare = Setup::default().start();
    let body = json!({"prompt": "Hi", "max_tokens": 1, "lora": [{"id": 0, "scale": 1}]});
    let refused = post(bare.address, "/v1/completions", &body);
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("--lora"), "{}", refused.body);
    let server = server();
    let body = json!({"prompt": "Hi", "max_tokens": 1, "lora": [{"id": 7, "scale": 1}]});
    let refused = post(server.address, "/v1/completions", &body).json();
    assert_eq!(refused["error"]["param"], "lora");
    let models = get(server.address, "/v1/models").json();
    let names: Vec<&Value> = models["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|model| &model["id"])
        .collect();
    assert_eq!(names, ["stories", "pirate", "poet"]);
    assert_eq!(models["data"][1]["parent"], "stories");
}
