//! One call of the backend fails, the first, the second, … until none is left: each request ends
//! with its own text or with that error, and the same session serves the next ones.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cellar_engine::serve::{ServiceConfig, ServiceError, TextRequest, TextStream};
use cellar_engine::session::{Activity, Session};
use cellar_engine::{Engine, EngineConfig};
use kv_backend::{Backend, BackendError, GraphInputs, GraphOutputs, OnProgress, RowSpan};
use kv_core::memory::{RowCopy, RowShift};
use kv_cpu::{CpuBackend, CpuConfig};
use kv_graph::Graph;
use kv_graph::rope::LayerRope;
use kv_graph::weights::WeightSource;
use kv_rows::RowLayout;

use super::models::{Case, Generated};

const N_CTX: u32 = 96;

/// Calls until one fails; far away once it has.
#[derive(Clone, Debug)]
struct Fuse(Arc<AtomicUsize>);

impl Fuse {
    fn new(n_calls: usize) -> Self {
        Self(Arc::new(AtomicUsize::new(n_calls)))
    }

    fn has_blown(&self) -> bool {
        self.0.load(Ordering::Relaxed) > usize::MAX / 2
    }

    /// One call less.
    fn burn(&self) -> Result<(), BackendError> {
        match self.0.fetch_sub(1, Ordering::Relaxed) {
            0 => Err(BackendError::Device {
                backend: "fused",
                reason: "as told".into(),
            }),
            _ => Ok(()),
        }
    }
}

/// The CPU backend, of which one call fails before it does anything.
#[derive(Debug)]
struct FusedBackend {
    inner: CpuBackend,
    fuse: Fuse,
}

impl Backend for FusedBackend {
    type Rows = <CpuBackend as Backend>::Rows;
    type Weights = <CpuBackend as Backend>::Weights;
    type Program = <CpuBackend as Backend>::Program;

    kv_backend::delegate!(info, memory, prefers_candidates, program_capacities);

    fn allocate(&self, layout: &RowLayout) -> Result<Self::Rows, BackendError> {
        self.fuse.burn()?;
        self.inner.allocate(layout)
    }

    fn load_weights(
        &self,
        source: Arc<dyn WeightSource>,
        on_progress: OnProgress,
    ) -> Result<Self::Weights, BackendError> {
        self.fuse.burn()?;
        self.inner.load_weights(source, on_progress)
    }

    fn compile(
        &self,
        graph: &Graph,
        weights: &Self::Weights,
        layout: &RowLayout,
    ) -> Result<Self::Program, BackendError> {
        self.fuse.burn()?;
        self.inner.compile(graph, weights, layout)
    }

    fn run(
        &self,
        program: &mut Self::Program,
        rows: &mut Self::Rows,
        inputs: &GraphInputs<'_>,
        outputs: &mut GraphOutputs,
    ) -> Result<(), BackendError> {
        self.fuse.burn()?;
        self.inner.run(program, rows, inputs, outputs)
    }

    fn finish(&self, rows: &mut Self::Rows) -> Result<(), BackendError> {
        self.fuse.burn()?;
        self.inner.finish(rows)
    }

    fn read_rows(
        &self,
        rows: &Self::Rows,
        span: RowSpan,
        out: &mut [u8],
    ) -> Result<(), BackendError> {
        self.fuse.burn()?;
        self.inner.read_rows(rows, span, out)
    }

    fn write_rows(
        &self,
        rows: &mut Self::Rows,
        span: RowSpan,
        bytes: &[u8],
    ) -> Result<(), BackendError> {
        self.fuse.burn()?;
        self.inner.write_rows(rows, span, bytes)
    }

    fn copy_rows(&self, rows: &mut Self::Rows, copies: &[RowCopy]) -> Result<(), BackendError> {
        self.fuse.burn()?;
        self.inner.copy_rows(rows, copies)
    }

    fn shift_rows(
        &self,
        rows: &mut Self::Rows,
        shifts: &[RowShift],
        ropes: &[LayerRope],
    ) -> Result<(), BackendError> {
        self.fuse.burn()?;
        self.inner.shift_rows(rows, shifts, ropes)
    }
}

