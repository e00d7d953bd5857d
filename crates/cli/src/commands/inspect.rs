//! `cellar inspect`: the contents of a model file, and the size of its memory.

use std::collections::BTreeMap;
use std::io::Write;

use cellar::architectures;
use cellar_engine::{DEFAULT_N_CTX, EngineConfig};
use kv_core::layers::{AttentionMemory, LayerMemory, RecurrentMemory};
use kv_graph::weights::WeightSource;
use kv_rows::KvType;
use model_core::architecture::Model;
use model_core::gguf::{GgufFile, Metadata, Value};
use model_core::model_file::tokenizer_spec;
use model_core::tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::json;

use crate::args::InspectArgs;
use crate::failure::{Exit, one_line};
use crate::machine;
use crate::models::{Contents, ModelSource};
use crate::resolve;
use crate::terminal::{self, escape};

/// Elements of a list that are shown.
const N_SHOWN: usize = 8;
/// Characters of a text that are shown.
const N_CHARS: usize = 100;

/// Everything that is shown.
#[derive(Debug, Serialize)]
struct Report {
    file: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    gguf_version: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    n_parts: Option<usize>,
    metadata: BTreeMap<String, serde_json::Value>,
    tensors: Tensors,
    tokenizer: Part<TokenizerSummary>,
    model: Part<ModelSummary>,
}

/// A part that may not be readable, for example because the architecture is not known.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Part<T> {
    /// Why not.
    Error(String),
    #[serde(untagged)]
    Known(T),
}

#[derive(Debug, Serialize)]
struct Tensors {
    n_tensors: usize,
    n_values: u64,
    n_bytes: u64,
    types: Vec<TypeSummary>,
    /// What tokens only look rows up in; `None` where that is not known.
    looked_up: Option<LookedUp>,
}

/// Tensors that nothing is multiplied with.
#[derive(Debug, Default, Serialize)]
struct LookedUp {
    n_values: u64,
    n_bytes: u64,
}

#[derive(Debug, Default, Serialize)]
struct TypeSummary {
    name: String,
    n_tensors: usize,
    n_values: u64,
    n_bytes: u64,
}

#[derive(Debug, Serialize)]
struct TokenizerSummary {
    n_tokens: usize,
    model: String,
    pre: Option<String>,
    adds_first: Option<String>,
    adds_last: Option<String>,
    end_of_generation: Vec<String>,
    has_chat_template: bool,
}

#[derive(Debug, Serialize)]
struct ModelSummary {
    architecture: String,
    context_length: usize,
    embedding_dim: usize,
    vocab_size: usize,
    memory: MemorySummary,
}

#[derive(Debug, Serialize)]
struct MemorySummary {
    n_ctx: u32,
    kv_type: String,
    n_bytes: u64,
    bytes_per_token: u64,
    layers: Vec<LayerSummary>,
}

#[derive(Debug, Serialize)]
struct LayerSummary {
    layer: u32,
    remembers: LayerMemory,
    n_bytes: u64,
}

