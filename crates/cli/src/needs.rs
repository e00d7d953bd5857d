//! Flags that have no effect without another one.
//!
//! Invariant: a flag that would be ignored is refused with its value and what it needs. Knows flags by
//! their ids, and nothing of what they do.

use std::fmt::Write;

use clap::parser::ValueSource;
use clap::{ArgMatches, Command};

use crate::failure::usage;

/// What some flags need.
struct Need {
    /// The commands in which they need it; all that have the flags where none is named.
    commands: &'static [&'static str],
    flags: &'static [&'static str],
    /// One of these.
    others: &'static [&'static str],
}

const fn everywhere(flags: &'static [&'static str], others: &'static [&'static str]) -> Need {
    Need {
        commands: &[],
        flags,
        others,
    }
}

const fn only(
    commands: &'static [&'static str],
    flags: &'static [&'static str],
    others: &'static [&'static str],
) -> Need {
    Need {
        commands,
        flags,
        others,
    }
}

/// Where requests, or `/set` in a chat, can turn on what a flag is about, the flag needs no other.
const NEEDS: [Need; 21] = [
    everywhere(&["keep"], &["context_shift"]),
    everywhere(&["group_attention_width"], &["group_attention_factor"]),
    everywhere(&["save_kv_type", "save_state_type"], &["save_state"]),
    everywhere(&["kv_recent", "kv_sinks"], &["kv_type_old"]),
    everywhere(&["resume"], &["output"]),
    everywhere(&["tls_cert"], &["tls_key"]),
    everywhere(&["tls_key"], &["tls_cert"]),
    everywhere(&["share_depth"], &["depth"]),
    everywhere(&["arrivals"], &["clients"]),
    everywhere(&["swap_type"], &["swap_memory"]),
    everywhere(&["swap_dir"], &["swap_memory"]),
    everywhere(&["swap_dir"], &["swap_disk"]),
    everywhere(&["swap_disk"], &["swap_dir"]),
    everywhere(
        &[
            "kv_events_replay",
            "kv_events_topic",
            "kv_block_size",
            "kv_hash_seed",
        ],
        &["kv_events"],
    ),
    only(&["bench"], &["seed"], &["arrivals"]),
    only(&["bench"], &["step_ms"], &["clients"]),
    only(
        &["run"],
        &["logprobs", "prompt_logprobs"],
        &["json", "jsonl"],
    ),
    only(
        &["run", "chat", "bench", "plan"],
        &["draft_max"],
        &["speculate"],
    ),
    only(
        &["run", "chat", "batch"],
        &["mirostat_lr", "mirostat_ent"],
        &["mirostat"],
    ),
    only(&["run"], &["xtc_threshold"], &["xtc_probability"]),
    only(
        &["run"],
        &[
            "dry_base",
            "dry_allowed_length",
            "dry_penalty_last_n",
            "dry_sequence_breaker",
        ],
        &["dry_multiplier"],
    ),
];

/// Checks that no flag was given that has no effect without another one.
///
/// # Errors
/// A usage error with the flag, its value, and what it needs.
pub(crate) fn check(cli: &Command, matches: &ArgMatches) -> anyhow::Result<()> {
    let Some((name, matches)) = matches.subcommand() else {
        return Ok(());
    };
    let Some(command) = cli.find_subcommand(name) else {
        return Ok(());
    };
    let is_given = |id: &str| matches.value_source(id) == Some(ValueSource::CommandLine);
    let has = |id: &str| command.get_arguments().any(|arg| arg.get_id() == id);
    for need in &NEEDS {
        let is_meant = need.commands.is_empty() || need.commands.contains(&name);
        let others = || need.others.iter().copied().filter(|&other| has(other));
        if !is_meant || others().next().is_none() || others().any(is_given) {
            continue;
        }
        let mut flags = need.flags.iter().copied().filter(|&flag| has(flag));
        if let Some(flag) = flags.find(|&flag| is_given(flag)) {
            let others: Vec<String> = others().map(|other| usual(command, other)).collect();
            return usage(format!(
                "{} has no effect without {}: give both, or leave it out",
                given(command, flag, matches),
                others.join(" or "),
            ));
        }
    }
    check(command, matches)
}

/// A flag as the help writes it, with what its value is.
fn usual(command: &Command, id: &str) -> String {
    let Some(arg) = command.get_arguments().find(|arg| arg.get_id() == id) else {
        return id.to_owned();
    };
    let mut text = format!("--{}", arg.get_long().unwrap_or(id));
    let names = arg.get_value_names().unwrap_or_default();
    for name in names.iter().filter(|_| arg.get_action().takes_values()) {
        let _ = write!(text, " {name}"); // writing to a string does not fail
    }
    text
}

/// A flag with the value that was given.
fn given(command: &Command, id: &str, matches: &ArgMatches) -> String {
    let arg = command.get_arguments().find(|arg| arg.get_id() == id);
    let long = arg.and_then(|arg| arg.get_long()).unwrap_or(id);
    let takes_value = arg.is_some_and(|arg| arg.get_action().takes_values());
    let value = matches.get_raw(id).and_then(|mut values| values.next());
    match value.filter(|_| takes_value) {
        Some(value) => format!("--{long} {}", value.to_string_lossy()),
        None => format!("--{long}"),
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;
    use crate::args::Cli;

    /// A flag that was renamed would be ignored again.
    #[test]
    fn every_flag_and_what_it_needs_is_in_a_command() {
        let cli = Cli::command();
        let commands = || cli.get_subcommands();
        let has = |command: &Command, id: &str| command.get_arguments().any(|a| a.get_id() == id);
        for need in &NEEDS {
            for id in need.flags.iter().chain(need.others) {
                let is_event = id.starts_with("kv_events") || need.others == ["kv_events"];
                let is_there = commands().any(|command| has(command, id));
                assert!(is_there || is_event && !cfg!(feature = "kv-events"), "{id}");
            }
            for name in need.commands {
                let command = commands().find(|command| command.get_name() == *name);
                let command = command.unwrap();
                for id in need.flags.iter().chain(need.others) {
                    assert!(has(command, id), "{name}: {id}");
                }
            }
        }
    }
}
