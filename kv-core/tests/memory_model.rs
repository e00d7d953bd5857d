//! Random operations on [`Unified`] against a model that never recycles anything.
//!
//! The model keeps every token of every sequence that was not removed on purpose, and asks
//! [`Window`] who sees whom. So whatever cells the memory reuses, shares, copies or gives back after
//! a failure, the tokens that a row sees must be the model's. A simulated backend holds one token id
//! for each row, and overwrites rows as a real one does.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::batch::{Batch, BatchRules, ValidBatch, validate};
use kv_core::memory::{
    CopyRefused, Memory, MemoryInputs, PlanError, RowsWritten, Seqs, Streams, Unified,
    UnifiedConfig, invariants,
};
use kv_core::{
    Causality, CellIdx, PartIdx, Pos, PosRange, SeqId, SeqSet, StreamIdx, TokenId, Window,
};
use proptest::prelude::*;

const N_SEQS: u32 = 4;
/// What a row holds after a computation that failed half-way.
const GARBAGE: u64 = u64::MAX;

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
    rows: Vec<u64>,
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
            .map(|(cell, pos)| (pos, self.rows[cell.as_usize()]))
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
                        self.rows[cell.as_usize()] = id;
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
                for copy in &copied.row_copies {
                    assert_eq!(copy.part, PartIdx(1));
                    let (from, to) = (copy.from.as_usize(), copy.to.as_usize());
                    self.rows.copy_within(from..from + copy.len as usize, to);
                }
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
