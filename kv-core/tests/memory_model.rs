//! Random operations on [`Unified`], [`Iswa`] and pairs of pairs, against a model that never recycles
//! anything.
//!
//! The model keeps every token of every sequence that was not removed on purpose, and asks
//! [`Window`] who sees whom. So whatever cells the memory reuses, shares, copies or gives back after
//! a failure, the tokens that a row sees must be the model's. A simulated backend holds one token id
//! for each row, and overwrites rows as a real one does.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::batch::{Batch, BatchRules, UBatch, UBatchRow, ValidBatch, validate};
use kv_core::memory::{
    CopyRefused, Iswa, Memory, MemoryInputs, Pair, PlanError, RemoveRefused, RowsWritten, Seqs,
    Streams, Unified, UnifiedConfig, WindowForgotten, invariants,
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

fn window() -> impl Strategy<Value = Window> {
    prop_oneof![
        2 => Just(Window::Full),
        3 => (0u32..7).prop_map(Window::Sliding),
        2 => (0u32..7).prop_map(Window::Chunked),
        1 => (0u32..9).prop_map(Window::Symmetric),
    ]
}

/// Configurations of `N` parts with the same streams.
fn configs<const N: usize>() -> impl Strategy<Value = [UnifiedConfig; N]> {
    let streams = prop_oneof![2 => Just(Streams::Shared), 1 => Just(Streams::PerSequence)];
    let causality = prop_oneof![4 => Just(Causality::Causal), 1 => Just(Causality::NonCausal)];
    let parts = prop::collection::vec((1u32..40, window()), N);
    (streams, causality, parts).prop_map(|(streams, causality, parts)| {
        // Numbered from 1, the last first.
        std::array::from_fn(|i| UnifiedConfig {
            part: PartIdx((N - i) as u32),
            n_seqs: N_SEQS,
            n_cells: parts[i].0,
            streams,
            window: parts[i].1,
            causality,
        })
    })
}

fn unified() -> impl Strategy<Value = Unified> {
    configs().prop_map(|[one]| Unified::new(one).unwrap())
}

fn iswa() -> impl Strategy<Value = Iswa> {
    configs().prop_map(|parts| pair(parts.map(|config| Unified::new(config).unwrap())))
}

fn pair<M: Memory>([first, second]: [M; 2]) -> Pair<M, M> {
    Pair::new(first, second).unwrap()
}

fn pair_of_pairs() -> impl Strategy<Value = Pair<Iswa, Unified>> {
    configs().prop_map(|parts| {
        let [a, b, c] = parts.map(|config| Unified::new(config).unwrap());
        Pair::new(pair([a, b]), c).unwrap()
    })
}

/// A memory that consists of attention memories.
trait Attention: Memory<Placement: std::fmt::Debug> + Clone + PartialEq + std::fmt::Debug {
    fn parts(&self) -> Vec<&Unified>;
}

impl Attention for Unified {
    fn parts(&self) -> Vec<&Unified> {
        vec![self]
    }
}

impl<A: Attention, B: Attention> Attention for Pair<A, B> {
    fn parts(&self) -> Vec<&Unified> {
        [self.first().parts(), self.second().parts()].concat()
    }
}

/// The memory under test, the rows of its backend, and the model.
struct World<M> {
    memory: M,
    empty: M,
    /// By number of the part.
    rows: Vec<Vec<u64>>,
    /// By sequence: position and token id, ascending.
    model: Vec<Vec<(Pos, u64)>>,
    n_tokens: u64,
    inputs: MemoryInputs,
}

impl<M: Attention> World<M> {
    fn new(memory: M) -> Self {
        let n_parts = memory.parts().len();
        let mut rows = vec![Vec::new(); n_parts + 1];
        for part in memory.parts() {
            rows[part.config().part.as_usize()] = vec![GARBAGE; part.n_cells() as usize];
        }
        let model = vec![Vec::new(); N_SEQS as usize];
        Self {
            empty: memory.clone(),
            memory,
            rows,
            model,
            n_tokens: 0,
            inputs: MemoryInputs::default(),
        }
    }

    fn all_windows_are_full(&self) -> bool {
        let mut parts = self.memory.parts().into_iter();
        parts.all(|part| part.config().window == Window::Full)
    }

    fn config(&self, part: PartIdx) -> UnifiedConfig {
        let parts = self.memory.parts();
        let found = parts.iter().find(|p| p.config().part == part);
        *found.unwrap().config()
    }

    fn last(&self, seq: SeqId) -> Option<Pos> {
        self.model[seq.as_usize()].last().map(|t| t.0)
    }

    /// What a token of `seq` at `pos` sees of a part, according to the model.
    fn model_sees(&self, config: &UnifiedConfig, seq: SeqId, pos: Pos) -> Vec<(Pos, u64)> {
        let tokens = self.model[seq.as_usize()].iter().copied();
        let mut seen: Vec<_> = tokens
            .filter(|t| config.window.sees(pos, t.0, config.causality))
            .collect();
        seen.sort_unstable();
        seen
    }

    fn held(&self, part: PartIdx, cells: impl Iterator<Item = (CellIdx, Pos)>) -> Vec<(Pos, u64)> {
        let rows = &self.rows[part.as_usize()];
        let mut held: Vec<_> = cells
            .map(|(cell, pos)| (pos, rows[cell.as_usize()]))
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
                assert_eq!(self.memory, self.empty);
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
        let places = |inputs: &MemoryInputs| -> Vec<(PartIdx, Vec<CellIdx>)> {
            let numbers = before.parts().into_iter().map(|p| p.config().part);
            numbers
                .map(|p| (p, inputs.parts[p.as_usize()].cells.clone()))
                .collect()
        };
        match memory.begin(&batch, n_ubatch) {
            Err(error) => self.check_refusal(&batch, &error),
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
                        steps.fail(written);
                        if written == RowsWritten::Perhaps {
                            for (part, cells) in places {
                                let rows = &mut self.rows[part.as_usize()];
                                cells.iter().for_each(|c| rows[c.as_usize()] = GARBAGE);
                            }
                        } else if n_done == 0 {
                            assert_eq!(memory, before);
                        }
                        break;
                    }
                    for (&id, row) in ids.iter().zip(&rows) {
                        for seq in row.seqs {
                            self.model[seq.as_usize()].push((row.pos, id));
                        }
                    }
                    for (part, cells) in places {
                        assert_eq!(cells.len(), ids.len());
                        for (&cell, &id) in cells.iter().zip(&ids) {
                            self.rows[part.as_usize()][cell.as_usize()] = id;
                        }
                        self.check_visible(part, &inputs, &rows);
                    }
                    n_done += 1;
                }
            }
        }
        self.memory = memory;
        self.inputs = inputs;
    }

    /// What each row of a ubatch sees of a part is what the model says.
    fn check_visible(&self, part: PartIdx, inputs: &MemoryInputs, rows: &[UBatchRow]) {
        let visibility = &inputs.parts[part.as_usize()].visibility;
        let n_cells = self.rows[part.as_usize()].len();
        visibility.check(n_cells as u32).unwrap();
        let config = self.config(part);
        for (number, row) in (0u32..).zip(rows) {
            assert_eq!(
                self.held(part, visibility.row(number)),
                self.model_sees(&config, row.first_seq, row.pos),
                "part {part}, row {number}"
            );
        }
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

    /// Commits a plan on a copy and undoes it step by step: exactly, and then as if rows had been
    /// written, as far back as no window forbids.
    fn undo_exactly(&self, ubatches: &[UBatch], placement: &M::Placement) {
        for rows in [RowsWritten::No, RowsWritten::Perhaps] {
            let mut memory = self.memory.clone();
            let mut done = Vec::new();
            let mut inputs = MemoryInputs::default();
            for (step, ubatch) in ubatches.iter().enumerate() {
                let before = memory.clone();
                let undo = memory.commit(ubatch, placement, step);
                check_parts(&memory);
                memory.inputs(ubatch, placement, step, &mut inputs);
                for part in memory.parts() {
                    let mut cells = inputs.parts[part.config().part.as_usize()].cells.clone();
                    cells.sort_unstable();
                    cells.dedup();
                    assert_eq!(cells.len(), ubatch.entries.len(), "a cell was given twice");
                }
                done.push((before, undo));
            }
            let mut is_last = true;
            for (before, undo) in done.into_iter().rev() {
                let refused = memory.check_rollback(&undo, rows).is_err();
                assert!(!(refused && (is_last || rows == RowsWritten::No)));
                if refused {
                    let mut sound = memory;
                    sound.rollback(undo, rows);
                    let broken = |part: &&Unified| invariants::check(part).is_err();
                    assert!(sound.parts().iter().any(broken), "refused without a reason");
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

    fn check_refusal(&self, batch: &ValidBatch, error: &PlanError) {
        match error {
            PlanError::NoRoom(no_room) => {
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
            PlanError::CoupledStreams { set, .. } => {
                let per_sequence = self.config(PartIdx(1)).streams == Streams::PerSequence;
                assert!(per_sequence && set.len() > 1);
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
        let check = self.memory.check_remove(seqs, range);
        let removed = self.memory.remove(seqs, range);
        assert_eq!(removed.err(), check.err());
        match removed {
            Ok(_) => {
                for seq in named {
                    self.model[seq.as_usize()].retain(|t| !range.contains(t.0));
                }
            }
            Err(refused) => {
                assert_eq!(self.memory, before);
                assert_ne!(range, PosRange::ALL, "{refused}");
                let RemoveRefused::WindowForgotten(forgotten) = refused else {
                    panic!("{refused}");
                };
                self.check_forgotten(forgotten);
            }
        }
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: RelativeRange) {
        let range = range.resolve(self.last(from));
        let before = self.memory.clone();
        let check = self.memory.check_copy(from, to, range);
        let copied = self.memory.copy(from, to, range);
        assert_eq!(copied.as_ref().err(), check.as_ref().err());
        match copied {
            Ok(copied) => {
                for copy in &copied.row_copies {
                    let (from, to) = (copy.from.as_usize(), copy.to.as_usize());
                    let rows = &mut self.rows[copy.part.as_usize()];
                    rows.copy_within(from..from + copy.len as usize, to);
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
                match refused {
                    CopyRefused::NoRoom {
                        part,
                        n_wanted,
                        n_free,
                        ..
                    } => {
                        assert_eq!(self.config(part).streams, Streams::PerSequence);
                        assert!(n_wanted > n_free);
                    }
                    CopyRefused::WindowForgotten(forgotten) => self.check_forgotten(forgotten),
                    other => panic!("{other}"),
                }
            }
        }
    }

    /// A refusal names a window that exists, and something that is missing in it.
    fn check_forgotten(&self, forgotten: WindowForgotten) {
        assert!(!self.all_windows_are_full(), "{forgotten}");
        let parts = self.memory.parts();
        assert!(parts.iter().any(|p| p.config().window == forgotten.window));
        assert_ne!(forgotten.window, Window::Full, "{forgotten}");
        let WindowForgotten {
            next,
            needed_from,
            forgotten_to,
            ..
        } = forgotten;
        let nothing_left = next == forgotten_to.next();
        assert!(needed_from <= forgotten_to || nothing_left, "{forgotten}");
    }

    /// Everything that holds between operations.
    fn check(&self) {
        check_parts(&self.memory);
        for seq in (0..N_SEQS).map(SeqId) {
            let has = self.memory.positions(seq);
            assert_eq!(
                has.map(|has| has.last),
                self.last(seq),
                "sequence {seq} ends elsewhere"
            );
            let next = self.last(seq).map_or(Pos(0), Pos::next);
            for part in self.memory.parts() {
                let config = part.config();
                let limits = config.window.visible_keys(next, config.causality);
                let runs = part.runs(seq).iter().filter_map(|run| run.clip(limits));
                assert_eq!(
                    self.held(config.part, runs.flat_map(|run| run.iter())),
                    self.model_sees(config, seq, next),
                    "the next token of sequence {seq}, part {}",
                    config.part
                );
            }
            let first = self.model[seq.as_usize()].first().map(|t| t.0);
            match self.all_windows_are_full() {
                true => assert_eq!(has.map(|has| has.first), first),
                false => assert!(has.map(|has| has.first) >= first),
            }
        }
    }
}

/// Each part is sound, and every sequence ends at the same position in all.
fn check_parts<M: Attention>(memory: &M) {
    for part in memory.parts() {
        invariants::check(part).unwrap();
        for seq in (0..N_SEQS).map(SeqId) {
            let last = |has: Option<PosRange>| has.map(|has| has.last);
            assert_eq!(last(part.positions(seq)), last(memory.positions(seq)));
        }
    }
}

fn run<M: Attention>(memory: M, ops: &[Op]) {
    let mut world = World::new(memory);
    for op in ops {
        world.apply(op);
        world.check();
    }
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(), 1..40)
}

proptest! {
    // A case takes about 0.2 ms a part; `PROPTEST_CASES` overrides the number.
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn a_memory_shows_what_a_memory_without_limits_would(memory in unified(), ops in ops()) {
        run(memory, &ops);
    }

    #[test]
    fn both_parts_of_an_iswa_show_what_a_memory_without_limits_would(
        memory in iswa(),
        ops in ops(),
    ) {
        run(memory, &ops);
    }

    #[test]
    fn so_do_pairs_of_pairs(memory in pair_of_pairs(), ops in ops()) {
        run(memory, &ops);
    }
}
