//! [`write`]: a file that is whole under its name, or is what it was before.

use std::fmt::Display;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// Writes a file in one piece: under another name first.
///
/// # Errors
/// Those of `contents`, and those of the system with the path; there is then what was there before.
pub(crate) fn write<T>(
    path: &Path,
    contents: impl FnOnce(&mut BufWriter<File>) -> Result<T, String>,
) -> Result<T, String> {
    let of_path = |error: &dyn Display| format!("'{}': {error}", path.display());
    let mut name = path.as_os_str().to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let part = PathBuf::from(name);
    let write = || {
        let file = File::create(&part).map_err(|error| of_path(&error))?;
        let mut out = BufWriter::new(file);
        let written = contents(&mut out)?;
        let moved = out.flush().and_then(|()| std::fs::rename(&part, path));
        moved.map_err(|error| of_path(&error))?;
        Ok(written)
    };
    let written = write();
    if written.is_err() {
        // It is perhaps not there.
        let _ = std::fs::remove_file(&part);
    }
    written
}
