//! Conversations through the program: every answer is what the whole conversation as one text leads
//! to.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support;

use std::path::Path;
use std::process::{Command, Output};

use crate::support::{json, with_template};

const TEMPLATE: &str =
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

fn chat(model: &str, flags: &[&str], input: &str) -> Output {
    let mut command =
        assert_cmd::Command::from(Command::new(assert_cmd::cargo::cargo_bin!("cellar")));
    command.args(["chat", "-m", model, "--temp", "0", "-n", "5"]);
    command.args(flags).env("CELLAR_LOG", "cellar=debug");
    command.write_stdin(input).output().unwrap()
}

fn answers(output: &Output) -> Vec<String> {
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    text.lines().map(str::to_owned).collect()
}

/// For each message, how many tokens were remembered and how many had to be read.
fn readings(output: &Output) -> Vec<[usize; 2]> {
    let log = String::from_utf8(output.stderr.clone()).unwrap();
    let number = |line: &str, name: &str| {
        let (_, behind) = line.split_once(name).unwrap();
        let digits: String = behind.chars().take_while(char::is_ascii_digit).collect();
        digits.parse().unwrap()
    };
    let lines = log
        .lines()
        .filter(|line| line.contains("reading a message"));
    lines
        .map(|l| [number(l, "n_known="), number(l, "n_new=")])
        .collect()
}

#[test]
fn answers_are_those_of_the_whole_conversation_read_once() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, TEMPLATE);
    let output = chat(&model, &[], "Hello\n\nWho was \\\nthere?\r\n");
    let answers = answers(&output);
    let [first, second] = &answers[..] else {
        panic!("{answers:?}")
    };
    let whole = |text: &str| {
        let run = [
            "run", "-m", &model, "--temp", "0", "-n", "5", "--raw", "--json", text,
        ];
        json(&run)["text"].as_str().unwrap().to_owned()
    };
    let mut text = "user: Hello\nassistant:".to_owned();
    assert_eq!(first, &whole(&text));
    text = format!("user: Hello\nassistant: {first}\nuser: Who was \nthere?\nassistant:");
    assert_eq!(second, &whole(&text));
    let [[0, n_first], [n_known, n_new]] = readings(&output)[..] else {
        panic!("{output:?}")
    };
    // The template puts a space before the answer, so the conversation is the same up to there at
    // least.
    assert!(n_known + 1 >= n_first, "{n_known} of {n_first} remembered");
    assert!(n_new < n_known + n_first + 12, "{n_new} read");
}

#[test]
fn a_conversation_begins_again() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, TEMPLATE);
    let system = ["--system", "Be kind."];
    let output = chat(&model, &system, "Hello\n/clear\nHello\n/exit\nHello\n");
    let answers = answers(&output);
    assert!(
        answers.len() == 2 && answers[0] == answers[1],
        "{answers:?}"
    );
    let [[0, n], [n_known, 1]] = readings(&output)[..] else {
        panic!("{output:?}")
    };
    assert_eq!(n_known + 1, n, "only the last token is read again");
}

#[test]
fn what_cannot_be_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let plain = with_template(&dir, TEMPLATE);
    let said = |output: Output| {
        let message = String::from_utf8(output.stderr).unwrap();
        (output.status.code().unwrap(), message)
    };
    let (code, message) = said(chat(&plain, &["-c", "16"], &"many words ".repeat(20)));
    assert!(code == 1 && message.contains("larger --ctx"), "{message}");
    let (code, message) = said(chat(&plain, &[], "/frobnicate\n"));
    let wanted = "unknown command '/frobnicate': /help lists the commands";
    assert!(code == 2 && message.contains(wanted), "{message}");
    let refusing = with_template(&dir, "{{ raise_exception('no system here') }}");
    let (code, message) = said(chat(&refusing, &[], "Hello\n"));
    assert!(code == 1 && message.contains("no system here"), "{message}");
    let mut command = Command::new(assert_cmd::cargo::cargo_bin!("cellar"));
    let (code, message) = said(command.arg("chat").output().unwrap());
    assert!(
        code == 2 && message.contains("has no chat template"),
        "{message}"
    );
}

/// A conversation of these turns, as `/save` writes it.
fn saved(turns: &[serde_json::Value]) -> String {
    serde_json::json!({ "messages": turns }).to_string()
}

