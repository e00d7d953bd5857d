//! [`Conversion`]: a model that is written as a GGUF file, in a format of choice.
//!
//! Invariant: tensors keep their names and values, up to the rounding of their formats, which are
//! chosen as `llama-quantize` chooses them.
//!
//! ```no_run
//! use cellar::convert::{Conversion, FileType};
//! use cellar::model_core::model_file::OpenModel;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let model = OpenModel::open("model", &cellar::architectures())?;
//! let file_type: FileType = "q4_k_m".parse()?;
//! let conversion = Conversion::new(&model, file_type, None)?;
//! for note in conversion.notes() {
//!     eprintln!("{note}");
//! }
//! let mut out = std::io::BufWriter::new(std::fs::File::create("model.gguf")?);
//! conversion.write(&mut out, |n_done| eprintln!("{n_done} of {}", conversion.n_values()))?;
//! # Ok(())
//! # }
//! ```

mod few_bits;
mod file_type;
mod importance;
mod mix;
mod pieces;

use std::io::Write;
use std::sync::Arc;

use kv_block::{BlockFormat, QuantizeError, check_range, quantize};
use kv_graph::weights::{Weight, WeightInfo, WeightSource};
use model_core::gguf::{GgufWriter, Metadata, PendingWeight};
use model_core::model_file::OpenModel;

pub use file_type::{AS_STORED, FILE_TYPES, FileType, IqMix, LowMix, Mix};
pub use importance::ColumnWeights;

use crate::error::Error;
use mix::{Columns, ModelTraits, NamedShape};
use pieces::{in_pieces, n_threads};

/// The choice of a weight's format in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FormatChoice {
    /// As files of the type have it.
    OfFileType,
    /// As the model has it.
    AsStored,
    /// In this format, or where that does not fit its shape, in the next larger one that does.
    /// Vectors and norms are F32.
    In(BlockFormat),
}

/// A model and the formats in which its tensors are written. See the [module](self).
pub struct Conversion<'a> {
    weights: Arc<dyn WeightSource>,
    metadata: Metadata,
    tensors: Vec<PendingWeight>,
    weighting: Option<&'a ColumnWeights>,
    notes: Vec<String>,
}

impl<'a> Conversion<'a> {
    /// Chooses the formats. With a `weighting`, matrices of 6 bits per value and fewer are
    /// quantized so that errors in important columns are small.
    ///
    /// # Errors
    /// [`Error::ColumnWeights`] where the importance matrix is of another model, or formats of
    /// so few bits are chosen that they need one that is not there; [`Error::Weight`] where the
    /// model lacks a tensor that it lists.
    pub fn new(
        model: &OpenModel,
        file_type: FileType,
        weighting: Option<&'a ColumnWeights>,
    ) -> Result<Self, Error> {
        Self::with_formats(model, file_type, weighting, &|_, _| {
            FormatChoice::OfFileType
        })
    }

    /// The same, where `choose` says how each weight is stored, by its name and how the model has
    /// it.
    ///
    /// # Errors
    /// As [`Self::new`]; [`Error::Quantize`] where a format is chosen that cannot be written.
    pub fn with_formats(
        model: &OpenModel,
        file_type: FileType,
        weighting: Option<&'a ColumnWeights>,
        choose: &dyn Fn(&str, &WeightInfo) -> FormatChoice,
    ) -> Result<Self, Error> {
        let read = ReadTensors::of(model)?;
        let columns = weighting.map_or(Columns::Alike, |_| Columns::Weighted);
        let traits = traits(model, &read.tensors, columns);
        let mut formats = mix::formats(file_type, traits, &read.tensors);
        for ((tensor, info), format) in read.tensors.iter().zip(&read.infos).zip(&mut formats) {
            match choose(&tensor.name, info) {
                FormatChoice::OfFileType => {}
                FormatChoice::AsStored => *format = info.format,
                FormatChoice::In(wanted) => {
                    *format = mix::fitting(tensor, wanted);
                    check_encodes(&tensor.name, *format)?;
                }
            }
        }
        importance::check_needed(Some(file_type), read.changed(&formats), weighting)?;
        let mut conversion = Self::of(model, read, formats, weighting)?;
        let metadata = conversion.metadata_mut();
        metadata.insert("general.file_type", file_type.number);
        Ok(conversion)
    }

