//! What is in a directory, of which nothing is believed: files of others, links, devices.

use std::fs::{self, File, Metadata};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::{GROUP, PART};
use crate::error::StoreError;
use crate::frame::MAX_FRAME;
use crate::key::GroupName;

/// A file that may be a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct FoundGroup {
    pub(super) name: GroupName,
    pub(super) n_bytes: u64,
    pub(super) modified: Option<SystemTime>,
}

/// The owner of a directory that only its owner may write.
///
/// # Errors
/// [`StoreError::Unsafe`], [`StoreError::System`].
pub(super) fn check_directory(dir: &Path) -> Result<u32, StoreError> {
    let found = fs::metadata(dir).map_err(|source| {
        let what = format!("cannot look at the directory '{}'", dir.display());
        StoreError::system(what, source)
    })?;
    let refused = |reason| StoreError::Unsafe {
        path: dir.to_owned(),
        reason,
    };
    if !found.is_dir() {
        return Err(refused("it is not a directory"));
    }
    if others_may_write(&found) {
        return Err(refused(
            "others may write in it: chmod go-w, or name another",
        ));
    }
    Ok(owner(&found))
}

/// The groups that are there.
pub(super) fn groups(dir: &Path, owner: u32) -> impl Iterator<Item = FoundGroup> {
    files(dir, owner).filter_map(|(name, found)| {
        let name = GroupName::from_hex(name.strip_suffix(GROUP)?)?;
        let n_bytes = found.len();
        let modified = found.modified().ok();
        (n_bytes <= MAX_FRAME).then_some(FoundGroup {
            name,
            n_bytes,
            modified,
        })
    })
}

/// A group that is being written or was, or that is one process's alone.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) path: PathBuf,
    pub(super) n_bytes: u64,
}

/// The parts that are there.
pub(super) fn parts(dir: &Path, owner: u32) -> impl Iterator<Item = Part> {
    let dir = dir.to_owned();
    files(&dir, owner).filter_map(move |(name, found)| {
        let (group, writer) = name.strip_suffix(PART)?.split_once('.')?;
        let (process, number) = writer.split_once('-')?;
        let is_number =
            |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        GroupName::from_hex(group)?;
        (is_number(process) && is_number(number)).then(|| Part {
            path: dir.join(&name),
            n_bytes: found.len(),
        })
    })
}

/// The regular files of an owner, by name. Links are no regular files.
fn files(dir: &Path, of: u32) -> impl Iterator<Item = (String, Metadata)> + use<> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let name = entry.file_name().into_string().ok()?;
        // Of the entry itself: a link is not followed.
        let found = entry.metadata().ok()?;
        (found.is_file() && owner(&found) == of).then_some((name, found))
    })
}

/// True if an open file is a regular one of an owner.
pub(super) fn is_ours(file: &File, of: u32) -> bool {
    let found = file.metadata();
    found.is_ok_and(|found| found.is_file() && owner(&found) == of)
}

/// The owner of an open file.
pub(super) fn owner_of(file: &File) -> io::Result<u32> {
    file.metadata().map(|found| owner(&found))
}

#[cfg(unix)]
fn owner(found: &Metadata) -> u32 {
    std::os::unix::fs::MetadataExt::uid(found)
}

#[cfg(unix)]
fn others_may_write(found: &Metadata) -> bool {
    std::os::unix::fs::MetadataExt::mode(found) & 0o022 != 0
}

#[cfg(not(unix))]
fn owner(_found: &Metadata) -> u32 {
    0
}

#[cfg(not(unix))]
fn others_may_write(_found: &Metadata) -> bool {
    false
}
