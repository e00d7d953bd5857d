//! [`FileStart`]: the first bytes of a file, for those who have no more of it. Knows no format.

use kv_graph::weights::SharedBytes;

/// The first bytes of a file.
#[derive(Clone, Debug)]
pub struct FileStart {
    /// The file's name in errors.
    pub name: String,
    /// Its first bytes, or all.
    pub bytes: SharedBytes,
    /// Bytes of the whole file; `None` where they are not known: what a header says is believed
    /// then, not held against them.
    pub file_len: Option<u64>,
}
