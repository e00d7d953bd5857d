//! Input files, of which `-` is standard input.
//!
//! Invariant: standard input is read by one flag at most. Knows nothing of what is read.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, bail};

use crate::failure::usage;
use crate::machine;

/// The longest text that is read.
const MAX_TEXT: u64 = 256 << 20;

/// The mark that some editors write before a text.
const BYTE_ORDER_MARK: char = '\u{feff}';

/// Whether this path is standard input.
pub(crate) fn is_stdin(path: &Path) -> bool {
    ["-", "/dev/stdin"]
        .iter()
        .any(|name| path.as_os_str() == *name)
}

/// Whether standard input is a pipe, a socket or a file: something that ends.
#[cfg(unix)]
pub(crate) fn stdin_is_piped() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;

    let own = io::stdin().as_fd().try_clone_to_owned();
    let metadata = own.and_then(|fd| File::from(fd).metadata());
    // A closed standard input has no metadata.
    metadata.is_ok_and(|metadata| {
        let kind = metadata.file_type();
        kind.is_fifo() || kind.is_socket() || kind.is_file()
    })
}

/// True where standard input is a file of which another program has read a part, as in a shell's
/// loop of `while read`, which reads on after this program.
#[cfg(unix)]
pub(crate) fn stdin_is_shared() -> bool {
    use std::io::Seek;
    use std::os::fd::AsFd;

    let own = io::stdin().as_fd().try_clone_to_owned().map(File::from);
    let position = own.and_then(|mut file| file.stream_position());
    // A pipe has no position.
    position.is_ok_and(|position| position > 0)
}

/// No: who reads a file is not known here.
#[cfg(not(unix))]
pub(crate) fn stdin_is_shared() -> bool {
    false
}

/// Whether standard input is no terminal.
#[cfg(not(unix))]
pub(crate) fn stdin_is_piped() -> bool {
    use std::io::IsTerminal;

    !io::stdin().is_terminal()
}

/// Opens a file, or standard input.
///
/// # Errors
/// Where it is a directory or cannot be read; a usage error where standard input was opened before.
pub(crate) fn open(path: &Path) -> anyhow::Result<Box<dyn Read>> {
    if is_stdin(path) {
        return Ok(Box::new(stdin()?));
    }
    let cannot = || format!("cannot read '{}'", path.display());
    if path.is_dir() {
        bail!("{}: it is a directory; name a file in it", cannot());
    }
    Ok(Box::new(File::open(path).with_context(cannot)?))
}

/// Standard input.
///
/// # Errors
/// A usage error where it was opened before.
pub(crate) fn stdin() -> anyhow::Result<io::StdinLock<'static>> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    if TAKEN.swap(true, Ordering::Relaxed) {
        return given_twice();
    }
    Ok(io::stdin().lock())
}

/// Two flags that read standard input.
///
/// # Errors
/// Always: a usage error.
pub(crate) fn given_twice<T>() -> anyhow::Result<T> {
    usage("stdin is given twice: '-' can stand for one file only; name the other")
}

/// The UTF-8 text of a file, or of standard input.
///
/// # Errors
/// Where it cannot be read, is longer than 256 MiB, or is no text.
pub(crate) fn text(path: &Path) -> anyhow::Result<String> {
    let text = read_text(open(path)?);
    text.with_context(|| format!("cannot read '{}'", path.display()))
}

/// The UTF-8 text that a reader gives, without a byte order mark.
///
/// # Errors
/// Where it cannot be read, is longer than 256 MiB, or is no text.
pub(crate) fn read_text(reader: impl Read) -> anyhow::Result<String> {
    let mut text = String::new();
    let n_read = match reader.take(MAX_TEXT + 1).read_to_string(&mut text) {
        Ok(n_read) => n_read,
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            bail!("it is no text in UTF-8; name a file of text")
        }
        Err(error) => return Err(error.into()),
    };
    if n_read as u64 > MAX_TEXT {
        bail!("it is longer than {}", machine::bytes(MAX_TEXT));
    }
    if text.starts_with(BYTE_ORDER_MARK) {
        text.drain(..BYTE_ORDER_MARK.len_utf8());
    }
    Ok(text)
}

/// The bytes of a file, or of standard input.
///
/// # Errors
/// Where it cannot be read, or is larger than this machine's free memory.
pub(crate) fn bytes(path: &Path) -> anyhow::Result<Vec<u8>> {
    let cannot = || format!("cannot read '{}'", path.display());
    read_bytes(open(path)?).with_context(cannot)
}

/// All bytes of a reader.
///
/// # Errors
/// Where it cannot be read, or gives more than this machine's free memory.
pub(crate) fn read_bytes(reader: impl Read) -> anyhow::Result<Vec<u8>> {
    let available = machine::available_memory().unwrap_or(u64::MAX);
    let mut bytes = Vec::new();
    let n_read = reader.take(available).read_to_end(&mut bytes)?;
    if n_read as u64 == available {
        bail!(
            "it takes more than the {} that this machine has free",
            machine::bytes(available)
        );
    }
    Ok(bytes)
}
