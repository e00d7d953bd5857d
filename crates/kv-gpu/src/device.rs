//! [`Device`]: what a GPU must be able to do, in twelve methods.
//!
//! A device has buffers, kernels by name, and one queue: what is written, copied and launched
//! happens in that order. Invariant: a buffer's bytes change by these methods alone. Knows nothing
//! of graphs, weights or rows.

use std::fmt::Debug;

use kv_backend::{BackendError, DeviceMemory};

/// A device with memory of its own.
pub trait Device: Debug + Send + Sync + 'static {
    /// Memory of the device.
    type Buffer: Debug + Send + Sync + 'static;
    /// A kernel that can be launched.
    type Kernel: Debug + Send + Sync + 'static;
    /// Launches that can be repeated.
    type Recording: Debug + Send + 'static;

    /// Short name of the backend, as on the command line: `cuda`.
    fn name(&self) -> &'static str;

    /// The device's name, for people.
    fn description(&self) -> String;

    /// All memory and what is free; `None` where that is not known.
    fn memory(&self) -> Option<DeviceMemory>;

    /// True if products of fragments are the device's own, and not exchanges between lanes.
    fn has_tensor_cores(&self) -> bool {
        true
    }

    /// Zeros that nothing else refers to. `what` is for the error.
    ///
    /// # Errors
    /// [`BackendError::OutOfMemory`].
    fn allocate(&self, bytes: usize, what: &str) -> Result<Self::Buffer, BackendError>;

    /// Bytes from the host, which may be changed as soon as this returns.
    ///
    /// # Errors
    /// [`BackendError::Device`], [`BackendError::DeviceLost`]; so for all methods below.
    fn write(&self, to: Region<'_, Self>, bytes: &[u8]) -> Result<(), BackendError>;

    /// Bytes to the host, after everything before.
    ///
    /// # Errors
    /// As [`Device::write`], and what failed since the last wait.
    fn read(&self, from: Region<'_, Self>, bytes: &mut [u8]) -> Result<(), BackendError>;

    /// `len` bytes from buffer to buffer; within one, they do not overlap.
    ///
    /// # Errors
    /// As [`Device::write`].
    fn copy(
        &self,
        from: Region<'_, Self>,
        to: Region<'_, Self>,
        len: usize,
    ) -> Result<(), BackendError>;

    /// The kernel of this name.
    ///
    /// # Errors
    /// [`BackendError::Device`] where there is none.
    fn kernel(&self, name: &str) -> Result<Self::Kernel, BackendError>;

    /// Runs a kernel on a grid of `grid[0]` x `grid[1]` thread blocks.
    ///
    /// # Errors
    /// As [`Device::write`].
    fn launch(
        &self,
        kernel: &Self::Kernel,
        grid: [u32; 2],
        arguments: &[Argument<'_, Self>],
    ) -> Result<(), BackendError>;

    /// Records the launches that `launches` does instead of running them. The buffers that they
    /// use outlive the recording.
    ///
    /// # Errors
    /// That of `launches`; as [`Device::write`]; where memory for it is short. Programs launch one
    /// by one then.
    fn record(
        &self,
        launches: &mut dyn FnMut() -> Result<(), BackendError>,
    ) -> Result<Self::Recording, BackendError>;

    /// Runs recorded launches.
    ///
    /// # Errors
    /// As [`Device::write`].
    fn replay(&self, recording: &Self::Recording) -> Result<(), BackendError>;

    /// Waits for everything before.
    ///
    /// # Errors
    /// The first failure since the last wait.
    fn wait(&self) -> Result<(), BackendError>;
}

/// A buffer from one of its bytes on.
#[derive(Debug)]
pub struct Region<'a, D: Device + ?Sized> {
    /// The buffer.
    pub buffer: &'a D::Buffer,
    /// The first byte.
    pub at: usize,
}

impl<'a, D: Device + ?Sized> Region<'a, D> {
    /// A buffer from its first byte on.
    pub fn start(buffer: &'a D::Buffer) -> Self {
        Self { buffer, at: 0 }
    }
}

impl<D: Device + ?Sized> Clone for Region<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device + ?Sized> Copy for Region<'_, D> {}

/// An argument of a kernel.
#[derive(Debug)]
pub enum Argument<'a, D: Device + ?Sized> {
    /// A buffer.
    Buffer(Region<'a, D>),
    /// Settings by value: a struct of 4-byte fields.
    Settings(&'a [u8]),
}
