//! What can go wrong between a model's name and its files.
//!
//! Invariant: each message has the name, the numbers, and what to do next.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::name::{ModelName, RepoId};
use crate::variant::VariantSize;

/// Why a model cannot be named, found, downloaded or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// Not a model's name.
    #[error("'{text}' is no model name: {reason}; a name is OWNER/NAME or OWNER/NAME:QUANT")]
    Name {
        /// The text that was given.
        text: String,
        /// The reason.
        reason: &'static str,
    },
    /// An environment variable cannot be used.
    #[error("{variable}: {reason}")]
    Environment {
        /// The variable.
        variable: &'static str,
        /// The reason why its value is refused.
        reason: String,
    },
    /// Downloads are switched off.
    #[error(
        "'{name}' cannot be downloaded: {variable} is set, which is offline mode; unset it, or use a \
         model that 'cellar list' shows"
    )]
    Offline {
        /// The model.
        name: ModelName,
        /// The variable that switches them off.
        variable: &'static str,
    },
    /// The endpoint does not answer.
    #[error(
        "cannot reach {host}: {reason}; without a network, models that 'cellar list' shows can be \
         used"
    )]
    Unreachable {
        /// The host.
        host: String,
        /// The report of the network.
        reason: String,
    },
    /// The endpoint's certificate is not to be trusted.
    #[error("cannot trust {host}: {reason}{hint}")]
    Untrusted {
        /// The host.
        host: String,
        /// The fault of the certificate.
        reason: String,
        /// A remedy, or nothing.
        hint: &'static str,
    },
    /// The repository does not exist, or is hidden from this account.
    #[error("{endpoint} has no model repository '{repo}', or it is private; {hint}")]
    NoRepository {
        /// The endpoint.
        endpoint: String,
        /// The repository.
        repo: RepoId,
        /// The remedy.
        hint: &'static str,
    },
    /// The repository's terms must be accepted first.
    #[error("'{repo}' is gated: accept its terms at {endpoint}/{repo}, {then}")]
    Gated {
        /// The endpoint.
        endpoint: String,
        /// The repository.
        repo: RepoId,
        /// The step after that.
        then: &'static str,
    },
    /// The server refuses a request.
    #[error("{url}: the server answers {status}{detail}")]
    Status {
        /// The address.
        url: String,
        /// The code.
        status: u16,
        /// The server's words about it.
        detail: String,
    },
    /// The server's answer cannot be used.
    #[error("{url}: {reason}")]
    Answer {
        /// The address.
        url: String,
        /// The fault of the answer.
        reason: String,
    },
    /// The repository has no file of that quantization.
    #[error("'{repo}' has no model '{quant}'; it has {}", Sizes(variants))]
    NoVariant {
        /// The repository.
        repo: RepoId,
        /// The quantization that was asked for.
        quant: String,
        /// The quantizations that there are.
        variants: Vec<VariantSize>,
    },
    /// Several files have that quantization.
    #[error("'{repo}' has several models '{quant}'; name one of the files: {}", files.join(", "))]
    Ambiguous {
        /// The repository.
        repo: RepoId,
        /// The quantization that was asked for.
        quant: String,
        /// Names of the files, without their extension.
        files: Vec<String>,
    },
    /// The repository has no model that could be used.
    #[error(
        "'{repo}' has neither GGUF nor safetensors files; it has {}",
        few(files)
    )]
    NoModel {
        /// The repository.
        repo: RepoId,
        /// The files that it has instead.
        files: Vec<String>,
    },
    /// A split model lacks parts.
    #[error("'{repo}': {file} has {n_found} of {n_parts} parts")]
    MissingParts {
        /// The repository.
        repo: RepoId,
        /// The first part that there is.
        file: String,
        /// Parts that there are.
        n_found: usize,
        /// Parts that there should be.
        n_parts: usize,
    },
    /// The model is not in the cache.
    #[error("no model '{name}' in {}; 'cellar pull {name}' downloads it", cache.display())]
    NotCached {
        /// The model.
        name: ModelName,
        /// The cache.
        cache: PathBuf,
    },
    /// The disk is too full.
    #[error(
        "{} cannot hold the download: {} more are needed and {} are free; 'cellar rm' removes models",
        cache.display(), Size(*n_needed), Size(*n_free)
    )]
    DiskFull {
        /// The cache.
        cache: PathBuf,
        /// Bytes to download.
        n_needed: u64,
        /// Bytes that are free.
        n_free: u64,
    },
    /// The server ended the file too early, again and again.
    #[error(
        "{file}: the connection broke at {n_received} of {n_bytes} bytes ({reason}); the same \
         command continues there"
    )]
    Broken {
        /// The file.
        file: String,
        /// Bytes on disk.
        n_received: u64,
        /// Bytes of the whole file.
        n_bytes: u64,
        /// The last failure.
        reason: String,
    },
    /// The bytes are not those that the hub promises.
    #[error(
        "{file}: the {kind} of the download is {found}, but the hub has {wanted}; the download was \
         removed, the same command starts it again"
    )]
    Hash {
        /// The file.
        file: String,
        /// The name of the hash.
        kind: &'static str,
        /// The hub's.
        wanted: String,
        /// That of the bytes on disk.
        found: String,
    },
    /// Another process downloads what shall be removed.
    #[error("'{name}' is being downloaded by another process")]
    InUse {
        /// The model.
        name: ModelName,
    },
    /// The disk fails.
    #[error("cannot {action} '{}': {source}", path.display())]
    Disk {
        /// The action, as a verb.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The report of the system.
        source: io::Error,
    },
}

impl HubError {
    /// Turns an error of the disk into one that names the path.
    pub(crate) fn disk(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Disk {
            action,
            path,
            source,
        }
    }
}

/// A number of bytes for people.
pub(crate) struct Size(pub(crate) u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n = self.0 as f64;
        match self.0 {
            0..1024 => write!(f, "{} bytes", self.0),
            1024..1_048_576 => write!(f, "{:.2} KiB", n / 1024.0),
            1_048_576..1_073_741_824 => write!(f, "{:.2} MiB", n / 1_048_576.0),
            _ => write!(f, "{:.2} GiB", n / 1_073_741_824.0),
        }
    }
}

struct Sizes<'a>(&'a [VariantSize]);

impl fmt::Display for Sizes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("none");
        }
        for (i, variant) in self.0.iter().enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{variant}")?;
        }
        Ok(())
    }
}

/// The first few names of a list.
fn few(files: &[String]) -> String {
    const N_SHOWN: usize = 5;
    let shown = files.iter().take(N_SHOWN).cloned().collect::<Vec<_>>();
    match files.len() {
        0 => "no files".to_owned(),
        n if n > N_SHOWN => format!("{} and {} more", shown.join(", "), n - N_SHOWN),
        _ => shown.join(", "),
    }
}
