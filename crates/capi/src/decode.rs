//! Computing batches: `llama_decode`, `llama_encode` and `llama_process`.
//!
//! Invariant: a batch that is refused, does not fit or is aborted leaves the memory and the outputs
//! as they were. Decides nothing about tokens.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cellar_engine::EngineError;
use cellar_engine::with_reasons;
use kv_backend::CancelFlag;
use kv_core::batch::{Batch, TokensOf};
use kv_core::memory::{Memory, Refusal};
use model_core::architecture::OutputKind;
use model_core::sentence::Pooling;

use crate::abi::{BatchArrays, pooling};
use crate::batch::BatchExt;
use crate::context::{Abort, Context, State, context};
use crate::entries::{self, Entry, EntryLayout};
use crate::ffi::{Handle, c_api};
use crate::log;
use crate::output::{Outputs, RowKind};

/// There is no room for the batch.
const NO_ROOM: i32 = 1;
/// The program's callback ended it.
const ABORTED: i32 = 2;
/// The batch is wrong.
const INVALID: i32 = -1;
/// The computation failed.
const FAILED: i32 = -3;

/// The time between two questions to the program whether to go on.
const ASK_EVERY: Duration = Duration::from_millis(2);

/// The work to do with a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Encode,
    Decode,
}

impl Abort {
    fn is_wanted(self) -> bool {
        // SAFETY: the program gave the callback and its data for such calls.
        self.callback
            .is_some_and(|callback| unsafe { callback(self.data as *mut std::ffi::c_void) })
    }

    /// Runs a computation until the program wants its end.
    fn during<R>(self, run: impl FnOnce(&CancelFlag) -> R) -> R {
        let flag = CancelFlag::default();
        if self.callback.is_none() {
            return run(&flag);
        }
        if self.is_wanted() {
            flag.cancel();
            return run(&flag);
        }
        let is_done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let watch = scope.spawn(|| {
                while !is_done.load(Ordering::Acquire) {
                    if self.is_wanted() {
                        flag.cancel();
                        return;
                    }
                    std::thread::park_timeout(ASK_EVERY);
                }
            });
            let result = run(&flag);
            is_done.store(true, Ordering::Release);
            watch.thread().unpark();
            result
        })
    }
}

/// A failure as the API has it.
fn code(error: &EngineError) -> i32 {
    match error {
        EngineError::Cancelled => ABORTED,
        EngineError::Refused(Refusal::NoRoom(_) | Refusal::NoStateRoom(_)) => NO_ROOM,
        EngineError::Batch(_)
        | EngineError::Refused(_)
        | EngineError::OtherOutput { .. }
        | EngineError::WrongTokens { .. }
        | EngineError::NoEncoder { .. }
        | EngineError::TokensOnly { .. } => INVALID,
        _ => FAILED,
    }
}

fn pooling_rule(pooling: i32) -> Option<Pooling> {
    Some(match pooling {
        pooling::MEAN => Pooling::Mean,
        pooling::CLS => Pooling::Cls,
        pooling::LAST => Pooling::Last,
        pooling::RANK => Pooling::Rank,
        _ => return None,
    })
}

/// The rows of sequences, pooled.
fn pool(outputs: &mut Outputs, entries: &[Entry], rule: Pooling) {
    let mut rows: std::collections::BTreeMap<i32, Vec<f32>> = Default::default();
    for (entry, row) in entries.iter().zip(&outputs.row_of) {
        let Some(row) = *row else { continue };
        let values = &outputs.values[row * outputs.width..][..outputs.width];
        for &seq in &entry.seqs {
            rows.entry(seq).or_default().extend_from_slice(values);
        }
    }
    let width = outputs.width;
    outputs.pooled = rows
        .into_iter()
        .map(|(seq, rows)| (seq, rule.pool(&rows, width)))
        .collect();
}

/// The number of each entry's row.
fn row_numbers(entries: &[Entry]) -> Vec<Option<usize>> {
    let mut n = 0;
    let number = |entry: &Entry| {
        entry.is_output.then(|| {
            n += 1;
            n - 1
        })
    };
    entries.iter().map(number).collect()
}

