//! [`Sim`]: a device that runs the kernels on the CPU, for tests.
//!
//! The kernels are those that GPUs run, compiled as C++; a thread is a fiber (`kernels/sim`).
//! Invariant: a launch that writes outside of the buffers it was given is an
//! error. It is slow, and shows neither speed nor data races beyond two
//! orders of threads.

use std::cell::UnsafeCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

use kv_backend::{BackendError, DeviceMemory};

use crate::device::{Argument, Device, Region};

/// Bytes before and after a buffer that no kernel may write.
const GUARD: usize = 256;
/// The poison in new buffers: NaN, where floats are read. NaN, where floats are read.
const POISON: u8 = 0xff;

#[repr(C)]
struct RawKernel {
    _opaque: [u8; 0],
}

// The functions of kernels/sim/fibers.cpp.
unsafe extern "C" {
    fn cellar_sim_find(name: *const c_char, metal: c_int) -> *const RawKernel;
    fn cellar_sim_next(kernel: *const RawKernel, metal: c_int) -> *const RawKernel;
    fn cellar_sim_name(kernel: *const RawKernel) -> *const c_char;
    fn cellar_sim_file(kernel: *const RawKernel) -> *const c_char;
    fn cellar_sim_threads(kernel: *const RawKernel) -> u32;
    fn cellar_sim_n_args(kernel: *const RawKernel) -> u32;
    fn cellar_sim_arg(kernel: *const RawKernel, i: u32) -> u32;
    fn cellar_sim_launch(
        kernel: *const RawKernel,
        x: u32,
        y: u32,
        args: *const *mut c_void,
        reverse: c_int,
    ) -> *const c_char;
}

/// In which order the threads of a block run between barriers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The first thread first.
    Forward,
    /// The last thread first.
    Reverse,
}

/// In which dialect the kernels were compiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Dialect {
    /// C++, as CUDA's with its sizes.
    #[default]
    Cpp,
    /// Metal's dialect, with its sizes: 32 KiB of shared memory, smaller tiles.
    Metal,
}

impl Dialect {
    fn number(self) -> c_int {
        c_int::from(self == Self::Metal)
    }
}

/// The simulator.
#[derive(Clone, Copy, Debug)]
pub struct Sim {
    order: Order,
    dialect: Dialect,
    cannot_record: bool,
}

impl Sim {
    /// A device whose threads run in this order.
    pub fn new(order: Order) -> Self {
        Self {
            order,
            dialect: Dialect::Cpp,
            cannot_record: false,
        }
    }

    /// The same, where no memory is left for recordings.
    pub fn without_recordings(self) -> Self {
        Self {
            cannot_record: true,
            ..self
        }
    }

    /// The same with kernels of another dialect.
    pub fn with_dialect(self, dialect: Dialect) -> Self {
        Self { dialect, ..self }
    }

    /// All kernels as they are compiled in a dialect, a line each as in `kernels/TABLE`: name,
    /// file, threads, buffers, bytes of settings; those of `sim/` left out.
    ///
    /// # Errors
    /// If a kernel's settings are not its one last argument, as devices expect them.
    pub fn kernel_table(dialect: Dialect) -> Result<Vec<String>, BackendError> {
        let mut lines = Vec::new();
        for kernel in all(dialect) {
            // SAFETY: a kernel of the list, whose file is a literal.
            let path = unsafe { CStr::from_ptr(cellar_sim_file(kernel.0)) };
            let path = path.to_string_lossy();
            if path.contains("/sim/") {
                continue;
            }
            let file = Path::new(&*path).file_stem().unwrap_or_default();
            // SAFETY: a kernel of the list.
            let (n_threads, n) =
                unsafe { (cellar_sim_threads(kernel.0), cellar_sim_n_args(kernel.0)) };
            // SAFETY: below the number of arguments.
            let sizes: Vec<u32> = (0..n)
                .map(|i| unsafe { cellar_sim_arg(kernel.0, i) })
                .collect();
            let name = kernel.name();
            let settings = match sizes.split_last() {
                Some((&settings, buffers)) if settings > 0 && buffers.iter().all(|&b| b == 0) => {
                    settings
                }
                _ => {
                    return Err(failure(format!(
                        "{name} has its settings elsewhere: {sizes:?}"
                    )));
                }
            };
            let (file, n_buffers) = (file.to_string_lossy(), n - 1);
            lines.push(format!("{name} {file} {n_threads} {n_buffers} {settings}"));
        }
        lines.sort();
        Ok(lines)
    }
}

/// All kernels.
fn all(dialect: Dialect) -> impl Iterator<Item = SimKernel> {
    let next = move |kernel: *const RawKernel| {
        // SAFETY: null or a kernel of the list, which is never changed.
        let next = unsafe { cellar_sim_next(kernel, dialect.number()) };
        (!next.is_null()).then_some(next)
    };
    let first = next(std::ptr::null());
    std::iter::successors(first, move |&kernel| next(kernel)).map(SimKernel)
}

