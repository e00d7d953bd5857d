//! The contract suite of memories: random operations on any [`Memory`], against a naive oracle.
//!
//! The oracle keeps every token of every sequence that was not removed on purpose, and asks
//! [`Window`](kv_core::Window) who sees whom. So whatever cells a memory reuses, shares, copies or
//! gives back after a failure, the tokens that a row sees must be the oracle's, and attention over
//! the rows that it sees must be attention over the oracle's. A simulated backend holds one token
//! id for each row, and overwrites rows as a real one does; also the position that the row's key is
//! rotated to, which must be the one that its cell says, K and V themselves, and recurrent states
//! as the list of their tokens.
//!
//! Plans are undone exactly, edits are checked before they are done, states go through their bytes
//! and come back. Where a memory takes sources, what encoder-decoder models attend over, the oracle
//! keeps that of each sequence: the sequence's tokens see exactly its rows, copies share it, shifts
//! leave it, and it goes when all of the sequence does. Images are seen in full or refused
//! ([`Memory::takes_images`]). A memory may refuse what it does not have ([`Refusal::Unsupported`])
//! or for a reason of its own ([`Refusal::Custom`]), but then nothing may have changed, and
//! sequences can always be removed whole.
//!
//! Latents (MLA) and an indexer's keys are rows of cells of these same memories: what a layer
//! stores in a cell's rows is not the memory's business. So [`kinds::unified`] and
//! [`kinds::hybrid`] are also the memories of latent models; rows of latents themselves are tested
//! in `crates/engine/tests/edits.rs`.
//!
//! A memory runs the suite with one line, [`memory_contract!`](crate::memory_contract); it says
//! with [`MemoryUnderTest`] which token is in which cell.
//!
//! [`Refusal::Unsupported`]: kv_core::memory::Refusal::Unsupported
//! [`Refusal::Custom`]: kv_core::memory::Refusal::Custom

use std::collections::BTreeMap;
use std::fmt::Debug;

use kv_core::batch::{Batch, PositionRule, validate, validate_with};
use kv_core::cells::Cell;
use kv_core::memory::{
    Composite, Memory, MemoryInputs, Occupancy, OwnedRun, Recurrent, Refusal, Seqs, Unified,
    UnifiedConfig, invariants,
};
use kv_core::{CellIdx, GridPos, Pos, PosRange, SeqId, TokenId};
pub use proptest;
use proptest::strategy::Strategy;

mod attention;
pub mod batches;
mod cases;
mod edits;
mod exhaust;
pub mod kinds;
mod ops;
mod refusals;
mod saves;
mod sources;
pub mod states;
mod undo;
mod world;

pub use cases::run_cases;
pub use exhaust::{ExploredStates, every_sequence_of_operations};

use world::World;

/// A memory that shows the suite what it holds. It must have [`batches::N_SEQS`] sequences.
pub trait MemoryUnderTest: Memory<Slot: Debug> + Clone + PartialEq + Debug {
    /// Its attention parts, and what is in their cells.
    fn parts(&self) -> Vec<PartView>;

    /// The part of its sequences' sources, where it [takes any](Memory::takes_sources). Its window
    /// is [`Window::Source`](kv_core::Window::Source).
    fn source(&self) -> Option<PartView> {
        None
    }

    /// Its recurrent states, where it keeps them in a [`Recurrent`].
    fn recurrent(&self) -> Option<&Recurrent> {
        None
    }

    /// Recounts its own bookkeeping.
    ///
    /// # Errors
    /// The disagreement.
    fn check_bookkeeping(&self) -> Result<(), String> {
        Ok(())
    }
}

/// An attention part as the suite sees it: what it is like, and what is in its cells.
#[derive(Clone, Debug)]
pub struct PartView {
    config: UnifiedConfig,
    cells: BTreeMap<CellIdx, Cell>,
}

impl PartView {
    /// A part of this kind, with the cells in use.
    pub fn new(config: UnifiedConfig, cells: impl IntoIterator<Item = (CellIdx, Cell)>) -> Self {
        let cells = cells.into_iter().collect();
        Self { config, cells }
    }

    fn of(part: &Unified) -> Self {
        let all = (0..part.n_cells()).map(CellIdx);
        let in_use = all.filter_map(|at| Some((at, part.cell(at)?)));
        Self::new(*part.config(), in_use)
    }

    pub(crate) fn config(&self) -> &UnifiedConfig {
        &self.config
    }

    pub(crate) fn n_cells(&self) -> u32 {
        self.config.n_all_cells().unwrap()
    }

    pub(crate) fn cell(&self, at: CellIdx) -> Option<Cell> {
        self.cells.get(&at).cloned()
    }

    /// The cells of a sequence, with their positions.
    pub(crate) fn held(&self, seq: SeqId) -> Vec<(CellIdx, Pos)> {
        let own = self
            .cells
            .iter()
            .filter(|(_, cell)| cell.seqs.contains(seq));
        own.map(|(&at, cell)| (at, cell.pos)).collect()
    }

    /// Compares the view of this part with its cells.
    pub(crate) fn check_shown(&self, shown: &Occupancy) {
        let part = self.config.part;
        let shown = shown.parts.iter().find(|p| p.part == part).unwrap();
        assert_eq!(shown.n_cells, self.n_cells());
        let cell = |run: &OwnedRun, i| (run.first.offset(i), Pos(run.pos.0 + i), run.seqs.clone());
        let runs = shown.runs.iter();
        let cells = runs.flat_map(|run| (0..run.n_cells).map(move |i| cell(run, i)));
        let held = self.cells.iter();
        let held = held.map(|(&at, held)| (at, held.pos, held.seqs.clone()));
        assert!(cells.eq(held), "part {part} shows other cells than it has");
    }

