//! Weights of 8-bit floats (E4M3) with scales in tensors next to them: one for all of a matrix, one
//! a row, or one for each 128 rows and columns.
//!
//! Invariant: a value is its float times its scale, in `F32`, which is what these formats say; no
//! value is rounded to fewer bits. They are decoded when they are requested.

use std::sync::{Arc, LazyLock};

use kv_block::{BlockFormat, dequantize};
use kv_graph::weights::SharedBytes;

use super::ModelFileError;
use super::files::{TensorCoding, TensorFiles, TensorLocation};

/// What safetensors calls the type.
const E4M3: &str = "F8_E4M3";
/// Ends of the names of scales.
const SCALES: [&str; 2] = [".weight_scale_inv", ".weight_scale"];
/// Scales of activations, which are not rounded here.
const OF_ACTIVATIONS: [&str; 2] = [".input_scale", ".activation_scale"];
/// Rows and columns that share a scale in blocks.
const BLOCK: usize = 128;

/// The scales of a matrix.
#[derive(Clone, Debug)]
pub(super) struct Fp8Scales {
    scales: Arc<[f32]>,
    n_columns: usize,
    /// Rows and columns that share a scale.
    block: [usize; 2],
}

impl Fp8Scales {
    /// Scales of this shape for a matrix.
    fn new(scale: &TensorLocation, matrix: &[usize]) -> Option<Self> {
        let &[n_rows, n_columns] = matrix else {
            return None;
        };
        let format = *scale.format.as_ref().ok()?;
        let wanted: &[usize] = match scale.shape.as_slice() {
            [] => &[1, 1],
            [n] => &[*n, 1],
            other => other,
        };
        let blocks = [n_rows.div_ceil(BLOCK), n_columns.div_ceil(BLOCK)];
        let block = match wanted {
            [1, 1] => [n_rows, n_columns],
            [n, 1] if *n == n_rows => [1, n_columns],
            of if of == blocks => [BLOCK, BLOCK],
            _ => return None,
        };
        let mut scales = vec![0.0; wanted.iter().product()];
        if format.block_len() != 1 {
            return None;
        }
        // Without values where only the header of the file is known: no matrix is decoded then.
        if !scale.bytes.is_empty() {
            if format.row_bytes(scales.len())? != scale.bytes.len() {
                return None;
            }
            dequantize(format, &scale.bytes, &mut scales);
        }
        Some(Self {
            scales: scales.into(),
            n_columns,
            block,
        })
    }

    /// The values of a matrix as `F32`.
    pub(super) fn decode(&self, floats: &[u8]) -> SharedBytes {
        let [block_rows, block_columns] = self.block.map(|n| n.max(1));
        let across = self.n_columns.div_ceil(block_columns);
        let rows = floats.chunks(self.n_columns.max(1)).enumerate();
        let values = rows.flat_map(|(row, floats)| {
            floats.iter().enumerate().map(move |(column, float)| {
                let at = row / block_rows * across + column / block_columns;
                let scale = self.scales.get(at).copied().unwrap_or_default();
                e4m3(*float) * scale
            })
        });
        SharedBytes::from_f32(&values.collect::<Vec<f32>>())
    }
}

/// The value of a byte.
pub(super) fn e4m3(byte: u8) -> f32 {
    VALUES[usize::from(byte)]
}

/// The value of each byte: a sign, four bits of exponent and three of mantissa.
static VALUES: LazyLock<[f32; 256]> = LazyLock::new(|| {
    std::array::from_fn(|byte| {
        let (sign, rest) = (byte as u8 >> 7, byte as u8 & 0x7f);
        // The bits in their places in an `f32`, whose exponent is 120 larger.
        let magnitude = match rest {
            0x7f => f32::NAN,
            _ => f32::from_bits(u32::from(rest) << 20) * 2f32.powi(120),
        };
        if sign == 1 { -magnitude } else { magnitude }
    })
});

