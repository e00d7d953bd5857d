//! StreamingLLM (Xiao et al., arXiv 2309.17453) for Cellar, written outside of Cellar.
//!
//! A sequence keeps its first tokens, the attention sinks, and its most recent ones. Before a batch
//! that does not fit, the oldest behind the sinks are evicted and the rest moves down to close the
//! gap, so that positions never exceed the window: the engine rotates the keys. Invariant: each
//! sequence has cells of its own; no cell holds two tokens. Depends on the public interface only.
//!
//! ```
//! use kv_core::memory::Memory;
//! use streaming_llm_for_cellar::{StreamingConfig, StreamingLlm};
//!
//! let config = StreamingConfig { n_seqs: 1, n_sinks: 4, n_recent: 60, n_evicted: 15 };
//! assert_eq!(StreamingLlm::new(config).n_rows().cells, [64]);
//! ```

use kv_core::batch::{Batch, MAX_POS, UBatch};
use kv_core::memory::{
    Edit, Edited, Memory, MemoryCapacity, MemoryInputs, NeededFor, NoRoom, PartCapacity, Plan,
    PlannedUBatch, PosChange, Refusal, RowCounts, RowsWritten, Seqs, Streams,
};
use kv_core::memory::{RowCopy, RowShift};
use kv_core::{
    CellIdx, CellRun, PartIdx, Pos, PosDelta, PosRange, SeqId, StreamIdx, Visibility, VisibleGroup,
    Window,
};

#[cfg(test)]
mod contract;

/// The number of tokens that a [`StreamingLlm`] keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamingConfig {
    /// Number of sequences.
    pub n_seqs: u32,
    /// First tokens of each sequence that are never evicted.
    pub n_sinks: u32,
    /// Most recent tokens of each sequence that are kept at most.
    pub n_recent: u32,
    /// Tokens that are evicted at once, at least: keys are rotated less often.
    pub n_evicted: u32,
}

/// A token and where its key and value are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Token {
    /// Its cell.
    pub cell: CellIdx,
    /// Its position in the cache.
    pub pos: Pos,
}

/// Attention sinks and a sliding window for each sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamingLlm {
    config: StreamingConfig,
    /// By sequence, in the order of their positions.
    tokens: Vec<Vec<Token>>,
}

impl StreamingLlm {
    /// An empty memory.
    pub fn new(config: StreamingConfig) -> Self {
        let tokens = vec![Vec::new(); config.n_seqs as usize];
        Self { config, tokens }
    }

    /// Cells of each sequence.
    pub fn n_cells(&self) -> u32 {
        self.config.n_sinks + self.config.n_recent
    }

    /// The contents of a sequence, in the order of positions.
    pub fn tokens(&self, seq: SeqId) -> &[Token] {
        self.tokens.get(seq.as_usize()).map_or(&[], Vec::as_slice)
    }

    fn check_seq(&self, seq: SeqId) -> Result<(), Refusal> {
        let n_seqs = self.config.n_seqs;
        if seq.0 < n_seqs {
            Ok(())
        } else {
            Err(Refusal::NoSuchSequence { seq, n_seqs })
        }
    }

    /// The cells of a sequence that none of these tokens has.
    fn free_cells(&self, seq: SeqId, tokens: &[Token]) -> impl Iterator<Item = CellIdx> {
        let n = self.n_cells();
        let all = (seq.0 * n..(seq.0 + 1) * n).map(CellIdx);
        all.filter(|cell| tokens.iter().all(|token| token.cell != *cell))
    }

    fn no_room(&self, needed_for: NeededFor, seq: SeqId, n_wanted: u32, n_free: u32) -> Refusal {
        Refusal::NoRoom(NoRoom {
            needed_for,
            part: PartIdx(0),
            stream: StreamIdx(seq.0),
            window: Window::Full,
            n_wanted,
            n_free,
            n_recyclable: 0,
            n_cells: self.n_cells(),
            n_free_elsewhere: 0,
        })
    }

