//! The results of a batch: rows of logits or of embeddings, by the index of their token.
//!
//! Invariant: a pointer that is handed out stays until the context's next batch. A context gives
//! logits or embeddings, never both. Computes nothing.

use std::collections::BTreeMap;

use crate::abi::NO_TOKEN;
use crate::context::{Context, context};
use crate::ffi::{Handle, c_api};
use crate::log;

/// The rows of the last batch.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outputs {
    /// Row after row.
    pub(crate) values: Vec<f32>,
    pub(crate) width: usize,
    pub(crate) kind: RowKind,
    /// For each entry of the batch its row, if it has one.
    pub(crate) row_of: Vec<Option<usize>>,
    /// The pooled rows of sequences.
    pub(crate) pooled: BTreeMap<i32, Vec<f32>>,
}

/// The kind of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum RowKind {
    #[default]
    Nothing,
    Logits,
    Embeddings,
}

impl Outputs {
    /// The row of an entry; of a negative index, counted from the last row.
    ///
    /// # Errors
    /// Why there is none, for people.
    fn row(&mut self, index: i32, kind: RowKind) -> Result<&mut [f32], String> {
        if self.kind != kind {
            return Err("the last batch gave no such rows".to_owned());
        }
        let n_rows = self.values.len() / self.width.max(1);
        let row = match usize::try_from(index) {
            Ok(index) => match self.row_of.get(index) {
                None => {
                    let n = self.row_of.len();
                    return Err(format!("index {index} is not below the batch's {n} tokens"));
                }
                Some(None) => {
                    return Err(format!("no output was wanted of the batch's token {index}"));
                }
                Some(Some(row)) => *row,
            },
            Err(_) => n_rows
                .checked_sub(index.unsigned_abs() as usize)
                .ok_or_else(|| format!("index {index} is before the first of {n_rows} rows"))?,
        };
        let start = row * self.width;
        let range = start..start + self.width;
        self.values
            .get_mut(range)
            .ok_or_else(|| format!("there are {n_rows} rows"))
    }
}

fn all(name: &str, handle: Handle<Context>, kind: RowKind) -> *mut f32 {
    let Some(context) = context(name, handle) else {
        return std::ptr::null_mut();
    };
    let outputs = &mut context.lock().outputs;
    if outputs.kind == kind && !outputs.values.is_empty() {
        outputs.values.as_mut_ptr()
    } else {
        std::ptr::null_mut()
    }
}

fn one(name: &str, handle: Handle<Context>, index: i32, kind: RowKind) -> *mut f32 {
    let Some(context) = context(name, handle) else {
        return std::ptr::null_mut();
    };
    let outputs = &mut context.lock().outputs;
    match log::or_line(name, outputs.row(index, kind)) {
        Some(row) => row.as_mut_ptr(),
        None => std::ptr::null_mut(),
    }
}

c_api! {
    fn llama_get_logits(handle: Handle<Context>) -> *mut f32 = std::ptr::null_mut(); {
        all("llama_get_logits", handle, RowKind::Logits)
    }

    fn llama_get_logits_ith(handle: Handle<Context>, index: i32) -> *mut f32 = std::ptr::null_mut(); {
        one("llama_get_logits_ith", handle, index, RowKind::Logits)
    }

    fn llama_get_embeddings(handle: Handle<Context>) -> *mut f32 = std::ptr::null_mut(); {
        all("llama_get_embeddings", handle, RowKind::Embeddings)
    }

    fn llama_get_embeddings_ith(handle: Handle<Context>, index: i32)
        -> *mut f32 = std::ptr::null_mut(); {
        one("llama_get_embeddings_ith", handle, index, RowKind::Embeddings)
    }

    fn llama_get_embeddings_seq(handle: Handle<Context>, seq_id: i32)
        -> *mut f32 = std::ptr::null_mut(); {
        let Some(context) = context("llama_get_embeddings_seq", handle) else {
            return std::ptr::null_mut();
        };
        let outputs = &mut context.lock().outputs;
        let row = outputs.pooled.get_mut(&seq_id);
        row.map_or(std::ptr::null_mut(), |row| row.as_mut_ptr())
    }

    fn llama_get_sampled_token_ith(handle: Handle<Context>, _index: i32) -> i32 = NO_TOKEN; {
        context("llama_get_sampled_token_ith", handle);
        NO_TOKEN
    }

    fn llama_get_sampled_probs_ith(handle: Handle<Context>, _index: i32)
        -> *mut f32 = std::ptr::null_mut(); {
        context("llama_get_sampled_probs_ith", handle);
        std::ptr::null_mut()
    }

    fn llama_get_sampled_probs_count_ith(handle: Handle<Context>, _index: i32) -> u32 = 0; {
        context("llama_get_sampled_probs_count_ith", handle);
        0
    }

    fn llama_get_sampled_logits_ith(handle: Handle<Context>, _index: i32)
        -> *mut f32 = std::ptr::null_mut(); {
        context("llama_get_sampled_logits_ith", handle);
        std::ptr::null_mut()
    }

    fn llama_get_sampled_logits_count_ith(handle: Handle<Context>, _index: i32) -> u32 = 0; {
        context("llama_get_sampled_logits_count_ith", handle);
        0
    }

    fn llama_get_sampled_candidates_ith(handle: Handle<Context>, _index: i32)
        -> *mut i32 = std::ptr::null_mut(); {
        context("llama_get_sampled_candidates_ith", handle);
        std::ptr::null_mut()
    }

    fn llama_get_sampled_candidates_count_ith(handle: Handle<Context>, _index: i32) -> u32 = 0; {
        context("llama_get_sampled_candidates_count_ith", handle);
        0
    }
}

/// Shows the logits of a token of the last batch.
///
/// # Errors
/// Why there are none, for people.
pub(crate) fn logits_row(
    context: &Context,
    index: i32,
    show: impl FnOnce(&[f32]),
) -> Result<(), String> {
    let outputs = &mut context.lock().outputs;
    outputs.row(index, RowKind::Logits).map(|row| show(row))
}
