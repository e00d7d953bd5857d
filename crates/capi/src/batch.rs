//! The batches that programs make: `llama_batch` and `llama_batch_ext`.
//!
//! Invariant: an extended batch never holds more entries than its context takes at once. Computes
//! nothing.

use std::sync::{Mutex, PoisonError};

use kv_core::memory::Memory;

use crate::abi::{BatchArrays, EmbeddingRows};
use crate::context::{Context, context};
use crate::entries::{self, Entry, is_token};
use crate::ffi::{Handle, In, c_api, count};
use crate::log;

/// The target of a `llama_batch_ext *`.
pub(crate) struct BatchExt {
    n_batch: usize,
    n_vocab: usize,
    n_embd: usize,
    n_seqs: u32,
    pub(crate) entries: Mutex<Vec<Entry>>,
}

/// `llama_batch_ext_add`: there is no room.
const FULL: i32 = -1;
/// There is neither a token nor a row of the model's width.
const NO_CONTENT: i32 = -2;
/// There is no such sequence.
const NO_SEQUENCE: i32 = -3;

impl BatchExt {
    fn add(&self, seq: i32, entry: Entry) -> i32 {
        if !u32::try_from(seq).is_ok_and(|seq| seq < self.n_seqs) {
            return NO_SEQUENCE;
        }
        let mut entries = self.lock();
        if entries.len() >= self.n_batch {
            return FULL;
        }
        entries.push(Entry {
            seqs: vec![seq],
            ..entry
        });
        count(entries.len() - 1)
    }

    pub(crate) fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The row of an embedding; `None` where its width is another.
    fn row(&self, embd: EmbeddingRows) -> Option<Vec<f32>> {
        let row = In::of(embd.data).slice(self.n_embd);
        let fits = embd.n_rows >= 1 && embd.n_embd == self.n_embd && row.len() == self.n_embd;
        (fits && self.n_embd > 0).then(|| row.to_vec())
    }
}

fn ext<'a>(name: &str, batch: Handle<BatchExt>) -> Option<&'a BatchExt> {
    let found = batch.get();
    if found.is_none() {
        log::error(&format!("{name}: there is no such batch"));
    }
    found
}

/// Changes an entry; false where there is none.
fn change(
    name: &str,
    batch: Handle<BatchExt>,
    index: i32,
    change: impl FnOnce(&mut Entry),
) -> bool {
    let Some(batch) = ext(name, batch) else {
        return false;
    };
    let mut entries = batch.lock();
    let entry = usize::try_from(index)
        .ok()
        .and_then(|index| entries.get_mut(index));
    entry.map(change).is_some()
}

c_api! {
    fn llama_batch_get_one(tokens: *mut i32, n_tokens: i32) -> BatchArrays = NOTHING; {
        BatchArrays { n_tokens, token: tokens, ..NOTHING }
    }

    fn llama_batch_init(n_tokens: i32, embd: i32, n_seq_max: i32) -> BatchArrays = NOTHING; {
        log::or_line("llama_batch_init", entries::allocate(n_tokens, embd, n_seq_max))
            .unwrap_or(NOTHING)
    }

    fn llama_batch_free(batch: BatchArrays); {
        entries::free(&batch);
    }

    fn llama_batch_ext_init(handle: Handle<Context>) -> Handle<BatchExt> = Handle::NULL; {
        let Some(context) = context("llama_batch_ext_init", handle) else {
            return Handle::NULL;
        };
        Handle::new(BatchExt {
            n_batch: context.sizes.n_batch as usize,
            n_vocab: context.shared.n_vocab(),
            n_embd: context.shared.n_embd_inp(),
            n_seqs: context.lock().engine.memory().n_seqs(),
            entries: Mutex::default(),
        })
    }

    fn llama_batch_ext_free(batch: Handle<BatchExt>); {
        if batch.take().is_none() && !batch.is_null() {
            log::error("llama_batch_ext_free: there is no such batch, or it was freed before");
        }
    }

    fn llama_batch_ext_clear(batch: Handle<BatchExt>); {
        if let Some(batch) = ext("llama_batch_ext_clear", batch) {
            batch.lock().clear();
        }
    }

    fn llama_batch_ext_add(batch: Handle<BatchExt>, seq_id: i32) -> i32 = FULL; {
        ext("llama_batch_ext_add", batch).map_or(FULL, |batch| batch.add(seq_id, Entry::default()))
    }

    fn llama_batch_ext_add_token(batch: Handle<BatchExt>, seq_id: i32, token: i32) -> i32 = FULL; {
        let Some(batch) = ext("llama_batch_ext_add_token", batch) else {
            return FULL;
        };
        let is_known = usize::try_from(token).is_ok_and(|token| token < batch.n_vocab);
        if !is_token(token) || !is_known {
            return NO_CONTENT;
        }
        batch.add(seq_id, Entry { token: Some(token), ..Entry::default() })
    }

    fn llama_batch_ext_add_embd(batch: Handle<BatchExt>, seq_id: i32, embd: EmbeddingRows)
        -> i32 = FULL; {
        let Some(batch) = ext("llama_batch_ext_add_embd", batch) else {
            return FULL;
        };
        match batch.row(embd) {
            Some(row) => batch.add(seq_id, Entry { row, ..Entry::default() }),
            None => NO_CONTENT,
        }
    }

    fn llama_batch_ext_add_seq(batch: Handle<BatchExt>, index: i32, seq_id: i32) -> bool = false; {
        let name = "llama_batch_ext_add_seq";
        let n_seqs = ext(name, batch).map_or(0, |batch| batch.n_seqs);
        u32::try_from(seq_id).is_ok_and(|seq| seq < n_seqs)
            && change(name, batch, index, |entry| {
                if !entry.seqs.contains(&seq_id) {
                    entry.seqs.push(seq_id);
                }
            })
    }

    fn llama_batch_ext_set_embd_token(batch: Handle<BatchExt>, _index: i32, _embd: EmbeddingRows)
        -> bool = false; {
        let name = "llama_batch_ext_set_embd_token";
        if ext(name, batch).is_some() {
            log::error(&format!("{name}: an entry is a token or a row, not both"));
        }
        false
    }

    fn llama_batch_ext_set_embd_state(batch: Handle<BatchExt>, _index: i32, _embd: EmbeddingRows)
        -> bool = false; {
        let name = "llama_batch_ext_set_embd_state";
        if ext(name, batch).is_some() {
            log::error(&format!("{name}: no model here takes states of another"));
        }
        false
    }

    fn llama_batch_ext_set_output_embd(batch: Handle<BatchExt>, index: i32, value: bool)
        -> bool = false; {
        change("llama_batch_ext_set_output_embd", batch, index, |entry| entry.is_output = value)
    }

    fn llama_batch_ext_set_output_logits(batch: Handle<BatchExt>, index: i32, value: bool)
        -> bool = false; {
        change("llama_batch_ext_set_output_logits", batch, index, |entry| entry.is_output = value)
    }

    fn llama_batch_ext_set_pos(batch: Handle<BatchExt>, index: i32, pos: In<i32>) -> bool = false; {
        let Some(&pos) = pos.get() else {
            return false;
        };
        change("llama_batch_ext_set_pos", batch, index, |entry| entry.pos = Some(pos))
    }
}

/// A batch without anything.
const NOTHING: BatchArrays = BatchArrays {
    n_tokens: 0,
    token: std::ptr::null_mut(),
    embd: std::ptr::null_mut(),
    pos: std::ptr::null_mut(),
    n_seq_id: std::ptr::null_mut(),
    seq_id: std::ptr::null_mut(),
    logits: std::ptr::null_mut(),
};
