//! Traces in the format of Mooncake's (FAST'25), which name the blocks of each prompt, and no
//! tokens.
//!
//! Invariant: what is wrong is an error with the line. Each block stands for [`BLOCK_CELLS`] cells
//! of the memory that is replayed, so a trace of long prompts is replayed in seconds; requests come
//! one after the other, and the time that they take is not known.

use std::collections::HashMap;
use std::io::BufRead;

use cellar_scheduler::{Micros, PrefixUse, Request, RequestId, Salt};
use kv_core::layers::{AttentionMemory, LayerMap, LayerMemory};
use kv_core::memory::{BYTES_PER_CELL, MemoryConfig, Streams, SwaSize};
use kv_core::{Causality, MAX_SEQS, TokenId, Window};
use serde::Deserialize;

use crate::error::TraceError;
use crate::layout::{MemoryShape, TraceLimits};
use crate::reader::{Trace, TracedRequest, TracedText, wrong};
use crate::record::{MAX_HASH, TRACE_VERSION, TraceHeader, TracedEnd};

/// Cells that stand for a block, where it has more tokens.
const BLOCK_CELLS: u32 = 16;

/// Requests that run at once: each waits for the one before.
const N_ACTIVE: u32 = 8;

/// What the lines of a trace of Mooncake's format do not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MooncakeFormat {
    /// Tokens of a block: of each number in `hash_ids`.
    pub tokens_per_block: u32,
    /// Bytes that the memory of the model takes for a token.
    pub token_bytes: u64,
}

/// A line.
#[derive(Deserialize)]
struct Line {
    /// In milliseconds.
    timestamp: u64,
    input_length: u64,
    hash_ids: Vec<u64>,
}

impl Trace {
    /// Reads a trace of Mooncake's format: JSON lines with `timestamp` (milliseconds),
    /// `input_length` (tokens) and `hash_ids` (a number for each block of the prompt, which stands
    /// for the block and all before it). The context of the memory is that of a
    /// [`ReplayConfig`](crate::ReplayConfig), as the trace has none.
    ///
    /// # Errors
    /// [`TraceError::Wrong`] with the line that is wrong; [`TraceError::Refused`] where
    /// blocks have a size that cannot be replayed.
    pub fn read_mooncake(input: impl BufRead, format: &MooncakeFormat) -> Result<Self, TraceError> {
        let tokens_per_block = format.tokens_per_block;
        let block_cells = tokens_per_block.clamp(1, BLOCK_CELLS);
        if tokens_per_block == 0 || !tokens_per_block.is_multiple_of(block_cells) {
            return Err(TraceError::Refused {
                reason: format!(
                    "blocks of {tokens_per_block} tokens: at most {BLOCK_CELLS} or a multiple of it \
                     is needed"
                ),
            });
        }
        let unit = tokens_per_block / block_cells;
        let mut blocks = Blocks {
            tokens_per_block,
            block_cells,
            numbers: HashMap::new(),
        };
        let mut trace = Self::new(header(format.token_bytes, unit), unit);
        let (mut at, mut last, mut before) = (0, 0, 0);
        for (number, line) in input.split(b'\n').enumerate() {
            let line = line.map_err(|error| wrong(at, &error.to_string()))?;
            let fault = |what: &str| wrong(at, &format!("line {}: {what}", number + 1));
            if !line.trim_ascii().is_empty() {
                let parsed: Line = serde_json::from_slice(&line)
                    .map_err(|error| fault(&format!("no request of this format: {error}")))?;
                if parsed.timestamp < before {
                    let what = format!(
                        "the request comes at {} ms, and the one before it came at {before} ms",
                        parsed.timestamp
                    );
                    return Err(fault(&what));
                }
                before = parsed.timestamp;
                let prompt = blocks.prompt(&parsed).map_err(|what| fault(&what))?;
                let time = parsed.timestamp.saturating_mul(1000);
                last = time.max(last + u64::from(!trace.requests.is_empty()));
                trace.push_alone(Micros(last), prompt);
            }
            at += line.len() as u64 + 1;
        }
        if trace.requests.is_empty() {
            return Err(wrong(at, "there are no requests"));
        }
        let n_used = blocks.numbers.len() as u64 * u64::from(block_cells);
        if n_used + trace.requests.len() as u64 > u64::from(MAX_HASH) {
            let what = format!("{} different blocks are too many", blocks.numbers.len());
            return Err(TraceError::Refused { reason: what });
        }
        trace.micros = last;
        Ok(trace)
    }

