//! Flags of llama.cpp, vLLM and Ollama: those that stand for a flag of this program, those that
//! there is nothing to choose for, and those of what this program does not do.
//!
//! Invariant: a flag that a command has itself is never replaced, nor is a value of a flag, nor
//! what follows `--`. Knows nothing of what flags mean.

mod flags;

use std::ffi::OsString;

use clap::Command;

use crate::failure::{usage, warn};

use Fate::{Idle, IdleSwitch, IdleValue, Is, Refused};
use flags::{FLAGS, ONE_MODEL};

/// The treatment of a flag.
#[derive(Clone, Copy, Debug)]
enum Fate {
    /// It is this flag.
    Is(&'static str),
    /// It has no effect, for this reason.
    Idle(&'static str),
    /// The same, with a value, which may be missing: on, off or auto.
    IdleSwitch(&'static str),
    /// The same, with a value.
    IdleValue(&'static str),
    /// It is refused with what there is instead.
    Refused(&'static str),
}

/// The arguments with this program's flags. Warns of those without effect.
///
/// # Errors
/// A usage error for a flag of what this program does not do.
pub(crate) fn translate(cli: &Command, args: Vec<OsString>) -> anyhow::Result<Vec<OsString>> {
    let name = args.get(1).and_then(|name| name.to_str());
    let Some(command) = name.and_then(|name| cli.find_subcommand(name)) else {
        return Ok(args);
    };
    let mut translated = Vec::with_capacity(args.len());
    let mut args = args.into_iter().peekable();
    let mut is_value = false;
    while let Some(arg) = args.next() {
        if arg == "--" {
            translated.push(arg);
            translated.extend(args);
            break;
        }
        let text = arg.to_str().unwrap_or_default();
        let (flag, value) = match text.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag, Some(value)),
            _ => (text, None),
        };
        let fate = fate_of(flag).filter(|_| !is_value && !has(command, flag));
        is_value = !is_value && takes_value(command, text);
        let Some(fate) = fate else {
            translated.push(arg);
            continue;
        };
        let idle = |why: &str| warn(&format!("{flag} has no effect: {why}"));
        match fate {
            // Of a conversation: the command is one, or has none.
            Is(ours @ ("--chat" | "--raw" | "--no-echo" | "--quiet")) if !has(command, ours) => {
                idle(ONE_MODEL);
            }
            Is(ours) => {
                is_value = value.is_none() && takes_value(command, ours);
                translated.push(
                    value.map_or_else(|| ours.into(), |value| format!("{ours}={value}").into()),
                );
            }
            Idle(why) => idle(why),
            IdleValue(why) | IdleSwitch(why) if value.is_some() => idle(why),
            IdleValue(why) => {
                idle(why);
                args.next();
            }
            IdleSwitch(why) => {
                idle(why);
                let switches = ["on", "off", "auto", "0", "1"];
                let _ = args.next_if(|next| switches.iter().any(|value| next == value));
            }
            Refused(instead) => return usage(format!("there is no {flag} here: {instead}")),
        }
    }
    Ok(translated)
}

/// The answer to a flag that the command does not have.
fn fate_of(flag: &str) -> Option<Fate> {
    let is_it = |name: &str| match name.strip_suffix('*') {
        Some(start) => flag.starts_with(start),
        None => flag == name,
    };
    let row = FLAGS.iter().find(|(names, _)| names.split(' ').any(is_it));
    row.map(|(_, fate)| *fate)
}

/// True where a command has this flag.
pub(crate) fn has(command: &Command, flag: &str) -> bool {
    argument(command, flag).is_some()
}

/// True where the next argument is the value of this flag of the command.
fn takes_value(command: &Command, flag: &str) -> bool {
    argument(command, flag)
        .is_some_and(|arg| arg.get_action().takes_values() && !arg.is_require_equals_set())
}

fn argument<'c>(command: &'c Command, flag: &str) -> Option<&'c clap::Arg> {
    let long = flag.strip_prefix("--");
    let mut chars = flag.chars().skip(1);
    let short = chars
        .next()
        .filter(|_| long.is_none() && chars.next().is_none());
    command.get_arguments().find(|arg| {
        let longs = arg.get_long_and_visible_aliases().unwrap_or_default();
        let all = arg.get_all_aliases().unwrap_or_default();
        let shorts = arg.get_short_and_visible_aliases().unwrap_or_default();
        long.is_some_and(|long| longs.contains(&long) || all.contains(&long))
            || short.is_some_and(|short| shorts.contains(&short))
    })
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    fn translated(args: &[&str]) -> Vec<OsString> {
        translate(&Cli::command(), args.iter().map(OsString::from).collect()).unwrap()
    }

    #[test]
    fn only_whole_flags_before_the_dashes_are_translated() {
        let args = [
            "cellar",
            "run",
            "-sys",
            "Hi",
            "-ngl",
            "0",
            "-ngl=1",
            "--spec-draft-n-max=3",
            "--",
            "-sys",
        ];
        let wanted = [
            "cellar",
            "run",
            "--system",
            "Hi",
            "--gpu-layers",
            "0",
            "-ngl=1",
            "--draft-max=3",
            "--",
            "-sys",
        ];
        assert_eq!(translated(&args), wanted);
    }

    #[test]
    fn values_and_flags_of_the_command_stay() {
        let stays = ["cellar", "run", "--stop", "-fa", "-p", "-v"];
        assert_eq!(translated(&stays), stays);
        let repetitions = ["cellar", "bench", "-r", "2"];
        assert_eq!(translated(&repetitions), repetitions);
        assert_eq!(
            translated(&[
                "cellar", "run", "-r", "User:", "-fa", "on", "-tb", "4", "Hi"
            ]),
            ["cellar", "run", "--stop", "User:", "Hi"]
        );
        assert_eq!(
            translated(&["cellar", "chat", "-cnv", "--jinja", "-fa"]),
            ["cellar", "chat"]
        );
    }

    #[test]
    fn every_flag_stands_for_one_that_a_command_has() {
        let cli = Cli::command();
        for (names, fate) in FLAGS {
            let Is(ours) = fate else { continue };
            let is_there = cli.get_subcommands().any(|command| has(command, ours));
            assert!(is_there, "{names:?}: {ours}");
        }
    }
}