    pub(crate) fn positions(&self, seq: SeqId) -> Option<PosRange> {
        let held = self.held(seq).into_iter();
        held.map(|(_, pos)| PosRange::new(pos, pos))
            .reduce(PosRange::hull)
    }
}

impl MemoryUnderTest for Unified {
    fn parts(&self) -> Vec<PartView> {
        vec![PartView::of(self)]
    }

    fn check_bookkeeping(&self) -> Result<(), String> {
        invariants::check(self)
    }
}

impl MemoryUnderTest for Composite {
    fn parts(&self) -> Vec<PartView> {
        self.parts().iter().map(PartView::of).collect()
    }

    fn source(&self) -> Option<PartView> {
        self.source().map(PartView::of)
    }

    fn recurrent(&self) -> Option<&Recurrent> {
        self.states()
    }

    fn check_bookkeeping(&self) -> Result<(), String> {
        let mut parts = self.parts().iter().chain(self.source());
        parts.try_for_each(invariants::check)
    }
}

/// One without attention parts.
impl MemoryUnderTest for Recurrent {
    fn parts(&self) -> Vec<PartView> {
        Vec::new()
    }

    fn recurrent(&self) -> Option<&Recurrent> {
        Some(self)
    }
}

/// Random operations on text. `source_file` is where cases that fail are kept.
pub fn random_operations<M: MemoryUnderTest>(
    name: &'static str,
    source_file: &'static str,
    memories: impl Strategy<Value = M>,
) {
    run_operations(name, source_file, memories, ops::ops());
}

/// Random operations also on tokens of images: rows and columns come along whatever is done, and
/// who sees whom at one position is a matter of reading order.
pub fn random_operations_on_images<M: MemoryUnderTest>(
    name: &'static str,
    source_file: &'static str,
    memories: impl Strategy<Value = M>,
) {
    run_operations(name, source_file, memories, ops::ops_with_images());
}

fn run_operations<M: MemoryUnderTest>(
    name: &'static str,
    source_file: &'static str,
    memories: impl Strategy<Value = M>,
    ops: impl Strategy<Value = Vec<ops::Op>>,
) {
    run_cases(name, source_file, &(memories, ops), |(memory, ops)| {
        let mut world = World::new(memory);
        for op in &ops {
            world.apply(op);
            world.check();
        }
    });
}

/// A memory takes one token after the other as long as it is asked to, where it can hold them or
/// evicts older ones, and can be emptied: so refusing everything is no way to pass.
pub fn takes_tokens<M: MemoryUnderTest>(mut memory: M) {
    assert_eq!(memory.n_seqs(), batches::N_SEQS);
    let empty = memory.clone();
    let mut inputs = MemoryInputs::default();
    for seq in (0..batches::N_SEQS).map(SeqId) {
        if memory.takes_sources() {
            sources::take(&mut memory, seq);
        }
        let batch = batches::batch(&[(1 << seq.0, false)], |seq| {
            Some(memory.positions(seq)?.last)
        });
        let batch = batch.unwrap();
        let valid = validate(&batch, &batches::RULES, |seq| memory.positions(seq)).unwrap();
        let mut steps = memory.begin(&valid, 1).unwrap();
        assert_eq!(steps.next(&mut inputs).map(|u| u.n_tokens()), Some(1));
        assert!(steps.next(&mut inputs).is_none());
        let first = PosRange::new(Pos(0), Pos(0));
        assert_eq!(memory.positions(seq), Some(first));
    }
    assert_eq!(plans_an_image(&memory), memory.takes_images());
    memory.remove(Seqs::One(SeqId(0)), PosRange::ALL).unwrap();
    assert_eq!(memory.positions(SeqId(0)), None);
    memory.clear();
    assert_eq!(memory, empty);
}

/// True if the memory has a place for a token of an image; if not, it says that it takes none.
fn plans_an_image<M: MemoryUnderTest>(memory: &M) -> bool {
    let seq = SeqId(0);
    let pos = memory.positions(seq).map_or(Pos(0), |has| has.last);
    let mut batch = Batch::new();
    let grid = GridPos {
        y: pos.0,
        x: pos.0 + 1,
    };
    batch
        .push_token(TokenId(0))
        .in_sequence(seq)
        .at_grid(pos, grid);
    let positions = |seq| memory.positions(seq);
    let valid = validate_with(&batch, &batches::RULES, PositionRule::Grid, positions).unwrap();
    match memory.plan(&valid, 1) {
        Ok(_) => true,
        Err(refusal) => {
            assert_eq!(refusal, Refusal::TakesNoImages { seq, pos, grid });
            false
        }
    }
}

/// Runs the contract suite of memories on the memories of a strategy, in a module of this name, and
/// shows that one with room for some tokens takes them. A single memory is `Just(memory)`.
///
/// ```
/// use kv_contract::memory::kinds;
///
/// kv_contract::memory_contract!(unified, kinds::unified(), roomy: kinds::roomy());
/// ```
#[macro_export]
macro_rules! memory_contract {
    ($name:ident, $memories:expr, roomy: $roomy:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn takes_tokens() {
                $crate::memory::takes_tokens($roomy);
            }

            #[test]
            fn shows_what_a_memory_without_limits_would() {
                $crate::memory::random_operations(stringify!($name), file!(), $memories);
            }

            #[test]
            fn images_are_seen_as_in_a_memory_without_limits() {
                let name = concat!("images, ", stringify!($name));
                $crate::memory::random_operations_on_images(name, file!(), $memories);
            }
        }
    };
}