    /// Adds a request that comes when all before it have ended, and whose text is one token that no
    /// other text has.
    fn push_alone(&mut self, at: Micros, prompt: Vec<TokenId>) {
        let n = self.requests.len();
        let id = RequestId(n as u64);
        let text = TracedText {
            tokens: vec![TokenId(MAX_HASH - n as u32)],
            end: Some((Micros(1), TracedEnd::Complete)),
            came_at: at,
        };
        self.texts.insert(id, text);
        self.requests.push(TracedRequest {
            at,
            request: Request {
                id,
                prompt,
                prefix: PrefixUse::Within(Salt(0)),
                ..Request::default()
            },
            n_ended: n,
        });
    }
}

/// The blocks of all prompts, numbered as they come.
struct Blocks {
    tokens_per_block: u32,
    block_cells: u32,
    numbers: HashMap<u64, u32>,
}

impl Blocks {
    /// The cells of a prompt, equal where prompts begin with the same blocks; an error is what is
    /// wrong with it.
    fn prompt(&mut self, line: &Line) -> Result<Vec<TokenId>, String> {
        let n_tokens = line.input_length;
        let n_blocks = line.hash_ids.len() as u64;
        let per_block = u64::from(self.tokens_per_block);
        let needed = n_tokens.div_ceil(per_block);
        if n_tokens == 0 || needed != n_blocks {
            return Err(format!(
                "a prompt of {n_tokens} tokens in {n_blocks} blocks of {per_block}: it has {needed}"
            ));
        }
        // What is left for the last one, in cells, and at least one.
        let in_last = n_tokens - (n_blocks - 1) * per_block;
        let n_last = (in_last * u64::from(self.block_cells) + per_block / 2) / per_block;
        let mut prompt = Vec::new();
        for (at, id) in line.hash_ids.iter().enumerate() {
            let next = self.numbers.len() as u32;
            let number = *self.numbers.entry(*id).or_insert(next);
            let n_cells = if at + 1 == line.hash_ids.len() {
                (n_last as u32).max(1)
            } else {
                self.block_cells
            };
            let first = number.saturating_mul(self.block_cells);
            prompt.extend((0..n_cells).map(|cell| TokenId(first.saturating_add(cell))));
        }
        Ok(prompt)
    }
}

/// A model of one layer whose cells stand for so many tokens, and a scheduler that computes each
/// prompt alone.
fn header(token_bytes: u64, unit: u32) -> TraceHeader {
    let attention = AttentionMemory {
        kv_heads: 1,
        k_dim: 1,
        v_dim: 1,
        window: Window::Full,
    };
    // The engine's own bytes are those of a cell for each token.
    let of_engine = BYTES_PER_CELL.saturating_mul(u64::from(unit) - 1);
    let cell_bytes = token_bytes.saturating_mul(u64::from(unit));
    TraceHeader {
        cellar_trace: TRACE_VERSION,
        memory: MemoryShape {
            layers: LayerMap::new(vec![LayerMemory::Attention(attention)]),
            config: MemoryConfig {
                n_ctx: 1,
                n_seqs: MAX_SEQS as u32,
                streams: Streams::Shared,
                n_ubatch: TraceLimits::ALONE_TOKENS,
                causality: Causality::Causal,
                swa: SwaSize::Window,
                n_snapshots: 0,
                n_active: Some(N_ACTIVE),
            },
            cell_bytes: vec![cell_bytes.saturating_add(of_engine)],
            state_bytes: 0,
        },
        limits: TraceLimits::alone(N_ACTIVE as usize),
    }
}
