//! Files that appear whole or not at all: written aside, then renamed.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;

/// Whether a file of this name could be written, as far as can be told before there is anything to
/// write.
///
/// # Errors
/// Where the path is a directory or lies in none.
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

/// Writes a file with what `write` writes, in place of one of this name.
///
/// # Errors
/// What `write` gives or the system refuses; the file is then what it was.
pub(crate) fn replace<T>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let aside = aside(path);
    let written = write_new(&aside, write).and_then(|done| {
        fs::rename(&aside, path)?;
        Ok(done)
    });
    if written.is_err() {
        // The reason why writing failed is the one to tell.
        let _ = fs::remove_file(&aside);
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

fn aside(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    path.with_file_name(name)
}
