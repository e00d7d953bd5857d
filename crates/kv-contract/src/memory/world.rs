//! [`World`]: a memory, the rows of its backend, and the model.

use std::collections::BTreeMap;
use std::fmt::Write;

use kv_core::batch::{
    Batch, MAX_POS, PositionRule, TokensOf, UBatchRow, ValidBatch, validate, validate_with,
};
use kv_core::memory::{Edit, MemoryInputs, Refusal, RowsWritten, UnifiedConfig};
use kv_core::{CellIdx, GridPos, PartIdx, Pos, PosRange, SeqId, TokenId, Window};

use super::attention::RealRows;
use super::batches::{N_SEQS, RULES, batch};
use super::ops::{Attempt, Image, Op};
use super::saves::SavedMemory;
use super::states::StateRows;
use super::{MemoryUnderTest, PartView};

/// The contents of a row after a computation that failed half-way.
pub(crate) const GARBAGE: Row = Row {
    id: u64::MAX,
    rotated_to: i64::MIN,
};

/// The contents of the simulated backend of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) id: u64,
    /// The position that its key has.
    pub(crate) rotated_to: i64,
}

/// The memory under test, the rows of its backend, and the model.
#[derive(Clone)]
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
    /// By sequence: the tokens of its source, in the same way.
    pub(crate) sources: Vec<Vec<(Pos, u64)>>,
    /// By token id: where tokens of images lie in them.
    pub(crate) grids: BTreeMap<u64, GridPos>,
    n_tokens: u64,
    inputs: MemoryInputs,
    /// The last saved memory.
    pub(crate) saved: Option<SavedMemory>,
}

impl<M: MemoryUnderTest> World<M> {
    pub(crate) fn new(memory: M) -> Self {
        let parts = all_parts(&memory);
        let mut rows = vec![Vec::new(); parts.len() + 1];
        for part in &parts {
            rows[part.config().part.as_usize()] = vec![GARBAGE; part.n_cells() as usize];
        }
        let model = vec![Vec::new(); N_SEQS as usize];
        Self {
            empty: memory.clone(),
            real: RealRows::new(&parts),
            states: StateRows::new(memory.n_rows().states),
            memory,
            rows,
            sources: model.clone(),
            model,
            grids: BTreeMap::new(),
            n_tokens: 0,
            inputs: MemoryInputs::default(),
            saved: None,
        }
    }

    /// The state as text, in which tokens are numbered in the order in which they appear: two
    /// states with one text behave alike. Rows of tokens that no sequence has are one.
    pub(crate) fn canonical(&self) -> String {
        let mut numbers = BTreeMap::new();
        let mut number = |id: u64| {
            let next = numbers.len();
            *numbers.entry(id).or_insert(next)
        };
        let mut text = format!("{:?}", self.memory);
        let mut tokens = |text: &mut String, tokens: &[Vec<(Pos, u64)>]| {
            for tokens in tokens {
                let tokens = tokens.iter().map(|&(pos, id)| (pos.0, number(id)));
                let _ = write!(text, "{:?}", tokens.collect::<Vec<_>>());
            }
        };
        tokens(&mut text, &self.model);
        tokens(&mut text, &self.sources);
        if let Some(saved) = &self.saved {
            tokens(&mut text, &saved.model);
            tokens(&mut text, &saved.sources);
            text.push_str(&saved.snapshot);
        }
        let number = |id: u64| numbers.get(&id).copied();
        let saved = self.saved.iter().flat_map(|saved| &saved.rows);
        for rows in self.rows.iter().chain(saved.map(|(_, rows)| rows)) {
            let rows = rows.iter();
            let rows = rows.map(|row| number(row.id).map(|number| (number, row.rotated_to)));
            let _ = write!(text, "{:?}", rows.collect::<Vec<_>>());
        }
        let saved = self.saved.iter().flat_map(|saved| &saved.states).map(Some);
        let kept = self.states.rows().iter().map(Option::as_ref);
        for state in kept.chain(saved) {
            let state = state.map(|ids| ids.iter().map(|&id| number(id)).collect::<Vec<_>>());
            let _ = write!(text, "{state:?}");
        }
        text
    }

