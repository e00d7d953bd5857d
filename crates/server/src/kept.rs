//! [`KeptDir`]: a directory in which things outlive the server, one a file.
//!
//! ```text
//! cellar-kept.lock      locked while the server lives that uses the directory
//! NAME                  "cellar 1 CHECKSUM LENGTH\n", then so many bytes
//! NAME.part             while it is written
//! ```
//!
//! Invariant: a file is complete under its name, and only this user reads it; what is read is what
//! was written, or an error says that it is not. Knows nothing of what is in the files.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use sha2::{Digest, Sha256};

const LOCK: &str = "cellar-kept.lock";
const PART: &str = ".part";

/// The first line of a file begins with this: what it is, and in which version.
const MARK: &str = "cellar 1 ";

/// Bytes in which the first line ends.
const MAX_FIRST: usize = 128;

/// A directory of one server.
#[derive(Debug)]
pub(crate) struct KeptDir {
    dir: PathBuf,
    /// Held as long as this is there.
    _lock: File,
}

impl KeptDir {
    /// Makes the directory where there is none, takes it, and removes what was half written in it.
    ///
    /// # Errors
    /// Those of the system, and where another server uses the directory.
    pub(crate) fn open(dir: &Path) -> io::Result<Self> {
        let cannot = |error: io::Error| {
            let message = format!("cannot keep files in '{}': {error}", dir.display());
            io::Error::new(error.kind(), message)
        };
        let mut builder = DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(dir).map_err(cannot)?;
        let lock = create(&dir.join(LOCK)).map_err(cannot)?;
        lock.try_lock().map_err(|error| {
            cannot(match error {
                TryLockError::WouldBlock => io::Error::new(
                    io::ErrorKind::ResourceBusy,
                    "another server uses it: give each a directory of its own",
                ),
                TryLockError::Error(error) => error,
            })
        })?;
        let kept = Self {
            dir: dir.to_owned(),
            _lock: lock,
        };
        for part in kept.names(PART).map_err(cannot)? {
            // One that cannot be removed is replaced when its file is written again.
            let _stays = fs::remove_file(dir.join(part));
        }
        Ok(kept)
    }

    /// The names of the files that end like this.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn names(&self, ending: &str) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            if let Ok(name) = entry?.file_name().into_string()
                && name.ends_with(ending)
            {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Writes a file, in place of one of this name.
    ///
    /// # Errors
    /// Those of the system; there is then what was there before.
    pub(crate) fn write(&self, name: &str, parts: &[&[u8]]) -> io::Result<()> {
        let (mut hasher, mut n_bytes) = (Sha256::new(), 0);
        for part in parts {
            hasher.update(part);
            n_bytes += part.len();
        }
        let checksum = hexadecimal(&hasher.finalize());
        let part = self.dir.join(format!("{name}{PART}"));
        replace(
            &part,
            &self.dir.join(name),
            |error| error,
            |file| {
                file.write_all(format!("{MARK}{checksum} {n_bytes}\n").as_bytes())?;
                parts.iter().try_for_each(|part| file.write_all(part))?;
                file.sync_all()
            },
        )
    }

    /// The bytes of a file.
    ///
    /// # Errors
    /// Those of the system, and [`io::ErrorKind::InvalidData`] where it is not what was written.
    pub(crate) fn read(&self, name: &str) -> io::Result<Bytes> {
        let bytes = Bytes::from(fs::read(self.dir.join(name))?);
        let damaged = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what);
        let first = bytes.get(..bytes.len().min(MAX_FIRST)).unwrap_or_default();
        let end = first.iter().position(|&byte| byte == b'\n');
        let end =
            end.ok_or_else(|| damaged("its first line is not that of a file that is kept"))?;
        let first = std::str::from_utf8(bytes.get(..end).unwrap_or_default()).unwrap_or_default();
        let known = first
            .strip_prefix(MARK)
            .and_then(|rest| rest.split_once(' '));
        let (checksum, length) =
            known.ok_or_else(|| damaged("its first line is not that of a file that is kept"))?;
        let contents = bytes.slice(end + 1..);
        if length != contents.len().to_string() {
            let n_bytes = contents.len();
            return Err(damaged(&format!("it has {n_bytes} bytes, not {length}")));
        }
        if hexadecimal(&Sha256::digest(&contents)) != checksum {
            return Err(damaged("it has another checksum than when it was written"));
        }
        Ok(contents)
    }

    /// Removes a file.
    ///
    /// # Errors
    /// Those of the system.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        fs::remove_file(self.dir.join(name))
    }

    /// Where a file is.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// Writes a file under another name, and gives it its own when it is complete.
///
/// # Errors
/// Those of `write`, and those of the system as `failed` says them; there is then what was there
/// before.
pub(crate) fn replace<T, E>(
    part: &Path,
    path: &Path,
    failed: impl Fn(io::Error) -> E,
    write: impl FnOnce(&mut File) -> Result<T, E>,
) -> Result<T, E> {
    let opened = create(part).and_then(|file| file.set_len(0).map(|()| file));
    let written = opened.map_err(&failed).and_then(|mut file| {
        let done = write(&mut file)?;
        fs::rename(part, path).map_err(&failed)?;
        Ok(done)
    });
    if written.is_err() {
        // What is left of it is of no use.
        let _gone = fs::remove_file(part);
    }
    written
}

/// A file that this user alone may read.
fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn what_is_read_is_what_was_written() {
        let dir = tempfile::tempdir().unwrap();
        let kept = KeptDir::open(dir.path()).unwrap();
        let again = KeptDir::open(dir.path()).unwrap_err().to_string();
        assert!(again.contains("another server uses it"), "{again}");
        kept.write("a.file", &[b"one\n", b"two"]).unwrap();
        assert_eq!(kept.read("a.file").unwrap(), "one\ntwo");
        kept.write("a.file", &[b""]).unwrap();
        assert_eq!(kept.read("a.file").unwrap(), "");
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = fs::metadata(kept.path("a.file")).unwrap().permissions();
            assert_eq!(mode.mode() & 0o777, 0o600);
        }
        kept.write("a.file", &[b"one two three"]).unwrap();
        let good = fs::read(kept.path("a.file")).unwrap();
        let mut changed = good.clone();
        *changed.last_mut().unwrap() ^= 1;
        for (bytes, what) in [
            (changed.as_slice(), "another checksum"),
            (&good[..good.len() - 1], "it has 12 bytes, not 13"),
            (&good[..20], "its first line"),
            (b"", "its first line"),
            (b"nonsense\n", "its first line"),
        ] {
            fs::write(kept.path("a.file"), bytes).unwrap();
            let error = kept.read("a.file").unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData);
            assert!(error.to_string().contains(what), "{error}");
        }
        // What a server that was killed left goes with the next one, and nothing else.
        fs::write(kept.path("b.file.part"), "half").unwrap();
        fs::write(kept.path("notes"), "mine").unwrap();
        drop(kept);
        let kept = KeptDir::open(dir.path()).unwrap();
        assert!(!kept.path("b.file.part").exists() && kept.path("notes").exists());
        assert_eq!(kept.names(".file").unwrap(), ["a.file"]);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_as_before() {
        let dir = tempfile::tempdir().unwrap();
        let [part, path] = ["a.part", "a"].map(|name| dir.path().join(name));
        fs::write(&path, "before").unwrap();
        let full = |file: &mut File| {
            file.write_all(b"half")?;
            Err::<(), _>(io::Error::from(io::ErrorKind::StorageFull))
        };
        let error = replace(&part, &path, |error| error, full).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"before");
        assert!(!part.exists());
    }
}
