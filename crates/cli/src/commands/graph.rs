//! `cellar graph`: a model's graph as text, DOT or JSON, and the differences of two.

mod fold;
mod outline;

use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use cellar::architectures;
use kv_graph::{Graph, GraphShape};
use model_core::architecture::Model;

use crate::args::{GraphArgs, GraphCommand, GraphDiffArgs, GraphFormat, ShapeArgs};
use crate::by_name::locate;
use crate::failure::{Exit, usage};
use crate::input;
use crate::models::{GGUF_MAGIC, ModelSource};
use crate::output_file;
use crate::terminal;

use fold::FoldedDiff;
use outline::{Detail, Outline};

pub(super) fn run(args: &GraphArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    if let Some(GraphCommand::Diff(args)) = &args.command {
        return diff(args, out);
    }
    let registry = architectures();
    let is_known = |name: &&str| !Path::new(name).exists() && registry.get(name).is_ok();
    let named = args.model.path().and_then(Path::to_str).filter(is_known);
    let model = match args.arch.as_deref().or(named) {
        Some(name) => {
            let known = registry.get(name);
            known.with_context(|| format!("--arch {name}"))?.example()?
        }
        None => of_file(&ModelSource::new(args.model.path()))?,
    };
    let graph = model.graph(shape(args.shape)?)?;
    let text = match args.format {
        GraphFormat::Text => terminal::escape_lines(&graph.text().to_string()).into_owned(),
        GraphFormat::Dot => terminal::escape_lines(&graph.dot().to_string()).into_owned(),
        GraphFormat::Json => graph.to_json()? + "\n",
    };
    if output_file::is_stdout(&args.out) {
        out.write_all(text.as_bytes())?;
        out.flush()?;
    } else {
        output_file::write(&args.out, |file| Ok(file.write_all(text.as_bytes())?))?;
    }
    Ok(Exit::Done)
}

fn diff(args: &GraphDiffArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let shape = shape(args.shape)?;
    let detail = if args.structure {
        Detail::Structure
    } else {
        Detail::Everything
    };
    let outline = |name: &String| {
        let text = text_of(name, shape)?;
        let outline = Outline::read(&terminal::escape_lines(&text), detail);
        outline.with_context(|| format!("'{name}' is no graph as 'cellar graph' writes it"))
    };
    let (left, right) = (outline(&args.left)?, outline(&args.right)?);
    let diff = match args.layer {
        Some(layer) => of_layer([&args.left, &args.right], [&left, &right], layer)?,
        None => FoldedDiff::new(&left, &right, detail),
    };
    let is_same = diff.is_empty();
    if args.json {
        writeln!(out, "{}", terminal::json(&diff)?)?;
    } else {
        if is_same && args.layer.is_none() {
            writeln!(out, "the graphs are alike")?;
        }
        write!(out, "{diff}")?;
    }
    out.flush()?;
    Ok(if is_same { Exit::Done } else { Exit::Failed })
}

/// The differences of one layer, which both graphs must have.
fn of_layer(names: [&str; 2], outlines: [&Outline; 2], layer: usize) -> anyhow::Result<FoldedDiff> {
    for (name, outline) in names.iter().zip(outlines) {
        let n_layers = outline.layers.len();
        if layer >= n_layers {
            return usage(format!(
                "--layer {layer}: '{name}' has {n_layers} layers, counted from 0"
            ));
        }
    }
    let [left, right] = outlines.map(|outline| &outline.layers[layer]);
    Ok(FoldedDiff::of_layer(left, right, layer))
}

fn shape(args: ShapeArgs) -> anyhow::Result<GraphShape> {
    let ShapeArgs { tokens, outputs } = args;
    if outputs > tokens {
        return usage(format!("--outputs {outputs}: only {tokens} tokens go in"));
    }
    Ok(GraphShape {
        n_tokens: tokens as usize,
        n_outputs: outputs as usize,
    })
}

fn of_file(source: &ModelSource) -> anyhow::Result<Arc<dyn Model>> {
    Ok(Arc::clone(source.open()?.model()))
}

/// The text form of a graph: that of a model, one written as text or JSON, or that of an
/// architecture's example.
fn text_of(name: &str, shape: GraphShape) -> anyhow::Result<String> {
    let path = &*locate(Path::new(name))?;
    if !path.exists() && !input::is_stdin(path) {
        let registry = architectures();
        let Ok(architecture) = registry.get(name) else {
            let known = registry.names().join(", ");
            anyhow::bail!("'{name}' is neither a file nor a known architecture ({known})");
        };
        return Ok(architecture.example()?.graph(shape)?.text().to_string());
    }
    if is_gguf(path) || path.is_dir() {
        let model = of_file(&ModelSource::File(path.to_owned()))?;
        return Ok(model.graph(shape)?.text().to_string());
    }
    let text = input::text(path)?;
    if text.starts_with("graph: ") {
        return Ok(text);
    }
    let graph = Graph::from_json(&text);
    let graph = graph.with_context(|| {
        format!("'{name}' is neither a GGUF file nor a graph as text or JSON of 'cellar graph'")
    })?;
    Ok(graph.text().to_string())
}

fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    // What a pipe gives can be read only once.
    if !path.is_file() {
        return false;
    }
    let read = std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && magic == GGUF_MAGIC
}
