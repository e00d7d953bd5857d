//! `--save-cache DIR`: a file of cached prefixes for each model, written when the server ends and
//! read when the model is loaded.
//!
//! Invariant: what is wrong with a file is a line on stderr, never an end of the server; a file is
//! complete under its name, and only this user reads it. Which prefixes a request shares is decided
//! by the salts in it.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use cellar_engine::serve::{PrefixCounts, Service};
use cellar_server::App;
use kv_core::backend::BoxedBackend;

use crate::failure::{one_line, warn};
use crate::terminal::note;
use crate::{input, output_file};

/// What the names of these files end with.
const ENDING: &str = ".prefixes";

/// Makes the directory, where there is none, and checks that files can be written in it.
///
/// # Errors
/// The directory cannot be made, or no file in it.
pub(super) fn prepare_dir(dir: &Path) -> anyhow::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    let made = builder.create(dir);
    made.with_context(|| {
        format!(
            "--save-cache: cannot make the directory '{}'",
            dir.display()
        )
    })?;
    output_file::remove_abandoned(dir, |of| of.to_string_lossy().ends_with(ENDING));
    let any = dir.join(format!("any{ENDING}"));
    output_file::check("--save-cache", &any).with_context(|| {
        format!(
            "--save-cache: no file can be written in '{}'",
            dir.display()
        )
    })
}

/// Takes the prefixes back that were saved of this model.
pub(super) fn restore(dir: &Path, id: &str, service: &Service<BoxedBackend>) {
    let path = path_of(dir, id, service);
    for other in others(dir, id, &path) {
        warn(&format!(
            "'{}' is not restored: another file of the model '{id}' computed it",
            other.display()
        ));
    }
    if !path.exists() {
        return;
    }
    let restored = input::bytes(&path).and_then(|bytes| Ok(service.restore_prefixes(bytes)?));
    match restored {
        Ok(counts) => note(format_args!("({} of '{id}' restored)", words(counts))),
        Err(error) => warn(&format!(
            "'{}' is not restored: {}",
            path.display(),
            one_line(&error)
        )),
    }
}

/// Writes the prefixes of all models that are loaded. To be called when no request is left.
pub(super) fn save_all(dir: &Path, app: &App) {
    for model in app.models() {
        let Some(service) = model.service() else {
            continue;
        };
        let path = path_of(dir, &model.id, service);
        match save(&path, service) {
            Ok(counts) => note(format_args!("({} of '{}' saved)", words(counts), model.id)),
            Err(error) => warn(&format!(
                "the cached prefixes of '{}' are not saved: {}",
                model.id,
                one_line(&error)
            )),
        }
    }
}

fn save(path: &Path, service: &Service<BoxedBackend>) -> anyhow::Result<PrefixCounts> {
    let counts = output_file::write(path, |out| {
        #[cfg(unix)]
        {
            let own = std::os::unix::fs::PermissionsExt::from_mode(0o600);
            out.get_ref().set_permissions(own)?;
        }
        Ok(service.save_prefixes(out)?)
    })?;
    if counts.n_prefixes == 0 {
        fs::remove_file(path)?;
    }
    Ok(counts)
}

/// The file of a model: its name, and what tells its weights from others.
fn path_of(dir: &Path, id: &str, service: &Service<BoxedBackend>) -> PathBuf {
    let hash = service.fingerprint().weights.hash;
    dir.join(format!("{}{hash:016x}{ENDING}", beginning(id)))
}

/// What the names of the files of a model begin with.
fn beginning(id: &str) -> String {
    let safe = |c: char| match c {
        c if c.is_ascii_alphanumeric() || "-_.".contains(c) => c,
        _ => '_',
    };
    format!("{}-", id.chars().map(safe).collect::<String>())
}

/// Files of other models of this name.
fn others(dir: &Path, id: &str, own: &Path) -> Vec<PathBuf> {
    let beginning = beginning(id);
    let is_other = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let hash = name.and_then(|name| name.strip_prefix(&beginning)?.strip_suffix(ENDING));
        let is_hash = |hash: &str| hash.len() == 16 && u64::from_str_radix(hash, 16).is_ok();
        path != own && hash.is_some_and(is_hash)
    };
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(is_other).collect()
}

fn words(counts: PrefixCounts) -> String {
    let mut words = match counts.n_prefixes {
        1 => "1 cached prefix".to_owned(),
        n => format!("{n} cached prefixes"),
    };
    // Writing to a text cannot fail.
    let _ = write!(words, " of {} tokens", counts.n_tokens);
    if counts.n_left_out > 0 {
        let _ = write!(words, ", without {} that do not fit,", counts.n_left_out);
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_files_are_safe_and_told_apart() {
        assert_eq!(beginning("OWNER/NAME:Q4_K_M"), "OWNER_NAME_Q4_K_M-");
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str| {
            let path = dir.path().join(name);
            fs::write(&path, "").unwrap();
            path
        };
        let own = file("chat-0123456789abcdef.prefixes");
        let other = file("chat-fedcba9876543210.prefixes");
        file("chat-v2-fedcba9876543210.prefixes");
        file("chat-notes.prefixes");
        assert_eq!(others(dir.path(), "chat", &own), [other]);
        assert!(others(&dir.path().join("nowhere"), "chat", &own).is_empty());
    }
}
