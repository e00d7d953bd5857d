//! [`CpuBackend`]: the [`Backend`] of this crate, put together from its parts.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex};

use kv_core::backend::{
    Attend, Backend, BackendError, BackendInfo, CustomOps, Profile, RowCopy, RowKind, RowSpan,
    StoreRows, expect_len,
};
use kv_core::graph::{Graph, GraphInputs, GraphOutputs};
use kv_core::layers::RowLayout;
use kv_core::weights::WeightSource;
use kv_core::{KvType, LayerIdx};

use crate::attend::{Attention, ScoreMods, Scratch, Workspace, attend, check_shape};
use crate::isa::Isa;
use crate::kernels::Kernels;
use crate::plan::Plan;
use crate::program::CpuProgram;
use crate::repack::RepackChoice;
use crate::storage::CpuRows;
use crate::store_rows::{self, NewRows};
use crate::team::Team;
use crate::validate;
use crate::values::SharedValues;
use crate::weights::{ActivationChoice, CpuWeights};

/// How the backend uses the machine. The default is all cores and the fastest instruction set, or
/// the one that the environment names ([`crate::isa::ISA_VARIABLE`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads, the caller's included; all cores where not given.
    pub n_threads: Option<NonZeroUsize>,
    /// Instruction set; the fastest where not given.
    pub isa: Option<Isa>,
    /// How activations meet quantised weights.
    pub activations: ActivationChoice,
    /// Whether weights are packed when a graph is compiled that multiplies with them.
    pub repack: RepackChoice,
}

/// Computes on the CPU.
pub struct CpuBackend {
    kernels: &'static Kernels,
    team: Team,
    activations: ActivationChoice,
    repack: RepackChoice,
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
    /// [`BackendError::Device`] where this machine does not have the instruction set, or a thread
    /// cannot be started.
    pub fn new(config: CpuConfig) -> Result<Self, BackendError> {
        let kernels = match config.isa {
            Some(isa) => Kernels::for_isa(isa),
            None => Kernels::from_environment(),
        };
        let kernels = kernels.map_err(|e| BackendError::Device {
            backend: "cpu",
            reason: e.to_string(),
        })?;
        let cores = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        let team = Team::new(config.n_threads.unwrap_or_else(cores))?;
        Ok(Self {
            kernels,
            team,
            activations: config.activations,
            repack: config.repack,
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
        }
    }

    fn set_custom_ops(&mut self, ops: CustomOps) -> Result<(), BackendError> {
        self.custom.extend(&ops);
        Ok(())
    }

    fn allocate(&self, layout: &RowLayout) -> Result<CpuRows, BackendError> {
        CpuRows::new(layout)
    }

    fn layout<'a>(&self, rows: &'a CpuRows) -> &'a RowLayout {
        rows.layout()
    }

    fn allocated_bytes(
        &self,
        rows: &CpuRows,
        layer: LayerIdx,
        kind: RowKind,
    ) -> Result<usize, BackendError> {
        rows.n_bytes(layer, kind)
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

    fn load_weights(&self, source: Arc<dyn WeightSource>) -> Result<CpuWeights, BackendError> {
        Ok(CpuWeights::new(
            source,
            (self.activations, self.repack),
            self.kernels,
            self.custom.clone(),
        ))
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
        weights.pack_for(graph, &mut self.team.lead())?;
        let plan = Plan::new(graph, weights, layout)?;
        CpuProgram::new(plan, layout, self.team.n_threads())
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

    fn store_rows(&self, rows: &mut CpuRows, args: StoreRows<'_>) -> Result<(), BackendError> {
        let (at, layer) = rows.layer(args.layer)?;
        let n = args.cells.len();
        expect_len("values of K rows to store", n * layer.k.len(), args.k.len())?;
        let v_len = layer.stored_v().map_or(0, |v| v.len());
        expect_len("values of V rows to store", n * v_len, args.v.len())?;
        if let Some(cell) = args.cells.iter().find(|c| c.as_usize() >= layer.n_rows) {
            let (end, n_rows) = (cell.as_usize() + 1, layer.n_rows);
            return Err(BackendError::RowOutOfRange {
                layer: args.layer,
                end,
                n_rows,
            });
        }
        let new = NewRows {
            layer: at,
            k: args.k,
            v: args.v,
            cells: args.cells,
        };
        store_rows::store(self.kernels, &mut self.team.lead(), rows, new)
    }

    fn attend(
        &self,
        rows: &CpuRows,
        args: Attend<'_>,
        out: &mut [f32],
    ) -> Result<(), BackendError> {
        let (at, layer) = rows.attended(args.layer)?;
        check_shape(&args.spec, &layer)?;
        let spec = args.spec;
        let n_rows = args.visibility.n_rows as usize;
        expect_len(
            "values of queries",
            n_rows * spec.n_heads * spec.k_dim,
            args.q.len(),
        )?;
        expect_len(
            "attention output",
            n_rows * spec.n_heads * spec.v_dim,
            out.len(),
        )?;
        args.check_extras()?;
        validate::visibility(args.visibility, layer.n_rows, &mut vec![false; n_rows])?;
        let Some(kv) = rows.stored(at) else {
            return Ok(());
        };
        let slopes = spec.alibi.map(|alibi| alibi.slopes(spec.n_heads));
        let attention = Attention {
            kernels: self.kernels,
            spec,
            kv,
            q: args.q,
            visibility: args.visibility,
            score_mods: ScoreMods {
                sinks: args.sinks,
                slopes: slopes.as_deref(),
                positions: args.positions,
            },
            out: SharedValues::new(out),
        };
        let mut work = Workspace::default();
        let scratch = || {
            let mut scratch = Scratch::default();
            scratch.reserve(&spec, n_rows);
            Mutex::new(scratch)
        };
        let scratch: Vec<_> = (0..self.team.n_threads()).map(|_| scratch()).collect();
        // SAFETY: the visibility was checked for these queries and this layer's rows.
        unsafe { attend(&mut self.team.lead(), &attention, &mut work, &scratch) }
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
