//! [`Matrix`]: a weight matrix, packed or as stored, and its products with activations.
//!
//! Invariant: an output value depends on its weight row and its activation row alone, bit for bit:
//! not on the other rows of the batch, nor on how columns are divided over calls and threads. (Each
//! output has an accumulator of its own, which always goes through the row's blocks in order.)
//!
//! Hides all weight layouts, together with [`crate::kernels`]. Knows nothing of threads.

use std::ops::Range;

use kv_backend::{BackendError, expect_len};
use kv_block::BlockFormat;
use kv_graph::weights::Weight;

use crate::activations::{ActivationKind, Activations, ScaleSpan};
use crate::gemm_dequant_f32;
use crate::kernels::{Kernels, WeightLayout, WeightRows};
use crate::output::OutputColumns;
use crate::repack::PackedRows;

/// Weight bytes of a row block, which is multiplied with all tokens before the next one: it stays
/// in the second-level cache.
const ROW_BLOCK_BYTES: usize = 480 * 1024;
/// Rows of a row block are a multiple of this: of the tiles of all kernels, and of packed groups.
const ROW_BLOCK: usize = 48;

/// A matrix `[rows, columns]` that maps `columns` inputs to `rows` outputs.
#[derive(Clone, Debug)]
pub struct Matrix {
    weight: Weight,
    n_rows: usize,
    n_columns: usize,
    row_bytes: usize,
    activations: ActivationKind,
    /// The first rows, packed, if any are; those after them are read as stored.
    packed: Option<PackedRows>,
}

impl Matrix {
    /// Takes a weight as stored; its bytes are shared, not copied. A quantized one takes int8
    /// activations.
    ///
    /// # Errors
    /// [`BackendError::WeightShape`] where it has not two dimensions,
    /// [`BackendError::UnsupportedFormat`] where there are no kernels for its format.
    pub fn new(weight: Weight) -> Result<Self, BackendError> {
        Self::with_activations(weight, ActivationKind::Int8)
    }

    /// As [`Matrix::new`], with activations as `f32`, or as the format takes them: one of the kinds
    /// of int8 if it is quantized, BF16 if it is BF16 and that is wanted.
    ///
    /// # Errors
    /// As [`Matrix::new`].
    pub fn with_activations(weight: Weight, wanted: ActivationKind) -> Result<Self, BackendError> {
        let &[n_rows, n_columns] = weight.shape() else {
            return Err(BackendError::WeightShape {
                name: weight.name().to_owned(),
                wanted: vec![weight.n_rows(), weight.n_columns()],
                got: weight.shape().to_vec(),
            });
        };
        let row_bytes = weight.format().row_bytes(n_columns);
        let Some(row_bytes) = row_bytes.filter(|_| is_supported(weight.format())) else {
            return Err(BackendError::UnsupportedFormat {
                backend: "cpu",
                name: weight.name().to_owned(),
                format: weight.format(),
                node: "a matrix".to_owned(),
            });
        };
        let activations = match (wanted, weight.format()) {
            (ActivationKind::F32, _) => ActivationKind::F32,
            (ActivationKind::Bf16, BlockFormat::BF16) => ActivationKind::Bf16,
            (_, format) => int8_kind(format),
        };
        Ok(Self {
            weight,
            n_rows,
            n_columns,
            row_bytes,
            activations,
            packed: None,
        })
    }

    /// This matrix with its rows packed.
    pub(crate) fn with_packed(self, packed: Option<PackedRows>) -> Self {
        Self { packed, ..self }
    }

    /// Some rows of this matrix as a matrix of their own, whose bytes are shared.
    ///
    /// # Errors
    /// [`BackendError::WeightShape`] where there are no such rows.
    pub(crate) fn rows(&self, rows: Range<usize>) -> Result<Self, BackendError> {
        let (weight, n_columns) = (&self.weight, self.n_columns);
        let bytes = rows.start.checked_mul(self.row_bytes).and_then(|start| {
            let end = rows.end.checked_mul(self.row_bytes)?;
            weight.bytes().slice(start..end)
        });
        let shape = vec![rows.len(), n_columns];
        let part = bytes.and_then(|bytes| {
            Weight::new(weight.name(), shape.clone(), weight.format(), bytes).ok()
        });
        let part = part.ok_or_else(|| BackendError::WeightShape {
            name: weight.name().to_owned(),
            wanted: shape,
            got: weight.shape().to_vec(),
        })?;
        let packed = self.packed.as_ref().and_then(|p| p.part(rows));
        Ok(Self::with_activations(part, self.activations)?.with_packed(packed))
    }

