//! What is planned for a device is what it allocates, byte for byte, and an operation without a
//! kernel is found by planning.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::gpu;
use cellar_engine::{Engine, EngineConfig, MemoryBudget, PromptOutputs, Workload};
use kv_backend::{Backend, BackendError, CustomOps, DeviceMemory, OnProgress};
use kv_core::{PosRange, SeqId, TokenId, batch::Batch, memory::Seqs};
use kv_gpu::sim::{Order, Sim, SimBuffer};
use kv_gpu::{
    Argument, Device, GpuBackend, GpuConfig, GpuMemoryPlan, GpuWork, Precision, Region, plan_memory,
};
use kv_graph::weights::{MemoryWeights, WeightSource};
use kv_graph::{GraphBuilder, GraphShape, Input, NodeId, PositionScale};
use kv_rows::RowLayout;
use model_tests::Case;

/// The simulator with so much memory, which counts what is allocated of it.
#[derive(Debug)]
struct CountedMemory {
    sim: Sim,
    size: usize,
    held: Arc<AtomicUsize>,
}

#[derive(Debug)]
struct CountedBuffer {
    buffer: SimBuffer,
    len: usize,
    held: Arc<AtomicUsize>,
}

impl Drop for CountedBuffer {
    fn drop(&mut self) {
        self.held.fetch_sub(self.len, Relaxed);
    }
}

fn of_sim<'a>(region: Region<'a, CountedMemory>) -> Region<'a, Sim> {
    Region {
        buffer: &region.buffer.buffer,
        at: region.at,
    }
}

impl Device for CountedMemory {
    type Buffer = CountedBuffer;
    type Kernel = <Sim as Device>::Kernel;
    type Recording = <Sim as Device>::Recording;

    fn name(&self) -> &'static str {
        self.sim.name()
    }

    fn description(&self) -> String {
        self.sim.description()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<CountedBuffer, BackendError> {
        if self.held.load(Relaxed) + bytes > self.size {
            return Err(BackendError::OutOfMemory {
                backend: "sim",
                wanted: bytes,
                what: what.to_owned(),
            });
        }
        let buffer = self.sim.allocate(bytes, what)?;
        self.held.fetch_add(bytes, Relaxed);
        Ok(CountedBuffer {
            buffer,
            len: bytes,
            held: Arc::clone(&self.held),
        })
    }

    fn write(&self, to: Region<'_, Self>, bytes: &[u8]) -> Result<(), BackendError> {
        self.sim.write(of_sim(to), bytes)
    }

    fn read(&self, from: Region<'_, Self>, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.sim.read(of_sim(from), bytes)
    }

    fn copy(
        &self,
        from: Region<'_, Self>,
        to: Region<'_, Self>,
        len: usize,
    ) -> Result<(), BackendError> {
        self.sim.copy(of_sim(from), of_sim(to), len)
    }

    fn kernel(&self, name: &str) -> Result<Self::Kernel, BackendError> {
        self.sim.kernel(name)
    }

    fn launch(
        &self,
        kernel: &Self::Kernel,
        grid: [u32; 2],
        arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError> {
        let arguments: Vec<Argument<'_, Sim>> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Buffer(region) => Argument::Buffer(of_sim(*region)),
                Argument::Settings(settings) => Argument::Settings(settings),
            })
            .collect();
        self.sim.launch(kernel, grid, &arguments)
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Self::Recording, BackendError> {
        self.sim.record(launches)
    }

    fn replay(&self, recording: &Self::Recording) -> Result<(), BackendError> {
        self.sim.replay(recording)
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.sim.wait()
    }
}

fn device(size: usize) -> (CountedMemory, Arc<AtomicUsize>) {
    let held = Arc::new(AtomicUsize::new(0));
    let device = CountedMemory {
        sim: Sim::new(Order::Forward),
        size,
        held: Arc::clone(&held),
    };
    (device, held)
}

const CONFIG: GpuConfig = GpuConfig {
    precision: Precision::Fast,
};

fn engine_config() -> EngineConfig {
    EngineConfig {
        n_ctx: Some(96),
        n_ubatch: 24,
        n_seqs: 2,
        budget: MemoryBudget::Unlimited,
        ..EngineConfig::default()
    }
}

fn plan(load: &Workload, weights: &Arc<dyn WeightSource>) -> GpuMemoryPlan {
    let work = GpuWork {
        backend: "sim",
        graphs: &load.graphs,
        weights,
        layout: &load.settings.layout,
        custom: &load.custom,
    };
    plan_memory(CONFIG, work).unwrap()
}

