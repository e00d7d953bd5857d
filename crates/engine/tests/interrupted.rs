//! Runs that end before their last step, because they are cancelled or because something of a third
//! party panics, and a compaction that would never end: the memory answers as before the call, and
//! going on gives the same logits, bit for bit, as if nothing had happened.

#![allow(clippy::unwrap_used, clippy::panic)] // a test

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use crate::model::{Layered, Remembers};
use cellar_engine::{CancelFlag, ConfigError, Engine, EngineConfig, EngineError};
use kv_backend::null::NullBackend;
use kv_backend::{Backend, BackendError, CustomOp, CustomRows, CustomShape, RunProgress};
use kv_candle::CandleBackend;
use kv_core::{
    PosRange, SeqId, TokenId, Window,
    batch::{Batch, SplitPolicy, UBatch},
    memory::{
        Composite, Edit, Edited, Memory, MemoryInputs, Plan, PlannedUBatch, Refusal, RowCounts,
        RowsWritten, SwaSize,
    },
};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_rows::KvType;

const LAYERS: [Remembers; 3] = [
    Remembers::Tokens(Window::Full),
    Remembers::Tokens(Window::Sliding(20)),
    Remembers::Tokens(Window::Full),
];
/// The layer behind which runs are interrupted.
const AT: usize = 1;
const N_UBATCH: usize = 3;

fn config() -> EngineConfig {
    EngineConfig {
        n_ctx: Some(64),
        n_ubatch: N_UBATCH as u32,
        kv_types: KvType::F32.into(),
        ..EngineConfig::default()
    }
}

/// What is done behind a layer in the second ubatch of a call.
enum Interruption {
    Cancel(CancelFlag),
    Panic,
}

#[derive(Default)]
struct Told {
    interruption: Option<Interruption>,
    /// By layer: rows that came out of it.
    n_rows: [usize; LAYERS.len()],
}

/// Copies its operand, and interrupts the run where it is told to.
#[derive(Clone, Default)]
struct Interrupt(Arc<Mutex<Told>>);

impl std::fmt::Debug for Interrupt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Interrupt")
    }
}

impl Interrupt {
    fn tell(&self, interruption: Interruption) {
        *self.0.lock().unwrap() = Told {
            interruption: Some(interruption),
            ..Told::default()
        };
    }

    fn n_rows(&self) -> [usize; LAYERS.len()] {
        self.0.lock().unwrap().n_rows
    }
}

impl CustomOp for Interrupt {
    fn name(&self) -> &str {
        "test.interrupt"
    }

    fn check(&self, _: &CustomShape<'_>) -> Result<(), String> {
        Ok(())
    }

    fn rows(&self, rows: &CustomRows<'_>, _: &mut [f32], out: &mut [f32]) -> Result<(), String> {
        out.copy_from_slice(rows.operands[0]);
        let layer = rows.spec.param("layer").ok_or("no layer")? as usize;
        let interruption = {
            let mut told = self.0.lock().unwrap();
            told.n_rows[layer] += rows.n_rows;
            let is_here = layer == AT && told.n_rows[AT] > N_UBATCH;
            if is_here {
                told.interruption.take()
            } else {
                None
            }
        };
        match interruption {
            Some(Interruption::Cancel(flag)) => flag.cancel(),
            Some(Interruption::Panic) => panic!("a custom operation that panics"),
            None => {}
        }
        Ok(())
    }
}

fn tokens(first: u32, n: u32) -> Batch {
    let mut batch = Batch::new();
    for i in first..first + n {
        batch
            .push_token(TokenId(i % crate::model::VOCAB))
            .with_output();
    }
    batch
}

/// An engine that remembers five tokens.
fn begun<B: Backend>(backend: B, model: Layered) -> Engine<B> {
    let model = Arc::new(model);
    let weights = model.random_weights();
    let mut engine = Engine::new(backend, model, weights, &config()).unwrap();
    engine.decode(&tokens(3, 5)).unwrap();
    engine
}

/// Three ubatches of three, three and one tokens.
fn call() -> Batch {
    tokens(11, 7)
}

/// An engine whose runs can be interrupted, what interrupts them, and the logits of an undisturbed
/// call.
fn interruptible<B: Backend>(backend: impl Fn() -> B) -> (Engine<B>, Interrupt, Vec<f32>) {
    let interrupt = Interrupt::default();
    let model = |op: Interrupt| Layered::new(&LAYERS).with_op(op);
    let mut undisturbed = begun(backend(), model(Interrupt::default()));
    let logits = undisturbed.decode(&call()).unwrap().values().to_vec();
    (
        begun(backend(), model(interrupt.clone())),
        interrupt,
        logits,
    )
}

