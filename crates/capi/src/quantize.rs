//! Model files that are written: `llama_model_quantize` and `llama_model_save_to_file`.
//!
//! Invariant: a file is whole, or what was there before stays. What is not done is refused by its
//! parameter. Chooses no format itself: [`cellar::convert`] does, and the program.

use std::path::Path;

use cellar::convert::{ColumnWeights, Conversion, FILE_TYPES, FileType, FormatChoice};
use cellar_engine::with_reasons;
use fancy_regex::Regex;
use kv_block::BlockFormat;
use kv_graph::weights::WeightInfo;
use model_core::gguf::{GgufFile, TensorType, Value};
use model_core::imatrix::{Importance, ImportanceMatrix};
use model_core::model_file::OpenModel;

use crate::abi::{QuantizeParams, ggml_type};
use crate::defaults::llama_model_quantize_default_params;
use crate::ffi::{CText, Handle, In, c_api};
use crate::log;
use crate::model::{Model, overridden};
use crate::whole_file;

/// The name of a matrix of logits.
const OUTPUT: &str = "output.weight";
/// The name of the embedding.
const EMBEDDING: &str = "token_embd.weight";

/// The formats of a file's tensors.
struct Formats {
    file_type: FileType,
    /// True if all matrices get the format of the type.
    is_pure: bool,
    /// True if the matrix of logits is quantized.
    has_output: bool,
    output: Option<BlockFormat>,
    embedding: Option<BlockFormat>,
    /// The first that matches a name counts.
    patterns: Vec<(Regex, BlockFormat)>,
}

impl Formats {
    /// `None` to copy all tensors.
    fn of(params: &QuantizeParams) -> Result<Option<Self>, String> {
        if params.only_copy {
            return Ok(None);
        }
        let number = u32::try_from(params.ftype).ok();
        let known = FILE_TYPES.iter().find(|known| Some(known.number) == number);
        let file_type = *known.ok_or_else(|| {
            let known = FILE_TYPES.map(|known| format!("{} ({})", known.name, known.number));
            format!(
                "ftype {} is not written: known are {}",
                params.ftype,
                known.join(", ")
            )
        })?;
        let one = |what: &str, number| match number {
            ggml_type::COUNT => Ok(None),
            number => format(what, number).map(Some),
        };
        let mut patterns = Vec::new();
        for rule in In::of(params.tt_overrides).until(|rule| rule.pattern.is_null()) {
            let pattern = CText::of(rule.pattern).get();
            let pattern = pattern.ok_or("a pattern of tt_overrides is not UTF-8")?;
            let regex = Regex::new(pattern);
            let regex = regex.map_err(|error| format!("tt_overrides: '{pattern}': {error}"))?;
            patterns.push((regex, format(pattern, rule.kind)?));
        }
        Ok(Some(Self {
            file_type,
            is_pure: params.pure,
            has_output: params.quantize_output_tensor,
            output: one("output_tensor_type", params.output_tensor_type)?,
            embedding: one("token_embedding_type", params.token_embedding_type)?,
            patterns,
        }))
    }

    fn choose(&self, name: &str) -> FormatChoice {
        if name == OUTPUT && !self.has_output {
            return FormatChoice::AsStored;
        }
        let of_place = match name {
            EMBEDDING => self.embedding,
            OUTPUT => self.output,
            _ => None,
        };
        let is_quantized = self.file_type.format.block_len() > 1;
        let matching = self.patterns.iter().filter(|_| is_quantized);
        let mut matching =
            matching.filter(|(pattern, _)| pattern.is_match(name).unwrap_or_default());
        let named = of_place.or_else(|| matching.next().map(|(_, format)| *format));
        match named {
            Some(format) => FormatChoice::In(format),
            None if self.is_pure => FormatChoice::In(self.file_type.format),
            None => FormatChoice::OfFileType,
        }
    }
}

/// The format with a number of ggml's.
fn format(what: &str, number: i32) -> Result<BlockFormat, String> {
    let code = u32::try_from(number).ok();
    let format = code.and_then(|code| TensorType::from_code(code).format());
    format.ok_or_else(|| format!("{what}: there is no format of ggml type {number}"))
}

/// The importance matrix of a program.
fn weighting(params: &QuantizeParams) -> Result<Option<ColumnWeights>, String> {
    if params.imatrix.is_null() {
        return Ok(None);
    }
    let mut matrix = ImportanceMatrix::default();
    for entry in In::of(params.imatrix).until(|entry| entry.name.is_null()) {
        let name = CText::of(entry.name).get();
        let name = name.ok_or("a name of imatrix is not UTF-8")?.to_owned();
        let sums = In::of(entry.data).slice(entry.size).to_vec();
        if let Some(value) = sums.iter().find(|v| !(0.0..f32::INFINITY).contains(*v)) {
            return Err(format!(
                "imatrix: '{name}' has {value}, which is no mean of squares"
            ));
        }
        let counts = vec![1.0];
        matrix.entries.insert(name, Importance { sums, counts });
    }
    if matrix.entries.is_empty() {
        return Err("imatrix has no entries".to_owned());
    }
    Ok(Some(ColumnWeights::new(Path::new("imatrix"), matrix)))
}

