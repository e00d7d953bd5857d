//! Experts that are read as they are needed: the bits of a model held whole, within the budget,
//! whatever the disk does.

#![allow(clippy::unwrap_used)] // helpers of tests

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use kv_backend::{Backend, BackendError, CancelFlag, ExpertMeter, GraphInputs, GraphOutputs};
use kv_block::BlockFormat;
use kv_contract::Random;
use kv_cpu::activations::ActivationKind;
use kv_cpu::isa::Isa;
use kv_cpu::{
    ActivationChoice, CpuBackend, CpuConfig, CpuProgram, CpuRows, CpuWeights, ExpertMemory,
};
use kv_graph::weights::{ByteOwner, MemoryWeights, SharedBytes, Weight};
use kv_graph::{Affine, Graph, GraphBuilder, GraphShape, Input, RouteGate, RouteSpec, RouteSum};
use kv_rows::RowLayout;

use crate::repacked::weight;

const DIM: usize = 256;
const N_EXPERTS: usize = 7;
const N_LAYERS: usize = 3;
/// Memory is taken in pages.
const PAGE: u64 = 4096;

/// Bytes that seem to be in a file whose reads can fail, and can be held up.
#[derive(Default)]
struct Disk {
    bytes: Vec<u8>,
    name: String,
    n_reads: Arc<AtomicUsize>,
    /// The number of the read that fails, counted through all disks of a model.
    failing: Arc<AtomicUsize>,
    /// True while reads wait.
    is_stuck: Arc<(Mutex<bool>, Condvar)>,
    starts: Arc<Mutex<Vec<(String, usize)>>>,
}

impl ByteOwner for Disk {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn is_in_file(&self) -> bool {
        true
    }

    fn copy(&self, start: usize, to: &mut [u8]) -> bool {
        let (is_stuck, changed) = &*self.is_stuck;
        let mut waits = is_stuck.lock().unwrap();
        while *waits {
            waits = changed.wait(waits).unwrap();
        }
        drop(waits);
        self.starts.lock().unwrap().push((self.name.clone(), start));
        let at = self.n_reads.fetch_add(1, Ordering::SeqCst);
        if at == self.failing.load(Ordering::SeqCst) {
            return false;
        }
        to.copy_from_slice(&self.bytes[start..start + to.len()]);
        true
    }
}

/// A mixture with weights on a disk, and what its disks share.
struct Mixture {
    weights: Vec<Weight>,
    n_reads: Arc<AtomicUsize>,
    failing: Arc<AtomicUsize>,
    is_stuck: Arc<(Mutex<bool>, Condvar)>,
    starts: Arc<Mutex<Vec<(String, usize)>>>,
}

impl Mixture {
    /// The matrices of layers differ in size: their inner width grows with the layer.
    fn new(formats: [BlockFormat; 3]) -> Self {
        let mut mixture = Self {
            weights: Vec::new(),
            n_reads: Arc::default(),
            failing: Arc::new(AtomicUsize::new(usize::MAX)),
            is_stuck: Arc::default(),
            starts: Arc::default(),
        };
        for layer in 0..N_LAYERS {
            let inner = inner_of(layer);
            let router = weight(
                &format!("{layer} router"),
                &[N_EXPERTS, DIM],
                BlockFormat::F32,
            );
            mixture.weights.push(router);
            for (name, shape, format) in [
                ("gate", [N_EXPERTS, inner, DIM], formats[0]),
                ("up", [N_EXPERTS, inner, DIM], formats[1]),
                ("down", [N_EXPERTS, DIM, inner], formats[2]),
            ] {
                let name = format!("{layer} {name}");
                let plain = weight(&name, &shape, format);
                let disk = Disk {
                    bytes: plain.bytes().to_vec(),
                    name: name.clone(),
                    n_reads: Arc::clone(&mixture.n_reads),
                    failing: Arc::clone(&mixture.failing),
                    is_stuck: Arc::clone(&mixture.is_stuck),
                    starts: Arc::clone(&mixture.starts),
                };
                let bytes = SharedBytes::new(Arc::new(disk));
                let stored = Weight::new(name, shape.to_vec(), format, bytes).unwrap();
                mixture.weights.push(stored);
            }
        }
        mixture
    }

