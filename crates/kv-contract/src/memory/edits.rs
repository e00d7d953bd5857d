//! Edits of sequences, done to the memory, its rows and the model.

use kv_core::batch::{MAX_POS, TokensOf};
use kv_core::memory::RowCopy;
use kv_core::memory::{
    Division, Edit, Edited, Memory as _, NoRoom, PosChange, Refusal, Seqs, Streams, WindowForgotten,
};
use kv_core::{CellIdx, Pos, PosDelta, PosRange, SeqId, Window};

use super::MemoryUnderTest;
use super::batches::{N_SEQS, RelativeRange};
use super::world::{World, all_parts, numbers_of};

impl<M: MemoryUnderTest> World<M> {
    pub(crate) fn remove(&mut self, seqs: Seqs, range: RelativeRange) {
        let last = match seqs {
            Seqs::One(seq) => self.last(seq),
            Seqs::All => self.last(SeqId(0)),
        };
        self.remove_range(seqs, range.resolve(last));
    }

    pub(crate) fn remove_range(&mut self, seqs: Seqs, range: PosRange) {
        let named: Vec<SeqId> = match seqs {
            Seqs::One(seq) => vec![seq],
            Seqs::All => (0..N_SEQS).map(SeqId).collect(),
        };
        let before = self.memory.clone();
        let check = self.memory.check(&Edit::Remove { seqs, range });
        let removed = self.memory.remove(seqs, range);
        assert_eq!(removed.as_ref().err(), check.as_ref().err());
        match removed {
            Ok(_) => {
                for seq in named {
                    self.model[seq.as_usize()].retain(|t| !range.contains(t.0));
                    if range == PosRange::ALL {
                        self.sources[seq.as_usize()].clear();
                    }
                }
            }
            Err(refused) => {
                assert_eq!(self.memory, before);
                assert_ne!(range, PosRange::ALL, "{refused}");
                match refused {
                    Refusal::WindowForgotten(forgotten) => self.check_forgotten(forgotten),
                    Refusal::StateGone { .. } | Refusal::StateIndivisible { .. } => {
                        let recurrent = self.memory.recurrent().unwrap();
                        let alone = recurrent.check(&Edit::Remove { seqs, range });
                        assert_eq!(alone, Err(refused));
                    }
                    Refusal::Unsupported { .. } | Refusal::Custom(_) => {}
                    other => panic!("{other}"),
                }
            }
        }
    }

    pub(crate) fn copy(&mut self, from: SeqId, to: SeqId, range: RelativeRange) {
        let range = range.resolve(self.last(from));
        let before = self.memory.clone();
        let check = self.memory.check(&Edit::Copy { from, to, range });
        let copied = self.memory.copy(from, to, range);
        assert_eq!(copied.as_ref().err(), check.as_ref().err());
        match copied {
            Ok(copied) => {
                self.copy_rows(&copied.row_copies);
                self.copy_source(from, to, range);
                if from != to {
                    let tokens = self.model[from.as_usize()].iter().copied();
                    let new: Vec<_> = tokens.filter(|t| range.contains(t.0)).collect();
                    let model = &mut self.model[to.as_usize()];
                    model.retain(|t| !range.contains(t.0));
                    model.extend(new);
                    model.sort_unstable();
                }
            }
            Err(refused) => {
                assert_eq!(self.memory, before);
                match refused {
                    Refusal::NoRoom(NoRoom {
                        part,
                        n_wanted,
                        n_free,
                        ..
                    }) => {
                        assert_eq!(self.config(part).streams, Streams::PerSequence);
                        assert!(n_wanted > n_free);
                    }
                    Refusal::WindowForgotten(forgotten) => self.check_forgotten(forgotten),
                    Refusal::StateGone { .. } | Refusal::StateIndivisible { .. } => {
                        let recurrent = self.memory.recurrent().unwrap();
                        let alone = recurrent.check(&Edit::Copy { from, to, range });
                        assert_eq!(alone, Err(refused));
                    }
                    Refusal::OtherSource { seq, other } => {
                        assert_eq!((seq, other), (from, to));
                        self.check_other_source(seq, other);
                        let mut tokens = self.model[to.as_usize()].iter();
                        assert!(tokens.any(|t| !range.contains(t.0)), "all is replaced");
                    }
                    Refusal::Unsupported { .. } | Refusal::Custom(_) => {}
                    other => panic!("{other}"),
                }
            }
        }
    }

