//! The cache of Hugging Face's tools: which models it holds, and where.
//!
//! ```text
//! models--OWNER--NAME/refs/main                  the commit that `main` was, last time
//! models--OWNER--NAME/blobs/ETAG                 a file's bytes; `.incomplete`: the first of them
//! models--OWNER--NAME/snapshots/COMMIT/PATH      a link to its blob
//! .locks/models--OWNER--NAME/ETAG.lock           locked while that blob is written
//! ```
//!
//! Invariant: what this finds is complete; what it removes lies within the folder of its
//! repository. Opens no connection.

use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use crate::error::HubError;
use crate::name::{ModelName, RepoId};
use crate::variant::{Format, RepoFile, Variant, choose, variants};

/// Folders within folders in which files are looked for.
const MAX_DEPTH: usize = 4;

/// The suffix of a blob that is not complete.
pub(crate) const INCOMPLETE: &str = ".incomplete";

/// A folder with models.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// A model in the cache.
#[derive(Clone, Debug)]
pub struct CachedModel {
    /// Its name, with its quantization.
    pub name: ModelName,
    /// The format of its files.
    pub format: Format,
    /// Bytes of its files.
    pub n_bytes: u64,
    /// The file or directory to open.
    pub path: PathBuf,
    /// When its first file was written.
    pub modified: Option<SystemTime>,
}

/// The files and bytes that a removal freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemovedModel {
    /// Files.
    pub n_files: usize,
    /// Bytes.
    pub n_bytes: u64,
}

/// A file, links followed.
struct FoundFile {
    path: PathBuf,
    n_bytes: u64,
}

/// The models of one commit.
struct Snapshot {
    folder: PathBuf,
    variants: Vec<Variant>,
}

impl Snapshot {
    fn path(&self, variant: &Variant) -> PathBuf {
        match (variant.format, variant.files.first()) {
            (Format::Gguf, Some(first)) => self.folder.join(&first.path),
            _ => self.folder.clone(),
        }
    }
}

