//! The flags of `cellar state`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// `cellar state`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cellar state inspect book.state
  cellar state inspect book.state --json")]
pub(crate) struct StateArgs {
    #[command(subcommand)]
    pub(crate) command: StateCommand,
}

/// The subcommands of `cellar state`.
#[derive(Debug, Subcommand)]
pub(crate) enum StateCommand {
    /// Verify the checksums of a state and show its contents
    Inspect(StateInspectArgs),
}

/// `cellar state inspect`
#[derive(Debug, Args)]
pub(crate) struct StateInspectArgs {
    /// Saved state
    pub(crate) file: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,
}
