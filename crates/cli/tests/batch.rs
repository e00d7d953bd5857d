//! `cellar batch`: the texts that `cellar run` gives one by one, in the order of the requests.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use crate::support;

use std::path::PathBuf;

use crate::support::{cellar, failure, json as run_json, output, with_template};
use serde_json::{Value, json};

struct Files {
    folder: tempfile::TempDir,
}

impl Files {
    fn new(lines: &[Value]) -> Self {
        let files = Self {
            folder: tempfile::tempdir().unwrap(),
        };
        let text: Vec<String> = lines.iter().map(Value::to_string).collect();
        std::fs::write(files.path("in"), text.join("\n")).unwrap();
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn arg(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }
}

/// Answers on standard output.
fn batch(args: &[&str]) -> Vec<Value> {
    let (stdout, _) = output(&[&["batch", "-c", "300"], args].concat());
    answers(&stdout)
}

fn answers(text: &str) -> Vec<Value> {
    let lines = text.lines();
    let answers: Vec<Value> = lines.map(|l| serde_json::from_str(l).unwrap()).collect();
    for (index, answer) in answers.iter().enumerate() {
        assert_eq!(answer["index"], index, "{answer}");
    }
    answers
}

fn requests() -> Vec<Value> {
    let prompts = ["Once upon a time", "Tom had a red", "The sun", "One day"];
    let request = |at: usize| {
        let temperature = [0.0, 0.8][at % 2];
        json!({
            "prompt": (prompts[at % 4].repeat(1 + at % 3)),
            "id": (format!("request {at}")),
            "max_tokens": (5 + at * 7 % 20),
            "temperature": temperature,
            "seed": at,
        })
    };
    (0..12).map(request).collect()
}

#[test]
fn answers_are_those_of_run() {
    let requests = requests();
    let files = Files::new(&requests);
    let input = files.arg("in");
    for parallel in ["1", "5"] {
        let answers = batch(&["-f", &input, "--parallel", parallel]);
        assert_eq!(answers.len(), requests.len());
        for (request, answer) in requests.iter().zip(&answers) {
            let of = |key: &str| request[key].to_string();
            let (n, temp, seed) = (of("max_tokens"), of("temperature"), of("seed"));
            let prompt = request["prompt"].as_str().unwrap();
            let args = [
                "run", "--json", "--raw", "-c", "300", "-n", &n, "--temp", &temp,
            ];
            let alone = run_json(&[&args[..], &["--seed", &seed, prompt]].concat());
            assert_eq!(answer["text"], alone["text"], "{request}");
            assert_eq!(answer["finish_reason"], alone["finish"], "{request}");
            assert_eq!(answer["prompt_tokens"], alone["prompt_tokens"]);
            assert_eq!(answer["tokens"], alone["tokens"].as_array().unwrap().len());
            assert_eq!(answer["id"], request["id"]);
        }
    }
}

/// A shared prefix is computed once, unless that is turned off.
#[test]
fn prompts_that_begin_alike_are_computed_once() {
    let prompt = "Once upon a time there was a little girl who lived in a house by the sea. She";
    let requests = vec![json!({"prompt": prompt, "max_tokens": 4, "temperature": 0}); 3];
    let files = Files::new(&requests);
    let input = files.arg("in");
    let answers = batch(&["-f", &input, "--parallel", "1"]);
    let n_prompt = answers[0]["prompt_tokens"].as_u64().unwrap();
    let never = json!({"tokens": 0, "missed": {"reason": "never_seen"}});
    assert_eq!(answers[0]["reuse"], never);
    assert_eq!(answers[1]["reuse"], json!({"tokens": (n_prompt - 1)}));
    assert_eq!(answers[1]["text"], answers[0]["text"]);
    let off = batch(&["-f", &input, "--parallel", "1", "--no-prefix-cache"]);
    let disabled = json!({"tokens": 0, "missed": {"reason": "disabled"}});
    assert_eq!(off[2]["reuse"], disabled);
    assert_eq!(off[2]["text"], answers[0]["text"]);
}

/// A request that cannot be computed has an error in its line, and the others their texts.
#[test]
fn a_request_that_does_not_fit_has_an_error() {
    let requests = [
        json!({"prompt": "Once", "max_tokens": 3, "temperature": 0}),
        json!({"prompt": ("Once upon a time ".repeat(200)), "id": 7}),
        json!({"prompt": "The sun", "max_tokens": 3, "temperature": 0}),
    ];
    let files = Files::new(&requests);
    let input = files.arg("in");
    let done = cellar()
        .args(["batch", "-c", "300", "-f", &input])
        .assert()
        .code(1);
    let stdout = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    let stderr = String::from_utf8(done.get_output().stderr.clone()).unwrap();
    assert!(stderr.contains("1 of 3 requests failed"), "{stderr}");
    let answers = answers(&stdout);
    let error = answers[1]["error"].as_str().unwrap();
    assert!(error.contains("does not fit the 300 that"), "{error}");
    assert_eq!(answers[1]["id"], 7);
    assert_eq!(
        (&answers[0]["tokens"], &answers[2]["tokens"]),
        (&json!(3), &json!(3))
    );
}

#[test]
fn messages_are_rendered_by_the_template() {
    let template = "{% for m in messages %}{{ m.content }} {% endfor %}";
    let messages = json!([{"role": "user", "content": "Once upon a time"}]);
    let files = Files::new(&[json!({"messages": messages, "max_tokens": 6, "temperature": 0})]);
    let model = with_template(&files.folder, template);
    let input = files.arg("in");
    let answers = batch(&["-f", &input, "-m", &model]);
    let args = [
        "run", "--json", "-c", "300", "-n", "6", "--temp", "0", "-m", &model,
    ];
    let alone = run_json(&[&args[..], &["Once upon a time"]].concat());
    assert_eq!(answers[0]["text"], alone["text"]);
    // Without a template a message cannot be rendered.
    let (code, message) = failure(&["batch", "-f", &input]);
    assert_eq!(code, 2);
    assert!(
        message.contains("line 1: the model has no chat template"),
        "{message}"
    );
}

/// An output that was interrupted, even inside a character, is continued behind its last whole
/// line.
#[test]
fn an_output_is_continued() {
    let requests = requests();
    let files = Files::new(&requests);
    let (input, out) = (files.arg("in"), files.arg("out"));
    let args = ["batch", "-c", "300", "-f", &input, "-o", &out];
    let (stdout, _) = output(&args);
    assert_eq!(stdout, "");
    let whole = std::fs::read_to_string(&out).unwrap();
    assert_eq!(answers(&whole).len(), requests.len());

    let texts = |text: &str| -> Vec<Value> {
        let answers = answers(text).into_iter();
        answers.map(|answer| answer["text"].clone()).collect()
    };
    let ends: Vec<usize> = whole.match_indices('\n').map(|(at, _)| at + 1).collect();
    let mut cut = whole.as_bytes()[..ends[4]].to_vec();
    cut.extend(b"{\"index\":5,\"text\":\"\xc3");
    std::fs::write(&out, cut).unwrap();
    let (_, stderr) = output(&[&args[..], &["--resume"]].concat());
    assert!(stderr.contains("7 requests in"), "{stderr}");
    let continued = std::fs::read_to_string(&out).unwrap();
    assert!(continued.starts_with(&whole[..ends[4]]));
    assert_eq!(texts(&continued), texts(&whole));

    let (_, stderr) = output(&[&args[..], &["--resume"]].concat());
    assert!(stderr.contains("0 requests in"), "{stderr}");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), continued);

    std::fs::write(&out, "{\"index\":1}\n").unwrap();
    let (code, message) = failure(&[&args[..], &["--resume"]].concat());
    assert_eq!(code, 1);
    assert!(message.contains("line 1 is not answer 0"), "{message}");
}

