//! The program `cellar`: parses the command line, runs one command, and prints its error, once.

mod adapters;
mod advice;
mod args;
mod backends;
mod by_name;
mod commands;
mod constraint;
mod draft_model;
mod failure;
mod given_text;
mod habits;
mod input;
mod interrupt;
mod keyboard;
mod kv_args;
mod logprobs;
mod long_context;
mod machine;
#[cfg(feature = "serve")]
mod model_room;
mod models;
mod not_understood;
mod output_file;
mod overwrite;
mod pictures;
#[cfg(feature = "serve")]
mod prefix_tiers;
mod progress;
mod resolve;
mod service;
#[cfg(feature = "serve")]
mod settings;
mod short_help;
mod shortcut;
mod terminal;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Arg, Command, CommandFactory, FromArgMatches};

use crate::args::Cli;
use crate::failure::{Exit, one_line};

fn main() -> ExitCode {
    let cli = Cli::command();
    let args = habits::translate(&cli, shortcut::expand(&cli, std::env::args_os()));
    let exit = match args.map(parse) {
        Err(error) => failed(&error),
        Ok(parsed) => obey(parsed),
    };
    ExitCode::from(exit.code())
}

/// Runs the command that was given.
fn obey(parsed: Result<anyhow::Result<Cli>, clap::Error>) -> Exit {
    match parsed {
        Ok(Ok(cli)) => {
            start_log(&cli.command);
            interrupt::survive_file_size_limit()
                .map_err(anyhow::Error::from)
                .and_then(|()| commands::run(cli.command))
                .unwrap_or_else(|error| failed(&error))
        }
        Ok(Err(error)) => failed(&error),
        Err(error) => not_understood::complain_of(&error),
    }
}

/// The command line; inside, why flags that can be parsed make no sense together.
fn parse(args: Vec<OsString>) -> Result<anyhow::Result<Cli>, clap::Error> {
    let mut command = command();
    let matches = command.try_get_matches_from_mut(&args);
    #[cfg(feature = "serve")]
    let matches = match settings::complete(&mut command, matches, args) {
        Ok(matches) => matches,
        Err(error) => return Ok(Err(error)),
    };
    let matches = matches?;
    let cli = Cli::from_arg_matches(&matches).map_err(|error| error.format(&mut command))?;
    Ok(overwrite::check(&command, &matches).map(|()| cli))
}

/// The program's command line.
fn command() -> Command {
    short_help::shorten(with_negative_numbers(Cli::command()))
}

/// The command whose flags take values such as -1, so that the flag refuses those that it cannot
/// have.
fn with_negative_numbers(command: Command) -> Command {
    let takes_value = |arg: &Arg| !arg.is_positional() && arg.get_action().takes_values();
    let command = command.mut_args(|arg| {
        if takes_value(&arg) {
            arg.allow_negative_numbers(true)
        } else {
            arg
        }
    });
    let names = command
        .get_subcommands()
        .map(|command| command.get_name().to_owned());
    let names: Vec<String> = names.collect();
    names.into_iter().fold(command, |command, name| {
        command.mut_subcommand(name, with_negative_numbers)
    })
}

fn failed(error: &anyhow::Error) -> Exit {
    let exit = Exit::of(error);
    if exit != Exit::Done {
        complain(&one_line(error));
    }
    exit
}

fn complain(line: &str) {
    terminal::note(format_args!("error: {line}"));
}

fn start_log(command: &args::Command) {
    // That clients are kept out is said unasked.
    let usual = match command {
        #[cfg(feature = "serve")]
        args::Command::Serve(args) => match args.log {
            args::LogLevel::Off => "cellar_server::listen=warn,cellar_server=error",
            args::LogLevel::Requests => "cellar_server=warn",
            args::LogLevel::Debug => "debug",
        },
        _ => "off",
    };
    // A level of 'cellar serve --log' is no filter.
    let given = std::env::var("CELLAR_LOG")
        .ok()
        .filter(|text| text != "requests");
    let filter = given.and_then(|text| tracing_subscriber::EnvFilter::try_new(text).ok());
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|| usual.into()))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
}