/// Joins matrices with their scales, which are no tensors of their own from then on.
///
/// # Errors
/// [`ModelFileError::Tensor`] with scales that do not fit their matrix.
pub(super) fn join(files: &mut TensorFiles) -> Result<(), ModelFileError> {
    let of = |name: &str| {
        SCALES
            .iter()
            .find_map(|end| Some(name.strip_suffix(end)?.to_owned()))
    };
    let found = files
        .tensors
        .keys()
        .filter_map(|name| Some((name.clone(), of(name)?)));
    let found: Vec<(String, String)> = found.collect();
    for (name, module) in found {
        let (scale, matrix) = (files.tensors.get(&name), format!("{module}.weight"));
        let (Some(scale), Some(weight)) = (scale, files.tensors.get(&matrix)) else {
            continue;
        };
        if !matches!(&weight.format, Err(stored) if stored == E4M3) {
            continue;
        }
        let scales = Fp8Scales::new(scale, &weight.shape);
        let scales = scales.ok_or_else(|| ModelFileError::Tensor {
            name: name.clone(),
            reason: format!(
                "scales of shape {:?} for a matrix of {:?}: one, one a row, or one for each \
                 {BLOCK} × {BLOCK} values can be read",
                scale.shape, weight.shape
            ),
        })?;
        files.tensors.remove(&name);
        for end in OF_ACTIVATIONS {
            files.tensors.remove(&format!("{module}{end}"));
        }
        if let Some(weight) = files.tensors.get_mut(&matrix) {
            weight.format = Ok(BlockFormat::F32);
            weight.coding = Some(TensorCoding::Fp8(scales));
        }
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn location(
        shape: &[usize],
        format: Result<BlockFormat, String>,
        bytes: Vec<u8>,
    ) -> TensorLocation {
        TensorLocation {
            shape: shape.to_vec(),
            format,
            bytes: bytes.into(),
            coding: None,
        }
    }

    /// A matrix whose byte `i` is `i`, without NaN, and scales from 1 on.
    fn files(shape: [usize; 2], scales: &[usize]) -> TensorFiles {
        let bytes = (0..shape[0] * shape[1]).map(|i| (i % 127) as u8).collect();
        let n: usize = scales.iter().product();
        let values: Vec<f32> = (0..n).map(|i| 1.0 + i as f32).collect();
        let scale = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let mut files = TensorFiles::default();
        let of = |name: &str| format!("a.{name}");
        files
            .tensors
            .insert(of("weight"), location(&shape, Err(E4M3.into()), bytes));
        let name = of(if scales.len() == 2 {
            "weight_scale_inv"
        } else {
            "weight_scale"
        });
        files
            .tensors
            .insert(name, location(scales, Ok(BlockFormat::F32), scale));
        let one = 1f32.to_le_bytes().to_vec();
        files
            .tensors
            .insert(of("input_scale"), location(&[1], Ok(BlockFormat::F32), one));
        files
    }

    #[test]
    fn floats_are_those_of_the_definition() {
        for byte in 0..=255u8 {
            let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
            let magnitude = match exponent {
                0 => mantissa / 8.0 * 2f64.powi(-6),
                _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
            };
            let got = VALUES[usize::from(byte)];
            match byte & 0x7f {
                0x7f => assert!(got.is_nan()),
                _ => assert_eq!(f64::from(got.abs()), magnitude, "{byte}"),
            }
            assert_eq!(got.is_sign_negative(), byte >> 7 == 1, "{byte}");
        }
    }

    #[test]
    fn each_value_has_the_scale_of_its_tensor_row_or_block() {
        let shape = [130, 257];
        type Place = fn(usize, usize) -> usize;
        let by_place: [(&[usize], Place); 5] = [
            (&[], |_, _| 0),
            (&[1], |_, _| 0),
            (&[130], |row, _| row),
            (&[130, 1], |row, _| row),
            (&[2, 3], |row, column| row / 128 * 3 + column / 128),
        ];
        for (scales, place) in by_place {
            let mut files = files(shape, scales);
            join(&mut files).unwrap();
            assert_eq!(files.tensors.len(), 1, "{scales:?}");
            let weight = &files.tensors["a.weight"];
            assert_eq!(weight.format, Ok(BlockFormat::F32));
            let values = weight.values(BlockFormat::F32);
            let values = values.as_chunks().0.iter().map(|v| f32::from_le_bytes(*v));
            for (i, got) in values.enumerate() {
                let scale = 1.0 + place(i / 257, i % 257) as f32;
                assert_eq!(got, VALUES[i % 127] * scale, "{scales:?}: {i}");
            }
        }
    }

    #[test]
    fn scales_that_fit_no_matrix_are_refused_with_both_shapes() {
        for scales in [[3, 3], [2, 2], [130, 2]] {
            let error = join(&mut files([130, 257], &scales))
                .unwrap_err()
                .to_string();
            let both = error.contains("[130, 257]") && error.contains(&format!("{scales:?}"));
            assert!(both, "{error}");
        }
    }
}
