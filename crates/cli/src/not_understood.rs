//! Why a command line cannot be parsed, in one line that suggests what to write instead.
//!
//! Invariant: help goes to stdout, everything else to stderr. Knows what users of other programs
//! write, and nothing of what flags do.

use std::io::{self, Write};
use std::path::Path;

use cellar::convert::FileType;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::parser::ValueSource;
use clap::{Arg, CommandFactory, Error};

use crate::advice::most_similar;
use crate::args::Cli;
use crate::complain;
use crate::failure::{Exit, words};
use crate::habits::{self, has};
use crate::shortcut::{self, names_model};

/// Flags that other programs have for the same, where the most similar name is another flag's.
const NAMES: [(&str, &str); 5] = [
    ("--max-tokens", "predict"),
    ("--max-new-tokens", "predict"),
    ("--num-predict", "predict"),
    ("--num-ctx", "ctx"),
    ("--max-model-len", "ctx"),
];

/// Commands of Ollama and llama.cpp, and what there is for the same.
const COMMANDS: [(&[&str], &str); 12] = [
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
    (
        &["signin", "signout", "login", "logout", "launch"],
        "there are no accounts: 'cellar pull OWNER/NAME:QUANT' takes a token from $HF_TOKEN, and 'cellar \
         serve' serves other programs",
    ),
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
            return printed(error.print());
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand if given.is_empty() => {
            return printed(write!(io::stdout(), "{}", error.render()));
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

/// The exit after help was printed. A closed pipe is no error.
fn printed(done: io::Result<()>) -> Exit {
    match done.and_then(|()| io::stdout().flush()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            complain(&format!("cannot write to stdout: {error}"));
            Exit::Failed
        }
        _ => Exit::Done,
    }
}

/// The message without the usage that follows it over several lines, and with what to write
/// instead.
fn message(error: &Error, given: &[String]) -> String {
    if let Some(flag) = needing(error) {
        return without_effect(&flag, &lacking(error));
    }
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

/// The flags that a flag needs and that were not given.
pub(crate) fn lacking(error: &Error) -> Vec<String> {
    let Some(ContextValue::Strings(flags)) = error.get(ContextKind::InvalidArg) else {
        return Vec::new();
    };
    // `--flag <VALUE>` of one, `<--flag|--other>` of a group.
    let plain = |flag: &String| flag.replace(['<', '>'], "").replace('|', " or ");
    flags.iter().map(plain).collect()
}

/// Why a flag is refused without these.
pub(crate) fn without_effect(flag: &str, lacking: &[String]) -> String {
    let all = if lacking.len() > 1 { "all" } else { "both" };
    let others = lacking.join(" and ");
    format!("{flag} has no effect without {others}: give {all}, or leave it out")
}

/// The flag, with its value, that needs others that were not given.
fn needing(error: &Error) -> Option<String> {
    if error.kind() != ErrorKind::MissingRequiredArgument {
        return None;
    }
    let mut parser = crate::command();
    let args = shortcut::expand(&parser, std::env::args_os());
    let args = habits::translate(&parser, args).ok()?;
    let mut lenient = parser.clone().ignore_errors(true);
    let matches = lenient.try_get_matches_from_mut(args).ok()?;
    let (mut command, mut matches) = (&lenient, &matches);
    let mut path = vec![String::from("cellar")];
    while let Some((name, inner)) = matches.subcommand() {
        (command, matches) = (command.find_subcommand(name)?, inner);
        path.push(name.to_owned());
    }
    let wanted = lacking(error);
    let mut lacks = |flag: Option<&str>| {
        let args = path.iter().map(String::as_str).chain(flag);
        let alone = parser.try_get_matches_from_mut(args).err();
        alone.is_some_and(|alone| {
            let lacking = lacking(&alone);
            wanted.iter().all(|flag| lacking.contains(flag))
        })
    };
    if lacks(None) {
        return None;
    }
    let is_given =
        |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    command.get_arguments().filter(is_given).find_map(|arg| {
        let long = arg.get_long()?;
        let value = matches
            .get_raw(arg.get_id().as_str())
            .and_then(|mut values| values.next());
        let value = value.filter(|_| arg.get_action().takes_values());
        let value = value.map(|value| value.to_string_lossy());
        let flag = |between: &str| match &value {
            Some(value) => format!("--{long}{between}{value}"),
            None => format!("--{long}"),
        };
        lacks(Some(&flag("="))).then(|| flag(" "))
    })
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
    if error.kind() == ErrorKind::ArgumentConflict && command == "graph" {
        return Some("'cellar graph diff MODEL OTHER' compares two".to_owned());
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
    let name = command.get_name();
    let takes_model = command.get_positionals().next().is_some();
    if takes_model && Path::new(arg).is_file() && has(command, "--file") {
        return Some(format!("a text is given with -f: 'cellar {name} -f {arg}'"));
    }
    if !takes_model && names_model(arg) {
        return Some(format!(
            "a model is given with -m: 'cellar {name} -m {arg}'"
        ));
    }
    if name == "convert" && arg.parse::<FileType>().is_ok() {
        return Some(format!("the type is given with --type: '--type {arg}'"));
    }
    if command.get_name() == "run" && !arg.starts_with('-') {
        return Some(
            "put the prompt in quotes: 'cellar run MODEL \"a prompt of words\"'".to_owned(),
        );
    }
    if ["tokenize", "kl"].contains(&name) && !arg.starts_with('-') {
        return Some(format!(
            "put the text in quotes: 'cellar {name} MODEL \"a text of words\"'"
        ));
    }
    if command.get_name() == "chat" && !arg.starts_with('-') {
        return Some(
            "'cellar run MODEL PROMPT' answers a prompt; a chat begins without one".to_owned(),
        );
    }
    if (command.get_name(), arg) == ("chat", "--raw") {
        return Some("'cellar run --raw' continues a text without the template".to_owned());
    }
    if let Some((_, ours)) = NAMES.iter().find(|(theirs, _)| *theirs == arg)
        && has(command, &format!("--{ours}"))
    {
        return Some(format!("it is called '--{ours}' here"));
    }
    let is_similar = error.get(ContextKind::SuggestedArg).is_some();
    of_others(&cli, arg).filter(|_| !is_similar || arg.len() > 2)
}

/// The commands that have a flag.
fn of_others(cli: &clap::Command, flag: &str) -> Option<String> {
    let commands = cli.get_subcommands().filter(|command| has(command, flag));
    let names = commands.map(|command| format!("'cellar {}'", command.get_name()));
    let names: Vec<String> = names.collect();
    match &names[..] {
        [] => None,
        [all @ .., last] if (1..4).contains(&all.len()) => {
            Some(format!("{} and {last} have it", all.join(", ")))
        }
        [first, rest @ ..] if !rest.is_empty() => {
            Some(format!("{first} and {} others have it", rest.len()))
        }
        [only, ..] => Some(format!("it is a flag of {only}")),
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;

    use super::*;
    use crate::habits::translate;

    /// Flags of other programs that a command refuses without a hint.
    fn without_hint(command: &str, names: &str) -> Vec<String> {
        let cli = Cli::command();
        let mut parser = crate::command();
        let mut is_bare = |flag: &&str| {
            let args = ["cellar", command, flag].map(OsString::from);
            let Ok(args) = translate(&cli, args.to_vec()) else {
                return false;
            };
            let Err(error) = parser.try_get_matches_from_mut(args) else {
                return false;
            };
            let given = [command, flag].map(str::to_owned);
            error.kind() == ErrorKind::UnknownArgument && instead(&error, &given).is_none()
        };
        let names = names.split_whitespace().filter(&mut is_bare);
        names.map(|name| format!("{command} {name}")).collect()
    }

    #[test]
    fn every_flag_of_other_programs_works_or_has_a_hint() {
        let llama_cpp = include_str!("../tests/flags_of_others/llama_cpp.txt");
        let vllm = include_str!("../tests/flags_of_others/vllm.txt");
        let ollama = include_str!("../tests/flags_of_others/ollama.txt");
        let all = [
            ("run", llama_cpp),
            ("chat", llama_cpp),
            ("bench", llama_cpp),
            ("run", ollama),
            #[cfg(feature = "serve")]
            ("serve", llama_cpp),
            #[cfg(feature = "serve")]
            ("serve", vllm),
        ];
        let bare: Vec<String> = all
            .into_iter()
            .flat_map(|(command, names)| without_hint(command, names))
            .collect();
        assert!(bare.is_empty(), "{bare:?}");
        assert_eq!(without_hint("run", "--frobnicate"), ["run --frobnicate"]);
    }

    #[test]
    fn every_command_of_ollama_is_there_or_has_a_hint() {
        let cli = Cli::command();
        for name in
            "serve create show run stop pull push list ls ps cp rm help signin signout launch"
                .split(' ')
        {
            let is_here = name == "help" || cli.find_subcommand(name).is_some();
            let has_hint = COMMANDS.iter().any(|(theirs, _)| theirs.contains(&name));
            let is_left_out = cfg!(not(all(feature = "hub", feature = "serve")));
            assert!(is_here || has_hint || is_left_out, "{name}");
        }
    }
}
