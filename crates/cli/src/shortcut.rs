//! Models where people type them: `cellar MODEL.gguf`, `cellar run MODEL PROMPT`.
//!
//! Invariant: the name of a command is never taken for a model, nor a text with spaces. Knows no
//! flags: those after `cellar MODEL` are the flags of `cellar chat`.

use std::ffi::OsString;
use std::path::Path;

use clap::Command;

/// The arguments, with `chat -m` before a model that stands where a command is expected.
pub(crate) fn expand(cli: &Command, args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    if args.get(1).is_some_and(|first| opens_chat(cli, first)) {
        args.splice(1..1, ["chat".into(), "-m".into()]);
    }
    args
}

/// True if this is a model, and no command.
fn opens_chat(cli: &Command, first: &OsString) -> bool {
    let mut commands = cli.get_subcommands();
    let is_command = commands.any(|command| {
        let mut names = command.get_name_and_visible_aliases().into_iter();
        names.any(|name| first == name) || first == "help"
    });
    !is_command && first.to_str().is_some_and(names_model)
}

/// True if this names a model, which is there or not: a file, a directory, an address,
/// `OWNER/NAME[:QUANT]` or `name:tag`.
pub(crate) fn names_model(word: &str) -> bool {
    let is_word = !word.is_empty() && !word.starts_with('-') && !word.contains(char::is_whitespace);
    let path = Path::new(word);
    let is_gguf = path.extension().is_some_and(|end| end == "gguf");
    // Whether the model is there is found out when it is opened.
    let is_name = path.is_relative() && path.components().count() == 2;
    let is_address = word.contains("://");
    path.exists() && !word.is_empty()
        || is_word && (is_gguf || is_name || is_address || is_tagged(word))
}

/// True if this ends in .gguf or is the directory of a model, as no text is.
pub(crate) fn is_model_here(word: &str) -> bool {
    let path = Path::new(word);
    let is_word = !word.contains(char::is_whitespace) || path.is_file();
    is_word && path.extension().is_some_and(|end| end == "gguf")
        || path.join("config.json").is_file()
}

/// True if this is `name:tag`, as Ollama has it: `llama3.2:1b`.
pub(crate) fn is_tagged(word: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let both = word.split_once(':');
    both.is_some_and(|parts| {
        [parts.0, parts.1].iter().all(|part| {
            part.starts_with(|c: char| c.is_ascii_alphanumeric()) && part.chars().all(is_plain)
        })
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    fn expanded(args: &[&str]) -> Vec<OsString> {
        expand(&Cli::command(), args.iter().map(OsString::from))
    }

    #[test]
    fn a_model_opens_a_chat() {
        let chat = ["cellar", "chat", "-m", "absent.gguf", "-c", "64"];
        assert_eq!(expanded(&["cellar", "absent.gguf", "-c", "64"]), chat);
        assert_eq!(expanded(&["cellar", "owner/name:Q8_0"])[1], "chat");
        assert_eq!(expanded(&["cellar", "llama3.2:1b"])[1], "chat");
        // The package's own directory is there.
        assert_eq!(expanded(&["cellar", "src"])[1], "chat");
    }

    #[test]
    fn commands_flags_and_typos_are_left_alone() {
        for args in [&["cellar"][..], &["cellar", "run"], &["cellar", "help"]] {
            assert_eq!(expanded(args), args);
        }
        for first in ["--help", "-m", "frobnicate", ""] {
            assert_eq!(expanded(&["cellar", first]), ["cellar", first]);
        }
    }

    #[test]
    fn texts_are_no_models() {
        for text in [
            "Who was it?",
            "Once",
            "a: b",
            "at 10:30 or later",
            "Answer:",
            "",
        ] {
            assert!(!names_model(text), "{text}");
        }
        for model in ["a.gguf", "o/n", "llama3.2:1b", "https://example.org/x"] {
            assert!(names_model(model), "{model}");
        }
    }
}