#[test]
fn what_is_planned_is_what_a_device_allocates() {
    for name in ["llama_gqa_untied", "gemma3_iswa8", "mamba2", "mixtral"] {
        let case = Case::recipe(name, gpu::register);
        let (weights, metadata) = case.open();
        let model = case.registry().model(&metadata, &*weights).unwrap();
        let load = Workload::new(&model, &engine_config(), PromptOutputs::Last).unwrap();
        let planned = plan(&load, &weights);
        for (size, fits) in [(planned.total(), true), (planned.total() - 1, false)] {
            let (device, held) = device(size);
            let mut backend = GpuBackend::new(device, CONFIG);
            backend.set_custom_ops(load.custom.clone()).unwrap();
            let layout = &load.settings.layout;
            let _rows = backend.allocate(layout).unwrap();
            assert_eq!(held.load(Relaxed), planned.rows, "{name}");
            let loaded = backend
                .load_weights(Arc::clone(&weights), OnProgress::default())
                .unwrap();
            let compiled = load.graphs.iter();
            let compiled = compiled.map(|graph| backend.compile(graph, &loaded, layout));
            match compiled.collect::<Result<Vec<_>, _>>() {
                Ok(_programs) => assert_eq!(held.load(Relaxed), planned.total(), "{name}"),
                Err(BackendError::OutOfMemory { .. }) => assert!(!fits, "{name}"),
                Err(error) => panic!("{name}: {error}"),
            }
        }
    }
}

#[test]
fn runs_take_what_is_planned_for_their_inputs_and_tables() {
    let case = Case::recipe("llama_gqa_untied", gpu::register);
    let (weights, metadata) = case.open();
    let model = case.registry().model(&metadata, &*weights).unwrap();
    let load = Workload::new(&model, &engine_config(), PromptOutputs::Last).unwrap();
    let planned = plan(&load, &weights);
    let (device, held) = device(usize::MAX);
    let backend = GpuBackend::new(device, CONFIG);
    let mut engine = Engine::new(backend, model, weights, &engine_config()).unwrap();
    // Three ubatches, then a token of each sequence.
    let mut batch = Batch::new();
    for i in 0..72 {
        batch.push_token(TokenId(i % 50)).in_sequence(SeqId(0));
    }
    engine.decode(&batch).unwrap();
    engine.remove(Seqs::One(SeqId(0)), PosRange::ALL).unwrap();
    batch.clear();
    for seq in [0, 1] {
        batch
            .push_token(TokenId(7))
            .in_sequence(SeqId(seq))
            .with_output();
    }
    engine.decode(&batch).unwrap();
    let without_inputs = planned.total() - planned.inputs;
    let inputs = held.load(Relaxed) - without_inputs;
    // Tables of what tokens see are small: they at most double a block.
    let range = planned.inputs..=2 * planned.inputs;
    assert!(range.contains(&inputs), "{inputs} and {planned:?}");
}

/// The refusal of a graph of one operation whose sizes no kernel takes.
fn refusal(build: impl FnOnce(&mut GraphBuilder) -> NodeId) -> BackendError {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens: 2,
        n_outputs: 2,
    });
    let output = build(&mut b);
    let graph = b.finish(&[output]).unwrap();
    let mut weights = MemoryWeights::new();
    for used in graph.weights() {
        let n = used.shape.iter().product();
        weights
            .insert_f32(&used.name, &used.shape, &vec![0.5; n])
            .unwrap();
    }
    let weights: Arc<dyn WeightSource> = Arc::new(weights);
    let work = GpuWork {
        backend: "cuda",
        graphs: &[graph],
        weights: &weights,
        layout: &RowLayout::default(),
        custom: &CustomOps::new(),
    };
    plan_memory(CONFIG, work).unwrap_err()
}

#[test]
fn sizes_without_a_kernel_are_found_by_planning() {
    let largest = refusal(|b| {
        let x = b.input(Input::Embeddings { dim: 2000 }).unwrap();
        b.top_k("largest", x, 1025).unwrap()
    });
    let scaled = refusal(|b| {
        let x = b.input(Input::Embeddings { dim: 8 }).unwrap();
        let positions = b.input(Input::Positions).unwrap();
        let scale = PositionScale {
            every: 4,
            strength: 0.3,
            offset: 2,
        };
        b.scale_by_position("scaled", scale, [x, positions])
            .unwrap()
    });
    for (error, name) in [(largest, "largest"), (scaled, "scaled")] {
        match error {
            BackendError::UnsupportedOp { backend, node, .. } => {
                assert_eq!((backend, &*node), ("cuda", name));
            }
            other => panic!("{other}"),
        }
    }
}
