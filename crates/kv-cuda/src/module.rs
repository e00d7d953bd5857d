//! [`CudaKernel`]: a kernel that the driver has compiled, and where its PTX comes from.

use std::ffi::{CString, c_void};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};
use kv_backend::BackendError;
use lzma_rust2::LzmaReader;

use crate::context::{Context, RetiredResource};
use crate::driver::{failed, failure, unavailable};
use crate::ptx::{Ptx, Signature};

/// A folder whose PTX files are used instead of the PTX in this crate, to try out kernels.
const PTX_DIR: &str = "CELLAR_PTX_DIR";

/// The kernels of kv-gpu; `ptx/make` writes it.
const KERNELS: &[u8] = include_bytes!("../ptx/kernels.ptx.lzma");

/// The kernels in this crate, or those of the folder that the environment names.
///
/// # Errors
/// If the folder cannot be read or has no PTX.
pub(crate) fn kernels() -> Result<Ptx, BackendError> {
    let mut ptx = Ptx::default();
    match std::env::var_os(PTX_DIR).filter(|folder| !folder.is_empty()) {
        None => ptx.add(&built_in()?).map_err(failure)?,
        Some(folder) => add_folder(&mut ptx, Path::new(&folder)).map_err(|reason| {
            let folder = folder.display();
            failure(format!("{PTX_DIR} is '{folder}': {reason}"))
        })?,
    }
    Ok(ptx)
}

/// The PTX in this crate as text.
fn built_in() -> Result<String, BackendError> {
    let refused = |error: std::io::Error| failure(format!("the PTX in the program: {error}"));
    let mut text = String::new();
    let mut reader = LzmaReader::new_mem_limit(KERNELS, u32::MAX, None).map_err(refused)?;
    reader.read_to_string(&mut text).map_err(refused)?;
    Ok(text)
}

fn add_folder(ptx: &mut Ptx, folder: &Path) -> Result<(), String> {
    let entries = std::fs::read_dir(folder).map_err(|error| error.to_string())?;
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let mut paths: Vec<_> = paths
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())?;
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "ptx"));
    paths.sort();
    if paths.is_empty() {
        return Err("it has no .ptx file".to_owned());
    }
    for path in paths {
        let in_file = |reason: String| format!("{}: {reason}", path.display());
        let text = std::fs::read_to_string(&path).map_err(|error| in_file(error.to_string()))?;
        ptx.add(&text).map_err(in_file)?;
    }
    Ok(())
}

/// A kernel on a device.
#[derive(Clone, Debug)]
pub struct CudaKernel {
    pub(crate) module: Arc<Module>,
    pub(crate) name: String,
    pub(crate) signature: Signature,
}

/// A module that the driver has loaded, with one kernel.
#[derive(Debug)]
pub(crate) struct Module {
    context: Arc<Context>,
    raw: sys::CUmodule,
    /// Its kernel.
    pub(crate) function: sys::CUfunction,
}

// SAFETY: the driver's handles may be used from every thread; see `Context`.
unsafe impl Send for Module {}
// SAFETY: as above; a module is never changed.
unsafe impl Sync for Module {}

impl CudaKernel {
    /// Has the driver compile a kernel.
    ///
    /// # Errors
    /// [`BackendError::Device`] where there is none of this name, or the driver refuses it.
    pub(crate) fn load(
        context: &Arc<Context>,
        ptx: &Ptx,
        name: &str,
    ) -> Result<Self, BackendError> {
        let Some((text, signature)) = ptx.module(name) else {
            return Err(failure(format!("there is no kernel '{name}'")));
        };
        if !(1..=1024).contains(&signature.n_threads) {
            let n = signature.n_threads;
            return Err(failure(format!("kernel '{name}' has {n} threads a block")));
        }
        let doing = format!("loading kernel '{name}'");
        let raw = load(context, text)?.map_err(|refused| refused.failure(&doing))?;
        let mut module = Module {
            context: Arc::clone(context),
            raw,
            function: std::ptr::null_mut(),
        };
        let entry = CString::new(name).map_err(|_| failure("a kernel's name has a zero byte"))?;
        // SAFETY: the module was loaded just now.
        let function = unsafe { result::module::get_function(raw, entry) };
        module.function = function.map_err(failed(&doing))?;
        Ok(Self {
            module: Arc::new(module),
            name: name.to_owned(),
            signature,
        })
    }
}

