//! Models split over several files: `NAME-00001-of-00003.gguf` and its neighbours.
//!
//! Each part is a GGUF file with the keys `split.no` (from 0) and `split.count`; the first one has
//! all other metadata and `split.tensors.count`, the number of tensors of all parts. File names
//! count from 1.

use std::path::{Path, PathBuf};

use super::metadata::Metadata;
use crate::error::GgufError;

/// A file's metadata about being one part of a split model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Split {
    /// Number of the part, from 1.
    pub(super) part: u64,
    /// Number of parts; at least 2.
    pub(super) n_parts: u64,
    /// Tensors of all parts, where the file has their number.
    pub(super) n_tensors: Option<u64>,
}

impl Split {
    /// Reads the keys; `None` where the file is whole.
    pub(super) fn from_metadata(metadata: &Metadata) -> Result<Option<Self>, GgufError> {
        // The specification's type is `u16`, which also bounds what is opened.
        let n_parts = metadata.optional::<u16>("split.count")?.unwrap_or(0);
        if n_parts < 2 {
            return Ok(None);
        }
        let number = metadata.get::<u16>("split.no")?;
        let n_tensors = metadata.optional::<u64>("split.tensors.count")?;
        Ok(Some(Self {
            part: u64::from(number) + 1,
            n_parts: u64::from(n_parts),
            n_tensors,
        }))
    }
}

/// The name of part `part` (from 1) of `n_parts`: `NAME-00002-of-00003.gguf`.
pub fn part_file_name(name: &str, part: u64, n_parts: u64) -> String {
    format!("{name}{}", suffix(part, n_parts))
}

fn suffix(part: u64, n_parts: u64) -> String {
    format!("-{part:05}-of-{n_parts:05}.gguf")
}

/// The paths of parts 2 and on, from that of the first one.
pub(super) fn other_parts(first: &Path, n_parts: u64) -> Result<Vec<PathBuf>, GgufError> {
    let wanted = suffix(1, n_parts);
    let name = first.file_name().and_then(|name| name.to_str());
    let Some(name) = name.and_then(|name| name.strip_suffix(&wanted)) else {
        return Err(GgufError::PartName {
            n_parts,
            suffix: wanted,
        });
    };
    let path = |part| first.with_file_name(part_file_name(name, part, n_parts));
    Ok((2..=n_parts).map(path).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_lie_next_to_the_first() {
        let paths = other_parts(Path::new("dir/m-00001-of-00003.gguf"), 3);
        let wanted = ["dir/m-00002-of-00003.gguf", "dir/m-00003-of-00003.gguf"];
        assert_eq!(paths, Ok(wanted.map(PathBuf::from).to_vec()));
    }

    #[test]
    fn another_name_leads_nowhere() {
        for name in ["m.gguf", "m-00001-of-00002.gguf", "m-00002-of-00003.gguf"] {
            assert_eq!(
                other_parts(Path::new(name), 3),
                Err(GgufError::PartName {
                    n_parts: 3,
                    suffix: "-00001-of-00003.gguf".into()
                })
            );
        }
    }
}
