//! Flags for the host memory and the files in which preempted requests keep their rows and states.

use std::path::PathBuf;

use anyhow::Context;
use cellar_engine::serve::SwapDisk;
use cellar_prefix_store::DirectoryConfig;
use kv_rows::KvType;

use super::byte_size::ByteSize;

/// How many bytes of them are kept, in memory and in files.
#[derive(Debug, clap::Args)]
pub(crate) struct SwapArgs {
    /// Bytes of host memory in which preempted requests keep their KV rows and states, instead of
    /// computing them again [default: none]
    #[arg(long, value_name = "SIZE")]
    pub(crate) swap_memory: Option<ByteSize>,
    /// Type in which --swap-memory keeps K and V, for example q8_0; recurrent states keep at least
    /// q8_0. It changes the texts of preempted requests [default: as they are stored, to the bit]
    #[arg(long, value_name = "TYPE", requires = "swap_memory")]
    pub(crate) swap_type: Option<KvType>,
    /// Directory of files for preempted requests, once half of --swap-memory is used. A file is
    /// removed when its request continues or ends
    #[arg(
        long,
        value_name = "DIR",
        requires = "swap_memory",
        requires = "swap_disk"
    )]
    pub(crate) swap_dir: Option<PathBuf>,
    /// Bytes of these files together, for each model
    #[arg(long, value_name = "SIZE", requires = "swap_dir")]
    pub(crate) swap_disk: Option<ByteSize>,
}

impl SwapArgs {
    /// Bytes of the host for states that are not in files.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.swap_memory.map_or(0, |size| size.0)
    }

    /// Bytes of the host for the one state of a file that is in memory: none is larger than all
    /// that may be there without a file.
    pub(crate) fn read_bytes(&self) -> u64 {
        self.memory_bytes().min(self.disk_bytes())
    }

    /// Bytes of files.
    pub(crate) fn disk_bytes(&self) -> u64 {
        self.swap_disk.map_or(0, |size| size.0)
    }

    /// The files, where there may be some.
    ///
    /// # Errors
    /// Where the directory cannot be used.
    pub(crate) fn disk(&self) -> anyhow::Result<Option<SwapDisk>> {
        let Some(dir) = &self.swap_dir else {
            return Ok(None);
        };
        // The bytes are of each model, so its scheduler counts them.
        let config = DirectoryConfig {
            dir: dir.clone(),
            max_bytes: u64::MAX,
        };
        let disk = SwapDisk::open(config, self.disk_bytes()).context("--swap-dir")?;
        Ok(Some(disk))
    }
}
