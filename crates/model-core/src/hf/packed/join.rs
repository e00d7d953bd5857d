//! Joins the tensors of packed matrices, which are no tensors of their own from then on.

use std::sync::Arc;

use kv_block::BlockFormat;

use super::codes::{Axis, Codes, WordGrid, WordOrder};
use super::module::{Module, stored_as};
use super::scales::{GlobalScale, Groups, ScaleType, Scales};
use super::{Numbers, Packed, Zeros};
use crate::error::ModelFileError;
use crate::hf::files::{TensorCoding, TensorFiles, TensorLocation};
use crate::hf::quantization::{BitnetScale, Storage, ZeroPoints};

/// Ends of the names of the tensors that a matrix of GPTQ or AWQ is made of.
const GPTQ_PARTS: [&str; 4] = ["qweight", "qzeros", "scales", "g_idx"];
/// The same of compressed-tensors and ModelOpt, with the scales of activations, which are not
/// rounded here.
const COMPRESSED_PARTS: [&str; 10] = [
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "weight_shape",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
];
/// The same of gpt-oss, behind the name of the matrix.
const BLOCK_PARTS: [&str; 2] = ["blocks", "scales"];
/// The same of BitNet.
const BITNET_PARTS: [&str; 2] = ["weight", "weight_scale"];
/// Rows of a BitNet matrix that share a row of bytes.
const BITNET_ROWS: usize = 4;
/// Bits of the numbers of GPTQ.
const GPTQ_BITS: [usize; 4] = [2, 3, 4, 8];
/// Bits of the numbers of compressed-tensors of which older and newer versions store as many in a
/// word.
const COMPRESSED_BITS: [usize; 3] = [2, 4, 8];

/// Joins the matrices that are stored in this way.
///
/// # Errors
/// [`ModelFileError::Tensor`] where a part is missing, or does not fit the others.
pub(in crate::hf) fn join(files: &mut TensorFiles, storage: Storage) -> Result<(), ModelFileError> {
    let parts: &[&str] = match storage {
        Storage::AsTheyAre => return check_unpacked(files),
        Storage::Gptq { .. } | Storage::Awq => &GPTQ_PARTS,
        Storage::Compressed => &COMPRESSED_PARTS,
        Storage::FloatBlocks => &BLOCK_PARTS,
        Storage::Bitnet(_) => &BITNET_PARTS,
    };
    let names = files.tensors.iter();
    let modules = names.filter_map(|(name, stored)| place_of(name, stored, storage));
    let modules: Vec<String> = modules.map(str::to_owned).collect();
    let mut widened = WidenedMatrix::default();
    for place in modules {
        let module = Module {
            files,
            place: &place,
        };
        let packed = match storage {
            Storage::Gptq { zero_points, bits } => gptq(&module, zero_points, bits)?,
            Storage::Awq => awq(&module)?,
            Storage::AsTheyAre | Storage::Compressed => compressed(&module)?,
            Storage::FloatBlocks => float_blocks(&module)?,
            Storage::Bitnet(scale) => bitnet(&module, scale)?,
        };
        let format = packed.nearest();
        let format = format.map_err(|reason| module.wrong(scale_part(storage), reason))?;
        let (n_rows, n_columns) = (packed.n_rows, packed.n_columns);
        let (name, shape) = match storage {
            Storage::FloatBlocks => {
                let outer = module.part("scales")?.shape.split_last();
                let outer = outer.map_or(&[][..], |(_, outer)| outer);
                let name = place.trim_end_matches('_').to_owned();
                (name, [outer, &[n_columns]].concat())
            }
            _ => (format!("{place}weight"), vec![n_rows, n_columns]),
        };
        let is_apart = module.optional(parts[0]).is_some();
        for part in parts {
            files.tensors.remove(&format!("{place}{part}"));
        }
        if format == BlockFormat::F32 {
            widened.count += 1;
            widened.n_values += n_rows * n_columns;
        }
        let weight = TensorLocation {
            shape,
            format: Ok(format),
            bytes: packed.codes.bytes().clone(),
            coding: Some(TensorCoding::Packed(Arc::new(packed))),
        };
        if files.tensors.insert(name.clone(), weight).is_some() && is_apart {
            let reason = format!(
                "it is there, and so is its packed form, '{place}{}'",
                parts[0]
            );
            return Err(ModelFileError::Tensor { name, reason });
        }
    }
    widened.tell();
    Ok(())
}