impl Cache {
    /// The cache in this folder, which need not exist.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self { root: root.into() }
    }

    /// The cache that Hugging Face's tools use: see [`HubConfig`](crate::HubConfig).
    ///
    /// # Errors
    /// If neither a variable nor the home directory says where it is.
    pub fn from_env() -> Result<Self, HubError> {
        crate::config::cache_folder(&|name: &str| std::env::var_os(name)).map(Self::new)
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The GGUF file (the first part of a split one) or the model directory of that name.
    ///
    /// # Errors
    /// [`HubError::NotCached`] where there is none; [`HubError::Ambiguous`] where there are
    /// several.
    pub fn find(&self, name: &ModelName) -> Result<PathBuf, HubError> {
        let repo = self.spelling(&name.repo);
        for snapshot in self.snapshots(&repo) {
            match choose(&repo, &snapshot.variants, name.quant.as_deref()) {
                Ok(variant) => return Ok(snapshot.path(variant)),
                Err(error @ HubError::Ambiguous { .. }) => return Err(error),
                Err(_) => {}
            }
        }
        Err(self.not_cached(name))
    }

    /// All models that are complete, by name.
    pub fn models(&self) -> Vec<CachedModel> {
        let mut models: Vec<CachedModel> = Vec::new();
        for repo in self.repos() {
            let first = models.len();
            for snapshot in self.snapshots(&repo) {
                for variant in &snapshot.variants {
                    let same = snapshot
                        .variants
                        .iter()
                        .filter(|v| v.label == variant.label);
                    let quant = match same.count() {
                        1 => variant.label.clone(),
                        _ => variant.stem(),
                    };
                    let name = ModelName {
                        repo: repo.clone(),
                        quant: Some(quant),
                    };
                    // An older snapshot can hold the same model.
                    if !models[first..].iter().any(|model| model.name == name) {
                        models.push(cached(name, &snapshot, variant));
                    }
                }
            }
        }
        models
    }

    /// Bytes of interrupted downloads.
    pub fn n_incomplete_bytes(&self) -> u64 {
        let blobs = |repo: &RepoId| files_in(&self.blobs(repo));
        let parts = self.repos();
        let parts = parts.iter().flat_map(blobs);
        let parts = parts.filter(|file| file.path.to_string_lossy().ends_with(INCOMPLETE));
        parts.map(|file| file.n_bytes).sum()
    }

    /// Removes a model; without a quantization, its whole repository, with interrupted downloads.
    ///
    /// # Errors
    /// If it is not there, is being downloaded, or cannot be removed.
    pub fn remove(&self, name: &ModelName) -> Result<RemovedModel, HubError> {
        let repo = self.spelling(&name.repo);
        let folder = self.repo(&repo);
        if !folder.is_dir() {
            return Err(self.not_cached(name));
        }
        self.check_unlocked(name, &repo)?;
        let before = files_in(&self.blobs(&repo));
        match &name.quant {
            Some(quant) => self.remove_variant(&repo, quant, name)?,
            None => remove_folder(&folder)?,
        }
        if self
            .snapshots_unordered(&repo)
            .iter()
            .all(|s| files_in(s).is_empty())
        {
            let unfinished = files_in(&self.blobs(&repo));
            if unfinished.is_empty() && folder.exists() {
                remove_folder(&folder)?;
            }
        }
        let after = files_in(&self.blobs(&repo));
        let n_bytes = |files: &[FoundFile]| files.iter().map(|file| file.n_bytes).sum::<u64>();
        Ok(RemovedModel {
            n_files: before.len() - after.len().min(before.len()),
            n_bytes: n_bytes(&before).saturating_sub(n_bytes(&after)),
        })
    }

    fn remove_variant(&self, repo: &RepoId, quant: &str, name: &ModelName) -> Result<(), HubError> {
        let mut n_found = 0;
        for snapshot in self.snapshots(repo) {
            let variant = match choose(repo, &snapshot.variants, Some(quant)) {
                Ok(variant) => variant,
                Err(error @ HubError::Ambiguous { .. }) => return Err(error),
                Err(_) => continue,
            };
            n_found += 1;
            for file in &variant.files {
                self.remove_file(repo, &snapshot.folder.join(&file.path))?;
            }
        }
        if n_found == 0 {
            return Err(self.not_cached(name));
        }
        Ok(())
    }

    /// Removes a link of a snapshot, and its blob where no other link leads there.
    fn remove_file(&self, repo: &RepoId, link: &Path) -> Result<(), HubError> {
        let blob = fs::canonicalize(link).ok();
        fs::remove_file(link).map_err(HubError::disk("remove", link))?;
        let Ok(blobs) = fs::canonicalize(self.blobs(repo)) else {
            return Ok(());
        };
        let Some(blob) = blob.filter(|blob| blob.parent() == Some(&blobs)) else {
            return Ok(());
        };
        let links = self.snapshots_unordered(repo);
        let mut links = links.iter().flat_map(|folder| files_in(folder));
        if links.any(|link| fs::canonicalize(link.path).is_ok_and(|target| target == blob)) {
            return Ok(());
        }
        fs::remove_file(&blob).map_err(HubError::disk("remove", &blob))
    }

    /// Checks that no blob of the repository is being written.
    fn check_unlocked(&self, name: &ModelName, repo: &RepoId) -> Result<(), HubError> {
        for lock in files_in(&self.locks(repo)) {
            let is_locked = |file: File| matches!(file.try_lock(), Err(TryLockError::WouldBlock));
            if File::open(lock.path).is_ok_and(is_locked) {
                return Err(HubError::InUse { name: name.clone() });
            }
        }
        Ok(())
    }

    pub(crate) fn repo(&self, repo: &RepoId) -> PathBuf {
        self.root.join(repo.folder())
    }

    pub(crate) fn blobs(&self, repo: &RepoId) -> PathBuf {
        self.repo(repo).join("blobs")
    }

    pub(crate) fn locks(&self, repo: &RepoId) -> PathBuf {
        self.root.join(".locks").join(repo.folder())
    }

    pub(crate) fn snapshot(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.repo(repo).join("snapshots").join(commit)
    }

    fn not_cached(&self, name: &ModelName) -> HubError {
        HubError::NotCached {
            name: name.clone(),
            cache: self.root.clone(),
        }
    }

    /// The repository as its folder spells it, where upper and lower case differ.
    fn spelling(&self, repo: &RepoId) -> RepoId {
        if self.repo(repo).is_dir() {
            return repo.clone();
        }
        let same = self.repos().into_iter().find(|other| other.is_same(repo));
        same.unwrap_or_else(|| repo.clone())
    }

    fn repos(&self) -> Vec<RepoId> {
        let folders = folders_in(&self.root);
        let name = |folder: &PathBuf| RepoId::from_folder(folder.file_name()?.to_str()?);
        let mut repos: Vec<RepoId> = folders.iter().filter_map(name).collect();
        repos.sort();
        repos
    }

    fn snapshots_unordered(&self, repo: &RepoId) -> Vec<PathBuf> {
        folders_in(&self.repo(repo).join("snapshots"))
    }

    /// All snapshots with complete models: that of `main` first, then the newest.
    fn snapshots(&self, repo: &RepoId) -> Vec<Snapshot> {
        let main = fs::read_to_string(self.repo(repo).join("refs/main")).unwrap_or_default();
        let mut folders = self.snapshots_unordered(repo);
        folders.sort_by_key(|folder| {
            let is_main = folder.file_name().and_then(|name| name.to_str()) == Some(main.trim());
            let modified = fs::metadata(folder).and_then(|data| data.modified());
            let age = modified.unwrap_or(SystemTime::UNIX_EPOCH);
            std::cmp::Reverse((is_main, age))
        });
        let open = |folder: PathBuf| {
            let complete = variants(&relative_files(&folder)).into_iter();
            Snapshot {
                variants: complete.filter(Variant::is_complete).collect(),
                folder,
            }
        };
        folders.into_iter().map(open).collect()
    }
}

