//! Flags of `cellar serve` that are not on the command line: from variables of the environment, and
//! from a file (`--config`).
//!
//! Invariant: they become flags, so each is parsed and checked as on the command line. What is
//! there wins, with all that conflicts with it; then variables; then the file.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::Path;

use anyhow::Context;
use clap::builder::ValueRange;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use toml::Value;

use crate::advice::most_similar;
use crate::failure::usage;
use crate::not_understood::{lacking, without_effect};

/// The command whose flags these are.
const SERVE: &str = "serve";

/// The beginning of a variable's name. The rest is the flag in capitals, with `_` for `-`.
const PREFIX: &str = "CELLAR_";

/// Flags whose variables are read elsewhere: `CELLAR_MODEL` is the model of every command,
/// `CELLAR_CONFIG` is looked at first, and `CELLAR_LOG` can also be a filter.
const OWN_VARIABLES: [&str; 3] = ["model", "config", "log"];

/// A flag that is not on the command line.
struct FlagSetting<'c> {
    arg: &'c Arg,
    /// As it would be there.
    flag: OsString,
    /// Its source, for errors.
    source: String,
}

/// The matches of these arguments with what variables and the file of `--config` say, which may
/// have what a flag on the command line needs; or why clap refuses these arguments.
///
/// # Errors
/// A usage error with the variable, or the file and its key, where a value makes no sense; an error
/// where the file cannot be read.
pub(crate) fn complete(
    command: &mut Command,
    matches: Result<ArgMatches, clap::Error>,
    mut args: Vec<OsString>,
) -> anyhow::Result<Result<ArgMatches, clap::Error>> {
    let alone = match &matches {
        Ok(matches) => matches.clone(),
        Err(error) if error.kind() == ErrorKind::MissingRequiredArgument => {
            let mut lenient = command.clone().ignore_errors(true);
            match lenient.try_get_matches_from_mut(&args) {
                Ok(alone) => alone,
                Err(_) => return Ok(matches),
            }
        }
        Err(_) => return Ok(matches),
    };
    let (Some((SERVE, given)), Some(serve)) = (alone.subcommand(), command.find_subcommand(SERVE))
    else {
        return Ok(matches);
    };
    let settings = missing(serve, given)?;
    if settings.is_empty() {
        return Ok(matches);
    }
    let (flags, sources): (Vec<OsString>, Vec<String>) = settings
        .into_iter()
        .map(|setting| (setting.flag, setting.source))
        .unzip();
    // Before anything that could be a value, or come after `--`.
    let at = args
        .iter()
        .position(|arg| arg == SERVE)
        .map_or(1, |at| at + 1);
    args.splice(at..at, flags.iter().cloned());
    let error = match command.try_get_matches_from_mut(args) {
        Ok(matches) => return Ok(Ok(matches)),
        Err(error) => error,
    };
    let is_lacking = error.kind() == ErrorKind::MissingRequiredArgument;
    let mut wrong_alone = |flag: &OsString| {
        let args = ["cellar".into(), SERVE.into(), flag.clone()];
        let alone = command.try_get_matches_from_mut(args).err()?;
        // Alone, a flag lacks what it needs where the others have it.
        let is_it = match alone.kind() {
            ErrorKind::MissingRequiredArgument => lacking(&alone) == lacking(&error),
            _ => !is_lacking,
        };
        is_it.then_some(alone)
    };
    let mut each = flags.iter().zip(&sources);
    let wrong = each.find_map(|(flag, source)| Some((flag, source, wrong_alone(flag)?)));
    match wrong {
        Some((flag, source, _)) if is_lacking => {
            let flag = flag.to_string_lossy();
            usage(format!(
                "{source}: {}",
                without_effect(&flag, &lacking(&error))
            ))
        }
        Some((_, source, error)) => usage(format!("{source}: {}", first_sentence(&error))),
        // A flag of the command line is to blame.
        None if is_lacking => Ok(Err(error)),
        None => usage(format!(
            "{}: {}",
            sources.join(", "),
            first_sentence(&error)
        )),
    }
}

/// The message of clap without its advice.
fn first_sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let text = text.strip_prefix("error: ").unwrap_or(&text);
    text.split("\n\n").next().unwrap_or(text).to_owned()
}

/// The settings that the command line leaves open.
fn missing<'c>(serve: &'c Command, given: &ArgMatches) -> anyhow::Result<Vec<FlagSetting<'c>>> {
    let is_given =
        |arg: &&Arg| given.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let mut taken: Vec<&Arg> = serve.get_arguments().filter(is_given).collect();
    let config = given.get_one::<std::path::PathBuf>("config").cloned();
    let config = config.or_else(|| variable("config").map(Into::into));
    let of_file = match &config {
        Some(path) => from_file(serve, path)?,
        None => Vec::new(),
    };
    let mut settings = Vec::new();
    for layer in [from_variables(serve)?, of_file] {
        let is_open = |setting: &FlagSetting<'_>| {
            let is_in_the_way = |other: &&Arg| excludes(serve, other, setting.arg);
            !taken.iter().any(is_in_the_way)
        };
        let open: Vec<FlagSetting<'c>> = layer.into_iter().filter(is_open).collect();
        taken.extend(open.iter().map(|setting| setting.arg));
        settings.extend(open);
    }
    Ok(settings)
}

