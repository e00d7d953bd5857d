//! Random operations on [`Unified`] against a model that never recycles anything.
//!
//! The model keeps every token of every sequence that was not removed on purpose, and asks
//! [`Window`] who sees whom. So whatever cells the memory reuses, shares, copies or gives back after
//! a failure, the tokens that a row sees must be the model's. A simulated backend holds one token id
//! for each row, and overwrites rows as a real one does; beside it, the position that the row's key
//! is rotated to, which must be the one that its cell says.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::backend::RowCopy;
use kv_core::batch::{Batch, BatchRules, MAX_POS, ValidBatch, validate};
use kv_core::memory::{
    CopyRefused, Division, Memory, MemoryInputs, PlanError, PosChange, RowsWritten, Seqs,
    ShiftRefused, Shifted, Streams, Unified, UnifiedConfig, invariants,
};
use kv_core::{
    Causality, CellIdx, PartIdx, Pos, PosDelta, PosRange, SeqId, SeqSet, StreamIdx, TokenId, Window,
};
use proptest::prelude::*;

const N_SEQS: u32 = 4;
/// What a row holds after a computation that failed half-way.
const GARBAGE: Row = Row {
    id: u64::MAX,
    rotated_to: i64::MIN,
};

/// What the simulated backend holds of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    id: u64,
    /// The position that its key has.
    rotated_to: i64,
}

#[derive(Clone, Debug)]
enum Op {
    /// Sequence sets as bits; `true` repeats the position of the entry before.
    Batch {
        entries: Vec<(u32, bool)>,
        n_ubatch: u32,
        failure: Option<(usize, RowsWritten)>,
    },
    Remove {
        seqs: Seqs,
        range: RelativeRange,
    },
    Copy {
        from: SeqId,
        to: SeqId,
        range: RelativeRange,
    },
    Reposition {
        seq: SeqId,
        range: RelativeRange,
        change: PosChange,
    },
    /// What makes room: remove some tokens, move those behind them down.
    ContextShift {
        seq: SeqId,
        n_keep: u32,
    },
    Compact,
    KeepOnly(SeqId),
    Clear,
}

/// A range by distance from a sequence's last position.
#[derive(Clone, Copy, Debug)]
enum RelativeRange {
    All,
    LastFrom(u32),
    FirstTo(u32),
    Middle { back: u32, len: u32 },
}

impl RelativeRange {
    fn resolve(self, last: Option<Pos>) -> PosRange {
        let end = last.map_or(0, |last| last.0 + 1);
        let back = |n| Pos(end.saturating_sub(n));
        match self {
            Self::All => PosRange::ALL,
            Self::LastFrom(n) => PosRange::from(back(n)..),
            Self::FirstTo(n) => PosRange::from(..back(n)),
            Self::Middle { back: n, len } => PosRange::from(back(n)..Pos(back(n).0 + len)),
        }
    }
}

fn seq() -> impl Strategy<Value = SeqId> {
    (0..N_SEQS).prop_map(SeqId)
}

fn range() -> impl Strategy<Value = RelativeRange> {
    prop_oneof![
        2 => Just(RelativeRange::All),
        4 => (0u32..10).prop_map(RelativeRange::LastFrom),
        2 => (0u32..10).prop_map(RelativeRange::FirstTo),
        2 => (0u32..10, 0u32..5).prop_map(|(back, len)| RelativeRange::Middle { back, len }),
    ]
}

fn change() -> impl Strategy<Value = PosChange> {
    let delta = prop_oneof![8 => -9i32..10, 1 => Just(i32::MAX), 1 => Just(i32::MIN)];
    let origin = prop_oneof![1 => Just(0), 1 => 0u32..12];
    let by = prop_oneof![1 => Just(0), 9 => 1u32..5];
    prop_oneof![
        3 => delta.prop_map(|delta| PosChange::Shift(PosDelta(delta))),
        2 => (by, origin).prop_map(|(by, origin)| {
            let origin = Pos(origin);
            PosChange::Divide(Division { by, origin })
        }),
    ]
}

