//! Wrong invocations of every command, generated from the help texts: each fails with exit code 1
//! or 2, without output, and with one line on stderr that names the flag, the value and a remedy.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::collections::BTreeSet;

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
        (["logits"], "--model") => Some("--tokens=1"),
        (["run" | "tokenize" | "kl" | "perplexity" | "imatrix"], "--model") => {
            Some("--file=/dev/null")
        }
        _ => None,
    }
}

/// What the line names where a flag is alone that needs others: their absence is found before its value is
/// looked at.
fn others_needed(flag: &str) -> Option<&'static str> {
    (flag == "--swap-dir").then_some("--swap-memory <SIZE> --swap-disk <SIZE>")
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
            for value in wrong_values(&placeholder).iter().filter(|_| !is_needed) {
                let is_file = ["FILE", "DIR"].contains(&placeholder.as_str());
                // A file is known by its path.
                let wanted = match others_needed(&name) {
                    Some(others) => [others, others],
                    None if is_file => [*value, *value],
                    None => [name.as_str(), *value],
                };
                let last = more.iter().map(|&arg| arg.to_owned());
                let last: Vec<String> = last.chain([format!("{name}={value}")]).collect();
                add(&last, &wanted);
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

#[test]
fn every_wrong_invocation_is_explained_in_one_line() {
    let all = invocations();
    assert!(all.len() > 500, "{} invocations", all.len());
    let mut wrong = Vec::new();
    for Invocation { args, wanted } in &all {
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        let (code, message) = failure(&args);
        let missing: Vec<&String> = wanted.iter().filter(|w| !message.contains(*w)).collect();
        let has_remedy = REMEDIES.iter().any(|remedy| message.contains(remedy));
        if !(1..=2).contains(&code) || !missing.is_empty() || !has_remedy {
            wrong.push(format!("{args:?}: {code}, without {missing:?}: {message}"));
        }
    }
    let n = wrong.len();
    assert!(
        wrong.is_empty(),
        "{n} of {}:\n{}",
        all.len(),
        wrong.join("\n")
    );
}
