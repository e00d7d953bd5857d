//! Experts that are read as they are needed: how much memory they have, and the trace of what
//! routers choose. Knows nothing of how they are held.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use cellar::{ExpertLayers, ExpertMemory, TensorPattern};
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
    /// from the model's file as they are needed. The text is the same. For the cpu backend, and for
    /// experts that the CPU computes next to a GPU [default: all are held]
    #[arg(
        long,
        visible_alias = "expert-ram",
        value_name = "SIZE",
        hide_short_help = true
    )]
    pub(crate) expert_memory: Option<ByteSize>,
    /// Leave the experts of a mixture to the CPU and the memory of the host, while a GPU computes
    /// all else
    #[arg(long, hide_short_help = true)]
    pub(crate) cpu_moe: bool,
    /// The same for the experts of the model's first N layers
    #[arg(long, value_name = "N", hide_short_help = true)]
    pub(crate) n_cpu_moe: Option<u32>,
    /// The same for the layers whose experts' tensors a regular expression names, such as exps=CPU
    /// or 'blk\.(0|1)\.ffn_.*_exps=CPU': all experts of a layer and nothing else. Several may be
    /// given, and one may have commas between several
    #[arg(long, value_name = "REGEX=CPU", hide_short_help = true)]
    pub(crate) override_tensor: Vec<TensorPlaces>,
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

/// The memory that a plan may take, of the host and of a GPU.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct RamArgs {
    /// Memory that all of it may take: plans --expert-memory, which gets what is left
    #[arg(long, value_name = "SIZE", conflicts_with_all = ["expert_memory", "gpu_layers"])]
    pub(crate) ram: Option<ByteSize>,
    /// Memory that a GPU has: plans --n-cpu-moe, the fewest layers whose experts the CPU computes
    /// so that all else fits there
    #[arg(
        long,
        value_name = "SIZE",
        conflicts_with_all = ["cpu_moe", "n_cpu_moe", "override_tensor"]
    )]
    pub(crate) vram: Option<ByteSize>,
}

/// Tensors that are to be on the host, by name.
#[derive(Clone, Debug)]
pub(crate) struct TensorPlaces(Vec<TensorPattern>);

impl FromStr for TensorPlaces {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let place = |text: &str| match text.rsplit_once('=') {
            Some((pattern, device)) if device.eq_ignore_ascii_case("cpu") => {
                TensorPattern::new(pattern)
            }
            Some((_, device)) => Err(format!(
                "'{device}' is no place for single tensors: CPU is the only one, and --gpu-layers \
                 sets how many layers a GPU computes"
            )),
            None => Err("REGEX=CPU is needed, such as exps=CPU".to_owned()),
        };
        text.split(',')
            .map(place)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl ExpertArgs {
    /// The experts that the CPU computes while a GPU computes the rest.
    pub(crate) fn of_host(&self) -> ExpertLayers {
        let patterns = self.override_tensor.iter().flat_map(|places| &places.0);
        ExpertLayers {
            n_first: if self.cpu_moe {
                u32::MAX
            } else {
                self.n_cpu_moe.unwrap_or(0)
            },
            patterns: patterns.cloned().collect(),
        }
    }

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
