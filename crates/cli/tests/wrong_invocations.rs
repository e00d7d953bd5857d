//! Wrong invocations of every command, generated from the help texts: each fails with exit code 1
//! or 2, without output, and with one line on stderr that names the flag, the value and a remedy.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::collections::BTreeSet;
use std::thread;

use crate::support::{failure, output};

/// The commands, with what each needs to be run.
const COMMANDS: [(&[&str], &[&str]); 18] = [
    (&["run"], &[]),
    (&["chat"], &[]),
    (
        &["batch"],
        &[concat!(
            "--file=",
            env!("CARGO_MANIFEST_DIR"),
            "/../../tests/fixtures/batch/requests.jsonl"
        )],
    ),
    (&["inspect"], &[]),
    (&["plan"], &[]),
    (&["graph"], &[]),
    (&["graph", "diff"], &["llama", "qwen2"]),
    (&["tokenize"], &[]),
    (&["logits"], &["--out=/dev/null"]),
    (&["kl"], &[]),
    (&["bench"], &[]),
    (&["state", "inspect"], &["/absent/state"]),
    (&["perplexity"], &[]),
    (&["embed"], &["--model=/absent/model"]),
    (&["rerank"], &["--model=/absent/model", "--query=q"]),
    (&["convert"], &["/absent/model", "/dev/null", "--type=f16"]),
    (&["imatrix"], &[]),
    (&["replay"], &["/absent/trace"]),
];

/// A flag with a value, as a help text lists it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Flag {
    name: String,
    placeholder: String,
}

/// The flags of a command that take a value.
fn flags(command: &[&str]) -> Vec<Flag> {
    let (help, _) = output(&[command, &["--help"]].concat());
    let of_line = |line: &str| {
        let (_, rest) = line.trim_start().split_once("--")?;
        if !line.trim_start().starts_with('-') {
            return None;
        }
        let (name, rest) = rest.split_once(' ')?;
        let placeholder = rest.strip_prefix('<')?.split('>').next()?;
        Some(Flag {
            name: format!("--{name}"),
            placeholder: placeholder.to_owned(),
        })
    };
    let flags: BTreeSet<Flag> = help.lines().filter_map(of_line).collect();
    flags.into_iter().collect()
}

/// Values that no flag with such a placeholder takes.
fn wrong_values(placeholder: &str) -> &'static [&'static str] {
    match placeholder {
        "FILE" | "DIR" => &["/absent/directory/file", "/"],
        // Any text is taken.
        "TEXT" | "PROMPT" => &[],
        _ => &["abacus", "", "1e99", "-9e99"],
    }
}

/// What is read before a model is opened.
fn without_text(command: &[&str], flag: &str) -> Option<&'static str> {
    match (command, flag) {
        (["logits"], "--model" | "--lora" | "--control-vector") => Some("--tokens=1"),
        (["run" | "tokenize" | "kl" | "perplexity" | "imatrix"], "--model")
        | (["kl" | "perplexity" | "imatrix"], "--lora" | "--control-vector") => {
            Some("--file=/dev/null")
        }
        _ => None,
    }
}

/// A word without one of its letters.
fn misspelled(name: &str) -> String {
    let at = name.len() / 2 + 1;
    format!("{}{}", &name[..at], &name[at + 1..])
}

struct Invocation {
    args: Vec<String>,
    /// What the line must contain.
    wanted: Vec<String>,
}

impl Invocation {
    fn new(parts: [&[&str]; 2], last: &[String], wanted: &[&str]) -> Self {
        let parts = parts.concat().into_iter().map(str::to_owned);
        Self {
            args: parts.chain(last.iter().cloned()).collect(),
            wanted: wanted.iter().map(|&text| text.to_owned()).collect(),
        }
    }
}

