//! [`World`]: a memory, the rows of its backend, and the model.

use std::collections::BTreeMap;

use kv_core::batch::{
    Batch, BatchError, MAX_POS, PositionRule, UBatchRow, ValidBatch, validate, validate_with,
};
use kv_core::memory::{Edit, MemoryInputs, Plan, Refusal, RowsWritten, Streams, UnifiedConfig};
use kv_core::{
    Causality, CellIdx, GridPos, PartIdx, Pos, PosRange, SeqId, StreamIdx, TokenId, Window,
};

use super::attention::RealRows;
use super::batches::{N_SEQS, RULES, batch};
use super::ops::{Attempt, Image, Op};
use super::saves::Saved;
use super::states::StateRows;
use super::{MemoryUnderTest, PartView};

/// What a row holds after a computation that failed half-way.
pub(crate) const GARBAGE: Row = Row {
    id: u64::MAX,
    rotated_to: i64::MIN,
};

/// What the simulated backend holds of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: u64,
    /// The position that its key has.
    pub(crate) rotated_to: i64,
}

/// The memory under test, the rows of its backend, and the model.
pub(crate) struct World<M> {
    pub(crate) memory: M,
    empty: M,
    /// By number of the part.
    pub(crate) rows: Vec<Vec<Row>>,
    /// K and V of the same rows.
    pub(crate) real: RealRows,
    pub(crate) states: StateRows,
    /// By sequence: position and token id, ascending.
    pub(crate) model: Vec<Vec<(Pos, u64)>>,
    /// By token id: where tokens of images lie in them.
    pub(crate) grids: BTreeMap<u64, GridPos>,
    n_tokens: u64,
    inputs: MemoryInputs,
    /// What was saved last.
    pub(crate) saved: Option<Saved>,
}

impl<M: MemoryUnderTest> World<M> {
    pub(crate) fn new(memory: M) -> Self {
        let n_parts = memory.parts().len();
        let mut rows = vec![Vec::new(); n_parts + 1];
        for part in memory.parts() {
            rows[part.config().part.as_usize()] = vec![GARBAGE; part.n_cells() as usize];
        }
        let model = vec![Vec::new(); N_SEQS as usize];
        Self {
            empty: memory.clone(),
            real: RealRows::new(&memory.parts()),
            states: StateRows::new(memory.n_rows().states),
            memory,
            rows,
            model,
            grids: BTreeMap::new(),
            n_tokens: 0,
            inputs: MemoryInputs::default(),
            saved: None,
        }
    }

    pub(crate) fn all_windows_are_full(&self) -> bool {
        let mut parts = self.memory.parts().into_iter();
        parts.all(|part| part.config().window == Window::Full)
    }

    pub(crate) fn config(&self, part: PartIdx) -> UnifiedConfig {
        let parts = self.memory.parts();
        let found = parts.iter().find(|p| p.config().part == part);
        *found.unwrap().config()
    }

    pub(crate) fn last(&self, seq: SeqId) -> Option<Pos> {
        self.model[seq.as_usize()].last().map(|t| t.0)
    }

    /// What a token of `seq` at `pos` and, in an image, at `grid` sees of a part, according to the
    /// model: of those at its own position the ones that come before it in reading order.
    fn model_sees(
        &self,
        config: &UnifiedConfig,
        seq: SeqId,
        pos: Pos,
        grid: Option<GridPos>,
    ) -> Vec<(Pos, u64)> {
        let tokens = self.model[seq.as_usize()].iter().copied();
        let place = |pos, grid| GridPos::coordinates(pos, grid);
        let own = place(pos, grid);
        let is_hidden = |t: &(Pos, u64)| {
            let at = place(t.0, self.grids.get(&t.1).copied());
            config.causality == Causality::Causal && t.0 == pos && at > own
        };
        let mut seen: Vec<_> = tokens
            .filter(|t| config.window.sees(pos, t.0, config.causality) && !is_hidden(t))
            .collect();
        seen.sort_unstable();
        seen
    }

