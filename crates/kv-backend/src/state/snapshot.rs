//! A snapshot and token ids as bytes of sections, and back.
//!
//! Rows are numbered anew: the token with number `i` of a part has row `i` in that part's sections
//! of rows. All numbers are `u32`, little-endian. Invariant: nothing is taken that is not there, so
//! a count that lies costs no memory. What the numbers mean together is checked by
//! [`Snapshot::new`](kv_core::memory::Snapshot::new).

use std::collections::BTreeMap;

use kv_core::cells::Cell;
use kv_core::grid::GridPos;
use kv_core::ids::{CellIdx, PartIdx, Pos, SeqId, TokenId};
use kv_core::memory::{CellRecord, KeptState, PartSnapshot, StateHistory};
use kv_core::seq_set::SeqSet;
use kv_core::window::{PosRange, Window};

use super::SeqTokens;
use super::error::StateError;
use super::frame::{Section, Tag, tag_name};

/// The bytes of a part.
pub(super) fn encode_part(part: &PartSnapshot) -> Vec<u8> {
    let mut sets: Vec<&SeqSet> = Vec::new();
    let mut set_of = Vec::with_capacity(part.cells.len());
    for token in &part.cells {
        let set = &token.cell.seqs;
        // Tokens of one sequence follow one another.
        let known = sets.iter().rposition(|s| *s == set);
        set_of.push(known.unwrap_or_else(|| {
            sets.push(set);
            sets.len() - 1
        }) as u32);
    }
    let (kind, width, further) = window_code(part.window);
    let mut out = Words::default();
    let grids = (0u32..)
        .zip(&part.cells)
        .filter_map(|(row, t)| Some((row, t.cell.grid?)));
    let grids: Vec<(u32, GridPos)> = grids.collect();
    out.push(&[part.part.0, kind, width]);
    out.push(further.as_slice());
    out.push(&[
        part.cells.len() as u32,
        sets.len() as u32,
        grids.len() as u32,
    ]);
    for set in &sets {
        out.push(&[set.len() as u32]);
        set.iter().for_each(|seq| out.push(&[seq.0]));
    }
    part.cells.iter().for_each(|t| out.push(&[t.cell.pos.0]));
    out.push(&set_of);
    grids
        .iter()
        .for_each(|(row, grid)| out.push(&[*row, grid.y, grid.x]));
    out.push(&[part.forgotten.len() as u32]);
    for (seq, ranges) in &part.forgotten {
        out.push(&[seq.0, ranges.len() as u32]);
        ranges.iter().for_each(|r| out.push(&[r.first.0, r.last.0]));
    }
    out.0
}

/// A part from its bytes.
pub(super) fn decode_part(section: &Section<'_>) -> Result<PartSnapshot, StateError> {
    let mut fields = Fields::of(section);
    let part = PartIdx(fields.next()?);
    let window = window_of(&mut fields)?;
    let (n_tokens, n_sets) = (fields.next()?, fields.next()?);
    let n_grids = fields.next()?;
    let mut sets = Vec::new();
    for _ in 0..n_sets {
        let n = fields.next()?;
        let ids = fields.many(n)?;
        let set: SeqSet = ids.iter().map(|&id| SeqId(id)).collect();
        if set.len() != ids.len() {
            let reason = format!("a set of {n} sequences with {} ids", set.len());
            return Err(fields.senseless(reason));
        }
        sets.push(set);
    }
    let positions = fields.many(n_tokens)?;
    let mut cells = Vec::with_capacity(positions.len());
    for (row, (pos, set)) in (0u32..).zip(positions.into_iter().zip(fields.many(n_tokens)?)) {
        let Some(seqs) = sets.get(set as usize).cloned() else {
            return Err(fields.senseless(format!("there is no set {set} of {n_sets}")));
        };
        let cell = Cell {
            pos: Pos(pos),
            seqs,
            grid: None,
        };
        cells.push(CellRecord {
            row: CellIdx(row),
            cell,
        });
    }
    let mut after = 0;
    for &[row, y, x] in fields.many(n_grids.saturating_mul(3))?.as_chunks::<3>().0 {
        let token = cells.get_mut(row as usize).filter(|_| row >= after);
        let Some(token) = token else {
            let reason = format!("row {row} of {n_tokens} lies in an image, after row {after}");
            return Err(fields.senseless(reason));
        };
        token.cell.grid = Some(GridPos { y, x });
        after = row + 1;
    }
    let mut forgotten = Vec::new();
    for _ in 0..fields.next()? {
        let (seq, n) = (SeqId(fields.next()?), fields.next()?);
        let ends = fields.many(n.saturating_mul(2))?;
        let ranges = ends.as_chunks::<2>().0.iter();
        forgotten.push((
            seq,
            ranges
                .map(|&[a, b]| PosRange::new(Pos(a), Pos(b)))
                .collect(),
        ));
    }
    fields.end()?;
    Ok(PartSnapshot {
        part,
        window,
        cells,
        forgotten,
    })
}

