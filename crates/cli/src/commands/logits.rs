//! `cellar logits`: the logits of given tokens, in a safetensors file.

use std::io::Write;
use std::path::Path;

use anyhow::Context;
use cellar_engine::{Engine, EngineConfig, PromptOutputs};
use kv_backend::BoxedBackend;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_rows::KvType;
use model_core::architecture::Model;
use safetensors::tensor::{Dtype, TensorView};

use crate::args::LogitsArgs;
use crate::failure::{Exit, usage};
use crate::input;
use crate::interrupt::exit_on_interrupt;
use crate::machine;
use crate::models::ModelSource;
use crate::output_file;
use crate::progress::Progress;
use crate::resolve;

pub(super) fn run(args: &LogitsArgs) -> anyhow::Result<Exit> {
    let sequences = sequences(args)?;
    output_file::check("--out", &args.out)?;
    exit_on_interrupt()?;
    let source = ModelSource::new(args.model.path());
    let file = source.open_with(&args.compute.changes())?;
    resolve::needs_no_source(&file)?;
    let config = config(args, &**file.model(), &sequences)?;
    let n_vocab = file.model().vocab_size();
    if let Some(id) = sequences
        .iter()
        .flatten()
        .find(|&&id| id as usize >= n_vocab)
    {
        return usage(format!(
            "--tokens or --tokens-file: {id} is no token of this model, which has {n_vocab}; 'cellar \
             tokenize' shows those of a text"
        ));
    }
    check_room(&sequences, n_vocab)?;
    let mut engine = resolve::open_engine(&file, &args.compute, &config, PromptOutputs::All)?;
    let logits = evaluate(&mut engine, &sequences, &args.chunks)?;
    write_file(&args.out, &logits, n_vocab)?;
    Ok(Exit::Done)
}

/// The sequences of ids that were given, none of them empty.
fn sequences(args: &LogitsArgs) -> anyhow::Result<Vec<Vec<u32>>> {
    let sequences: Vec<Vec<u32>> = match &args.tokens_file {
        Some(path) => {
            let text = input::text(path)?;
            let lines = text.lines().filter(|line| !line.trim().is_empty());
            let ids = lines.map(token_ids).collect::<Result<_, _>>();
            ids.with_context(|| format!("--tokens-file '{}'", path.display()))?
        }
        None => args
            .tokens
            .iter()
            .map(|list| token_ids(list).with_context(|| format!("--tokens {list}")))
            .collect::<Result<_, _>>()?,
    };
    if args.tokens.is_empty() && args.tokens_file.is_none() {
        return usage("no tokens: give --tokens 1,2,3 or --tokens-file FILE");
    }
    if sequences.is_empty() || sequences.iter().any(Vec::is_empty) {
        return usage(
            "--tokens or --tokens-file has a sequence without tokens: give at least one id",
        );
    }
    Ok(sequences)
}

/// Ids of one sequence, separated by commas or white space.
///
/// # Errors
/// A usage error naming what is no token id.
fn token_ids(list: &str) -> anyhow::Result<Vec<u32>> {
    let between_commas = list.split(',').map(str::trim);
    if list.contains(',') && between_commas.clone().any(str::is_empty) {
        return usage("there is no token id next to a comma: one is needed on both sides");
    }
    let parts = between_commas.flat_map(str::split_whitespace);
    let ids = parts.map(|part| match part.parse() {
        Ok(id) => Ok(id),
        Err(_) => usage(format!(
            "'{part}' is no token id: a number of at least 0 is needed"
        )),
    });
    ids.collect()
}

/// Sizes that take all sequences at once, unless flags set them.
fn config(
    args: &LogitsArgs,
    model: &dyn Model,
    sequences: &[Vec<u32>],
) -> anyhow::Result<EngineConfig> {
    let config = resolve::compute_config(&args.compute, model, KvType::F32);
    let n_tokens: usize = sequences.iter().map(Vec::len).sum();
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    let n_needed = if args.streams.streams {
        longest
    } else {
        n_tokens
    };
    if let Some(n_ctx) = config.n_ctx
        && n_needed > n_ctx as usize
    {
        anyhow::bail!("{n_needed} tokens do not fit the context of {n_ctx}: choose a larger --ctx");
    }
    let count = |n: usize| u32::try_from(n).context("more tokens than can be counted");
    Ok(EngineConfig {
        n_ctx: Some(config.n_ctx.unwrap_or(count(n_needed)?)),
        n_batch: config.n_batch.max(count(n_tokens)?),
        streams: resolve::streams(args.streams),
        n_seqs: count(sequences.len())?,
        ..config
    })
}