    /// All bytes of the experts, in pages.
    fn n_bytes(&self) -> u64 {
        let stacks = self.weights.iter().filter(|w| w.shape().len() == 3);
        let of = |w: &Weight| (w.bytes().len() / N_EXPERTS) as u64;
        stacks
            .map(|w| of(w).next_multiple_of(PAGE) * N_EXPERTS as u64)
            .sum()
    }

    fn largest(&self) -> u64 {
        let stacks = self.weights.iter().filter(|w| w.shape().len() == 3);
        let of = |w: &Weight| (w.bytes().len() / N_EXPERTS) as u64;
        stacks.map(|w| of(w).next_multiple_of(PAGE)).max().unwrap()
    }

    fn hold_up(&self, is_stuck: IsStuck) {
        *self.is_stuck.0.lock().unwrap() = is_stuck == IsStuck::Yes;
        self.is_stuck.1.notify_all();
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum IsStuck {
    Yes,
    No,
}

fn inner_of(layer: usize) -> usize {
    256 * (layer + 1)
}

/// Feed-forward blocks of experts, one after the other.
fn graph(n_tokens: usize) -> Graph {
    let mut b = GraphBuilder::new(GraphShape {
        n_tokens,
        n_outputs: n_tokens,
    });
    let mut x = b.input(Input::Embeddings { dim: DIM }).unwrap();
    for layer in 0..N_LAYERS {
        let name = |what: &str| format!("{layer} {what}");
        let spec = RouteSpec {
            sum: RouteSum::One,
            ..RouteSpec::plain(2, RouteGate::Softmax)
        };
        let logits = b
            .linear(&name("logits"), x, &name("router"), N_EXPERTS)
            .unwrap();
        let routes = b.route(&name("routes"), logits, spec).unwrap();
        let mut linear = |what: &str, x, n_out| {
            let (node, weight) = (name(&format!("{what} product")), name(what));
            b.expert_linear(&node, [x, routes], Affine::new(&weight), n_out)
                .unwrap()
        };
        let _gate = linear("gate", x, inner_of(layer));
        let up = linear("up", x, inner_of(layer));
        let down = linear("down", up, DIM);
        let scaled = b.expert_scale(&name("scaled"), [down, routes]).unwrap();
        x = b.expert_sum(&name("sum"), scaled).unwrap();
        if layer + 1 == N_LAYERS {
            return b.finish(&[x, _gate]).unwrap();
        }
    }
    unreachable!()
}

/// A backend with a compiled mixture.
struct LoadedMixture {
    backend: CpuBackend,
    meter: Arc<ExpertMeter>,
    weights: CpuWeights,
    program: CpuProgram,
    rows: CpuRows,
    n_tokens: usize,
}

fn load(mixture: &Mixture, expert_bytes: Option<u64>, n_tokens: usize) -> LoadedMixture {
    try_load(
        mixture,
        expert_bytes,
        (n_tokens, Isa::all_available().last().copied()),
    )
    .unwrap()
}

fn try_load(
    mixture: &Mixture,
    expert_bytes: Option<u64>,
    shape: (usize, Option<Isa>),
) -> Result<LoadedMixture, BackendError> {
    load_with(mixture, expert_bytes.map(ExpertMemory::new), shape)
}

fn load_with(
    mixture: &Mixture,
    memory: Option<ExpertMemory>,
    (n_tokens, isa): (usize, Option<Isa>),
) -> Result<LoadedMixture, BackendError> {
    let meter = Arc::<ExpertMeter>::default();
    let backend = CpuBackend::new(CpuConfig {
        n_threads: NonZeroUsize::new(2),
        isa,
        activations: ActivationChoice::Always(ActivationKind::Int8),
        ..CpuConfig::default()
    })?;
    let backend = match memory {
        Some(memory) => backend.with_expert_memory(memory),
        None => backend,
    };
    let backend = backend.with_expert_meter(Arc::clone(&meter));
    let mut source = MemoryWeights::new();
    mixture
        .weights
        .iter()
        .for_each(|w| source.insert(w.clone()));
    let layout = RowLayout::default();
    let weights = backend.load_weights(Arc::new(source), Default::default())?;
    let program = backend.compile(&graph(n_tokens), &weights, &layout)?;
    let rows = backend.allocate(&layout)?;
    Ok(LoadedMixture {
        backend,
        meter,
        weights,
        program,
        rows,
        n_tokens,
    })
}

impl LoadedMixture {
    fn run(&mut self, seed: u64, cancel: Option<&CancelFlag>) -> Result<Vec<u32>, BackendError> {
        let x = Random::new(seed).values(self.n_tokens * DIM);
        let inputs = GraphInputs {
            embeddings: &x,
            cancel,
            ..GraphInputs::default()
        };
        let mut outputs = GraphOutputs::default();
        let (program, rows) = (&mut self.program, &mut self.rows);
        self.backend.run(program, rows, &inputs, &mut outputs)?;
        let found = self.meter.get();
        assert!(found.resident <= found.budget, "{found:?}");
        let values = outputs.values.iter().flatten();
        Ok(values.map(|v| v.to_bits()).collect())
    }
}

const Q4: [BlockFormat; 3] = [BlockFormat::Q4_K, BlockFormat::Q4_K, BlockFormat::Q6_K];

#[test]
fn the_bits_are_those_of_a_model_held_whole() {
    use BlockFormat as B;
    for formats in [
        Q4,
        [B::MXFP4, B::Q8_0, B::IQ4_XS],
        [B::BF16, B::F16, B::F32],
    ] {
        let mixture = Mixture::new(formats);
        for isa in Isa::all_available() {
            for n_tokens in [1, 40] {
                let shape = (n_tokens, Some(isa));
                let mut whole = try_load(&mixture, None, shape).unwrap();
                let wanted: Vec<_> = (1..4).map(|seed| whole.run(seed, None).unwrap()).collect();
                let values = || wanted.iter().flatten().map(|bits| f32::from_bits(*bits));
                assert!(values().all(f32::is_finite) && values().any(|v| v != 0.0));
                let (one, all) = (mixture.largest(), mixture.n_bytes());
                for budget in [one, 3 * one, all / 2, 10 * all] {
                    let what = format!("{formats:?} {isa} {n_tokens} tokens, {budget} bytes");
                    let mut read = try_load(&mixture, Some(budget), shape).unwrap();
                    for (seed, wanted) in (1..4).zip(&wanted) {
                        assert!(read.run(seed, None).unwrap() == *wanted, "{what}");
                    }
                    let found = read.meter.get();
                    assert!(found.misses > 0 && found.read > 0, "{what}: {found:?}");
                }
            }
        }
    }
}

/// Each matrix is read once for all rows of a prompt, however little memory there is.
#[test]
fn a_prompt_reads_each_expert_once() {
    let mixture = Mixture::new(Q4);
    for budget in [mixture.largest(), 4 * mixture.largest(), mixture.n_bytes()] {
        let mut read = load(&mixture, Some(budget), 64);
        for seed in 1..4 {
            mixture.starts.lock().unwrap().clear();
            read.run(seed, None).unwrap();
            let mut counts: HashMap<(String, usize), usize> = HashMap::new();
            for start in mixture.starts.lock().unwrap().drain(..) {
                *counts.entry(start).or_default() += 1;
            }
            assert!(counts.values().all(|&n| n == 1), "{budget}: {counts:?}");
            if budget == mixture.n_bytes() && seed > 1 {
                assert!(counts.is_empty(), "everything is there: {counts:?}");
            }
        }
        let found = read.meter.get();
        assert_eq!(found.total, mixture.n_bytes());
        assert_eq!(found.budget, budget);
        let n_runs = mixture.n_bytes() / budget;
        assert!(
            n_runs == 1 || found.hit_percent().unwrap() < 90.0,
            "{found:?}"
        );
    }
}

/// Any read may fail: the run ends with the weight's name, and the next one is as if nothing had
/// happened.
#[test]
fn a_failed_read_ends_its_run_and_no_other() {
    let mixture = Mixture::new(Q4);
    let mut whole = load(&mixture, None, 3);
    let wanted = [1, 2].map(|seed| whole.run(seed, None).unwrap());
    let mut n_failed = 0;
    for failing in 0..40 {
        let mut read = load(&mixture, Some(3 * mixture.largest()), 3);
        mixture.n_reads.store(0, Ordering::SeqCst);
        mixture.failing.store(failing, Ordering::SeqCst);
        match read.run(1, None) {
            Ok(found) => assert!(found == wanted[0]),
            Err(BackendError::Device { reason, .. }) => {
                assert!(
                    reason.contains("could not be read from its file"),
                    "{reason}"
                );
                n_failed += 1;
            }
            Err(error) => panic!("{error}"),
        }
        mixture.failing.store(usize::MAX, Ordering::SeqCst);
        for (seed, wanted) in (1..).zip(&wanted) {
            assert!(read.run(seed, None).unwrap() == *wanted, "{failing}");
        }
    }
    assert!(n_failed > 20, "{n_failed}");
}

#[test]
fn a_run_that_waits_for_a_disk_can_be_cancelled() {
    let mixture = Mixture::new(Q4);
    let mut read = load(&mixture, Some(mixture.n_bytes() / 4), 2);
    let wanted = read.run(7, None).unwrap();
    mixture.hold_up(IsStuck::Yes);
    let flag = CancelFlag::default();
    let canceller = flag.clone();
    let thread = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(120));
        canceller.cancel();
    });
    let cancelled = (0..20).find_map(|seed| read.run(seed, Some(&flag)).err());
    assert!(
        matches!(cancelled, Some(BackendError::Cancelled)),
        "{cancelled:?}"
    );
    thread.join().unwrap();
    mixture.hold_up(IsStuck::No);
    assert!(read.run(7, None).unwrap() == wanted);
    // Dropped while something may be read.
    mixture.hold_up(IsStuck::Yes);
    let release = std::thread::spawn({
        let is_stuck = Arc::clone(&mixture.is_stuck);
        move || {
            std::thread::sleep(Duration::from_millis(50));
            *is_stuck.0.lock().unwrap() = false;
            is_stuck.1.notify_all();
        }
    });
    flag.cancel();
    let _either = read.run(9, Some(&flag));
    let meter = Arc::clone(&read.meter);
    drop(read);
    release.join().unwrap();
    assert_eq!(meter.get().resident, 0);
}

