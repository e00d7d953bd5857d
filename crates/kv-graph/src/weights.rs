//! Weights by name, in the block format of their file, without copying them.
//!
//! Invariant: a [`Weight`]'s bytes are exactly what its shape and format need (checked by
//! [`Weight::new`]). Knows nothing of files: a source hands out bytes that it owns or maps.

use std::fmt;
use std::ops::Deref;
use std::ops::Range;
use std::sync::Arc;

use kv_block::BlockFormat;

/// An owner of bytes that are shared: a memory map, a vector.
pub trait ByteOwner: Send + Sync {
    /// All of them; never fewer than at first.
    fn bytes(&self) -> &[u8];

    /// Copies bytes `start..start + to.len()` of them; returns whether they exist. An owner that
    /// has them in a file, too, need not bring them into this process's memory for that.
    fn copy(&self, start: usize, to: &mut [u8]) -> bool {
        let from = start
            .checked_add(to.len())
            .and_then(|end| self.bytes().get(start..end));
        from.map(|from| to.copy_from_slice(from)).is_some()
    }

    /// Reads some of them, and perhaps others around them, to `buffer`, and returns where in it
    /// they are; `None` where they do not exist. An owner that has them in a file need not have
    /// the system keep them for the next read.
    fn read_once(&self, range: Range<usize>, buffer: &mut Vec<u8>) -> Option<Range<usize>> {
        buffer.resize(range.len(), 0);
        self.copy(range.start, buffer).then_some(0..range.len())
    }

    /// True if [`ByteOwner::copy`] reads a file: the bytes need no memory of this process until
    /// [`ByteOwner::bytes`] are looked at.
    fn is_in_file(&self) -> bool {
        false
    }

    /// A hint that these bytes will hardly be read again. An owner that has them in a file, too,
    /// may release the memory that they take; it reads them again when they are needed.
    fn release(&self, _bytes: Range<usize>) {}

    /// Checks that all bytes that were read so far are those that were there at first.
    ///
    /// # Errors
    /// [`SourceChanged`], from then on always, by an owner whose bytes somebody else can change.
    fn check(&self) -> Result<(), SourceChanged> {
        Ok(())
    }
}

/// The source of bytes that are in use has other ones now: what was computed from them is
/// worthless.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the model file '{name}' has changed since it was opened, or can no longer be read ({n_bytes} bytes then, \
     {found} now; another time of writing counts, too): load the model again, and replace model files by renaming a new one over them"
)]
pub struct SourceChanged {
    /// The name that its owner has for it: the path of a file.
    pub name: String,
    /// Its bytes when it was opened.
    pub n_bytes: u64,
    /// Its bytes now.
    pub found: u64,
}

impl<T: AsRef<[u8]> + Send + Sync> ByteOwner for T {
    fn bytes(&self) -> &[u8] {
        self.as_ref()
    }
}

/// Bytes that somebody else owns (a memory map, a vector), shared without copying.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn ByteOwner>,
    range: Range<usize>,
}

impl SharedBytes {
    /// All bytes of `owner`.
    pub fn new(owner: Arc<dyn ByteOwner>) -> Self {
        let range = 0..owner.bytes().len();
        Self { owner, range }
    }

    /// Values as files have them, little-endian.
    pub fn from_f32(values: &[f32]) -> Self {
        let mut bytes = vec![0; values.len() * 4];
        let (each, _) = bytes.as_chunks_mut();
        each.iter_mut()
            .zip(values)
            .for_each(|(to, value)| *to = value.to_le_bytes());
        bytes.into()
    }