/// Checks that no matrix is packed where the config does not say how.
fn check_unpacked(files: &TensorFiles) -> Result<(), ModelFileError> {
    let ends = [GPTQ_PARTS[0], COMPRESSED_PARTS[0]];
    let is_packed = |(name, stored): &(&String, &TensorLocation)| {
        let is_bytes = name.ends_with(".weight") && stored_as(stored) == "U8";
        is_bytes || ends.iter().any(|end| name.ends_with(&format!(".{end}")))
    };
    match files.tensors.iter().find(is_packed) {
        None => Ok(()),
        Some((name, _)) => Err(ModelFileError::Tensor {
            name: name.clone(),
            reason: "it is packed, but 'config.json' has no 'quantization_config' that says how; \
                     take it from the tool that quantized the model"
                .to_owned(),
        }),
    }
}

/// Matrices that no block format holds as they are.
#[derive(Default)]
struct WidenedMatrix {
    count: usize,
    n_values: usize,
}

impl WidenedMatrix {
    fn tell(&self) {
        if self.count > 0 {
            tracing::warn!(
                "{} packed matrices become F32, {} bytes, because no block format holds their \
                 numbers and scales as they are; `cellar convert` writes them smaller",
                self.count,
                4 * self.n_values
            );
        }
    }
}

/// The beginning of the names of all parts of the matrix of which a tensor is the packed one.
fn place_of<'a>(name: &'a str, stored: &TensorLocation, storage: Storage) -> Option<&'a str> {
    match storage {
        Storage::AsTheyAre => None,
        Storage::FloatBlocks => name.strip_suffix("blocks").filter(|n| n.ends_with('_')),
        Storage::Gptq { .. } | Storage::Awq => name.strip_suffix("qweight"),
        Storage::Bitnet(_) => {
            let place = name.strip_suffix("weight").filter(|n| n.ends_with('.'));
            place.filter(|_| stored_as(stored) == "U8")
        }
        Storage::Compressed => name.strip_suffix("weight_packed").or_else(|| {
            let is_packed = matches!(stored_as(stored), "I8" | "U8");
            let place = name.strip_suffix("weight").filter(|n| n.ends_with('.'));
            place.filter(|_| is_packed)
        }),
    }
}

fn scale_part(storage: Storage) -> &'static str {
    match storage {
        Storage::Gptq { .. } | Storage::Awq | Storage::FloatBlocks => "scales",
        Storage::AsTheyAre | Storage::Compressed | Storage::Bitnet(_) => "weight_scale",
    }
}

/// The words of a matrix of GPTQ or AWQ, whose stored rows are groups or columns.
fn words(shape: [usize; 2], along: Axis) -> WordGrid {
    WordGrid {
        shape,
        word_bytes: 4,
        row_dimension: 1,
        along,
    }
}

/// GPTQ: codes of columns share words, and so do zero points of rows.
fn gptq(
    module: &Module<'_>,
    zero_points: ZeroPoints,
    stated: Option<usize>,
) -> Result<Packed, ModelFileError> {
    let [word_rows, n_rows] = module.matrix("qweight", "I32")?;
    let zero_shape = module.matrix("qzeros", "I32")?;
    let n_groups = gptq_groups(module, n_rows)?;
    let bits = GPTQ_BITS.into_iter().find(|bits| {
        let is_stated = stated.is_none_or(|stated| stated == *bits);
        is_stated && zero_shape[0] == n_groups && zero_shape[1] * 32 == n_rows * bits
    });
    let Some(bits) = bits.filter(|bits| (word_rows * 32).is_multiple_of(*bits)) else {
        let stated = stated.map_or_else(|| "2, 3, 4 or 8".to_owned(), |bits| bits.to_string());
        return Err(module.wrong(
            "qzeros",
            format!(
                "shape {zero_shape:?}, with {n_groups} groups of {n_rows} rows and 'qweight' of \
                 [{word_rows}, {n_rows}]: that is not {stated} bits a number"
            ),
        ));
    };
    let n_columns = word_rows * 32 / bits;
    let codes = module.codes("qweight", bits, words([word_rows, n_rows], Axis::Columns))?;
    let zeros = module.codes("qzeros", bits, words(zero_shape, Axis::Rows))?;
    let more = match zero_points {
        ZeroPoints::OneLess => 1,
        ZeroPoints::AsStored => 0,
    };
    Ok(Packed {
        n_rows,
        n_columns,
        codes,
        numbers: Numbers::Integers(Zeros::Each(zeros, more)),
        scales: module.scales("scales", n_groups * n_rows, [1, n_rows])?,
        groups: module.groups("g_idx", n_columns, n_groups)?,
        n_groups,
    })
}