fn cached(name: ModelName, snapshot: &Snapshot, variant: &Variant) -> CachedModel {
    let first = variant.files.first();
    let first = first.map(|file| snapshot.folder.join(&file.path));
    let modified = first.and_then(|path| fs::metadata(path).ok()?.modified().ok());
    CachedModel {
        name,
        format: variant.format,
        n_bytes: variant.n_bytes().unwrap_or(0),
        path: snapshot.path(variant),
        modified,
    }
}

/// Files of a snapshot whose bytes are there, by their paths in the repository.
fn relative_files(folder: &Path) -> Vec<RepoFile> {
    let found = files_in(folder).into_iter();
    let mut files: Vec<RepoFile> = found
        .filter_map(|file| {
            let pieces = file.path.strip_prefix(folder).ok()?.components();
            let pieces = pieces.map(|piece| piece.as_os_str().to_str());
            Some(RepoFile {
                path: pieces.collect::<Option<Vec<_>>>()?.join("/"),
                n_bytes: Some(file.n_bytes),
            })
        })
        .collect();
    files.sort_by(|a, b| a.path.cmp(&b.path));
    files
}

/// All files below a folder with their sizes, links followed; dangling links are left out.
fn files_in(folder: &Path) -> Vec<FoundFile> {
    let mut files = Vec::new();
    let mut folders = vec![(folder.to_owned(), 0)];
    while let Some((folder, depth)) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            let path = entry.path();
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && depth < MAX_DEPTH {
                folders.push((path, depth + 1));
            } else if let Ok(data) = fs::metadata(&path)
                && data.is_file()
            {
                let n_bytes = data.len();
                files.push(FoundFile { path, n_bytes });
            }
        }
    }
    files
}

fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let paths = entries.map(|entry| entry.path());
    paths.filter(|path| path.is_dir()).collect()
}

fn remove_folder(folder: &Path) -> Result<(), HubError> {
    fs::remove_dir_all(folder).map_err(HubError::disk("remove", folder))
}