    fn held(&self, part: PartIdx, cells: impl Iterator<Item = (CellIdx, Pos)>) -> Vec<(Pos, u64)> {
        let rows = &self.rows[part.as_usize()];
        let mut held: Vec<_> = cells
            .map(|(cell, pos)| {
                let row = rows[cell.as_usize()];
                let rotated_to = i64::from(pos.0);
                assert_eq!(row.rotated_to, rotated_to, "part {part}, the key in {cell}");
                (pos, row.id)
            })
            .collect();
        held.sort_unstable();
        held
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::Batch(entries, attempt) => {
                if let Some(batch) = self.valid_batch(entries) {
                    self.batch(&batch, *attempt);
                }
            }
            Op::Image(image, attempt) => {
                let batch = self.image(image);
                self.make_room(&batch);
                let batch = self.valid_image(&self.image(image));
                self.batch(&batch, *attempt);
            }
            Op::Remove { seqs, range } => self.remove(*seqs, *range),
            Op::Copy { from, to, range } => self.copy(*from, *to, *range),
            Op::Reposition { seq, range, change } => {
                self.reposition(*seq, range.resolve(self.last(*seq)), *change);
            }
            Op::ContextShift { seq, n_keep } => self.context_shift(*seq, *n_keep),
            Op::Compact => self.compact(),
            Op::Save(seqs) => self.save(*seqs),
            Op::Restore { into, device } => self.restore(*into, *device),
            Op::KeepOnly(seq) => {
                match self.memory.keep_only(*seq) {
                    Ok(_) => {}
                    Err(Refusal::Unsupported { .. }) => return,
                    Err(refused) => panic!("{refused}"),
                }
                for (s, tokens) in (0u32..).zip(&mut self.model) {
                    if s != seq.0 {
                        tokens.clear();
                    }
                }
            }
            Op::Clear => {
                self.memory.clear();
                self.model.iter_mut().for_each(Vec::clear);
                assert_eq!(self.memory, self.empty);
            }
        }
    }

    fn batch(&mut self, batch: &ValidBatch, Attempt { n_ubatch, failure }: Attempt) {
        let before = self.memory.clone();
        if let Ok(plan) = self.memory.plan(batch, n_ubatch) {
            self.undo_exactly(&plan);
        }
        let mut memory = self.memory.clone();
        let mut inputs = std::mem::take(&mut self.inputs);
        let first_id = self.n_tokens;
        self.n_tokens += batch.n_tokens() as u64;
        let places = |inputs: &MemoryInputs| -> Vec<(PartIdx, Vec<CellIdx>)> {
            let numbers = before.parts().into_iter().map(|p| p.config().part);
            numbers
                .map(|p| (p, inputs.parts[p.as_usize()].cells.clone()))
                .collect()
        };
        match memory.begin(batch, n_ubatch) {
            Err(error) => self.check_refusal(batch, &error),
            Ok(mut steps) => {
                let mut n_done = 0;
                while let Some(ubatch) = steps.next(&mut inputs) {
                    assert!(ubatch.n_tokens() <= n_ubatch);
                    let places = places(&inputs);
                    let ids: Vec<u64> = ubatch
                        .entries
                        .iter()
                        .map(|&e| first_id + u64::from(e))
                        .collect();
                    let rows: Vec<_> = ubatch.rows().collect();
                    if let Some((at, written)) = failure
                        && at == n_done
                    {
                        steps.undo_last(written);
                        if written == RowsWritten::Perhaps {
                            for (part, cells) in places {
                                let rows = &mut self.rows[part.as_usize()];
                                cells.iter().for_each(|c| rows[c.as_usize()] = GARBAGE);
                                self.real.destroy(part, &cells);
                            }
                            self.states.destroy(&inputs.states);
                        } else if n_done == 0 {
                            assert_eq!(memory, before);
                        }
                        break;
                    }
                    for (&id, row) in ids.iter().zip(&rows) {
                        self.grids.extend(row.grid.map(|grid| (id, grid)));
                        for seq in &row.seqs {
                            self.model[seq.as_usize()].push((row.pos, id));
                        }
                    }
                    self.states.compute(&inputs.states, &ids);
                    for (part, cells) in places {
                        assert_eq!(cells.len(), ids.len());
                        for ((&cell, &id), row) in cells.iter().zip(&ids).zip(&rows) {
                            self.rows[part.as_usize()][cell.as_usize()] = Row {
                                id,
                                rotated_to: i64::from(row.pos.0),
                            };
                        }
                        let positions = rows.iter().map(|row| row.pos);
                        let tokens: Vec<_> = ids.iter().copied().zip(positions).collect();
                        self.real.store(part, &cells, &tokens);
                        self.check_visible(part, &inputs, &rows, &ids);
                    }
                    n_done += 1;
                }
            }
        }
        self.memory = memory;
        self.inputs = inputs;
    }

    /// What each row of a ubatch sees of a part is what the model says.
    fn check_visible(&self, part: PartIdx, inputs: &MemoryInputs, rows: &[UBatchRow], ids: &[u64]) {
        let n_cells = self.rows[part.as_usize()].len();
        for config in views(&self.config(part)) {
            let visibility = inputs.parts[part.as_usize()].seen(config.window);
            visibility.check(n_cells as u32).unwrap();
            for (number, row) in (0u32..).zip(rows) {
                assert_eq!(
                    self.held(part, visibility.row(number)),
                    self.model_sees(&config, row.first_seq, row.pos, row.grid),
                    "part {part}, row {number} through {}",
                    config.window
                );
            }
            self.real.check_attention(part, ids, visibility, |row| {
                let row = &rows[row];
                self.model_sees(&config, row.first_seq, row.pos, row.grid)
            });
        }
    }

    /// The batch, or `None` where these sequences cannot be together.
    fn valid_batch(&mut self, entries: &[(u32, bool)]) -> Option<ValidBatch> {
        let before = batch(entries, |seq| self.last(seq))?;
        self.make_room(&before);
        let batch = batch(entries, |seq| self.last(seq))?;
        let valid = validate(&batch, &RULES, |seq| self.memory.positions(seq)).ok()?;
        // Sequences that see different tokens at the same positions must not be coupled either;
        // no memory can know that, so it is the caller's duty.
        let sound = valid.entries().iter().all(|entry| {
            let first = &self.model[entry.first_seq.as_usize()];
            entry
                .seqs
                .iter()
                .all(|seq| &self.model[seq.as_usize()] == first)
        });
        sound.then_some(valid)
    }

    /// Tokens of an image, which fit any memory's rules.
    fn image(&self, image: &Image) -> Batch {
        let &Image { seq, ahead, .. } = image;
        let last = self.last(seq);
        let Pos(pos) = last.map_or(Pos(0), |last| Pos((last.0 + ahead).min(MAX_POS.0)));
        let mut batch = Batch::new();
        for (y, x) in &image.grid {
            let (y, x) = (pos + y, pos + x);
            let entry = batch.push_token(TokenId(0)).in_sequence(seq);
            entry.at_grid(Pos(pos), GridPos { y, x });
        }
        batch
    }

    fn valid_image(&self, batch: &Batch) -> ValidBatch {
        let rule = PositionRule::Grid;
        validate_with(batch, &RULES, rule, |seq| self.memory.positions(seq)).unwrap()
    }

    /// Does what the memory evicts before a batch.
    fn make_room(&mut self, batch: &Batch) {
        for edit in self.memory.edits_before(batch) {
            self.memory.check(&edit).unwrap();
            match edit {
                Edit::Remove { seqs, range } => self.remove_range(seqs, range),
                Edit::Reposition { seq, range, change } => self.reposition(seq, range, change),
                other => panic!("{other:?} makes no room"),
            }
        }
        self.check();
    }

    /// Every token of `seq` that a part holds has the row and the column that it came with.
    fn check_grids(&self, part: &PartView, seq: SeqId) {
        let rows = &self.rows[part.config().part.as_usize()];
        for (cell, pos) in part.held(seq) {
            let id = rows[cell.as_usize()].id;
            let held = part.cell(cell).unwrap().grid;
            let wanted = self.grids.get(&id).copied();
            assert_eq!(held, wanted, "sequence {seq}, position {pos} in {cell}");
        }
    }

    /// Commits a plan on a copy and undoes it step by step: exactly, and then as if rows had been
    /// written, as far back as no window forbids.
    fn undo_exactly(&self, plan: &Plan<M::Slot>) {
        for rows in [RowsWritten::No, RowsWritten::Perhaps] {
            let mut memory = self.memory.clone();
            let mut done = Vec::new();
            let mut inputs = MemoryInputs::default();
            for planned in plan {
                let before = memory.clone();
                let undo = memory.commit(planned);
                check_parts(&memory);
                memory.inputs(planned, &mut inputs);
                for part in memory.parts() {
                    let mut cells = inputs.parts[part.config().part.as_usize()].cells.clone();
                    cells.sort_unstable();
                    cells.dedup();
                    assert_eq!(
                        cells.len(),
                        planned.ubatch.entries.len(),
                        "a cell was given twice"
                    );
                }
                done.push((before, undo));
            }
            let mut is_last = true;
            for (before, undo) in done.into_iter().rev() {
                let refused = memory.check_rollback(&undo, rows).is_err();
                assert!(!(refused && (is_last || rows == RowsWritten::No)));
                if refused && memory.recurrent().is_some() {
                    break; // or its state was stored over, which is not looked at here
                }
                if refused {
                    let mut sound = memory;
                    sound.rollback(undo, rows);
                    let broken = sound.check_bookkeeping();
                    assert!(broken.is_err(), "refused without a reason");
                    break;
                }
                memory.rollback(undo, rows);
                check_parts(&memory);
                match rows {
                    RowsWritten::No => assert_eq!(memory, before),
                    RowsWritten::Perhaps => {
                        for seq in (0..N_SEQS).map(SeqId) {
                            let end = |m: &M| m.positions(seq).map(|has| has.last);
                            assert_eq!(end(&memory), end(&before));
                        }
                    }
                }
                is_last = false;
            }
        }
    }

    fn check_refusal(&self, batch: &ValidBatch, error: &Refusal) {
        match error {
            Refusal::NoRoom(no_room) => {
                let config = self.config(no_room.part);
                let parts = self.memory.parts();
                let part = parts.iter().find(|p| *p.config() == config).unwrap();
                assert_eq!(no_room.n_cells, config.n_cells);
                assert!(
                    no_room.n_wanted > no_room.n_free + no_room.n_recyclable,
                    "{no_room}"
                );
                if config.window == Window::Full {
                    let StreamIdx(stream) = no_room.stream;
                    let n_wanted = batch
                        .entries()
                        .iter()
                        .filter(|e| config.streams == Streams::Shared || e.first_seq.0 == stream);
                    let first = CellIdx(stream * config.n_cells);
                    let cells = (0..config.n_cells).map(|i| first.offset(i));
                    let n_free = cells.filter(|&c| part.cell(c).is_none()).count();
                    assert!(n_wanted.count() > n_free, "{no_room}");
                }
            }
            Refusal::WindowForgotten(forgotten) => {
                // Only an image goes on at a position that was there already.
                let first = batch
                    .entries()
                    .iter()
                    .find(|e| e.seqs.contains(forgotten.seq));
                let first = first.unwrap();
                assert!(first.grid.is_some() && Some(first.pos) == self.last(forgotten.seq));
                assert_eq!(forgotten.next, first.pos);
                self.check_forgotten(*forgotten);
            }
            Refusal::CoupledStreams { set, .. } => {
                let parts = self.memory.parts();
                let mut streams = parts.iter().map(|part| part.config().streams);
                let per_sequence = streams.any(|streams| streams == Streams::PerSequence);
                assert!(per_sequence && set.len() > 1);
            }
            Refusal::Split(BatchError::SequenceTooLong { set, n_tokens, .. }) => {
                let is_causal = |p: &PartView| p.config().causality == Causality::Causal;
                assert!(!self.memory.parts().iter().any(is_causal));
                let family = batch.entries().iter().filter(|e| e.seqs.intersects(set));
                assert_eq!(family.count(), *n_tokens);
            }
            Refusal::CoupledStates { a, b, .. } => {
                let memory = self.memory.recurrent().unwrap();
                let current = |seq| memory.states(seq).last().map(|s| s.row);
                assert_ne!(current(*a), current(*b));
            }
            Refusal::Custom(_) => {}
            other => panic!("{other}"),
        }
    }

    /// Everything that holds between operations.
    pub(crate) fn check(&self) {
        check_parts(&self.memory);
        for seq in (0..N_SEQS).map(SeqId) {
            let has = self.memory.positions(seq);
            assert_eq!(
                has.map(|has| has.last),
                self.last(seq),
                "sequence {seq} ends elsewhere"
            );
            if let Some(recurrent) = self.memory.recurrent() {
                let tokens = self.model[seq.as_usize()].iter().map(|t| t.1);
                let states = recurrent.states(seq);
                self.states.check(states, seq, &tokens.collect::<Vec<_>>());
            }
            let next = self.last(seq).map_or(Pos(0), Pos::next);
            for part in self.memory.parts() {
                self.check_grids(&part, seq);
                for config in views(part.config()) {
                    let limits = config.window.visible_keys(next, config.causality);
                    let seen = part.held(seq).into_iter();
                    let seen = seen.filter(|(_, pos)| limits.contains(*pos));
                    assert_eq!(
                        self.held(config.part, seen),
                        self.model_sees(&config, seq, next, None),
                        "the next token of sequence {seq}, part {}, through {}",
                        config.part,
                        config.window
                    );
                }
            }
            let first = self.model[seq.as_usize()].first().map(|t| t.0);
            match self.all_windows_are_full() {
                true => assert_eq!(has.map(|has| has.first), first),
                false => assert!(has.map(|has| has.first) >= first),
            }
        }
    }
}

/// A part through each of its windows.
fn views(config: &UnifiedConfig) -> impl Iterator<Item = UnifiedConfig> {
    let of = *config;
    let first = of.window.first();
    let first = first.map(|window| UnifiedConfig { window, ..of });
    std::iter::once(of).chain(first)
}

/// Each part is sound, and every sequence ends at the same position in all.
pub(crate) fn check_parts<M: MemoryUnderTest>(memory: &M) {
    memory.check_bookkeeping().unwrap();
    let shown = memory.occupancy();
    if let (Some(shown), Some(states)) = (&shown, memory.recurrent()) {
        let n_shown = shown.states.as_ref().map_or(0, |states| states.rows.len());
        assert_eq!(n_shown, states.n_used() as usize);
    }
    for part in memory.parts() {
        shown.iter().for_each(|shown| part.check_shown(shown));
        for seq in (0..N_SEQS).map(SeqId) {
            let last = |has: Option<PosRange>| has.map(|has| has.last);
            assert_eq!(last(part.positions(seq)), last(memory.positions(seq)));
        }
    }
}