/// Computes entries and keeps what comes out.
fn compute(
    context: &Context,
    state: &mut State,
    entries: &mut [Entry],
    work: Work,
) -> Result<(), EngineError> {
    let output = state.engine.settings().output;
    let is_source = work == Work::Encode && context.has_memory;
    if state.embeddings || is_source {
        entries.iter_mut().for_each(|entry| entry.is_output = true);
    }
    let mut batch = entries::batch(entries).map_err(refused)?;
    let tokens_of = if is_source {
        TokensOf::Source
    } else {
        TokensOf::Sequence
    };
    batch.set_tokens_of(tokens_of);
    let began = Instant::now();
    let outputs = std::mem::take(&mut state.outputs);
    let computed = run(context, state, &batch, tokens_of);
    match computed {
        Ok(computed) => {
            state.outputs = computed;
            state.spare = outputs.values;
        }
        Err(error) => {
            let is_untouched = matches!(error, EngineError::Batch(_) | EngineError::Refused(_));
            if is_untouched {
                state.outputs = outputs;
            }
            return Err(error);
        }
    }
    state.outputs.row_of = row_numbers(entries);
    if state.outputs.kind == RowKind::Embeddings {
        let rule = match output {
            OutputKind::Scores { .. } => Some(Pooling::Rank),
            _ => pooling_rule(context.pooling),
        };
        if let Some(rule) = rule {
            pool(&mut state.outputs, entries, rule);
        }
    }
    state.times.add(entries.len(), began.elapsed());
    Ok(())
}

/// A batch that the engine need not see.
fn refused(reason: String) -> EngineError {
    EngineError::Refused(Refusal::custom(Wrong(reason)))
}

/// Why a batch is wrong, for people.
#[derive(Debug)]
struct Wrong(String);

impl std::fmt::Display for Wrong {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Wrong {}

fn run(
    context: &Context,
    state: &mut State,
    batch: &Batch,
    tokens_of: TokensOf,
) -> Result<Outputs, EngineError> {
    let State {
        engine,
        abort,
        spare,
        ..
    } = state;
    let rows = |values: &[f32], width| Outputs {
        values: values.to_vec(),
        width,
        kind: RowKind::Embeddings,
        ..Outputs::default()
    };
    if tokens_of == TokensOf::Source {
        let computed = abort.during(|flag| {
            engine
                .encode_until(batch, flag)
                .map(|rows| (rows.values().to_vec(), rows.dim()))
        })?;
        return Ok(rows(&computed.0, computed.1));
    }
    if engine.settings().output == OutputKind::Logits {
        abort.during(|flag| engine.decode_until(batch, flag).map(drop))?;
        let n_vocab = context.shared.n_vocab();
        let logits = engine.last_logits();
        let width = engine.settings().output_width();
        let mut values = std::mem::take(spare);
        values.clear();
        if n_vocab == width {
            values.extend_from_slice(logits.values());
        } else {
            let rows = logits.values().chunks_exact(width.max(1));
            rows.for_each(|row| values.extend_from_slice(&row[..n_vocab.min(width)]));
        }
        return Ok(Outputs {
            values,
            width: n_vocab.min(width),
            kind: RowKind::Logits,
            ..Outputs::default()
        });
    }
    if !context.has_memory {
        engine.clear();
    }
    let computed = engine.embed(batch)?;
    Ok(rows(computed.values(), computed.dim()))
}

fn finished(name: &str, result: Result<(), EngineError>) -> i32 {
    match result {
        Ok(()) => 0,
        Err(error) => {
            let code = code(&error);
            let text = format!("{name}: {}", with_reasons(&error));
            if code == NO_ROOM || code == ABORTED {
                log::warn(&text);
            } else {
                log::error(&text);
            }
            code
        }
    }
}

fn submitted(name: &str, handle: Handle<Context>, arrays: &BatchArrays, work: Work) -> i32 {
    let Some(context) = context(name, handle) else {
        return INVALID;
    };
    let mut state = context.lock();
    let reading = EntryLayout {
        n_embd: context.shared.n_embd_inp(),
        takes_images: state.engine.memory().takes_images(),
    };
    let Some(mut entries) = log::or_line(name, entries::entries(arrays, reading)) else {
        return INVALID;
    };
    finished(name, compute(context, &mut state, &mut entries, work))
}

c_api! {
    fn llama_decode(handle: Handle<Context>, batch: BatchArrays) -> i32 = FAILED; {
        submitted("llama_decode", handle, &batch, Work::Decode)
    }

    fn llama_encode(handle: Handle<Context>, batch: BatchArrays) -> i32 = FAILED; {
        submitted("llama_encode", handle, &batch, Work::Encode)
    }

    fn llama_process(handle: Handle<Context>, kind: i32, batch: Handle<BatchExt>)
        -> i32 = FAILED; {
        let name = "llama_process";
        let work = match kind {
            0 => Work::Encode,
            1 => Work::Decode,
            kind => {
                log::error(&format!("{name}: there is no kind {kind} of processing: 0 or 1"));
                return INVALID;
            }
        };
        let (Some(context), Some(batch)) = (context(name, handle), batch.get()) else {
            return INVALID;
        };
        let mut entries = batch.lock().clone();
        if entries.is_empty() {
            log::error(&format!("{name}: the batch has no tokens"));
            return INVALID;
        }
        let mut state = context.lock();
        finished(name, compute(context, &mut state, &mut entries, work))
    }
}
