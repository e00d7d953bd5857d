//! Experts that are read as they are needed: how much memory they have, and the trace of what
//! routers choose. Knows nothing of how they are held.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use cellar::ExpertMemory;
use clap::Args;
use kv_backend::ExpertMeter;

use super::byte_size::ByteSize;
use crate::failure::warn;
use crate::output_file::{self, InPlace};

/// True once a trace is written: another model of the process has none.
static IS_TRACED: AtomicBool = AtomicBool::new(false);

/// The memory of experts.
#[derive(Clone, Debug, Args)]
pub(crate) struct ExpertArgs {
    /// Memory for the experts of a mixture: those stay that are needed most, and others are read
    /// from the model's file as they are needed. The text is the same. For the cpu backend
    /// [default: all are held]
    #[arg(
        long,
        visible_alias = "expert-ram",
        value_name = "SIZE",
        hide_short_help = true,
        conflicts_with = "gpu_layers"
    )]
    pub(crate) expert_memory: Option<ByteSize>,
    /// Write what routers choose to a file, for 'cellar replay': numbers of experts, no text
    #[arg(
        long,
        value_name = "FILE",
        hide_short_help = true,
        requires = "expert_memory"
    )]
    pub(crate) expert_trace: Option<PathBuf>,
    /// The memory itself, which all models of the process share.
    #[arg(skip)]
    shared: Arc<OnceLock<ExpertMemory>>,
}

/// The memory that all of a plan may take.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct RamArgs {
    /// Memory that all of it may take: plans --expert-memory, which gets what is left
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["expert_memory", "gpu_layers"])]
    pub(crate) ram: Option<ByteSize>,
}

impl ExpertArgs {
    /// The memory that experts of all models have together, where it is limited.
    pub(crate) fn memory(&self) -> Option<ExpertMemory> {
        let size = self.expert_memory?;
        let memory = self.shared.get_or_init(|| ExpertMemory::new(size.0));
        Some(memory.clone())
    }

    /// A meter with the trace, for the first model that a process loads.
    ///
    /// # Errors
    /// Where the file cannot be written.
    pub(crate) fn meter(&self) -> anyhow::Result<Option<Arc<ExpertMeter>>> {
        let Some(path) = &self.expert_trace else {
            return Ok(None);
        };
        if IS_TRACED.swap(true, Ordering::Relaxed) {
            return Ok(None);
        }
        let trace = ExpertTrace::new(path)?;
        Ok(Some(Arc::new(ExpertMeter::with_log(trace))))
    }
}

/// A file of lines that warns when it cannot be written any more.
struct ExpertTrace {
    file: File,
    name: String,
}

impl ExpertTrace {
    fn new(path: &Path) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let file = match output_file::open_in_place(path)? {
            InPlace::Direct(file) => file,
            InPlace::Regular(file) => {
                file.set_len(0)
                    .with_context(|| format!("cannot write '{name}'"))?;
                file
            }
        };
        Ok(Self { file, name })
    }
}

impl Write for ExpertTrace {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes).inspect_err(|error| {
            let name = &self.name;
            warn(&format!(
                "'{name}' ends here, as it cannot be written: {error}"
            ));
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}