/// Bytes between two guards.
pub struct SimBuffer {
    /// In 16-byte units, so that they are aligned.
    units: UnsafeCell<Vec<u128>>,
    len: usize,
}

// SAFETY: the bytes are changed by `Device`'s methods alone, whose callers order them: a buffer is
// written and launched on by one thread at a time, as on a device's queue.
unsafe impl Sync for SimBuffer {}

impl std::fmt::Debug for SimBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimBuffer({} bytes)", self.len)
    }
}

impl SimBuffer {
    fn base(&self) -> *mut u8 {
        // SAFETY: only the pointer is read; the vector is never changed in length.
        unsafe { (*self.units.get()).as_mut_ptr().cast() }
    }

    fn n_bytes(&self) -> usize {
        self.len.div_ceil(16) * 16 + 2 * GUARD
    }

    /// The `len` bytes from `at` on.
    fn bytes(&self, at: usize, len: usize) -> Result<*mut u8, BackendError> {
        if at.checked_add(len).is_some_and(|end| end <= self.len) {
            // SAFETY: inside of the allocation, see `n_bytes`.
            Ok(unsafe { self.base().add(GUARD + at) })
        } else {
            Err(failure(format!(
                "bytes {at}..{} of a buffer of {}",
                at + len,
                self.len
            )))
        }
    }

    fn is_intact(&self) -> bool {
        // SAFETY: all bytes of the allocation; nothing writes meanwhile (one queue).
        let all = unsafe { std::slice::from_raw_parts(self.base(), self.n_bytes()) };
        let (before, rest) = all.split_at(GUARD);
        let after = &rest[self.len..];
        before.iter().chain(after).all(|&b| b == POISON)
    }
}

/// A kernel of the simulator.
#[derive(Clone, Copy, Debug)]
pub struct SimKernel(*const RawKernel);

// SAFETY: kernels are constants.
unsafe impl Send for SimKernel {}
// SAFETY: as above.
unsafe impl Sync for SimKernel {}

/// Launches with copies of their arguments.
#[derive(Debug, Default)]
pub struct SimRecording(Vec<Launch>);

#[derive(Debug)]
struct Launch {
    kernel: SimKernel,
    grid: [u32; 2],
    arguments: Vec<LaunchArgument>,
}

/// An argument: a buffer's address, or settings.
#[derive(Debug)]
enum LaunchArgument {
    Address(*mut u8),
    Settings(Vec<u32>),
}

// SAFETY: the addresses are those of buffers that outlive a recording, as `Device::record` says.
unsafe impl Send for LaunchArgument {}

thread_local! {
    /// The recording under way on this thread.
    static RECORDING: std::cell::RefCell<Option<SimRecording>> =
        const { std::cell::RefCell::new(None) };
}

/// Settings, aligned.
fn words(bytes: &[u8]) -> Vec<u32> {
    let words = bytes.chunks_exact(4);
    words.map(bytemuck::pod_read_unaligned).collect()
}

fn failure(reason: String) -> BackendError {
    BackendError::Device {
        backend: "sim",
        reason,
    }
}

impl SimKernel {
    fn name(self) -> String {
        // SAFETY: a kernel of the list.
        let name = unsafe { CStr::from_ptr(cellar_sim_name(self.0)) };
        name.to_string_lossy().into_owned()
    }

    /// Checks number and kind of the arguments.
    fn check(self, arguments: &[Argument<'_, Sim>]) -> Result<(), BackendError> {
        // SAFETY: a kernel of the list.
        let n = unsafe { cellar_sim_n_args(self.0) };
        let name = self.name();
        if n as usize != arguments.len() {
            let got = arguments.len();
            return Err(failure(format!("{name} takes {n} arguments, got {got}")));
        }
        for (i, argument) in (0..n).zip(arguments) {
            // SAFETY: below the number of arguments.
            let wanted = unsafe { cellar_sim_arg(self.0, i) } as usize;
            let got = match argument {
                Argument::Buffer(_) => 0,
                Argument::Settings(bytes) => bytes.len(),
            };
            if wanted != got {
                return Err(failure(format!(
                    "argument {i} of {name}: {wanted} bytes of settings (0: a buffer), got {got}"
                )));
            }
        }
        Ok(())
    }
}

impl Launch {
    fn run(&self, order: Order) -> Result<(), BackendError> {
        let mut addresses: Vec<*mut u8> = Vec::new();
        for given in &self.arguments {
            addresses.push(match given {
                LaunchArgument::Address(at) => *at,
                LaunchArgument::Settings(_) => std::ptr::null_mut(),
            });
        }
        let values = self.arguments.iter().zip(&mut addresses);
        let pointers: Vec<*mut c_void> = values
            .map(|(given, address)| match given {
                LaunchArgument::Address(_) => std::ptr::from_mut(address).cast(),
                LaunchArgument::Settings(words) => words.as_ptr().cast_mut().cast(),
            })
            .collect();
        let reverse = c_int::from(order == Order::Reverse);
        let [x, y] = self.grid;
        // SAFETY: number, kinds and sizes of the arguments were checked; addresses are of buffers
        // that are alive. What a kernel does with them is what this device is for: tests find out.
        let error = unsafe { cellar_sim_launch(self.kernel.0, x, y, pointers.as_ptr(), reverse) };
        if error.is_null() {
            return Ok(());
        }
        // SAFETY: a literal.
        let error = unsafe { CStr::from_ptr(error) }.to_string_lossy();
        Err(failure(format!("{}: {error}", self.kernel.name())))
    }
}

impl Device for Sim {
    type Buffer = SimBuffer;
    type Kernel = SimKernel;
    type Recording = SimRecording;

