//! States: what a context or a sequence remembers, as bytes and in files.
//!
//! A state is a [`Frame`] and the engine's own format behind it, which another context of the same
//! model takes, whatever its sizes and types are; files of llama.cpp's are read by [`foreign`].
//! Invariant: the sizes that are told are exact; a
//! state is restored whole or nothing changes. Logits are no part of it, as in llama.cpp.

use std::io::Write;
use std::path::Path;

use cellar_engine::SaveOptions;
use cellar_engine::with_reasons;
use kv_backend::state::SavedState;
use kv_core::SeqId;
use kv_core::memory::{Memory, RestoreInto, Seqs};

use crate::context::{Context, context};
use crate::ffi::{CText, Handle, In, Out, c_api};
use crate::foreign;
use crate::log;
use crate::whole_file;

/// The first bytes of a state.
const MAGIC: [u8; 4] = *b"clrs";
/// The first bytes of a file with a state.
const FILE_MAGIC: [u8; 4] = *b"clrf";
/// Bytes of a frame.
const FRAME_BYTES: usize = 16;
/// Bytes before the tokens of a file: its magic, and the number of tokens.
const FILE_BYTES: usize = 8;
/// The sequence of a state that has all.
const ALL: i32 = -1;

/// The header before the engine's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Frame {
    /// The sequence that was saved, or [`ALL`].
    seq: i32,
    /// Bytes behind the frame.
    n_bytes: u64,
}

impl Frame {
    fn bytes(self) -> [u8; FRAME_BYTES] {
        let mut bytes = [0; FRAME_BYTES];
        bytes[..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&self.seq.to_le_bytes());
        bytes[8..].copy_from_slice(&self.n_bytes.to_le_bytes());
        bytes
    }

    /// The frame at the beginning of some bytes.
    fn of(bytes: &[u8]) -> Result<Self, String> {
        match bytes.first_chunk::<FRAME_BYTES>() {
            Some([b'c', b'l', b'r', b's', a, b, c, d, length @ ..]) => Ok(Self {
                seq: i32::from_le_bytes([*a, *b, *c, *d]),
                n_bytes: u64::from_le_bytes(*length),
            }),
            Some(_) => Err("these bytes are no state of this library".to_owned()),
            None => Err(format!("{} bytes are no state", bytes.len())),
        }
    }
}

/// Counts bytes.
struct Counter(u64);

impl Write for Counter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn write(context: &Context, seq: i32, out: &mut impl Write) -> Result<(), String> {
    let seqs = match u32::try_from(seq) {
        Ok(seq) => Seqs::One(SeqId(seq)),
        Err(_) => Seqs::All,
    };
    let options = SaveOptions {
        seqs,
        tokens: &[],
        kv_type: None,
        state_type: None,
    };
    let state = context.lock();
    let saved = state.engine.save_state(&options, out);
    saved.map(drop).map_err(|error| with_reasons(&error))
}

fn check_seq(context: &Context, seq: i32) -> Result<(), String> {
    let n_seqs = context.lock().engine.memory().n_seqs();
    if u32::try_from(seq).is_ok_and(|seq| seq < n_seqs) {
        Ok(())
    } else {
        Err(format!(
            "there is no sequence {seq}: the memory has {n_seqs}"
        ))
    }
}

fn saved(context: &Context, seq: i32) -> Result<Vec<u8>, String> {
    let mut bytes = vec![0; FRAME_BYTES];
    if context.has_memory {
        write(context, seq, &mut bytes)?;
    }
    let n_bytes = (bytes.len() - FRAME_BYTES) as u64;
    bytes[..FRAME_BYTES].copy_from_slice(&Frame { seq, n_bytes }.bytes());
    Ok(bytes)
}

fn size(context: &Context, seq: i32) -> Result<usize, String> {
    let mut counter = Counter(FRAME_BYTES as u64);
    if context.has_memory {
        write(context, seq, &mut counter)?;
    }
    usize::try_from(counter.0).map_err(|error| error.to_string())
}

/// Restores a state, into one sequence or all, and returns its bytes.
fn restore(context: &Context, bytes: &[u8], to: Option<i32>) -> Result<usize, String> {
    let frame = Frame::of(bytes)?;
    let n = usize::try_from(frame.n_bytes).unwrap_or(usize::MAX);
    let rest = &bytes[FRAME_BYTES..];
    let rest = rest
        .get(..n)
        .ok_or_else(|| format!("the state is cut short: {} of {n} bytes", rest.len()))?;
    let from = u32::try_from(frame.seq).map(SeqId).ok();
    let to = to.and_then(|to| u32::try_from(to).ok()).map(SeqId);
    let into = match (from, to) {
        (None, None) => RestoreInto::All,
        (Some(from), Some(to)) => RestoreInto::One { from, to },
        (None, Some(_)) => return Err("this is the state of a whole context".to_owned()),
        (Some(_), None) => return Err("this is the state of one sequence".to_owned()),
    };
    if context.has_memory {
        let state = SavedState::parse(rest).map_err(|error| with_reasons(&error))?;
        let restored = context.lock().engine.restore_state(&state, into);
        restored.map_err(|error| with_reasons(&error))?;
    }
    Ok(FRAME_BYTES + rest.len())
}

