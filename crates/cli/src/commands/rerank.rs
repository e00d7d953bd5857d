//! `cellar rerank`: documents by how well they answer a query.

use std::io::Write;

use cellar_engine::EngineError;
use cellar_tasks::{Ranked, Reranker, RerankerConfig};
use model_core::architecture::OutputKind;
use model_core::model_file::OpenModel;
use serde::Serialize;

use crate::args::RerankArgs;
use crate::failure::{Exit, usage};
use crate::given_text;
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;

/// What `--json` prints of a document.
#[derive(Debug, Serialize)]
struct Row<'a> {
    index: usize,
    score: f32,
    document: &'a str,
}

pub(super) fn run(args: &RerankArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let wanted =
        "no documents: give them as arguments, with -f FILE, or through a pipe, one a line";
    let documents = given_text::lines(args.input.texts(), args.input.file.as_deref(), wanted)?;
    let source = ModelSource::given(args.input.model())?;
    check(&source.open()?)?;
    let file = source.load()?;
    let config = RerankerConfig {
        long_texts: resolve::long_texts(&args.compute),
        max_tokens: resolve::n_ctx(args.compute.ctx, &**file.model()),
        n_batch: args.compute.batch,
    };
    let plan = config.plan(&file)?;
    let weights = file.weights();
    let mut reranker = resolve::text_backend(&args.compute)
        .load(&resolve::text_work(&plan, &weights), |backend| {
            Reranker::new(backend, &file, &config)
        })?;
    let pairs = reranker.pairs(file.tokenizer(), &args.query, &documents);
    let pairs = pairs.map_err(with_advice)?;
    let progress = Progress::texts("ranking", pairs.len());
    let mut scores = Vec::with_capacity(pairs.len());
    let mut rest = &pairs[..];
    while !rest.is_empty() {
        let (group, after) = rest.split_at(reranker.n_together(rest));
        scores.extend(reranker.score_pairs(group)?);
        rest = after;
        progress.set(pairs.len() - rest.len());
    }
    drop(progress);
    let mut ranked = Ranked::sorted(scores);
    ranked.truncate(args.top.map_or(usize::MAX, Into::into));
    let rows = ranked.iter().map(|ranked| Row {
        index: ranked.index,
        score: ranked.score,
        document: documents.get(ranked.index).map_or("", String::as_str),
    });
    if args.json {
        print_json(rows, out)?;
    } else {
        print_table(rows, documents.len(), out)?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// Checks that a model scores pairs of texts.
fn check(file: &OpenModel) -> anyhow::Result<()> {
    let name = file.model().architecture();
    match file.model().output() {
        OutputKind::Scores { n_labels: 1 } => Ok(()),
        OutputKind::Scores { n_labels } => usage(format!(
            "'{name}' is a classifier with {n_labels} labels: 'cellar rerank' takes a model with one, \
             the score of a pair"
        )),
        OutputKind::Logits | OutputKind::MaskLogits(_) => usage(format!(
            "'{name}' continues texts and scores none: 'cellar run' is for it; 'cellar rerank' takes a \
             cross-encoder (BertForSequenceClassification and the like)"
        )),
        OutputKind::Embeddings => usage(format!(
            "'{name}' gives vectors and no scores: 'cellar embed' is for it; 'cellar rerank' takes a \
             cross-encoder (BertForSequenceClassification and the like)"
        )),
    }
}

fn print_json<'a>(rows: impl Iterator<Item = Row<'a>>, out: &mut impl Write) -> anyhow::Result<()> {
    let mut before = "[";
    for row in rows {
        write!(out, "{before}{}", terminal::json(&row)?)?;
        before = ",\n";
    }
    writeln!(out, "]")?;
    Ok(())
}

/// Score, number from 1, and document, one line each.
fn print_table<'a>(
    rows: impl Iterator<Item = Row<'a>>,
    n_documents: usize,
    out: &mut impl Write,
) -> anyhow::Result<()> {
    let width = n_documents.to_string().len();
    for row in rows {
        let (number, document) = (row.index + 1, terminal::escape(row.document));
        writeln!(out, "{:>9.4}  {number:>width$}  {document}", row.score)?;
    }
    Ok(())
}

/// Adds what can be done on the command line.
fn with_advice(error: EngineError) -> anyhow::Error {
    match error {
        EngineError::TextTooLong {
            index,
            n_tokens,
            limit,
        } => anyhow::anyhow!(
            "the query and document {} have {n_tokens} tokens together, but the model takes {limit}; \
             make them shorter, or cut off the end of documents with --truncate",
            index + 1
        ),
        other => other.into(),
    }
}
