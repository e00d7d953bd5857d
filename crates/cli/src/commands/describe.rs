//! `cellar completions` and `cellar man`: the command line, for shells and for manuals.
//!
//! Invariant: both are made from the flags themselves, so they cannot fall behind.

use std::io::Write;

use anyhow::Context;
use clap::CommandFactory;

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::failure::Exit;

/// Prints a completion script.
pub(super) fn completions(args: &CompletionsArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    // The generator panics where it cannot write, for example to a closed pipe.
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "cellar", &mut script);
    out.write_all(&script)?;
    out.flush()?;
    Ok(Exit::Done)
}

/// Writes a manual page for every command.
pub(super) fn man(args: &ManArgs) -> anyhow::Result<Exit> {
    let directory = &args.directory;
    let cannot = || format!("cannot write manual pages to '{}'", directory.display());
    std::fs::create_dir_all(directory).with_context(cannot)?;
    clap_mangen::generate_to(Cli::command(), directory).with_context(cannot)?;
    Ok(Exit::Done)
}