    /// A copy: each tensor in the format that the model's files have it in, byte for byte. Matrices
    /// that merged adapters change are quantized to theirs again, with the `weighting`, where there
    /// is one. Vectors in half precision become `F32`, which loses nothing: other readers of GGUF
    /// files know no other vectors.
    ///
    /// # Errors
    /// [`Error::NotInGguf`] where no format of GGUF files holds a tensor as the files have it, as
    /// 8-bit floats with scales; [`Error::Quantize`] where adapters change one in a format that
    /// cannot be written; as [`Self::new`] otherwise.
    pub fn as_stored(
        model: &OpenModel,
        weighting: Option<&'a ColumnWeights>,
    ) -> Result<Self, Error> {
        let read = ReadTensors::of(model)?;
        check_held(model, &read.tensors)?;
        let (mut formats, mut n_changed) = (Vec::new(), 0);
        for (NamedShape { name, shape }, info) in read.tensors.iter().zip(&read.infos) {
            // A head of another file is as that has it.
            let stored = model.stored_info(name);
            let stored = stored.map_or(info.format, |stored| stored.format);
            if stored != info.format {
                check_encodes(name, stored)?;
                n_changed += usize::from(stored.block_len() > 1);
            }
            let is_half = matches!(stored, BlockFormat::F16 | BlockFormat::BF16);
            let is_widened = is_half && shape.len() < 2;
            formats.push(if is_widened { BlockFormat::F32 } else { stored });
        }
        importance::check_needed(None, read.changed(&formats), weighting)?;
        let mut conversion = Self::of(model, read, formats, weighting)?;
        if n_changed > 0 {
            conversion.notes.push(format!(
                "{n_changed} tensors that adapters change are quantized again, as they were, which \
                 loses accuracy; merge into the original model where there is one"
            ));
        }
        Ok(conversion)
    }

    /// A file of these tensors in these formats.
    fn of(
        model: &OpenModel,
        read: ReadTensors,
        formats: Vec<BlockFormat>,
        weighting: Option<&'a ColumnWeights>,
    ) -> Result<Self, Error> {
        let mut notes = Vec::new();
        let mut metadata = model.metadata().clone();
        if !metadata.contains("tokenizer.ggml.model") {
            notes.push("the model has no tokenizer, so the file will have none".to_owned());
        }
        // The file is whole, where the model's has parts.
        for key in ["split.no", "split.count", "split.tensors.count"] {
            metadata.remove(key);
        }
        metadata.insert("general.quantization_version", 2u32);
        notes.extend(requantized(&read.infos, &formats));
        if let Some(weighting) = weighting {
            notes.extend(weighting.check(&read.tensors, &formats)?);
            weighting.describe(&mut metadata);
        }
        let pending = |(NamedShape { name, shape }, format)| PendingWeight {
            name,
            info: WeightInfo { shape, format },
        };
        let tensors = read.tensors.into_iter().zip(formats);
        Ok(Self {
            weights: read.weights,
            metadata,
            tensors: tensors.map(pending).collect(),
            weighting,
            notes,
        })
    }

    /// Changes the metadata of the file.
    pub fn metadata_mut(&mut self) -> &mut Metadata {
        &mut self.metadata
    }

    /// Sentences about what the file will lack, or what is lost in it.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The tensors of the file, with their formats.
    pub fn tensors(&self) -> &[PendingWeight] {
        &self.tensors
    }

    /// Values of all tensors.
    pub fn n_values(&self) -> usize {
        self.tensors.iter().map(n_values).sum()
    }

    /// Writes the file, one tensor after the other. `progress` gets the number of values that are
    /// done. Returns the bytes of the file.
    ///
    /// # Errors
    /// [`Error`]. What was written by then is not a GGUF file.
    pub fn write(
        &self,
        out: &mut impl Write,
        mut progress: impl FnMut(usize),
    ) -> Result<u64, Error> {
        let mut n_done = 0;
        let writer = GgufWriter::with_metadata(self.metadata.clone());
        writer.write_each(out, &self.tensors, |pending| {
            let weight = self.weights.require(&pending.name)?;
            let converted = convert(&weight, pending.info.format, self.weighting)?;
            self.weights.check()?;
            n_done += n_values(pending);
            progress(n_done);
            Ok(converted)
        })
    }
}

/// The tensors of a model, in the order of the file.
struct ReadTensors {
    weights: Arc<dyn WeightSource>,
    tensors: Vec<NamedShape>,
    /// Their formats and shapes in the model.
    infos: Vec<WeightInfo>,
}

impl ReadTensors {
    fn of(model: &OpenModel) -> Result<Self, Error> {
        let weights = model.weights();
        let mut names = weights.names();
        names.sort_by_key(|name| natural(name));
        let infos = names.iter().map(|name| weights.describe(name));
        let infos: Vec<WeightInfo> = infos.collect::<Result<_, _>>()?;
        let tensors = names.into_iter().zip(&infos);
        let tensors = tensors.map(|(name, WeightInfo { shape, .. })| NamedShape {
            name,
            shape: shape.clone(),
        });
        Ok(Self {
            tensors: tensors.collect(),
            weights,
            infos,
        })
    }

    /// Those that get another format than the model has them in.
    fn changed<'a>(
        &'a self,
        formats: &'a [BlockFormat],
    ) -> impl Iterator<Item = (&'a str, BlockFormat)> {
        let tensors = self.tensors.iter().zip(&self.infos).zip(formats);
        let changed = tensors.filter(|((_, info), format)| info.format != **format);
        changed.map(|((tensor, _), format)| (tensor.name.as_str(), *format))
    }
}

