//! `--expert-memory`: mixtures whose experts are read as they are needed, and what is told of it.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::path::Path;

use crate::serve::Server;
use crate::support::{directory, failure, json, output};
use model_tests::http::{get, open, post, request, send_raw};
use serde_json::{Value, json as object};

/// Mixtures of several kinds: shared experts, experts in some layers, groups, biases.
const MIXTURES: [&str; 4] = ["qwen3_moe", "qwen2_moe", "glm4_moe", "phimoe"];

/// The file of a recipe.
fn converted(recipe: &str) -> (tempfile::TempDir, String) {
    let from = directory(recipe);
    let to = from.path().join("model.gguf").display().to_string();
    let folder = from.path().display().to_string();
    output(&["convert", &folder, &to, "--type", "f32"]);
    (from, to)
}

fn logits(model: &str, more: &[&str]) -> Vec<u8> {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("logits").display().to_string();
    let ids = "1,5,9,200,31,77,4,18,250,99,12,3";
    let args = ["logits", "-m", model, "--tokens", ids, "--out", &out];
    output(&[&args[..], more].concat());
    std::fs::read(out).unwrap()
}

fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("{name}: {report}"))
}

#[test]
fn logits_and_texts_are_those_of_a_model_held_whole() {
    for recipe in MIXTURES {
        let (_folder, model) = converted(recipe);
        let whole = logits(&model, &[]);
        let run = ["run", "-m", &model, "Once upon", "--temp", "0", "-n", "12"];
        let run = [&run[..], &["--backend", "cpu", "--json"]].concat();
        let text = json(&run);
        assert_eq!(text.get("experts"), None, "{text}");
        // One matrix, some, all.
        for memory in ["16K", "100K", "64M"] {
            let limited = ["--expert-memory", memory];
            assert!(logits(&model, &limited) == whole, "{recipe}: {memory}");
            let limited = json(&[&run[..], &limited].concat());
            assert_eq!(limited["tokens"], text["tokens"], "{recipe}: {memory}");
            let experts = &limited["experts"];
            let (resident, budget) = (number(experts, "resident"), number(experts, "budget"));
            assert!(resident > 0 && resident <= budget, "{experts}");
            assert!(number(experts, "misses") > 0, "{experts}");
            let reads_all_once = memory == "64M";
            if reads_all_once {
                assert!(
                    number(experts, "read") <= number(experts, "total"),
                    "{experts}"
                );
                assert!(
                    number(experts, "hits") > number(experts, "misses"),
                    "{experts}"
                );
            }
        }
    }
}

