//! What packages are made of: completions, manual pages, and the version.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::{failure, output};

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (script, _) = output(&["completions", shell]);
        for word in ["tokenize", "perplexity", "context-shift"] {
            assert!(script.contains(word), "{shell}: no {word}");
        }
    }
    let (code, message) = failure(&["completions", "dash"]);
    assert_eq!(code, 2);
    assert!(message.contains("bash, elvish, fish"), "{message}");
}

#[test]
fn every_command_has_a_manual_page() {
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man/man1");
    output(&["man", pages.to_str().unwrap()]);
    let page = |name: &str| std::fs::read_to_string(pages.join(name)).unwrap();
    for command in ["run", "inspect", "completions"] {
        assert!(page("cellar.1").contains(command));
        assert!(
            page(&format!("cellar-{command}.1")).starts_with(".ie"),
            "{command}"
        );
    }
    assert!(page("cellar-run.1").contains("Exit codes") || page("cellar.1").contains("Exit codes"));
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    let (code, message) = failure(&["man", file.to_str().unwrap()]);
    assert_eq!(code, 1);
    assert!(
        message.starts_with("cannot write manual pages to '"),
        "{message}"
    );
}

#[test]
fn the_version_names_what_was_built() {
    let (short, _) = output(&["-V"]);
    assert_eq!(short, format!("cellar {}\n", env!("CARGO_PKG_VERSION")));
    let (long, _) = output(&["--version"]);
    let start = format!("cellar {} (", env!("CARGO_PKG_VERSION"));
    assert!(long.starts_with(&start) && long.ends_with(")\n"), "{long}");
    let has_commit = long.contains("(commit ") || long.contains("(debug build");
    assert!(has_commit, "{long}");
    assert_eq!(long.contains("hub"), cfg!(feature = "hub"), "{long}");
}
