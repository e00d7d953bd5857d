//! What `-h` shows: the flags of a first day. `--help` shows all, under headings, with examples.
//!
//! Invariant: of a command with few flags nothing is left out. Knows flags by their ids.

use clap::builder::StyledStr;
use clap::{Arg, Command};

/// Flags that a command may have before some are left out.
const FEW_FLAGS: usize = 16;

/// The flags of a first day, in any command.
const FIRST_DAY: [&str; 40] = [
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
    "top_k",
    "top_p",
    "seed",
    "stop",
    "schema",
    "json",
    "quiet",
    "no_stdin",
    "threads",
    "backend",
    "gpu_layers",
    "save_state",
    "load_state",
    "output",
    "parallel",
    "host",
    "port",
    "api_key_file",
    "memory",
    "kv_type",
    "depth",
    "generate",
    "query",
    "top",
    "pooling",
    "clients",
    "seqs",
];

/// The command whose subcommands have short helps.
pub(crate) fn shorten(command: Command) -> Command {
    let names = command
        .get_subcommands()
        .map(|command| command.get_name().to_owned());
    let names: Vec<String> = names.collect();
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, shorten_one)
    })
}

fn shorten_one(command: Command) -> Command {
    let n_flags = command.get_arguments().count();
    let examples = command.get_after_help().map(examples);
    let rest = command.get_after_help().cloned();
    let is_long = n_flags > FEW_FLAGS;
    let hidden = |arg: &Arg| is_long && !FIRST_DAY.contains(&arg.get_id().as_str());
    let n_hidden = command.get_arguments().filter(|arg| hidden(arg)).count();
    let command = command.mut_args(|arg| match hidden(&arg) {
        true => arg.hide_short_help(true),
        false => arg,
    });
    let more = match n_hidden {
        0 => String::new(),
        n => format!("\n\n--help shows {n} more flags, and what they are for."),
    };
    let Some(rest) = rest else {
        return command;
    };
    let short = format!("{}{more}", examples.unwrap_or_default());
    command
        .after_help(short.trim_start().to_owned())
        .after_long_help(rest)
}

/// The examples at the end of a help text.
fn examples(text: &StyledStr) -> String {
    let text = text.to_string();
    let at = text.find("Examples:");
    at.and_then(|at| text.get(at..))
        .unwrap_or_default()
        .trim_end()
        .to_owned()
}