/// AWQ: codes and zero points of eight rows share a word, those with even places first.
fn awq(module: &Module<'_>) -> Result<Packed, ModelFileError> {
    const BITS: usize = 4;
    let [n_columns, row_words] = module.matrix("qweight", "I32")?;
    let n_rows = row_words * 8;
    let zero_shape = module.matrix("qzeros", "I32")?;
    let n_groups = gptq_groups(module, n_rows)?;
    if zero_shape != [n_groups, row_words] {
        let reason = format!("shape {zero_shape:?}, where [{n_groups}, {row_words}] is expected");
        return Err(module.wrong("qzeros", reason));
    }
    let codes = |part, shape| {
        let codes = module.codes(part, BITS, words(shape, Axis::Rows))?;
        Ok::<Codes, ModelFileError>(codes.in_order(WordOrder::EvenFirst))
    };
    let zeros = codes("qzeros", zero_shape)?;
    Ok(Packed {
        n_rows,
        n_columns,
        codes: codes("qweight", [n_columns, row_words])?,
        numbers: Numbers::Integers(Zeros::Each(zeros, 0)),
        scales: module.scales("scales", n_groups * n_rows, [1, n_rows])?,
        groups: module.groups("g_idx", n_columns, n_groups)?,
        n_groups,
    })
}

/// The number of groups that have scales for so many rows.
fn gptq_groups(module: &Module<'_>, n_rows: usize) -> Result<usize, ModelFileError> {
    let scales = module.part("scales")?;
    match *scales.shape.as_slice() {
        [n_groups, rows] if rows == n_rows && n_groups > 0 => Ok(n_groups),
        _ => {
            let reason = format!(
                "shape {:?}, where one for each group and each of {n_rows} rows is expected",
                scales.shape
            );
            Err(module.wrong("scales", reason))
        }
    }
}

/// compressed-tensors, and the 4-bit floats of ModelOpt: codes of columns share words.
fn compressed(module: &Module<'_>) -> Result<Packed, ModelFileError> {
    let part = match module.optional("weight_packed") {
        Some(_) => "weight_packed",
        None => "weight",
    };
    let stored = stored_as(module.part(part)?);
    let shape = module.matrix(part, stored)?;
    let n_rows = shape[0];
    let (bits, n_columns) = match stored {
        "I32" => packed_integers(module, shape)?,
        "I8" => (8, shape[1]),
        "U8" => (4, 2 * shape[1]),
        other => return Err(module.wrong(part, format!("numbers packed as {other}"))),
    };
    let grid = WordGrid {
        shape,
        word_bytes: if stored == "I32" { 4 } else { 1 },
        row_dimension: 0,
        along: Axis::Columns,
    };
    let mut codes = module.codes(part, bits, grid)?;
    if stored == "I8" {
        codes = codes.signed_bytes();
    }
    let (scales, n_groups) = compressed_scales(module, n_rows)?;
    let numbers = match stored {
        "U8" => Numbers::Floats,
        _ => Numbers::Integers(compressed_zeros(module, n_rows, n_groups, bits)?),
    };
    Ok(Packed {
        n_rows,
        n_columns,
        codes,
        numbers,
        scales,
        groups: module.groups("weight_g_idx", n_columns, n_groups)?,
        n_groups,
    })
}

