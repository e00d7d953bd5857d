//! `cellar perplexity`: how well a model predicts a text.
//!
//! By the definition of llama.cpp's `llama-perplexity`, so that figures compare: the text is cut
//! into chunks of the context's length, each evaluated from an empty memory with its first token
//! replaced by BOS where the model wants one; the second half of a chunk is scored, as by then
//! there is something to predict from.

use std::io::Write;

use cellar_engine::{Engine, EngineConfig, PromptOutputs};
use kv_backend::BoxedBackend;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_rows::KvType;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialText};
use serde::Serialize;

use crate::args::PerplexityArgs;
use crate::failure::{Exit, usage};
use crate::given_text;
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;

/// Default length of a chunk, as in llama.cpp.
const DEFAULT_N_CTX: u32 = 512;

/// What `--json` prints.
#[derive(Debug, Serialize)]
struct Report {
    perplexity: f64,
    /// Standard error of it.
    error: f64,
    n_ctx: u32,
    n_chunks: usize,
    n_tokens: usize,
    /// Tokens whose prediction was scored.
    n_scored: usize,
}

/// Sums over the scored tokens.
#[derive(Clone, Copy, Debug, Default)]
struct Score {
    n: usize,
    /// Of `-ln p`.
    sum: f64,
    /// Of its square.
    sum_of_squares: f64,
}

pub(super) fn run(args: &PerplexityArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let Some(text) = given_text::text(None, args.file.as_deref())? else {
        return usage("no text: give one with -f FILE, or through a pipe");
    };
    let source = ModelSource::new(args.model.path());
    let file = source.load_with(&args.compute.changes())?;
    resolve::continues_without_source(&file)?;
    let tokenizer = file.tokenizer();
    let options = EncodeOptions {
        add: AddSpecial::AsModel,
        special: SpecialText::AsText,
    };
    let tokens = tokenizer.encode(&text, options);
    let n_ctx = resolve::n_ctx(args.compute.ctx, &**file.model()).unwrap_or(DEFAULT_N_CTX);
    if n_ctx < 4 {
        return usage(format!(
            "--ctx {n_ctx}: at least 4 tokens are needed to score some"
        ));
    }
    let chunks = tokens.chunks_exact(n_ctx as usize);
    if chunks.len() < 2 {
        anyhow::bail!(
            "the text has {} tokens, but at least {} are needed for two chunks; choose a smaller --ctx",
            tokens.len(),
            2 * u64::from(n_ctx),
        );
    }
    let config = EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: 1,
        n_batch: args.size.batch,
        ..resolve::compute_config(&args.compute, &**file.model(), KvType::F16)
    };
    let mut engine = resolve::open_engine(&file, &args.compute, &config, PromptOutputs::All)?;
    let mut score = Score::default();
    let n_chunks = chunks
        .len()
        .min(args.chunks.map_or(usize::MAX, |n| n as usize));
    let progress = Progress::tokens("evaluating", n_chunks * n_ctx as usize);
    for (number, chunk) in chunks.take(n_chunks).enumerate() {
        let mut chunk = chunk.to_vec();
        if let (Some(first), Some(bos)) = (chunk.first_mut(), tokenizer.adds_first()) {
            *first = bos;
        }
        score_chunk(&mut engine, &chunk, &mut score)?;
        progress.set((number + 1) * chunk.len());
    }
    drop(progress);
    let report = Report {
        perplexity: score.perplexity(),
        error: score.error(),
        n_ctx,
        n_chunks,
        n_tokens: tokens.len(),
        n_scored: score.n,
    };
    if args.json {
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        writeln!(
            out,
            "perplexity {:.4} ± {:.4} ({n_chunks} chunks of {n_ctx} tokens)",
            report.perplexity, report.error
        )?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// Evaluates one chunk and scores its second half.
fn score_chunk(
    engine: &mut Engine<BoxedBackend>,
    chunk: &[TokenId],
    score: &mut Score,
) -> anyhow::Result<()> {
    let first = chunk.len() / 2;
    let n_batch = (engine.settings().rules.n_batch as usize).max(1);
    let n_vocab = engine.model().vocab_size().max(1);
    engine.clear();
    for start in (0..chunk.len()).step_by(n_batch) {
        let end = (start + n_batch).min(chunk.len());
        let mut batch = Batch::new();
        let mut wanted = Vec::new();
        for (at, &token) in chunk.iter().enumerate().take(end).skip(start) {
            let entry = batch.push_token(token).in_sequence(SeqId(0));
            // There is nothing to predict after the last token.
            if let Some(&next) = chunk.get(at + 1).filter(|_| at >= first) {
                entry.with_output();
                wanted.push(next);
            }
        }
        let logits = engine.decode(&batch)?;
        for (row, next) in logits.values().chunks_exact(n_vocab).zip(wanted) {
            score.add(surprise(row, next));
        }
    }
    Ok(())
}

/// `-ln p(token)` under these logits.
fn surprise(logits: &[f32], token: TokenId) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|&logit| f64::from(logit - largest).exp())
        .sum();
    let own = logits
        .get(token.as_usize())
        .copied()
        .unwrap_or(f32::NEG_INFINITY);
    sum.ln() - f64::from(own - largest)
}

impl Score {
    fn add(&mut self, surprise: f64) {
        self.n += 1;
        self.sum += surprise;
        self.sum_of_squares += surprise * surprise;
    }

    fn mean(self) -> f64 {
        self.sum / self.n.max(1) as f64
    }

    fn perplexity(self) -> f64 {
        self.mean().exp()
    }

    /// Standard error of the mean, carried over to its exponential.
    fn error(self) -> f64 {
        let variance = self.sum_of_squares / self.n.max(1) as f64 - self.mean() * self.mean();
        let of_mean = (variance.max(0.0) / self.n.saturating_sub(1).max(1) as f64).sqrt();
        of_mean * self.perplexity()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_that_knows_nothing_is_as_perplexed_as_it_has_tokens() {
        let mut score = Score::default();
        for token in 0..4 {
            score.add(surprise(&[3.0; 8], TokenId(token)));
        }
        assert!((score.perplexity() - 8.0).abs() < 1e-12);
        assert!(score.error() < 1e-6);
    }

    #[test]
    fn surprise_is_the_logarithm_of_a_softmax() {
        // p = e / (e + 1 + e^-1)
        let e = 1f64.exp();
        let wanted = -(e / (e + 1.0 + 1.0 / e)).ln();
        assert!((surprise(&[1001.0, 1000.0, 999.0], TokenId(0)) - wanted).abs() < 1e-12);
        let mut score = Score::default();
        score.add(1.0);
        score.add(3.0);
        assert!(
            (score.error() - 2f64.exp()).abs() < 1e-9,
            "variance 1 of two"
        );
    }
}