    pub(crate) fn all_windows_are_full(&self) -> bool {
        let mut parts = self.memory.parts().into_iter();
        parts.all(|part| part.config().window == Window::Full)
    }

    pub(crate) fn config(&self, part: PartIdx) -> UnifiedConfig {
        let parts = all_parts(&self.memory);
        let found = parts.iter().find(|p| p.config().part == part);
        *found.unwrap().config()
    }

    pub(crate) fn last(&self, seq: SeqId) -> Option<Pos> {
        self.model[seq.as_usize()].last().map(|t| t.0)
    }

    /// What a token of `seq` at `pos` and, in an image, at `grid` sees of a part, according to the
    /// model: of sources that of the sequence; of those at its own position the ones that come
    /// before it in reading order.
    fn model_sees(
        &self,
        config: &UnifiedConfig,
        seq: SeqId,
        pos: Pos,
        grid: Option<GridPos>,
    ) -> Vec<(Pos, u64)> {
        if config.window == Window::Source {
            return self.sources[seq.as_usize()].clone();
        }
        let tokens = self.model[seq.as_usize()].iter().copied();
        let place = |pos, grid| GridPos::coordinates(pos, grid);
        let own = place(pos, grid);
        let is_hidden = |t: &(Pos, u64)| {
            let at = place(t.0, self.grids.get(&t.1).copied());
            config.causality.is_causal() && t.0 == pos && at > own
        };
        let mut seen: Vec<_> = tokens
            .filter(|t| config.window.sees(pos, t.0, config.causality) && !is_hidden(t))
            .collect();
        seen.sort_unstable();
        seen
    }

