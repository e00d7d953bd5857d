//! `cellar embed`: vectors of texts, as JSON.

use std::io::Write;

use engine::{Embedder, EmbedderConfig, EngineError, Normalization};
use model_core::architecture::OutputKind;

use crate::args::EmbedArgs;
use crate::failure::{Exit, usage};
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;

pub(super) fn run(args: &EmbedArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let wanted = "no texts: give them as arguments, with -f FILE, or through a pipe, one a line";
    let texts = resolve::lines(&args.texts, args.file.as_deref(), wanted)?;
    let source = ModelSource::File(args.model.clone());
    let open = source.open()?;
    if let OutputKind::Scores { .. } = open.model().output() {
        return usage(format!(
            "'{}' is a reranker and gives no vectors: 'cellar rerank' is for it",
            args.model.display()
        ));
    }
    drop(open);
    let file = source.load()?;
    let max_tokens = resolve::n_ctx(args.compute.ctx, &**file.model());
    let normalization = match args.no_normalize {
        true => Some(Normalization::None),
        false => args.normalize.map(Into::into),
    };
    let config = EmbedderConfig {
        pooling: args.pooling.map(Into::into),
        normalization,
        long_texts: resolve::long_texts(&args.compute),
        max_tokens,
        n_batch: args.compute.batch,
    };
    let plan = config.plan(&file).map_err(with_advice)?;
    let weights = file.weights();
    let mut embedder = resolve::text_backend(&args.compute)
        .load(&resolve::text_work(&plan, &*weights), |backend| {
            Embedder::new(backend, &file, &config)
        })?;
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

/// Adds what can be done on the command line.
fn with_advice(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::TextTooLong { .. } => {
            anyhow::anyhow!("{error}; make it shorter, or cut its end off with --truncate")
        }
        EngineError::NoPooling { .. } => {
            anyhow::anyhow!(
                "{error}; choose with --pooling: most encoders were made for mean or cls, decoders \
                 for last"
            )
        }
        other => other.into(),
    }
}