/// Checks that no tensor has become `F32` because no format holds what the files have.
fn check_held(model: &OpenModel, tensors: &[NamedShape]) -> Result<(), Error> {
    let widened = |tensor: &NamedShape| Some((tensor.name.clone(), model.widened(&tensor.name)?));
    let mut widened = tensors.iter().filter_map(widened);
    match widened.next() {
        None => Ok(()),
        Some((name, stored)) => Err(Error::NotInGguf {
            name,
            stored,
            n_more: widened.count(),
        }),
    }
}

fn n_values(weight: &PendingWeight) -> usize {
    weight.info.shape.iter().product()
}

/// A name with its layer before the rest, so that layer 10 comes after layer 9.
fn natural(name: &str) -> (Option<u32>, String) {
    let layer = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'));
    match layer {
        Some((number, rest)) => (number.parse().ok(), rest.to_owned()),
        None => (None, name.to_owned()),
    }
}

/// What the choice of formats depends on.
fn traits(model: &OpenModel, tensors: &[NamedShape], columns: Columns) -> ModelTraits {
    let metadata = model.metadata();
    let architecture = model.model().architecture();
    let count =
        |key: &str| -> Option<u32> { metadata.get::<u32>(&format!("{architecture}.{key}")).ok() };
    let layers = tensors
        .iter()
        .filter_map(|tensor| mix::layer_of(&tensor.name));
    let heads = ["attention.head_count", "attention.head_count_kv"].map(count);
    ModelTraits {
        n_layers: layers.max().map_or(0, |last| last + 1),
        n_experts: count("expert_count").unwrap_or(0) as usize,
        queries_per_kv: match heads {
            [Some(n), Some(n_kv)] => n.checked_div(n_kv).unwrap_or(1) as usize,
            _ => 1,
        },
        columns,
    }
}

/// A note on tensors that are quantized for the second time: that adds one rounding to another.
fn requantized(infos: &[WeightInfo], formats: &[BlockFormat]) -> Option<String> {
    let is_requantized = |(info, format): &(&WeightInfo, &BlockFormat)| {
        info.format.block_len() > 1 && info.format != **format && format.block_len() > 1
    };
    let requantized = infos.iter().zip(formats).filter(is_requantized);
    let mut names: Vec<&str> = requantized.map(|(info, _)| info.format.name()).collect();
    let n = names.len();
    names.sort_unstable();
    names.dedup();
    (n > 0).then(|| {
        format!(
            "{n} tensors are quantized already ({}) and are quantized again, which loses accuracy; \
             convert the original model",
            names.join(", ")
        )
    })
}

/// Checks that values can be written in a format.
fn check_encodes(name: &str, format: BlockFormat) -> Result<(), Error> {
    let encoded = quantize(format, &vec![0.0; format.block_len()]);
    encoded.map(drop).map_err(|source| Error::Quantize {
        name: name.to_owned(),
        source,
    })
}

/// The same weight in another format, with the importance of its columns, where it is known.
fn convert(
    weight: &Weight,
    format: BlockFormat,
    weighting: Option<&ColumnWeights>,
) -> Result<Weight, Error> {
    if weight.format() == format {
        return Ok(weight.clone());
    }
    let values = weight.to_f32();
    let weighted = || weighting.and_then(|w| w.quantize(weight, &values, format));
    let bytes = check_range(format, &values)
        .and_then(|()| weighted().unwrap_or_else(|| encode(&values, format)));
    let bytes = bytes.map_err(|source| Error::Quantize {
        name: weight.name().to_owned(),
        source,
    })?;
    let (name, shape) = (weight.name(), weight.shape().to_vec());
    Ok(Weight::new(name, shape, format, bytes.into())?)
}

/// Values in this format, all columns alike, on all cores.
fn encode(values: &[f32], format: BlockFormat) -> Result<Vec<u8>, QuantizeError> {
    let blocks = values.len().div_ceil(format.block_len());
    let piece_len = blocks.div_ceil(n_threads()).max(1) * format.block_len();
    in_pieces(values, piece_len, |piece| quantize(format, piece))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn quantised_values_are_close_to_the_originals() {
        let values: Vec<f32> = (0..512).map(|i| (i as f32 * 0.37).sin()).collect();
        let weight = Weight::from_f32("w", vec![2, 256], &values).unwrap();
        for (format, tolerance) in [
            (BlockFormat::Q6_K, 0.05),
            (BlockFormat::Q5_K, 0.07),
            (BlockFormat::Q4_K, 0.12),
            (BlockFormat::Q8_0, 0.005),
        ] {
            let converted = convert(&weight, format, None).unwrap().to_f32();
            let worst = converted.iter().zip(&values).map(|(a, b)| (a - b).abs());
            let worst = worst.fold(0.0, f32::max);
            assert!(worst < tolerance, "{format}: off by {worst}");
        }
    }

    #[test]
    fn layers_sort_by_number() {
        let mut names = ["blk.10.a", "output.weight", "blk.9.b", "blk.9.a"];
        names.sort_by_key(|name| natural(name));
        assert_eq!(names, ["output.weight", "blk.9.a", "blk.9.b", "blk.10.a"]);
    }
}