fn entries() -> impl Strategy<Value = Vec<(u32, bool)>> {
    let one = (0..N_SEQS).prop_map(|s| 1 << s);
    let repeat = prop::bool::weighted(0.1);
    prop_oneof![
        // A prompt of one sequence, one token of several, anything.
        ((0..N_SEQS), 1usize..14).prop_map(|(s, n)| vec![(1 << s, false); n]),
        prop::sample::subsequence((0..N_SEQS).collect::<Vec<_>>(), 1..=N_SEQS as usize)
            .prop_map(|seqs| seqs.into_iter().map(|s| (1 << s, false)).collect()),
        prop::collection::vec(
            (prop_oneof![4 => one, 1 => 1u32..1 << N_SEQS], repeat),
            1..10
        ),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let rows = prop_oneof![Just(RowsWritten::No), Just(RowsWritten::Perhaps)];
    let failure = prop::option::weighted(0.3, (0usize..4, rows));
    let seqs = prop_oneof![5 => seq().prop_map(Seqs::One), 1 => Just(Seqs::All)];
    prop_oneof![
        10 => (entries(), 1u32..8, failure)
            .prop_map(|(entries, n_ubatch, failure)| Op::Batch { entries, n_ubatch, failure }),
        3 => (seqs, range()).prop_map(|(seqs, range)| Op::Remove { seqs, range }),
        3 => (seq(), seq(), range()).prop_map(|(from, to, range)| Op::Copy { from, to, range }),
        4 => (seq(), range(), change())
            .prop_map(|(seq, range, change)| Op::Reposition { seq, range, change }),
        2 => (seq(), 0u32..4).prop_map(|(seq, n_keep)| Op::ContextShift { seq, n_keep }),
        1 => Just(Op::Compact),
        1 => seq().prop_map(Op::KeepOnly),
        1 => Just(Op::Clear),
    ]
}

fn config() -> impl Strategy<Value = UnifiedConfig> {
    let window = prop_oneof![
        2 => Just(Window::Full),
        3 => (0u32..7).prop_map(Window::Sliding),
        2 => (0u32..7).prop_map(Window::Chunked),
        1 => (0u32..9).prop_map(Window::Symmetric),
    ];
    let streams = prop_oneof![2 => Just(Streams::Shared), 1 => Just(Streams::PerSequence)];
    let causality = prop_oneof![4 => Just(Causality::Causal), 1 => Just(Causality::NonCausal)];
    (1u32..40, streams, window, causality).prop_map(|(n_cells, streams, window, causality)| {
        let (part, n_seqs) = (PartIdx(1), N_SEQS);
        UnifiedConfig {
            part,
            n_seqs,
            n_cells,
            streams,
            window,
            causality,
        }
    })
}

/// The memory under test, the rows of its backend, and the model.
struct World {
    memory: Unified,
    rows: Vec<Row>,
    /// By sequence: position and token id, ascending.
    model: Vec<Vec<(Pos, u64)>>,
    n_tokens: u64,
    inputs: MemoryInputs,
}

impl World {
    fn new(config: UnifiedConfig) -> Self {
        let memory = Unified::new(config).unwrap();
        let rows = vec![GARBAGE; memory.n_cells() as usize];
        let model = vec![Vec::new(); N_SEQS as usize];
        Self {
            memory,
            rows,
            model,
            n_tokens: 0,
            inputs: MemoryInputs::default(),
        }
    }

    fn window(&self) -> (Window, Causality) {
        (self.memory.config().window, self.memory.config().causality)
    }

    fn last(&self, seq: SeqId) -> Option<Pos> {
        self.model[seq.as_usize()].last().map(|t| t.0)
    }

    /// What a token of `seq` at `pos` sees according to the model.
    fn model_sees(&self, seq: SeqId, pos: Pos) -> Vec<(Pos, u64)> {
        let (window, causality) = self.window();
        let tokens = self.model[seq.as_usize()].iter().copied();
        let mut seen: Vec<_> = tokens
            .filter(|t| window.sees(pos, t.0, causality))
            .collect();
        seen.sort_unstable();
        seen
    }

    fn held(&self, cells: impl Iterator<Item = (CellIdx, Pos)>) -> Vec<(Pos, u64)> {
        let mut held: Vec<_> = cells
            .map(|(cell, pos)| {
                let row = self.rows[cell.as_usize()];
                assert_eq!(row.rotated_to, i64::from(pos.0), "the key in cell {cell}");
                (pos, row.id)
            })
            .collect();
        held.sort_unstable();
        held
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Batch {
                entries,
                n_ubatch,
                failure,
            } => self.batch(entries, *n_ubatch, *failure),
            Op::Remove { seqs, range } => self.remove(*seqs, *range),
            Op::Copy { from, to, range } => self.copy(*from, *to, *range),
            Op::Reposition { seq, range, change } => {
                self.reposition(*seq, range.resolve(self.last(*seq)), *change);
            }
            Op::ContextShift { seq, n_keep } => self.context_shift(*seq, *n_keep),
            Op::Compact => self.compact(),
            Op::KeepOnly(seq) => {
                self.memory.keep_only(*seq).unwrap();
                for (s, tokens) in (0u32..).zip(&mut self.model) {
                    if s != seq.0 {
                        tokens.clear();
                    }
                }
            }
            Op::Clear => {
                self.memory.clear();
                self.model.iter_mut().for_each(Vec::clear);
                assert_eq!(self.memory, Unified::new(*self.memory.config()).unwrap());
            }
        }
    }

    fn batch(
        &mut self,
        entries: &[(u32, bool)],
        n_ubatch: u32,
        failure: Option<(usize, RowsWritten)>,
    ) {
        let Some(batch) = self.valid_batch(entries) else {
            return;
        };
        let before = self.memory.clone();
        if let Ok(plan) = self.memory.plan(&batch, n_ubatch) {
            self.undo_exactly(&plan.ubatches, &plan.placement);
        }
        let mut memory = self.memory.clone();
        let mut inputs = std::mem::take(&mut self.inputs);
        let first_id = self.n_tokens;
        self.n_tokens += batch.n_tokens() as u64;
        match memory.begin(&batch, n_ubatch) {
            Err(error) => self.check_refusal(&batch, &error),
            Ok(mut steps) => {
                let mut n_done = 0;
                while let Some(ubatch) = steps.next(&mut inputs) {
                    assert!(ubatch.n_tokens() <= n_ubatch);
                    let cells = inputs.parts[1].cells.clone();
                    let ids: Vec<u64> = ubatch
                        .entries
                        .iter()
                        .map(|&e| first_id + u64::from(e))
                        .collect();
                    let rows: Vec<_> = ubatch.rows().collect();
                    if let Some((at, written)) = failure
                        && at == n_done
                    {
                        steps.fail(written);
                        if written == RowsWritten::Perhaps {
                            cells.iter().for_each(|c| self.rows[c.as_usize()] = GARBAGE);
                        } else if n_done == 0 {
                            assert_eq!(memory, before);
                        }
                        break;
                    }
                    for ((&cell, &id), row) in cells.iter().zip(&ids).zip(&rows) {
                        self.rows[cell.as_usize()] = Row {
                            id,
                            rotated_to: i64::from(row.pos.0),
                        };
                        for seq in row.seqs {
                            self.model[seq.as_usize()].push((row.pos, id));
                        }
                    }
                    let visibility = &inputs.parts[1].visibility;
                    visibility.check(self.rows.len() as u32).unwrap();
                    for (number, row) in (0u32..).zip(&rows) {
                        let seen = self.held(visibility.row(number));
                        assert_eq!(
                            seen,
                            self.model_sees(row.first_seq, row.pos),
                            "row {number}"
                        );
                    }
                    n_done += 1;
                }
            }
        }
        self.memory = memory;
        self.inputs = inputs;
    }

    /// The batch, or `None` where these sequences cannot be together.
    fn valid_batch(&self, entries: &[(u32, bool)]) -> Option<ValidBatch> {
        let mut batch = Batch::new();
        let mut last: Vec<Option<Pos>> = (0..N_SEQS).map(|s| self.last(SeqId(s))).collect();
        let mut in_batch = SeqSet::EMPTY;
        for &(bits, repeat) in entries {
            let seqs: SeqSet = (0..N_SEQS)
                .filter(|s| bits >> s & 1 == 1)
                .map(SeqId)
                .collect();
            let first = seqs.first()?;
            let entry = batch.push_token(TokenId(0)).in_sequences(seqs);
            let next = match last[first.as_usize()] {
                Some(pos) if repeat && in_batch.contains(first) => {
                    entry.at(pos);
                    pos
                }
                pos => pos.map_or(Pos(0), Pos::next),
            };
            for seq in seqs {
                last[seq.as_usize()] = Some(next);
            }
            in_batch = in_batch.union(seqs);
        }
        let rules = BatchRules {
            n_batch: 64,
            n_seqs: N_SEQS,
            n_vocab: 1,
            n_embd: 1,
        };
        let valid = validate(&batch, &rules, |seq| self.memory.positions(seq)).ok()?;
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

    /// Commits a plan on a copy and undoes it step by step.
    fn undo_exactly(
        &self,
        ubatches: &[kv_core::batch::UBatch],
        placement: &kv_core::memory::UnifiedPlacement,
    ) {
        let mut memory = self.memory.clone();
        let mut done = Vec::new();
        for (step, ubatch) in ubatches.iter().enumerate() {
            let mut cells = placement.cells(step).to_vec();
            assert_eq!(cells.len(), ubatch.entries.len());
            cells.sort_unstable();
            cells.dedup();
            assert_eq!(cells.len(), ubatch.entries.len(), "a cell was given twice");
            let before = memory.clone();
            let undo = memory.commit(ubatch, placement, step);
            invariants::check(&memory).unwrap();
            done.push((before, undo));
        }
        for (before, undo) in done.into_iter().rev() {
            memory.rollback(undo, RowsWritten::No);
            assert_eq!(memory, before);
        }
    }

    fn check_refusal(&self, batch: &ValidBatch, error: &PlanError) {
        let config = self.memory.config();
        match error {
            PlanError::NoRoom(no_room) => {
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
                    let n_free = cells.filter(|&c| self.memory.cell(c).is_none()).count();
                    assert!(n_wanted.count() > n_free, "{no_room}");
                }
            }
            PlanError::CoupledStreams { set, .. } => {
                assert_eq!(config.streams, Streams::PerSequence);
                assert!(set.len() > 1);
            }
            other => panic!("{other}"),
        }
    }

    fn remove(&mut self, seqs: Seqs, range: RelativeRange) {
        let (named, last): (Vec<SeqId>, _) = match seqs {
            Seqs::One(seq) => (vec![seq], self.last(seq)),
            Seqs::All => ((0..N_SEQS).map(SeqId).collect(), self.last(SeqId(0))),
        };
        let range = range.resolve(last);
        let before = self.memory.clone();
        match self.memory.remove(seqs, range) {
            Ok(_) => {
                for seq in named {
                    self.model[seq.as_usize()].retain(|t| !range.contains(t.0));
                }
            }
            Err(refused) => {
                assert_eq!(self.memory, before);
                assert_ne!(self.window().0, Window::Full, "{refused}");
                assert_ne!(range, PosRange::ALL, "{refused}");
            }
        }
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: RelativeRange) {
        let range = range.resolve(self.last(from));
        let before = self.memory.clone();
        match self.memory.copy(from, to, range) {
            Ok(copied) => {
                self.copy_rows(&copied.row_copies);
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
                if let CopyRefused::NoRoom {
                    n_wanted, n_free, ..
                } = refused
                {
                    assert_eq!(self.memory.config().streams, Streams::PerSequence);
                    assert!(n_wanted > n_free);
                } else {
                    assert_ne!(self.window().0, Window::Full, "{refused}");
                }
            }
        }
    }

    fn copy_rows(&mut self, copies: &[RowCopy]) {
        for copy in copies {
            assert_eq!(copy.part, PartIdx(1));
            let (from, to) = (copy.from.as_usize(), copy.to.as_usize());
            assert!(from.abs_diff(to) >= copy.len as usize, "{copy:?} overlaps");
            self.rows.copy_within(from..from + copy.len as usize, to);
        }
    }

    fn shift_rows(&mut self, shifted: &Shifted) {
        self.copy_rows(&shifted.row_copies);
        let mut n_rows = 0;
        for shift in &shifted.row_shifts {
            assert_eq!(shift.part, PartIdx(1));
            let first = shift.first.as_usize();
            for row in &mut self.rows[first..first + shift.len as usize] {
                row.rotated_to += i64::from(shift.delta.0);
            }
            n_rows += shift.len;
        }
        assert_eq!(n_rows, shifted.n_tokens);
    }

    fn context_shift(&mut self, seq: SeqId, n_keep: u32) {
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

    fn reposition(&mut self, seq: SeqId, range: PosRange, change: PosChange) {
        let before = self.memory.clone();
        let wanted = self.model_reposition(seq, range, change);
        let check = self.memory.check_reposition(seq, range, change);
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
                assert_eq!(check, Err(refused));
                assert_eq!(self.memory, before);
                match (refused, wanted) {
                    (ShiftRefused::WindowForgotten(_), Ok(_)) => {
                        assert_ne!(self.window().0, Window::Full, "{refused}");
                    }
                    (
                        ShiftRefused::NoRoom {
                            n_wanted, n_free, ..
                        },
                        Ok(_),
                    ) => {
                        assert_eq!(self.memory.config().streams, Streams::Shared);
                        assert!(n_wanted > n_free, "{refused}");
                    }
                    (ShiftRefused::DivideByZero { .. }, Err("divide"))
                    | (ShiftRefused::OutOfRange { .. }, Err("range"))
                    | (ShiftRefused::Overtakes { .. }, Err("order")) => {}
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

    fn compact(&mut self) {
        let n_holes = self.memory.n_holes();
        let compacted = self.memory.compact();
        assert_eq!(compacted.n_cells, n_holes);
        let n_copied: u32 = compacted.row_copies.iter().map(|c| c.len).sum();
        assert_eq!(n_copied, n_holes);
        self.copy_rows(&compacted.row_copies);
        assert_eq!(self.memory.n_holes(), 0);
        let config = *self.memory.config();
        for first in (0..self.memory.n_cells()).step_by(config.n_cells as usize) {
            let cells = first..first + config.n_cells;
            let used: Vec<bool> = cells
                .map(|c| self.memory.cell(CellIdx(c)).is_some())
                .collect();
            assert!(used.is_sorted_by(|a, b| a >= b), "a hole is left");
        }
    }

    /// Everything that holds between operations.
    fn check(&self) {
        invariants::check(&self.memory).unwrap();
        for seq in (0..N_SEQS).map(SeqId) {
            let has = self.memory.positions(seq);
            assert_eq!(
                has.map(|has| has.last),
                self.last(seq),
                "sequence {seq} ends elsewhere"
            );
            let (window, causality) = self.window();
            let next = self.last(seq).map_or(Pos(0), Pos::next);
            let limits = window.visible_keys(next, causality);
            let runs = self
                .memory
                .runs(seq)
                .iter()
                .filter_map(|run| run.clip(limits));
            let seen = self.held(runs.flat_map(|run| run.iter()));
            assert_eq!(
                seen,
                self.model_sees(seq, next),
                "the next token of sequence {seq}"
            );
            if window == Window::Full {
                let first = self.model[seq.as_usize()].first().map(|t| t.0);
                assert_eq!(has.map(|has| has.first), first);
            }
        }
    }
}

proptest! {
    // A case takes about 0.2 ms; `PROPTEST_CASES` overrides the number.
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn a_memory_shows_what_a_memory_without_limits_would(
        config in config(),
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let mut world = World::new(config);
        for op in &ops {
            world.apply(op);
            world.check();
        }
    }
}