pub(super) fn run(args: &InspectArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let source = ModelSource::new(args.file.path());
    let file = source.contents()?;
    let gguf = match &file {
        Contents::Gguf(file) => Some(file),
        Contents::Directory(_) => None,
    };
    let report = Report {
        file: source.name(),
        gguf_version: gguf.map(GgufFile::version),
        n_parts: gguf.map(GgufFile::n_parts),
        metadata: file
            .metadata()
            .iter()
            .map(|(k, v)| (k.to_owned(), to_json(v)))
            .collect(),
        tensors: tensors(&file),
        tokenizer: tokenizer(file.metadata()).into(),
        model: model(&file, args).into(),
    };
    if args.json {
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        print(&report, file.metadata(), out)?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

impl<T> From<anyhow::Result<T>> for Part<T> {
    fn from(result: anyhow::Result<T>) -> Self {
        match result {
            Ok(known) => Self::Known(known),
            Err(error) => Self::Error(one_line(&error)),
        }
    }
}

/// Name of the format, values and bytes of every tensor.
pub(super) fn tensor_sizes(file: &Contents) -> Vec<(String, u64, u64)> {
    match file {
        Contents::Gguf(file) => {
            let tensors = file.tensors().iter();
            tensors
                .map(|t| {
                    let n_bytes = t.n_bytes().unwrap_or(0);
                    (t.stored().to_string(), t.n_values(), n_bytes)
                })
                .collect()
        }
        Contents::Directory(directory) => {
            let weights = directory.weights();
            let infos = weights.names().into_iter();
            let infos = infos.filter_map(|name| weights.describe(&name).ok());
            infos
                .map(|info| (info.format.to_string(), info.n_values(), info.n_bytes()))
                .collect()
        }
    }
}

/// The embedding of a GGUF file, unless it is the output matrix too.
fn looked_up(file: &Contents) -> Option<LookedUp> {
    let Contents::Gguf(file) = file else {
        return None;
    };
    let mut looked_up = LookedUp::default();
    let named = |name: &str| file.tensors().iter().find(|t| t.name() == name);
    if let (Some(embedding), Some(_)) = (named("token_embd.weight"), named("output.weight")) {
        looked_up.n_values = embedding.n_values();
        looked_up.n_bytes = embedding.n_bytes().unwrap_or(0);
    }
    Some(looked_up)
}

fn tensors(file: &Contents) -> Tensors {
    let mut types: BTreeMap<String, TypeSummary> = BTreeMap::new();
    for (name, n_values, n_bytes) in tensor_sizes(file) {
        let summary = types.entry(name.clone()).or_default();
        summary.name = name;
        summary.n_tensors += 1;
        summary.n_values += n_values;
        summary.n_bytes += n_bytes;
    }
    let types: Vec<TypeSummary> = types.into_values().collect();
    Tensors {
        n_tensors: types.iter().map(|t| t.n_tensors).sum(),
        n_values: types.iter().map(|t| t.n_values).sum(),
        n_bytes: types.iter().map(|t| t.n_bytes).sum(),
        types,
        looked_up: looked_up(file),
    }
}

fn tokenizer(metadata: &Metadata) -> anyhow::Result<TokenizerSummary> {
    let spec = tokenizer_spec(metadata)?;
    let (model, pre) = (
        metadata.get::<&str>("tokenizer.ggml.model")?.to_owned(),
        spec.pre.clone(),
    );
    let tokenizer = Tokenizer::new(spec)?;
    let named = |id| format!("{id} {}", tokenizer.token_text(id).unwrap_or_default());
    Ok(TokenizerSummary {
        n_tokens: tokenizer.n_tokens(),
        model,
        pre,
        adds_first: tokenizer.adds_first().map(named),
        adds_last: tokenizer.adds_last().map(named),
        end_of_generation: tokenizer.end_of_generation().map(named).collect(),
        has_chat_template: metadata.contains("tokenizer.chat_template"),
    })
}

fn model(file: &Contents, args: &InspectArgs) -> anyhow::Result<ModelSummary> {
    let model = architectures().model(file.metadata(), file.weights())?;
    Ok(ModelSummary {
        architecture: model.architecture().to_owned(),
        context_length: model.context_length(),
        embedding_dim: model.embedding_dim(),
        vocab_size: model.vocab_size(),
        memory: memory(&*model, args)?,
    })
}

fn memory(model: &dyn Model, args: &InspectArgs) -> anyhow::Result<MemorySummary> {
    let trained = u32::try_from(model.context_length()).unwrap_or(DEFAULT_N_CTX);
    let n_ctx = resolve::n_ctx(args.ctx, model).unwrap_or(trained);
    let kv_types = args.kv.types(KvType::F16);
    let config = EngineConfig {
        n_ctx: Some(n_ctx),
        kv_types: kv_types.clone(),
        ..EngineConfig::default()
    };
    let settings = config.settings(model)?;
    let whole = &settings.layout;
    let rows_of = |layer| whole.layer(layer).map_or(0, |rows| rows.bytes());
    let recent_of = |layer| {
        let mut recent = settings.layers().recent().iter();
        recent.find(|rows| rows.of == layer).map(|rows| rows.layer)
    };
    let layers = model
        .layers()
        .iter()
        .map(|(layer, remembers)| LayerSummary {
            layer: layer.0,
            remembers,
            n_bytes: rows_of(layer)
                + recent_of(layer).map_or(0, rows_of)
                + whole.state(layer).map_or(0, |rows| rows.bytes()),
        });
    Ok(MemorySummary {
        n_ctx,
        kv_type: kv_types.to_string(),
        n_bytes: whole.bytes(),
        bytes_per_token: config.bytes_per_token(model)?,
        layers: layers.collect(),
    })
}

/// A value as JSON; of a long list only its type, length and beginning.
fn to_json(value: &Value) -> serde_json::Value {
    match value {
        Value::U8(v) => json!(v),
        Value::I8(v) => json!(v),
        Value::U16(v) => json!(v),
        Value::I16(v) => json!(v),
        Value::U32(v) => json!(v),
        Value::I32(v) => json!(v),
        Value::U64(v) => json!(v),
        Value::I64(v) => json!(v),
        // By its digits: as an `f64` it would show those of its rounding error.
        Value::F32(v) => v
            .to_string()
            .parse::<f64>()
            .map_or(serde_json::Value::Null, |v| json!(v)),
        Value::F64(v) => json!(v),
        Value::Bool(v) => json!(v),
        Value::String(v) => json!(v),
        Value::Array(array) => {
            let first: Vec<_> = (0..N_SHOWN)
                .map_while(|i| array.get(i))
                .map(|v| to_json(&v))
                .collect();
            if array.len() <= N_SHOWN {
                json!(first)
            } else {
                json!({ "type": value.type_name(), "n_elements": array.len(), "first": first })
            }
        }
    }
}

/// A value in one line.
fn short(value: &Value) -> String {
    match value {
        Value::String(text) => {
            let mut shown: String = escape(text).chars().take(N_CHARS).collect();
            if text.chars().count() > N_CHARS {
                shown.push_str(&format!("… ({} characters)", text.chars().count()));
            }
            format!("\"{shown}\"")
        }
        Value::Array(array) => {
            let first = (0..N_SHOWN).map_while(|i| array.get(i)).map(|v| short(&v));
            let mut shown = first.collect::<Vec<_>>().join(", ");
            if array.len() > N_SHOWN {
                shown.push_str(&format!(", … ({} elements)", array.len()));
            }
            format!("[{shown}]")
        }
        other => to_json(other).to_string(),
    }
}

fn print(report: &Report, metadata: &Metadata, out: &mut impl Write) -> std::io::Result<()> {
    let Report {
        gguf_version,
        n_parts,
        ..
    } = report;
    let what = match (gguf_version, n_parts) {
        (Some(version), Some(n_parts)) if *n_parts > 1 => {
            format!("GGUF version {version}, {n_parts} parts")
        }
        (Some(version), _) => format!("GGUF version {version}"),
        (None, _) => "directory with safetensors, in the keys and names of GGUF".to_owned(),
    };
    writeln!(out, "{}: {what}\n\nMetadata", escape(&report.file))?;
    let lines: Vec<_> = metadata.iter().map(|(k, v)| (escape(k), v)).collect();
    let width = lines.iter().map(|(key, _)| key.chars().count());
    let width = width.max().unwrap_or(0);
    for (key, value) in lines {
        writeln!(out, "  {key:width$}  {}", short(value))?;
    }
    print_tensors(&report.tensors, out)?;
    writeln!(out, "\nTokenizer")?;
    match &report.tokenizer {
        Part::Known(tokenizer) => print_tokenizer(tokenizer, out)?,
        Part::Error(reason) => writeln!(out, "  cannot be used: {reason}")?,
    }
    writeln!(out, "\nModel")?;
    match &report.model {
        Part::Known(model) => print_model(model, out),
        Part::Error(reason) => writeln!(out, "  cannot be run: {reason}"),
    }
}

fn print_tensors(tensors: &Tensors, out: &mut impl Write) -> std::io::Result<()> {
    let Tensors {
        n_tensors,
        n_values,
        n_bytes,
        types,
        looked_up,
    } = tensors;
    let size = machine::bytes(*n_bytes);
    writeln!(out, "\nTensors: {n_tensors}, {n_values} values, {size}")?;
    if let Some(LookedUp {
        n_bytes: n_bytes @ 1..,
        ..
    }) = looked_up
    {
        let size = machine::bytes(*n_bytes);
        writeln!(
            out,
            "  of which tokens look rows up in {size} and read the rest"
        )?;
    }
    for TypeSummary {
        name,
        n_tensors,
        n_values,
        n_bytes,
    } in types
    {
        let size = machine::bytes(*n_bytes);
        writeln!(
            out,
            "  {name:8} {n_tensors:5} tensors {n_values:14} values  {size:>12}"
        )?;
    }
    Ok(())
}

fn print_tokenizer(summary: &TokenizerSummary, out: &mut impl Write) -> std::io::Result<()> {
    let or_nothing =
        |text: &Option<String>| escape(text.as_deref().unwrap_or("nothing")).into_owned();
    let pre = summary
        .pre
        .as_ref()
        .map_or_else(String::new, |pre| format!(", words as {}", escape(pre)));
    let template = if summary.has_chat_template {
        "yes"
    } else {
        "no"
    };
    let model = escape(&summary.model);
    writeln!(out, "  {} tokens, {model}{pre}", summary.n_tokens)?;
    writeln!(
        out,
        "  text begins with   {}",
        or_nothing(&summary.adds_first)
    )?;
    writeln!(
        out,
        "  text ends with     {}",
        or_nothing(&summary.adds_last)
    )?;
    writeln!(
        out,
        "  end of generation  {}",
        escape(&summary.end_of_generation.join(", "))
    )?;
    writeln!(out, "  chat template      {template}")
}

fn print_model(model: &ModelSummary, out: &mut impl Write) -> std::io::Result<()> {
    let ModelSummary {
        architecture,
        context_length,
        embedding_dim,
        vocab_size,
        memory,
    } = model;
    writeln!(
        out,
        "  {}: width {embedding_dim}, vocabulary of {vocab_size}, trained with {context_length} tokens",
        escape(architecture)
    )?;
    let MemorySummary {
        n_ctx,
        kv_type,
        n_bytes,
        bytes_per_token,
        layers,
    } = memory;
    let (whole, each) = (machine::bytes(*n_bytes), machine::bytes(*bytes_per_token));
    writeln!(
        out,
        "\nMemory for {n_ctx} tokens in {kv_type}: {whole}, {each} a token"
    )?;
    for LayerSummary {
        layer,
        remembers,
        n_bytes,
    } in layers
    {
        let what = match remembers {
            LayerMemory::Attention(a) => attention_line(a),
            LayerMemory::Latent(a) if a.v_dim == 0 => {
                format!("the keys of an indexer, {} values a token", a.k_dim)
            }
            LayerMemory::Latent(a) => format!("{}, values in keys", attention_line(a)),
            LayerMemory::SharedWith(with) => format!("attention over the rows of layer {with}"),
            LayerMemory::Recurrent(r) => recurrent_line(r),
            LayerMemory::Both(a, r) => format!("{}; {}", attention_line(a), recurrent_line(r)),
            _ => "nothing".to_owned(),
        };
        writeln!(
            out,
            "  layer {layer:3}  {what}  {}",
            machine::bytes(*n_bytes)
        )?;
    }
    Ok(())
}

fn attention_line(a: &AttentionMemory) -> String {
    format!(
        "attention: {} heads, K {} and V {} values each, window {}",
        a.kv_heads, a.k_dim, a.v_dim, a.window
    )
}

fn recurrent_line(r: &RecurrentMemory) -> String {
    format!(
        "recurrent: {} values of convolution and {} of state a sequence",
        r.conv_row, r.state_row
    )
}
