//! [`Context`]: a device that is in use, with its queue and the programs that were compiled for it.
//!
//! Invariant: all work goes to one queue, in order. A device has one context in a process, which
//! stays: drivers take seconds to compile some kernels. One that is lost is opened anew.

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kv_backend::{BackendError, DeviceMemory};

use crate::api::{Api, BACKEND, Call, Handle, Status, api, failure, unavailable};
use crate::info::{Facts, OpenClDeviceInfo, all};
use crate::kernel::Program;

/// A device that is in use.
pub(crate) struct Context {
    pub(crate) api: &'static Api,
    pub(crate) raw: Handle,
    pub(crate) device: Handle,
    pub(crate) queue: Handle,
    pub(crate) facts: Facts,
    ordinal: u32,
    /// Bytes of all buffers.
    used: AtomicU64,
    is_lost: AtomicBool,
    programs: Mutex<HashMap<&'static str, ProgramSlot>>,
}

// SAFETY: OpenCL's functions may be called from every thread, but for those that set the arguments
// of one kernel: see `OpenClKernel`.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// The program of a kernel, once it is compiled.
pub(crate) type ProgramSlot = Arc<Mutex<Option<Arc<Program>>>>;

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Context").field(&self.facts.name).finish()
    }
}

impl Context {
    /// Opens a device, or takes the context that it has.
    ///
    /// # Errors
    /// [`BackendError::Unavailable`] with the reason.
    pub(crate) fn open(ordinal: u32) -> Result<Arc<Self>, BackendError> {
        static OPENED: Mutex<Vec<Arc<Context>>> = Mutex::new(Vec::new());
        let devices = all()?;
        let Some(&device) = devices.get(ordinal as usize) else {
            let n = devices.len();
            let reason = format!("there is no GPU {ordinal}, only {n}, counted from 0");
            return Err(unavailable(reason));
        };
        let mut opened = OPENED.lock().unwrap_or_else(PoisonError::into_inner);
        opened.retain(|context| !context.is_lost.load(Ordering::Relaxed));
        if let Some(context) = opened.iter().find(|context| context.device == device) {
            return Ok(Arc::clone(context));
        }
        let context = Arc::new(Self::create(device, ordinal)?);
        opened.push(Arc::clone(&context));
        Ok(context)
    }

    fn create(device: Handle, ordinal: u32) -> Result<Self, BackendError> {
        let api = api()?;
        let facts = Facts::ask(api, device)?;
        let refused =
            |status| unavailable(format!("{}: it cannot be opened: {status}", facts.name));
        let (none, mut status) = (std::ptr::null_mut(), 0);
        // SAFETY: a device that was listed, without a callback.
        let raw =
            unsafe { (api.clCreateContext)(std::ptr::null(), 1, &device, none, none, &mut status) };
        Status::check(status).map_err(refused)?;
        // SAFETY: the context's device; no properties, so that the queue runs in order.
        let queue = unsafe {
            (api.clCreateCommandQueueWithProperties)(raw, device, std::ptr::null(), &mut status)
        };
        Status::check(status).map_err(refused)?;
        Ok(Self {
            api,
            raw,
            device,
            queue,
            facts,
            ordinal,
            used: AtomicU64::new(0),
            is_lost: AtomicBool::new(false),
            programs: Mutex::default(),
        })
    }

    /// The error for the caller of a failed call; `doing` names the attempt.
    pub(crate) fn failed(&self, doing: &str, call: Call, status: Status) -> BackendError {
        let reason = format!("{doing}: {status}");
        if status.is_fatal(call) {
            self.is_lost.store(true, Ordering::Relaxed);
            BackendError::DeviceLost {
                backend: BACKEND,
                reason,
            }
        } else {
            failure(reason)
        }
    }

    /// Waits for everything on the queue.
    pub(crate) fn wait(&self) -> Result<(), BackendError> {
        // SAFETY: the queue lives as long as the process.
        let status = unsafe { (self.api.clFinish)(self.queue) };
        Status::check(status).map_err(|status| self.failed("waiting", Call::Waits, status))
    }

    /// Has the device begin with what is on the queue.
    pub(crate) fn flush(&self) -> Result<(), BackendError> {
        // SAFETY: as above.
        let status = unsafe { (self.api.clFlush)(self.queue) };
        Status::check(status).map_err(|status| self.failed("launching", Call::Returns, status))
    }

    /// The device's memory without the buffers of this process.
    pub(crate) fn memory(&self) -> DeviceMemory {
        let total = self.facts.total;
        DeviceMemory {
            total,
            free: total.saturating_sub(self.used.load(Ordering::Relaxed)),
        }
    }

    /// Notes a buffer.
    pub(crate) fn add_used(&self, n_bytes: usize) {
        self.used.fetch_add(n_bytes as u64, Ordering::Relaxed);
    }

    /// Forgets a buffer.
    pub(crate) fn remove_used(&self, n_bytes: usize) {
        self.used.fetch_sub(n_bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn describe(&self) -> OpenClDeviceInfo {
        OpenClDeviceInfo {
            ordinal: self.ordinal,
            name: self.facts.name.clone(),
            memory: self.memory(),
            version: self.facts.version.clone(),
        }
    }

    /// Where the program of a kernel is, or comes. Other kernels are compiled meanwhile.
    pub(crate) fn program_slot(&self, name: &'static str) -> ProgramSlot {
        let programs = self.programs.lock();
        let mut programs = programs.unwrap_or_else(PoisonError::into_inner);
        Arc::clone(programs.entry(name).or_default())
    }

    /// Creates a kernel of a program.
    pub(crate) fn create_kernel(&self, program: Handle, name: &CStr) -> Result<Handle, Status> {
        let mut status = 0;
        // SAFETY: a program that was built for this context.
        let raw = unsafe { (self.api.clCreateKernel)(program, name.as_ptr(), &mut status) };
        Status::check(status).map(|()| raw)
    }
}
