//! Output files. A regular file is replaced atomically: written under a temporary name in the same
//! directory, then renamed. Devices, pipes and open descriptors are written directly; so are files
//! whose lines are of use before the last one is written ([`open_in_place`]), and those in a
//! directory where no other may be created.
//!
//! Invariant: under its own name a regular file that is replaced is always complete and keeps its
//! mode; a link keeps pointing where it did; a device stays a device. A temporary file is locked
//! while its process lives, and the next process that writes the same file removes those without a
//! lock. Knows nothing of what is written; [`crate::overwrite`] knows what may not be overwritten.

use std::ffi::OsStr;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, bail};

use crate::failure::usage;

/// Links that are followed before they count as a loop, as in Linux.
const MAX_LINKS: usize = 40;

/// Temporary files that are being written. Locked while one is created and while all are removed.
static PARTIAL: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Where a path leads.
#[derive(Debug)]
enum Target {
    /// `-`, or a name of standard output.
    Stdout,
    /// A name of standard error.
    Stderr,
    /// A device, a pipe, or another open descriptor.
    Direct(PathBuf),
    /// A regular file, and what it is today, where it exists.
    Regular(PathBuf, Option<Metadata>),
}

/// The regular file that is written under this name, through links, and what it is today, where it
/// exists; nothing for stdout, a device, a pipe, or a name under which no file can be written.
pub(crate) fn regular_target(path: &Path) -> Option<(PathBuf, Option<Metadata>)> {
    match Target::of(path) {
        Ok(Target::Regular(target, existing)) => Some((target, existing)),
        _ => None,
    }
}

/// Whether this path is standard output.
pub(crate) fn is_stdout(path: &Path) -> bool {
    matches!(Target::of(path), Ok(Target::Stdout))
}

/// Checks that a file of this name can be written, as far as that is known before writing; `flag`
/// names it. The contents are taken to be binary.
///
/// # Errors
/// Where the path is a directory, its directory does not exist, permissions are missing, or it is
/// standard output and that is a terminal.
pub(crate) fn check(flag: &str, path: &Path) -> anyhow::Result<()> {
    let cannot = || format!("cannot write '{}'", path.display());
    match Target::of(path).with_context(cannot)? {
        Target::Stdout if io::stdout().is_terminal() => usage(format!(
            "{flag} {}: the output is binary and stdout is a terminal; name a file, or redirect stdout",
            path.display()
        )),
        Target::Stdout | Target::Stderr | Target::Direct(_) => Ok(()),
        Target::Regular(target, existing) => {
            if existing.is_some() {
                // A file that may not be written is not replaced either.
                OpenOptions::new()
                    .write(true)
                    .open(&target)
                    .with_context(cannot)?;
            }
            match create_temporary(&target, None) {
                Ok((temporary, _)) => remove_temporary(&temporary),
                Err(error) => {
                    in_closed_directory(&target, existing.as_ref(), error).with_context(cannot)?
                }
            }
            Ok(())
        }
    }
}

/// Writes what `write` writes to the file, device or pipe of this name; `-` is standard output.
///
/// # Errors
/// Those of `write` and of the system; a regular file of this name is then unchanged.
pub(crate) fn write<T>(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let cannot = || format!("cannot write '{}'", path.display());
    match Target::of(path).with_context(cannot)? {
        Target::Stdout => direct(stdout_file().with_context(cannot)?, write).with_context(cannot),
        Target::Stderr => direct(stderr_file().with_context(cannot)?, write).with_context(cannot),
        Target::Direct(target) => {
            let opened = OpenOptions::new().write(true).truncate(true).open(target);
            let done = direct(opened.with_context(cannot)?, write);
            // What reads a pipe in place of a file should have read all of it: unlike a closed
            // stdout, this is a failure.
            done.map_err(|error| {
                if is_broken_pipe(&error) {
                    anyhow::anyhow!("{}: its reader closed the pipe", cannot())
                } else {
                    error.context(cannot())
                }
            })
        }
        Target::Regular(target, existing) => {
            replace(&target, existing.as_ref(), write).with_context(cannot)
        }
    }
}

/// A file that is written under its own name.
pub(crate) enum InPlace {
    /// A regular file with what was in it, which can be read, at its beginning.
    Regular(File),
    /// Standard output, a device or a pipe.
    Direct(File),
}

/// Opens a file that is written line by line, of which every line that is there is of use. What a
/// regular file has stays until its caller cuts it off.
///
/// # Errors
/// Where the file cannot be written.
pub(crate) fn open_in_place(path: &Path) -> anyhow::Result<InPlace> {
    let cannot = || format!("cannot write '{}'", path.display());
    let mut options = OpenOptions::new();
    let options = options.write(true);
    let opened = match Target::of(path).with_context(cannot)? {
        Target::Stdout => stdout_file().map(InPlace::Direct),
        Target::Stderr => stderr_file().map(InPlace::Direct),
        Target::Direct(target) => options.open(target).map(InPlace::Direct),
        Target::Regular(target, _) => {
            let options = options.read(true).create(true).truncate(false);
            options.open(target).map(InPlace::Regular)
        }
    };
    opened.with_context(cannot)
}

