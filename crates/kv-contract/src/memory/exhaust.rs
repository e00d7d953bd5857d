//! Every short sequence of operations on a small memory, not random ones: a bounded model check.
//!
//! From an empty memory, each of a fixed list of operations ([`operations`]) is applied to each
//! state that was reached, up to a number of operations. Each result is compared with the oracle.
//! Two states are one where the memory, the rows of its backend, the model and the saved state
//! differ in the numbers of tokens alone: what can be reached from one can be reached from the
//! other. So all that no operation repeats is looked at once.
//!
//! Three sequences are used of those that the memory has. Operations are those that have made
//! trouble: batches that fail in each ubatch, coupled sequences, edits of each end, states that are
//! written half.

use std::collections::HashMap;
use std::fmt::Write;
use std::hash::{BuildHasher, RandomState};

use kv_core::memory::{Division, PosChange, RestoreInto, RowsWritten, Seqs};
use kv_core::{Pos, PosDelta, SeqId};

use super::MemoryUnderTest;
use super::batches::RelativeRange;
use super::ops::{Attempt, Op};
use super::saves::Device;
use super::world::World;

/// The size of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExploredStates {
    /// Different states.
    pub n_states: usize,
    /// Operations that were applied and checked.
    pub n_operations: usize,
}

/// Applies every sequence of at most `depth` operations to an empty memory, and compares each
/// state with the oracle. A panic names the operations that lead to it.
pub fn every_sequence_of_operations<M: MemoryUnderTest>(memory: M, depth: u32) -> ExploredStates {
    let mut search = Search {
        operations: operations(),
        seen: HashMap::new(),
        hashers: [RandomState::new(), RandomState::new()],
        path: Vec::new(),
        n_operations: 0,
    };
    search.expand(&World::new(memory), depth);
    ExploredStates {
        n_states: search.seen.len(),
        n_operations: search.n_operations,
    }
}

/// The operations that are tried in each state.
fn operations() -> Vec<Op> {
    let [a, b, c] = [0, 1, 2].map(SeqId);
    let alone = |seq: SeqId| (1 << seq.0, false);
    let attempt = |n_ubatch, failure| Attempt {
        n_ubatch,
        failure,
        n_source: 1,
    };
    let whole = attempt(2, None);
    let mut operations = Vec::new();
    // One token and two, of one sequence, of several, and of coupled ones.
    for entries in [
        vec![alone(a)],
        vec![alone(b)],
        vec![alone(a), alone(a)],
        vec![alone(b), alone(c)],
        vec![(0b011, false)],
        vec![(0b111, false), (0b111, false)],
    ] {
        operations.push(Op::Batch(entries, whole));
    }
    // The same, cut in two and failing at each half; failing whole.
    let two = vec![alone(a), alone(a)];
    for failure in [
        None,
        Some((0, RowsWritten::No)),
        Some((0, RowsWritten::Perhaps)),
        Some((1, RowsWritten::No)),
        Some((1, RowsWritten::Perhaps)),
    ] {
        operations.push(Op::Batch(two.clone(), attempt(1, failure)));
    }
    let failing = attempt(2, Some((0, RowsWritten::Perhaps)));
    operations.push(Op::Batch(vec![alone(a), alone(b)], failing));

    let ranges = [
        RelativeRange::All,
        RelativeRange::LastFrom(1),
        RelativeRange::FirstTo(1),
        RelativeRange::Middle { back: 2, len: 1 },
    ];
    for range in ranges {
        let seqs = Seqs::One(a);
        operations.push(Op::Remove { seqs, range });
    }
    operations.push(Op::Remove {
        seqs: Seqs::One(b),
        range: RelativeRange::All,
    });
    for (from, to, range) in [
        (a, b, RelativeRange::All),
        (b, a, RelativeRange::All),
        (b, c, RelativeRange::All),
        (a, b, RelativeRange::FirstTo(1)),
    ] {
        operations.push(Op::Copy { from, to, range });
    }
    let divide = PosChange::Divide(Division {
        by: 2,
        origin: Pos(0),
    });
    for (range, change) in [
        (RelativeRange::All, PosChange::Shift(PosDelta(1))),
        (RelativeRange::LastFrom(1), PosChange::Shift(PosDelta(1))),
        (RelativeRange::LastFrom(1), PosChange::Shift(PosDelta(-1))),
        (RelativeRange::All, divide),
    ] {
        let seq = a;
        operations.push(Op::Reposition { seq, range, change });
    }
    let seq = a;
    operations.push(Op::ContextShift { seq, n_keep: 1 });
    operations.push(Op::Compact);
    operations.push(Op::KeepOnly(a));
    operations.push(Op::Clear);
    operations.extend([Seqs::One(a), Seqs::All].map(Op::Save));
    let one = |to| RestoreInto::One { from: a, to };
    let behind = RestoreInto::Behind { from: a, to: b };
    for (into, device) in [
        (RestoreInto::All, Device::Works),
        (RestoreInto::All, Device::Fails),
        (one(a), Device::Works),
        (one(b), Device::Works),
        (one(b), Device::Fails),
        (behind, Device::Works),
    ] {
        operations.push(Op::Restore { into, device });
    }
    operations
}

/// A depth-first search. It keeps names of states, and the worlds of one path alone.
struct Search {
    operations: Vec<Op>,
    /// By name of a state: how many operations were tried behind it.
    seen: HashMap<[u64; 2], u32>,
    /// Two hashes of a state are its name.
    hashers: [RandomState; 2],
    /// Numbers of the operations that lead to the present state.
    path: Vec<usize>,
    n_operations: usize,
}

impl Search {
    fn expand<M: MemoryUnderTest>(&mut self, world: &World<M>, depth: u32) {
        let text = world.canonical();
        let name = self.hashers.each_ref().map(|h| h.hash_one(&text));
        let tried = self.seen.entry(name).or_default();
        let is_known = *tried > depth;
        if is_known {
            return;
        }
        *tried = depth + 1;
        if depth == 0 {
            return;
        }
        for number in 0..self.operations.len() {
            self.path.push(number);
            let mut next = world.clone();
            {
                let _told = TellsPath {
                    operations: &self.operations,
                    path: &self.path,
                };
                next.apply(&self.operations[number]);
                next.check();
            }
            self.n_operations += 1;
            self.expand(&next, depth - 1);
            self.path.pop();
        }
    }
}

/// Prints the operations of a path when a check behind them panics.
struct TellsPath<'a> {
    operations: &'a [Op],
    path: &'a [usize],
}

impl Drop for TellsPath<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut text = String::from("after these operations:\n");
            for &number in self.path {
                let _ = writeln!(text, "  {:?}", self.operations[number]);
            }
            eprint!("{text}");
        }
    }
}