#[test]
fn what_cannot_be_read_within_a_budget_is_refused() {
    let mixture = Mixture::new(Q4);
    let least = mixture.largest();
    let refused = try_load(&mixture, Some(least - 1), (1, None))
        .err()
        .unwrap();
    let message = refused.to_string();
    assert!(message.contains("'2 down'"), "{message}");
    assert!(
        message.contains(&format!("takes {least}: give at least")),
        "{message}"
    );
    let mut computed = Mixture::new(Q4);
    let down = computed.weights.last_mut().unwrap();
    let bytes = down.bytes().to_vec().into();
    *down = Weight::new(down.name(), down.shape().to_vec(), down.format(), bytes).unwrap();
    let refused = try_load(&computed, Some(least), (1, None)).err().unwrap();
    let message = refused.to_string();
    assert!(
        message.contains("'2 down' is computed when the model is loaded"),
        "{message}"
    );
    assert!(try_load(&computed, None, (1, None)).is_ok());
}

/// Graphs of other sizes use the same experts, and what is planned is what is taken.
#[test]
fn programs_share_experts() {
    let mixture = Mixture::new(Q4);
    let budget = mixture.n_bytes() / 2;
    let mut read = load(&mixture, Some(budget), 5);
    let wanted = read.run(3, None).unwrap();
    let planned = read
        .backend
        .plan_memory(&[graph(5), graph(1)], &read.weights, &RowLayout::default())
        .unwrap();
    assert_eq!(planned.packed as u64, budget);
    assert!(read.weights.packed_bytes() == 0 && planned.replaced > planned.packed);
    let other = read
        .backend
        .compile(&graph(1), &read.weights, &RowLayout::default());
    let five = std::mem::replace(&mut read.program, other.unwrap());
    read.n_tokens = 1;
    read.run(3, None).unwrap();
    assert_eq!(read.meter.get().total, mixture.n_bytes());
    read.program = five;
    read.n_tokens = 5;
    assert!(read.run(3, None).unwrap() == wanted);
}

