//! Random operations on [`Recurrent`] against a model that keeps every token of every sequence.
//!
//! A simulated backend holds for each row the list of tokens that its state has taken in, as if a
//! state were just that, and destroys what a failed computation was to store. So whatever rows the
//! memory shares, reuses or goes back to, the state of a sequence must be the model's tokens.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_contract::memory::batches::{N_SEQS, RULES, RelativeRange, batch, entries, seq};
use kv_contract::memory::run_cases;
use kv_contract::memory::states::StateRows;
use kv_core::batch::{ValidBatch, validate};
use kv_core::memory::StateGroup;
use kv_core::memory::{
    Edit, Memory, MemoryInputs, NoStateRoom, Plan, Recurrent, RecurrentConfig, Refusal,
    RestoreInto, RowsWritten, Seqs, Snapshot, TargetRows,
};
use kv_core::{Pos, PosRange, SeqId};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Op {
    /// Sequence sets as bits; `true` repeats the position of the entry before.
    Batch {
        entries: Vec<(u32, bool)>,
        n_ubatch: u32,
        /// The ubatch that fails.
        failure: Option<usize>,
    },
    Remove(Seqs, RelativeRange),
    Copy(SeqId, SeqId, RelativeRange),
    /// In place of what was saved before.
    Save(Seqs),
    Restore(RestoreInto),
    KeepOnly(SeqId),
    Clear,
}

fn range() -> impl Strategy<Value = RelativeRange> {
    prop_oneof![
        2 => Just(RelativeRange::All),
        5 => (0u32..7).prop_map(RelativeRange::LastFrom),
        2 => (0u32..7).prop_map(RelativeRange::FirstTo),
        1 => (0u32..7, 0u32..4).prop_map(|(back, len)| RelativeRange::Middle { back, len }),
    ]
}

fn op() -> impl Strategy<Value = Op> {
    let failure = prop::option::weighted(0.3, 0usize..4);
    let seqs = prop_oneof![5 => seq().prop_map(Seqs::One), 1 => Just(Seqs::All)];
    prop_oneof![
        10 => (entries(3), 1u32..8, failure)
            .prop_map(|(entries, n_ubatch, failure)| Op::Batch { entries, n_ubatch, failure }),
        4 => (seqs, range()).prop_map(|(seqs, range)| Op::Remove(seqs, range)),
        3 => (seq(), seq(), range()).prop_map(|(from, to, range)| Op::Copy(from, to, range)),
        2 => prop_oneof![1 => seq().prop_map(Seqs::One), 2 => Just(Seqs::All)].prop_map(Op::Save),
        1 => Just(Op::Restore(RestoreInto::All)),
        2 => (seq(), seq()).prop_map(|(from, to)| Op::Restore(RestoreInto::One { from, to })),
        1 => seq().prop_map(Op::KeepOnly),
        1 => Just(Op::Clear),
    ]
}

fn config() -> impl Strategy<Value = RecurrentConfig> {
    (0u32..5, prop::option::weighted(0.3, 0u32..12)).prop_map(|(n_snapshots, thrifty)| {
        let config = RecurrentConfig::new(N_SEQS).with_snapshots(n_snapshots);
        match thrifty {
            Some(more) => config.with_rows(n_snapshots + 2 + more),
            None => config,
        }
    })
}

/// A sequence as the model sees it.
#[derive(Clone, Debug, Default, PartialEq)]
struct ModelSeq {
    tokens: Vec<(Pos, u64)>,
    /// The number of states after its last tokens that must be kept.
    n_states: usize,
}

impl ModelSeq {
    fn push(&mut self, token: (Pos, u64), n_kept: usize) {
        self.tokens.push(token);
        self.n_states = n_kept.min(self.n_states + 1);
    }

    /// The sequence without its tokens behind `n`, or `None` where that state is not kept.
    fn truncated(&self, n: usize) -> Option<Self> {
        let n_dropped = self.tokens.len() - n;
        if n == 0 {
            return Some(Self::default());
        }
        Some(Self {
            tokens: self.tokens[..n].to_vec(),
            n_states: self.n_states.checked_sub(n_dropped).filter(|&n| n > 0)?,
        })
    }

    /// The sequence without its tokens in `range`, or `None` where that must be refused.
    fn without(&self, range: PosRange) -> Option<Self> {
        let is_left = |t: &&(Pos, u64)| !range.contains(t.0);
        let n_left = self.tokens.iter().filter(is_left).count();
        let n_first = self.tokens.iter().take_while(is_left).count();
        (n_left == n_first)
            .then(|| self.truncated(n_left))
            .flatten()
    }
}

/// The memory under test, the rows of its backend, and the model.
struct World {
    memory: Recurrent,
    rows: StateRows,
    model: Vec<ModelSeq>,
    n_tokens: u64,
    /// The last saved snapshot, with its rows and the model of then.
    saved: Option<(Snapshot, StateRows, Vec<ModelSeq>)>,
}

impl World {
    fn new(config: RecurrentConfig) -> Self {
        let memory = Recurrent::new(config).unwrap();
        Self {
            rows: StateRows::new(memory.n_rows().states),
            memory,
            model: vec![ModelSeq::default(); N_SEQS as usize],
            n_tokens: 0,
            saved: None,
        }
    }

