//! Atomic writes: a file is written under a temporary name in the same directory, then renamed.
//!
//! Invariant: under its own name a file is always complete.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

/// Checks that a file of this name can be written, as far as that is known before writing.
///
/// # Errors
/// Where the path is a directory, or its directory does not exist.
pub(crate) fn check(path: &Path) -> anyhow::Result<()> {
    let cannot = || format!("cannot write '{}'", path.display());
    if path.is_dir() {
        anyhow::bail!("{}: it is a directory", cannot());
    }
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() && !parent.is_dir() => {
            anyhow::bail!("{}: there is no directory '{}'", cannot(), parent.display())
        }
        _ => Ok(()),
    }
}

/// Replaces or creates a file with the bytes that `write` writes.
///
/// # Errors
/// Those of `write` and of the system; a file of this name is then unchanged.
pub(crate) fn replace<T>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let temporary = temporary_path(path);
    let written = write_new(&temporary, write).and_then(|done| {
        fs::rename(&temporary, path)?;
        Ok(done)
    });
    if written.is_err() {
        // The error to report is why writing failed.
        let _ = fs::remove_file(&temporary);
    }
    written.with_context(|| format!("cannot write '{}'", path.display()))
}

fn write_new<T>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let file = fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(path)?;
    let mut file = BufWriter::new(file);
    let done = write(&mut file)?;
    file.flush()?;
    file.get_ref().sync_all()?;
    Ok(done)
}

fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    path.with_file_name(name)
}
