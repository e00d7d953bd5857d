//! One model from the hub into the cache: which files, whether they fit, then one after the other.
//!
//! Invariant: `refs/main` names a commit only when the model of that commit is complete.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache::Cache;
use crate::client::{Client, FileMetadata, Listing};
use crate::config::{Access, HubConfig};
use crate::disk;
use crate::download::FileDownload;
use crate::error::HubError;
use crate::name::ModelName;
use crate::variant::{Format, Variant, VariantSize, choose, variants};

/// An event of a download.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A model was chosen.
    Chosen {
        /// The model.
        variant: &'a VariantSize,
        /// The other variants in the repository.
        others: &'a [VariantSize],
        /// Files of the model.
        n_files: usize,
        /// Bytes of all its files.
        n_bytes: u64,
        /// Those that are in the cache already.
        n_present: u64,
    },
    /// So many bytes of the model are on disk; fewer than before where a file began anew.
    Progress {
        /// The bytes.
        n_bytes: u64,
    },
    /// Another process downloads this file.
    Waiting {
        /// The file's path in the repository.
        file: &'a str,
    },
    /// The connection broke and is made again.
    Retrying {
        /// The file's path in the repository.
        file: &'a str,
        /// The reason for the retry.
        reason: &'a str,
    },
}

/// A model that is in the cache now.
#[derive(Clone, Debug)]
pub struct PulledModel {
    /// Its name, with the quantization that was chosen.
    pub name: ModelName,
    /// The GGUF file (the first part of a split one) or the directory to open.
    pub path: PathBuf,
    /// Bytes of its files.
    pub n_bytes: u64,
    /// Those of them that were downloaded now.
    pub n_downloaded: u64,
}

/// The hub, and the cache.
#[derive(Debug)]
pub struct Hub {
    config: HubConfig,
    cache: Cache,
}

impl Hub {
    /// Opens no connection yet.
    pub fn new(config: HubConfig) -> Self {
        let cache = Cache::new(&config.cache);
        Self { config, cache }
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Downloads a model, or what the cache lacks of it.
    ///
    /// # Errors
    /// Offline, where the repository or the model does not exist or is gated, where the disk is too
    /// small, where the connection stays broken, and where the bytes are not those that the hub
    /// promises. A part that is on disk stays there; the next call continues it.
    pub fn pull(
        &self,
        name: &ModelName,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<PulledModel, HubError> {
        if let Access::Offline(variable) = self.config.access {
            return Err(HubError::Offline {
                name: name.clone(),
                variable,
            });
        }
        let client = Client::new(&self.config);
        let listing = client.listing(&name.repo)?;
        let all = variants(&listing.files);
        if all.is_empty() {
            return Err(HubError::NoModel {
                repo: name.repo.clone(),
                files: listing.files.into_iter().map(|file| file.path).collect(),
            });
        }
        let variant = choose(&name.repo, &all, name.quant.as_deref())?;
        variant.check(&name.repo)?;
        let files = self.files(&client, &listing, variant)?;
        let n_bytes = files.iter().map(File::n_bytes).sum();
        let n_present = files
            .iter()
            .map(|file| self.n_present(&client, &listing, file))
            .sum();
        let others = all.iter().filter(|other| *other != variant);
        on_event(Event::Chosen {
            variant: &VariantSize {
                label: variant.label.clone(),
                n_bytes: Some(n_bytes),
            },
            others: &others.map(Variant::size).collect::<Vec<_>>(),
            n_files: files.len(),
            n_bytes,
            n_present,
        });
        self.check_space(n_bytes - n_present)?;
        let mut n_done = 0;
        for file in &files {
            self.fetch(&client, &listing, file, &mut |event| match event {
                Event::Progress { n_bytes } => on_event(Event::Progress {
                    n_bytes: n_done + n_bytes,
                }),
                other => on_event(other),
            })?;
            n_done += file.n_bytes();
            on_event(Event::Progress { n_bytes: n_done });
        }
        self.write_ref(&listing)?;
        let snapshot = self.cache.snapshot(&listing.repo, &listing.commit);
        Ok(PulledModel {
            name: ModelName {
                repo: listing.repo.clone(),
                quant: Some(
                    match all.iter().filter(|v| v.label == variant.label).count() {
                        1 => variant.label.clone(),
                        _ => variant.stem(),
                    },
                ),
            },
            path: match (variant.format, variant.files.first()) {
                (Format::Gguf, Some(first)) => snapshot.join(&first.path),
                _ => snapshot,
            },
            n_bytes,
            n_downloaded: n_bytes - n_present,
        })
    }

    /// The hub's statements about the model's files; what the snapshot has is not asked for again.
    fn files(
        &self,
        client: &Client,
        listing: &Listing,
        variant: &Variant,
    ) -> Result<Vec<File>, HubError> {
        let snapshot = self.cache.snapshot(&listing.repo, &listing.commit);
        let files = variant.files.iter().map(|file| {
            let path = file.path.clone();
            let there = fs::metadata(snapshot.join(&path)).map(|data| data.len());
            Ok(match (there, file.n_bytes) {
                (Ok(n_bytes), Some(wanted)) if n_bytes == wanted => File::Present { n_bytes },
                _ => File::Missing {
                    metadata: client.metadata(listing, &path)?,
                    path,
                },
            })
        });
        files.collect()
    }

    fn n_present(&self, client: &Client, listing: &Listing, file: &File) -> u64 {
        match file {
            File::Present { n_bytes } => *n_bytes,
            File::Missing { path, metadata } => {
                self.download(client, listing, path, metadata).n_present()
            }
        }
    }

    fn download<'a>(
        &'a self,
        client: &'a Client,
        listing: &'a Listing,
        path: &'a str,
        metadata: &'a FileMetadata,
    ) -> FileDownload<'a> {
        FileDownload {
            client,
            config: &self.config,
            cache: &self.cache,
            listing,
            path,
            metadata,
        }
    }

