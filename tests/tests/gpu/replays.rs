//! Recorded launches give the bits that the same launches give one by one.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_backend::{Backend, BackendError, DeviceMemory};
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};
use kv_gpu::{Argument, Device, GpuBackend, GpuConfig, Region};
use model_tests::{Case, Runner, Setup};

/// A device that counts what it replays.
#[derive(Debug)]
pub(crate) struct CountingDevice<D> {
    inner: D,
    n_replays: Arc<AtomicUsize>,
}

fn inner<D: Device>(region: Region<'_, CountingDevice<D>>) -> Region<'_, D> {
    Region {
        buffer: region.buffer,
        at: region.at,
    }
}

impl<D: Device> Device for CountingDevice<D> {
    type Buffer = D::Buffer;
    type Kernel = D::Kernel;
    type Recording = D::Recording;

    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn description(&self) -> String {
        self.inner.description()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        self.inner.memory()
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<D::Buffer, BackendError> {
        self.inner.allocate(bytes, what)
    }

    fn write(&self, to: Region<'_, Self>, bytes: &[u8]) -> Result<(), BackendError> {
        self.inner.write(inner(to), bytes)
    }

    fn read(&self, from: Region<'_, Self>, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.inner.read(inner(from), bytes)
    }

    fn copy(
        &self,
        from: Region<'_, Self>,
        to: Region<'_, Self>,
        len: usize,
    ) -> Result<(), BackendError> {
        self.inner.copy(inner(from), inner(to), len)
    }

    fn kernel(&self, name: &str) -> Result<D::Kernel, BackendError> {
        self.inner.kernel(name)
    }

    fn launch(
        &self,
        kernel: &D::Kernel,
        grid: [u32; 2],
        arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError> {
        let arguments = arguments.iter().map(|argument| match argument {
            Argument::Buffer(region) => Argument::Buffer(inner(*region)),
            Argument::Settings(bytes) => Argument::Settings(bytes),
        });
        let arguments: Vec<Argument<'_, D>> = arguments.collect();
        self.inner.launch(kernel, grid, &arguments)
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<D::Recording, BackendError> {
        self.inner.record(launches)
    }

    fn replay(&self, recording: &D::Recording) -> Result<(), BackendError> {
        self.n_replays.fetch_add(1, Ordering::Relaxed);
        self.inner.replay(recording)
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.inner.wait()
    }
}

/// Tokens that are fed one by one, and as many again in pairs.
const N_TOKENS: usize = 6;

/// A model that keeps its programs, and so replays them, gives the same bits as one that compiles
/// them anew for every batch.
pub(crate) fn replays_change_no_bit<D: Device>(device: impl Fn() -> D, case: &Case) {
    replays_change_no_bit_of(device, |backend| backend, case);
}

/// The same on a backend around the device's.
pub(crate) fn replays_change_no_bit_of<D: Device, B: Backend>(
    device: impl Fn() -> D,
    around: impl Fn(GpuBackend<CountingDevice<D>>) -> B,
    case: &Case,
) {
    let runner = || {
        let n_replays = Arc::new(AtomicUsize::new(0));
        let device = CountingDevice {
            inner: device(),
            n_replays: Arc::clone(&n_replays),
        };
        let backend = GpuBackend::new(device, GpuConfig::default());
        (
            Runner::new(around(backend), case, &Setup::default()),
            n_replays,
        )
    };
    let (mut replaying, n_replays) = runner();
    let (mut compiling, n_others) = runner();
    let tokens = &case.reference().prompts()[0][..2 * N_TOKENS];
    let batches = (0..2 * N_TOKENS).map(|at| {
        let mut batch = Batch::new();
        for seq in 0..1 + at / N_TOKENS {
            let entry = batch.push_token(TokenId(tokens[at]));
            entry.in_sequence(SeqId(seq as u32)).with_output();
        }
        batch
    });
    for (at, batch) in batches.enumerate() {
        let got = replaying.decode(&batch, 16);
        compiling.forget_programs();
        let bits = |rows: Vec<Vec<f32>>| -> Vec<u32> {
            rows.concat().into_iter().map(f32::to_bits).collect()
        };
        let (got, wanted) = (bits(got), bits(compiling.decode(&batch, 16)));
        assert!(got == wanted, "{}, batch {at}: other bits", case.name);
    }
    assert_eq!(n_others.load(Ordering::Relaxed), 0);
    let n_replays = n_replays.load(Ordering::Relaxed);
    assert!(n_replays >= N_TOKENS, "{n_replays} replays");
}
