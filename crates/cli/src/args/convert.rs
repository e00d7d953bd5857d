//! The arguments of `cellar convert`. Chooses no format: [`cellar::convert`] does.

use std::path::PathBuf;

use cellar::convert::{AS_STORED, FILE_TYPES, FileType};
use clap::{ArgAction, Args};

use super::LoraFlag;
use crate::advice::most_similar;

/// `cellar convert`
#[derive(Debug, Args)]
#[command(after_help = "\
Vectors and a few small matrices stay F32, whatever the type. A matrix whose rows are not a whole
number of blocks is stored in a larger type, and the output matrix in at least 5 bits per value. The
mixes q4_k_m and q5_k_m are those of llama-quantize: attention V and FFN down take Q6_K in the first
and last eighth of the layers and in every third between them. With --imatrix, FFN down of the first
eighth takes Q4_1 in q4_0, and Q5_1 in q5_0. q2_k_s and the iq types below iq3_s need --imatrix, and
are mixes of llama-quantize, too. The file is complete when it gets its name.

as_stored writes each tensor in the type that it has, byte for byte: of a GGUF file, or of a
directory whose matrices a type of GGUF holds as they are. Matrices that --lora changes are
quantized to their types again, and vectors in 16 bits become F32, as other readers of GGUF files
need them.

Examples:
  cellar convert DIRECTORY model.gguf --type f16
  cellar convert DIRECTORY model.gguf --type q4_k_m
  cellar convert DIRECTORY model.gguf --type q4_k_m --imatrix imatrix.gguf
  cellar convert DIRECTORY model.gguf --type iq2_m --imatrix imatrix.gguf
  cellar convert model.gguf merged.gguf --type as_stored --lora adapter.gguf
  cellar convert DIRECTORY - --type f16 | zstd > model.gguf.zst")]
pub(crate) struct ConvertArgs {
    /// Directory with config.json, safetensors and tokenizer.json, or a GGUF file to requantise
    pub(crate) model: PathBuf,
    /// Output file
    pub(crate) out: PathBuf,
    /// Type of matrices: as_stored for those that they have, or f32, f16, bf16, q8_0, q6_k, q5_k_m,
    /// q5_k, q5_0, q5_1, q4_k_m, q4_k, q4_0, q4_1, q3_k_m, q3_k, q2_k, q2_k_s, iq4_nl, iq4_xs,
    /// iq3_m, iq3_s, iq3_xs, iq3_xxs, iq2_m, iq2_s, iq2_xs, iq2_xxs, iq1_m, iq1_s, tq2_0, tq1_0,
    /// q2_0 or q1_0
    #[arg(long = "type", value_name = "TYPE", value_parser = output_type)]
    pub(crate) output_type: OutputType,
    /// Importance matrix of 'cellar imatrix' or llama-imatrix (GGUF or .dat): matrices of 6 bits
    /// per value and fewer are quantized so that errors in important columns are small
    #[arg(long, value_name = "FILE")]
    pub(crate) imatrix: Option<PathBuf>,
    /// LoRA adapter (GGUF file or PEFT directory) that is added to the model's matrices, with a
    /// scale after = [default: 1]; once per adapter
    #[arg(long, value_name = "FILE[=SCALE]")]
    pub(crate) lora: Vec<LoraFlag>,
    /// Replace OUT where it is a model
    #[arg(long, action = ArgAction::SetTrue)]
    pub(crate) force: bool,
}

/// The formats of a converted file's tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutputType {
    /// Each as the model has it.
    AsStored,
    /// Those of a type.
    Of(FileType),
}

/// A type of files, by its name, or that of none.
fn output_type(name: &str) -> Result<OutputType, String> {
    if name.eq_ignore_ascii_case(AS_STORED) {
        return Ok(OutputType::AsStored);
    }
    let file_type = name.parse().map(OutputType::Of);
    file_type.map_err(|known: String| {
        let mut names = FILE_TYPES.map(|t| t.name).to_vec();
        names.push(AS_STORED);
        let similar = most_similar(&name.to_lowercase(), &names);
        let similar = similar.map_or_else(String::new, |s| format!("; a similar one: '{s}'"));
        format!("{known} and {AS_STORED}{similar}")
    })
}