/// Removes the temporary files of this process and keeps others from being created: for the end of
/// the process.
pub(crate) fn remove_partial() -> impl Drop {
    let partial = lock_partial();
    for path in partial.iter() {
        // The process ends: a failure cannot be reported any more.
        let _ = fs::remove_file(path);
    }
    partial
}

impl Target {
    fn of(path: &Path) -> anyhow::Result<Self> {
        if path.as_os_str() == "-" {
            return Ok(Self::Stdout);
        }
        let (target, descriptor) = follow_links(path)?;
        match descriptor {
            Some(1) => return Ok(Self::Stdout),
            Some(2) => return Ok(Self::Stderr),
            Some(_) => return Ok(Self::Direct(target)),
            None => (),
        }
        match fs::metadata(&target) {
            Ok(found) if found.is_dir() => bail!("it is a directory; name a file in it"),
            Ok(found) if found.is_file() => Ok(Self::Regular(target, Some(found))),
            Ok(_) => Ok(Self::Direct(target)),
            Err(_) if !parent(&target).is_dir() => {
                bail!(
                    "there is no directory '{}'; create it, or choose another place",
                    parent(&target).display()
                )
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Ok(Self::Regular(target, None))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Where the links of a path end, and which open descriptor of this process that is, if it is one.
fn follow_links(path: &Path) -> anyhow::Result<(PathBuf, Option<u32>)> {
    let mut path = path.to_owned();
    for _ in 0..MAX_LINKS {
        let descriptor = descriptor(&path);
        if descriptor.is_some() {
            return Ok((path, descriptor));
        }
        match fs::read_link(&path) {
            // A relative link begins where it is; an absolute one replaces the path.
            Ok(to) => path = parent(&path).join(to),
            Err(_) => return Ok((path, None)),
        }
    }
    bail!("more than {MAX_LINKS} links follow one another")
}

/// The descriptor that a path of the system names, such as `/dev/stdout`.
fn descriptor(path: &Path) -> Option<u32> {
    let path = path.to_str()?;
    match path {
        "/dev/stdin" => return Some(0),
        "/dev/stdout" => return Some(1),
        "/dev/stderr" => return Some(2),
        _ => (),
    }
    let own = format!("/proc/{}/fd/", std::process::id());
    let number = ["/dev/fd/", "/proc/self/fd/", &own]
        .iter()
        .find_map(|folder| path.strip_prefix(folder))?;
    number.parse().ok()
}

fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|e| e.downcast_ref::<io::Error>());
    causes.any(|e| e.kind() == io::ErrorKind::BrokenPipe)
}

fn direct<T>(
    file: File,
    write: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let mut file = BufWriter::new(file);
    let written = write(&mut file).and_then(|done| {
        file.flush()?;
        Ok(done)
    });
    if written.is_err() {
        // Dropping the writer would write what is left of its buffer, and wait for it.
        let _ = file.into_parts();
    }
    written
}

fn replace<T>(
    path: &Path,
    existing: Option<&Metadata>,
    write: impl FnOnce(&mut BufWriter<File>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    if existing.is_some() {
        OpenOptions::new().write(true).open(path)?;
    }
    let (temporary, file) = match create_temporary(path, existing) {
        Ok(created) => created,
        Err(error) => {
            in_closed_directory(path, existing, error)?;
            let file = OpenOptions::new().write(true).truncate(true).open(path)?;
            return direct(file, write);
        }
    };
    let mut file = BufWriter::new(file);
    let written = write(&mut file).and_then(|done| {
        file.flush()?;
        file.get_ref().sync_all()?;
        fs::rename(&temporary, path)?;
        Ok(done)
    });
    if written.is_ok() {
        lock_partial().retain(|other| *other != temporary);
    } else {
        remove_temporary(&temporary);
    }
    written
}

/// Whether a file that may be written is in a directory where no other may be created: it is then
/// written in place, and an error leaves it incomplete.
///
/// # Errors
/// Where it is not; with the reason why no file can be created.
fn in_closed_directory(
    path: &Path,
    existing: Option<&Metadata>,
    error: io::Error,
) -> anyhow::Result<()> {
    match (error.kind(), existing) {
        (io::ErrorKind::PermissionDenied, Some(_)) => Ok(()),
        (io::ErrorKind::PermissionDenied, None) => bail!(
            "no file may be created in '{}' ({error}); choose another place",
            parent(path).display()
        ),
        _ => Err(error.into()),
    }
}

/// A new file in the directory of `path`, with the owner and mode of the file that it replaces.
/// Those that ended processes left there of the same name are removed.
fn create_temporary(path: &Path, replaced: Option<&Metadata>) -> io::Result<(PathBuf, File)> {
    let name = path.file_name().unwrap_or_default();
    remove_abandoned(parent(path), |of| of == name);
    let mut name = name.to_owned();
    name.push(format!(".{}.part", std::process::id()));
    let temporary = path.with_file_name(name);
    let mut partial = lock_partial();
    let file = create_locked(&temporary)?;
    partial.push(temporary.clone());
    drop(partial);
    if let Some(replaced) = replaced
        && let Err(error) = copy_owner_and_mode(&file, replaced)
    {
        remove_temporary(&temporary);
        return Err(error);
    }
    Ok((temporary, file))
}

/// A new file that is locked while it is open, so that others see that its process lives.
fn create_locked(path: &Path) -> io::Result<File> {
    loop {
        let file = OpenOptions::new().write(true).create_new(true).open(path)?;
        // On a file system without locks, no process takes the file for abandoned either.
        let _ = file.lock();
        // Another process may have found the file before it was locked, and removed it.
        if path.exists() {
            return Ok(file);
        }
    }
}

/// Removes the temporary files that ended processes left in a directory, of the files whose names
/// are wanted.
fn remove_abandoned(directory: &Path, is_wanted: impl Fn(&OsStr) -> bool) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let path = entry.path();
        // NAME.PID.part
        let Some(rest) = path
            .file_stem()
            .filter(|_| path.extension() == Some("part".as_ref()))
        else {
            continue;
        };
        let rest = Path::new(rest);
        let (Some(of), Some(process)) =
            (rest.file_stem(), rest.extension().and_then(OsStr::to_str))
        else {
            continue;
        };
        // A container gives each of its processes the same number: only the lock tells.
        let is_process = process.bytes().all(|b| b.is_ascii_digit());
        if !is_process || !is_wanted(of) || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        // The lock of a process ends with it.
        let is_abandoned = File::open(&path).is_ok_and(|file| file.try_lock().is_ok());
        if is_abandoned {
            // What cannot be removed stays, as it would without this.
            let _ = fs::remove_file(&path);
        }
    }
}

#[cfg(unix)]
fn copy_owner_and_mode(file: &File, replaced: &Metadata) -> io::Result<()> {
    use std::os::unix::fs::{MetadataExt, fchown};
    let own = file.metadata()?;
    if (own.uid(), own.gid()) != (replaced.uid(), replaced.gid()) {
        // Only root may give files away; the file is then the user's who writes it.
        let _ = fchown(file, Some(replaced.uid()), Some(replaced.gid()));
    }
    file.set_permissions(replaced.permissions())
}

#[cfg(not(unix))]
fn copy_owner_and_mode(file: &File, replaced: &Metadata) -> io::Result<()> {
    file.set_permissions(replaced.permissions())
}

fn remove_temporary(temporary: &Path) {
    let mut partial = lock_partial();
    // The error to report is why writing failed.
    let _ = fs::remove_file(temporary);
    partial.retain(|other| other != temporary);
}

fn lock_partial() -> MutexGuard<'static, Vec<PathBuf>> {
    PARTIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(unix)]
