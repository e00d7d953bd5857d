//! `cellar convert`: writes a model directory as a GGUF file, in a format of choice.
//!
//! Invariant: tensors keep their names and values, up to the rounding of their formats; [`mix`]
//! chooses these.

mod importance;
mod mix;
mod pieces;

use std::io::Write;

use anyhow::Context;
use kv_core::block::{BlockFormat, quantize};
use kv_core::weights::{Weight, WeightInfo};
use model_core::gguf::{GgufWriter, PendingWeight};
use model_core::model_file::OpenModel;

use crate::args::ConvertArgs;
use crate::failure::{Exit, warn};
use crate::interrupt::exit_on_interrupt;
use crate::machine;
use crate::models::ModelSource;
use crate::output_file;
use crate::progress::Progress;
use crate::terminal;
use importance::Weighting;
use mix::{Columns, Heads, ModelTraits, NamedShape};
use pieces::{in_pieces, n_threads};

pub(super) fn run(args: &ConvertArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    output_file::check("OUT", &args.out)?;
    let weighting = args.imatrix.as_deref().map(Weighting::open).transpose()?;
    exit_on_interrupt()?;
    let model = ModelSource::File(args.model.clone()).open()?;
    let weights = model.weights();
    let mut metadata = model.metadata().clone();
    if !metadata.contains("tokenizer.ggml.model") {
        warn(&format!(
            "'{}' has no tokenizer.json, so the file will have no tokenizer",
            args.model.display()
        ));
    }
    metadata.insert("general.file_type", args.file_type.number);
    metadata.insert("general.quantization_version", 2u32);
    let mut names = weights.names();
    names.sort_by_key(|name| natural(name));
    let infos = names.iter().map(|name| weights.describe(name));
    let infos: Vec<WeightInfo> = infos.collect::<Result<_, _>>()?;
    let tensors: Vec<NamedShape> = names
        .into_iter()
        .zip(&infos)
        .map(|(name, WeightInfo { shape, .. })| NamedShape {
            name,
            shape: shape.clone(),
        })
        .collect();
    let columns = weighting
        .as_ref()
        .map_or(Columns::Alike, |_| Columns::Weighted);
    let traits = traits(&model, &tensors, columns);
    let formats = mix::formats(args.file_type, traits, &tensors);
    warn_of_requantizing(&infos, &formats);
    if let Some(weighting) = &weighting {
        weighting.check(&tensors, &formats)?;
        weighting.describe(&mut metadata);
    }
    let announced: Vec<PendingWeight> = tensors
        .into_iter()
        .zip(formats)
        .map(|(NamedShape { name, shape }, format)| PendingWeight {
            name,
            info: WeightInfo { shape, format },
        })
        .collect();
    let n_values = |shape: &[usize]| -> usize { shape.iter().product() };
    let n_all = announced.iter().map(|a| n_values(&a.info.shape)).sum();
    let progress = Progress::values("converting", n_all);
    let mut n_done = 0;
    let writer = GgufWriter::with_metadata(metadata);
    let n_bytes = output_file::write(&args.out, |file| {
        writer.write_each(file, &announced, |announced| {
            let weight = weights.require(&announced.name)?;
            let converted = convert(&weight, announced.info.format, weighting.as_ref())
                .with_context(|| format!("tensor '{}'", announced.name))?;
            weights.check()?;
            n_done += n_values(&announced.info.shape);
            progress.set(n_done);
            anyhow::Ok(converted)
        })
    })?;
    drop(progress);
    let line = format!(
        "{}: {} tensors, {}",
        args.out.display(),
        announced.len(),
        machine::bytes(n_bytes)
    );
    let line = terminal::escape(&line);
    if output_file::is_stdout(&args.out) {
        terminal::note(line);
    } else {
        writeln!(out, "{line}")?;
        out.flush()?;
    }
    Ok(Exit::Done)
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
        heads: match heads {
            [Some(n), Some(n_kv)] if n_kv < n => Heads::Shared,
            _ => Heads::Own,
        },
        columns,
    }
}

/// Quantizing again what was quantized adds one rounding to another.
fn warn_of_requantizing(infos: &[WeightInfo], formats: &[BlockFormat]) {
    let is_requantized = |(info, format): &(&WeightInfo, &BlockFormat)| {
        info.format.block_len() > 1 && info.format != **format && format.block_len() > 1
    };
    let requantized = infos.iter().zip(formats).filter(is_requantized);
    let mut names: Vec<&str> = requantized.map(|(info, _)| info.format.name()).collect();
    let n = names.len();
    if n == 0 {
        return;
    }
    names.sort_unstable();
    names.dedup();
    warn(&format!(
        "{n} tensors are quantized already ({}) and are quantized again, which loses accuracy; \
         convert the original model",
        names.join(", ")
    ));
}

/// The same weight in another format, with the importance of its columns, where it is known.
fn convert(
    weight: &Weight,
    format: BlockFormat,
    weighting: Option<&Weighting>,
) -> anyhow::Result<Weight> {
    if weight.format() == format {
        return Ok(weight.clone());
    }
    let values = weight.to_f32();
    let weighted = match weighting {
        Some(weighting) => weighting.quantize(weight, &values, format)?,
        None => None,
    };
    let bytes = match weighted {
        Some(bytes) => bytes,
        None => encode(&values, format)?,
    };
    let (name, shape) = (weight.name(), weight.shape().to_vec());
    Ok(Weight::new(name, shape, format, bytes.into())?)
}

/// Values in this format, all columns alike, on all cores.
fn encode(values: &[f32], format: BlockFormat) -> anyhow::Result<Vec<u8>> {
    let blocks = values.len().div_ceil(format.block_len());
    let piece_len = blocks.div_ceil(n_threads()).max(1) * format.block_len();
    in_pieces(values, piece_len, |piece| Ok(quantize(format, piece)?))
}

#[cfg(test)]
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