fn read_json(path: &Path) -> serde_json::Value {
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn the_oldest_turns_leave_a_full_context() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, TEMPLATE);
    let file = dir.path().join("all.json");
    let save = format!("/save {}\n", file.display());
    let questions = "One day\nAnd then?\nWho was it?\nWhere was she?\n";
    // Turns are dropped before a message is read, or in the middle of a long answer.
    for (n_ctx, n_long) in [("80", 5), ("160", 80)] {
        let long = format!("/set predict {n_long}\nWhy?\n/set predict 5\n");
        let last = format!("What now?\n{save}/show prompt\n/stats\n");
        let input = format!("{questions}{long}{last}");
        let output = chat(&model, &["-c", n_ctx, "--system", "Be kind."], &input);
        let stderr = String::from_utf8(output.stderr.clone()).unwrap();
        assert!(output.status.success(), "{stderr}");
        assert_eq!(stderr.matches("tokens is full").count(), 1, "{stderr}");
        let all = read_json(&file);
        let all = all["messages"].as_array().unwrap();
        assert_eq!(all.len(), 1 + 2 * 6, "dropped turns are saved, too");
        let (_, prompt) = stderr.split_once("system: Be kind.\n").unwrap();
        let n_seen = prompt.matches("user: ").count();
        assert!((2..6).contains(&n_seen), "{n_ctx}: {stderr}");
        assert!(!prompt.contains("One day"), "{stderr}");
        // As if the conversation had begun with the turns that are left.
        let before = [&all[..1], &all[all.len() - 2 * n_seen..all.len() - 2]].concat();
        let part = dir.path().join("part.json");
        std::fs::write(&part, saved(&before)).unwrap();
        let input = format!("/load {}\nWhat now?\n{save}", part.display());
        let output = chat(&model, &[], &input);
        assert!(output.status.success(), "{output:?}");
        let left = read_json(&file);
        assert_eq!(left["messages"].as_array().unwrap().last(), all.last());
    }
}

#[test]
fn commands_change_the_conversation() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, TEMPLATE);
    let file = dir.path().join("chat.json");
    let path = file.display();
    let asked = |input: &str| answers(&chat(&model, &[], input));
    let plain = asked("Hello\nWho?\n");
    assert_eq!(asked("Hello\nWhy?\n/undo\nWho?\n")[2], plain[1]);
    let again = asked("Hello\nWho?\n/regen\n");
    assert_eq!(again[1..], [plain[1].as_str(), &plain[1]], "greedy");
    let seeds = asked("/set temp 2\n/set top-p 1\n/set seed 7\nHello\n/regen\n");
    assert_ne!(seeds[0], seeds[1], "another seed");
    let loaded = asked(&format!(
        "Hello\n/save {path}\n/clear\n/load {path}\nWho?\n"
    ));
    assert_eq!(loaded, plain);
    let system = asked("/system Be kind.\nHello\n/system \"\"\n/undo\nHello\n");
    assert_ne!(system[0], system[1]);
    assert_eq!(system[1], plain[0]);
    assert_eq!(asked("//help\n").len(), 1, "a message");
    // A file of another kind is not replaced, and one that cannot be read changes nothing.
    std::fs::write(&file, "a diary").unwrap();
    for command in ["save", "load"] {
        let output = chat(&model, &[], &format!("Hello\n/{command} {path}\n"));
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(message.contains("is no saved conversation"), "{message}");
    }
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "a diary");
}

#[test]
fn thinking_is_hidden_in_a_pipe() {
    let dir = tempfile::tempdir().unwrap();
    let thinks = TEMPLATE.replace("assistant:", "assistant:<think>\n");
    let model = with_template(&dir, &thinks);
    let file = dir.path().join("chat.json");
    let input = format!("Hello\n/save {}\n", file.display());
    assert_eq!(answers(&chat(&model, &[], &input)), [""]);
    let message = &read_json(&file)["messages"][1];
    let thinking = message["reasoning_content"].as_str().unwrap();
    assert!(
        !thinking.is_empty() && message["content"] == "",
        "{message}"
    );
    let shown = answers(&chat(&model, &["--show-thinking"], &input)).join("\n");
    assert_eq!(shown.trim(), thinking.trim());
    // Thinking that has a budget is followed by an answer.
    for (flags, line) in [
        (&["--reasoning-budget", "2"][..], ""),
        (&[], "/set reasoning-budget 2\n"),
    ] {
        let input = format!("/set predict 30\n{line}Hello\n");
        let answered = answers(&chat(&model, flags, &input)).join("\n");
        assert!(
            !answered.trim().is_empty() && !answered.contains(thinking.trim()),
            "{answered}"
        );
    }
    // The template does not know the mark, so the model does not see its thinking again.
    let prompt = chat(&model, &[], "Hello\n/show prompt\n").stderr;
    let prompt = String::from_utf8(prompt).unwrap();
    assert!(!prompt.contains(thinking.trim()), "{prompt}");
}

#[test]
fn a_model_alone_opens_a_chat() {
    let dir = tempfile::tempdir().unwrap();
    let model = with_template(&dir, TEMPLATE);
    let flags = ["--temp", "0", "-n", "5"];
    let mut command = support::cellar();
    let done = command.arg(&model).args(flags).write_stdin("Hello\n");
    let expected = chat(&model, &[], "Hello\n").stdout;
    assert_eq!(done.assert().success().get_output().stdout, expected);
    let (code, message) = support::failure(&["absent.gguf"]);
    assert!(code == 1 && message.contains("absent.gguf"), "{message}");
}