    fn last(&self, seq: SeqId) -> Option<Pos> {
        self.model[seq.as_usize()].tokens.last().map(|t| t.0)
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Batch {
                entries,
                n_ubatch,
                failure,
            } => self.batch(entries, *n_ubatch, *failure),
            Op::Remove(seqs, range) => self.remove(*seqs, *range),
            Op::Copy(from, to, range) => self.copy(*from, *to, *range),
            Op::Save(seqs) => {
                let snapshot = self.memory.snapshot(*seqs).unwrap();
                let mut model = self.model.clone();
                for (s, model) in (0u32..).map(SeqId).zip(&mut model) {
                    if *seqs != Seqs::All && *seqs != Seqs::One(s) {
                        *model = ModelSeq::default();
                    }
                }
                self.saved = Some((snapshot, self.rows.clone(), model));
            }
            Op::Restore(into) => self.restore(*into),
            Op::KeepOnly(seq) => {
                self.memory.keep_only(*seq).unwrap();
                for (s, model) in (0u32..).zip(&mut self.model) {
                    if s != seq.0 {
                        *model = ModelSeq::default();
                    }
                }
            }
            Op::Clear => {
                self.memory.clear();
                self.model.fill(ModelSeq::default());
                assert_eq!(self.memory, Recurrent::new(*self.memory.config()).unwrap());
            }
        }
    }

    fn batch(&mut self, entries: &[(u32, bool)], n_ubatch: u32, failure: Option<usize>) {
        let Some(batch) = self.valid_batch(entries) else {
            return;
        };
        if let Ok(plan) = self.memory.plan(&batch, n_ubatch) {
            self.undo_exactly(&plan);
        }
        let n_kept = self.memory.config().n_snapshots() as usize + 1;
        let mut memory = self.memory.clone();
        let mut inputs = MemoryInputs::default();
        let first_id = self.n_tokens;
        self.n_tokens += batch.n_tokens() as u64;
        match memory.begin(&batch, n_ubatch) {
            Err(error) => self.check_refusal(&batch, &error),
            Ok(mut steps) => {
                for number in 0.. {
                    let before = steps.memory().clone();
                    let Some(ubatch) = steps.next(&mut inputs) else {
                        break;
                    };
                    self.rows.check_groups(&inputs.states, ubatch.n_tokens());
                    if failure == Some(number) {
                        self.rows.destroy(&inputs.states);
                        steps.undo_last(RowsWritten::Perhaps);
                        assert_eq!(memory, before);
                        break;
                    }
                    let ids: Vec<u64> = ubatch
                        .entries
                        .iter()
                        .map(|&e| first_id + u64::from(e))
                        .collect();
                    self.rows.compute(&inputs.states, &ids);
                    for (row, id) in ubatch.rows().zip(ids) {
                        for seq in &row.seqs {
                            self.model[seq.as_usize()].push((row.pos, id), n_kept);
                        }
                    }
                }
            }
        }
        self.memory = memory;
    }

    /// The batch, or `None` where these sequences cannot be together.
    fn valid_batch(&self, entries: &[(u32, bool)]) -> Option<ValidBatch> {
        let batch = batch(entries, |seq| self.last(seq))?;
        validate(&batch, &RULES, |seq| self.memory.positions(seq)).ok()
    }

    /// Commits a plan on a copy and undoes it step by step.
    fn undo_exactly(&self, plan: &Plan<Vec<StateGroup>>) {
        let mut memory = self.memory.clone();
        let mut done = Vec::new();
        for planned in plan {
            let before = memory.clone();
            let undo = memory.commit(planned);
            done.push((before, undo));
        }
        for (before, undo) in done.into_iter().rev() {
            memory.rollback(undo, RowsWritten::No);
            assert_eq!(memory, before);
        }
    }

    fn check_refusal(&self, batch: &ValidBatch, error: &Refusal) {
        match error {
            Refusal::NoStateRoom(no_room) => {
                assert!(no_room.n_wanted > no_room.n_free, "{no_room}");
                let config = self.memory.config();
                let enough = RecurrentConfig::new(N_SEQS).with_snapshots(config.n_snapshots());
                assert!(config.n_rows() < enough.n_rows(), "{no_room}");
            }
            Refusal::CoupledStates { entry, a, b } => {
                let set = &batch.entries()[*entry as usize].seqs;
                assert!(set.contains(*a) && set.contains(*b));
                let current = |seq| self.memory.states(seq).last().map(|s| s.row);
                assert_ne!(current(*a), current(*b));
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
        let wanted: Option<Vec<ModelSeq>> = named
            .iter()
            .map(|seq| self.model[seq.as_usize()].without(range))
            .collect();
        let checked = self.memory.check(&Edit::Remove { seqs, range });
        let removed = self.memory.remove(seqs, range);
        assert_eq!(checked, removed.clone().map(drop));
        match (removed, wanted) {
            (Ok(removed), Some(left)) => {
                let mut n_tokens = 0;
                for (seq, left) in named.into_iter().zip(left) {
                    let model = &mut self.model[seq.as_usize()];
                    n_tokens += model.tokens.len() - left.tokens.len();
                    *model = left;
                }
                assert_eq!(removed.n_tokens as usize, n_tokens);
                assert_eq!(removed.n_cells, before.n_used() - self.memory.n_used());
            }
            (Err(refused), None) => {
                assert_eq!(self.memory, before);
                assert_ne!(range, PosRange::ALL, "{refused}");
                if let Refusal::StateGone { wanted, oldest, .. } = refused {
                    assert!(wanted < oldest, "{refused}");
                }
            }
            (removed, wanted) => panic!("{removed:?}, but the model has {wanted:?}"),
        }
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: RelativeRange) {
        let range = range.resolve(self.last(from));
        let before = self.memory.clone();
        let checked = self.memory.check(&Edit::Copy { from, to, range });
        let copied = self.memory.copy(from, to, range);
        assert_eq!(checked, copied.as_ref().map(drop).map_err(Clone::clone));
        match copied {
            Ok(copied) => {
                assert!(copied.row_copies.is_empty());
                if from == to {
                    assert_eq!(self.memory, before);
                    return;
                }
                let tokens = self.model[from.as_usize()].tokens.iter();
                let within: Vec<_> = tokens.copied().filter(|t| range.contains(t.0)).collect();
                assert_eq!(copied.n_tokens as usize, within.len());
                self.model[to.as_usize()] = match within.len() {
                    0 => self.model[to.as_usize()].without(range).unwrap(),
                    n => {
                        // All of what `to` had is replaced, by the beginning of `from`.
                        let model = &self.model[to.as_usize()];
                        assert!(model.tokens.iter().all(|t| range.contains(t.0)));
                        assert_eq!(within, self.model[from.as_usize()].tokens[..n]);
                        self.model[from.as_usize()].truncated(n).unwrap()
                    }
                };
            }
            Err(refused) => {
                assert_eq!(self.memory, before);
                // Copying everything to where nothing is, is never refused.
                assert!(range != PosRange::ALL, "{refused}");
                if let Refusal::StateGone { wanted, oldest, .. } = refused {
                    assert!(wanted < oldest, "{refused}");
                }
            }
        }
    }

    fn restore(&mut self, into: RestoreInto) {
        let Some((snapshot, rows, model)) = self.saved.clone() else {
            return;
        };
        let before = self.memory.clone();
        let checked = self.memory.check_restore(&snapshot, into);
        let restored = self.memory.restore(&snapshot, into);
        assert_eq!(checked.err(), restored.as_ref().err().cloned());
        match restored {
            Ok(restored) => {
                for write in restored.state_writes {
                    let row = rows.get(write.from);
                    assert!(row.is_some());
                    self.rows.set(write.to, row);
                }
                if restored.rows_taken == TargetRows::Free {
                    // What was there before is as good as it was.
                    let after = std::mem::replace(&mut self.memory, before);
                    self.check();
                    self.memory = after;
                }
                match into {
                    RestoreInto::All => self.model = model,
                    RestoreInto::Behind { .. } => panic!("states have no ranges"),
                    RestoreInto::One { from, to } => {
                        self.model[to.as_usize()] = model[from.as_usize()].clone();
                    }
                }
            }
            Err(refused) => {
                assert_eq!(self.memory, before);
                match refused {
                    Refusal::NotSaved { seq, .. } => {
                        assert!(model[seq.as_usize()].tokens.is_empty());
                    }
                    Refusal::NoStateRoom(NoStateRoom {
                        n_wanted, n_free, ..
                    }) => {
                        assert!(n_wanted > n_free, "{refused}");
                        assert_ne!(into, RestoreInto::All, "it all fitted before");
                    }
                    other => panic!("{other}"),
                }
            }
        }
    }

    /// Everything that holds between operations.
    fn check(&self) {
        for (seq, model) in (0..N_SEQS).map(SeqId).zip(&self.model) {
            let states = self.memory.states(seq);
            assert_eq!(states.len(), model.n_states, "states of sequence {seq}");
            let ids: Vec<u64> = model.tokens.iter().map(|t| t.1).collect();
            self.rows.check(states, seq, &ids);
            let first_kept = model.tokens.len() - states.len();
            for (n_tokens, state) in (first_kept + 1..).zip(states) {
                assert_eq!(state.n_tokens as usize, n_tokens);
                let last = model.tokens[..n_tokens].last();
                assert_eq!(Some(state.pos), last.map(|t| t.0));
            }
            let has = self.memory.positions(seq);
            let ends = (model.tokens.first(), model.tokens.last());
            let wanted = ends.0.zip(ends.1).map(|(a, b)| PosRange::new(a.0, b.0));
            assert_eq!(has, wanted, "positions of sequence {seq}");
        }
    }
}

#[test]
fn a_state_is_what_its_sequence_has_taken_in() {
    let cases = (config(), prop::collection::vec(op(), 1..40));
    run_cases("recurrent", file!(), &cases, |(config, ops)| {
        let mut world = World::new(config);
        for op in &ops {
            world.apply(op);
            world.check();
        }
    });
}