fn save_file(path: CText, tokens: &[i32], state: &[u8]) -> Result<usize, String> {
    let path = path.get().ok_or("the path is null or not UTF-8")?;
    let n_tokens = u32::try_from(tokens.len()).map_err(|error| error.to_string())?;
    let mut bytes = FILE_MAGIC.to_vec();
    bytes.extend(n_tokens.to_le_bytes());
    bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    bytes.extend(state);
    whole_file::write(Path::new(path), |out| {
        let written = out.write_all(&bytes);
        written.map_err(|error| format!("'{path}': {error}"))
    })?;
    Ok(bytes.len())
}

/// A file with a state.
struct StateFile {
    bytes: Vec<u8>,
    /// Bytes before the tokens.
    head: usize,
    n_tokens: usize,
    /// True if llama.cpp wrote it.
    is_foreign: bool,
}

impl StateFile {
    fn open(path: CText) -> Result<Self, String> {
        let path = path.get().ok_or("the path is null or not UTF-8")?;
        let bytes = std::fs::read(path).map_err(|error| format!("'{path}': {error}"))?;
        let is_foreign =
            foreign::is_foreign(&bytes).map_err(|error| format!("'{path}': {error}"))?;
        let head = if is_foreign {
            foreign::HEAD_BYTES
        } else {
            FILE_BYTES
        };
        let Some((_, [a, b, c, d])) = bytes.get(..head).and_then(|head| head.split_last_chunk())
        else {
            return Err(format!("'{path}' has {} bytes: no state", bytes.len()));
        };
        let n_tokens = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        let is_known = is_foreign || bytes.starts_with(&FILE_MAGIC);
        if !is_known || n_tokens > (bytes.len() - head) / 4 {
            return Err(format!("'{path}' is no state of this library"));
        }
        Ok(Self {
            bytes,
            head,
            n_tokens,
            is_foreign,
        })
    }

    fn tokens(&self) -> Vec<i32> {
        let (tokens, _) = self.bytes[self.head..][..self.n_tokens * 4].as_chunks::<4>();
        tokens
            .iter()
            .map(|bytes| i32::from_le_bytes(*bytes))
            .collect()
    }

    /// Restores what it holds.
    fn restore(&self, context: &Context, to: Option<i32>) -> Result<(), String> {
        if self.is_foreign && context.has_memory {
            return foreign::restore(context, &self.bytes, self.n_tokens, to);
        }
        let state = &self.bytes[self.head + self.n_tokens * 4..];
        restore(context, state, to).map(drop)
    }
}

/// Reads a file into a context, and its tokens for the program.
fn load_file(
    context: &Context,
    path: CText,
    to: Option<i32>,
    tokens: TokensOut,
) -> Result<usize, String> {
    let file = StateFile::open(path)?;
    let n = file.n_tokens;
    if to.is_some() && tokens.out.is_null() {
        tokens.n.set(n);
        return Ok(file.head + n * 4);
    }
    if n > tokens.room {
        return Err(format!(
            "the file has {n} tokens, and there is room for {}",
            tokens.room
        ));
    }
    file.restore(context, to)?;
    tokens.out.write(tokens.room, &file.tokens());
    tokens.n.set(n);
    Ok(file.bytes.len())
}

/// The room that a program has for the tokens of a file.
#[derive(Clone, Copy)]
struct TokensOut {
    out: Out<i32>,
    room: usize,
    n: Out<usize>,
}

/// Does something with a context; 0 and a line where it fails.
fn sized(
    name: &str,
    handle: Handle<Context>,
    work: impl FnOnce(&Context) -> Result<usize, String>,
) -> usize {
    let Some(context) = context(name, handle) else {
        return 0;
    };
    log::or_line(name, work(context)).unwrap_or(0)
}

fn copy_out(state: &[u8], out: Out<u8>, room: usize) -> Result<usize, String> {
    if state.len() > room || out.is_null() {
        let n = state.len();
        return Err(format!(
            "the state takes {n} bytes, and there is room for {room}"
        ));
    }
    out.write(room, state);
    Ok(state.len())
}

/// The bytes of a state whose length nobody tells.
fn framed<'a>(bytes: In<u8>) -> &'a [u8] {
    let n = Frame::of(bytes.slice(FRAME_BYTES)).map_or(0, |frame| frame.n_bytes);
    let n = usize::try_from(n).unwrap_or(0);
    bytes.slice(FRAME_BYTES.saturating_add(n))
}

