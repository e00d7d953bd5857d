//! `cellar imatrix`: how large the columns are that each weight matrix multiplies, on a text.
//!
//! As llama-imatrix: the text is cut into chunks of the context's length, each evaluated from an
//! empty memory with its first token replaced by BOS where the model wants one, all tokens to the
//! last layer.

use std::io::Write;

use cellar_engine::{CancelFlag, Engine, EngineConfig};
use cellar_tasks::{ActivationSums, RecordedMatrices, RecordingBackend};
use kv_backend::BoxedBackend;
use kv_core::{SeqId, TokenId, batch::Batch};
use kv_graph::GraphShape;
use kv_rows::KvType;
use model_core::architecture::Model;
use model_core::imatrix::{Importance, ImportanceMatrix};
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialText};

use crate::args::ImatrixArgs;
use crate::failure::{Exit, usage, warn};
use crate::given_text;
use crate::interrupt::exit_on_interrupt;
use crate::models::ModelSource;
use crate::output_file;
use crate::progress::Progress;
use crate::resolve;
use crate::terminal;

/// Default length of a chunk, as in llama.cpp.
const DEFAULT_N_CTX: u32 = 512;

/// Bytes that the recorded values of one ubatch may take: with more, ubatches get smaller.
const MAX_RECORDED_BYTES: usize = 256 << 20;

/// Tokens of a ubatch that still make full use of weights once they are read.
const MIN_UBATCH: usize = 16;

pub(super) fn run(args: &ImatrixArgs, out: &mut impl Write) -> anyhow::Result<Exit> {
    output_file::check("--out", &args.out)?;
    let Some(text) = given_text::text(None, args.file.as_deref())? else {
        return usage("no text: give one with -f FILE, or through a pipe");
    };
    exit_on_interrupt()?;
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
    let chunks = tokens.chunks_exact((n_ctx as usize).max(1));
    let n_chunks = args
        .chunks
        .map_or(chunks.len(), |n| chunks.len().min(n as usize));
    if n_chunks == 0 {
        anyhow::bail!(
            "the text has {} tokens, but a chunk has {n_ctx}; choose a smaller --ctx",
            tokens.len(),
        );
    }
    let matrices = if args.process_output {
        RecordedMatrices::All
    } else {
        RecordedMatrices::Layers
    };
    let config = EngineConfig {
        n_ctx: Some(n_ctx),
        n_seqs: 1,
        n_ubatch: n_ubatch(args, &**file.model(), matrices)?,
        n_batch: args.size.batch,
        ..resolve::compute_config(&args.compute, &**file.model(), KvType::F16)
    };
    let sums = ActivationSums::default();
    let record = |backend| RecordingBackend::new(backend, matrices, sums.clone());
    let mut engine = resolve::open_recording_engine(&file, &args.compute, &config, record)?;
    let progress = Progress::tokens("evaluating", n_chunks * n_ctx as usize);
    for (number, chunk) in chunks.take(n_chunks).enumerate() {
        let mut chunk = chunk.to_vec();
        if let (Some(first), Some(bos)) = (chunk.first_mut(), tokenizer.adds_first()) {
            *first = bos;
        }
        read_chunk(&mut engine, &chunk)?;
        progress.set((number + 1) * chunk.len());
    }
    drop(progress);
    let matrix = ImportanceMatrix {
        entries: sums.importance(),
        datasets: vec![dataset(args)],
        n_chunks: u32::try_from(n_chunks)?,
        chunk_size: Some(n_ctx),
    };
    check(&matrix)?;
    let bytes = matrix.to_bytes()?;
    output_file::write(&args.out, |file| Ok(file.write_all(&bytes)?))?;
    let line = format!(
        "{}: {} matrices, {n_chunks} chunks of {n_ctx} tokens",
        args.out.display(),
        matrix.entries.len(),
    );
    let line = terminal::escape(&line);
    if output_file::is_stdout(&args.out) {
        terminal::note(line);
    } else {
        writeln!(out, "{line}")?;
        out.flush()?;
    }
    Ok(Exit::Done)
}

/// The name of the text, as the file says it.
fn dataset(args: &ImatrixArgs) -> String {
    let name = args.file.as_deref().and_then(|path| path.file_name());
    name.map_or_else(
        || "stdin".to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
}

/// The ubatch of the flags, or a smaller one whose recorded values fit into memory.
fn n_ubatch(
    args: &ImatrixArgs,
    model: &dyn Model,
    matrices: RecordedMatrices,
) -> anyhow::Result<u32> {
    let one = GraphShape {
        n_tokens: 1,
        n_outputs: 1,
    };
    let per_token = matrices.bytes_per_token(&model.graph(one)?);
    let most = (MAX_RECORDED_BYTES / per_token.max(1)).max(MIN_UBATCH);
    Ok(args
        .compute
        .ubatch
        .min(u32::try_from(most).unwrap_or(u32::MAX)))
}

/// Evaluates one chunk. Of the logits only the largest is kept: all rows could be gigabytes.
fn read_chunk(engine: &mut Engine<BoxedBackend>, chunk: &[TokenId]) -> anyhow::Result<()> {
    let n_batch = (engine.settings().rules.n_batch as usize).max(1);
    engine.clear();
    for tokens in chunk.chunks(n_batch) {
        let mut batch = Batch::new();
        for &token in tokens {
            batch.push_token(token).in_sequence(SeqId(0)).with_output();
        }
        engine.decode_candidates(&batch, 1, &CancelFlag::default())?;
    }
    Ok(())
}

/// Checks that the sums are numbers, and says which experts saw no token.
fn check(matrix: &ImportanceMatrix) -> anyhow::Result<()> {
    let is_finite = |entry: &Importance| entry.sums.iter().all(|sum| sum.is_finite());
    if let Some((name, _)) = matrix.entries.iter().find(|(_, entry)| !is_finite(entry)) {
        anyhow::bail!(
            "what '{name}' multiplies is not finite: check the model file, or choose \
             --activations f32"
        );
    }
    let counts = matrix.entries.values().flat_map(|entry| &entry.counts);
    let (n_matrices, n_unseen) = (
        counts.clone().count(),
        counts.filter(|&&n| n == 0.0).count(),
    );
    if n_unseen > 0 {
        warn(&format!(
            "{n_unseen} of {n_matrices} matrices saw no token, as no token went to their experts; \
             a longer text would reach more"
        ));
    }
    Ok(())
}
