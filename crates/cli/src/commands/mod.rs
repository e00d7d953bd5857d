//! The commands, one file each.
//!
//! All output goes through an [`std::io::Write`], so that a closed pipe is an error value and not a
//! panic.

pub(crate) mod answer;
mod batch;
mod bench;
mod chat;
mod convert;
mod describe;
mod devices;
mod embed;
mod graph;
mod imatrix;
mod inspect;
mod kl;
#[cfg(feature = "hub")]
mod list;
mod logits;
mod perplexity;
mod plan;
#[cfg(feature = "hub")]
mod pull;
mod replay;
mod rerank;
#[cfg(feature = "hub")]
mod rm;
mod run;
#[cfg(feature = "serve")]
mod serve;
mod session;
mod state;
mod tokenize;

use std::io;

use crate::args::Command;
use crate::failure::Exit;

/// Standard output, whose errors say so.
struct Stdout(io::StdoutLock<'static>);

impl io::Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(in_stdout)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(in_stdout)
    }
}

fn in_stdout(error: io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("cannot write to stdout: {error}"))
}

/// Runs a command.
pub(crate) fn run(command: Command) -> anyhow::Result<Exit> {
    let stdout = &mut Stdout(std::io::stdout().lock());
    match command {
        Command::Run(mut args) => {
            args.assign_words()?;
            run::run(&args, stdout)
        }
        Command::Chat(args) => chat::run(&args, stdout),
        Command::Batch(args) => batch::run(&args, stdout),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(*args),
        Command::Inspect(args) => inspect::run(&args, stdout),
        Command::Plan(args) => plan::run(&args, stdout),
        Command::Devices(args) => devices::run(&args, stdout),
        Command::Graph(args) => graph::run(&args, stdout),
        Command::Tokenize(mut args) => {
            args.input.assign()?;
            tokenize::run(&args, stdout)
        }
        Command::Logits(args) => logits::run(&args),
        Command::Kl(mut args) => {
            args.input.assign()?;
            kl::run(&args, stdout)
        }
        Command::Bench(args) => bench::run(&args, stdout),
        Command::Replay(args) => replay::run(&args, stdout),
        Command::State(args) => state::run(&args, stdout),
        Command::Perplexity(args) => perplexity::run(&args, stdout),
        Command::Embed(mut args) => {
            args.input.assign()?;
            embed::run(&args, stdout)
        }
        Command::Rerank(mut args) => {
            args.input.assign()?;
            rerank::run(&args, stdout)
        }
        Command::Convert(args) => convert::run(&args, stdout),
        Command::Imatrix(args) => imatrix::run(&args, stdout),
        #[cfg(feature = "hub")]
        Command::Pull(args) => pull::run(&args, stdout),
        #[cfg(feature = "hub")]
        Command::List(args) => list::run(&args, stdout),
        #[cfg(feature = "hub")]
        Command::Rm(args) => rm::run(&args, stdout),
        Command::Completions(args) => describe::completions(&args, stdout),
        Command::Man(args) => describe::man(&args),
    }
}