/// Two models at once in memory for one and a half: the bits of each alone, never more bytes than
/// there are, and what one leaves is the other's.
#[test]
fn models_share_a_budget() {
    let (first, second) = (Mixture::new(Q4), Mixture::new(Q4));
    let whole = first.n_bytes();
    let mut alone = load(&first, None, 2);
    let wanted: Vec<_> = (0..24).map(|seed| alone.run(seed, None).unwrap()).collect();
    let memory = ExpertMemory::new(whole * 3 / 2);
    let isa = Isa::all_available().last().copied();
    let of = |mixture| load_with(mixture, Some(memory.clone()), (2, isa)).unwrap();
    let (mut one, mut other) = (of(&first), of(&second));
    let is_over = AtomicUsize::new(0);
    let run = |loaded: &mut LoadedMixture| {
        for (seed, wanted) in (0..).zip(&wanted) {
            assert!(loaded.run(seed, None).unwrap() == *wanted, "{seed}");
            if memory.n_bytes() > memory.budget() {
                is_over.fetch_add(1, Ordering::SeqCst);
            }
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(&mut one));
        scope.spawn(|| run(&mut other));
    });
    assert_eq!(is_over.into_inner(), 0);
    let resident = |loaded: &LoadedMixture| loaded.meter.get().resident;
    assert_eq!(resident(&one) + resident(&other), memory.n_bytes());
    // Both need more than half of what there is, so it is full.
    assert!(memory.n_bytes() + first.largest() > memory.budget());
    let map = one.meter.map().unwrap();
    assert_eq!(map.len(), N_LAYERS);
    let cells = || map.iter().flatten();
    assert!(cells().all(|cell| cell.matrices == 3 && cell.hits <= cell.uses));
    // Two of two rows each, so two to four experts of a layer.
    let uses: u64 = cells().map(|cell| cell.uses).sum();
    let n_layers_run = (wanted.len() * N_LAYERS) as u64;
    assert!(
        (2 * n_layers_run..=4 * n_layers_run).contains(&uses),
        "{uses}"
    );
    assert!(cells().any(|cell| cell.resident > 0));
    // Only one is asked now: the other's go, and those that are asked for stay.
    let before = resident(&other);
    for _ in 0..40 {
        for (seed, wanted) in (0..).zip(&wanted) {
            assert!(one.run(seed, None).unwrap() == *wanted);
        }
    }
    let used: u64 = {
        let map = one.meter.map().unwrap();
        let all = map.into_iter().flatten();
        let used = all.filter(|cell| cell.uses > 0);
        used.map(|cell| u64::from(cell.resident)).sum()
    };
    let read = one.meter.get().read;
    one.run(0, None).unwrap();
    assert_eq!(one.meter.get().read, read, "{used} matrices are there");
    assert!(resident(&other) <= before);
    // What is unloaded leaves all that it had.
    drop(one);
    assert_eq!(memory.n_bytes(), resident(&other));
    for _ in 0..2 {
        for (seed, wanted) in (0..).zip(&wanted) {
            assert!(other.run(seed, None).unwrap() == *wanted);
        }
    }
    let read = other.meter.get().read;
    for seed in 0..wanted.len() as u64 {
        other.run(seed, None).unwrap();
    }
    assert_eq!(other.meter.get().read, read, "all of it fits");
    // A third has the number of the one that left.
    let mut third = of(&first);
    assert!(third.run(1, None).unwrap() == wanted[1]);
    assert!(memory.n_bytes() <= memory.budget());
    drop((third, other));
    assert_eq!(memory.n_bytes(), 0);
}

/// A run that was left in the middle of a layer keeps nothing from others.
#[test]
fn a_run_that_was_cancelled_blocks_no_other() {
    let (first, second) = (Mixture::new(Q4), Mixture::new(Q4));
    let memory = ExpertMemory::new(2 * first.largest());
    let isa = Isa::all_available().last().copied();
    let of = |mixture| load_with(mixture, Some(memory.clone()), (2, isa)).unwrap();
    let (mut one, mut other) = (of(&first), of(&second));
    let wanted = load(&second, None, 2).run(3, None).unwrap();
    for seed in 0..8 {
        first.hold_up(IsStuck::Yes);
        let flag = CancelFlag::default();
        let canceller = flag.clone();
        let thread = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(20));
            canceller.cancel();
        });
        let cancelled = one.run(seed, Some(&flag)).err();
        thread.join().unwrap();
        first.hold_up(IsStuck::No);
        assert!(
            matches!(cancelled, Some(BackendError::Cancelled)),
            "{cancelled:?}"
        );
        assert!(other.run(3, None).unwrap() == wanted);
    }
}