/// Texts that come at once to two mixtures, with too little memory for their experts and for their
/// contexts, so that some are preempted; and clients that go while theirs is computed.
#[test]
fn texts_are_the_same_while_others_are_preempted_and_cancelled() {
    const PROMPTS: [&str; 3] = ["Once upon", "The sun", "Tom had"];
    let (folder, first) = converted("qwen3_moe");
    let (_other, second) = converted("qwen2_moe");
    let renamed = folder.path().join("second.gguf").display().to_string();
    std::fs::copy(second, &renamed).unwrap();
    let models = [("model", first), ("second", renamed)];
    let alone = models.clone().map(|(_, path)| {
        PROMPTS.map(|prompt| {
            let run = [
                "run", "-m", &path, prompt, "--raw", "--temp", "0", "-n", "40",
            ];
            json(&[&run[..], &["--json"]].concat())["text"].clone()
        })
    });
    let [(_, first), (_, second)] = &models;
    let args = ["-m", first, "-m", second, "-c", "96", "--parallel", "3"];
    let server = Server::start(&[&args[..], &["--expert-memory", "48K"]].concat());
    let address = server.address;
    let body = |model: &str, prompt: &str| object!({"model": model, "prompt": prompt, "max_tokens": 40, "temperature": 0});
    for round in 0..2 {
        std::thread::scope(|scope| {
            for ((model, _), alone) in models.iter().zip(&alone) {
                for (prompt, alone) in PROMPTS.iter().zip(alone) {
                    let body = body(model, prompt);
                    scope.spawn(move || {
                        let answer = post(address, "/v1/completions", &body);
                        assert_eq!(answer.status, 200, "{}", answer.body);
                        assert_eq!(answer.json()["choices"][0]["text"], *alone, "{body}");
                    });
                }
                let headers = [("content-type", "application/json")];
                let body = body(model, "One day").to_string();
                let asked = request("POST", "/v1/completions", &headers, &body);
                scope.spawn(move || {
                    let stream = send_raw(address, asked.as_bytes()).unwrap();
                    std::thread::sleep(std::time::Duration::from_millis(20 + 30 * round));
                    drop(stream);
                });
            }
        });
    }
    let metrics = get(address, "/metrics").body;
    let value = |name: &str| -> f64 {
        let line = metrics.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("{name}: {metrics}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert!(value("cellar_preemptions_total") > 0.0, "{metrics}");
    let mut taken = 0.0;
    for (model, _) in &models {
        let of = |name: &str| value(&format!("{name}{{model_name=\"{model}\"}}"));
        assert!(of("cellar_expert_misses_total") > 0.0);
        assert_eq!(of("cellar_expert_budget_bytes"), f64::from(48 << 10));
        taken += of("cellar_expert_bytes");
    }
    // Both have it together.
    assert!(taken > 0.0 && taken <= f64::from(48 << 10), "{taken}");
}

/// A value of a model in what `GET /metrics` answers.
fn metric(metrics: &str, name: &str, model: &str) -> u64 {
    let start = format!("{name}{{model_name=\"{model}\"}} ");
    let found = metrics.lines().find_map(|line| line.strip_prefix(&start));
    let found = found.unwrap_or_else(|| panic!("{start}: {metrics}"));
    found.parse().unwrap()
}

/// Memory for one and a half of two mixtures: what one is not asked for is the other's, and all of
/// it once one is unloaded.
#[test]
fn mixtures_of_a_server_share_memory() {
    let (folder, first) = converted("qwen3_moe");
    let second = folder.path().join("second.gguf").display().to_string();
    std::fs::copy(&first, &second).unwrap();
    let total = number(
        &json(&["plan", &first, "--expert-memory", "1G", "--json"])["experts"],
        "total",
    );
    let memory = (total * 3 / 2).to_string();
    let args = [
        "-m",
        &first,
        "-m",
        &second,
        "-c",
        "128",
        "--expert-memory",
        &memory,
    ];
    let server = Server::start(&args);
    let ask = |model: &str, prompt: &str| {
        let body = object!({"model": model, "prompt": prompt, "max_tokens": 60, "temperature": 0});
        let answer = post(server.address, "/v1/completions", &body);
        assert_eq!(answer.status, 200, "{}", answer.body);
        answer.json()["choices"][0]["text"].clone()
    };
    let of = |name: &str, model: &str| metric(&get(server.address, "/metrics").body, name, model);
    // In one answer, as memory goes from one to the other.
    let taken = || {
        let metrics = get(server.address, "/metrics").body;
        let taken = ["model", "second"].map(|model| metric(&metrics, "cellar_expert_bytes", model));
        assert!(taken[0] + taken[1] <= total * 3 / 2, "{taken:?} of {total}");
    };
    let prompts = [
        "Once upon",
        "The sun",
        "Tom had",
        "One day",
        "a b c d e f g",
        "0 1 2 3 4",
    ];
    let run = |prompt: &str| {
        let run = [
            "run", "-m", &first, prompt, "--raw", "--temp", "0", "-n", "60",
        ];
        json(&[&run[..], &["--json"]].concat())["text"].clone()
    };
    for prompt in prompts {
        let alone = run(prompt);
        std::thread::scope(|scope| {
            for model in ["model", "second"] {
                let (ask, alone) = (&ask, &alone);
                scope.spawn(move || assert_eq!(ask(model, prompt), *alone));
            }
        });
        taken();
    }
    for _ in 0..6 {
        prompts.iter().for_each(|prompt| {
            ask("second", prompt);
        });
    }
    // What it used is all there now, and the other one has the rest.
    let misses = of("cellar_expert_misses_total", "second");
    prompts.iter().for_each(|prompt| {
        ask("second", prompt);
    });
    assert_eq!(of("cellar_expert_misses_total", "second"), misses);
    taken();
    let unload = post(
        server.address,
        "/models/unload",
        &object!({"model": "model"}),
    );
    assert_eq!(unload.status, 200, "{}", unload.body);
    assert!(of("cellar_expert_bytes", "second") <= total);
    assert_eq!(ask("second", prompts[0]), run(prompts[0]));
}

/// The live view has each expert: whole at first, then those that changed.
#[test]
fn the_live_view_shows_experts() {
    let (_folder, model) = converted("qwen3_moe");
    let server = Server::start(&["-m", &model, "-c", "128", "--expert-memory", "100K"]);
    let mut view = open(server.address, &request("GET", "/view/events", &[], ""));
    let mut next = || loop {
        let text = view.next_chunk().unwrap().unwrap();
        if text.starts_with("event: update") {
            let data = text.lines().find_map(|line| line.strip_prefix("data: "));
            return serde_json::from_str::<Value>(data.unwrap()).unwrap();
        }
    };
    let first = next()["experts"].clone();
    assert_eq!(first["whole"], true);
    let sizes: Vec<u64> = serde_json::from_value(first["n_experts"].clone()).unwrap();
    assert!(
        !sizes.is_empty() && sizes.iter().all(|n| *n == 6),
        "{first}"
    );
    assert_eq!(first["n_matrices"], object!(vec![3; sizes.len()]));
    let mut cells = std::collections::BTreeMap::new();
    let mut take = |experts: &Value| {
        let set: Vec<[u64; 5]> = serde_json::from_value(experts["set"].clone()).unwrap();
        for [layer, expert, resident, uses, hits] in set {
            assert!(resident <= 3 && hits <= uses, "{experts}");
            cells.insert((layer, expert), [resident, uses, hits]);
        }
        let uses: u64 = cells.values().map(|[_, uses, _]| uses).sum();
        let resident: u64 = cells.values().map(|[resident, ..]| resident).sum();
        (cells.len() as u64, uses, resident)
    };
    let n_experts: u64 = sizes.iter().sum();
    assert_eq!(take(&first).0, n_experts);
    let body = object!({"prompt": "Once upon", "max_tokens": 12, "temperature": 0});
    assert_eq!(post(server.address, "/v1/completions", &body).status, 200);
    let last = loop {
        let update = next();
        assert_eq!(update["experts"]["whole"], false);
        let (n, uses, resident) = take(&update["experts"]);
        let events = update["events"].as_array().unwrap();
        if events.iter().any(|event| event["kind"] == "ended") {
            assert_eq!(n, n_experts);
            // Of each step of a token two experts of each layer.
            assert!(uses >= 2 * 12 * sizes.len() as u64, "{uses}");
            assert!(resident > 0);
            break update["experts"]["used"].clone();
        }
    };
    assert_eq!(number(&last, "budget"), 100 << 10);
    assert!(number(&last, "hits") > 0 && number(&last, "resident") <= 100 << 10);
    let plain = Server::start(&["-m", &model, "-c", "128", "--backend", "cpu"]);
    let mut view = open(plain.address, &request("GET", "/view/events", &[], ""));
    let mut updates = (0..2).map(|_| view.next_chunk().unwrap().unwrap());
    let update = updates
        .find(|text| text.starts_with("event: update"))
        .unwrap();
    assert!(update.contains("\"experts\":null"), "{update}");
}

#[test]
fn what_routers_chose_is_replayed() {
    let (folder, model) = converted("qwen3_moe");
    let trace = folder.path().join("experts.jsonl").display().to_string();
    let run = ["run", "-m", &model, "Once upon", "--temp", "0", "-n", "40"];
    let limited = [
        "--expert-memory",
        "100K",
        "--expert-trace",
        &trace,
        "--json",
    ];
    let experts = json(&[&run[..], &limited].concat())["experts"].clone();
    let replay = |more: &[&str]| json(&[&["replay", &trace, "--json"], more].concat());
    let same = replay(&[]);
    assert_eq!(number(&same, "budget"), 100 << 10);
    assert_eq!(number(&same, "total"), number(&experts, "total"));
    let rule = |report: &Value, name: &str| {
        let mut rules = report["rules"].as_array().unwrap().iter();
        rules.find(|r| r["rule"] == name).unwrap().clone()
    };
    let value = rule(&same, "value");
    // A run also reads ahead, which a replay does not.
    let uses = number(&experts, "hits") + number(&experts, "misses");
    let replayed = number(&value, "n_hits") + number(&value, "n_misses");
    assert_eq!(replayed, uses);
    assert!(number(&value, "most_bytes") <= 100 << 10);
    let future = rule(&same, "future");
    for name in ["value", "recency", "frequency"] {
        let other = rule(&same, name);
        assert!(
            number(&future, "n_hits") >= number(&other, "n_hits"),
            "{same}"
        );
    }
    let all = replay(&["--budget", "64M"]);
    let read_once = number(&rule(&all, "value"), "bytes_read");
    assert!(read_once <= number(&experts, "total"), "{all}");
    let (text, _) = output(&["replay", &trace, "--budget", "200K"]);
    assert!(
        text.contains("200.00 KiB") && text.contains("frequency"),
        "{text}"
    );
    let (code, message) = failure(&["replay", &trace, "--policy", "lru"]);
    assert_eq!(code, 2);
    assert!(
        message.contains("--policy is for a trace of requests"),
        "{message}"
    );
    let cut = std::fs::read_to_string(&trace).unwrap();
    std::fs::write(&trace, &cut[..cut.len() - 5]).unwrap();
    let (code, message) = failure(&["replay", &trace]);
    assert_eq!(code, 1);
    assert!(message.contains("line "), "{message}");
}

#[test]
fn a_plan_divides_memory_among_experts() {
    let (_folder, model) = converted("qwen3_moe");
    let plan = |more: &[&str]| json(&[&["plan", &model, "--json"], more].concat());
    let whole = plan(&["--backend", "cpu"]);
    assert_eq!(whole.get("experts"), None, "{whole}");
    let limited = plan(&["--expert-memory", "100K"]);
    let experts = &limited["experts"];
    assert_eq!(number(experts, "held"), 100 << 10);
    let total = number(experts, "total");
    // Two of six experts.
    assert_eq!(number(experts, "of_token"), total / 3);
    let read = number(experts, "of_token") as f64 * (1.0 - (100 << 10) as f64 / total as f64);
    assert!(
        (number(experts, "read_by_token") as f64 - read).abs() < 2.0,
        "{experts}"
    );
    // All of these fit, so that nothing needs to be chosen.
    let roomy = plan(&["--ram", "8G"]);
    assert_eq!(number(&roomy["experts"], "held"), total);
    assert_eq!(roomy["experts"].get("expert_memory"), None, "{roomy}");
    let (code, message) = failure(&["plan", &model, "--ram", "1M"]);
    assert_eq!(code, 2);
    assert!(message.contains("are the least"), "{message}");
    let (code, message) = failure(&["plan", "--ram", "1G"]);
    assert_eq!(code, 2);
    assert!(message.contains("there are none"), "{message}");
}

#[test]
fn what_cannot_be_read_is_refused() {
    let (folder, model) = converted("qwen3_moe");
    let run = |model: &str, more: &[&str]| {
        failure(&[&["run", "-m", model, "Hi", "-n", "1"], more].concat())
    };
    let (code, message) = run(&model, &["--expert-memory", "4K"]);
    assert_eq!(code, 1);
    assert!(
        message.contains("which takes 8192: give at least"),
        "{message}"
    );
    let directory = folder.path().display().to_string();
    std::fs::remove_file(Path::new(&model)).unwrap();
    let (code, message) = run(&directory, &["--expert-memory", "1M"]);
    assert_eq!(code, 1);
    assert!(message.contains("convert the model to GGUF"), "{message}");
    let (code, message) = run(
        &directory,
        &["--expert-memory", "1M", "--backend", "candle"],
    );
    assert_ne!(code, 0);
    assert!(
        message.contains("only the cpu backend reads experts"),
        "{message}"
    );
    let (code, message) = run(&directory, &["--expert-trace", "t"]);
    assert_eq!(code, 2);
    assert!(message.contains("--expert-memory"), "{message}");
}

/// Where experts are computed: what cannot be is named.
#[test]
fn places_of_experts() {
    let (folder, model) = converted("qwen3_moe");
    let directory = folder.path().display().to_string();
    let bytes = |report: &Value, pointer: &str| {
        let value = report.pointer(pointer).and_then(Value::as_u64);
        value.unwrap_or_else(|| panic!("{pointer}: {report}"))
    };
    let plan = |more: &[&str]| {
        let args = ["plan", &model, "-c", "64", "--backend", "cuda", "--json"];
        json(&[&args[..], more].concat())
    };
    // Of a GPU that is not there, which a plan does not need.
    let whole = plan(&[]);
    let n_layers = whole["layers"].as_array().unwrap().len() as u64;
    assert_eq!(whole["device"].get("host_experts"), None, "{whole}");
    let all = plan(&["--cpu-moe"]);
    assert_eq!(bytes(&all, "/device/host_experts"), n_layers);
    let on_device = |report: &Value| bytes(report, "/device/weights");
    let on_host = |report: &Value| bytes(report, "/mapped") + bytes(report, "/backend/packed");
    let moved = on_device(&whole) - on_device(&all);
    assert!(moved > on_device(&whole) / 2, "{moved}: {whole}");
    assert!(on_host(&all) - on_host(&whole) > moved / 2, "{all}");
    for (same, more) in [
        (&all, &["-cmoe"][..]),
        (&all, &["-ot", "exps=CPU", "-ngl", "99"]),
        (&all, &["--override-tensor", r"\.ffn_.*_exps\.=CPU"]),
        (&all, &["--n-cpu-moe", "99"]),
        (&whole, &["--n-cpu-moe", "0"]),
    ] {
        assert_eq!(on_device(&plan(more)), on_device(same), "{more:?}");
    }
    let some = plan(&["-ncmoe", "1"]);
    assert_eq!(bytes(&some, "/device/host_experts"), 1);
    assert_eq!(on_device(&whole) - on_device(&some), moved / n_layers);
    let named = plan(&[
        "-ot",
        r"blk\.(0)\.ffn_(up|down)_exps=CPU,blk\.0\.ffn_gate_exps=CPU",
    ]);
    assert_eq!(named["device"], some["device"]);
    // Experts that are read as they are needed have their memory on the host.
    let read = plan(&["--cpu-moe", "--expert-memory", "64K"]);
    assert_eq!(read["device"]["weights"], all["device"]["weights"]);
    assert_eq!(bytes(&read, "/experts/held"), 64 << 10, "{read}");
    // Without a GPU, the CPU has all experts in any case.
    let args = [
        "run", "-m", &model, "Hi", "-n", "4", "--temp", "0", "--json",
    ];
    let text = |more: &[&str]| json(&[&args[..], more].concat())["text"].clone();
    let cpu = text(&["--backend", "cpu"]);
    assert_eq!(text(&["--backend", "cpu", "--cpu-moe"]), cpu);
    let refused = |value: &str| {
        let more = ["-ot", value, "--backend", "cuda"];
        failure(&[&["plan", &model, "-c", "64"], &more[..]].concat())
    };
    for (value, reason) in [
        ("exps=CUDA0", "'CUDA0' is no place for single tensors"),
        ("exps", "REGEX=CPU is needed"),
        ("ffn_(up=CPU", "is no regular expression"),
    ] {
        let (code, message) = refused(value);
        assert!(code == 2 && message.contains(reason), "{value}: {message}");
    }
    for (value, reason) in [
        ("attn=CPU", "no experts, 'blk.0.attn"),
        ("ffn_up_exps=CPU", "and not 'blk.0.ffn_down_exps.weight'"),
        ("experts=CPU", "names no tensor"),
    ] {
        let report = plan(&["-ot", value]);
        let error = report["backend_error"].as_str().unwrap_or_default();
        assert!(error.contains(reason), "{value}: {report}");
    }
    let (code, message) = failure(&[
        "run",
        "-m",
        &directory,
        "Hi",
        "--expert-memory",
        "1M",
        "-ngl",
        "9",
    ]);
    assert!(code == 2 && message.contains("add --cpu-moe"), "{message}");
}

/// A plan for a GPU of some size says of how many layers it has no room for the experts.
#[test]
fn a_plan_fits_a_gpu() {
    let (_folder, model) = converted("qwen3_moe");
    let plan = |more: &[&str]| {
        let args = ["plan", &model, "-c", "64", "--backend", "cuda", "--json"];
        json(&[&args[..], more].concat())
    };
    let (whole, all) = (plan(&[]), plan(&["--cpu-moe"]));
    let some = plan(&["--n-cpu-moe", "1"]);
    let n_layers = number(&all["device"], "host_experts");
    let reserve = 256 << 20;
    let total = |report: &Value| number(&report["device"], "total");
    for (report, n) in [(&whole, None), (&some, Some(1)), (&all, Some(n_layers))] {
        let vram = (total(report) + reserve).to_string();
        let fitted = plan(&["--vram", &vram]);
        assert_eq!(fitted["device"], report["device"]);
        assert_eq!(
            fitted.get("n_cpu_moe").and_then(Value::as_u64),
            n,
            "{fitted}"
        );
    }
    let both = plan(&[
        "--vram",
        &(total(&all) + reserve).to_string(),
        "--ram",
        "8G",
    ]);
    assert_eq!(
        number(&both["experts"], "held"),
        number(&both["experts"], "total")
    );
    let (text, _) = output(&[
        "plan",
        &model,
        "-c",
        "64",
        "--vram",
        &(total(&all) + reserve).to_string(),
    ]);
    let wanted = format!("without the experts of {n_layers} layers");
    assert!(text.contains(&wanted), "{text}");
    assert!(
        text.contains(&format!("run it with --n-cpu-moe {n_layers}")),
        "{text}"
    );
    let small = (total(&all) + reserve - 1).to_string();
    for (more, reason) in [
        (&["--vram", &small][..], "without any experts"),
        (&["--vram", "1G", "--backend", "cpu"], "the memory of a GPU"),
        (&["--vram", "1G", "--cpu-moe"], "cannot be used with"),
    ] {
        let (code, message) = failure(&[&["plan", &model, "-c", "64"], more].concat());
        assert!(code == 2 && message.contains(reason), "{more:?}: {message}");
    }
}
