//! `cellar kl`: how much the storage types of K and V change predictions, compared with `f32`.
//!
//! Two engines take the same text in the same pieces, one with `f32` rows; what they predict at
//! every token is compared and forgotten, so memory does not grow with the text.

use std::io::Write;

use cellar_engine::{Engine, EngineConfig, Logits, PromptOutputs};
use kv_backend::{Backend, BoxedBackend};
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_rows::KvType;
use model_core::architecture::Model;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialText};
use serde::Serialize;

use crate::args::KlArgs;
use crate::failure::{Exit, usage};
use crate::given_text;
use crate::models::ModelSource;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;

/// Tokens whose logits are in memory at once.
const PIECE: usize = 64;

/// What `--json` prints.
#[derive(Debug, Default, Serialize)]
struct Report {
    kv_types: String,
    n_tokens: usize,
    bytes_per_token: u64,
    f32_bytes_per_token: u64,
    /// Mean over all tokens of `KL(P_f32 || P)`, in nats.
    mean_kl: f64,
    max_kl: f64,
    /// Part of the tokens at which both find the same one most likely.
    same_top: f64,
    /// `exp` of the mean surprise at the text's next token.
    perplexity: f64,
    f32_perplexity: f64,
}

pub(super) fn run(args: &KlArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    let Some(text) = given_text::text(args.input.text(), args.input.file.as_deref())? else {
        return usage("no text: give one as an argument, with -f FILE, or through a pipe");
    };
    let source = ModelSource::new(args.input.model());
    let file = source.load_with(&args.compute.changes())?;
    resolve::continues_without_source(&file)?;
    let options = EncodeOptions {
        add: AddSpecial::AsModel,
        special: SpecialText::AsText,
    };
    let tokens = file.tokenizer().encode(&text, options);
    if tokens.len() < 2 {
        return usage("the text has less than two tokens: there is nothing to predict");
    }
    let config = config(args, &**file.model(), tokens.len())?;
    let exact = EngineConfig {
        kv_types: KvType::F32.into(),
        ..config.clone()
    };
    let kv = &args.compute.kv;
    let is_chosen = [kv.kv_type, kv.kv_type_k, kv.kv_type_v]
        .iter()
        .any(Option::is_some);
    if config == exact && !is_chosen {
        return usage(
            "nothing to compare: K and V are f32 in both; give another type, as --kv-type q8_0",
        );
    }
    let mut report = Report {
        kv_types: config.kv_types.to_string(),
        n_tokens: tokens.len(),
        bytes_per_token: config.bytes_per_token(&**file.model())?,
        f32_bytes_per_token: exact.bytes_per_token(&**file.model())?,
        ..Report::default()
    };
    let first = resolve::open_engine(&file, &args.compute, &exact, PromptOutputs::All)?;
    // What differs is the types, not the backend.
    let same = first.backend().info().name;
    let second = resolve::open_engine_on(&same, &file, &args.compute, &config)?;
    let mut engines = [first, second];
    compare(&mut engines, &tokens, &mut report)?;
    if args.json {
        writeln!(out, "{}", terminal::json(&report)?)?;
    } else {
        print(&report, out)?;
    }
    out.flush()?;
    Ok(Exit::Done)
}

/// Room for the whole text, taken in pieces.
fn config(args: &KlArgs, model: &dyn Model, n_tokens: usize) -> anyhow::Result<EngineConfig> {
    let config = resolve::compute_config(&args.compute, model, KvType::F32);
    if let Some(n_ctx) = config.n_ctx
        && n_tokens > n_ctx as usize
    {
        anyhow::bail!("{n_tokens} tokens do not fit the context of {n_ctx}: choose a larger --ctx");
    }
    Ok(EngineConfig {
        n_ctx: Some(config.n_ctx.unwrap_or(u32::try_from(n_tokens)?)),
        n_batch: config.n_batch.max(u32::try_from(PIECE)?),
        ..config
    })
}

