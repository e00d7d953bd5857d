//! Pairs in general: with a part that can do less than attention memory.

use super::*;

/// Remembers how long each sequence is, like a recurrent state: can be cut nowhere.
#[derive(Clone, Debug, PartialEq)]
struct Lengths {
    n: Vec<u32>,
    split_policy: SplitPolicy,
}

impl Lengths {
    fn new(n_seqs: u32, split_policy: SplitPolicy) -> Self {
        let n = vec![0; n_seqs as usize];
        Self { n, split_policy }
    }

    /// What a real one would say: without its state, nothing before the next token is known.
    fn refusal(&self, seq: SeqId) -> WindowForgotten {
        let next = Pos(self.n[seq.as_usize()]);
        WindowForgotten {
            seq,
            window: Window::Sliding(1),
            next,
            needed_from: Pos(0),
            forgotten_to: next,
        }
    }

    fn seqs(&self, seqs: Seqs) -> Vec<SeqId> {
        match seqs {
            Seqs::One(seq) => vec![seq],
            Seqs::All => (0..self.n_seqs()).map(SeqId).collect(),
        }
    }
}

impl Memory for Lengths {
    type Placement = ();
    type Undo = Vec<u32>;

    fn n_seqs(&self) -> u32 {
        self.n.len() as u32
    }

    fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let last = Pos(self.n.get(seq.as_usize())?.checked_sub(1)?);
        Some(PosRange::new(last, last))
    }

    fn split_policy(&self) -> SplitPolicy {
        self.split_policy
    }

    fn place(&self, _: &[UBatch]) -> Result<(), PlanError> {
        Ok(())
    }

    fn commit(&mut self, ubatch: &UBatch, (): &(), _: usize) -> Vec<u32> {
        let before = self.n.clone();
        for row in ubatch.rows() {
            for seq in row.seqs {
                self.n[seq.as_usize()] = row.pos.0 + 1;
            }
        }
        before
    }

    fn check_rollback(&self, _: &Vec<u32>, _: RowsWritten) -> Result<(), RollbackRefused> {
        Ok(())
    }

    fn rollback(&mut self, undo: Vec<u32>, _: RowsWritten) {
        self.n = undo;
    }

    fn inputs(&self, _: &UBatch, (): &(), _: usize, _: &mut MemoryInputs) {}

    fn check_remove(&self, seqs: Seqs, range: PosRange) -> Result<(), RemoveRefused> {
        let held = |seq: &SeqId| self.positions(*seq);
        let cut = self.seqs(seqs).into_iter().find(|seq| {
            held(seq).is_some_and(|has| range.first <= has.last && range.first > Pos(0))
        });
        cut.map_or(Ok(()), |seq| Err(self.refusal(seq).into()))
    }

    fn remove(&mut self, seqs: Seqs, range: PosRange) -> Result<Removed, RemoveRefused> {
        self.check_remove(seqs, range)?;
        let mut removed = Removed::default();
        for seq in self.seqs(seqs) {
            if self
                .positions(seq)
                .is_some_and(|has| range.contains(has.last))
            {
                self.n[seq.as_usize()] = 0;
                removed.n_cells += 1;
            }
        }
        Ok(removed)
    }

    fn check_copy(&self, from: SeqId, _: SeqId, range: PosRange) -> Result<(), CopyRefused> {
        let whole = self
            .positions(from)
            .is_none_or(|has| range.contains(has.last));
        match whole {
            true => Ok(()),
            false => Err(self.refusal(from).into()),
        }
    }

    fn copy(&mut self, from: SeqId, to: SeqId, range: PosRange) -> Result<Copied, CopyRefused> {
        self.check_copy(from, to, range)?;
        self.n[to.as_usize()] = self.n[from.as_usize()];
        Ok(Copied::default())
    }

    fn check_reposition(
        &self,
        seq: SeqId,
        range: PosRange,
        _: PosChange,
    ) -> Result<(), ShiftRefused> {
        let first = range.first;
        match self.positions(seq).is_none_or(|has| has.last < first) {
            true => Ok(()),
            false => Err(self.refusal(seq).into()),
        }
    }

    fn reposition(
        &mut self,
        seq: SeqId,
        range: PosRange,
        change: PosChange,
    ) -> Result<Shifted, ShiftRefused> {
        self.check_reposition(seq, range, change)?;
        Ok(Shifted::default())
    }

    fn n_holes(&self) -> u32 {
        0
    }

    fn compact(&mut self) -> Compacted {
        Compacted::default()
    }

    fn keep_only(&mut self, seq: SeqId) -> Result<Removed, NoSuchSequence> {
        for (other, n) in (0..).zip(&mut self.n) {
            if other != seq.0 {
                *n = 0;
            }
        }
        Ok(Removed::default())
    }

    fn contents(&self, _seqs: Seqs) -> Result<Contents, NoSuchSequence> {
        Ok(Contents::default())
    }

    fn check_restore(&self, _contents: &Contents, _: RestoreInto) -> Result<(), RestoreRefused> {
        // Nothing of it is ever saved.
        Err(RestoreRefused::NoStates)
    }

    fn restore(
        &mut self,
        contents: &Contents,
        into: RestoreInto,
    ) -> Result<Restored, RestoreRefused> {
        self.check_restore(contents, into)?;
        Ok(Restored::default())
    }

    fn clear(&mut self) -> Removed {
        self.n.fill(0);
        Removed::default()
    }
}