fn invocations() -> Vec<Invocation> {
    let mut all = Vec::new();
    let mut seen = BTreeSet::new();
    for (command, needed) in COMMANDS {
        let mut add = |last: &[String], wanted: &[&str]| {
            all.push(Invocation::new([command, needed], last, wanted));
        };
        add(
            &["--frobnicate".to_owned()],
            &["'--frobnicate'", "see --help"],
        );
        for Flag { name, placeholder } in flags(command) {
            let is_needed = needed
                .iter()
                .any(|arg| arg.starts_with(&format!("{name}=")));
            let more = without_text(command, &name);
            // Commands share their flags: the first one shows what is said of the other values.
            let n_values = if seen.insert((name.clone(), placeholder.clone())) {
                usize::MAX
            } else {
                1
            };
            let values = wrong_values(&placeholder).iter().take(n_values);
            for (at, value) in values.enumerate().filter(|_| !is_needed) {
                let is_file = ["FILE", "DIR", "FILE[=SCALE]"].contains(&placeholder.as_str());
                // A file is known by its path.
                let wanted = if *command == ["convert"] && name == "--lora" && !value.is_empty() {
                    // The model is read before what is added to it.
                    ["'/absent/model'"; 2]
                } else if is_file {
                    [*value, *value]
                } else {
                    [name.as_str(), *value]
                };
                let more = || more.iter().map(|&arg| arg.to_owned());
                let joined: Vec<String> = more().chain([format!("{name}={value}")]).collect();
                add(&joined, &wanted);
                // Values are read alike in both forms: one shows that the other is understood.
                if at == 0 {
                    let apart = [name.clone(), (*value).to_owned()];
                    let apart: Vec<String> = more().chain(apart).collect();
                    add(&apart, &wanted);
                }
            }
            let wrong = misspelled(&name);
            add(&[format!("{wrong}=1")], &[&format!("'{wrong}'")]);
            add(std::slice::from_ref(&name), &[&name]);
        }
    }
    all
}

/// Words of which a remedy has at least one.
const REMEDIES: [&str; 10] = [
    "see --help",
    "is needed",
    "known are",
    "choose",
    "give",
    "check",
    "similar",
    "download",
    "name a",
    "holds",
];

/// What is wrong with how one is refused.
fn complaint(Invocation { args, wanted }: &Invocation) -> Option<String> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let (code, message) = failure(&args);
    let missing: Vec<&String> = wanted.iter().filter(|w| !message.contains(*w)).collect();
    let has_remedy = REMEDIES.iter().any(|remedy| message.contains(remedy));
    let is_explained = (1..=2).contains(&code) && missing.is_empty() && has_remedy;
    (!is_explained).then(|| format!("{args:?}: {code}, without {missing:?}: {message}"))
}

#[test]
fn every_wrong_invocation_is_explained_in_one_line() {
    let all = invocations();
    assert!(all.len() > 1000, "{} invocations", all.len());
    // This test begins last and takes longest: alone, it would leave all cores but one idle.
    let n_threads = thread::available_parallelism().map_or(1, usize::from);
    let wrong: Vec<String> = thread::scope(|scope| {
        let parts = all.chunks(all.len().div_ceil(n_threads));
        let check = |part: &[Invocation]| -> Vec<_> { part.iter().filter_map(complaint).collect() };
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || check(part))).collect();
        let found = threads.into_iter().map(|thread| thread.join().unwrap());
        found.flatten().collect()
    });
    let n = wrong.len();
    assert!(
        wrong.is_empty(),
        "{n} of {}:\n{}",
        all.len(),
        wrong.join("\n")
    );
}

