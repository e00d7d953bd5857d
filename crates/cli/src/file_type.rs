//! [`FileType`]: the formats in which `cellar convert` writes models, by their names on the command
//! line. Knows nothing of how tensors are converted.

use std::str::FromStr;

use kv_core::block::BlockFormat;

use crate::advice::is_similar;

/// A format in which models can be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileType {
    /// How matrices are stored.
    pub(crate) format: BlockFormat,
    /// Its number in `general.file_type`.
    pub(crate) number: u32,
}

const FILE_TYPES: [FileType; 12] = {
    use BlockFormat::*;
    const fn of(format: BlockFormat, number: u32) -> FileType {
        FileType { format, number }
    }
    [
        of(F32, 0),
        of(F16, 1),
        of(BF16, 32),
        of(Q4_0, 2),
        of(Q4_1, 3),
        of(Q5_0, 8),
        of(Q5_1, 9),
        of(Q8_0, 7),
        of(Q3_K, 12),
        of(Q4_K, 14),
        of(Q5_K, 16),
        of(Q6_K, 18),
    ]
};

impl FromStr for FileType {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let is = |t: &&FileType| t.format.name().eq_ignore_ascii_case(name);
        FILE_TYPES.iter().find(is).copied().ok_or_else(|| {
            let known: Vec<String> = FILE_TYPES
                .iter()
                .map(|t| t.format.name().to_lowercase())
                .collect();
            let wanted = name.to_lowercase();
            let similar = known.iter().find(|known| is_similar(known, &wanted));
            let similar = similar.map_or_else(String::new, |s| format!("; a similar one: '{s}'"));
            format!("known are {}{similar}", known.join(", "))
        })
    }
}
