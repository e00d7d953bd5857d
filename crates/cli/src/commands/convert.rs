//! `cellar convert`: writes a model directory as a GGUF file, in a format of choice.
//!
//! Vectors, and matrices that are small or that llama.cpp keeps exact, are stored as F32; a matrix
//! whose rows are not a whole number of blocks takes the next format whose blocks fit. The output
//! matrix (or the embedding, where the two are tied) gets at least 6 bits per value, because its
//! errors affect every token.

use std::io::Write;

use anyhow::Context;
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use kv_core::block::{BlockFormat, quantize};
use kv_core::weights::{Weight, WeightInfo};
use model_core::gguf::{Announced, GgufWriter};

use crate::args::ConvertArgs;
use crate::failure::{Exit, warn};
use crate::interrupt::exit_on_interrupt;
use crate::machine;
use crate::models::ModelSource;
use crate::output_file;
use crate::progress::Progress;
use crate::terminal;

pub(super) fn run(args: &ConvertArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    output_file::check("OUT", &args.out)?;
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
    let head = if names.iter().any(|name| name == "output.weight") {
        "output.weight"
    } else {
        "token_embd.weight"
    };
    let announced: Vec<Announced> = names
        .into_iter()
        .map(|name| {
            let WeightInfo { shape, .. } = weights.describe(&name)?;
            let role = match name == head {
                true => Role::Output,
                false => Role::Other,
            };
            let format = format_of(&name, &shape, args.file_type.format, role);
            let info = WeightInfo { shape, format };
            anyhow::Ok(Announced { name, info })
        })
        .collect::<Result<_, _>>()?;
    let progress = Progress::tensors("converting", announced.len());
    let mut n_done = 0;
    let writer = GgufWriter::with_metadata(metadata);
    let n_bytes = output_file::write(&args.out, |file| {
        writer.write_each(file, &announced, |announced| {
            let weight = weights.require(&announced.name)?;
            let converted = convert(&weight, announced.info.format)
                .with_context(|| format!("tensor '{}'", announced.name))?;
            n_done += 1;
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
        // Where stderr is closed, nobody reads the summary.
        let _ = writeln!(std::io::stderr(), "{line}");
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

/// What a tensor is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// It makes the logits.
    Output,
    /// Anything else.
    Other,
}

/// How a tensor is stored in a file of type `wanted`.
fn format_of(name: &str, shape: &[usize], wanted: BlockFormat, role: Role) -> BlockFormat {
    let exact = [
        "ffn_gate_inp.weight",
        "ssm_conv1d.weight",
        "ssm_norm.weight",
        "position_embd.weight",
        "token_types.weight",
    ];
    let is_exact = exact.iter().any(|end| name.ends_with(end));
    if shape.len() < 2 || is_exact || !name.ends_with(".weight") {
        return BlockFormat::F32;
    }
    let columns = shape.last().copied().unwrap_or(1);
    let small = !matches!(
        wanted,
        BlockFormat::F32 | BlockFormat::F16 | BlockFormat::BF16 | BlockFormat::Q8_0
    );
    let wanted = match role == Role::Output && small {
        true => BlockFormat::Q6_K,
        false => wanted,
    };
    let fits = |format: &BlockFormat| columns.is_multiple_of(format.block_len());
    [wanted, BlockFormat::Q8_0, BlockFormat::F16]
        .into_iter()
        .find(fits)
        .unwrap_or(BlockFormat::F32)
}

/// The same weight in another format.
fn convert(weight: &Weight, format: BlockFormat) -> anyhow::Result<Weight> {
    if weight.format() == format {
        return Ok(weight.clone());
    }
    let values = weight.to_f32();
    let bytes = match ggml_type(format) {
        None => quantize(format, &values)?,
        Some(of) => {
            let n_values = values.len();
            let tensor = Tensor::from_vec(values, n_values, &Device::Cpu)?;
            QTensor::quantize(&tensor, of)?.data()?.into_owned()
        }
    };
    let (name, shape) = (weight.name(), weight.shape().to_vec());
    Ok(Weight::new(name, shape, format, bytes.into())?)
}

/// Formats that candle quantises, searching for scales; `kv-core` rounds to the others.
fn ggml_type(format: BlockFormat) -> Option<GgmlDType> {
    match format {
        BlockFormat::Q3_K => Some(GgmlDType::Q3K),
        BlockFormat::Q4_K => Some(GgmlDType::Q4K),
        BlockFormat::Q5_K => Some(GgmlDType::Q5K),
        BlockFormat::Q6_K => Some(GgmlDType::Q6K),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tensor_gets_a_format_that_fits() {
        let of = |name, shape: &[usize], wanted| format_of(name, shape, wanted, Role::Other);
        use BlockFormat::*;
        assert_eq!(of("blk.0.ffn_up.weight", &[8, 512], Q4_K), Q4_K);
        assert_eq!(of("blk.0.ffn_up.weight", &[8, 96], Q4_K), Q8_0);
        assert_eq!(of("blk.0.ffn_up.weight", &[8, 172], Q4_0), F16);
        assert_eq!(of("blk.0.attn_norm.weight", &[512], F16), F32);
        assert_eq!(of("blk.0.ffn_gate_inp.weight", &[4, 512], Q8_0), F32);
        assert_eq!(of("blk.0.ffn_up_exps.bias", &[4, 512], Q8_0), F32);
        assert_eq!(of("blk.0.ssm_a", &[512, 16], F16), F32);
        let head = |wanted| format_of("output.weight", &[8, 512], wanted, Role::Output);
        assert_eq!((head(Q4_K), head(Q8_0), head(F16)), (Q6_K, Q8_0, F16));
    }

    #[test]
    fn quantised_values_are_close_to_the_originals() {
        let values: Vec<f32> = (0..512).map(|i| (i as f32 * 0.37).sin()).collect();
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let weight = Weight::new("w", vec![2, 256], BlockFormat::F32, bytes.into()).unwrap();
        for (format, tolerance) in [
            (BlockFormat::Q6_K, 0.05),
            (BlockFormat::Q5_K, 0.07),
            (BlockFormat::Q4_K, 0.12),
            (BlockFormat::Q8_0, 0.005),
        ] {
            let converted = convert(&weight, format).unwrap().to_f32();
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