/// The bytes of recurrent states; rows become their numbers in `rows`.
pub(super) fn encode_states(chains: &[StateHistory], rows: &[CellIdx]) -> Vec<u8> {
    let numbers: BTreeMap<CellIdx, u32> = rows.iter().copied().zip(0u32..).collect();
    let mut out = Words::default();
    out.push(&[rows.len() as u32, chains.len() as u32]);
    for chain in chains {
        out.push(&[chain.seq.0, chain.first.0, chain.states.len() as u32]);
        for state in &chain.states {
            let number = numbers.get(&state.row).copied().unwrap_or_default();
            out.push(&[number, state.pos.0, state.n_tokens]);
        }
    }
    out.0
}

/// Recurrent states from their bytes, and how many rows there are of them.
pub(super) fn decode_states(section: &Section<'_>) -> Result<(u32, Vec<StateHistory>), StateError> {
    let mut fields = Fields::of(section);
    let (n_rows, n_chains) = (fields.next()?, fields.next()?);
    let mut chains = Vec::new();
    for _ in 0..n_chains {
        let (seq, first) = (SeqId(fields.next()?), Pos(fields.next()?));
        let n_states = fields.next()?;
        let numbers = fields.many(n_states.saturating_mul(3))?;
        let states: Vec<KeptState> = numbers.as_chunks::<3>().0.iter().map(kept).collect();
        if let Some(beyond) = states.iter().find(|state| state.row.0 >= n_rows) {
            let reason = format!("there is no state {} of {n_rows}", beyond.row);
            return Err(fields.senseless(reason));
        }
        chains.push(StateHistory { seq, first, states });
    }
    fields.end()?;
    Ok((n_rows, chains))
}

fn kept(&[row, pos, n_tokens]: &[u32; 3]) -> KeptState {
    KeptState {
        row: CellIdx(row),
        pos: Pos(pos),
        n_tokens,
    }
}

/// The bytes of tokens' ids.
pub(super) fn encode_tokens(tokens: &[SeqTokens]) -> Vec<u8> {
    let mut out = Words::default();
    out.push(&[tokens.len() as u32]);
    for SeqTokens {
        seq,
        evaluated,
        pending,
    } in tokens
    {
        out.push(&[seq.0, evaluated.len() as u32, pending.len() as u32]);
        evaluated
            .iter()
            .chain(pending)
            .for_each(|t| out.push(&[t.0]));
    }
    out.0
}

