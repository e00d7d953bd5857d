//! `cellar MODEL.gguf` or `cellar OWNER/NAME`, short for `cellar chat -m …`.
//!
//! Invariant: the name of a command is never taken for a model. Knows no flags: those after the
//! model are the flags of `cellar chat`.

use std::ffi::OsString;
use std::path::Path;

use clap::CommandFactory;

use crate::args::Cli;

/// The arguments, with `chat -m` before a model that stands where a command is expected.
pub(crate) fn expand(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    if args.get(1).is_some_and(names_model) {
        args.splice(1..1, ["chat".into(), "-m".into()]);
    }
    args
}

/// Whether this is a model file or directory, there or not, or a model's name, and no command.
fn names_model(first: &OsString) -> bool {
    let is_flag = first.as_encoded_bytes().starts_with(b"-");
    let cli = Cli::command();
    let mut commands = cli.get_subcommands();
    let is_command = commands.any(|command| {
        let mut names = command.get_name_and_visible_aliases().into_iter();
        names.any(|name| first == name) || first == "help"
    });
    let path = Path::new(first);
    let is_gguf = path.extension().is_some_and(|end| end == "gguf");
    // Whether the model is there is found out when it is opened.
    let is_name = path.is_relative() && path.components().count() == 2;
    !is_flag && !is_command && (is_gguf || is_name || path.exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expanded(args: &[&str]) -> Vec<OsString> {
        expand(args.iter().map(OsString::from))
    }

    #[test]
    fn a_model_opens_a_chat() {
        let chat = ["cellar", "chat", "-m", "absent.gguf", "-c", "64"];
        assert_eq!(expanded(&["cellar", "absent.gguf", "-c", "64"]), chat);
        assert_eq!(expanded(&["cellar", "owner/name:Q8_0"])[1], "chat");
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
}
