//! Flags of the store that keeps cached prefixes beyond the memory of the models.

#[cfg(feature = "serve")]
use std::path::Path;
use std::path::PathBuf;

use super::byte_size::ByteSize;

/// The places where cached prefixes are kept.
#[derive(Debug, clap::Args)]
pub(crate) struct StoreArgs {
    /// Bytes of host memory for cached prefixes that the models' memory has no room for, or whose
    /// model is unloaded, of all models together. Half of them are for requests that have to wait,
    /// unless --swap-memory is given [default: none]
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["trace", "no_prefix_cache"])]
    pub(crate) cache_ram: Option<ByteSize>,
    /// Directory for cached prefixes, where they outlive the server. Several servers may share it
    #[arg(
        long,
        value_name = "DIR",
        alias = "save-cache",
        conflicts_with_all = ["trace", "no_prefix_cache"]
    )]
    pub(crate) cache_dir: Option<PathBuf>,
    /// Bytes of the files in --cache-dir together
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "20G",
        requires = "cache_dir"
    )]
    pub(crate) cache_disk: ByteSize,
    /// Store of cached prefixes on another machine, which several servers share:
    /// redis://HOST[:PORT], s3://BUCKET?endpoint=URL&region=NAME or file:///DIR?max_bytes=N
    #[cfg(feature = "tier")]
    #[arg(
        long,
        value_name = "URL",
        requires = "tier_key_file",
        conflicts_with_all = ["trace", "no_prefix_cache"]
    )]
    pub(crate) tier: Option<String>,
    /// File with the secret that all servers of --tier have: at least 32 bytes, readable by its
    /// user only
    #[cfg(feature = "tier")]
    #[arg(long, value_name = "FILE", requires = "tier")]
    pub(crate) tier_key_file: Option<PathBuf>,
}

#[cfg(feature = "serve")]
impl StoreArgs {
    /// Bytes of the host that prefixes may have.
    pub(crate) fn host_bytes(&self) -> u64 {
        self.cache_ram.map_or(0, |size| size.0)
    }

    /// The address of the store on another machine.
    pub(crate) fn url(&self) -> Option<&str> {
        #[cfg(feature = "tier")]
        return self.tier.as_deref();
        #[cfg(not(feature = "tier"))]
        None
    }

    /// The file with the key of that store.
    pub(crate) fn key_file(&self) -> Option<&Path> {
        #[cfg(feature = "tier")]
        return self.tier_key_file.as_deref();
        #[cfg(not(feature = "tier"))]
        None
    }
}
