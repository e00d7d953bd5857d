//! Conversations through the program: every answer is what the whole conversation as one text leads
//! to.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod support;

use std::process::{Command, Output};

use support::{json, with_template};

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
            "run", "-m", &model, "--temp", "0", "-n", "5", "--json", text,
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
    assert!(code == 1 && message.contains("/clear"), "{message}");
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
