//! [`SharedTiers`]: the tiers of the store of prefixes that all models of a process share.
//!
//! Invariant: what is wrong with a flag, a directory or a key is said at the start; whatever a tier
//! does later, models are loaded and served.

use std::path::PathBuf;

use anyhow::Context;
use cellar_engine::serve::{FetchPolicy, PrefixTiers, SwapDisk};
use cellar_prefix_store::{
    DirectoryConfig, DirectoryStore, GroupStore, HostStore, StoreError, StoreKey, Tier, TierConfig,
};

use crate::args::StoreArgs;

/// The name of the file with the key of a directory.
const KEY: &str = "key";

/// Threads that ask a store on another machine.
#[cfg(feature = "tier")]
const N_REMOTE: usize = 4;

/// Tiers, each of which every model gets a handle of.
#[derive(Clone, Debug)]
pub(crate) struct SharedTiers {
    key: StoreKey,
    host: Option<HostStore>,
    directory: Option<DirectoryConfig>,
    url: Option<String>,
}

/// The part of the tiers that preempted requests of a model may have: half of each, for which
/// cached prefixes go.
#[derive(Debug)]
pub(crate) struct SharedSwap {
    pub(crate) host: HostStore,
    /// Bytes of it.
    pub(crate) n_bytes: u64,
    pub(crate) disk: Option<SwapDisk>,
}

impl SharedTiers {
    /// The tiers of these flags; `None` where there are none.
    ///
    /// # Errors
    /// A directory, a key or an address that cannot be used.
    pub(crate) fn open(args: &StoreArgs) -> anyhow::Result<Option<Self>> {
        let directory = args.cache_dir.as_ref().map(|dir| DirectoryConfig {
            dir: dir.clone(),
            max_bytes: args.cache_disk.0,
        });
        let url = args.url();
        if args.cache_ram.is_none() && directory.is_none() && url.is_none() {
            return Ok(None);
        }
        // Makes the directory, and what is in it is looked at before a model is loaded.
        if let Some(directory) = &directory {
            DirectoryStore::open(directory.clone()).context("--cache-dir")?;
        }
        let key = match (args.key_file(), &directory) {
            (Some(file), _) => StoreKey::read(file).context("--tier-key-file")?,
            (None, Some(directory)) => {
                let file: PathBuf = directory.dir.join(KEY);
                StoreKey::read_or_make(&file).context("--cache-dir")?
            }
            // Nobody else knows of it.
            (None, None) => StoreKey::random()?,
        };
        let tiers = Self {
            key,
            host: args.cache_ram.map(|size| HostStore::new(size.0)),
            directory,
            url: url.map(str::to_owned),
        };
        tiers.remote_stores().context("--tier")?;
        Ok(Some(tiers))
    }

    /// Tiers of a model, on threads of their own.
    ///
    /// # Errors
    /// A directory that cannot be used any more, or no threads.
    pub(crate) fn of_model(&self) -> anyhow::Result<PrefixTiers> {
        let mut tiers = Vec::new();
        if let Some(host) = &self.host {
            tiers.push(self.start(vec![Box::new(host.clone())])?);
        }
        if let Some(directory) = &self.directory {
            let store = DirectoryStore::open(directory.clone()).context("--cache-dir")?;
            tiers.push(self.start(vec![Box::new(store)])?);
        }
        let remote = self.remote_stores()?;
        if !remote.is_empty() {
            tiers.push(self.start(remote)?);
        }
        Ok(PrefixTiers {
            key: self.key.clone(),
            tiers,
            fetching: FetchPolicy::WhereFaster,
        })
    }

    /// The bytes for preempted requests of a model; `None` where there is no tier in memory.
    ///
    /// # Errors
    /// A directory that cannot be used any more, or no threads.
    pub(crate) fn swap(&self) -> anyhow::Result<Option<SharedSwap>> {
        let Some(host) = self.host.clone() else {
            return Ok(None);
        };
        let disk = self.directory.clone().map(|directory| {
            let n_bytes = directory.max_bytes / 2;
            SwapDisk::open(directory, n_bytes).context("--cache-dir")
        });
        Ok(Some(SharedSwap {
            n_bytes: host.max_bytes() / 2,
            host,
            disk: disk.transpose()?,
        }))
    }

    fn start(&self, stores: Vec<Box<dyn GroupStore>>) -> Result<Tier, StoreError> {
        Tier::start(self.key.clone(), stores, TierConfig::default())
    }

    /// Handles of the store on another machine; none where there is none.
    fn remote_stores(&self) -> Result<Vec<Box<dyn GroupStore>>, StoreError> {
        #[cfg(feature = "tier")]
        if let Some(url) = &self.url {
            return cellar_prefix_store::remote::open(url, N_REMOTE);
        }
        let _none = &self.url;
        Ok(Vec::new())
    }
}