/// Answers of other requests are not continued, nor a file that another program writes.
#[test]
fn an_output_of_others_is_not_continued() {
    let line = |name: &str| json!({"id": name, "prompt": "Once", "max_tokens": 2});
    let openai = |name: &str| json!({"custom_id": name, "body": {"prompt": "a", "max_tokens": -1}});
    for (mine, other) in [
        ([line("a"), line("b")], [line("c"), line("b")]),
        ([openai("a"), openai("b")], [openai("c"), openai("b")]),
    ] {
        let (mine, other) = (Files::new(&mine), Files::new(&other));
        let out = mine.arg("out");
        let args = ["batch", "-c", "64", "-o", &out, "-f"];
        output(&[&args[..], &[&mine.arg("in")]].concat());
        let before = std::fs::read_to_string(&out).unwrap();
        let (code, message) = failure(&[&args[..], &[&other.arg("in"), "--resume"]].concat());
        assert_eq!(code, 1);
        let wanted = "line 1 answers another request";
        assert!(
            message.contains(wanted) && message.contains("\"c\""),
            "{message}"
        );
        let file = std::fs::File::open(&out).unwrap();
        file.lock().unwrap();
        let (code, message) = failure(&[&args[..], &[&mine.arg("in")]].concat());
        assert_eq!(code, 1);
        assert!(
            message.contains("another program writes answers"),
            "{message}"
        );
        assert_eq!(std::fs::read_to_string(&out).unwrap(), before);
    }
}

