//! `docs/flags.md` is what `--help` says, for every command: `UPDATE_DOCS=1` writes it.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::fmt::Write;
use std::process::Command;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/flags.md");

const HEAD: &str = "# Commands and flags

The output of every `--help`. Made by `crates/cli/tests/flags_page.rs`; do not edit it by hand.
";

fn help(command: &[String]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_cellar"))
        .args(command)
        .arg("--help")
        .env_remove("COLUMNS")
        .output()
        .unwrap();
    assert!(output.status.success(), "{command:?}: {output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().map(str::trim_end).collect();
    lines.join("\n").trim_end().to_owned()
}

/// The names below `Commands:` in a help text.
fn subcommands(help: &str) -> Vec<String> {
    let lines = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let listed = lines.take_while(|line| !line.is_empty());
    let named = listed.filter(|line| line.starts_with("  ") && !line.starts_with("   "));
    let names = named.filter_map(|line| line.split_whitespace().next());
    names
        .filter(|name| *name != "help")
        .map(str::to_owned)
        .collect()
}

fn describe(command: &[String], page: &mut String) {
    let help = help(command);
    let title = [&["cellar".to_owned()], command].concat().join(" ");
    write!(page, "\n## {title}\n\n```text\n{help}\n```\n").unwrap();
    for name in subcommands(&help) {
        let mut command = command.to_vec();
        command.push(name);
        describe(&command, page);
    }
}

#[test]
fn the_page_is_what_help_says() {
    let mut page = HEAD.to_owned();
    describe(&[], &mut page);
    assert!(page.contains("## cellar run\n"), "{page}");
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(PAGE, page).unwrap();
        return;
    }
    let written = std::fs::read_to_string(PAGE).unwrap_or_default();
    assert!(
        written == page,
        "docs/flags.md is stale: UPDATE_DOCS=1 cargo test -p cellar-cli --test cli flags_page"
    );
}