    /// The edits that evict tokens of a sequence before it is given `n_new` tokens.
    fn evictions(&self, seq: SeqId, n_new: usize) -> Vec<Edit> {
        let tokens = self.tokens(seq);
        let n_missing = (tokens.len() + n_new).saturating_sub(self.n_cells() as usize);
        if n_missing == 0 {
            return Vec::new();
        }
        let n_sinks = tokens.len().min(self.config.n_sinks as usize);
        let (sinks, behind) = tokens.split_at(n_sinks);
        // A token at the position of the last sink is one, too: edits name positions.
        let last_sink = sinks.last().map(|token| token.pos);
        let n_beside = behind.partition_point(|token| Some(token.pos) == last_sink);
        let recent = &behind[n_beside..];
        let n_evicted = n_missing.max(self.config.n_evicted as usize);
        let (evicted, _) = recent.split_at(n_evicted.min(recent.len()));
        let (Some(first), Some(last)) = (evicted.first(), evicted.last()) else {
            return Vec::new();
        };
        let range = PosRange::new(first.pos, last.pos);
        let seqs = Seqs::One(seq);
        let mut edits = vec![Edit::Remove { seqs, range }];
        if let Some(next) = recent.iter().find(|token| token.pos > last.pos) {
            let down = i64::from(first.pos.0) - i64::from(next.pos.0);
            edits.push(Edit::Reposition {
                seq,
                range: PosRange::from(next.pos..),
                change: PosChange::Shift(PosDelta(down as i32)),
            });
        }
        edits
    }

    /// The tokens after a move, or the reason why it cannot be.
    fn moved(&self, seq: SeqId, range: PosRange, change: PosChange) -> Result<Vec<Token>, Refusal> {
        self.check_seq(seq)?;
        let PosChange::Shift(PosDelta(delta)) = change else {
            let operation = "divide positions";
            return Err(Refusal::Unsupported { operation });
        };
        let to = |pos: Pos| i64::from(pos.0) + i64::from(delta);
        let named = self.tokens(seq).iter().filter(|t| range.contains(t.pos));
        let named = named.map(|t| PosRange::new(t.pos, t.pos));
        let Some(moved) = named.reduce(PosRange::hull) else {
            return Ok(self.tokens(seq).to_vec());
        };
        let (first, last) = (to(moved.first), to(moved.last));
        if first < 0 || last > i64::from(MAX_POS.0) {
            return Err(Refusal::OutOfRange {
                seq,
                moved,
                change,
                first,
                last,
            });
        }
        let stays = self.tokens(seq).iter().map(|t| t.pos);
        for other in stays.filter(|pos| !range.contains(*pos)) {
            let at = i64::from(other.0);
            let passed = if other < moved.first {
                first <= at
            } else {
                last >= at
            };
            if passed {
                return Err(Refusal::Overtakes {
                    seq,
                    moved,
                    change,
                    other,
                });
            }
        }
        let moved = self.tokens(seq).iter().map(|token| {
            if range.contains(token.pos) {
                Token {
                    pos: u32::try_from(to(token.pos)).map_or(token.pos, Pos),
                    ..*token
                }
            } else {
                *token
            }
        });
        Ok(moved.collect())
    }

    /// The tokens that `to` would have, with the rows that are to be copied.
    fn copied(
        &self,
        from: SeqId,
        to: SeqId,
        range: PosRange,
    ) -> Result<(Vec<Token>, Vec<RowCopy>), Refusal> {
        self.check_seq(from)?;
        self.check_seq(to)?;
        let mut tokens = self.tokens(to).to_vec();
        if from == to {
            return Ok((tokens, Vec::new()));
        }
        tokens.retain(|token| !range.contains(token.pos));
        let source = self.tokens(from).iter().filter(|t| range.contains(t.pos));
        let free: Vec<CellIdx> = self.free_cells(to, &tokens).collect();
        let n_wanted = source.clone().count();
        if n_wanted > free.len() {
            let needed_for = NeededFor::Copy(from);
            return Err(self.no_room(needed_for, to, n_wanted as u32, free.len() as u32));
        }
        let mut row_copies = Vec::new();
        for (token, cell) in source.zip(free) {
            tokens.push(Token { cell, ..*token });
            row_copies.push(RowCopy {
                part: PartIdx(0),
                from: token.cell,
                to: cell,
                len: 1,
            });
        }
        tokens.sort_by_key(|token| token.pos);
        Ok((tokens, row_copies))
    }

