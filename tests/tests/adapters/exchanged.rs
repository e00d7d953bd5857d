//! Adapters that an engine gets and loses while it computes: it is then what one is that was loaded
//! with them, or without any.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cellar_engine::{Engine, EngineConfig, EngineError, SaveOptions};
use kv_backend::state::SavedState;
use kv_backend::{Backend, BackendError};
use kv_core::{
    SeqId, TokenId,
    batch::Batch,
    memory::{RestoreInto, Seqs},
};
use kv_cpu::CpuBackend;
use kv_gpu::sim::{Order, Sim};
use kv_gpu::{GpuBackend, GpuConfig, Precision};
use kv_graph::Graph;
use kv_rows::RowLayout;
use model_core::adapters::{AdapterOptions, AdapterSpec, Adapters, ControlVector, LayerRange};
use model_core::model_file::OpenModel;
use model_tests::{candle, cpu};

use super::{Files, engine, logits};

const MODEL: &str = "llama_gqa_untied";
/// Two sets, of which the second has another stack.
const SETS: [&[(&str, f32)]; 2] = [
    &[("all_linear", 1.0)],
    &[("patterns", -0.5), ("ends", 0.25), ("all_linear", 0.5)],
];
const PROMPT: [u32; 9] = [40, 41, 42, 7, 300, 12, 5, 99, 260];

fn adapters(files: &Files, file: &OpenModel, set: &[(&str, f32)]) -> Arc<Adapters> {
    let specs = set.iter().map(|&(name, scale)| AdapterSpec {
        path: files.adapter(name),
        name: None,
        scale,
    });
    let options = AdapterOptions {
        adapters: specs.collect(),
        ..AdapterOptions::default()
    };
    Arc::new(options.open(file, &files.registry).unwrap().unwrap())
}

fn check<B: Backend>(backend: impl Fn() -> B) {
    let files = Files::new();
    let file = files.open(&files.model(MODEL));
    let mut changing = engine(backend(), &file, EngineConfig::default());
    let bare = logits(&mut changing, &PROMPT);
    for set in [0, 1, 0] {
        let loaded = files.open_with(&files.path(MODEL), SETS[set]);
        let mut loaded = engine(backend(), &loaded, EngineConfig::default());
        let wanted = logits(&mut loaded, &PROMPT);
        let set = adapters(&files, &file, SETS[set]);
        changing.exchange_adapters(Some(set)).unwrap();
        assert_eq!(logits(&mut changing, &PROMPT), wanted);
        assert_ne!(wanted, bare);
        let refused = loaded.exchange_adapters(None).unwrap_err();
        assert!(matches!(refused, EngineError::LoadedWithAdapters));
    }
    changing.set_default_scales(Arc::from([0.0])).unwrap();
    assert_eq!(logits(&mut changing, &PROMPT), bare, "a scale of 0");
    assert!(changing.set_default_scales(Arc::from([1.0, 1.0])).is_err());
    changing.exchange_adapters(None).unwrap();
    assert_eq!(logits(&mut changing, &PROMPT), bare);
    assert!(changing.set_default_scales(Arc::from([1.0])).is_err());
}

#[test]
fn an_engine_with_other_adapters_is_as_if_loaded_with_them() {
    check(cpu);
    check(candle);
    check(|| {
        let precision = Precision::Fast;
        GpuBackend::new(Sim::new(Order::Forward), GpuConfig { precision })
    });
}

fn state<B: Backend>(engine: &mut Engine<B>) -> Vec<u8> {
    engine.clear();
    let prompt = Batch::prompt(SeqId(0), PROMPT.map(TokenId));
    engine.decode(&prompt).unwrap();
    let options = SaveOptions {
        seqs: Seqs::All,
        tokens: &[],
        kv_type: None,
        state_type: None,
    };
    let mut bytes = Vec::new();
    engine.save_state(&options, &mut bytes).unwrap();
    bytes
}

/// What a state was computed with is what it is restored into.
#[test]
fn states_tell_of_control_vectors_and_adapters() {
    let files = Files::new();
    let file = files.open(&files.model(MODEL));
    let mut engine = engine(cpu(), &file, EngineConfig::default());
    let dim = file.model().embedding_dim();
    let layers = LayerRange { first: 1, last: 1 };
    let rows: Vec<f32> = (0..dim).map(|at| (at as f32).sin() * 3.0).collect();
    let control = ControlVector::from_rows(&rows, dim, layers, &**file.model()).unwrap();
    let control = Adapters::new(&file, Vec::new(), Some(control)).unwrap();
    let control = Arc::new(control);
    let sets = [
        None,
        Some(control),
        Some(adapters(&files, &file, SETS[0])),
        Some(adapters(&files, &file, SETS[1])),
    ];
    let states = sets.clone().map(|set| {
        engine.exchange_adapters(set).unwrap();
        state(&mut engine)
    });
    for (here, set) in sets.into_iter().enumerate() {
        engine.exchange_adapters(set).unwrap();
        for (of, bytes) in states.iter().enumerate() {
            let saved = SavedState::parse(bytes).unwrap();
            let restored = engine.restore_state(&saved, RestoreInto::All);
            assert_eq!(restored.is_ok(), here == of, "state {of} into {here}");
        }
    }
    let values = [f32::NAN; 4];
    assert!(ControlVector::from_rows(&values, 4, layers, &**file.model()).is_err());
    assert!(ControlVector::from_rows(&vec![f32::NAN; dim], dim, layers, &**file.model()).is_err());
}

/// Compiles nothing while it is told so.
struct FailingBackend {
    inner: CpuBackend,
    fails: Arc<AtomicBool>,
}

impl Backend for FailingBackend {
    type Rows = <CpuBackend as Backend>::Rows;
    type Weights = <CpuBackend as Backend>::Weights;
    type Program = <CpuBackend as Backend>::Program;

    kv_backend::delegate!(info, allocate, load_weights, forget_weights);
    kv_backend::delegate!(run, read_rows, write_rows);

    fn compile(
        &self,
        graph: &Graph,
        weights: &Self::Weights,
        layout: &RowLayout,
    ) -> Result<Self::Program, BackendError> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(BackendError::Cancelled);
        }
        self.inner.compile(graph, weights, layout)
    }
}

#[test]
fn an_exchange_that_fails_leaves_the_adapters() {
    let files = Files::new();
    let file = files.open(&files.model(MODEL));
    let fails = Arc::new(AtomicBool::new(false));
    let backend = FailingBackend {
        inner: cpu(),
        fails: Arc::clone(&fails),
    };
    let mut engine = engine(backend, &file, EngineConfig::default());
    let [one, other] = SETS.map(|set| adapters(&files, &file, set));
    engine.exchange_adapters(Some(one)).unwrap();
    let before = logits(&mut engine, &PROMPT);
    let saved = state(&mut engine);
    for adapters in [Some(other), None] {
        fails.store(true, Ordering::Relaxed);
        assert!(engine.exchange_adapters(adapters).is_err());
        fails.store(false, Ordering::Relaxed);
        assert_eq!(logits(&mut engine, &PROMPT), before);
        let saved = SavedState::parse(&saved).unwrap();
        engine.restore_state(&saved, RestoreInto::All).unwrap();
    }
}