/// Logits can be many more than the model's memory.
fn check_room(sequences: &[Vec<u32>], n_vocab: usize) -> anyhow::Result<()> {
    let n_rows: usize = sequences.iter().map(Vec::len).sum();
    // What the batch gives, what is collected of it, and the bytes on their way to the file.
    let wanted = (n_rows as u64)
        .saturating_mul(n_vocab as u64)
        .saturating_mul(3 * 4);
    match machine::available_memory() {
        Some(available) if wanted > available => anyhow::bail!(
            "{n_rows} rows of {n_vocab} logits take {}, but this machine has {} free; give fewer \
             tokens",
            machine::bytes(wanted),
            machine::bytes(available),
        ),
        _ => Ok(()),
    }
}

/// The logits of every token of every sequence, `[tokens, vocab]` each.
fn evaluate(
    engine: &mut Engine<BoxedBackend>,
    sequences: &[Vec<u32>],
    chunks: &[u32],
) -> anyhow::Result<Vec<Vec<f32>>> {
    let n_vocab = engine.model().vocab_size();
    let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
    let progress = Progress::tokens("evaluating", longest);
    let mut logits = vec![Vec::new(); sequences.len()];
    let mut sizes = chunks.iter().cycle();
    let mut start = 0;
    while start < longest {
        let size = sizes.next().map_or(longest, |&size| size as usize);
        let end = start.saturating_add(size).min(longest);
        let mut batch = Batch::new();
        let mut owners = Vec::new();
        for (number, ids) in sequences.iter().enumerate() {
            for &id in ids.get(start..end.min(ids.len())).unwrap_or_default() {
                let seq = SeqId(u32::try_from(number)?);
                batch.push_token(TokenId(id)).in_sequence(seq).with_output();
                owners.push(number);
            }
        }
        let rows = engine.decode(&batch)?;
        for (owner, row) in owners
            .iter()
            .zip(rows.values().chunks_exact(n_vocab.max(1)))
        {
            if let Some(own) = logits.get_mut(*owner) {
                own.extend_from_slice(row);
            }
        }
        start = end;
        progress.set(end);
    }
    Ok(logits)
}

/// Writes the logits as tensors.
fn write_file(path: &Path, logits: &[Vec<f32>], n_vocab: usize) -> anyhow::Result<()> {
    let bytes: Vec<Vec<u8>> = logits
        .iter()
        .map(|rows| rows.iter().flat_map(|v| v.to_le_bytes()).collect())
        .collect();
    let mut tensors = Vec::new();
    for (number, (rows, bytes)) in logits.iter().zip(&bytes).enumerate() {
        let shape = vec![rows.len() / n_vocab.max(1), n_vocab];
        let name = if logits.len() == 1 {
            "logits".to_owned()
        } else {
            format!("logits_{number}")
        };
        tensors.push((name, TensorView::new(Dtype::F32, shape, bytes)?));
    }
    let contents = safetensors::serialize(tensors, None)?;
    output_file::write(path, |file| Ok(file.write_all(&contents)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_lists_take_commas_and_spaces() {
        assert_eq!(token_ids("1,2, 3\t4\n").unwrap(), [1, 2, 3, 4]);
        let error = token_ids("1,-2").unwrap_err().to_string();
        assert_eq!(
            error,
            "'-2' is no token id: a number of at least 0 is needed"
        );
        assert!(token_ids("4294967296").is_err());
        for list in ["1,,2", ",1", "1, ", ","] {
            let error = token_ids(list).unwrap_err().to_string();
            assert!(error.contains("next to a comma"), "{list}: {error}");
        }
        assert!(token_ids(" ").unwrap().is_empty());
    }
}