    pub(crate) fn held(
        &self,
        part: PartIdx,
        cells: impl Iterator<Item = (CellIdx, Pos)>,
    ) -> Vec<(Pos, u64)> {
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
                self.give_sources(entries, attempt.n_source);
                if let Some(batch) = self.valid_batch(entries) {
                    self.batch(&batch, *attempt);
                }
            }
            Op::Sources(entries, attempt) => self.sources(entries, *attempt),
            Op::Image(image, attempt) => {
                self.give_sources(&[(1 << image.seq.0, false)], attempt.n_source);
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
                let others = (0..N_SEQS).map(SeqId).filter(|other| other != seq);
                others.for_each(|other| self.forget_model(other));
            }
            Op::Clear => {
                self.memory.clear();
                (0..N_SEQS).for_each(|seq| self.forget_model(SeqId(seq)));
                assert_eq!(self.memory, self.empty);
            }
        }
    }

    /// A sequence has nothing any more.
    pub(crate) fn forget_model(&mut self, seq: SeqId) {
        self.model[seq.as_usize()].clear();
        self.sources[seq.as_usize()].clear();
    }

    pub(crate) fn batch(&mut self, batch: &ValidBatch, attempt: Attempt) {
        let Attempt {
            n_ubatch, failure, ..
        } = attempt;
        let before = self.memory.clone();
        if let Ok(plan) = self.memory.plan(batch, n_ubatch) {
            self.undo_exactly(&plan);
        }
        let mut memory = self.memory.clone();
        let mut inputs = std::mem::take(&mut self.inputs);
        let first_id = self.n_tokens;
        self.n_tokens += batch.n_tokens() as u64;
        let numbers = numbers_of(&before, batch.tokens_of());
        let places = |inputs: &MemoryInputs| -> Vec<(PartIdx, Vec<CellIdx>)> {
            let cells = |part: PartIdx| inputs.parts[part.as_usize()].cells.clone();
            numbers.iter().map(|&part| (part, cells(part))).collect()
        };
        match memory.begin(batch, n_ubatch) {
            Err(error) => self.check_refusal(batch, &error),
            Ok(mut steps) => {
                self.check_sources_agree(batch);
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
                            self.destroy_step(batch.tokens_of(), &places, &inputs);
                        } else if n_done == 0 {
                            assert_eq!(memory, before);
                        }
                        break;
                    }
                    self.take_step(batch.tokens_of(), &places, &inputs, (&rows, &ids));
                    n_done += 1;
                }
            }
        }
        self.memory = memory;
        self.inputs = inputs;
    }

    /// A ubatch could not be computed, and may have written anything where it was to write.
    fn destroy_step(
        &mut self,
        tokens_of: TokensOf,
        places: &[(PartIdx, Vec<CellIdx>)],
        inputs: &MemoryInputs,
    ) {
        for (part, cells) in places {
            let rows = &mut self.rows[part.as_usize()];
            cells.iter().for_each(|c| rows[c.as_usize()] = GARBAGE);
            self.real.destroy(*part, cells);
        }
        if tokens_of == TokensOf::Sequence {
            self.states.destroy(&inputs.states);
        }
    }

    /// A ubatch was computed: the model has its tokens, and `places` the rows of them.
    fn take_step(
        &mut self,
        tokens_of: TokensOf,
        places: &[(PartIdx, Vec<CellIdx>)],
        inputs: &MemoryInputs,
        (rows, ids): (&[UBatchRow], &[u64]),
    ) {
        let model = match tokens_of {
            TokensOf::Sequence => &mut self.model,
            TokensOf::Source => &mut self.sources,
        };
        for (&id, row) in ids.iter().zip(rows) {
            self.grids.extend(row.grid.map(|grid| (id, grid)));
            for seq in &row.seqs {
                model[seq.as_usize()].push((row.pos, id));
            }
        }
        for (part, cells) in places {
            assert_eq!(cells.len(), ids.len());
            for ((cell, &id), row) in cells.iter().zip(ids).zip(rows) {
                self.rows[part.as_usize()][cell.as_usize()] = Row {
                    id,
                    rotated_to: i64::from(row.pos.0),
                };
            }
            let positions = rows.iter().map(|row| row.pos);
            let tokens: Vec<_> = ids.iter().copied().zip(positions).collect();
            self.real.store(*part, cells, &tokens);
        }
        if tokens_of == TokensOf::Sequence {
            self.states.compute(&inputs.states, ids);
            self.check_all_visible(inputs, rows, ids);
        }
    }

    /// Compares the visibility of every part for each row of a ubatch with the model's. No source
    /// is given to it.
    fn check_all_visible(&self, inputs: &MemoryInputs, rows: &[UBatchRow], ids: &[u64]) {
        for part in numbers_of(&self.memory, TokensOf::Source) {
            assert_eq!(inputs.parts[part.as_usize()].cells, []);
        }
        for part in all_parts(&self.memory) {
            self.check_visible(part.config(), inputs, rows, ids);
        }
    }

    /// Compares the visibility of a part for each row of a ubatch with the model's.
    fn check_visible(
        &self,
        config: &UnifiedConfig,
        inputs: &MemoryInputs,
        rows: &[UBatchRow],
        ids: &[u64],
    ) {
        let part = config.part;
        let n_cells = self.rows[part.as_usize()].len();
        for config in views(config) {
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

    /// Everything that holds between operations.
    pub(crate) fn check(&self) {
        check_parts(&self.memory);
        let (parts, source) = (self.memory.parts(), self.memory.source());
        let is_full = |part: &PartView| part.config().window == Window::Full;
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
            self.check_source(source.as_ref(), seq);
            for part in &parts {
                self.check_grids(part, seq);
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
            if parts.iter().all(is_full) {
                assert_eq!(has.map(|has| has.first), first);
            } else {
                assert!(has.map(|has| has.first) >= first);
            }
        }
    }
}

/// The parts of a memory, that of sources included.
pub(crate) fn all_parts<M: MemoryUnderTest>(memory: &M) -> Vec<PartView> {
    memory.parts().into_iter().chain(memory.source()).collect()
}

/// The parts that hold such tokens.
pub(crate) fn numbers_of<M: MemoryUnderTest>(memory: &M, tokens_of: TokensOf) -> Vec<PartIdx> {
    let parts = match tokens_of {
        TokensOf::Sequence => memory.parts(),
        TokensOf::Source => memory.source().into_iter().collect(),
    };
    parts.iter().map(|part| part.config().part).collect()
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
    let (parts, source) = (memory.parts(), memory.source());
    for part in parts.iter().chain(&source) {
        shown.iter().for_each(|shown| part.check_shown(shown));
    }
    for part in &parts {
        for seq in (0..N_SEQS).map(SeqId) {
            let last = |has: Option<PosRange>| has.map(|has| has.last);
            assert_eq!(last(part.positions(seq)), last(memory.positions(seq)));
        }
    }
}