    fn copy_rows(&mut self, copies: &[RowCopy]) {
        for copy in copies {
            let (from, to) = (copy.from.as_usize(), copy.to.as_usize());
            assert!(from.abs_diff(to) >= copy.len as usize, "{copy:?} overlaps");
            let rows = &mut self.rows[copy.part.as_usize()];
            rows.copy_within(from..from + copy.len as usize, to);
        }
        self.real.copy(copies);
    }

    fn shift_rows(&mut self, shifted: &Edited) {
        self.copy_rows(&shifted.row_copies);
        let mut n_rows = vec![0; self.rows.len()];
        for shift in &shifted.row_shifts {
            let (part, first) = (shift.part.as_usize(), shift.first.as_usize());
            for row in &mut self.rows[part][first..first + shift.len as usize] {
                row.rotated_to += i64::from(shift.delta.0);
            }
            n_rows[part] += shift.len;
        }
        self.real.shift(&shifted.row_shifts);
        for part in numbers_of(&self.memory, TokensOf::Source) {
            assert_eq!(n_rows[part.as_usize()], 0, "a shift moves sources");
        }
        // Each part remembers the same tokens or fewer, but for a state, which has all of them.
        let n_moved = n_rows.into_iter().max().unwrap();
        match self.memory.recurrent() {
            None => assert_eq!(n_moved, shifted.n_tokens),
            Some(_) => assert!(n_moved <= shifted.n_tokens),
        }
    }

    pub(crate) fn context_shift(&mut self, seq: SeqId, n_keep: u32) {
        let n_behind = self
            .last(seq)
            .map_or(0, |last| (last.0 + 1).saturating_sub(n_keep));
        let n_discard = n_behind / 2;
        let gone = PosRange::from(Pos(n_keep)..Pos(n_keep + n_discard));
        let before = self.memory.clone();
        if self.memory.remove(Seqs::One(seq), gone).is_err() {
            assert_eq!(self.memory, before);
            return;
        }
        self.model[seq.as_usize()].retain(|t| !gone.contains(t.0));
        self.check();
        let behind = PosRange::from(Pos(n_keep + n_discard)..);
        let down = PosDelta(-(n_discard as i32));
        self.reposition(seq, behind, PosChange::Shift(down));
    }

    pub(crate) fn reposition(&mut self, seq: SeqId, range: PosRange, change: PosChange) {
        let before = self.memory.clone();
        let wanted = self.model_reposition(seq, range, change);
        let edit = Edit::Reposition { seq, range, change };
        let check = self.memory.check(&edit);
        match self.memory.reposition(seq, range, change) {
            Ok(shifted) => {
                assert_eq!(check, Ok(()));
                let wanted = wanted.unwrap();
                let tokens = &mut self.model[seq.as_usize()];
                let changed = tokens.iter().zip(&wanted).filter(|(a, b)| a != b);
                // What is forgotten moves too, without being counted.
                assert!(shifted.n_tokens as usize <= changed.count());
                *tokens = wanted;
                self.shift_rows(&shifted);
            }
            Err(refused) => {
                assert_eq!(check, Err(refused.clone()));
                assert_eq!(self.memory, before);
                match (refused.clone(), wanted) {
                    (Refusal::WindowForgotten(forgotten), Ok(_)) => {
                        self.check_forgotten(forgotten);
                    }
                    (
                        Refusal::NoRoom(NoRoom {
                            part,
                            n_wanted,
                            n_free,
                            ..
                        }),
                        Ok(_),
                    ) => {
                        assert_eq!(self.config(part).streams, Streams::Shared);
                        assert!(n_wanted > n_free, "{refused}");
                    }
                    (Refusal::Image { pos, grid, .. }, Ok(_)) => {
                        let tokens = &self.model[seq.as_usize()];
                        let is_there =
                            |t: &&(Pos, u64)| t.0 == pos && self.grids.get(&t.1) == Some(&grid);
                        assert!(range.contains(pos) && tokens.iter().any(|t| is_there(&t)));
                    }
                    (Refusal::StateMovesWhole { .. }, _) => {
                        let recurrent = self.memory.recurrent().unwrap();
                        assert_eq!(recurrent.check(&edit), Err(refused));
                    }
                    (Refusal::DivideByZero { .. }, Err("divide"))
                    | (Refusal::OutOfRange { .. }, Err("range"))
                    | (Refusal::Overtakes { .. }, Err("order")) => {}
                    (Refusal::Unsupported { .. } | Refusal::Custom(_), _) => {}
                    (_, wanted) => panic!("{refused}, but {wanted:?}"),
                }
            }
        }
    }

