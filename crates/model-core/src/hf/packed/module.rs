//! [`Module`]: the tensors that one packed matrix is made of, read with errors that name them.

use kv_block::BlockFormat;

use super::codes::{Codes, WordGrid};
use super::scales::{Groups, ScaleType, Scales};
use crate::error::ModelFileError;
use crate::hf::files::{TensorFiles, TensorLocation};

/// What the file calls the type of a tensor.
pub(super) fn stored_as(stored: &TensorLocation) -> &str {
    match &stored.format {
        Ok(format) => format.name(),
        Err(name) => name,
    }
}

/// The tensors of one matrix.
pub(super) struct Module<'a> {
    pub(super) files: &'a TensorFiles,
    /// The beginning of their names.
    pub(super) place: &'a str,
}

impl Module<'_> {
    pub(super) fn wrong(&self, part: &str, reason: impl Into<String>) -> ModelFileError {
        ModelFileError::Tensor {
            name: format!("{}{part}", self.place),
            reason: reason.into(),
        }
    }

    pub(super) fn optional(&self, part: &str) -> Option<&TensorLocation> {
        self.files.tensors.get(&format!("{}{part}", self.place))
    }

    pub(super) fn part(&self, part: &str) -> Result<&TensorLocation, ModelFileError> {
        let missing = || {
            self.wrong(
                part,
                "it is missing, but other parts of the matrix are there",
            )
        };
        self.optional(part).ok_or_else(missing)
    }

    /// A matrix of this type.
    pub(super) fn matrix(&self, part: &str, stored: &str) -> Result<[usize; 2], ModelFileError> {
        let tensor = self.part(part)?;
        match *tensor.shape.as_slice() {
            [outer @ (1..), inner @ (1..)] if stored_as(tensor) == stored => Ok([outer, inner]),
            _ => Err(self.wrong(
                part,
                format!(
                    "{} of shape {:?}, where a matrix of {stored} is expected",
                    stored_as(tensor),
                    tensor.shape
                ),
            )),
        }
    }

    /// Codes in words of a matrix.
    pub(super) fn codes(
        &self,
        part: &str,
        bits: usize,
        grid: WordGrid,
    ) -> Result<Codes, ModelFileError> {
        let bytes = self.part(part)?.bytes.clone();
        let codes = Codes::new(bytes, bits, grid);
        codes.ok_or_else(|| self.wrong(part, "its bytes do not fit its shape"))
    }

    /// Scales of this shape: a dimension counts rows, the other groups.
    pub(super) fn scales(
        &self,
        part: &str,
        n: usize,
        steps: [usize; 2],
    ) -> Result<Scales, ModelFileError> {
        let tensor = self.part(part)?;
        let stored = match (&tensor.format, stored_as(tensor)) {
            (Ok(BlockFormat::F32), _) => ScaleType::F32,
            (Ok(BlockFormat::F16), _) => ScaleType::F16,
            (Ok(BlockFormat::BF16), _) => ScaleType::BF16,
            (_, "F8_E4M3") => ScaleType::E4M3,
            (_, "U8" | "F8_E8M0") => ScaleType::E8M0,
            (_, other) => {
                return Err(self.wrong(part, format!("scales as {other} are not read")));
            }
        };
        let scales = Scales::new(tensor.bytes.clone(), stored, n, steps);
        scales.ok_or_else(|| self.wrong(part, "its bytes do not fit its shape"))
    }

    /// Whole numbers of 4 or 8 bytes.
    pub(super) fn numbers(&self, part: &str) -> Result<Vec<i64>, ModelFileError> {
        let tensor = self.part(part)?;
        let bytes = &tensor.bytes;
        match stored_as(tensor) {
            "I32" => {
                let all = bytes.as_chunks().0.iter();
                Ok(all.map(|b| i64::from(i32::from_le_bytes(*b))).collect())
            }
            "I64" => {
                let all = bytes.as_chunks().0.iter();
                Ok(all.map(|b| i64::from_le_bytes(*b)).collect())
            }
            other => Err(self.wrong(part, format!("{other}, where I32 or I64 is expected"))),
        }
    }

    /// The groups of columns: listed, where that is there, or else all alike.
    pub(super) fn groups(
        &self,
        part: &str,
        n_columns: usize,
        n_groups: usize,
    ) -> Result<Groups, ModelFileError> {
        let listed = match self.optional(part) {
            Some(_) => self.numbers(part)?,
            None => Vec::new(),
        };
        // compressed-tensors once stored −1 for groups in order.
        if listed.iter().all(|group| *group == -1) {
            if n_groups == 0 || !n_columns.is_multiple_of(n_groups) {
                let reason = format!("{n_columns} columns cannot be cut into {n_groups} groups");
                return Err(self.wrong("weight", reason));
            }
            return Ok(Groups::Even(n_columns / n_groups));
        }
        if listed.len() != n_columns {
            let reason = format!("{} groups for {n_columns} columns", listed.len());
            return Err(self.wrong(part, reason));
        }
        let group = |(column, group): (usize, &i64)| {
            let found = u32::try_from(*group).ok();
            let found = found.filter(|group| (*group as usize) < n_groups);
            found.ok_or_else(|| {
                let reason =
                    format!("group {group} of column {column}, but there are {n_groups} groups");
                self.wrong(part, reason)
            })
        };
        let listed = listed.iter().enumerate().map(group);
        let listed: Vec<u32> = listed.collect::<Result<_, _>>()?;
        let even = n_columns / n_groups.max(1);
        let mut columns = listed.iter().enumerate();
        if even > 0 && columns.all(|(column, group)| column / even == *group as usize) {
            return Ok(Groups::Even(even));
        }
        Ok(Groups::Listed(listed.into()))
    }
}