/// Bits and columns of whole numbers in words, as the stored shape says.
fn packed_integers(
    module: &Module<'_>,
    [n_rows, n_words]: [usize; 2],
) -> Result<(usize, usize), ModelFileError> {
    let shape = module.numbers("weight_shape")?;
    let columns = match *shape.as_slice() {
        [rows, columns] if usize::try_from(rows) == Ok(n_rows) => usize::try_from(columns).ok(),
        _ => None,
    };
    let fits = |bits: &usize| {
        let n_bits = columns.and_then(|n| n.checked_mul(*bits));
        n_bits.is_some_and(|n_bits| n_bits.div_ceil(32) == n_words)
    };
    let mut bits = COMPRESSED_BITS.into_iter().filter(fits);
    match (bits.next(), bits.next(), columns) {
        (Some(bits), None, Some(columns)) => Ok((bits, columns)),
        _ => Err(module.wrong(
            "weight_shape",
            format!(
                "{shape:?} for 'weight_packed' of [{n_rows}, {n_words}] words: that is not 2, 4 or \
                 8 bits a number"
            ),
        )),
    }
}

/// Scales, and the number of groups that they are for.
fn compressed_scales(
    module: &Module<'_>,
    n_rows: usize,
) -> Result<(Scales, usize), ModelFileError> {
    let part = "weight_scale";
    let shape = module.part(part)?.shape.as_slice();
    let (steps, n_groups) = match *shape {
        [] | [1] | [1, 1] => ([0, 0], 1),
        [rows] if rows == n_rows => ([1, 0], 1),
        [rows, groups] if rows == n_rows && groups > 0 => ([groups, 1], groups),
        _ => {
            let reason = format!(
                "shape {shape:?}, where one, one for each of {n_rows} rows, or one for each row \
                 and group is expected"
            );
            return Err(module.wrong(part, reason));
        }
    };
    let scales = module.scales(part, shape.iter().product(), steps)?;
    let global = |part: &str| match module.optional(part) {
        None => Ok(None),
        Some(_) => {
            let scales = module.scales(part, 1, [0, 0])?;
            Ok::<_, ModelFileError>(Some(scales.get(0, 0)))
        }
    };
    let global = match (global("weight_global_scale")?, global("weight_scale_2")?) {
        (Some(divisor), _) => GlobalScale::Divisor(divisor),
        (None, Some(factor)) => GlobalScale::Factor(factor),
        (None, None) => GlobalScale::None,
    };
    // Without it, scales of 8 bits would be taken for what they are not.
    if scales.stored() == ScaleType::E4M3 && global == GlobalScale::None {
        let reason = "it is missing, but 'weight_scale' has floats of 8 bits, which it divides";
        return Err(module.wrong("weight_global_scale", reason));
    }
    Ok((scales.with_global(global), n_groups))
}

/// Zero points: in words that rows share, as signed bytes, or in the middle of all numbers.
fn compressed_zeros(
    module: &Module<'_>,
    n_rows: usize,
    n_groups: usize,
    bits: usize,
) -> Result<Zeros, ModelFileError> {
    let part = "weight_zero_point";
    let Some(stored) = module.optional(part) else {
        return Ok(Zeros::Same(1 << (bits - 1)));
    };
    let (is_bytes, wanted) = match stored_as(stored) {
        "I8" => (true, n_rows),
        _ => (false, (n_rows * bits).div_ceil(32)),
    };
    let shape = match *stored.shape.as_slice() {
        [rows] => [rows, 1],
        [rows, groups] => [rows, groups],
        _ => [0, 0],
    };
    if shape != [wanted, n_groups] || !matches!(stored_as(stored), "I8" | "I32") {
        let reason = format!(
            "{} of shape {:?}, where {n_groups} for each of {n_rows} rows are expected",
            stored_as(stored),
            stored.shape
        );
        return Err(module.wrong(part, reason));
    }
    let grid = WordGrid {
        shape,
        word_bytes: if is_bytes { 1 } else { 4 },
        row_dimension: 0,
        along: if is_bytes { Axis::Columns } else { Axis::Rows },
    };
    if is_bytes {
        let codes = module.codes(part, 8, grid)?.signed_bytes();
        return Ok(Zeros::Each(codes, (1 << (bits - 1)) - 128));
    }
    Ok(Zeros::Each(module.codes(part, bits, grid)?, 0))
}

