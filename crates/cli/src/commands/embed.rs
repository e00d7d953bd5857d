//! `cellar embed`: vectors of texts, as JSON.

use std::io::Write;

use engine::{Embedder, EmbedderConfig, EngineError, LongTexts, Normalization};
use model_core::architecture::OutputKind;

use crate::args::EmbedArgs;
use crate::backends::{self, BackendOptions};
use crate::failure::{Exit, usage};
use crate::models::{ModelSource, encoders};
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;

pub(super) fn run(args: &EmbedArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let texts = texts(args)?;
    let source = ModelSource::File(args.model.clone());
    let open = source.open()?;
    if open.model().output() != OutputKind::Embeddings {
        return usage(format!(
            "'{}' continues texts and gives no vectors: 'cellar run' is for it; 'cellar embed' \
             takes an encoder ({})",
            open.model().architecture(),
            encoders().join(", ")
        ));
    }
    drop(open);
    let file = source.load()?;
    let config = EmbedderConfig {
        pooling: args.pooling.map(Into::into),
        normalization: match args.no_normalize {
            true => Normalization::None,
            false => Normalization::Unit,
        },
        long_texts: match args.truncate {
            true => LongTexts::Truncate,
            false => LongTexts::Refuse,
        },
        n_batch: args.batch,
    };
    let options = BackendOptions {
        n_threads: args.threads,
        activations: args.activations,
        repack: args.repack,
        profile: None,
    };
    let backend = backends::open(args.backend, options)?;
    let mut embedder = Embedder::new(backend, &file, &config).map_err(with_advice)?;
    let tokens = embedder
        .tokens(file.tokenizer(), &texts)
        .map_err(with_advice)?;
    let progress = Progress::texts("embedding", tokens.len());
    let (mut rest, mut before) = (&tokens[..], "[");
    while !rest.is_empty() {
        let (group, after) = rest.split_at(embedder.n_together(rest));
        for vector in embedder.embed_tokens(group)? {
            write!(out, "{before}{}", terminal::json(&vector)?)?;
            before = ",\n";
        }
        rest = after;
        progress.set(tokens.len() - rest.len());
    }
    writeln!(out, "]")?;
    out.flush()?;
    Ok(Exit::Done)
}

/// The arguments, or the lines of a file or pipe; at least one.
fn texts(args: &EmbedArgs) -> anyhow::Result<Vec<String>> {
    if !args.texts.is_empty() {
        return Ok(args.texts.clone());
    }
    let lines = resolve::text(None, args.file.as_deref())?;
    match lines.map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>()) {
        Some(lines) if !lines.is_empty() => Ok(lines),
        _ => usage("no texts: give them as arguments, with -f FILE, or through a pipe, one a line"),
    }
}

/// Adds what can be done on the command line.
fn with_advice(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::TextTooLong { .. } => {
            anyhow::anyhow!("{error}; make it shorter, or cut its end off with --truncate")
        }
        EngineError::NoPooling { .. } => {
            anyhow::anyhow!("{error}; choose with --pooling: most models were made for mean or cls")
        }
        other => other.into(),
    }
}
