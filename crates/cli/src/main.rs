//! The program `cellar`: parses the command line, runs one command, and prints its error, once.

mod advice;
mod args;
mod backend_plan;
mod backends;
mod by_name;
mod commands;
mod constraint;
mod draft_model;
mod failure;
mod file_type;
mod habits;
mod input;
mod interrupt;
mod keyboard;
mod kv_args;
mod logprobs;
mod machine;
mod models;
mod output_file;
mod progress;
mod resolve;
mod service;
mod shortcut;
mod terminal;

use std::io::{IsTerminal, Write};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;

use crate::args::Cli;
use crate::failure::{Exit, one_line, words};

fn main() -> ExitCode {
    let args = habits::translate(shortcut::expand(std::env::args_os()));
    let exit = match Cli::try_parse_from(args) {
        Ok(cli) => {
            start_log();
            commands::run(cli.command).unwrap_or_else(|error| {
                let exit = Exit::of(&error);
                if exit != Exit::Done {
                    complain(&one_line(&error));
                }
                exit
            })
        }
        Err(error) => not_understood(&error),
    };
    ExitCode::from(exit.code())
}

/// Prints help, or why the command line cannot be parsed.
fn not_understood(error: &clap::Error) -> Exit {
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => {
            // Nobody reads a closed pipe.
            let _ = error.print();
            Exit::Done
        }
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            let given: Vec<String> = std::env::args_os()
                .skip(1)
                .map(|arg| arg.to_string_lossy().into_owned())
                .collect();
            if given.is_empty() {
                // Nobody reads a closed pipe.
                let _ = write!(std::io::stdout(), "{}", error.render());
                return Exit::Done;
            }
            let command = words(&given.join(" "));
            complain(&format!(
                "'cellar {command}' needs a command; see 'cellar {command} --help'"
            ));
            Exit::WrongUsage
        }
        _ => {
            let text = error.render().to_string();
            // Usage, over several lines, follows the message.
            let message = text.split("\n\nUsage:").next().unwrap_or_default();
            let message = message.split("\n\nFor more").next().unwrap_or_default();
            let message = message.trim_start_matches("error: ").replace("\n\n", "; ");
            let message = words(&message);
            complain(&format!("{message}; see --help"));
            Exit::WrongUsage
        }
    }
}

fn complain(line: &str) {
    terminal::note(format_args!("error: {line}"));
}

fn start_log() {
    let filter = tracing_subscriber::EnvFilter::try_from_env("CELLAR_LOG");
    if let Ok(filter) = filter {
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .init();
    }
}