/// The requests, the answers of another run, and what stdout holds already, survive.
#[test]
fn what_is_there_is_not_destroyed() {
    let files = Files::new(&[json!({"prompt": "a", "max_tokens": 1})]);
    let (input, out) = (files.arg("in"), files.arg("out"));
    let before = std::fs::read_to_string(&input).unwrap();
    for args in [
        &["-f", &input, "-o", &input][..],
        &["-f", &input, "-o", &input, "--resume"],
    ] {
        let (code, message) = failure(&[&["batch"], args].concat());
        assert_eq!(code, 2);
        let wanted = "is read as --file: choose another file";
        assert!(message.contains(wanted), "{message}");
        assert_eq!(std::fs::read_to_string(&input).unwrap(), before);
    }
    std::fs::write(&out, "{\"index\":0}\n").unwrap();
    failure(&["batch", "-f", &input, "-o", &out, "-m", "/absent/model"]);
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "{\"index\":0}\n");
    for (more, wanted) in [
        (
            &["-o", "-", "--resume"][..],
            "--resume continues a file, and -o '-' is none",
        ),
        (&["--trace", "-"], "both write to stdout"),
        (&["--trace", "-", "-o", "-"], "both write to stdout"),
    ] {
        let (code, message) = failure(&[&["batch", "-f", &input], more].concat());
        assert_eq!(code, 2);
        assert!(message.contains(wanted), "{message}");
    }
}

#[test]
fn lines_that_are_no_requests_are_refused_with_their_number() {
    for (line, wanted) in [
        ("{\"prompt\": 3}", "line 2: invalid type"),
        ("{\"prompt\": \"a\"", "line 2: EOF"),
        ("{\"prompt\": \"a\", \"m\": 2}", "line 2: unknown field `m`"),
        (
            "{\"prompt\": \"a\", \"max_tokens\": -2}",
            "line 2: \"max_tokens\" is -2: it must be at least 0, or -1 for no limit in column 33",
        ),
        (
            "{\"prompt\": \"a\", \"n\": 0}",
            "line 2: n is 0: it must be",
        ),
        (
            "{\"prompt\": \"a\", \"n\": 3, \"best_of\": 2}",
            "line 2: best_of is 2: it must be at least n, which is 3",
        ),
        (
            "{\"prompt\": \"a\", \"logprobs\": 21}",
            "line 2: log probabilities of the 21 likeliest tokens: at most 20",
        ),
        (
            "{\"id\": 1}",
            "line 2 has neither \"prompt\" nor \"messages\"",
        ),
        (
            "{\"prompt\": \"a\", \"messages\": []}",
            "line 2 has both \"prompt\" and \"messages\"",
        ),
        (
            "{\"prompt\": \"a\", \"stop\": [\"\"]}",
            "line 2: a text of \"stop\"",
        ),
        ("{\"prompt\": \"a\", \"top_p\": 2}", "line 2: top-p 2"),
        (
            "{\"prompt\": \"a\", \"top_k\": -2}",
            "line 2: \"top_k\" is -2: it must be at least 1, or 0 or -1 for all tokens",
        ),
        (
            "{\"prompt\": \"a\", \"schema\": 7}",
            "line 2: invalid type: integer `7`",
        ),
        (
            "{\"prompt\": \"a\", \"schema\": {\"type\": \"number of days\"}}",
            "line 2: \"schema\": ",
        ),
        (
            "{\"prompt\": \"a\", \"logit_bias\": {\"7\": 200}}",
            "line 2: the bias of token 7 is 200: it must be between -100 and 100",
        ),
        (
            "{\"prompt\": \"a\", \"logit_bias\": {\"999999\": 1}}",
            "line 2: the bias is of token 999999",
        ),
        (
            "{\"prompt\": \"a\", \"min_tokens\": 9, \"max_tokens\": 8}",
            "line 2: the text must have at least 9 tokens, but may have 8 at most",
        ),
    ] {
        let files = Files::new(&[json!({"prompt": "a"})]);
        let input = files.arg("in");
        std::fs::write(&input, format!("{{\"prompt\": \"a\"}}\n{line}\n")).unwrap();
        let (code, message) = failure(&["batch", "-f", &input]);
        assert_eq!(code, 2, "{message}");
        assert!(
            message.contains(wanted) && message.contains(&input),
            "{message}"
        );
    }
    let files = Files::new(&[]);
    let (code, message) = failure(&["batch", "-f", &files.arg("in")]);
    assert_eq!(code, 2);
    assert!(message.contains("there are no requests"), "{message}");
}