c_api! {
    fn llama_state_get_size(handle: Handle<Context>) -> usize = 0; {
        sized("llama_state_get_size", handle, |context| size(context, ALL))
    }

    fn llama_get_state_size(handle: Handle<Context>) -> usize = 0; {
        sized("llama_get_state_size", handle, |context| size(context, ALL))
    }

    fn llama_state_get_data(handle: Handle<Context>, out: Out<u8>, room: usize) -> usize = 0; {
        sized("llama_state_get_data", handle, |context| {
            copy_out(&saved(context, ALL)?, out, room)
        })
    }

    fn llama_copy_state_data(handle: Handle<Context>, out: Out<u8>) -> usize = 0; {
        sized("llama_copy_state_data", handle, |context| {
            copy_out(&saved(context, ALL)?, out, usize::MAX)
        })
    }

    fn llama_state_set_data(handle: Handle<Context>, bytes: In<u8>, n: usize) -> usize = 0; {
        sized("llama_state_set_data", handle, |context| restore(context, bytes.slice(n), None))
    }

    fn llama_set_state_data(handle: Handle<Context>, bytes: In<u8>) -> usize = 0; {
        sized("llama_set_state_data", handle, |context| restore(context, framed(bytes), None))
    }

    fn llama_state_load_file(
        handle: Handle<Context>, path: CText, tokens: Out<i32>, room: usize, n: Out<usize>,
    ) -> bool = false; {
        let out = TokensOut { out: tokens, room, n };
        sized("llama_state_load_file", handle, |context| load_file(context, path, None, out)) > 0
    }

    fn llama_load_session_file(
        handle: Handle<Context>, path: CText, tokens: Out<i32>, room: usize, n: Out<usize>,
    ) -> bool = false; {
        let out = TokensOut { out: tokens, room, n };
        sized("llama_load_session_file", handle, |context| load_file(context, path, None, out)) > 0
    }

    fn llama_state_save_file(handle: Handle<Context>, path: CText, tokens: In<i32>, n: usize)
        -> bool = false; {
        sized("llama_state_save_file", handle, |context| {
            save_file(path, tokens.slice(n), &saved(context, ALL)?)
        }) > 0
    }

    fn llama_save_session_file(handle: Handle<Context>, path: CText, tokens: In<i32>, n: usize)
        -> bool = false; {
        sized("llama_save_session_file", handle, |context| {
            save_file(path, tokens.slice(n), &saved(context, ALL)?)
        }) > 0
    }

    fn llama_state_seq_get_size(handle: Handle<Context>, seq_id: i32) -> usize = 0; {
        llama_state_seq_get_size_ext(handle, seq_id, 0)
    }

    fn llama_state_seq_get_size_ext(handle: Handle<Context>, seq_id: i32, _flags: u32)
        -> usize = 0; {
        sized("llama_state_seq_get_size", handle, |context| {
            check_seq(context, seq_id)?;
            size(context, seq_id)
        })
    }

    fn llama_state_seq_get_data(handle: Handle<Context>, out: Out<u8>, room: usize, seq_id: i32)
        -> usize = 0; {
        llama_state_seq_get_data_ext(handle, out, room, seq_id, 0)
    }

    fn llama_state_seq_get_data_ext(
        handle: Handle<Context>, out: Out<u8>, room: usize, seq_id: i32, _flags: u32,
    ) -> usize = 0; {
        sized("llama_state_seq_get_data", handle, |context| {
            check_seq(context, seq_id)?;
            copy_out(&saved(context, seq_id)?, out, room)
        })
    }

    fn llama_state_seq_set_data(handle: Handle<Context>, bytes: In<u8>, n: usize, seq_id: i32)
        -> usize = 0; {
        llama_state_seq_set_data_ext(handle, bytes, n, seq_id, 0)
    }

    fn llama_state_seq_set_data_ext(
        handle: Handle<Context>, bytes: In<u8>, n: usize, seq_id: i32, _flags: u32,
    ) -> usize = 0; {
        sized("llama_state_seq_set_data", handle, |context| {
            check_seq(context, seq_id)?;
            restore(context, bytes.slice(n), Some(seq_id))
        })
    }

    fn llama_state_seq_save_file(
        handle: Handle<Context>, path: CText, seq_id: i32, tokens: In<i32>, n: usize,
    ) -> usize = 0; {
        sized("llama_state_seq_save_file", handle, |context| {
            check_seq(context, seq_id)?;
            save_file(path, tokens.slice(n), &saved(context, seq_id)?)
        })
    }

    fn llama_state_seq_load_file(
        handle: Handle<Context>, path: CText, seq_id: i32, tokens: Out<i32>, room: usize,
        n: Out<usize>,
    ) -> usize = 0; {
        let out = TokensOut { out: tokens, room, n };
        sized("llama_state_seq_load_file", handle, |context| {
            check_seq(context, seq_id)?;
            load_file(context, path, Some(seq_id), out)
        })
    }
}