/// True if one flag leaves no place for the other: they are the same, stand for the same, or
/// conflict.
fn excludes(serve: &Command, one: &Arg, other: &Arg) -> bool {
    let conflicts = |a: &Arg, b: &Arg| {
        let with = serve.get_arg_conflicts_with(a);
        with.iter().any(|with| with.get_id() == b.get_id())
    };
    let are_models = one.get_id() == "files" && other.get_id() == "model";
    let is_same = one.get_id() == other.get_id();
    is_same || are_models || conflicts(one, other) || conflicts(other, one)
}

/// The flags of the command, by their long names.
fn flags(serve: &Command) -> impl Iterator<Item = (&Arg, &str)> {
    let all = serve.get_arguments().filter(|arg| !arg.is_positional());
    let all = all.filter_map(|arg| Some((arg, arg.get_long()?)));
    all.filter(|(arg, _)| {
        !matches!(
            arg.get_action(),
            ArgAction::Help | ArgAction::HelpLong | ArgAction::HelpShort | ArgAction::Version
        )
    })
}

fn name_of_variable(long: &str) -> String {
    format!("{PREFIX}{}", long.to_ascii_uppercase().replace('-', "_"))
}

/// The value of a flag's variable; an empty one is none.
fn variable(long: &str) -> Option<OsString> {
    std::env::var_os(name_of_variable(long)).filter(|value| !value.is_empty())
}

fn from_variables(serve: &Command) -> anyhow::Result<Vec<FlagSetting<'_>>> {
    let mut settings = Vec::new();
    for (arg, long) in flags(serve) {
        let Some(value) = variable(long) else {
            continue;
        };
        let is_level = || {
            let levels = arg.get_possible_values();
            levels.iter().any(|level| level.get_name() == value)
        };
        if OWN_VARIABLES.contains(&long) && !(long == "log" && is_level()) {
            continue;
        }
        let source = name_of_variable(long);
        match (takes_value(arg), value.to_str()) {
            (true, Some(text)) if matches!(arg.get_action(), ArgAction::Append) => {
                // One a line.
                for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
                    settings.push(FlagSetting::with_value(arg, line.as_ref(), &source));
                }
            }
            (true, _) => settings.push(FlagSetting::with_value(arg, &value, &source)),
            (false, text) => match text.map(str::to_ascii_lowercase).as_deref() {
                Some("1" | "true" | "yes" | "on") => {
                    settings.push(FlagSetting::switch(arg, &source))
                }
                Some("0" | "false" | "no" | "off") => {}
                _ => {
                    return usage(format!(
                        "{source} turns a flag on or off: 1 or 0 is its value"
                    ));
                }
            },
        }
    }
    Ok(settings)
}

fn from_file<'c>(serve: &'c Command, path: &Path) -> anyhow::Result<Vec<FlagSetting<'c>>> {
    let label = path.display();
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("cannot read the settings in '{label}' (--config)"))?;
    let table: toml::Table = match text.parse() {
        Ok(table) => table,
        Err(error) => return usage(format!("'{label}' is no TOML: {error}")),
    };
    let mut settings = Vec::new();
    for (key, value) in &table {
        let source = format!("'{label}', {key}");
        let Some(arg) = find(serve, key) else {
            let known: BTreeSet<&str> = flags(serve).map(|(_, long)| long).collect();
            let near = most_similar(key, &known.into_iter().collect::<Vec<_>>());
            let near = near.map_or(String::new(), |near| format!(": did you mean '{near}'?"));
            return usage(format!("{source}: 'cellar serve' has no such flag{near}"));
        };
        let values = match value {
            Value::Array(values) => values.as_slice(),
            one => std::slice::from_ref(one),
        };
        for value in values {
            match (takes_value(arg), text_of(value), value) {
                (true, Some(text), _) => {
                    settings.push(FlagSetting::with_value(arg, text.as_ref(), &source));
                }
                (false, _, Value::Boolean(true)) => {
                    settings.push(FlagSetting::switch(arg, &source))
                }
                (false, _, Value::Boolean(false)) => {}
                (false, ..) => return usage(format!("{source}: its value is true or false")),
                (true, None, _) => {
                    return usage(format!(
                        "{source}: its value is a text, a number or a list of them"
                    ));
                }
            }
        }
    }
    Ok(settings)
}

/// The flag of this name, in which `_` is as good as `-`.
fn find<'c>(serve: &'c Command, key: &str) -> Option<&'c Arg> {
    let key = key.replace('_', "-");
    let is_it = |arg: &Arg| {
        let names = arg.get_long_and_visible_aliases().unwrap_or_default();
        names.contains(&key.as_str()) && key != "config"
    };
    flags(serve).map(|(arg, _)| arg).find(|arg| is_it(arg))
}

fn takes_value(arg: &Arg) -> bool {
    arg.get_action().takes_values() && arg.get_num_args() != Some(ValueRange::EMPTY)
}

fn text_of(value: &Value) -> Option<String> {
    Some(match value {
        Value::String(text) => text.clone(),
        Value::Integer(number) => number.to_string(),
        Value::Float(number) => number.to_string(),
        Value::Boolean(_) | Value::Datetime(_) | Value::Array(_) | Value::Table(_) => return None,
    })
}

impl<'c> FlagSetting<'c> {
    fn with_value(arg: &'c Arg, value: &std::ffi::OsStr, source: &str) -> Self {
        let mut flag = OsString::from(format!("--{}=", arg.get_long().unwrap_or_default()));
        flag.push(value);
        Self {
            arg,
            flag,
            source: source.to_owned(),
        }
    }

    fn switch(arg: &'c Arg, source: &str) -> Self {
        Self {
            arg,
            flag: format!("--{}", arg.get_long().unwrap_or_default()).into(),
            source: source.to_owned(),
        }
    }
}
