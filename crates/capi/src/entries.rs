//! [`Entry`]: one token of a batch, however it was submitted.
//!
//! Invariant: what `llama.h` allows to leave out is filled in as there: sequence 0, the next
//! position, the output of the last token. Only ids that cannot be are refused here; all else the
//! engine checks.

use kv_core::batch::Batch;
use kv_core::grid::GridPos;
use kv_core::seq_set::SeqSet;
use kv_core::{Pos, SeqId, TokenId};

use crate::abi::{BatchArrays, NO_TOKEN};
use crate::ffi::{In, Out};

/// Positions of a row in place of a token, in a model of images: time, row, column, and one that is
/// not used.
const GRID_POSITIONS: usize = 4;

/// Values of the largest batch that is allocated.
const MAX_VALUES: i64 = 1 << 31;

/// A token, or a row in place of one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Entry {
    /// `None` with a row.
    pub(crate) token: Option<i32>,
    /// Empty with a token.
    pub(crate) row: Vec<f32>,
    /// `None`: the next.
    pub(crate) pos: Option<i32>,
    pub(crate) grid: Option<GridPos>,
    pub(crate) seqs: Vec<i32>,
    pub(crate) is_output: bool,
}

/// The meaning of a `llama_batch`'s entries in a context.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EntryLayout {
    pub(crate) n_embd: usize,
    /// True if rows in place of tokens have a row and a column.
    pub(crate) takes_images: bool,
}

/// The entries of a `llama_batch`.
///
/// # Errors
/// The fault of a batch, for people.
pub(crate) fn entries(batch: &BatchArrays, reading: EntryLayout) -> Result<Vec<Entry>, String> {
    let n = usize::try_from(batch.n_tokens).unwrap_or(0);
    if n == 0 {
        return Err(format!("the batch has {} tokens", batch.n_tokens));
    }
    let tokens = In::of(batch.token.cast_const()).slice(n);
    let rows = In::of(batch.embd.cast_const()).slice(n.saturating_mul(reading.n_embd));
    if tokens.is_empty() && rows.is_empty() {
        return Err("the batch has neither tokens nor embeddings".to_owned());
    }
    let is_grid = tokens.is_empty() && reading.takes_images;
    let n_positions = if is_grid { GRID_POSITIONS } else { 1 };
    let positions = In::of(batch.pos.cast_const()).slice(n * n_positions);
    let seq_counts = In::of(batch.n_seq_id.cast_const()).slice(n);
    let seq_lists = In::of(batch.seq_id.cast_const()).slice(n);
    let outputs = In::of(batch.logits.cast_const()).slice(n);
    let seqs = |i: usize| -> Vec<i32> {
        let Some(list) = seq_lists.get(i).filter(|list| !list.is_null()) else {
            return vec![0];
        };
        let n = seq_counts.get(i).copied().unwrap_or(1);
        let n = usize::try_from(n).unwrap_or(0);
        In::of(list.cast_const()).slice(n).to_vec()
    };
    let grid = |i: usize| {
        let at = |section: usize| u32::try_from(*positions.get(section * n + i)?).ok();
        let place = || {
            Some(GridPos {
                y: at(1)?,
                x: at(2)?,
            })
        };
        place().filter(|_| is_grid)
    };
    let entry = |i: usize| Entry {
        token: tokens.get(i).copied(),
        row: if tokens.is_empty() {
            rows[i * reading.n_embd..][..reading.n_embd].to_vec()
        } else {
            Vec::new()
        },
        pos: positions.get(i).copied(),
        grid: grid(i),
        seqs: seqs(i),
        is_output: outputs.get(i).map_or(i + 1 == n, |&wanted| wanted != 0),
    };
    Ok((0..n).map(entry).collect())
}

/// The entries as the engine takes them.
///
/// # Errors
/// Ids and positions that cannot be, for people.
pub(crate) fn batch(entries: &[Entry]) -> Result<Batch, String> {
    let mut batch = Batch::new();
    for (i, entry) in entries.iter().enumerate() {
        let mut seqs = SeqSet::EMPTY;
        for &seq in &entry.seqs {
            let id = u32::try_from(seq).map(SeqId).ok();
            if !id.is_some_and(|id| seqs.insert(id)) {
                return Err(format!(
                    "entry {i} belongs to sequence {seq}, which cannot be"
                ));
            }
        }
        let pushed = match entry.token {
            Some(token) => {
                let id = u32::try_from(token).map(TokenId);
                batch.push_token(id.map_err(|_| format!("entry {i} is token {token}"))?)
            }
            None => batch.push_embedding(&entry.row),
        };
        let pushed = pushed.in_sequences(&seqs);
        let pushed = match entry.pos {
            None => pushed,
            Some(pos) => {
                let at = u32::try_from(pos).map(Pos);
                let at = at.map_err(|_| format!("entry {i} has the position {pos}"))?;
                match entry.grid {
                    Some(grid) => pushed.at_grid(at, grid),
                    None => pushed.at(at),
                }
            }
        };
        if entry.is_output {
            pushed.with_output();
        }
    }
    Ok(batch)
}

/// Room for a batch as C programs allocate it: freed by [`free`].
///
/// # Errors
/// Sizes that no batch has, for people.
pub(crate) fn allocate(n_tokens: i32, n_embd: i32, n_seqs: i32) -> Result<BatchArrays, String> {
    let wanted = i64::from(n_tokens.max(0)) * i64::from(n_embd.max(n_seqs).max(1));
    if wanted > MAX_VALUES {
        return Err(format!(
            "{n_tokens} tokens with rows of {n_embd} and {n_seqs} sequences each: more than \
             {MAX_VALUES} values"
        ));
    }
    let n = usize::try_from(n_tokens).unwrap_or(0);
    let n_embd = usize::try_from(n_embd).unwrap_or(0);
    let n_seqs = usize::try_from(n_seqs).unwrap_or(0);
    let seq_id: *mut *mut i32 = zeroed(n.saturating_add(1));
    for list in Out::of(seq_id).slice(n) {
        *list = zeroed(n_seqs);
    }
    let n_values = n.saturating_mul(n_embd);
    Ok(BatchArrays {
        n_tokens: 0,
        token: if n_embd == 0 {
            zeroed(n)
        } else {
            std::ptr::null_mut()
        },
        embd: if n_embd > 0 {
            zeroed(n_values)
        } else {
            std::ptr::null_mut()
        },
        pos: zeroed(n),
        n_seq_id: zeroed(n),
        seq_id,
        logits: zeroed(n),
    })
}

fn zeroed<T>(n: usize) -> *mut T {
    // SAFETY: `calloc` refuses sizes that it cannot count; every type here has zero as a value.
    unsafe { libc::calloc(n.max(1), size_of::<T>()).cast() }
}

/// Frees what [`allocate`] gave.
pub(crate) fn free(batch: &BatchArrays) {
    let lists = In::of(batch.seq_id.cast_const());
    let lists = lists
        .until(|list| list.is_null())
        .iter()
        .map(|list| list.cast());
    let arrays = [
        batch.token.cast(),
        batch.embd.cast(),
        batch.pos.cast(),
        batch.n_seq_id.cast(),
        batch.seq_id.cast(),
        batch.logits.cast(),
    ];
    let all: Vec<*mut libc::c_void> = lists.chain(arrays).collect();
    for array in all {
        // SAFETY: the caller hands back what `allocate` took from `calloc`, once; freeing null does
        // nothing.
        unsafe { libc::free(array) };
    }
}

/// True if a token was given.
pub(crate) fn is_token(token: i32) -> bool {
    token != NO_TOKEN
}
