//! Models of `-m` that are named and not there: downloaded, where the user agrees.
//!
//! Invariant: no connection is opened without `--pull` or a yes.

use std::io::{BufRead, IsTerminal};
use std::path::{Path, PathBuf};

use crate::args::ServeArgs;
use crate::by_name;
use crate::commands::pull;
use crate::failure::usage;
use crate::models::default_model;
use crate::terminal;

/// Downloads the models that are named and not in the cache.
///
/// # Errors
/// A usage error where the user does not agree; otherwise as [`pull::download`].
pub(super) fn missing_models(args: &ServeArgs) -> anyhow::Result<()> {
    let mut wanted: Vec<PathBuf> = args.named().into_iter().map(Path::to_owned).collect();
    if wanted.is_empty() && args.models.is_none() {
        wanted.extend(default_model());
    }
    for path in wanted {
        let Some(name) = by_name::not_downloaded(&path)? else {
            continue;
        };
        let can_ask = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        if !args.pull && !can_ask {
            return usage(format!(
                "the model '{name}' is not downloaded: add --pull, or run 'cellar pull {name}' before"
            ));
        }
        if !args.pull
            && !is_agreed(&format!(
                "the model '{name}' is not here: download it? [y/N] "
            ))?
        {
            return usage(format!(
                "the model '{name}' is not here, and was not downloaded"
            ));
        }
        pull::download(&name)?;
    }
    Ok(())
}

/// Asks on the terminal.
fn is_agreed(question: &str) -> anyhow::Result<bool> {
    terminal::ask(question);
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    let answer = answer.trim();
    Ok(["y", "yes"]
        .iter()
        .any(|yes| answer.eq_ignore_ascii_case(yes)))
}