    /// A part of these bytes, or `None` where it would reach beyond them.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        (start <= end && end <= self.range.end).then(|| Self {
            owner: Arc::clone(&self.owner),
            range: start..end,
        })
    }

    /// Copies `to.len()` of these bytes, from byte `start` on, for callers that read them once.
    /// Returns whether they exist.
    pub fn copy(&self, start: usize, to: &mut [u8]) -> bool {
        let end = start
            .checked_add(to.len())
            .filter(|end| *end <= self.range.len());
        end.is_some() && self.owner.copy(self.range.start + start, to)
    }

    /// Some of these bytes, read to `buffer`, see [`ByteOwner::read_once`].
    pub fn read_once<'b>(&self, range: Range<usize>, buffer: &'b mut Vec<u8>) -> Option<&'b [u8]> {
        let start = self.range.start.checked_add(range.start)?;
        let end = self.range.start.checked_add(range.end)?;
        if start > end || end > self.range.end {
            return None;
        }
        let found = self.owner.read_once(start..end, buffer)?;
        buffer.get(found)
    }

    /// True if [`SharedBytes::copy`] reads a file, see [`ByteOwner::is_in_file`].
    pub fn is_in_file(&self) -> bool {
        self.owner.is_in_file()
    }

    /// A hint that some of these bytes will hardly be read again, so they need not stay in memory.
    pub fn release(&self, bytes: Range<usize>) {
        let ours = |at: usize| self.range.start.saturating_add(at).min(self.range.end);
        self.owner.release(ours(bytes.start)..ours(bytes.end));
    }

    /// Checks that the owner's bytes are still those that were there at first, see
    /// [`ByteOwner::check`].
    ///
    /// # Errors
    /// [`SourceChanged`].
    pub fn check(&self) -> Result<(), SourceChanged> {
        self.owner.check()
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self::new(Arc::new(bytes))
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // The range was checked when it was made, and an owner's bytes do not shrink.
        let bytes = self.owner.bytes();
        bytes.get(self.range.clone()).unwrap_or_default()
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.range.len())
    }
}

/// Weights of at most this many bytes are decoded from a copy: reading a page of a mapped file
/// brings in its neighbours.
const MAX_COPIED_BYTES: usize = 1 << 20;

/// One named tensor of a model, as it lies in its file.
#[derive(Clone, Debug)]
pub struct Weight {
    name: String,
    shape: Vec<usize>,
    format: BlockFormat,
    bytes: SharedBytes,
}

/// A weight that cannot be what its header says.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum WeightError {
    /// The last dimension is not a whole number of blocks.
    #[error(
        "tensor '{name}': rows of {columns} values cannot be stored as {format}, whose blocks hold \
         {block_len}"
    )]
    PartialBlock {
        /// Name of the tensor.
        name: String,
        /// Length of one row.
        columns: usize,
        /// Its block format.
        format: BlockFormat,
        /// Values in one block.
        block_len: usize,
    },
    /// The number of bytes differs from what shape and format need.
    #[error("tensor '{name}': shape {shape:?} in {format} takes {wanted} bytes, not {got}")]
    WrongSize {
        /// Name of the tensor.
        name: String,
        /// Its shape, outermost dimension first.
        shape: Vec<usize>,
        /// Its block format.
        format: BlockFormat,
        /// Bytes needed.
        wanted: usize,
        /// Bytes given.
        got: usize,
    },
    /// The model has no tensor of this name.
    #[error("the model has no tensor '{name}'")]
    Missing {
        /// Name of the tensor.
        name: String,
    },
    /// The tensor is there, but its values are stored in a way that cannot be read.
    #[error("tensor '{name}' is stored as {stored}, which cannot be read")]
    UnsupportedFormat {
        /// Name of the tensor.
        name: String,
        /// The way it is stored, in the words of its file.
        stored: String,
    },
    /// Only the first bytes of its file are known, and its values lie behind them.
    #[error("the values of tensor '{name}' were not read: only the header of its file was")]
    NotRead {
        /// Name of the tensor.
        name: String,
    },
    /// The product of the dimensions overflows.
    #[error("tensor '{name}': shape {shape:?} is too large")]
    TooLarge {
        /// Name of the tensor.
        name: String,
        /// Its shape, outermost dimension first.
        shape: Vec<usize>,
    },
}

impl Weight {
    /// A weight of `shape` (outermost dimension first, so a matrix is `[rows, columns]`).
    ///
    /// # Errors
    /// [`WeightError`] where shape, format and number of bytes do not agree.
    pub fn new(
        name: impl Into<String>,
        shape: Vec<usize>,
        format: BlockFormat,
        bytes: SharedBytes,
    ) -> Result<Self, WeightError> {
        let name = name.into();
        let columns = shape.last().copied().unwrap_or(1);
        let n_values = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        let Some(n_values) = n_values else {
            return Err(WeightError::TooLarge { name, shape });
        };
        let block_len = format.block_len();
        if !columns.is_multiple_of(block_len) {
            return Err(WeightError::PartialBlock {
                name,
                columns,
                format,
                block_len,
            });
        }
        let Some(wanted) = (n_values / block_len).checked_mul(format.block_bytes()) else {
            return Err(WeightError::TooLarge { name, shape });
        };
        if wanted != bytes.len() {
            let got = bytes.len();
            return Err(WeightError::WrongSize {
                name,
                shape,
                format,
                wanted,
                got,
            });
        }
        Ok(Self {
            name,
            shape,
            format,
            bytes,
        })
    }