fn session(case: &Case, fuse: Fuse) -> Result<Session<FusedBackend>, ServiceError> {
    let cpu = CpuConfig {
        n_threads: NonZeroUsize::new(1),
        ..CpuConfig::default()
    };
    let inner = CpuBackend::new(cpu).unwrap();
    let config = EngineConfig {
        n_ctx: Some(N_CTX),
        n_seqs: 5,
        n_active: Some(3),
        n_ubatch: 16,
        kv_types: case.kv_types.clone(),
        ..EngineConfig::default()
    };
    let (model, weights) = (case.model.clone(), case.weights.clone());
    let engine = Engine::new(FusedBackend { inner, fuse }, model, weights, &config)?;
    let config = ServiceConfig {
        // Rows are saved and come back.
        preempt_every: NonZeroU32::new(4),
        headroom: 1,
        swap_bytes: 1 << 22,
        ..ServiceConfig::default()
    };
    Session::new(engine, &case.tokenizer, &config)
}

fn requests(case: &Case) -> [TextRequest; 4] {
    let short = |number| {
        let mut request = case.request(number);
        request.options.n_predict = Some(5);
        request
    };
    // The last begins like the first, of which the memory has kept the rows.
    [0, 1, 6, 0].map(short)
}

/// Serves all requests, and one with two texts; none waits for ever.
fn serve(session: &mut Session<FusedBackend>, case: &Case) -> Vec<Result<Generated, ServiceError>> {
    let [a, b, c, last] = requests(case);
    let [twice, ..] = requests(case);
    let mut streams: Vec<TextStream> = Vec::new();
    for request in [a, b, c] {
        streams.push(session.submit(request).unwrap());
    }
    let two = NonZeroU32::new(2).unwrap();
    streams.extend(session.submit_texts(twice, two, Vec::new).unwrap());
    while session.step() == Activity::Busy {}
    streams.push(session.submit(last).unwrap());
    while session.step() == Activity::Busy {}
    let ended = streams.into_iter().map(|stream| {
        assert!(stream.has_ended(), "a request waits for ever");
        stream.finish().map(Generated::from)
    });
    ended.collect()
}

fn check(case: &Case) {
    let alone = requests(case).map(|request| case.alone(&request, N_CTX));
    let mut alone = alone.to_vec();
    // The texts of the request with two: the first one's, twice, as it is greedy.
    let last = alone.pop().unwrap();
    alone.extend([alone[0].clone(), alone[0].clone(), last]);
    let (mut n_calls, mut n_refused, mut n_failed) = (0, 0, 0);
    loop {
        let fuse = Fuse::new(n_calls);
        match session(case, fuse.clone()) {
            Err(error) => {
                assert!(error.to_string().contains("as told"), "{error}");
                n_refused += 1;
            }
            Ok(mut session) => {
                let ended = serve(&mut session, case);
                for (number, (ended, alone)) in ended.iter().zip(&alone).enumerate() {
                    match ended {
                        Ok(text) => assert_eq!(text, alone, "call {n_calls}, text {number}"),
                        Err(error) => {
                            assert!(error.to_string().contains("as told"), "{error}");
                            n_failed += 1;
                        }
                    }
                }
                if !fuse.has_blown() {
                    assert!(ended.iter().all(Result::is_ok));
                    break;
                }
                // Nothing of the failure is left.
                for (text, alone) in serve(&mut session, case).iter().zip(&alone) {
                    assert_eq!(text.as_ref().unwrap(), alone, "behind call {n_calls}");
                }
                assert_eq!(session.into_engine().memory().n_used(), 0);
            }
        }
        n_calls += 1;
    }
    println!("{n_calls} calls failed, {n_refused} of them while the engine was made");
    assert!(
        n_refused >= 2 && n_failed > 0 && n_calls > 60,
        "{n_calls} calls"
    );
}

for_each_memory!(check);