/// Tokens' ids from their bytes.
pub(super) fn decode_tokens(section: &Section<'_>) -> Result<Vec<SeqTokens>, StateError> {
    let mut fields = Fields::of(section);
    let n = fields.next()?;
    let mut all: Vec<SeqTokens> = Vec::new();
    let ids = |ids: Vec<u32>| ids.into_iter().map(TokenId).collect();
    for _ in 0..n {
        let seq = SeqId(fields.next()?);
        let (n_evaluated, n_pending) = (fields.next()?, fields.next()?);
        if all.iter().any(|known| known.seq == seq) || SeqSet::one(seq).is_empty() {
            return Err(fields.senseless(format!("sequence {seq} is there twice, or cannot be")));
        }
        all.push(SeqTokens {
            seq,
            evaluated: ids(fields.many(n_evaluated)?),
            pending: ids(fields.many(n_pending)?),
        });
    }
    fields.end()?;
    Ok(all)
}

/// The kind of a window and the numbers that describe it: two, and a third where it needs one.
fn window_code(window: Window) -> (u32, u32, Option<u32>) {
    match window {
        Window::Full => (0, 0, None),
        Window::Sliding(n) => (1, n, None),
        Window::Chunked(n) => (2, n, None),
        Window::Symmetric(n) => (3, n, None),
        Window::Source => (4, 0, None),
        Window::Older { by, from } => (5, by, Some(from)),
        Window::Ends { first, last } => (6, last, Some(first)),
        Window::First { n, by } => (7, by, Some(n)),
    }
}

fn window_of(fields: &mut Fields<'_>) -> Result<Window, StateError> {
    let (kind, width) = (fields.next()?, fields.next()?);
    Ok(match kind {
        0 => Window::Full,
        1 => Window::Sliding(width),
        2 => Window::Chunked(width),
        3 => Window::Symmetric(width),
        4 if width == 0 => Window::Source,
        5 => Window::Older {
            by: width,
            from: fields.next()?,
        },
        6 => Window::Ends {
            first: fields.next()?,
            last: width,
        },
        7 => Window::First {
            n: fields.next()?,
            by: width,
        },
        _ => return Err(fields.senseless(format!("there is no window of kind {kind}"))),
    })
}

/// Numbers that become bytes.
#[derive(Default)]
struct Words(Vec<u8>);

impl Words {
    fn push(&mut self, numbers: &[u32]) {
        let bytes = numbers.iter().flat_map(|n| n.to_le_bytes());
        self.0.extend(bytes);
    }
}

/// The rest of a section's numbers.
struct Fields<'a> {
    tag: Tag,
    left: &'a [u8],
    n_bytes: usize,
}

impl<'a> Fields<'a> {
    fn of(section: &Section<'a>) -> Self {
        Self {
            tag: section.tag,
            left: section.payload,
            n_bytes: section.payload.len(),
        }
    }

    fn next(&mut self) -> Result<u32, StateError> {
        let Some((first, left)) = self.left.split_first_chunk::<4>() else {
            return Err(self.too_short(1));
        };
        self.left = left;
        Ok(u32::from_le_bytes(*first))
    }

    fn many(&mut self, n: u32) -> Result<Vec<u32>, StateError> {
        let n_bytes = (n as usize).checked_mul(4);
        let Some((own, left)) = n_bytes.and_then(|n| self.left.split_at_checked(n)) else {
            return Err(self.too_short(n));
        };
        self.left = left;
        let numbers = own.as_chunks::<4>().0.iter();
        Ok(numbers.map(|bytes| u32::from_le_bytes(*bytes)).collect())
    }

    fn end(&self) -> Result<(), StateError> {
        match self.left.len() {
            0 => Ok(()),
            n => Err(self.senseless(format!("{n} of its {} bytes are too many", self.n_bytes))),
        }
    }

    fn too_short(&self, n: u32) -> StateError {
        let (at, all) = (self.n_bytes - self.left.len(), self.n_bytes);
        self.senseless(format!(
            "{n} numbers at byte {at} are beyond its {all} bytes"
        ))
    }

    fn senseless(&self, reason: String) -> StateError {
        StateError::Section {
            tag: tag_name(self.tag),
            reason,
        }
    }
}