    /// Number of outputs.
    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    /// Number of inputs.
    pub fn n_columns(&self) -> usize {
        self.n_columns
    }

    /// The start of the first row.
    pub(crate) fn start(&self) -> *const u8 {
        let packed = self.packed.as_ref();
        let packed = packed.and_then(|p| p.rows(&self.weight, 0..p.n_rows()));
        packed.map_or(self.weight.bytes().as_ptr(), |rows| rows.bytes.as_ptr())
    }

    /// Bytes of one weight row, which a multiplication reads once per block of tokens.
    pub fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    /// The kind of activations that it is multiplied with.
    pub fn activation_kind(&self) -> ActivationKind {
        self.activations
    }

    /// `out[t][r] = Σ_c acts[t][c] · self[r][c]` for all tokens `t` and the weight rows `r` that
    /// are the columns of `out`, whose whole rows have [`Matrix::n_rows`] values.
    ///
    /// # Errors
    /// [`BackendError::WrongLength`] where the shapes do not agree, [`BackendError::Input`] where
    /// the activations are not of [`Matrix::activation_kind`].
    pub fn multiply(
        &self,
        kernels: &Kernels,
        acts: Activations<'_>,
        out: &mut OutputColumns<'_>,
    ) -> Result<(), BackendError> {
        self.check(acts, out)?;
        let outs = out.columns();
        let n_tokens = out.n_tokens();
        let rows_at_once = match (n_tokens, acts) {
            (0, _) => return Ok(()),
            // These kernels block rows themselves.
            (1, _) | (_, Activations::Int8(_)) => outs.len(),
            _ => (ROW_BLOCK_BYTES / self.row_bytes.max(1) / ROW_BLOCK).max(1) * ROW_BLOCK,
        };
        let parts = self.parts(outs).into_iter();
        for rows in parts.flat_map(|part| steps(part, rows_at_once)) {
            let Some(weights) = self.weight_rows(rows) else {
                break;
            };
            match acts {
                Activations::F32(values) if is_quantised(weights.format) => {
                    gemm_dequant_f32::multiply(kernels, &weights, values, out);
                }
                _ => (kernels.multiply)(weights, acts, 0..n_tokens, out),
            }
        }
        Ok(())
    }

    /// Row `i`, decoded: an embedding.
    ///
    /// # Errors
    /// [`BackendError::Input`] where there is no such row, [`BackendError::WrongLength`] where
    /// `out` does not have [`Matrix::n_columns`] values.
    pub fn row(&self, _kernels: &Kernels, i: usize, out: &mut [f32]) -> Result<(), BackendError> {
        expect_len("a row of the matrix", self.n_columns, out.len())?;
        let packed = self.packed.as_ref();
        // What is in memory anyway, not what would have to be read from the file again.
        let found = packed.and_then(|p| p.dequantize_row(&self.weight, i, out));
        if found.is_some() {
            return Ok(());
        }
        let bytes = i.checked_add(1).and_then(|end| self.row_range(i..end));
        let Some(bytes) = bytes else {
            let (name, n_rows) = (self.weight.name(), self.n_rows);
            let reason = format!("row {i} of '{name}', which has {n_rows} rows");
            return Err(BackendError::Input {
                input: "row of a matrix",
                reason,
            });
        };
        kv_block::dequantize(self.weight.format(), bytes, out);
        Ok(())
    }

    /// Those of some rows that are packed, and those after them.
    fn parts(&self, rows: Range<usize>) -> [Range<usize>; 2] {
        let n_packed = self.packed.as_ref().map_or(0, PackedRows::n_rows);
        let middle = n_packed.clamp(rows.start, rows.end);
        [rows.start..middle, middle..rows.end]
    }

