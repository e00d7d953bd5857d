//! What a driver must not do while it records: load a kernel. A driver that loads kernels when they
//! are first launched does it outside of recordings, since programs record what has run before.
#![allow(clippy::unwrap_used)]

use std::collections::HashSet;
use std::sync::{Arc, Mutex};

use kv_backend::{BackendError, DeviceMemory};
use kv_gpu::sim::{Order, Sim};
use kv_gpu::{Argument, Device, GpuBackend, GpuConfig, Precision, Region};
use kv_rows::KvType;

use crate::bandwidth::{Sequences, attention};

/// The calls of a device.
#[derive(Debug, Default)]
struct Log {
    is_recording: bool,
    loaded: HashSet<String>,
    n_recordings: usize,
    n_replays: usize,
    /// Kernels that were recorded before they ran.
    unloaded: Vec<String>,
}

/// The simulator as a driver that loads a kernel at its first launch.
#[derive(Debug)]
struct Lazy {
    sim: Sim,
    log: Arc<Mutex<Log>>,
}

/// A kernel with its name.
#[derive(Debug)]
struct NamedKernel {
    name: String,
    kernel: <Sim as Device>::Kernel,
}

fn inner<'a>(region: &Region<'a, Lazy>) -> Region<'a, Sim> {
    Region {
        buffer: region.buffer,
        at: region.at,
    }
}

impl Device for Lazy {
    type Buffer = <Sim as Device>::Buffer;
    type Kernel = NamedKernel;
    type Recording = <Sim as Device>::Recording;

    fn name(&self) -> &'static str {
        self.sim.name()
    }

    fn description(&self) -> String {
        self.sim.description()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        self.sim.memory()
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<Self::Buffer, BackendError> {
        self.sim.allocate(bytes, what)
    }

    fn write(&self, to: Region<'_, Self>, bytes: &[u8]) -> Result<(), BackendError> {
        self.sim.write(inner(&to), bytes)
    }

    fn read(&self, from: Region<'_, Self>, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.sim.read(inner(&from), bytes)
    }

    fn copy(
        &self,
        from: Region<'_, Self>,
        to: Region<'_, Self>,
        len: usize,
    ) -> Result<(), BackendError> {
        self.sim.copy(inner(&from), inner(&to), len)
    }

    fn kernel(&self, name: &str) -> Result<NamedKernel, BackendError> {
        let kernel = self.sim.kernel(name)?;
        Ok(NamedKernel {
            name: name.to_owned(),
            kernel,
        })
    }

    fn launch(
        &self,
        kernel: &NamedKernel,
        grid: [u32; 2],
        arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError> {
        let mut log = self.log.lock().unwrap();
        if !log.is_recording {
            log.loaded.insert(kernel.name.clone());
        } else if !log.loaded.contains(&kernel.name) {
            log.unloaded.push(kernel.name.clone());
        }
        drop(log);
        let arguments: Vec<_> = arguments
            .iter()
            .map(|argument| match argument {
                Argument::Buffer(region) => Argument::Buffer(inner(region)),
                Argument::Settings(bytes) => Argument::Settings(bytes),
            })
            .collect();
        self.sim.launch(&kernel.kernel, grid, &arguments)
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Self::Recording, BackendError> {
        self.log.lock().unwrap().is_recording = true;
        let recording = self.sim.record(launches);
        let mut log = self.log.lock().unwrap();
        log.is_recording = false;
        log.n_recordings += 1;
        recording
    }

    fn replay(&self, recording: &Self::Recording) -> Result<(), BackendError> {
        self.log.lock().unwrap().n_replays += 1;
        self.sim.replay(recording)
    }

    fn wait(&self) -> Result<(), BackendError> {
        self.sim.wait()
    }
}

#[test]
fn kernels_run_before_they_are_recorded() {
    let log = Arc::<Mutex<Log>>::default();
    let device = Lazy {
        sim: Sim::new(Order::Forward),
        log: Arc::clone(&log),
    };
    let config = GpuConfig {
        precision: Precision::Fast,
    };
    let sequences = Sequences {
        n: 2,
        depth: 3,
        n_layers: 1,
    };
    attention(&GpuBackend::new(device, config), KvType::F16, sequences);
    let log = log.lock().unwrap();
    assert!(log.unloaded.is_empty(), "{:?}", log.unloaded);
    // Else nothing was seen.
    assert!(log.loaded.contains("attend_group_128"), "{:?}", log.loaded);
    assert!(log.n_recordings >= 2 && log.n_replays > log.n_recordings);
}
