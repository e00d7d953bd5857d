//! [`CpuBackend`]: the [`Backend`] of this crate, put together from its parts.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use kv_backend::{
    Backend, BackendError, BackendInfo, CustomOps, DeviceMemory, ExpertMeter, OnProgress, Profile,
    RowKind, RowSpan, RowStorage, check_state_types,
};
use kv_backend::{GraphInputs, GraphOutputs};
use kv_core::{LayerIdx, memory::RowCopy};
use kv_graph::Graph;
use kv_graph::weights::WeightSource;
use kv_rows::{KvType, RowLayout, StateType};

use crate::expert_store::ExpertMemory;
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::machine;
use crate::plan::{MIN_GATE_EPILOGUE_ROWS, Plan};
use crate::program::CpuProgram;
use crate::repack::RepackChoice;
use crate::run_memory::{RunMemory, locked};
use crate::storage::CpuRows;
use crate::team::Team;
use crate::weights::{ActivationChoice, CpuWeights, WeightOptions};

/// The result of [`Backend::program_capacities`]. Programs differ where gates are computed with
/// their products, which is for one token and for more than 32; the last one bounds what a short
/// ubatch of a large maximum takes.
pub const PROGRAM_CAPACITIES: &[usize] = &[1, MIN_GATE_EPILOGUE_ROWS - 1, 512];

/// The backend's use of the machine. The default is one thread for each physical core and the
/// fastest instruction set, or the one that the environment names ([`crate::isa::ISA_VARIABLE`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads, the caller's included; one for each physical core where not given.
    pub n_threads: Option<NonZeroUsize>,
    /// Instruction set; the fastest where not given.
    pub isa: Option<Isa>,
    /// The form of activations for quantised weights.
    pub activations: ActivationChoice,
    /// The choice to pack weights when a graph is compiled that multiplies with them.
    pub repack: RepackChoice,
}

/// The memory that [`CpuBackend::plan_memory`] expects, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuMemoryPlan {
    /// Packed weights, and experts within their budget. A float matrix with values that cannot be
    /// packed after its first rows takes more.
    pub packed: usize,
    /// Of `packed`, as stored: these bytes of the file do not stay in memory.
    pub replaced: usize,
    /// The programs, all of which are kept, and the memory of their runs, which they share.
    pub programs: usize,
    /// The experts of mixtures, where they are read as they are needed.
    pub experts: Option<CpuExpertPlan>,
}

/// The experts that [`CpuBackend::plan_memory`] expects, in bytes as they lie in memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuExpertPlan {
    /// All of them.
    pub total: usize,
    /// Those that are held within [`ExpertMemory::budget`]; a part of
    /// [`CpuMemoryPlan::packed`].
    pub held: usize,
    /// The largest matrix of one: the least that works.
    pub largest: usize,
    /// Those that a token goes through.
    pub of_token: usize,
}

/// Computes on the CPU.
pub struct CpuBackend {
    kernels: &'static Kernels,
    team: Team,
    /// The memory that runs of all programs write to.
    memory: Arc<Mutex<RunMemory>>,
    activations: ActivationChoice,
    repack: RepackChoice,
    experts: Option<ExpertMemory>,
    expert_meter: Arc<ExpertMeter>,
    custom: CustomOps,
    profile: Option<Arc<Profile>>,
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CpuBackend").field(&self.device()).finish()
    }
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] where this machine does not have the instruction set;
    /// [`BackendError::Device`] where a thread cannot be started.
    pub fn new(config: CpuConfig) -> Result<Self, BackendError> {
        let kernels = match config.isa {
            Some(isa) => Kernels::for_isa(isa),
            None => Kernels::from_environment(),
        }?;
        let team = Team::new(config.n_threads.unwrap_or_else(machine::n_cores))?;
        let memory = RunMemory::new(team.n_threads())?;
        Ok(Self {
            kernels,
            team,
            memory: Arc::new(Mutex::new(memory)),
            activations: config.activations,
            repack: config.repack,
            experts: None,
            expert_meter: Arc::default(),
            custom: CustomOps::new(),
            profile: None,
        })
    }

    /// The same, with a profile that every run adds its steps to, for one clock reading a step.
    #[must_use]
    pub fn with_profile(mut self, profile: Arc<Profile>) -> Self {
        self.profile = Some(profile);
        self
    }

    /// The same, with memory for the experts of mixtures, which are read from their model's file as
    /// they are needed; without, all are held. Backends of other models may have the same.
    #[must_use]
    pub fn with_expert_memory(mut self, memory: ExpertMemory) -> Self {
        self.experts = Some(memory);
        self
    }

    /// The same, with a meter of what reading experts takes: see
    /// [`CpuBackend::with_expert_memory`].
    #[must_use]
    pub fn with_expert_meter(mut self, meter: Arc<ExpertMeter>) -> Self {
        self.expert_meter = meter;
        self
    }

    /// The allocations of loading and compiling, without packing anything. Of the weights, small
    /// vectors are read, and the first rows of float matrices.
    ///
    /// # Errors
    /// As [`Backend::compile`].
    pub fn plan_memory(
        &self,
        graphs: &[Graph],
        weights: &CpuWeights,
        layout: &RowLayout,
    ) -> Result<CpuMemoryPlan, BackendError> {
        let packing = weights.plan_packing(graphs);
        // Its pages are committed when they are written to: never.
        let memory = Arc::new(Mutex::new(RunMemory::new(self.team.n_threads())?));
        let mut programs = 0;
        for graph in graphs {
            let plan = Plan::new(graph, weights, layout)?;
            let program = CpuProgram::new(plan, layout, Arc::clone(&memory))?;
            programs += program.memory().own;
        }
        programs += locked(&memory).n_bytes();
        Ok(CpuMemoryPlan {
            packed: packing.packed,
            replaced: packing.replaced,
            programs,
            experts: self.experts.as_ref().map(|_| packing.experts),
        })
    }

    fn device(&self) -> String {
        let n = self.team.n_threads();
        format!(
            "{}, {n} thread{}",
            self.kernels.isa,
            if n == 1 { "" } else { "s" }
        )
    }
}

