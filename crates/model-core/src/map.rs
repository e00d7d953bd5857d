//! [`map_file`]: the bytes of a file, mapped instead of read. Knows no format.
//!
//! Invariant: reading them never fails. A file that is changed meanwhile is found out by
//! [`ByteOwner::check`], which whoever reads asks before it believes what it read.

use std::fs::{self, File, Metadata};
use std::io;
#[cfg(unix)]
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
#[cfg(target_os = "linux")]
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use kv_graph::weights::{ByteOwner, SharedBytes, SourceChanged};
use memmap2::Mmap;

#[cfg(target_os = "linux")]
use crate::direct_file::DirectFile;
#[cfg(unix)]
use crate::map_guard::MapGuard;

/// Why a file is not mapped. Callers convert it into their own errors.
#[derive(Debug)]
pub(crate) enum MapError {
    /// The system's error.
    Io(io::Error),
    /// A directory or a device.
    NotAFile,
    /// No bytes, which no system maps.
    Empty,
}

impl From<io::Error> for MapError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Maps a file.
pub(crate) fn map_file(path: &Path) -> Result<SharedBytes, MapError> {
    // Asked before opening: opening a pipe would wait for somebody to write into it.
    let found = fs::metadata(path)?;
    if !found.is_file() {
        return Err(MapError::NotAFile);
    }
    let file = File::open(path)?;
    let opened = FileState::of(&file.metadata()?);
    if opened.n_bytes == 0 {
        return Err(MapError::Empty);
    }
    // Other processes may change the file, as they may change any bytes that are read from a
    // device: whoever reads asks `check` before it believes anything of it. SAFETY: private, never
    // written to, and read as plain bytes, of which every value is valid. Where another process
    // shortens the file, the guard has zeros read.
    let map = unsafe { Mmap::map(&file) }?;
    Ok(SharedBytes::new(Arc::new(MappedFile {
        #[cfg(unix)]
        guard: MapGuard::new(&map)?,
        has_changed: AtomicBool::new(false),
        #[cfg(target_os = "linux")]
        direct: OnceLock::new(),
        map,
        file,
        path: path.to_owned(),
        opened,
    })))
}

/// Length and time of writing, which change when a file is changed in place. Renaming another file
/// over it leaves them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct FileState {
    n_bytes: u64,
    /// `None` where the system does not know.
    written: Option<SystemTime>,
}

impl FileState {
    fn of(metadata: &Metadata) -> Self {
        Self {
            n_bytes: metadata.len(),
            written: metadata.modified().ok(),
        }
    }
}

/// A mapped file.
struct MappedFile {
    /// Dropped before the map.
    #[cfg(unix)]
    guard: MapGuard,
    /// True if it was found to have changed.
    has_changed: AtomicBool,
    /// The same file for reads past the system's cache, once there was one; `None` where its file
    /// system has none.
    #[cfg(target_os = "linux")]
    direct: OnceLock<Option<DirectFile>>,
    map: Mmap,
    file: File,
    path: PathBuf,
    opened: FileState,
}

impl MappedFile {
    #[cfg(unix)]
    fn has_faulted(&self) -> bool {
        self.guard.has_faulted()
    }

    /// Other systems do not shorten a file that is mapped.
    #[cfg(not(unix))]
    fn has_faulted(&self) -> bool {
        false
    }
}

impl ByteOwner for MappedFile {
    fn bytes(&self) -> &[u8] {
        &self.map
    }

    fn check(&self) -> Result<(), SourceChanged> {
        let now = self.file.metadata().map(|found| FileState::of(&found));
        let is_same = now.as_ref().is_ok_and(|now| *now == self.opened);
        if !is_same || self.has_faulted() {
            self.has_changed.store(true, Ordering::SeqCst);
        }
        if !self.has_changed.load(Ordering::SeqCst) {
            return Ok(());
        }
        Err(SourceChanged {
            name: self.path.display().to_string(),
            n_bytes: self.opened.n_bytes,
            found: now.map_or(0, |now| now.n_bytes),
        })
    }

    fn is_in_file(&self) -> bool {
        true
    }

    fn copy(&self, start: usize, to: &mut [u8]) -> bool {
        read_at(&self.file, start as u64, to).is_ok()
    }

    /// Past the system's cache where that works, as what is in it takes memory from others.
    #[cfg(target_os = "linux")]
    fn read_once(&self, range: Range<usize>, buffer: &mut Vec<u8>) -> Option<Range<usize>> {
        let open = || DirectFile::open(&self.path, &self.file);
        let direct = self.direct.get_or_init(open).as_ref();
        direct
            .and_then(|direct| direct.read(range.clone(), buffer))
            .or_else(|| {
                buffer.resize(range.len(), 0);
                self.copy(range.start, buffer).then_some(0..range.len())
            })
    }