/// Refuses parameters whose wish cannot be met.
fn check(params: &QuantizeParams, file: &GgufFile) -> Result<(), String> {
    let n_parts = file.n_parts();
    if params.keep_split && n_parts > 1 {
        return Err(format!(
            "keep_split: the model has {n_parts} parts, and one file is written; leave it out"
        ));
    }
    let pruned = In::of(params.prune_layers).until(|layer| *layer == -1);
    if let Some(layer) = pruned.first() {
        return Err(format!("prune_layers: layers are not left out ({layer})"));
    }
    Ok(())
}

/// Tensors that are quantized already and would be once more.
fn check_requantized(model: &OpenModel, conversion: &Conversion<'_>) -> Result<(), String> {
    let weights = model.weights();
    for pending in conversion.tensors() {
        let stored = weights.describe(&pending.name);
        let stored = stored.map_err(|error| error.to_string())?.format;
        if stored.block_len() > 1 && stored != pending.info.format {
            return Err(format!(
                "'{}' is quantized already ({stored}) and would be {}: set allow_requantize, or \
                 take the original model",
                pending.name, pending.info.format
            ));
        }
    }
    Ok(())
}

fn write_whole(conversion: &Conversion<'_>, path: &Path) -> Result<u64, String> {
    whole_file::write(path, |out| {
        let n_bytes = conversion.write(out, |_| ());
        n_bytes.map_err(|error| with_reasons(&error))
    })
}

fn text<'a>(what: &str, text: CText) -> Result<&'a str, String> {
    text.get()
        .ok_or_else(|| format!("{what} is null or not UTF-8"))
}

fn quantize(from: CText, to: CText, params: &QuantizeParams) -> Result<(), String> {
    let name = "llama_model_quantize";
    let (from, to) = (
        text("the model's path", from)?,
        text("the path to write", to)?,
    );
    let formats = Formats::of(params)?;
    let file = GgufFile::open(from).map_err(|error| error.to_string())?;
    check(params, &file)?;
    let weighting = weighting(params)?;
    let registry = cellar::architectures();
    let model = OpenModel::open(from, &registry).map_err(|error| error.to_string())?;
    let mut conversion = converted(&model, formats.as_ref(), weighting.as_ref())?;
    for change in In::of(params.kv_overrides).until(|change| change.key[0] == 0) {
        let (key, value) = overridden(change)?;
        // As files of llama.cpp's have numbers.
        let value = match value {
            Value::I64(n) => u32::try_from(n.unsigned_abs()).map_or(Value::I64(n), Value::U32),
            Value::F64(number) => Value::F32(number as f32),
            value => value,
        };
        conversion.metadata_mut().insert(&key, value);
    }
    if !params.allow_requantize {
        check_requantized(&model, &conversion)?;
    }
    conversion
        .notes()
        .iter()
        .for_each(|note| log::warn(&format!("{name}: {note}")));
    let n_bytes = if params.dry_run {
        let bytes = conversion
            .tensors()
            .iter()
            .map(|tensor| tensor.info.n_bytes());
        bytes.sum()
    } else {
        write_whole(&conversion, Path::new(to))?
    };
    let done = if params.dry_run {
        "would take"
    } else {
        "takes"
    };
    let n = conversion.tensors().len();
    log::info(&format!(
        "{name}: '{to}' {done} {n_bytes} bytes, {n} tensors"
    ));
    Ok(())
}

/// A model with its tensors in these formats, or as it has them.
fn converted<'a>(
    model: &OpenModel,
    formats: Option<&Formats>,
    weighting: Option<&'a ColumnWeights>,
) -> Result<Conversion<'a>, String> {
    let conversion = match formats {
        None => Conversion::as_stored(model, weighting),
        Some(formats) => {
            let choose = |name: &str, _: &WeightInfo| formats.choose(name);
            Conversion::with_formats(model, formats.file_type, weighting, &choose)
        }
    };
    conversion.map_err(|error| with_reasons(&error))
}

fn save(model: Handle<Model>, path: CText) -> Result<(), String> {
    let path = text("the path", path)?;
    let model = model.get().ok_or("there is no such model")?;
    let open = model.shared.open_model()?;
    let conversion = converted(&open, None, None)?;
    write_whole(&conversion, Path::new(path)).map(drop)
}

c_api! {
    fn llama_model_quantize(from: CText, to: CText, params: In<QuantizeParams>) -> u32 = 1; {
        let params = match params.get() {
            Some(params) => *params,
            None => llama_model_quantize_default_params(),
        };
        log::or_line("llama_model_quantize", quantize(from, to, &params)).map_or(1, |()| 0)
    }

    fn llama_model_save_to_file(model: Handle<Model>, path: CText); {
        log::or_line("llama_model_save_to_file", save(model, path));
    }
}