    fn name(&self) -> &'static str {
        "sim"
    }

    fn description(&self) -> String {
        let Self { order, dialect, .. } = self;
        format!("simulator, threads {order:?}, {dialect:?}").to_lowercase()
    }

    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    fn allocate(&self, bytes: usize, what: &str) -> Result<SimBuffer, BackendError> {
        let n_units = bytes.div_ceil(16) + 2 * GUARD / 16;
        let mut units: Vec<u128> = Vec::new();
        units
            .try_reserve_exact(n_units)
            .map_err(|_| BackendError::OutOfMemory {
                backend: "sim",
                wanted: bytes,
                what: what.to_owned(),
            })?;
        units.resize(n_units, 0);
        let all: &mut [u8] = bytemuck::cast_slice_mut(&mut units);
        all[..GUARD].fill(POISON);
        all[GUARD + bytes..].fill(POISON);
        Ok(SimBuffer {
            units: UnsafeCell::new(units),
            len: bytes,
        })
    }

    fn write(&self, to: Region<'_, Self>, bytes: &[u8]) -> Result<(), BackendError> {
        let at = to.buffer.bytes(to.at, bytes.len())?;
        // SAFETY: in bounds; the host's bytes are no buffer's.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), at, bytes.len()) };
        Ok(())
    }

    fn read(&self, from: Region<'_, Self>, bytes: &mut [u8]) -> Result<(), BackendError> {
        let at = from.buffer.bytes(from.at, bytes.len())?;
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(at, bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }

    fn copy(
        &self,
        from: Region<'_, Self>,
        to: Region<'_, Self>,
        len: usize,
    ) -> Result<(), BackendError> {
        let from = from.buffer.bytes(from.at, len)?;
        let to = to.buffer.bytes(to.at, len)?;
        // SAFETY: both in bounds.
        unsafe { std::ptr::copy(from, to, len) };
        Ok(())
    }

    fn kernel(&self, name: &str) -> Result<SimKernel, BackendError> {
        let none = || failure(format!("there is no kernel '{name}'"));
        let text = CString::new(name).map_err(|_| none())?;
        // SAFETY: a string that ends with 0.
        let kernel = unsafe { cellar_sim_find(text.as_ptr(), self.dialect.number()) };
        if kernel.is_null() {
            Err(none())
        } else {
            Ok(SimKernel(kernel))
        }
    }

    fn launch(
        &self,
        kernel: &SimKernel,
        grid: [u32; 2],
        arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError> {
        kernel.check(arguments)?;
        let given = arguments.iter().map(|argument| {
            Ok(match argument {
                Argument::Buffer(region) => {
                    LaunchArgument::Address(region.buffer.bytes(region.at, 0)?)
                }
                Argument::Settings(bytes) => LaunchArgument::Settings(words(bytes)),
            })
        });
        let launch = Launch {
            kernel: *kernel,
            grid,
            arguments: given.collect::<Result<_, BackendError>>()?,
        };
        let recorded = RECORDING.with_borrow_mut(|recording| match recording {
            Some(recording) => {
                recording.0.push(launch);
                None
            }
            None => Some(launch),
        });
        let Some(launch) = recorded else {
            return Ok(());
        };
        launch.run(self.order)?;
        for (i, argument) in arguments.iter().enumerate() {
            if let Argument::Buffer(region) = argument
                && !region.buffer.is_intact()
            {
                let name = kernel.name();
                return Err(failure(format!("{name} wrote outside of its argument {i}")));
            }
        }
        Ok(())
    }

    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<SimRecording, BackendError> {
        RECORDING.with_borrow_mut(|recording| *recording = Some(SimRecording::default()));
        let outcome = launches();
        let recording = RECORDING.with_borrow_mut(Option::take);
        if self.cannot_record {
            Err(failure("no memory for a recording".to_owned()))
        } else {
            outcome.map(|()| recording.unwrap_or_default())
        }
    }

    fn replay(&self, recording: &SimRecording) -> Result<(), BackendError> {
        recording
            .0
            .iter()
            .try_for_each(|launch| launch.run(self.order))
    }

    fn wait(&self) -> Result<(), BackendError> {
        Ok(())
    }
}