/// Commands with flags that make no sense without others, or together: what is refused, and a
/// remedy.
const COMBINATIONS: [(&[&str], &str); 32] = [
    (
        &["run", "--keep", "5"],
        "--keep 5 has no effect without --context-shift: give both",
    ),
    (
        &["run", "--kv-recent", "5"],
        "--kv-recent 5 has no effect without --kv-type-old TYPE",
    ),
    (
        &["run", "--kv-sinks=4"],
        "--kv-sinks 4 has no effect without --kv-type-old TYPE",
    ),
    (
        &["run", "--save-kv-type", "q8_0"],
        "--save-kv-type q8_0 has no effect without --save-state FILE",
    ),
    (
        &["run", "--save-state-type", "q8_0"],
        "--save-state-type q8_0 has no effect without --save-state FILE",
    ),
    (
        &["run", "--group-attention-width", "64"],
        "--group-attention-width 64 has no effect without --group-attention-factor N",
    ),
    (
        &["run", "--draft-max", "4"],
        "--draft-max 4 has no effect without --speculate HOW",
    ),
    (
        &["chat", "--draft-max", "4"],
        "--draft-max 4 has no effect without --speculate HOW",
    ),
    (
        &["run", "--speculate", "draft"],
        "--speculate draft needs a model that drafts: give --draft-model",
    ),
    (
        &["run", "--logprobs", "5", "Hi"],
        "--logprobs 5 has no effect without --json or --jsonl",
    ),
    (
        &["run", "--prompt-logprobs", "5"],
        "--prompt-logprobs 5 has no effect without --json or --jsonl",
    ),
    (
        &["run", "--mirostat-ent", "3"],
        "--mirostat-ent 3 has no effect without --mirostat N",
    ),
    (
        &["chat", "--mirostat-lr", "0.2"],
        "--mirostat-lr 0.2 has no effect without --mirostat N",
    ),
    (
        &["run", "--xtc-threshold", "0.2"],
        "--xtc-threshold 0.2 has no effect without --xtc-probability P",
    ),
    (
        &["run", "--dry-base", "2"],
        "--dry-base 2 has no effect without --dry-multiplier X",
    ),
    (
        &["run", "--dry-sequence-breaker", "a"],
        "without --dry-multiplier X: give both, or leave it out",
    ),
    (
        &["batch", "-f", "x", "--resume"],
        "--resume has no effect without --output FILE",
    ),
    (
        &["batch", "-f", "x", "--swap-disk", "1G"],
        "--swap-disk 1G has no effect without --swap-memory SIZE and --swap-dir DIR: give all",
    ),
    (
        &["bench", "--arrivals", "2/s"],
        "--arrivals 2/s has no effect without --clients N",
    ),
    (
        &["bench", "--seed", "3"],
        "--seed 3 has no effect without --clients N and --arrivals RATE: give all",
    ),
    (
        &["bench", "--step-ms", "3"],
        "--step-ms 3 has no effect without --clients N",
    ),
    (
        &["bench", "--share-depth", "--seqs", "2"],
        "--share-depth has no effect without --depth N",
    ),
    (
        &["run", "--kv-type-old", "q4_0", "-c", "512", "-p", "Hi"],
        "choose it with --kv-recent, or a larger --ctx",
    ),
    (
        &["run", "--kv-type-layer", "99=f16", "-p", "Hi"],
        "choose layers up to 5 with --kv-type-layer",
    ),
    (
        &["plan", "--kv-type-layer", "99=f16"],
        "choose layers up to 5 with --kv-type-layer",
    ),
    (
        &["run", "--logit-bias", "99999999+1", "-p", "Hi"],
        "--logit-bias: the bias is of token 99999999",
    ),
    (
        &["run", "--min-tokens", "500", "-n", "10", "-p", "Hi"],
        "--min-tokens: the text must have at least 500",
    ),
    (
        &["run", "--repeat-last-n", "99999999999"],
        "'99999999999' for '--repeat-last-n <N>'",
    ),
    (
        &["run", "--repeat-last-n", "-2"],
        "'-2' for '--repeat-last-n <N>'",
    ),
    (&["run", "--kv-type", "-1"], "'-1' for '--kv-type <TYPE>'"),
    (
        &["logits", "--out=/dev/null", "--tokens", "1,99999"],
        "--tokens or --tokens-file: 99999 is no token",
    ),
    (
        &["run", "--context-shift", "-c", "2", "-p", "Hi"],
        "--context-shift has no tokens to drop in a context of 2",
    ),
];

#[test]
fn flags_that_make_no_sense_together_are_named() {
    for (args, wanted) in COMBINATIONS {
        let (code, message) = failure(args);
        assert!((1..=2).contains(&code), "{message}");
        assert!(message.contains(wanted), "{args:?}: {message}");
    }
}

/// A command that measures has no flag that changes nothing of what it measures.
#[test]
fn flags_without_effect_on_a_measurement_are_refused() {
    let cases = [
        ("logits", "--snapshots=2"),
        ("logits", "--batch=64"),
        ("kl", "--streams"),
        ("kl", "--batch=64"),
        ("perplexity", "--swa-full"),
        ("perplexity", "--snapshots=2"),
        ("imatrix", "--streams"),
        ("imatrix", "--swa-full"),
    ];
    for (command, flag) in cases {
        let (code, message) = failure(&[command, flag]);
        assert_eq!(code, 2, "{command} {flag}: {message}");
        let name = flag.split('=').next().unwrap();
        let refused = format!("unexpected argument '{name}' found");
        assert!(message.contains(&refused), "{command} {flag}: {message}");
    }
}

/// What is set for others, which may turn it on, needs no other flag.
#[test]
fn settings_for_requests_need_no_other_flag() {
    let (_, fixture) = (COMMANDS[2].0, COMMANDS[2].1[0]);
    let flags = [
        "--draft-max",
        "4",
        "--xtc-threshold",
        "0.2",
        "--dry-base",
        "2",
    ];
    output(&[&["batch", fixture], &flags[..]].concat());
}
