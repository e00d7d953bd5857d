//! [`shorten`]: `-h` shows the flags of a first day, `--help` shows all, under headings, with
//! examples.
//!
//! Invariant: of a command with few flags nothing is left out. Knows flags by their ids.

use clap::builder::StyledStr;
use clap::{Arg, Command};

/// Flags that a command may have before some are left out.
const FEW_FLAGS: usize = 16;

/// The flags of a first day, in any command.
const FIRST_DAY: [&str; 33] = [
    "model",
    "named",
    "files",
    "first",
    "second",
    "models",
    "prompt",
    "file",
    "system",
    "raw",
    "predict",
    "ctx",
    "temp",
    "seed",
    "stop",
    "schema",
    "json",
    "quiet",
    "no_stdin",
    "threads",
    "backend",
    "gpu_layers",
    "output",
    "parallel",
    "host",
    "port",
    "api_key_file",
    "memory",
    "query",
    "top",
    "pooling",
    "clients",
    "seqs",
];

/// The command, whose subcommands have short helps, and whose prose the terminal's width wraps.
pub(crate) fn shorten(command: Command) -> Command {
    let names = command
        .get_subcommands()
        .map(|command| command.get_name().to_owned());
    let names: Vec<String> = names.collect();
    let command = names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, shorten_one)
    });
    match command.get_after_help().map(paragraphs) {
        Some(text) => command.after_help(text),
        None => command,
    }
}

fn shorten_one(command: Command) -> Command {
    let is_long = command.get_arguments().count() > FEW_FLAGS;
    let is_hidden = |arg: &Arg| is_long && !FIRST_DAY.contains(&arg.get_id().as_str());
    let n_hidden = command.get_arguments().filter(|arg| is_hidden(arg)).count();
    let texts = command.get_after_help();
    let texts = texts.map(|text| (examples(text), paragraphs(text)));
    let command = command.mut_args(|arg| {
        if is_hidden(&arg) {
            arg.hide_short_help(true)
        } else {
            arg
        }
    });
    let Some((examples, all)) = texts else {
        return command;
    };
    let more = match n_hidden {
        0 => String::new(),
        n => format!("\n\n--help shows {n} more flags, and more of what the command does."),
    };
    let short = format!("{examples}{more}");
    command
        .after_help(short.trim_start().to_owned())
        .after_long_help(all)
}

/// The examples in a help text, up to an empty line.
fn examples(text: &StyledStr) -> String {
    let text = text.to_string();
    let at = text.find("Examples:");
    let examples = at.and_then(|at| text.get(at..)).unwrap_or_default();
    let block = examples.split("\n\n").next().unwrap_or_default();
    block.trim_end().to_owned()
}

/// The text with each paragraph on a line of its own. Indented lines, and what follows a colon,
/// stay as they are.
fn paragraphs(text: &StyledStr) -> String {
    let mut out = String::new();
    let mut goes_on = false;
    for line in text.to_string().lines() {
        let is_prose = !line.is_empty() && !line.starts_with(' ');
        out.push_str(match (out.is_empty(), goes_on && is_prose) {
            (true, _) => "",
            (false, true) => " ",
            (false, false) => "\n",
        });
        out.push_str(line);
        goes_on = is_prose && !line.ends_with(':');
    }
    out
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    #[test]
    fn short_helps_fit_sixty_lines() {
        let mut cli = shorten(Cli::command());
        assert!(cli.render_help().to_string().lines().count() <= 60);
        for command in cli.get_subcommands_mut() {
            let n_lines = command.render_help().to_string().lines().count();
            assert!(n_lines <= 60, "{}: {n_lines}", command.get_name());
        }
    }

    #[test]
    fn a_flag_of_the_first_day_is_in_a_command() {
        let cli = Cli::command();
        for id in FIRST_DAY {
            let mut commands = cli.get_subcommands();
            let is_optional =
                ["host", "port", "api_key_file", "models", "memory", "files"].contains(&id);
            let is_there =
                commands.any(|command| command.get_arguments().any(|arg| arg.get_id() == id));
            assert!(is_there || is_optional && !cfg!(feature = "serve"), "{id}");
        }
    }

    #[test]
    fn prose_is_wrapped_by_the_terminal() {
        let text = StyledStr::from("One\ntwo:\n  three\nfour\nfive\n\nsix\n");
        assert_eq!(paragraphs(&text), "One two:\n  three\nfour five\n\nsix");
        assert_eq!(
            examples(&StyledStr::from("a\n\nExamples:\n  b\n\nc")),
            "Examples:\n  b"
        );
    }
}