    /// The tokens of `seq` as they would be, or why that cannot be.
    fn model_reposition(
        &self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Vec<(Pos, u64)>, &'static str> {
        let tokens = &self.model[seq.as_usize()];
        let named = |pos: Pos| {
            range.contains(pos)
                && match change {
                    PosChange::Shift(_) => true,
                    PosChange::Divide(division) => pos >= division.origin,
                }
        };
        let mut moved: Vec<i64> = Vec::new();
        for &(pos, _) in tokens {
            let from = i64::from(pos.0);
            moved.push(match change {
                _ if !named(pos) => from,
                PosChange::Shift(delta) => from + i64::from(delta.0),
                PosChange::Divide(Division { by: 0, .. }) => return Err("divide"),
                PosChange::Divide(Division { by, origin }) => {
                    let origin = i64::from(origin.0);
                    origin + (from - origin).div_euclid(i64::from(by))
                }
            });
        }
        if let PosChange::Divide(Division { by: 0, .. }) = change {
            return Err("divide");
        }
        if moved
            .iter()
            .any(|&pos| !(0..=i64::from(MAX_POS.0)).contains(&pos))
        {
            return Err("range");
        }
        let all = || tokens.iter().map(|t| t.0).zip(&moved);
        for (stays, &there) in all().filter(|t| !named(t.0)) {
            for (pos, &new) in all().filter(|t| named(t.0)) {
                // Only what does move can be in the way.
                let moves = all().any(|(p, &n)| named(p) && i64::from(p.0) != n);
                if moves && (pos < stays) != (new < there) || new == there {
                    return Err("order");
                }
            }
        }
        let ids = tokens.iter().map(|t| t.1);
        let moved = moved.iter().map(|&pos| Pos(u32::try_from(pos).unwrap()));
        Ok(moved.zip(ids).collect())
    }

    pub(crate) fn compact(&mut self) {
        while self.memory.n_holes() > 0 {
            let before = self.memory.clone();
            let compacted = self.memory.compact().unwrap();
            assert!(compacted.n_cells > 0, "a pass without progress");
            let n_copied: u32 = compacted.row_copies.iter().map(|c| c.len).sum();
            assert_eq!(n_copied, compacted.n_cells);
            for copy in &compacted.row_copies {
                let parts = all_parts(&before);
                let part = parts.iter().find(|p| p.config().part == copy.part);
                let written = (0..copy.len).map(|i| copy.to.offset(i));
                for cell in written {
                    let held = part.unwrap().cell(cell);
                    assert_eq!(held, None, "{copy:?} writes what is used");
                }
            }
            self.copy_rows(&compacted.row_copies);
            self.check();
        }
        match self.memory.compact() {
            Ok(none) => assert_eq!((none.n_cells, none.row_copies.len()), (0, 0)),
            Err(Refusal::Unsupported { .. }) => return,
            Err(refused) => panic!("{refused}"),
        }
        for part in all_parts(&self.memory) {
            let n_cells = part.config().n_cells;
            for first in (0..part.n_cells()).step_by(n_cells as usize) {
                let cells = first..first + n_cells;
                let used: Vec<bool> = cells.map(|c| part.cell(CellIdx(c)).is_some()).collect();
                assert!(used.is_sorted_by(|a, b| a >= b), "a hole is left");
            }
        }
    }

    /// A refusal names a window that exists, and something that is missing in it.
    pub(crate) fn check_forgotten(&self, forgotten: WindowForgotten) {
        assert!(!self.all_windows_are_full(), "{forgotten}");
        let parts = self.memory.parts();
        assert!(parts.iter().any(|p| p.config().window == forgotten.window));
        assert_ne!(forgotten.window, Window::Full, "{forgotten}");
        let WindowForgotten {
            next,
            needed_from,
            forgotten: lost,
            window,
            ..
        } = forgotten;
        let nothing_left = next == lost.last.next();
        let is_needed = needed_from <= lost.last || lost.first < Pos(window.n_first());
        assert!(is_needed || nothing_left, "{forgotten}");
    }
}