fn cancelled_runs_leave_no_trace<B: Backend>(backend: impl Fn() -> B) {
    let (mut engine, interrupt, undisturbed) = interruptible(backend);
    let before = engine.memory().clone();
    let cancel = CancelFlag::default();
    interrupt.tell(Interruption::Cancel(cancel.clone()));
    let progress = RunProgress::default();
    engine.set_run_progress(Some(progress.clone()));
    let error = engine.decode_until(&call(), &cancel).unwrap_err();
    assert!(matches!(error, EngineError::Cancelled), "{error}");
    // The run that ended in its middle had reported that far.
    let fraction = progress.fraction();
    assert!(0.2 < fraction && fraction < 0.9, "{fraction}");
    // The layer behind saw only the first ubatch.
    let n_rows = interrupt.n_rows();
    assert_eq!((n_rows[0], n_rows[2]), (2 * N_UBATCH, N_UBATCH));
    assert_eq!(*engine.memory(), before);
    assert_eq!(engine.last_logits().n_rows(), 0);
    // A flag that is still set cancels the next call before its first layer.
    assert!(engine.decode_until(&call(), &cancel).is_err());
    assert_eq!(interrupt.n_rows(), n_rows);
    cancel.reset();
    let again = engine.decode_until(&call(), &cancel).unwrap();
    assert_eq!(again.values(), undisturbed);
}

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuConfig::default()).unwrap()
}

#[test]
fn a_cancelled_run_leaves_no_trace_on_candle() {
    cancelled_runs_leave_no_trace(CandleBackend::cpu);
}

#[test]
fn a_cancelled_run_leaves_no_trace_on_cpu() {
    cancelled_runs_leave_no_trace(cpu);
}

#[test]
fn a_cancelled_run_leaves_no_trace_on_null() {
    let mut engine = begun(NullBackend, Layered::new(&LAYERS));
    let before = engine.memory().clone();
    let cancel = CancelFlag::default();
    cancel.cancel();
    let error = engine.decode_until(&call(), &cancel).unwrap_err();
    assert!(matches!(error, EngineError::Cancelled), "{error}");
    assert_eq!(*engine.memory(), before);
    cancel.reset();
    assert_eq!(engine.decode_until(&call(), &cancel).unwrap().n_rows(), 7);
}

/// Whether the call panics, or fails where the backend catches that.
fn fails<B: Backend, M: Memory + Clone>(engine: &mut Engine<B, M>) -> bool {
    let decode = AssertUnwindSafe(|| engine.decode(&call()).map(|logits| logits.n_rows()));
    !matches!(catch_unwind(decode), Ok(Ok(_)))
}

fn panics_leave_no_trace<B: Backend>(backend: impl Fn() -> B) {
    let (mut engine, interrupt, undisturbed) = interruptible(backend);
    let before = engine.memory().clone();
    interrupt.tell(Interruption::Panic);
    assert!(fails(&mut engine));
    assert_eq!(*engine.memory(), before);
    assert_eq!(engine.last_logits().n_rows(), 0);
    assert_eq!(engine.decode(&call()).unwrap().values(), undisturbed);
}

#[test]
fn a_panic_of_a_custom_operation_leaves_no_trace_on_candle() {
    panics_leave_no_trace(CandleBackend::cpu);
}

#[test]
fn a_panic_of_a_custom_operation_leaves_no_trace_on_cpu() {
    panics_leave_no_trace(cpu);
}

/// A memory of a third party, which panics when it is to describe a step that it has committed.
#[derive(Clone)]
struct Panicky {
    inner: Composite,
    n_calls_left: Arc<Mutex<Option<u32>>>,
    was_committed: Arc<AtomicBool>,
}

impl Memory for Panicky {
    type Slot = <Composite as Memory>::Slot;
    type Undo = <Composite as Memory>::Undo;

    fn n_seqs(&self) -> u32 {
        self.inner.n_seqs()
    }

