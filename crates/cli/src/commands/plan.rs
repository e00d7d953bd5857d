//! `cellar plan`: what a process takes that runs a model, before anything is loaded or allocated.
//!
//! Invariant: every number comes from the plan that the engine and the backend allocate by. Reads
//! the file's header only.

mod experts;
mod text;

use std::io::Write;
use std::sync::Arc;

use anyhow::Context;
use cellar::{
    BackendKind, BackendMemory, BackendOptions, DEVICE_RESERVE, DeviceReport, ExpertMemory,
    ModelWork, architectures, fewest_host_experts, plan_memory, weight_shapes,
};
use cellar_engine::{EngineConfig, MemoryBudget, MemoryReport, PromptOutputs, Speculation};
use kv_graph::weights::WeightSource;
use kv_rows::{KvType, largest_n_ctx};
use model_core::architecture::Model;
use model_core::model_file::{OpenModel, tokenizer_spec};
use model_core::tokenizer::Tokenizer;
use serde::Serialize;

use self::experts::ExpertReport;
use super::inspect::tensor_sizes;
use crate::args::{PlanArgs, SwapArgs};
use crate::draft_model::{self, DraftFor, PlannedDraft};
use crate::failure::{Exit, one_line, usage};
use crate::machine;
use crate::models::{Contents, ModelSource};
use crate::resolve;
use crate::terminal;

/// Everything that is shown. Sizes are in bytes.
#[derive(Debug, Serialize)]
struct Report {
    file: String,
    /// Architecture, context, parts, layers and rows of the memory.
    #[serde(flatten)]
    plan: MemoryReport,
    /// Rows, where they are on the host, and what is kept of every cell.
    memory: u64,
    /// Of all tensors, as they are stored.
    weights: u64,
    /// The backend, where one was named or a GPU was chosen.
    #[serde(skip_serializing_if = "Option::is_none")]
    backend_name: Option<&'static str>,
    /// What the backend adds on the host; `None` where it cannot tell.
    backend: Option<BackendReport>,
    /// The experts that are read as they are needed, where there are such.
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<ExpertReport>,
    /// Why it cannot tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    backend_error: Option<String>,
    /// Weights that are read from the file: those that are neither packed nor looked up.
    mapped: u64,
    /// Weights of which only the rows of tokens are read, in the pages of the file that have them.
    /// Not in the total: how many come depends on the tokens, and the system may take them away.
    looked_up: u64,
    /// The model of --draft-model, which is in the total.
    #[serde(skip_serializing_if = "Option::is_none")]
    draft: Option<DraftReport>,
    /// What requests of a service have that wait in the middle.
    #[serde(skip_serializing_if = "Option::is_none")]
    swap: Option<SwapReport>,
    /// This process with the header and the tokenizer of the model, where the system reports it.
    process: Option<u64>,
    /// What a process takes whose context is full: memory, packed and mapped weights, scratch,
    /// swap, and the process itself; what a device holds where it shares the memory.
    total: u64,
    /// Free memory of this machine, where the system reports it.
    available: Option<u64>,
    /// The largest context with which the total fits it, where the rows are on the host.
    largest_n_ctx: Option<u32>,
    /// What a device holds that computes.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<DeviceReport>,
    /// The number for --n-cpu-moe, where --vram chose it.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_cpu_moe: Option<u32>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct BackendReport {
    /// Weights in the backend's own layout.
    packed: u64,
    scratch: u64,
}

impl From<BackendMemory> for BackendReport {
    fn from(memory: BackendMemory) -> Self {
        Self {
            packed: memory.packed as u64,
            scratch: memory.scratch as u64,
        }
    }
}

