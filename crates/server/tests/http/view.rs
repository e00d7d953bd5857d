//! The live view: its page, who may see what, and a stream that misses nothing.

use std::num::NonZeroU32;

use cellar_engine::serve::ExcerptLen;
use model_tests::http::{Reply, get, open, post, request};
use serde_json::{Value, json};

use crate::support::{Server, Setup};

const PROMPT: &str = "Once upon a time there was a little girl with a red ball.";

fn continued(server: &Server, prompt: &str) {
    let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0});
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
}

fn watch(server: &Server, headers: &[(&str, &str)]) -> Reply {
    open(server.address, &request("GET", "/view/events", headers, ""))
}

/// A server-sent event.
struct Sent {
    name: String,
    id: Option<String>,
    data: Value,
}

fn next(reply: &mut Reply) -> Option<Sent> {
    let text = reply.next_chunk().unwrap()?;
    let line = |name: &str| {
        let mut lines = text.lines();
        lines.find_map(|line| line.strip_prefix(name).map(str::to_owned))
    };
    Some(Sent {
        name: line("event: ").unwrap(),
        id: line("id: "),
        data: serde_json::from_str(&line("data: ").unwrap()).unwrap(),
    })
}

/// The updates until one has an event of this kind; the last has.
fn until(reply: &mut Reply, kind: &str) -> Vec<Sent> {
    let mut all = Vec::new();
    loop {
        let sent = next(reply).unwrap();
        let events = sent.data["events"].as_array().cloned();
        let has = events.iter().flatten().any(|event| event["kind"] == kind);
        all.push(sent);
        if has {
            return all;
        }
    }
}

fn events(sent: &[Sent]) -> Vec<Value> {
    let events = sent
        .iter()
        .filter_map(|sent| sent.data["events"].as_array());
    events.flatten().cloned().collect()
}

#[test]
fn browsers_get_a_page_that_loads_nothing_from_elsewhere() {
    let server = Setup::with_keys("secret").start();
    let browser = [("Accept", "text/html,application/xhtml+xml,*/*;q=0.8")];
    let page = open(server.address, &request("GET", "/", &browser, "")).finish();
    assert_eq!(page.status, 200);
    assert!(page.body.starts_with("<!doctype html>"), "{}", page.body);
    let policy = page.header("content-security-policy").unwrap();
    assert!(policy.starts_with("default-src 'none';"), "{policy}");
    assert!(!policy.contains("unsafe"), "{policy}");
    let attributes = page.body.split('"').skip(1).step_by(2);
    let files: Vec<&str> = attributes.filter(|a| a.starts_with("view/")).collect();
    assert_eq!(files, ["view/style.css", "view/chat.css", "view/app.js"]);
    let mut seen = files.clone();
    let mut wanted: Vec<String> = files.iter().map(|file| format!("/{file}")).collect();
    let mut n_files = 0;
    while let Some(path) = wanted.pop() {
        let file = get(server.address, &path);
        assert_eq!(file.status, 200, "{path}");
        assert_eq!(file.header("x-content-type-options"), Some("nosniff"));
        n_files += 1;
        // What they make of a text goes through DOMPurify, which does write HTML.
        if ["/view/marked.js", "/view/purify.js"].contains(&path.as_str()) {
            assert!(!file.body.contains("import "), "{path} loads more");
            continue;
        }
        assert!(!file.body.contains("innerHTML"), "{path} writes HTML");
        assert!(!file.body.contains("://"), "{path} names another place");
        let imports = ["from \"./", "import \"./"];
        let names = imports
            .iter()
            .flat_map(|import| file.body.split(import).skip(1));
        for name in names {
            let name = name.split('"').next().unwrap();
            let path = format!("/view/{name}");
            if !wanted.contains(&path) && !seen.iter().any(|s| *s == path) {
                seen.push(path.clone().leak());
                wanted.push(path);
            }
        }
    }
    assert_eq!(n_files, 20);
    // Other clients get the list.
    let list = get(server.address, "/");
    assert!(list.body.contains("/view/events"), "{}", list.body);
    assert!(!list.body.contains("doctype"), "{}", list.body);
    assert_eq!(get(server.address, "/view/other.js").status, 401);
}

#[test]
fn the_stream_needs_a_key_where_there_are_keys() {
    let server = Setup::with_keys("secret").start();
    assert_eq!(watch(&server, &[]).finish().status, 401);
    let mut reply = watch(&server, &[("Authorization", "Bearer secret")]);
    assert_eq!(reply.status, 200);
    assert_eq!(next(&mut reply).unwrap().name, "layout");
}