    fn n_rows(&self) -> RowCounts {
        self.inner.n_rows()
    }

    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        self.inner.positions(seq)
    }

    fn split_policy(&self) -> SplitPolicy {
        self.inner.split_policy()
    }

    fn find_slots(&self, ubatches: Vec<UBatch>) -> Result<Plan<Self::Slot>, Refusal> {
        self.inner.find_slots(ubatches)
    }

    fn commit(&mut self, planned: &PlannedUBatch<Self::Slot>) -> Self::Undo {
        self.was_committed.store(true, Ordering::Relaxed);
        self.inner.commit(planned)
    }

    fn rollback(&mut self, undo: Self::Undo, rows: RowsWritten) {
        self.inner.rollback(undo, rows);
    }

    fn inputs(&self, planned: &PlannedUBatch<Self::Slot>, inputs: &mut MemoryInputs) {
        let mut left = self.n_calls_left.lock().unwrap_or_else(|e| e.into_inner());
        match left.as_mut() {
            Some(0) => {
                *left = None;
                panic!("a memory that panics");
            }
            Some(n) => *n -= 1,
            None => {}
        }
        self.inner.inputs(planned, inputs);
    }

    fn check(&self, edit: &Edit) -> Result<(), Refusal> {
        self.inner.check(edit)
    }

    fn apply(&mut self, edit: Edit) -> Result<Edited, Refusal> {
        let edited = self.inner.apply(edit)?;
        match edit {
            // It never is content.
            Edit::Compact => Ok(Edited {
                n_cells: 1,
                ..edited
            }),
            _ => Ok(edited),
        }
    }
}

/// A context of 2^30 tokens is an error with numbers where the backend knows what its device has,
/// and no abort where it does not.
#[test]
fn a_context_larger_than_the_machine_is_refused() {
    let model = || Arc::new(Layered::new(&LAYERS));
    let config = EngineConfig {
        n_ctx: Some(1 << 30),
        swa: SwaSize::Full,
        ..EngineConfig::default()
    };
    let weights = model().random_weights();
    let on_cpu = Engine::new(cpu(), model(), weights.clone(), &config).unwrap_err();
    let on_candle =
        Engine::new(CandleBackend::cpu(), model(), weights.clone(), &config).unwrap_err();
    for error in [on_cpu, on_candle] {
        let EngineError::Config(ConfigError::OverBudget {
            n_ctx,
            available,
            largest_n_ctx: Some(largest),
            ..
        }) = error
        else {
            panic!("{error}");
        };
        assert!(n_ctx == 1 << 30 && largest < n_ctx && available > 0);
    }
    // A backend that does not know what its device has.
    let f32_config = EngineConfig {
        n_seqs: 1,
        kv_types: KvType::F32.into(),
        ..config
    };
    match Engine::new(NullBackend, model(), weights, &f32_config) {
        // Untouched zeros take no memory.
        Ok(mut engine) => assert_eq!(engine.decode(&tokens(0, 2)).unwrap().n_rows(), 2),
        Err(error) => assert!(
            matches!(
                error,
                EngineError::Backend(BackendError::OutOfMemory { .. })
            ),
            "{error}"
        ),
    }
}

#[test]
fn a_panic_of_a_memory_between_commit_and_run_leaves_no_trace() {
    let mut undisturbed = begun(CandleBackend::cpu(), Layered::new(&LAYERS));
    let inner = undisturbed.memory().clone();
    let empty = {
        let mut empty = inner;
        empty.clear();
        empty
    };
    let logits = undisturbed.decode(&call()).unwrap().values().to_vec();
    let model = Arc::new(Layered::new(&LAYERS));
    let weights = model.random_weights();
    let n_calls_left = Arc::new(Mutex::new(None));
    let was_committed = Arc::new(AtomicBool::new(false));
    let memory = Panicky {
        inner: empty,
        n_calls_left: n_calls_left.clone(),
        was_committed: was_committed.clone(),
    };
    let backend = CandleBackend::cpu();
    let mut engine = Engine::with_memory(backend, model, weights, &config(), memory).unwrap();
    engine.decode(&tokens(3, 5)).unwrap();
    for n_calls in 0..3 {
        let before = engine.memory().inner.clone();
        was_committed.store(false, Ordering::Relaxed);
        *n_calls_left.lock().unwrap_or_else(|e| e.into_inner()) = Some(n_calls);
        assert!(fails(&mut engine));
        assert!(was_committed.load(Ordering::Relaxed));
        assert_eq!(engine.memory().inner, before, "{n_calls}");
    }
    assert_eq!(engine.decode(&call()).unwrap().values(), logits);
    let error = engine.compact().unwrap_err();
    assert!(
        matches!(error, EngineError::EndlessCompaction { n_passes: 1024 }),
        "{error}"
    );
    assert_eq!(engine.memory().positions(SeqId(0)).unwrap().len(), 12);
}