impl Backend for CpuBackend {
    type Rows = CpuRows;
    type Weights = CpuWeights;
    type Program = CpuProgram;

    fn info(&self) -> BackendInfo {
        BackendInfo {
            name: "cpu".to_owned(),
            device: self.device(),
            kv_types: KvType::ALL.to_vec(),
            state_types: StateType::ALL.to_vec(),
        }
    }

    fn memory(&self) -> Option<DeviceMemory> {
        DeviceMemory::of_host()
    }

    fn expert_meter(&self) -> Option<Arc<ExpertMeter>> {
        let memory = self.experts.as_ref();
        memory.map(|_| Arc::clone(&self.expert_meter))
    }

    fn program_capacities(&self) -> &'static [usize] {
        PROGRAM_CAPACITIES
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> Result<(), BackendError> {
        self.custom.extend(&ops);
        Ok(())
    }

    fn allocate(&self, layout: &RowLayout) -> Result<CpuRows, BackendError> {
        CpuRows::new(layout)
    }

    fn read_rows(&self, rows: &CpuRows, span: RowSpan, out: &mut [u8]) -> Result<(), BackendError> {
        rows.read(span, out)
    }

    fn write_rows(
        &self,
        rows: &mut CpuRows,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        rows.write(span, bytes)
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<CpuWeights, BackendError> {
        let options = WeightOptions {
            activations: self.activations,
            repack: self.repack,
            custom: self.custom.clone(),
            on_progress,
            experts: self.experts.clone(),
            expert_meter: Arc::clone(&self.expert_meter),
        };
        Ok(CpuWeights::new(source, self.kernels, options))
    }

    fn forget_weights(&self, weights: &CpuWeights, names: &[String]) -> Result<(), BackendError> {
        weights.forget(names)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &CpuWeights,
        layout: &RowLayout,
    ) -> Result<CpuProgram, BackendError> {
        if weights.isa() != self.kernels.isa {
            let (theirs, ours) = (weights.isa(), self.kernels.isa);
            let reason = format!(
                "loaded for {theirs}, and this backend computes with {ours}: load them with it"
            );
            return Err(BackendError::Input {
                input: "weights",
                reason,
            });
        }
        check_state_types(graph, layout)?;
        weights.pack_for(graph, &mut self.team.lead())?;
        let plan = Plan::new(graph, weights, layout)?;
        CpuProgram::new(plan, layout, Arc::clone(&self.memory))
    }

    fn run(
        &self,
        program: &mut CpuProgram,
        rows: &mut CpuRows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        let by = (self.kernels, &self.team, self.profile.as_deref());
        program.run(by, rows, (inputs, outputs))
    }

    fn copy_rows(&self, rows: &mut CpuRows, copies: &[RowCopy]) -> Result<(), BackendError> {
        for copy in copies {
            let layers = rows.layout().layers().to_vec();
            for layer in layers.iter().filter(|l| l.part == copy.part) {
                let v = layer.stored_v().map(|_| RowKind::V);
                for kind in [RowKind::K].into_iter().chain(v) {
                    let span = |first| RowSpan {
                        layer: layer.layer,
                        kind,
                        first,
                        len: copy.len,
                    };
                    let from = span(copy.from).byte_range(rows.layout())?;
                    let to = span(copy.to).byte_range(rows.layout())?;
                    rows.bytes_mut(layer.layer, kind)?
                        .copy_within(from, to.start);
                }
            }
        }
        Ok(())
    }
}

impl RowStorage for CpuRows {
    fn layout(&self) -> &RowLayout {
        Self::layout(self)
    }

    fn allocated_bytes(&self, layer: LayerIdx, kind: RowKind) -> Result<usize, BackendError> {
        self.n_bytes(layer, kind)
    }
}
