//! [`Disk`]: the changes that a directory store makes, so that tests can have each fail.

use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

/// What changes files. Each call may fail as the system may.
pub trait Disk: fmt::Debug + Send {
    /// A new file that only this user reads.
    ///
    /// # Errors
    /// Those of the system; where there is a file of this name.
    fn create(&self, path: &Path) -> io::Result<File>;

    /// Writes all bytes.
    ///
    /// # Errors
    /// Those of the system. Some bytes may be written.
    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()>;

    /// Gives a file another name, in place of the file that has it.
    ///
    /// # Errors
    /// Those of the system.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    /// Those of the system.
    fn remove(&self, path: &Path) -> io::Result<()>;
}

/// The files of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemDisk;

impl Disk for SystemDisk {
    fn create(&self, path: &Path) -> io::Result<File> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        options.open(path)
    }

    fn write(&self, file: &mut File, bytes: &[u8]) -> io::Result<()> {
        file.write_all(bytes)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }
}

/// Opens a file, but no link, and without waiting for a pipe.
pub(super) fn open_file(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    not_followed(&mut options).open(path)
}

/// Opens the lock, which is made where there is none.
pub(super) fn open_lock(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    not_followed(&mut options).open(path)
}

#[cfg(unix)]
fn not_followed(options: &mut OpenOptions) -> &mut OpenOptions {
    use rustix::fs::OFlags;
    let flags = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    std::os::unix::fs::OpenOptionsExt::custom_flags(options, flags.bits() as i32)
}

#[cfg(not(unix))]
fn not_followed(options: &mut OpenOptions) -> &mut OpenOptions {
    options
}