#[derive(Debug, Serialize)]
struct DraftReport {
    file: String,
    /// Rows, and what is kept of every cell.
    memory: u64,
    /// Memory, weights and scratch, on the host.
    host: u64,
    /// The same on a device of its own.
    device: u64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct SwapReport {
    /// On the host: what is in no file, and the state of a file that comes back next.
    memory: u64,
    /// In files, which the total does not count.
    disk: u64,
}

impl SwapReport {
    /// `None` where nothing is kept.
    fn new(args: &SwapArgs) -> Option<Self> {
        args.swap_memory?;
        Some(Self {
            memory: args.memory_bytes().saturating_add(args.read_bytes()),
            disk: args.disk_bytes(),
        })
    }
}

impl DraftReport {
    fn new(draft: &PlannedDraft) -> Self {
        Self {
            file: draft.name.clone(),
            memory: draft.memory,
            host: draft.taken.host,
            device: draft.taken.device,
        }
    }
}

/// The model as it would be computed, with its adapters and its head, and the file with adapters or
/// with a head of another file, where there are any.
fn planned_model(
    args: &PlanArgs,
    source: &ModelSource,
    file: &Contents,
) -> anyhow::Result<(Arc<dyn Model>, Option<OpenModel>)> {
    let model = architectures().model(file.metadata(), file.weights());
    let model = model.with_context(|| file.label().to_owned())?;
    let mut adapted = source.changed(&args.engine.compute.changes())?;
    if args.speculation.names_head() {
        let mut open = adapted.map_or_else(|| source.open(), Ok)?;
        args.speculation.use_head_of_open(&mut open)?;
        adapted = Some(open);
    }
    let model = adapted
        .as_ref()
        .map_or(model, |open| Arc::clone(open.model()));
    let model = args
        .speculation
        .with_head(model, file.weights(), file.label())?;
    Ok((model, adapted))
}

pub(super) fn run(args: &PlanArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let source = ModelSource::new(args.file.path());
    let file = source.contents()?;
    let (model, adapted) = planned_model(args, &source, &file)?;
    let config = EngineConfig {
        n_seqs: args.seqs,
        budget: MemoryBudget::Unlimited,
        ..resolve::engine_config(&args.engine, &*model, KvType::F16)
    };
    let settings = config.settings(&*model)?;
    // Counted in what the process takes, like in one that runs the model.
    let tokenizer = tokenizer_spec(file.metadata()).map_err(anyhow::Error::from);
    let tokenizer = tokenizer.and_then(|spec| Ok(Tokenizer::new(spec)?));
    args.speculation.draft_model()?;
    let loaded = machine::own_memory();
    let of_adapters = model.adapters().map_or(0, |adapters| adapters.n_bytes());
    let of_head = adapted.as_ref().map_or(0, OpenModel::head_bytes);
    let weights = weight_bytes(&file).saturating_add(of_adapters);
    let weights = weights.saturating_add(of_head);
    let available = machine::available_memory();
    // Those of a directory are computed when they are read.
    let source_weights: Arc<dyn WeightSource> = match (&adapted, file) {
        (None, Contents::Gguf(file)) => Arc::new(file),
        (None, Contents::Directory(directory)) => weight_shapes(&**directory.weights()),
        (Some(open), _) => weight_shapes(&*open.weights()),
    };
    let work = ModelWork {
        model: &model,
        config: &config,
        weights: &source_weights,
        outputs: PromptOutputs::Last,
    };
    let planned = backend_options(args, &work)
        .and_then(|(options, n_cpu_moe)| Ok((plan_memory(&options, &work)?, n_cpu_moe)));
    let (planned, n_cpu_moe, backend_error) = match planned {
        Ok((planned, n_cpu_moe)) => (Some(planned), n_cpu_moe, None),
        Err(error) if args.ram.vram.is_some() => return Err(error),
        Err(error) => (None, None, Some(one_line(&error))),
    };
    // With the code that builds and lowers graphs, as in a process that runs the model; its data is
    // gone then.
    let process =
        loaded.map(|own| own.data + machine::own_memory().map_or(own.files, |now| now.files));
    let name = planned.as_ref().and_then(|planned| planned.kind);
    let looked_up = planned.as_ref().map_or(0, |planned| planned.looked_up);
    let (backend, device) = planned.map_or((None, None), |p| (p.host, p.device));
    let replaced = backend.map_or(0, |b| b.replaced as u64);
    let mapped = weights.saturating_sub(replaced).saturating_sub(looked_up);
    // Rows on a device are not on the host.
    let memory = match &device {
        Some(device) => settings.memory_bytes().saturating_sub(device.rows),
        None => settings.memory_bytes(),
    };
    let experts = backend.and_then(|b| b.experts);
    let backend = backend.map(BackendReport::from);
    let of_device = device.as_ref().filter(|device| device.unified);
    let of_device = of_device.map_or(0, |device| device.total);
    let swap = SwapReport::new(&args.swap);
    let of_swap = swap.map_or(0, |swap| swap.memory);
    let mut draft = match &args.speculation.speculation() {
        Speculation::Draft { .. } => {
            let tokenizer = tokenizer?;
            let texts = DraftFor::engine(&tokenizer, &settings);
            draft_model::plan(&args.speculation, &args.engine, texts)?
        }
        _ => None,
    };
    // Both models have one memory for experts.
    if let (Some(draft), Some(memory)) = (&mut draft, args.engine.compute.experts.memory()) {
        let held = experts.map_or(0, |experts| experts.held as u64);
        draft.taken = draft.taken.next_to(held, &memory);
    }
    let of_draft = draft.as_ref().map_or(0, |draft| draft.taken.host);
    let besides = |backend: Option<BackendReport>| {
        let of_backend = backend.map_or(0, |b| b.packed.saturating_add(b.scratch));
        let besides = [mapped, of_backend, of_device, process.unwrap_or(0), of_swap];
        besides.into_iter().fold(0, u64::saturating_add)
    };
    let others = besides(backend).saturating_add(memory);
    let others = others.saturating_add(of_draft);
    let experts = ExpertReport::new(&args.ram, experts, others)?;
    let backend = experts::with_held(backend, experts.as_ref());
    let besides = besides(backend);
    let report = Report {
        file: source.name(),
        plan: MemoryReport::new(&*model, &config, &settings),
        memory,
        weights,
        backend_name: name.map(BackendKind::name),
        backend,
        experts,
        backend_error,
        mapped,
        looked_up,
        process,
        draft: draft.as_ref().map(DraftReport::new),
        swap,
        total: memory.saturating_add(besides).saturating_add(of_draft),
        available,
        largest_n_ctx: available.filter(|_| device.is_none()).and_then(|bytes| {
            // What is free does not include this process.
            let others = besides.saturating_sub(process.unwrap_or(0));
            let room = bytes.saturating_sub(others);
            match &draft {
                None => config.largest_n_ctx(&*model, room),
                Some(draft) => largest_with_draft((&config, &*model), draft, room),
            }
        }),
        device,
        n_cpu_moe,
    };
    if args.json {
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        text::print(&report, &settings.memory_plan(), out)?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// The largest context of which both memories fit with what else the draft model takes.
fn largest_with_draft(
    (config, model): (&EngineConfig, &dyn Model),
    draft: &PlannedDraft,
    room: u64,
) -> Option<u32> {
    let room = room.checked_sub(draft.taken.host.saturating_sub(draft.memory))?;
    largest_n_ctx(|n_ctx| {
        let config = EngineConfig {
            n_ctx: Some(n_ctx),
            ..config.clone()
        };
        let own = config.sizes(model).ok().map(|sizes| sizes.memory_bytes());
        match (own, draft.memory_with(n_ctx)) {
            (Some(own), Some(draft)) => own.saturating_add(draft) <= room,
            _ => false,
        }
    })
}

fn weight_bytes(file: &Contents) -> u64 {
    let sizes = tensor_sizes(file).into_iter();
    sizes.fold(0, |sum: u64, (_, _, n_bytes)| sum.saturating_add(n_bytes))
}

/// The backend of the flags, and of how many layers the CPU is to compute the experts, where --vram
/// is given.
fn backend_options(
    args: &PlanArgs,
    work: &ModelWork<'_>,
) -> anyhow::Result<(BackendOptions, Option<u32>)> {
    let mut options = resolve::backend_flags(&args.engine.compute)?.options();
    if args.ram.ram.is_some() {
        options.experts = Some(ExpertMemory::new(u64::MAX));
    }
    let Some(vram) = args.ram.vram else {
        return Ok((options, None));
    };
    let kind = options.kind.unwrap_or_else(BackendKind::own_gpu);
    if !kind.is_own_gpu() {
        return usage(format!(
            "--vram is the memory of a GPU, and --backend {kind} has none: leave one of them out"
        ));
    }
    options.kind = Some(kind);
    let room = vram.0.saturating_sub(DEVICE_RESERVE);
    let Some(n) = fewest_host_experts(&options, work, room) else {
        return usage(format!(
            "--vram {}: less {} that the driver keeps, it does not hold all else without any experts \
             ('cellar plan --cpu-moe --backend {kind}' shows what that is): a smaller --ctx or --gpu-layers N \
             takes less",
            machine::bytes(vram.0),
            machine::bytes(DEVICE_RESERVE)
        ));
    };
    options.host_experts.n_first = n;
    Ok((options, Some(n).filter(|&n| n > 0)))
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use cellar::{Repack, open_backend};
    use kv_backend::{Backend, BoxedBackend, RowKind, RowStorage};
    use kv_core::{
        layers::LayerMemory,
        memory::{Streams, SwaSize},
    };
    use kv_rows::{PlannedKind, PlannedRows};

    use super::*;

    /// One of each on the host.
    fn all_backends() -> impl Iterator<Item = BoxedBackend> {
        [BackendKind::Cpu, BackendKind::Candle]
            .map(|kind| {
                let options = BackendOptions {
                    kind: Some(kind),
                    n_threads: NonZeroUsize::new(1),
                    repack: Repack::Never,
                    ..BackendOptions::default()
                };
                open_backend(options).unwrap()
            })
            .into_iter()
    }

    fn configs(kv_type: KvType) -> [EngineConfig; 3] {
        let config = EngineConfig {
            n_ctx: Some(600),
            n_ubatch: 32,
            kv_types: kv_type.into(),
            ..EngineConfig::default()
        };
        [
            config.clone(),
            EngineConfig {
                n_seqs: 3,
                streams: Streams::PerSequence,
                ..config.clone()
            },
            EngineConfig {
                n_seqs: 2,
                swa: SwaSize::Full,
                ..config
            },
        ]
    }

    /// The bytes that a backend allocated for one line of a plan, or, of what is recurrent, for all
    /// lines of the layer.
    fn allocated(rows: &impl RowStorage, of: &PlannedRows) -> usize {
        let bytes = |kind| rows.allocated_bytes(of.layer, kind).unwrap();
        match of.kind {
            PlannedKind::K => bytes(RowKind::K),
            PlannedKind::V => bytes(RowKind::V),
            _ => bytes(RowKind::Conv) + bytes(RowKind::State),
        }
    }

    #[test]
    fn what_is_planned_is_what_every_architecture_gets_on_every_backend() {
        for name in architectures().names() {
            let model = architectures().get(&name).unwrap().example().unwrap();
            for backend in all_backends() {
                let mut n_lines = 0;
                for kv_type in backend.info().kv_types {
                    for config in configs(kv_type) {
                        let settings = config.settings(&*model).unwrap();
                        let plan = settings.memory_plan();
                        let rows = backend.allocate(&settings.layout).unwrap();
                        for line in plan.rows() {
                            let wanted = match line.part {
                                Some(_) => line.bytes(),
                                // Of a layer that remembers both, without its rows.
                                None => {
                                    let lines = plan.rows().iter();
                                    let of_layer = lines.filter(|l| l.layer == line.layer);
                                    let states = of_layer.filter(|l| l.part.is_none());
                                    states.map(PlannedRows::bytes).sum()
                                }
                            };
                            let got = allocated(&rows, line) as u64;
                            assert_eq!(got, wanted, "{name}, {config:?}: {line:?}");
                            n_lines += 1;
                        }
                        assert_eq!(plan.bytes(), settings.layout.bytes());
                    }
                }
                let mut layers = model.layers().iter();
                let remembers = layers.any(|(_, memory)| memory != LayerMemory::Nothing);
                assert_eq!(n_lines > 0, remembers, "{name}");
            }
        }
    }

    fn remembered(architecture: &str) -> Vec<String> {
        let model = architectures().get(architecture).unwrap().example();
        let (model, config) = (model.unwrap(), EngineConfig::default());
        let settings = config.sizes(&*model).unwrap();
        let layers = MemoryReport::new(&*model, &config, &settings).layers;
        layers.into_iter().map(|layer| layer.remembers).collect()
    }

    fn has(architecture: &str, wanted: &str) {
        let found = remembered(architecture);
        let is_there = found.iter().any(|words| words == wanted);
        assert!(is_there, "{architecture}: {found:?}");
    }

    #[test]
    fn every_kind_of_memory_has_its_words() {
        has("llama", "keys and values");
        has("deepseek2", "latents: keys that are values too");
        has("deepseek32", "keys that an indexer chooses by");
        has("t5", "keys and values of the source");
        has("mamba", "a state");
        has("falcon-h1", "keys and values, and a state");
        assert!(remembered("bert").is_empty());
        let shares = |words: &String| words.starts_with("shares the rows of layer ");
        assert!(remembered("gemma3n").iter().any(shares));
    }

    #[test]
    fn the_largest_context_fits_and_one_more_token_does_not() {
        for name in architectures().names() {
            let model = architectures().get(&name).unwrap().example().unwrap();
            let config = EngineConfig::default();
            let least = EngineConfig {
                n_ctx: Some(1),
                ..config.clone()
            };
            // States are there however short the context is.
            let budget = least.settings(&*model).unwrap().memory_bytes() + (3 << 20);
            let Some(largest) = config.largest_n_ctx(&*model, budget) else {
                panic!("{name}: nothing fits");
            };
            let sized = |n_ctx| EngineConfig {
                n_ctx: Some(n_ctx),
                budget: MemoryBudget::Bytes(budget),
                ..config.clone()
            };
            let fits = sized(largest).settings(&*model).unwrap();
            assert!(fits.memory_bytes() <= budget, "{name}");
            if largest < kv_core::memory::MAX_N_CTX {
                let error = sized(largest + 1).settings(&*model).unwrap_err();
                let cellar_engine::ConfigError::OverBudget {
                    largest_n_ctx,
                    available,
                    wanted,
                    ..
                } = error
                else {
                    panic!("{name}: {error}");
                };
                assert_eq!(
                    (largest_n_ctx, available),
                    (Some(largest), budget),
                    "{name}"
                );
                assert!(wanted > budget, "{name}");
            }
        }
    }
}