    fn check_space(&self, n_needed: u64) -> Result<(), HubError> {
        match disk::free_bytes(self.cache.root()) {
            Some(n_free) if n_free < n_needed => Err(HubError::DiskFull {
                cache: self.cache.root().to_owned(),
                n_needed,
                n_free,
            }),
            _ => Ok(()),
        }
    }

    /// Downloads a file and links it into the snapshot.
    fn fetch(
        &self,
        client: &Client,
        listing: &Listing,
        file: &File,
        on_event: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), HubError> {
        let File::Missing { path, metadata } = file else {
            return Ok(());
        };
        let download = self.download(client, listing, path, metadata);
        download.run(on_event)?;
        let snapshot = self.cache.snapshot(&listing.repo, &listing.commit);
        link(
            &download.blob(),
            &snapshot.join(path),
            path.matches('/').count(),
        )
    }

    /// Makes this commit the one that is looked at first.
    fn write_ref(&self, listing: &Listing) -> Result<(), HubError> {
        let refs = self.cache.repo(&listing.repo).join("refs");
        fs::create_dir_all(&refs).map_err(HubError::disk("create", &refs))?;
        let path = refs.join("main");
        if fs::read_to_string(&path).is_ok_and(|commit| commit.trim() == listing.commit) {
            return Ok(());
        }
        let new = refs.join(format!(".main.{}", std::process::id()));
        fs::write(&new, &listing.commit).map_err(HubError::disk("write", &new))?;
        fs::rename(&new, &path).map_err(HubError::disk("write", &path))
    }
}

/// A file of the model.
enum File {
    /// The snapshot has it.
    Present { n_bytes: u64 },
    /// The snapshot lacks it; its blob or a part of that may be there.
    Missing {
        path: String,
        metadata: FileMetadata,
    },
}

impl File {
    fn n_bytes(&self) -> u64 {
        match self {
            Self::Present { n_bytes } => *n_bytes,
            Self::Missing { metadata, .. } => metadata.n_bytes,
        }
    }
}

/// Links a snapshot's file, `depth` folders below it, to its blob.
fn link(blob: &Path, link: &Path, depth: usize) -> Result<(), HubError> {
    if let Some(folder) = link.parent() {
        fs::create_dir_all(folder).map_err(HubError::disk("create", folder))?;
    }
    if fs::symlink_metadata(link).is_ok() {
        fs::remove_file(link).map_err(HubError::disk("replace", link))?;
    }
    let name = blob.file_name().unwrap_or_default();
    // With the system's own separators: Windows follows no link that has others.
    let up: PathBuf = (0..depth + 2).map(|_| "..").collect();
    let target = up.join("blobs").join(name);
    // Where a file system has no links, or follows none, the blob itself becomes the snapshot's
    // file.
    let linked = symlink(&target, link).and_then(|()| fs::metadata(link));
    linked
        .map(drop)
        .or_else(|_| fs::rename(blob, link))
        .map_err(HubError::disk("create", link))
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_file(target, link)
}