    /// Some rows, packed if they are.
    fn weight_rows(&self, rows: Range<usize>) -> Option<WeightRows<'_>> {
        let packed = self.packed.as_ref();
        if let Some(rows) = packed.and_then(|p| p.rows(&self.weight, rows.clone())) {
            return Some(rows);
        }
        Some(WeightRows {
            format: self.weight.format(),
            layout: WeightLayout::Stored,
            first: rows.start,
            bytes: self.row_range(rows)?,
            row_bytes: self.row_bytes,
            n_columns: self.n_columns,
        })
    }

    fn row_range(&self, rows: Range<usize>) -> Option<&[u8]> {
        let bytes: &[u8] = self.weight.bytes();
        let (start, end) = (
            rows.start.checked_mul(self.row_bytes),
            rows.end.checked_mul(self.row_bytes),
        );
        bytes.get(start?..end?)
    }

    /// Checks that there are so many rows of activations, and as many columns as the matrix has.
    fn expect_rows(
        &self,
        n_tokens: usize,
        n_columns: usize,
        out: &OutputColumns<'_>,
    ) -> Result<(), BackendError> {
        expect_len("columns of the activations", self.n_columns, n_columns)?;
        expect_len("rows of the activations", out.n_tokens(), n_tokens)
    }

    fn check(&self, acts: Activations<'_>, out: &OutputColumns<'_>) -> Result<(), BackendError> {
        expect_len("columns of the output", self.n_rows, out.n_columns())?;
        match (self.activation_kind(), acts) {
            (ActivationKind::F32, Activations::F32(values)) => {
                expect_len("activations", out.n_tokens() * self.n_columns, values.len())
            }
            (wanted, Activations::Int8(rows)) if wanted == rows.kind() => {
                self.expect_rows(rows.n_tokens(), rows.n_columns(), out)
            }
            (ActivationKind::Bf16, Activations::Bf16(rows)) => {
                self.expect_rows(rows.n_tokens(), rows.n_columns(), out)
            }
            (wanted, _) => {
                let (name, format) = (self.weight.name(), self.weight.format());
                let reason = format!("'{name}' in {format} needs activations as {wanted:?}");
                Err(BackendError::Input {
                    input: "activations",
                    reason,
                })
            }
        }
    }
}

/// True if values of this format share scales.
pub(crate) fn is_quantised(format: BlockFormat) -> bool {
    format.block_len() > 1
}

/// Formats of 256 values have integer scales inside: sums of them stay integers as long as the
/// activations' scale reaches as far. There are no kernels of `NVFP4`, whose groups are half as
/// long as those of other formats.
pub(crate) fn int8_kind(format: BlockFormat) -> ActivationKind {
    match format.block_len() {
        _ if format == BlockFormat::NVFP4 => ActivationKind::F32,
        1 => ActivationKind::F32,
        len if len < ScaleSpan::SuperBlock.len() => ActivationKind::Int8,
        _ => ActivationKind::Int8Long,
    }
}

/// The formats that every table's `multiply` knows: one that is added elsewhere is refused here.
fn is_supported(format: BlockFormat) -> bool {
    use BlockFormat as B;
    matches!(
        format,
        B::F32
            | B::F16
            | B::BF16
            | B::Q4_0
            | B::Q4_1
            | B::Q5_0
            | B::Q5_1
            | B::Q8_0
            | B::Q2_K
            | B::Q3_K
            | B::Q4_K
            | B::Q5_K
            | B::Q6_K
            | B::IQ4_NL
            | B::IQ4_XS
            | B::MXFP4
            | B::IQ1_S
            | B::IQ1_M
            | B::IQ2_XXS
            | B::IQ2_XS
            | B::IQ2_S
            | B::IQ3_XXS
            | B::IQ3_S
            | B::TQ1_0
            | B::TQ2_0
            | B::Q1_0
            | B::Q2_0
            | B::NVFP4
    )
}

/// Cuts a range into pieces of at most `step`.
fn steps(range: Range<usize>, step: usize) -> impl Iterator<Item = Range<usize>> {
    let end = range.end;
    range
        .step_by(step.max(1))
        .map(move |start| start..end.min(start + step.max(1)))
}
