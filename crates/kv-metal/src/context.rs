//! [`Context`]: a GPU that is in use, and which GPUs there are.
//!
//! Invariant: the GPU shares the machine's memory, so that every buffer has an address on the host.

use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_backend::{BackendError, DeviceMemory};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::ProtocolObject;
use objc2_foundation::NSArray;
use objc2_metal::{MTLCopyAllDevices, MTLDevice, MTLGPUFamily};

use crate::info::{MetalDeviceInfo, unavailable};
use crate::queue::Queue;

type RawDevice = ProtocolObject<dyn MTLDevice>;

/// A GPU that is in use.
#[derive(Debug)]
pub(crate) struct Context {
    /// The GPU.
    pub(crate) raw: Retained<RawDevice>,
    ordinal: u32,
    queue: Mutex<Queue>,
}

impl Context {
    /// Opens a GPU.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with the reason.
    pub(crate) fn open(ordinal: u32) -> Result<Self, BackendError> {
        autoreleasepool(|_| {
            let all = all();
            let n = n_devices(&all)?;
            if ordinal >= n {
                let reason = format!("there is no GPU {ordinal}, only {n}, counted from 0");
                return Err(unavailable(reason));
            }
            let raw = all.objectAtIndex(ordinal as usize);
            check(&raw)?;
            let queue = Queue::new(&raw)
                .ok_or_else(|| unavailable(format!("{} gives no command queue", name(&raw))))?;
            Ok(Self {
                raw,
                ordinal,
                queue: Mutex::new(queue),
            })
        })
    }

    /// The work under way. A holder of the lock that panicked leaves what it encoded, at worst.
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The GPU's name, for people.
    pub(crate) fn name(&self) -> String {
        name(&self.raw)
    }

    /// The memory that Metal recommends to use at most, and the rest of it.
    pub(crate) fn memory(&self) -> DeviceMemory {
        let total = self.raw.recommendedMaxWorkingSetSize();
        let used = self.raw.currentAllocatedSize() as u64;
        DeviceMemory {
            total,
            free: total.saturating_sub(used),
        }
    }

    pub(crate) fn describe(&self) -> MetalDeviceInfo {
        MetalDeviceInfo {
            ordinal: self.ordinal,
            name: self.name(),
            memory: self.memory(),
        }
    }
}

/// The GPUs of this machine that Metal shows; of those that cannot be used, the reason.
///
/// # Errors
/// [`BackendError::Unavailable`] with the reason why there is none.
pub fn devices() -> Result<Vec<Result<MetalDeviceInfo, BackendError>>, BackendError> {
    let n = n_gpus()?;
    Ok((0..n).map(|i| Ok(Context::open(i)?.describe())).collect())
}

/// True if this machine has a GPU that Metal shows, be it that it cannot be used here.
pub fn is_gpu_present() -> bool {
    n_gpus().is_ok()
}

/// The number of GPUs that Metal shows: at least one.
///
/// # Errors
/// [`BackendError::Unavailable`] where it shows none.
pub(crate) fn n_gpus() -> Result<u32, BackendError> {
    autoreleasepool(|_| n_devices(&all()))
}

fn all() -> Retained<NSArray<RawDevice>> {
    MTLCopyAllDevices()
}

fn n_devices(all: &NSArray<RawDevice>) -> Result<u32, BackendError> {
    match u32::try_from(all.count()) {
        Ok(n @ 1..) => Ok(n),
        _ => Err(unavailable("Metal shows no GPU")),
    }
}

fn name(raw: &RawDevice) -> String {
    raw.name().to_string()
}

/// Checks that a GPU has what the kernels need, but for what their pipelines say.
fn check(raw: &RawDevice) -> Result<(), BackendError> {
    let name = name(raw);
    if !raw.hasUnifiedMemory() {
        return Err(unavailable(format!(
            "{name} has memory of its own, and only GPUs that share the machine's are supported"
        )));
    }
    let families = [MTLGPUFamily::Apple7, MTLGPUFamily::Metal3];
    if !families.iter().any(|&family| raw.supportsFamily(family)) {
        return Err(unavailable(format!(
            "{name} is older than Apple's M1: it has neither Metal's family Apple7 nor Metal3"
        )));
    }
    Ok(())
}