    /// A weight of these values, as `F32`.
    ///
    /// # Errors
    /// [`WeightError`] where their number is not that of the shape.
    pub fn from_f32(
        name: impl Into<String>,
        shape: Vec<usize>,
        values: &[f32],
    ) -> Result<Self, WeightError> {
        let bytes = SharedBytes::from_f32(values);
        Self::new(name, shape, BlockFormat::F32, bytes)
    }

    /// The tensor's name in its file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Dimensions, outermost first: a matrix that maps `columns` inputs to `rows` outputs is
    /// `[rows, columns]`.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Product of all dimensions but the last.
    pub fn n_rows(&self) -> usize {
        self.shape.iter().rev().skip(1).product()
    }

    /// The last dimension: values in one row.
    pub fn n_columns(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// The way values are stored.
    pub fn format(&self) -> BlockFormat {
        self.format
    }

    /// The stored bytes, row after row.
    pub fn bytes(&self) -> &SharedBytes {
        &self.bytes
    }

    /// Shape and format.
    pub fn info(&self) -> WeightInfo {
        WeightInfo {
            shape: self.shape.clone(),
            format: self.format,
        }
    }

    /// All values as `f32`, row after row.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut values = vec![0.0; self.n_rows() * self.n_columns()];
        let mut copy = vec![0; self.bytes.len().min(MAX_COPIED_BYTES)];
        if copy.len() == self.bytes.len() && self.bytes.copy(0, &mut copy) {
            kv_block::dequantize(self.format, &copy, &mut values);
        } else {
            kv_block::dequantize(self.format, &self.bytes, &mut values);
        }
        values
    }
}

/// A weight's shape and format, without its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WeightInfo {
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// The way values are stored.
    pub format: BlockFormat,
}

impl WeightInfo {
    /// Number of values.
    pub fn n_values(&self) -> u64 {
        self.shape.iter().map(|&dim| dim as u64).product()
    }

    /// Bytes of the values as they are stored; 0 where they are no whole blocks.
    pub fn n_bytes(&self) -> u64 {
        let (n, block_len) = (self.n_values(), self.format.block_len() as u64);
        if n.is_multiple_of(block_len) {
            (n / block_len).saturating_mul(self.format.block_bytes() as u64)
        } else {
            0
        }
    }
}

/// The source of a model's weights: a file, several, or memory.
pub trait WeightSource: Send + Sync {
    /// The weight with this name, or `None` where the model has none.
    fn get(&self, name: &str) -> Option<Weight>;

    /// All names, in the order of the file.
    fn names(&self) -> Vec<String>;

    /// The weight with this name, or why it cannot be had.
    ///
    /// # Errors
    /// [`WeightError::Missing`]; sources that know tensors they cannot read say so with
    /// [`WeightError::UnsupportedFormat`].
    fn require(&self, name: &str) -> Result<Weight, WeightError> {
        self.get(name).ok_or_else(|| WeightError::Missing {
            name: name.to_owned(),
        })
    }

    /// Shape and format of the weight with this name. Sources that compute weights override this so
    /// that a look at a model computes none.
    ///
    /// # Errors
    /// As [`Self::require`].
    fn describe(&self, name: &str) -> Result<WeightInfo, WeightError> {
        self.require(name).map(|weight| weight.info())
    }

    /// Checks that all weights are still those that were there when this was opened. It costs a
    /// look at each file, not at each weight, so that an engine can ask after every step.
    ///
    /// # Errors
    /// [`SourceChanged`], from then on always.
    fn check(&self) -> Result<(), SourceChanged> {
        Ok(())
    }
}

/// Weights held in memory: for tests, examples and conversions.
#[derive(Clone, Debug, Default)]
pub struct MemoryWeights {
    weights: Vec<Weight>,
}

impl MemoryWeights {
    /// No weights.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a weight, replacing one of the same name.
    pub fn insert(&mut self, weight: Weight) {
        self.weights.retain(|w| w.name != weight.name);
        self.weights.push(weight);
    }

    /// Adds `values` of `shape` as `F32`.
    ///
    /// # Errors
    /// [`WeightError`] where the number of values is not what the shape needs.
    pub fn insert_f32(
        &mut self,
        name: &str,
        shape: &[usize],
        values: &[f32],
    ) -> Result<(), WeightError> {
        self.insert(Weight::from_f32(name, shape.to_vec(), values)?);
        Ok(())
    }
}

impl WeightSource for MemoryWeights {
    fn get(&self, name: &str) -> Option<Weight> {
        self.weights.iter().find(|w| w.name == name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.weights.iter().map(|w| w.name.clone()).collect()
    }
}