#[test]
fn a_stream_that_was_cut_goes_on_without_a_gap() {
    let server = Setup::default().start();
    let mut reply = watch(&server, &[]);
    let layout = next(&mut reply).unwrap();
    assert_eq!(layout.name, "layout");
    assert_eq!(layout.data["parts"][0]["window"], "full");
    assert!(layout.data["bytes"].as_u64().unwrap() > 0);
    let first = next(&mut reply).unwrap();
    assert_eq!(
        (first.name.as_str(), &first.data["whole"]),
        ("update", &json!(true))
    );
    assert_eq!(first.data["parts"][0]["n_cells"], 1024);
    continued(&server, PROMPT);
    let seen = until(&mut reply, "ended");
    let last = seen.last().unwrap();
    assert_eq!(last.data["whole"], false);
    assert!(!last.data.to_string().contains("girl"), "{}", last.data);
    let all = events(&seen);
    let kinds: Vec<&str> = all
        .iter()
        .map(|event| event["kind"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["submitted", "admitted", "first_token", "cached", "ended"]
    );
    let id = last.id.clone().unwrap();
    drop(reply);

    // A viewer that comes back gets the events that it missed.
    continued(&server, &format!("{PROMPT} She lost it"));
    let mut again = watch(&server, &[("Last-Event-ID", &id)]);
    assert_eq!(next(&mut again).unwrap().name, "layout");
    let missed = until(&mut again, "ended");
    assert_eq!(missed[0].data["whole"], true);
    let missed = events(&missed);
    let number = |event: &Value| event["n"].as_u64().unwrap();
    assert_eq!(number(&missed[0]), number(all.last().unwrap()) + 1);
    let admitted = missed
        .iter()
        .find(|event| event["kind"] == "admitted")
        .unwrap();
    assert!(
        admitted["reuse"]["n_tokens"].as_u64().unwrap() > 8,
        "{admitted}"
    );
    assert_eq!(admitted["reuse"]["why"], "differs");
    // Of another process, or none: as if it came for the first time, with all events that are kept.
    for id in ["other.3", "nonsense", ""] {
        let mut reply = watch(&server, &[("Last-Event-ID", id)]);
        next(&mut reply).unwrap();
        let kept = events(&[next(&mut reply).unwrap()]);
        assert_eq!(kept, [all.as_slice(), &missed].concat());
    }
}

#[test]
fn text_is_shown_where_it_was_asked_for() {
    let mut setup = Setup::default();
    setup.service.excerpts = ExcerptLen::Tokens(NonZeroU32::new(24).unwrap());
    let server = setup.start();
    continued(&server, PROMPT);
    let mut reply = watch(&server, &[]);
    next(&mut reply).unwrap();
    let update = next(&mut reply).unwrap();
    let head = update.data["cached"][0]["text"]["head"].as_str().unwrap();
    assert!(head.contains("a little girl with a red ball"), "{head}");
}

#[test]
fn viewers_are_counted_and_leave_with_the_server() {
    let mut server = Setup::default().start();
    let mut viewers: Vec<Reply> = (0..16).map(|_| watch(&server, &[])).collect();
    for viewer in &mut viewers {
        assert_eq!(next(viewer).unwrap().name, "layout");
        assert_eq!(next(viewer).unwrap().name, "update");
    }
    let one_more = watch(&server, &[]).finish();
    assert_eq!(one_more.status, 429);
    assert!(one_more.header("retry-after").is_some());
    server.stop();
    for mut viewer in viewers {
        while next(&mut viewer).is_some() {}
    }
    server.join();
}

/// A place is kept by who comes again: a viewer that has stopped reading does not.
#[test]
fn a_stream_is_renewed_without_a_gap() {
    let mut setup = Setup::default();
    setup.server.view_time = std::time::Duration::from_millis(500);
    let server = setup.start();
    continued(&server, PROMPT);
    let mut viewers: Vec<Reply> = (0..16).map(|_| watch(&server, &[])).collect();
    assert_eq!(watch(&server, &[]).finish().status, 429);
    let mut last = None;
    while let Some(sent) = next(&mut viewers[0]) {
        last = Some((sent.name, sent.id.or(last.and_then(|(_, id)| id))));
    }
    let (name, id) = last.unwrap();
    assert_eq!(name, "renew");
    continued(&server, &format!("{PROMPT} She lost it"));
    // The others have read nothing, and their places are free.
    let mut again = watch(&server, &[("Last-Event-ID", &id.unwrap())]);
    assert_eq!(again.status, 200);
    assert_eq!(next(&mut again).unwrap().name, "layout");
    let seen = events(&until(&mut again, "ended"));
    assert_eq!(seen[0]["kind"], "submitted");
}