#[test]
fn d18_a_restoration_that_the_second_part_refuses_is_done_in_neither() {
    let config = UnifiedConfig {
        part: PartIdx(0),
        n_seqs: 2,
        n_cells: 8,
        streams: Streams::Shared,
        window: Window::Full,
        causality: Causality::Causal,
    };
    let first = Unified::new(config).unwrap();
    let second = Lengths::new(2, SplitPolicy::InOrder);
    let mut pair = Pair::new(first, second).unwrap();
    let before = pair.clone();
    let contents = pair.contents(Seqs::All).unwrap();
    let refused = pair.restore(&contents, RestoreInto::All).unwrap_err();
    assert_eq!(refused, RestoreRefused::NoStates);
    assert_eq!(pair, before);
}

#[test]
fn h5_d29_what_one_part_cannot_do_is_done_in_neither_whichever_comes_first() {
    let lengths = || Lengths::new(N_SEQS, SplitPolicy::InOrder);
    let attention = || part(0, 16, Window::Full, Streams::Shared);
    check_refusals(Pair::new(attention(), lengths()).unwrap());
    check_refusals(Pair::new(lengths(), attention()).unwrap());
}

fn check_refusals<A, B>(mut memory: Pair<A, B>)
where
    A: Memory + Clone + PartialEq + std::fmt::Debug,
    B: Memory + Clone + PartialEq + std::fmt::Debug,
{
    decode(&mut memory, &[(&[0], 6), (&[1], 2)]).unwrap();
    // H-7: only the end is known to both.
    assert_eq!(
        (has(&memory, 0), has(&memory, 1)),
        (Some((5, 5)), Some((1, 1)))
    );
    let before = memory.clone();
    assert!(remove(&mut memory, 0, Pos(3)..).is_err());
    assert!(remove(&mut memory, 0, Pos(2)..Pos(4)).is_err());
    let all = memory.remove(Seqs::All, PosRange::from(Pos(1)..));
    assert!(all.is_err());
    let copied = memory.copy(SeqId(0), SeqId(2), PosRange::from(..Pos(4)));
    assert!(copied.is_err());
    let shifted = memory.shift(SeqId(0), PosRange::from(Pos(2)..), PosDelta(3));
    assert!(matches!(shifted, Err(ShiftRefused::WindowForgotten(_))));
    let divided = memory.divide(SeqId(0), PosRange::ALL, Division::by(2));
    assert!(matches!(divided, Err(ShiftRefused::WindowForgotten(_))));
    assert_eq!(memory, before);
    let copied = memory.copy(SeqId(0), SeqId(2), PosRange::ALL).unwrap();
    assert_eq!(copied.n_tokens, 6);
    assert_eq!(remove(&mut memory, 0, Pos(0)..), Ok((6, 1)));
    assert_eq!((has(&memory, 0), has(&memory, 2)), (None, Some((5, 5))));
}

#[test]
fn the_stricter_policy_cuts_for_both() {
    use SplitPolicy::{InOrder, PerSequence};
    let equal = |order, keep_tail| SplitPolicy::EqualLength(EqualLength { order, keep_tail });
    let both = |a: SplitPolicy, b: SplitPolicy| {
        assert_eq!(a.and(b), b.and(a));
        a.and(b)
    };
    let (any, consecutive) = (SetOrder::Any, SetOrder::Consecutive);
    assert_eq!(both(InOrder, InOrder), Some(InOrder));
    assert_eq!(both(InOrder, equal(any, 2)), Some(equal(any, 2)));
    assert_eq!(both(InOrder, PerSequence), Some(PerSequence));
    assert_eq!(
        both(equal(any, 2), equal(consecutive, 1)),
        Some(equal(consecutive, 2))
    );
    assert_eq!(both(equal(consecutive, 0), PerSequence), Some(PerSequence));
    assert_eq!(both(equal(any, 1), PerSequence), None);

    let lengths = Lengths::new(N_SEQS, equal(any, 0));
    let mut memory = Pair::new(part(0, 16, Window::Full, Streams::Shared), lengths).unwrap();
    assert_eq!(memory.split_policy(), equal(any, 0));
    // One token of each, then two more of the longer sequence.
    let cells = decode(&mut memory, &[(&[0], 3), (&[1], 1)]).unwrap();
    assert_eq!(cells, [[0, 1, 2, 3]]);
    let cell = |i| memory.first().cell(CellIdx(i)).unwrap().seqs.first();
    assert_eq!([0, 1, 2].map(cell), [0, 1, 0].map(|s| Some(SeqId(s))));
}

#[test]
fn parts_that_do_not_suit_each_other_make_no_pair() {
    let tail = SplitPolicy::EqualLength(EqualLength {
        keep_tail: 1,
        ..EqualLength::default()
    });
    let pair = |a, b| Pair::new(a, b).unwrap_err();
    assert_eq!(
        pair(
            Lengths::new(2, SplitPolicy::InOrder),
            Lengths::new(3, SplitPolicy::InOrder)
        ),
        PairError::SeqCount {
            first: 2,
            second: 3
        }
    );
    assert_eq!(
        pair(
            Lengths::new(2, tail),
            Lengths::new(2, SplitPolicy::PerSequence)
        ),
        PairError::Split {
            first: tail,
            second: SplitPolicy::PerSequence
        }
    );
}
