//! The flags of `cellar completions` and `cellar man`.

use std::path::PathBuf;

use clap::Args;
use clap_complete::Shell;

/// `cellar completions`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  cellar completions bash > ~/.local/share/bash-completion/completions/cellar
  cellar completions zsh > ~/.zfunc/_cellar
  cellar completions fish > ~/.config/fish/completions/cellar.fish")]
pub(crate) struct CompletionsArgs {
    /// Shell
    pub(crate) shell: Shell,
}

/// `cellar man`
#[derive(Debug, Args)]
pub(crate) struct ManArgs {
    /// Directory for the pages; it is created where it does not exist
    pub(crate) directory: PathBuf,
}