    fn remove_range(&mut self, seqs: Seqs, range: PosRange) -> Edited {
        let named = |seq: u32| seqs == Seqs::All || seqs == Seqs::One(SeqId(seq));
        let mut n = 0;
        for (_, tokens) in (0..).zip(&mut self.tokens).filter(|(seq, _)| named(*seq)) {
            let n_before = tokens.len();
            tokens.retain(|token| !range.contains(token.pos));
            n += (n_before - tokens.len()) as u32;
        }
        Edited {
            n_tokens: n,
            n_cells: n,
            ..Edited::default()
        }
    }
}

/// Finds cells for one ubatch and takes its tokens into `tokens`.
fn place(memory: &mut StreamingLlm, ubatch: &UBatch, at: usize) -> Result<Vec<CellIdx>, Refusal> {
    let mut cells = Vec::with_capacity(ubatch.tokens.len());
    for (row, entry) in ubatch.rows().zip(&ubatch.entries) {
        let seq = row.first_seq;
        memory.check_seq(seq)?;
        if row.seqs.len() > 1 {
            return Err(Refusal::CoupledStreams {
                entry: *entry,
                set: row.seqs,
            });
        }
        let n_wanted = ubatch.rows().filter(|row| row.first_seq == seq).count() as u32;
        let n_held = memory.tokens(seq).len() as u32;
        let cell = memory.free_cells(seq, memory.tokens(seq)).next();
        let cell = cell.ok_or_else(|| {
            let n_of_ubatch = cells
                .iter()
                .filter(|c: &&CellIdx| c.0 / memory.n_cells() == seq.0);
            let n_free = memory.n_cells() + n_of_ubatch.count() as u32 - n_held;
            memory.no_room(NeededFor::Ubatch(at), seq, n_wanted, n_free)
        })?;
        memory.tokens[seq.as_usize()].push(Token { cell, pos: row.pos });
        cells.push(cell);
    }
    Ok(cells)
}

/// Tokens as runs of consecutive cells and positions.
fn runs(tokens: &[Token]) -> Vec<CellRun> {
    let mut runs: Vec<CellRun> = Vec::new();
    let mut tokens = tokens.to_vec();
    tokens.sort_by_key(|token| (token.pos, token.cell));
    for Token { cell, pos } in tokens {
        match runs.last_mut() {
            Some(run) if run.last_cell().offset(1) == cell && run.last_pos().next() == pos => {
                run.len += 1;
            }
            _ => runs.push(CellRun { cell, pos, len: 1 }),
        }
    }
    runs
}

impl Memory for StreamingLlm {
    /// The cell of each token.
    type Slot = Vec<CellIdx>;
    /// The number of tokens each sequence had.
    type Undo = Vec<usize>;

    fn n_seqs(&self) -> u32 {
        self.config.n_seqs
    }

    fn n_rows(&self) -> RowCounts {
        RowCounts {
            cells: vec![(self.config.n_seqs * self.n_cells()) as usize],
            states: 0,
        }
    }

