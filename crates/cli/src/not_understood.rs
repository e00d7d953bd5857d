//! Why a command line cannot be parsed, in one line that suggests what to write instead.
//!
//! Invariant: help goes to stdout, everything else to stderr. Knows what users of other programs write,
//! and nothing of what flags do.

use std::io::Write;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, Error};

use crate::advice::most_similar;
use crate::args::Cli;
use crate::complain;
use crate::failure::{Exit, words};
use crate::shortcut::names_model;

/// Flags that other programs have for the same, where the most similar name is another flag's.
const NAMES: [(&str, &str); 6] = [
    ("--max-tokens", "predict"),
    ("--max-new-tokens", "predict"),
    ("--num-predict", "predict"),
    ("--num-ctx", "ctx"),
    ("--max-model-len", "ctx"),
    ("--temperature", "temp"),
];

/// Commands of Ollama and llama.cpp, and what there is for the same.
const COMMANDS: [(&[&str], &str); 11] = [
    (
        &["generate", "ask", "complete", "cli", "simple"],
        "'cellar run MODEL PROMPT' answers a prompt",
    ),
    (
        &["quantize"],
        "'cellar convert MODEL.gguf OUT.gguf --type q4_k_m' does it",
    ),
    (
        &["create"],
        "'cellar convert DIRECTORY OUT.gguf --type q8_0' makes a model file",
    ),
    (&["show", "info"], "'cellar inspect MODEL' does it"),
    (
        &["ps", "stop"],
        "a server lists its models at /v1/models, and unloads idle ones itself",
    ),
    (
        &["push"],
        "models are not uploaded: Hugging Face's own program does it",
    ),
    (
        &["cp"],
        "a model is a file: copy it, or give 'cellar serve --alias NAME=MODEL'",
    ),
    (
        &["download", "get"],
        "'cellar pull OWNER/NAME:QUANT' does it",
    ),
    (&["ls", "models"], "'cellar list' does it"),
    (&["delete", "remove"], "'cellar rm OWNER/NAME' does it"),
    (&["finetune", "train"], "models are not trained here"),
];

/// How numbers are refused, and in plain words what is wanted.
const NUMBERS: [(&str, &str); 6] = [
    ("invalid digit found in string", "a whole number is needed"),
    (
        "cannot parse integer from empty string",
        "a whole number is needed",
    ),
    (
        "number would be zero for non-zero type",
        "a number of at least 1 is needed",
    ),
    (
        "number too large to fit in target type",
        "a smaller number is needed",
    ),
    (
        "number too small to fit in target type",
        "a larger number is needed",
    ),
    ("invalid float literal", "a number is needed"),
];

/// Prints help, or why the command line cannot be parsed.
pub(crate) fn complain_of(error: &Error) -> Exit {
    let given: Vec<String> = std::env::args_os()
        .skip(1)
        .map(|arg| arg.to_string_lossy().into_owned())
        .collect();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // A closed pipe is no error.
            let _ = error.print();
            return Exit::Done;
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand if given.is_empty() => {
            // A closed pipe is no error.
            let _ = write!(std::io::stdout(), "{}", error.render());
            return Exit::Done;
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let command = words(&given.join(" "));
            complain(&format!(
                "'cellar {command}' needs a command; see 'cellar {command} --help'"
            ));
        }
        _ => complain(&format!("{}; see --help", message(error, &given))),
    }
    Exit::WrongUsage
}

/// The message without the usage that follows it over several lines, and with what to write instead.
fn message(error: &Error, given: &[String]) -> String {
    let text = error.render().to_string();
    let message = text.split("\n\nUsage:").next().unwrap_or_default();
    let message = message.split("\n\nFor more").next().unwrap_or_default();
    let message = message.trim_start_matches("error: ").replace("\n\n", "; ");
    let message = words(&message);
    for (theirs, ours) in NUMBERS {
        if let Some(start) = message.strip_suffix(theirs) {
            return format!("{start}{ours}");
        }
    }
    match instead(error, given) {
        Some(instead) => {
            let (what, _) = message.split_once("; tip:").unwrap_or((&message, ""));
            format!("{what}; {instead}")
        }
        None => message,
    }
}

/// What to write in place of what is not known.
fn instead(error: &Error, given: &[String]) -> Option<String> {
    let of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let command = given.first()?.as_str();
    let cli = Cli::command();
    if error.kind() == ErrorKind::InvalidSubcommand {
        let given = of(ContextKind::InvalidSubcommand)?;
        if let Some((_, instead)) = COMMANDS.iter().find(|(theirs, _)| theirs.contains(&given)) {
            return Some((*instead).to_owned());
        }
        if names_model(given) {
            return Some(format!(
                "a model is given with -m: 'cellar {command} -m {given}'"
            ));
        }
        let names: Vec<&str> = cli.get_subcommands().map(clap::Command::get_name).collect();
        let similar = most_similar(given, &names)?;
        return Some(format!("a similar command exists: '{similar}'"));
    }
    if error.kind() != ErrorKind::UnknownArgument {
        return None;
    }
    let arg = of(ContextKind::InvalidArg)?;
    if command.starts_with('-') {
        return Some(
            "flags follow a command: 'cellar run -m MODEL PROMPT', 'cellar chat -m MODEL'"
                .to_owned(),
        );
    }
    let Some(command) = cli.find_subcommand(command) else {
        // A model alone opens a chat.
        let is_text = !arg.starts_with('-');
        return is_text
            .then(|| format!("'cellar run -m MODEL PROMPT' answers a prompt; '{arg}' is one"));
    };
    if names_model(arg) {
        let name = command.get_name();
        return Some(format!(
            "a model is given with -m: 'cellar {name} -m {arg}'"
        ));
    }
    if command.get_name() == "run" && !arg.starts_with('-') {
        return Some(
            "put the prompt in quotes: 'cellar run MODEL \"a prompt of words\"'".to_owned(),
        );
    }
    if command.get_name() == "chat" && !arg.starts_with('-') {
        return Some(
            "'cellar run MODEL PROMPT' answers a prompt; a chat begins without one".to_owned(),
        );
    }
    if (command.get_name(), arg) == ("chat", "--raw") {
        return Some("'cellar run --raw' continues a text without the template".to_owned());
    }
    let (_, ours) = NAMES.iter().find(|(theirs, _)| *theirs == arg)?;
    let has_it = command
        .get_arguments()
        .any(|arg| arg.get_long() == Some(ours));
    has_it.then(|| format!("it is called '--{ours}' here"))
}