fn stdout_file() -> io::Result<File> {
    use std::os::fd::AsFd;
    io::stdout().flush()?;
    Ok(io::stdout().as_fd().try_clone_to_owned()?.into())
}

#[cfg(unix)]
fn stderr_file() -> io::Result<File> {
    use std::os::fd::AsFd;
    Ok(io::stderr().as_fd().try_clone_to_owned()?.into())
}

#[cfg(windows)]
fn stdout_file() -> io::Result<File> {
    use std::os::windows::io::AsHandle;
    io::stdout().flush()?;
    Ok(io::stdout().as_handle().try_clone_to_owned()?.into())
}

#[cfg(windows)]
fn stderr_file() -> io::Result<File> {
    use std::os::windows::io::AsHandle;
    Ok(io::stderr().as_handle().try_clone_to_owned()?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptors_are_known_by_their_names() {
        for (path, wanted) in [
            ("/dev/stdout", Some(1)),
            ("/dev/fd/63", Some(63)),
            ("/proc/self/fd/2", Some(2)),
            ("/dev/fd", None),
            ("/dev/null", None),
            ("stdout", None),
        ] {
            assert_eq!(descriptor(Path::new(path)), wanted, "{path}");
        }
        assert!(is_stdout(Path::new("-")));
        assert!(!is_stdout(Path::new("./-")));
    }

    /// Also one whose process had the number of this one, as in a container.
    #[test]
    fn temporary_files_without_a_lock_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("state");
        let part = dir
            .path()
            .join(format!("state.{}.part", std::process::id()));
        fs::write(&part, "left").unwrap();
        write(&path, |out| {
            assert_eq!(out.get_ref().metadata()?.len(), 0);
            // The file of a process that lives stays.
            remove_abandoned(dir.path(), |_| true);
            assert!(part.exists());
            Ok(out.write_all(b"new")?)
        })
        .unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert!(!part.exists());
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_to_files_that_do_not_exist_yet() {
        use std::os::unix::fs::symlink;
        let dir = tempfile::tempdir().unwrap();
        let [first, second] = ["first", "second"].map(|name| dir.path().join(name));
        symlink("second", &first).unwrap();
        symlink(dir.path().join("file"), &second).unwrap();
        let (target, _) = follow_links(&first).unwrap();
        assert_eq!(target, dir.path().join("file"));
        symlink("ring", dir.path().join("ring")).unwrap();
        let error = follow_links(&dir.path().join("ring")).unwrap_err();
        assert!(error.to_string().contains("40 links"), "{error}");
    }
}