    /// Any number of tokens fits: the oldest behind the sinks are evicted.
    fn capacity(&self) -> MemoryCapacity {
        let part = PartCapacity {
            part: PartIdx(0),
            n_cells: self.n_cells(),
            streams: Streams::PerSequence,
            window: Window::Full,
            width: Some(self.n_cells()),
        };
        MemoryCapacity {
            parts: vec![part],
            states: None,
            is_endless: true,
        }
    }

    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let tokens = self.tokens(seq);
        Some(PosRange::new(tokens.first()?.pos, tokens.last()?.pos))
    }

    fn n_tokens(&self, seq: SeqId) -> u32 {
        self.tokens(seq).len() as u32
    }

    fn edits_before(&self, batch: &Batch) -> Vec<Edit> {
        let seqs = (0..self.config.n_seqs).map(SeqId);
        seqs.flat_map(|seq| self.evictions(seq, batch.n_entries_of(seq)))
            .collect()
    }

    fn find_slots(&self, ubatches: Vec<UBatch>) -> Result<Plan<Vec<CellIdx>>, Refusal> {
        let mut after = self.clone();
        let planned = ubatches.into_iter().enumerate().map(|(at, ubatch)| {
            let slot = place(&mut after, &ubatch, at)?;
            Ok(PlannedUBatch { ubatch, slot })
        });
        planned.collect()
    }

    fn commit(&mut self, planned: &PlannedUBatch<Vec<CellIdx>>) -> Vec<usize> {
        let before = self.tokens.iter().map(Vec::len).collect();
        for (row, &cell) in planned.ubatch.rows().zip(&planned.slot) {
            if let Some(tokens) = self.tokens.get_mut(row.first_seq.as_usize()) {
                tokens.push(Token { cell, pos: row.pos });
            }
        }
        before
    }

    fn rollback(&mut self, undo: Vec<usize>, _: RowsWritten) {
        for (tokens, n) in self.tokens.iter_mut().zip(undo) {
            tokens.truncate(n);
        }
    }

    fn inputs(&self, planned: &PlannedUBatch<Vec<CellIdx>>, inputs: &mut MemoryInputs) {
        let ubatch = &planned.ubatch;
        let part = inputs.part_mut(PartIdx(0));
        part.cells.clone_from(&planned.slot);
        let groups = (0..self.config.n_seqs).map(SeqId).filter_map(|seq| {
            let own = (0u32..)
                .zip(ubatch.rows())
                .filter(|(_, r)| r.first_seq == seq);
            let (rows, limits): (Vec<u32>, Vec<PosRange>) = own
                .map(|(number, row)| (number, PosRange::new(Pos(0), row.pos)))
                .unzip();
            let group = || VisibleGroup::new(rows.clone(), runs(self.tokens(seq)), limits);
            (!rows.is_empty()).then(group)
        });
        part.visibility = Visibility::new(ubatch.n_tokens(), groups.collect());
    }

    fn check(&self, edit: &Edit) -> Result<(), Refusal> {
        match *edit {
            Edit::Remove { seqs, .. } => match seqs {
                Seqs::One(seq) => self.check_seq(seq),
                Seqs::All => Ok(()),
            },
            Edit::Copy { from, to, range } => self.copied(from, to, range).map(drop),
            Edit::Reposition { seq, range, change } => self.moved(seq, range, change).map(drop),
            Edit::KeepOnly(seq) => self.check_seq(seq),
            Edit::Clear => Ok(()),
            _ => {
                let operation = edit.name();
                Err(Refusal::Unsupported { operation })
            }
        }
    }

    fn apply(&mut self, edit: Edit) -> Result<Edited, Refusal> {
        self.check(&edit)?;
        let mut edited = Edited::default();
        match edit {
            Edit::Copy { from, to, range } => {
                let (tokens, row_copies) = self.copied(from, to, range)?;
                edited.n_tokens = row_copies.len() as u32;
                edited.row_copies = row_copies;
                self.tokens[to.as_usize()] = tokens;
            }
            Edit::Reposition { seq, range, change } => {
                let moved = self.moved(seq, range, change)?;
                for (old, new) in self.tokens(seq).iter().zip(&moved) {
                    if old.pos != new.pos {
                        edited.n_tokens += 1;
                        edited.row_shifts.push(RowShift {
                            part: PartIdx(0),
                            first: new.cell,
                            len: 1,
                            delta: PosDelta((i64::from(new.pos.0) - i64::from(old.pos.0)) as i32),
                        });
                    }
                }
                self.tokens[seq.as_usize()] = moved;
            }
            Edit::Remove { seqs, range } => edited = self.remove_range(seqs, range),
            Edit::KeepOnly(kept) => {
                for seq in (0..self.config.n_seqs)
                    .map(SeqId)
                    .filter(|seq| *seq != kept)
                {
                    edited = edited.and(self.remove_range(Seqs::One(seq), PosRange::ALL));
                }
            }
            _ => edited = self.remove_range(Seqs::All, PosRange::ALL),
        }
        Ok(edited)
    }
}