/// The experts of gpt-oss: 32 floats of 4 bits and the exponent of their power of two.
fn float_blocks(module: &Module<'_>) -> Result<Packed, ModelFileError> {
    let blocks = module.part("blocks")?;
    let scales = module.part("scales")?;
    let (n_rows, n_blocks) = match (blocks.shape.as_slice(), scales.shape.as_slice()) {
        ([outer @ .., n_blocks @ (1..), 16], [places @ .., n_scales])
            if !outer.is_empty() && outer == places && n_scales == n_blocks =>
        {
            (outer.iter().product::<usize>(), *n_blocks)
        }
        (found, other) => {
            let reason =
                format!("shape {found:?}, with scales of {other:?}: blocks of 16 bytes are read");
            return Err(module.wrong("blocks", reason));
        }
    };
    if n_rows == 0 || [blocks, scales].iter().any(|part| stored_as(part) != "U8") {
        let reason = format!(
            "{} with scales as {} in {n_rows} rows, where U8 is expected",
            stored_as(blocks),
            stored_as(scales)
        );
        return Err(module.wrong("blocks", reason));
    }
    let grid = WordGrid {
        shape: [n_rows, n_blocks * 16],
        word_bytes: 1,
        row_dimension: 0,
        along: Axis::Columns,
    };
    Ok(Packed {
        n_rows,
        n_columns: n_blocks * 32,
        codes: module.codes("blocks", 4, grid)?,
        numbers: Numbers::Floats,
        scales: module.scales("scales", n_rows * n_blocks, [n_blocks, 1])?,
        groups: Groups::Even(32),
        n_groups: n_blocks,
    })
}

/// BitNet: a row of bytes has a quarter of the rows in each pair of bits, the first in the lowest.
fn bitnet(module: &Module<'_>, scale: BitnetScale) -> Result<Packed, ModelFileError> {
    const BITS: usize = 2;
    let shape = module.matrix("weight", "U8")?;
    let [byte_rows, n_columns] = shape;
    let grid = WordGrid {
        shape,
        word_bytes: 1,
        row_dimension: 0,
        along: Axis::Rows,
    };
    let codes = module.codes("weight", BITS, grid)?;
    let n_scales = module.part("weight_scale")?.shape.iter().product();
    if n_scales != 1 {
        let reason = format!("{n_scales} scales, where one for the matrix is expected");
        return Err(module.wrong("weight_scale", reason));
    }
    let scales = module.scales("weight_scale", n_scales, [0, 0])?;
    Ok(Packed {
        n_rows: byte_rows * BITNET_ROWS,
        n_columns,
        codes: codes.in_order(WordOrder::Apart(byte_rows)),
        numbers: Numbers::Integers(Zeros::Same(1)),
        scales: match scale {
            BitnetScale::Multiplies => scales,
            BitnetScale::Divides => scales.with_global(GlobalScale::Inverse),
        },
        groups: Groups::Even(n_columns),
        n_groups: 1,
    })
}

impl TensorFiles {
    /// True for what tools add to a quantized model and nothing here needs: a bias of a packed
    /// matrix that adds nothing, or one scale for the keys or values that a cache of 8-bit floats
    /// would have.
    pub(in crate::hf) fn is_idle(&self, name: &str) -> bool {
        let Some(tensor) = self.tensors.get(name) else {
            return false;
        };
        if [".k_scale", ".v_scale"]
            .iter()
            .any(|end| name.ends_with(end))
        {
            return tensor.shape.iter().product::<usize>() == 1;
        }
        let module = name.strip_suffix(".bias");
        let matrix = module.and_then(|module| self.tensors.get(&format!("{module}.weight")));
        let is_packed =
            matrix.is_some_and(|matrix| matches!(matrix.coding, Some(TensorCoding::Packed(_))));
        is_packed && tensor.bytes.iter().all(|byte| *byte == 0)
    }
}