fn compare(
    engines: &mut [Engine<BoxedBackend>; 2],
    tokens: &[TokenId],
    report: &mut Report,
) -> anyhow::Result<()> {
    let n_vocab = engines[0].model().vocab_size().max(1);
    let progress = Progress::tokens("comparing", tokens.len());
    let (mut sum, mut n_same) = (0.0, 0u32);
    let mut surprise = [0.0, 0.0];
    let mut following = tokens.iter().skip(1);
    let mut done = 0;
    let [exact, stored] = engines;
    for piece in tokens.chunks(PIECE) {
        let (exact, stored) = (decode(exact, piece)?, decode(stored, piece)?);
        let rows = |logits: Logits<'_>| -> Vec<Distribution> {
            let rows = logits.values().chunks_exact(n_vocab);
            rows.map(Distribution::of).collect()
        };
        for (p, q) in rows(exact).iter().zip(&rows(stored)) {
            let kl = p.kl(q);
            sum += kl;
            report.max_kl = report.max_kl.max(kl);
            n_same += u32::from(p.top == q.top);
            if let Some(next) = following.next() {
                for (surprise, of) in surprise.iter_mut().zip([p, q]) {
                    *surprise -= of.log_p(next.0 as usize);
                }
            }
        }
        done += piece.len();
        progress.set(done);
    }
    let n = tokens.len() as f64;
    report.mean_kl = sum / n;
    report.same_top = f64::from(n_same) / n;
    [report.f32_perplexity, report.perplexity] = surprise.map(|s| (s / (n - 1.0)).exp());
    Ok(())
}

fn decode<'e>(
    engine: &'e mut Engine<BoxedBackend>,
    tokens: &[TokenId],
) -> anyhow::Result<Logits<'e>> {
    let mut batch = Batch::new();
    for &token in tokens {
        batch.push_token(token).in_sequence(SeqId(0)).with_output();
    }
    Ok(engine.decode(&batch)?)
}

/// The distribution of the next token, from one logits row.
struct Distribution {
    /// Logits less the logarithm of the sum of their exponentials.
    log_p: Vec<f64>,
    top: usize,
}

impl Distribution {
    fn of(logits: &[f32]) -> Self {
        let largest =
            |best: (usize, f32), (at, &v): (usize, &f32)| if v > best.1 { (at, v) } else { best };
        let (top, max) = logits
            .iter()
            .enumerate()
            .fold((0, f32::NEG_INFINITY), largest);
        let max = f64::from(max);
        let sum: f64 = logits.iter().map(|&v| (f64::from(v) - max).exp()).sum();
        let log_sum = max + sum.ln();
        let log_p = logits.iter().map(|&v| f64::from(v) - log_sum).collect();
        Self { log_p, top }
    }

    fn log_p(&self, token: usize) -> f64 {
        self.log_p.get(token).copied().unwrap_or(f64::NEG_INFINITY)
    }

    /// `Σ p · ln(p / q)`; rounding can make the sum of equal distributions a little less than 0.
    fn kl(&self, q: &Self) -> f64 {
        let terms = self
            .log_p
            .iter()
            .zip(&q.log_p)
            .map(|(p, q)| p.exp() * (p - q));
        terms.sum::<f64>().max(0.0)
    }
}

fn print(report: &Report, out: &mut impl Write) -> anyhow::Result<()> {
    let Report {
        kv_types,
        n_tokens,
        bytes_per_token,
        f32_bytes_per_token,
        mean_kl,
        max_kl,
        same_top,
        perplexity,
        f32_perplexity,
    } = report;
    writeln!(
        out,
        "{n_tokens} tokens, K and V in {kv_types} compared with f32"
    )?;
    writeln!(
        out,
        "  bytes per token {bytes_per_token} instead of {f32_bytes_per_token}"
    )?;
    writeln!(
        out,
        "  KL divergence   mean {mean_kl:.6}, largest {max_kl:.6} nats"
    )?;
    writeln!(out, "  same top token  {:.2} %", same_top * 100.0)?;
    writeln!(
        out,
        "  perplexity      {perplexity:.4} instead of {f32_perplexity:.4}"
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divergence_is_that_of_the_definition() {
        // p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): KL = 1/2 ln 2 - 1/4 ln 2.
        let ln2 = std::f32::consts::LN_2;
        let p = Distribution::of(&[5.0 + ln2, 5.0, 5.0]);
        let q = Distribution::of(&[-1.0, -1.0, ln2 - 1.0]);
        assert!((p.kl(&q) - 0.25 * std::f64::consts::LN_2).abs() < 1e-6);
        assert_eq!([p.top, q.top], [0, 2]);
        assert_eq!(p.kl(&p), 0.0);
        assert!((p.log_p(0) - 0.5f64.ln()).abs() < 1e-6);
        assert_eq!(p.log_p(3), f64::NEG_INFINITY);
    }
}