    /// Only where the system has a call for it.
    #[cfg(unix)]
    fn release(&self, bytes: Range<usize>) {
        let Some(len) = bytes.end.checked_sub(bytes.start) else {
            return;
        };
        if bytes.end <= self.map.len() {
            // SAFETY: pages of a file that are never written to here have the same bytes when they
            // come back. That some stay is no loss but of memory.
            let advised = unsafe {
                let advice = memmap2::UncheckedAdvice::DontNeed;
                self.map.unchecked_advise_range(advice, bytes.start, len)
            };
            advised.unwrap_or_default();
        }
    }
}

/// Reads so many bytes from there on, without moving where the file is read from otherwise.
#[cfg(unix)]
fn read_at(file: &File, start: u64, to: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, to, start)
}

/// The same where each read returns how much it read.
#[cfg(windows)]
fn read_at(file: &File, mut start: u64, mut to: &mut [u8]) -> io::Result<()> {
    while !to.is_empty() {
        let n = std::os::windows::fs::FileExt::seek_read(file, to, start)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        (start, to) = (start + n as u64, &mut to[n..]);
    }
    Ok(())
}

/// A system without files, as WebAssembly in a browser, has opened none.
#[cfg(not(any(unix, windows)))]
fn read_at(_file: &File, _start: u64, _to: &mut [u8]) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_released_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("bytes");
        let bytes: Vec<u8> = (0..100_000u32).map(|i| (i / 3) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let mapped = map_file(&path).unwrap();
        let part = mapped.slice(5_000..90_000).unwrap();
        assert_eq!(mapped[..], bytes[..]);
        let (from, to) = (9, 3);
        for range in [0..85_000, 1..2, 4_000..4_000, 70_000..900_000, from..to] {
            part.release(range);
            assert_eq!(part[..], bytes[5_000..90_000]);
        }
        let mut copy = vec![0; 1_000];
        assert!(part.copy(84_000, &mut copy));
        assert_eq!(copy[..], bytes[89_000..90_000]);
        assert!(!part.copy(84_001, &mut copy));
        let mut buffer = Vec::new();
        for range in [0..9, 4_090..70_000, 84_000..85_000, 5..5] {
            let found = part.read_once(range.clone(), &mut buffer).unwrap();
            assert_eq!(found, &part[range]);
        }
        assert_eq!(part.read_once(84_000..85_001, &mut buffer), None);
        assert_eq!(part.read_once(from..to, &mut buffer), None);
        assert_eq!(mapped[..], bytes[..]);
        mapped.check().unwrap();
    }

    /// A mapped file of three and a half pages (of at most 16 KiB), and where it is.
    fn opened(directory: &tempfile::TempDir) -> (PathBuf, SharedBytes) {
        let path = directory.path().join("bytes");
        fs::write(&path, vec![7; 57_000]).unwrap();
        let mapped = map_file(&path).unwrap();
        mapped.check().unwrap();
        (path, mapped)
    }

    fn write_over(path: &Path, bytes: &[u8], at: SystemTime) {
        use std::io::Write;
        let mut file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all(bytes).unwrap();
        file.set_modified(at).unwrap();
    }

    #[cfg(unix)]
    #[test]
    fn a_file_cut_short_reads_as_zeros_and_is_an_error_from_then_on() {
        let directory = tempfile::tempdir().unwrap();
        let (path, mapped) = opened(&directory);
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        let cut = fs::OpenOptions::new().write(true).open(&path).unwrap();
        cut.set_len(0).unwrap();
        let threads = [0, 20_000, 40_000, 56_999].map(|at| {
            let mapped = mapped.clone();
            std::thread::spawn(move || mapped[at])
        });
        assert_eq!(threads.map(|thread| thread.join().unwrap()), [0; 4]);
        assert!(!mapped.copy(0, &mut [0]));
        assert_eq!(mapped.read_once(0..1, &mut Vec::new()), None);
        // The same length and time again do not bring the bytes back.
        cut.set_len(57_000).unwrap();
        cut.set_modified(before).unwrap();
        let changed = mapped.check().unwrap_err();
        assert_eq!((changed.n_bytes, changed.found), (57_000, 57_000));
        assert_eq!(changed.name, path.display().to_string());
        let message = changed.to_string();
        assert!(
            message.contains("bytes' has changed since it was opened"),
            "{message}"
        );
        // Other files go on, and the place of one that is gone is taken again.
        drop(mapped);
        let (_, again) = opened(&directory);
        assert!(again.iter().all(|&byte| byte == 7));
        again.check().unwrap();
    }

    #[test]
    fn a_file_written_over_is_an_error_from_then_on() {
        let directory = tempfile::tempdir().unwrap();
        let (path, mapped) = opened(&directory);
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        write_over(
            &path,
            &[8; 57_000],
            before + std::time::Duration::from_secs(1),
        );
        let changed = mapped.check().unwrap_err();
        write_over(&path, &[7; 57_000], before);
        assert_eq!(mapped.check().unwrap_err(), changed);
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_another_one_replaces_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let (path, mapped) = opened(&directory);
        let other = directory.path().join("other");
        fs::write(&other, "short").unwrap();
        fs::rename(&other, &path).unwrap();
        assert!(mapped.iter().all(|&byte| byte == 7));
        mapped.check().unwrap();
        fs::remove_file(&path).unwrap();
        mapped.check().unwrap();
    }
}
