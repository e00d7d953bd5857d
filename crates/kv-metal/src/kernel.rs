//! [`MetalKernel`]: a kernel that Metal has compiled.
//!
//! A file of kernels is compiled when the first of them is asked for, with what it needs in front
//! of it; what the compiler says of it names the files of kv-gpu.

use std::collections::HashMap;

use kv_backend::BackendError;
use kv_gpu::{KernelInfo, kernel_info, metal_source};
use objc2::available;
use objc2::rc::Retained;
use objc2::runtime::ProtocolObject;
use objc2_foundation::{NSError, NSString};
use objc2_metal::{
    MTLCompileOptions, MTLComputePipelineState, MTLDevice, MTLLanguageVersion, MTLLibrary,
};

use crate::info::failure;

/// Lanes of a warp: kernels rely on them.
const SIMD_WIDTH: usize = 32;
/// The name of a source in the messages of Metal's compiler.
const SOURCE_NAME: &str = "program_source";

/// A kernel on a device.
#[derive(Clone, Debug)]
pub struct MetalKernel {
    pub(crate) pipeline: Retained<ProtocolObject<dyn MTLComputePipelineState>>,
    pub(crate) info: KernelInfo,
}

/// The files that were compiled.
#[derive(Debug, Default)]
pub(crate) struct Libraries(HashMap<&'static str, Retained<ProtocolObject<dyn MTLLibrary>>>);

impl Libraries {
    /// Compiles a kernel, and checks that the GPU runs it as it is meant.
    ///
    /// # Errors
    /// [`BackendError::Device`] where there is none of this name, Metal refuses it, or it needs
    /// more threads or shared memory than the GPU has.
    pub(crate) fn load(
        &mut self,
        device: &ProtocolObject<dyn MTLDevice>,
        name: &str,
    ) -> Result<MetalKernel, BackendError> {
        let info = kernel_info(name);
        let info = info.ok_or_else(|| failure(format!("there is no kernel '{name}'")))?;
        let refused = |why: String| failure(format!("loading kernel '{name}': {why}"));
        let library = self.file(device, info.file)?;
        let function = library.newFunctionWithName(&NSString::from_str(name));
        let function =
            function.ok_or_else(|| refused(format!("{}.k has it not as Metal", info.file)))?;
        let pipeline = device.newComputePipelineStateWithFunction_error(&function);
        let pipeline = pipeline.map_err(|error| refused(text(&error)))?;
        let width = pipeline.threadExecutionWidth();
        if width != SIMD_WIDTH {
            return Err(refused(format!(
                "the GPU has SIMD groups of {width} threads, not {SIMD_WIDTH}"
            )));
        }
        let (most, n) = (
            pipeline.maxTotalThreadsPerThreadgroup(),
            info.n_threads as usize,
        );
        if n > most {
            return Err(refused(format!("it has {n} threads, the GPU runs {most}")));
        }
        let (held, room) = (
            pipeline.staticThreadgroupMemoryLength(),
            device.maxThreadgroupMemoryLength(),
        );
        if held > room {
            return Err(refused(format!(
                "it takes {held} bytes of threadgroup memory, the GPU has {room}"
            )));
        }
        Ok(MetalKernel { pipeline, info })
    }

    /// The kernels of a file.
    fn file(
        &mut self,
        device: &ProtocolObject<dyn MTLDevice>,
        file: &'static str,
    ) -> Result<Retained<ProtocolObject<dyn MTLLibrary>>, BackendError> {
        if let Some(known) = self.0.get(file) {
            return Ok(known.clone());
        }
        let source = metal_source(file);
        let source = source.ok_or_else(|| failure(format!("there is no file {file}.k")))?;
        let given = NSString::from_str(&source.text);
        let compile = |version: MTLLanguageVersion| {
            let options = MTLCompileOptions::new();
            options.setLanguageVersion(version);
            // Its successor, the math mode, needs macOS 15.
            #[allow(deprecated)]
            options.setFastMathEnabled(false);
            device.newLibraryWithSource_options_error(&given, Some(&options))
        };
        // With 3.1, matrices of BF16 are multiplied as they are; systems and compilers without get
        // halves.
        let library = if available!(macos = 14.0) {
            compile(MTLLanguageVersion::Version3_1)
                .or_else(|_| compile(MTLLanguageVersion::Version2_4))
        } else {
            compile(MTLLanguageVersion::Version2_4)
        };
        let library = library.map_err(|error| {
            let messages = source.explain(SOURCE_NAME, &text(&error));
            failure(format!("compiling {file}.k: {}", messages.trim_end()))
        })?;
        self.0.insert(file, library.clone());
        Ok(library)
    }
}

/// The text of an error of Metal's.
fn text(error: &NSError) -> String {
    error.localizedDescription().to_string()
}
