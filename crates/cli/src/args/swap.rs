//! Where requests of a service go that have to wait in the middle. Knows nothing of requests.

use std::path::PathBuf;

use anyhow::Context;
use cellar_engine::serve::{SwapDir, SwapDisk};
use kv_core::KvType;

use super::byte_size::ByteSize;

/// How many bytes of them are kept, in memory and in files.
#[derive(Debug, clap::Args)]
pub(crate) struct SwapArgs {
    /// Bytes of the host's memory for requests that have to wait in the middle, because memory is short:
    /// what was computed of them comes back from there [default: none, it is computed again]
    #[arg(long, value_name = "SIZE")]
    pub(crate) swap_memory: Option<ByteSize>,
    /// Type in which K and V of these requests are kept, and recurrent states (as q8_0 at the least), q8_0 for
    /// example: fewer bytes, but unlike all else
    /// it changes texts, those of requests that had to wait [default: as they are stored, to the bit]
    #[arg(long, value_name = "TYPE")]
    pub(crate) swap_type: Option<KvType>,
    /// Directory for what is beyond half of --swap-memory, in files that are removed when their request goes
    /// on or ends
    #[arg(long, value_name = "DIR")]
    pub(crate) swap_dir: Option<PathBuf>,
    /// Bytes that these files may have together, those of each model
    #[arg(long, value_name = "SIZE")]
    pub(crate) swap_disk: Option<ByteSize>,
}

impl SwapArgs {
    /// Bytes of the host for states that are not in files.
    pub(crate) fn memory_bytes(&self) -> u64 {
        self.swap_memory.map_or(0, |size| size.0)
    }

    /// Bytes of the host for the one state of a file that is in memory: none is larger than all that may be
    /// there without a file.
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
        let files = SwapDir::open(dir)
            .with_context(|| format!("cannot use the directory '{}'", dir.display()))?;
        Ok(Some(SwapDisk {
            files: Box::new(files),
            n_bytes: self.disk_bytes(),
        }))
    }
}
