//! [`OpenClKernel`]: a kernel that the driver has compiled.
//!
//! Each kernel is a program of its own, compiled when it is first asked for; what the compiler says
//! of it names the files of kv-gpu.

use std::ffi::{CString, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use kv_backend::BackendError;
use kv_gpu::{Argument, KernelInfo, kernel_info, opencl_source};

use crate::api::{Call, Handle, Status, failure, text, value};
use crate::context::Context;
use crate::device::OpenClDevice;
use crate::info::SUBGROUP;

/// More options for the compiler, to try drivers out: `-cl-opt-disable`.
const OPTIONS: &str = "CELLAR_OPENCL_OPTIONS";
/// What drivers call a source in their messages.
const SOURCE_NAME: &str = "1";
/// Lines of a compiler's messages that an error has.
const MESSAGE_LINES: usize = 4;

/// A compiled program with one kernel.
#[derive(Debug)]
pub(crate) struct Program {
    raw: Handle,
    name: CString,
    info: KernelInfo,
}

// SAFETY: a program is never changed once it is built.
unsafe impl Send for Program {}
// SAFETY: as above.
unsafe impl Sync for Program {}

/// A kernel on a device.
#[derive(Debug)]
pub struct OpenClKernel {
    program: Arc<Program>,
    /// For launches that are not recorded, one at a time: a kernel holds its arguments.
    instance: Mutex<KernelInstance>,
}

/// A kernel with arguments.
#[derive(Debug)]
pub(crate) struct KernelInstance {
    context: Arc<Context>,
    raw: Handle,
    /// The program is kept by the driver for as long as its kernels.
    program: Arc<Program>,
}

// SAFETY: a kernel may be used by any thread, by one at a time.
unsafe impl Send for KernelInstance {}

impl OpenClKernel {
    /// Has the driver compile a kernel, or takes it where it has.
    ///
    /// # Errors
    /// [`BackendError::Device`] where there is none of this name, the driver refuses it, or the
    /// device does not run it as it is meant.
    pub(crate) fn load(context: &Arc<Context>, name: &str) -> Result<Self, BackendError> {
        let info = kernel_info(name);
        let info = info.ok_or_else(|| failure(format!("there is no kernel '{name}'")))?;
        let slot = context.program_slot(info.name);
        let mut compiled = slot.lock().unwrap_or_else(PoisonError::into_inner);
        let program = match &*compiled {
            Some(program) => Arc::clone(program),
            None => Arc::clone(compiled.insert(Arc::new(build(context, info)?))),
        };
        let instance = Mutex::new(KernelInstance::new(context, &program)?);
        Ok(Self { program, instance })
    }

    /// Launches it.
    ///
    /// # Errors
    /// Those of the driver, and if the arguments are not what it takes.
    pub(crate) fn launch(
        &self,
        grid: [u32; 2],
        arguments: &[Argument<'_, OpenClDevice>],
    ) -> Result<(), BackendError> {
        let instance = self.instance.lock();
        let instance = instance.unwrap_or_else(PoisonError::into_inner);
        instance.set_arguments(arguments)?;
        instance.enqueue(grid)
    }

    /// A kernel with these arguments, to be launched later.
    ///
    /// # Errors
    /// As [`Self::launch`].
    pub(crate) fn instance(
        &self,
        context: &Arc<Context>,
        arguments: &[Argument<'_, OpenClDevice>],
    ) -> Result<KernelInstance, BackendError> {
        let instance = KernelInstance::new(context, &self.program)?;
        instance.set_arguments(arguments)?;
        Ok(instance)
    }
}

impl KernelInstance {
    fn new(context: &Arc<Context>, program: &Arc<Program>) -> Result<Self, BackendError> {
        let raw = context.create_kernel(program.raw, &program.name);
        let raw = raw.map_err(|status| {
            let doing = format!("creating kernel '{}'", program.info.name);
            context.failed(&doing, Call::Returns, status)
        })?;
        Ok(Self {
            context: Arc::clone(context),
            raw,
            program: Arc::clone(program),
        })
    }

    fn set_arguments(&self, arguments: &[Argument<'_, OpenClDevice>]) -> Result<(), BackendError> {
        let (info, api) = (&self.program.info, self.context.api);
        let (name, wanted) = (info.name, info.n_buffers + 1);
        if arguments.len() != wanted {
            let got = arguments.len();
            return Err(failure(format!(
                "kernel '{name}' takes {wanted} arguments, got {got}"
            )));
        }
        for (i, argument) in arguments.iter().enumerate() {
            let is_settings = i == info.n_buffers;
            let status = match argument {
                Argument::Buffer(region) if !is_settings => {
                    let address = region.buffer.address(region.at, 0)?;
                    // SAFETY: an address in a buffer of this context.
                    unsafe { (api.clSetKernelArgSVMPointer)(self.raw, i as u32, address) }
                }
                Argument::Settings(bytes) if is_settings && bytes.len() == info.settings_bytes => {
                    // SAFETY: as many bytes as the kernel takes, which are copied.
                    unsafe {
                        (api.clSetKernelArg)(self.raw, i as u32, bytes.len(), bytes.as_ptr().cast())
                    }
                }
                _ => {
                    let wanted = if is_settings {
                        format!("{} bytes of settings", info.settings_bytes)
                    } else {
                        "a buffer".to_owned()
                    };
                    return Err(failure(format!(
                        "argument {i} of kernel '{name}' must be {wanted}"
                    )));
                }
            };
            Status::check(status).map_err(|status| {
                let doing = format!("argument {i} of kernel '{name}'");
                self.context.failed(&doing, Call::Returns, status)
            })?;
        }
        Ok(())
    }

    /// Launches it with the arguments that it has.
    ///
    /// # Errors
    /// Those of the driver.
    pub(crate) fn enqueue(&self, grid: [u32; 2]) -> Result<(), BackendError> {
        let local = [self.program.info.n_threads as usize, 1];
        let global = [grid[0] as usize * local[0], grid[1] as usize];
        if global.contains(&0) {
            return Ok(());
        }
        let (none, context) = (std::ptr::null_mut(), &self.context);
        // SAFETY: all arguments are set. What the kernel does with the buffers is kv-gpu's to
        // answer for; its tests run every kernel in a simulator that finds accesses outside.
        let status = unsafe {
            (context.api.clEnqueueNDRangeKernel)(
                context.queue,
                self.raw,
                2,
                std::ptr::null(),
                global.as_ptr(),
                local.as_ptr(),
                0,
                std::ptr::null(),
                none,
            )
        };
        Status::check(status).map_err(|status| {
            let doing = format!("launching kernel '{}'", self.program.info.name);
            context.failed(&doing, Call::Returns, status)
        })
    }
}

impl Drop for KernelInstance {
    fn drop(&mut self) {
        // SAFETY: created by `new`; the driver keeps it for as long as it runs.
        unsafe { (self.context.api.clReleaseKernel)(self.raw) };
    }
}

/// Compiles a kernel, and checks that the device runs it as it is meant.
fn build(context: &Context, info: KernelInfo) -> Result<Program, BackendError> {
    let doing = format!("compiling kernel '{}'", info.name);
    let source = opencl_source(info);
    let source = source.ok_or_else(|| failure(format!("there is no file {}.k", info.file)))?;
    let mut options = context.facts.options.clone();
    if let Ok(more) = std::env::var(OPTIONS) {
        options = format!("{options} {more}");
    }
    let options =
        CString::new(options).map_err(|_| failure(format!("{OPTIONS} has a zero byte")))?;
    let name = CString::new(info.name).map_err(|_| failure("a kernel's name has a zero byte"))?;
    let (api, mut status) = (context.api, 0);
    let (start, len) = (source.text.as_ptr().cast(), source.text.len());
    // SAFETY: a text of this length, which is copied.
    let raw = unsafe { (api.clCreateProgramWithSource)(context.raw, 1, &start, &len, &mut status) };
    let failed = |status| context.failed(&doing, Call::Returns, status);
    Status::check(status).map_err(failed)?;
    let program = Program { raw, name, info };
    let none = std::ptr::null_mut();
    // SAFETY: the context's device; without a callback, this returns when it is built.
    let status =
        unsafe { (api.clBuildProgram)(raw, 1, &context.device, options.as_ptr(), none, none) };
    if let Err(status) = Status::check(status) {
        const CL_PROGRAM_BUILD_LOG: u32 = 0x1183;
        // SAFETY: writes at most as many bytes as there is room for.
        let log = text(|n, to, len| unsafe {
            (api.clGetProgramBuildInfo)(raw, context.device, CL_PROGRAM_BUILD_LOG, n, to, len)
        });
        let log = source.explain(SOURCE_NAME, &log.unwrap_or_default());
        // SAFETY: nothing else knows the program.
        unsafe { (api.clReleaseProgram)(raw) };
        let lines = log
            .lines()
            .map(str::trim)
            .filter(|line| line.contains("error"));
        let lines: Vec<&str> = lines.take(MESSAGE_LINES).collect();
        return Err(failed(status).with_log(&lines.join("; ")));
    }
    match check(context, &program) {
        Ok(()) => Ok(program),
        Err(error) => {
            // SAFETY: nothing else knows the program.
            unsafe { (api.clReleaseProgram)(raw) };
            Err(error)
        }
    }
}

/// What the compiler said goes into the error.
trait WithLog {
    fn with_log(self, log: &str) -> Self;
}

impl WithLog for BackendError {
    fn with_log(self, log: &str) -> Self {
        match self {
            Self::Device { reason, .. } if !log.is_empty() => failure(format!("{reason} ({log})")),
            other => other,
        }
    }
}

/// Checks that a device has the subgroups, threads and shared memory for a kernel.
fn check(context: &Context, program: &Program) -> Result<(), BackendError> {
    const CL_KERNEL_WORK_GROUP_SIZE: u32 = 0x11B0;
    const CL_KERNEL_LOCAL_MEM_SIZE: u32 = 0x11B2;
    const CL_KERNEL_MAX_SUB_GROUP_SIZE_FOR_NDRANGE: u32 = 0x2033;
    let (api, info) = (context.api, program.info);
    let refused = |why: String| failure(format!("loading kernel '{}': {why}", info.name));
    let kernel = context.create_kernel(program.raw, &program.name);
    let kernel = kernel.map_err(|status| refused(status.to_string()))?;
    let facts = || -> Result<(usize, usize, u64), Status> {
        let n_threads = info.n_threads as usize;
        let local: *const c_void = std::ptr::from_ref(&n_threads).cast();
        let of_group = |which: u32, n: usize, to: *mut c_void, len: *mut usize| {
            // SAFETY: writes at most as many bytes as there is room for.
            unsafe { (api.clGetKernelWorkGroupInfo)(kernel, context.device, which, n, to, len) }
        };
        let of_subgroup = |n: usize, to: *mut c_void, len: *mut usize| {
            let which = CL_KERNEL_MAX_SUB_GROUP_SIZE_FOR_NDRANGE;
            let n_local = size_of::<usize>();
            // SAFETY: as above; reads the size of a group of one dimension.
            unsafe {
                (api.clGetKernelSubGroupInfo)(
                    kernel,
                    context.device,
                    which,
                    n_local,
                    local,
                    n,
                    to,
                    len,
                )
            }
        };
        Ok((
            value(of_subgroup)?,
            value(|n, to, len| of_group(CL_KERNEL_WORK_GROUP_SIZE, n, to, len))?,
            value(|n, to, len| of_group(CL_KERNEL_LOCAL_MEM_SIZE, n, to, len))?,
        ))
    };
    let facts = facts();
    // SAFETY: created above, and used by nothing else.
    unsafe { (api.clReleaseKernel)(kernel) };
    let (width, most, held) = facts.map_err(|status| refused(status.to_string()))?;
    if width != SUBGROUP {
        return Err(refused(format!(
            "the device has subgroups of {width}, not {SUBGROUP}"
        )));
    }
    let (n, room) = (info.n_threads as usize, context.facts.local_memory);
    if n > most {
        return Err(refused(format!(
            "it has {n} threads, the device runs {most}"
        )));
    }
    if held > room {
        return Err(refused(format!(
            "it takes {held} bytes of local memory, the device has {room}"
        )));
    }
    Ok(())
}