#[test]
fn a_top_k_of_minus_one_keeps_all_tokens() {
    let line = |top_k: i64| {
        json!({"prompt": "Once upon a time", "max_tokens": 12, "seed": 4, "temperature": 1.5,
               "top_p": 1, "min_p": 0, "top_k": top_k})
    };
    let files = Files::new(&[line(-1), line(0), line(1)]);
    let answers = batch(&["-f", &files.arg("in"), "--top-k", "1"]);
    assert_eq!(answers[0]["text"], answers[1]["text"]);
    assert_ne!(answers[0]["text"], answers[2]["text"]);
}

#[test]
fn a_line_has_a_schema_of_its_own() {
    let mood = json!({"type": "object", "required": ["mood"],
                      "properties": {"mood": {"enum": ["glad", "sad"]}}});
    let line = |schema: &Value| json!({"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "schema": schema});
    let with_texts = |mut line: Value, n: u32| {
        line["n"] = json!(n);
        line
    };
    let format = json!({"type": "json_schema", "json_schema": {"name": "mood", "schema": mood}});
    let lines = [
        line(&mood),
        with_texts(line(&json!({"enum": [17]})), 2),
        json!({"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}),
        json!({"custom_id": "a", "body": {"prompt": "Once upon a time", "max_tokens": 60,
               "temperature": 0, "response_format": format}, "url": "/v1/completions"}),
    ];
    let files = Files::new(&lines);
    let answers = batch(&["-f", &files.arg("in")]);
    let text = |at: usize| answers[at]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text(0)).unwrap();
    assert!(["glad", "sad"].contains(&value["mood"].as_str().unwrap()));
    assert_eq!(value.as_object().unwrap().len(), 1, "{value}");
    for text in answers[1]["texts"].as_array().unwrap() {
        assert_eq!(text["text"], "17");
    }
    assert_eq!(answers[1]["texts"].as_array().unwrap().len(), 2);
    assert!(!text(2).starts_with('{'), "{}", text(2));
    let body = &answers[3]["response"]["body"];
    assert_eq!(body["choices"][0]["text"], text(0));
}

#[test]
fn requests_come_through_a_pipe() {
    let request = json!({"prompt": "Once upon a time", "max_tokens": 3, "stop": " a"});
    let done = cellar()
        .args(["batch", "-c", "300", "-f", "-"])
        .write_stdin(format!("{request}\n\n{request}\n"))
        .assert()
        .success();
    let stdout = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    assert_eq!(answers(&stdout).len(), 2);
}

/// What a batch of six stories answers with these flags.
fn six_stories(flags: &[&str]) -> Vec<serde_json::Value> {
    let line = |seed: u64| {
        let prompt = format!("Once upon a time number {seed} there was");
        serde_json::json!({"prompt": prompt, "max_tokens": 60, "seed": seed}).to_string()
    };
    let input: Vec<String> = (0..6).map(line).collect();
    let args = ["batch", "-f", "-", "--backend", "cpu", "--no-prefix-cache"];
    support::json_lines(&[&args[..], flags].concat(), &input.join("\n"))
}

/// Requests that have to wait in the middle go on from the host's memory, with the text that they
/// have alone; the trace shows it, and a replay computes what it saves.
#[test]
fn requests_that_wait_keep_what_was_computed_on_the_host() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.jsonl").display().to_string();
    let alone = six_stories(&["-c", "1600", "--parallel", "1"]);
    let short = ["-c", "160", "--parallel", "4", "--trace", &trace];
    let swapped = six_stories(&[&short[..], &["--swap-memory", "16M"]].concat());
    for (swapped, alone) in swapped.iter().zip(&alone) {
        assert_eq!(swapped["text"], alone["text"]);
    }
    let replay = |extra: &[&str]| {
        let report = support::json(&[&["replay", &trace, "--json"], extra].concat());
        let count = |of: &str, key: &str| report[of][key].as_u64().unwrap();
        assert!(count("recorded", "n_swapped_bytes") > 0, "{report}");
        assert_eq!(count("recorded", "n_recomputed"), 0, "{report}");
        ["n_swapped_bytes", "n_recomputed"].map(|key| count("replayed", key))
    };
    let [n_swapped, n_recomputed] = replay(&[]);
    assert!(n_swapped > 0 && n_recomputed == 0);
    let [n_swapped, n_recomputed] = replay(&["--swap-memory", "1"]);
    assert!(n_swapped == 0 && n_recomputed > 0);
}

/// The same with files for what is beyond half of the host's memory, none of which is left.
#[test]
fn requests_that_wait_go_on_to_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let (trace, swap) = (path("trace.jsonl"), path("swap"));
    let alone = six_stories(&["-c", "1600", "--parallel", "1"]);
    // Half of it is less than a state has.
    let short = ["-c", "160", "--parallel", "4", "--trace", &trace];
    let files = [
        "--swap-memory",
        "100K",
        "--swap-dir",
        &swap,
        "--swap-disk",
        "1G",
    ];
    let swapped = six_stories(&[short, files].concat());
    for (swapped, alone) in swapped.iter().zip(&alone) {
        assert_eq!(swapped["text"], alone["text"]);
    }
    assert_eq!(std::fs::read_dir(&swap).unwrap().count(), 0);
    let replay = |extra: &[&str]| {
        let report = support::json(&[&["replay", &trace, "--json"], extra].concat());
        let count = |of: &str| report[of]["n_spilled_bytes"].as_u64().unwrap();
        ["recorded", "replayed"].map(count)
    };
    let [recorded, replayed] = replay(&[]);
    assert!(recorded > 0 && replayed > 0);
    // A disk of one byte takes none.
    assert_eq!(replay(&["--swap-disk", "1"]), [recorded, 0]);
}

#[test]
fn lines_of_openai_are_answered_in_its_form() {
    let named = |name: &str, body: Value| json!({"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body});
    let body = |body: Value| named("a", body);
    let plain = json!({"prompt": "Once", "max_tokens": 3, "temperature": 0});
    let lines = [
        plain.clone(),
        body(
            json!({"model": "any", "prompt": "Once", "max_completion_tokens": 3, "temperature": 0, "n": 2}),
        ),
        named("b", json!({"prompt": "Once ".repeat(400), "max_tokens": 3})),
    ];
    let files = Files::new(&lines);
    let args = ["batch", "-f", &files.arg("in"), "-c", "200"];
    let done = cellar().args(args).assert().code(1);
    let text = String::from_utf8(done.get_output().stdout.clone()).unwrap();
    let answers = answers(&text);
    let [alone, answer, failed] = &answers[..] else {
        panic!("{text}");
    };
    assert_eq!(answer["index"], 1);
    assert_eq!(answer["id"], "batch_req_1");
    assert_eq!(answer["custom_id"], "a");
    assert_eq!(answer["error"], Value::Null);
    let response = &answer["response"];
    assert_eq!(response["status_code"], 200);
    let body_of = &response["body"];
    assert_eq!(body_of["object"], "text_completion");
    assert_eq!(body_of["model"], "any");
    assert_eq!(body_of["choices"].as_array().unwrap().len(), 2);
    for choice in body_of["choices"].as_array().unwrap() {
        assert_eq!(choice["text"], alone["text"]);
        assert_eq!(choice["finish_reason"], "length");
    }
    assert_eq!(body_of["usage"]["completion_tokens"], 6);
    assert_eq!(body_of["usage"]["prompt_tokens"], alone["prompt_tokens"]);
    assert_eq!(failed["response"], Value::Null);
    assert!(
        failed["error"]["message"].as_str().unwrap().contains("200"),
        "{failed}"
    );

    for (line, wanted) in [
        (
            body(json!({"prompt": "x", "tools": []})),
            "unknown field `tools`",
        ),
        (
            body(json!({"prompt": "x", "stream": true})),
            "'stream' is true",
        ),
        (
            body(json!({"prompt": "x", "logprobs": 2})),
            "'logprobs' is not for lines of OpenAI's form",
        ),
        (
            json!({"custom_id": "a", "method": "GET", "body": {"prompt": "x"}}),
            "'method' is 'GET'",
        ),
        (
            json!({"custom_id": "a", "url": "/v1/embeddings", "body": {}}),
            "/v1/chat/completions",
        ),
        (json!({"custom_id": "a"}), "missing field `body`"),
    ] {
        let files = Files::new(&[line]);
        let (code, message) = failure(&["batch", "-f", &files.arg("in")]);
        assert!(code == 2 && message.contains(wanted), "{message}");
    }
    // The caller could not tell the answers of two requests of one name apart.
    let files = Files::new(&[body(plain.clone()), body(plain)]);
    let (code, message) = failure(&["batch", "-f", &files.arg("in")]);
    let wanted = "line 2: another line has the 'custom_id' 'a'";
    assert!(code == 2 && message.contains(wanted), "{message}");
}
