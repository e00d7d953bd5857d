//! `cellar embed`: vectors of texts, as JSON.

use std::io::Write;
use std::sync::Arc;

use cellar_engine::{EngineError, Normalization};
use cellar_tasks::{Embedder, EmbedderConfig};
use model_core::architecture::OutputKind;
use model_core::model_file::{OpenModel, has_no_text};
use model_core::sentence::Pooling;

use crate::args::EmbedArgs;
use crate::failure::{Exit, usage};
use crate::given_text;
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;

pub(super) fn run(args: &EmbedArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let texts = texts(args)?;
    let source = ModelSource::given(args.input.model())?;
    let file = source.open()?;
    let label = source.name();
    if let OutputKind::Scores { .. } = file.model().output() {
        return usage(format!(
            "'{label}' is a reranker and gives no vectors: 'cellar rerank' is for it"
        ));
    }
    let takes_tokens = !args.tokens.is_empty();
    if !takes_tokens && has_no_text(file.metadata())? {
        return usage(format!(
            "'{label}' has no tokenizer, because its tokens are no text: give their ids, as in \
             --tokens 1,2,3"
        ));
    }
    let tokenizer = if takes_tokens {
        None
    } else {
        Some(Arc::clone(source.load()?.tokenizer()))
    };
    let config = config(args, &file);
    let plan = config.plan(&file).map_err(with_advice)?;
    let weights = file.weights();
    let mut embedder = resolve::text_backend(&args.compute)
        .load(&resolve::text_work(&plan, &weights), |backend| {
            Embedder::new(backend, &file, &config)
        })?;
    let tokens = match tokenizer {
        Some(tokenizer) => embedder.tokens(&tokenizer, &texts).map_err(with_advice)?,
        None => args.tokens.iter().map(|ids| ids.0.clone()).collect(),
    };
    let progress = Progress::texts("embedding", tokens.len());
    let (mut rest, mut before) = (&tokens[..], "[");
    while !rest.is_empty() {
        let (group, after) = rest.split_at(embedder.n_together(rest));
        for vector in embedder.embed_tokens(group)? {
            let json = match embedder.pooling() {
                Pooling::None => terminal::json(&rows(&vector, embedder.dim()))?,
                _ => terminal::json(&vector)?,
            };
            write!(out, "{before}{json}")?;
            before = ",\n";
        }
        rest = after;
        progress.set(tokens.len() - rest.len());
    }
    writeln!(out, "]")?;
    out.flush()?;
    Ok(Exit::Done)
}

/// The texts, of which there are none where there are tokens.
fn texts(args: &EmbedArgs) -> anyhow::Result<Vec<String>> {
    if !args.tokens.is_empty() {
        if let Some(text) = args.input.texts().first() {
            return usage(format!(
                "--tokens and the text '{text}': give either ids or texts"
            ));
        }
        return Ok(Vec::new());
    }
    let wanted = "no texts: give them as arguments, with -f FILE, or through a pipe, one a line";
    given_text::lines(args.input.texts(), args.input.file.as_deref(), wanted)
}

fn config(args: &EmbedArgs, file: &OpenModel) -> EmbedderConfig {
    let normalization = if args.no_normalize {
        Some(Normalization::None)
    } else {
        args.normalize.map(Into::into)
    };
    EmbedderConfig {
        pooling: args.pooling.map(Into::into),
        normalization,
        long_texts: resolve::long_texts(&args.compute),
        max_tokens: resolve::n_ctx(args.compute.ctx, &**file.model()),
        n_batch: args.compute.batch,
    }
}

/// The rows of a text's tokens.
fn rows(values: &[f32], dim: usize) -> Vec<&[f32]> {
    values.chunks(dim.max(1)).collect()
}

/// Adds what can be done on the command line.
fn with_advice(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::TextTooLong { .. } => {
            anyhow::anyhow!("{error}; make it shorter, or cut its end off with --truncate")
        }
        EngineError::NoPooling { .. } => {
            anyhow::anyhow!(
                "{error}; choose with --pooling: most encoders were made for mean or cls, decoders \
                 for last; none prints a row for every token"
            )
        }
        other => other.into(),
    }
}