/// Checks that the driver takes PTX of this version and target.
///
/// # Errors
/// [`BackendError::Unavailable`] where it does not.
pub(crate) fn check(context: &Arc<Context>, ptx: &Ptx) -> Result<(), BackendError> {
    let text = format!("{}.visible .entry probe()\n{{\nret;\n}}\n", ptx.header());
    match load(context, text)? {
        Ok(raw) => {
            // SAFETY: loaded just now, and used by nothing.
            unsafe { result::module::unload(raw) }.map_err(failed("unloading a module"))
        }
        Err(RejectedPtx {
            error: DriverError(CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION),
            ..
        }) => {
            let version = ptx.header();
            let version = version.lines().next().unwrap_or_default();
            Err(unavailable(format!(
                "the NVIDIA driver is too old: it does not take PTX of '{version}'"
            )))
        }
        Err(refused) => {
            let error = refused.failure("loading a module");
            Err(unavailable(format!("{}: {error}", context.name())))
        }
    }
}

/// PTX that the driver did not compile.
struct RejectedPtx {
    error: DriverError,
    /// The compiler's log, in one line.
    log: String,
}

impl RejectedPtx {
    fn failure(self, doing: &str) -> BackendError {
        let Self { error, log } = self;
        if log.is_empty() {
            failed(doing)(error)
        } else {
            failed(&format!("{doing} ({log})"))(error)
        }
    }
}

/// Bytes of what the driver's compiler says at most.
const LOG_BYTES: usize = 2048;

fn load(
    context: &Context,
    text: String,
) -> Result<Result<sys::CUmodule, RejectedPtx>, BackendError> {
    context.bind()?;
    let text = CString::new(text).map_err(|_| failure("the PTX has a zero byte"))?;
    let mut log = [0_u8; LOG_BYTES];
    let mut options = [
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER,
        sys::CUjit_option::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    // The size is itself the value of its option.
    let size = std::ptr::without_provenance_mut(LOG_BYTES);
    let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), size];
    let mut raw = std::ptr::null_mut();
    // SAFETY: a text that ends with 0, and a log of the size that is given, both used before this
    // returns only; as many values as options.
    let loaded = unsafe {
        sys::cuModuleLoadDataEx(
            &mut raw,
            text.as_ptr().cast(),
            2,
            options.as_mut_ptr(),
            values.as_mut_ptr(),
        )
    };
    Ok(loaded.result().map(|()| raw).map_err(|error| {
        let log = log.split(|&byte| byte == 0).next().unwrap_or_default();
        let log = String::from_utf8_lossy(log);
        let lines = log.lines().map(str::trim).filter(|line| !line.is_empty());
        RejectedPtx {
            error,
            log: lines.collect::<Vec<_>>().join("; "),
        }
    }))
}

impl Drop for Module {
    fn drop(&mut self) {
        // It may still run; recordings that use it have a share of it.
        self.context.retire(RetiredResource::Module(self.raw));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::Parameter;

    #[test]
    fn the_kernels_in_this_crate_can_be_launched() {
        let mut ptx = Ptx::default();
        ptx.add(&built_in().unwrap()).unwrap();
        let header = ".version 7.0\n.target sm_80\n.address_size 64\n";
        assert_eq!(ptx.header(), header);
        assert!(ptx.names().count() > 20);
        for name in ptx.names() {
            let (_, signature) = ptx.module(name).unwrap();
            let n = signature.n_threads;
            assert!(
                n.is_multiple_of(32) && (32..=1024).contains(&n),
                "{name}: {n}"
            );
            let (last, buffers) = signature.parameters.split_last().unwrap();
            assert!(matches!(last, Parameter::Settings(_)), "{name}");
            assert!(buffers.iter().all(|p| *p == Parameter::Buffer), "{name}");
        }
    }

    #[test]
    fn a_folder_without_ptx_is_an_error() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let error = add_folder(&mut Ptx::default(), &folder).unwrap_err();
        assert_eq!(error, "it has no .ptx file");
        assert!(add_folder(&mut Ptx::default(), Path::new("none/of/these")).is_err());
    }
}
