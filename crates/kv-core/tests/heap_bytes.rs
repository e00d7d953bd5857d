//! What cells say that they take on the heap is what they do take.

#![allow(clippy::unwrap_used)] // a test

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell as Counter;

use kv_core::batch::{Batch, BatchRules, validate};
use kv_core::cells::{Cell, KvCells};
use kv_core::memory::{Memory, MemoryInputs, Streams, Unified, UnifiedConfig};
use kv_core::{Causality, CellIdx, GridPos, PartIdx, Pos, SeqId, SeqSet, TokenId, Window};

struct CountingHeap;

thread_local! {
    /// Bytes of this thread alone: the one that runs the tests allocates meanwhile. What another
    /// thread allocated may be freed here, so the number wraps.
    static IN_USE: Counter<usize> = const { Counter::new(0) };
}

fn in_use() -> usize {
    IN_USE.get()
}

// SAFETY: everything is the system allocator's, and counted.
unsafe impl GlobalAlloc for CountingHeap {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.set(in_use().wrapping_add(layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.set(in_use().wrapping_sub(layout.size()));
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingHeap = CountingHeap;

const N_CELLS: u32 = 4096;
const N_SEQS: u32 = 64;

/// Cells that `fill` has filled: what they say that they take, and what they do take.
fn said_and_taken(fill: impl FnOnce(&mut KvCells)) -> (usize, usize) {
    let before = in_use();
    let mut cells = KvCells::new(0..N_CELLS, 0..N_SEQS);
    fill(&mut cells);
    let taken = in_use().wrapping_sub(before);
    (cells.heap_bytes(), taken)
}

/// Gives cell `i` to `seqs` at position `pos`.
fn insert(cells: &mut KvCells, i: u32, pos: u32, seqs: &[u32]) {
    let seqs: SeqSet = seqs.iter().copied().map(SeqId).collect();
    cells.insert(CellIdx(i), &Cell::new(Pos(pos), seqs));
}

/// The same for a memory whose window has recycled cells.
fn memory_that_forgot() -> (usize, usize) {
    let config = UnifiedConfig {
        part: PartIdx(0),
        n_seqs: 8,
        n_cells: 16,
        streams: Streams::PerSequence,
        window: Window::Sliding(4),
        causality: Causality::Causal,
    };
    let rules = BatchRules {
        n_batch: 64,
        n_seqs: 8,
        n_vocab: 1,
        n_embd: 1,
    };
    let before = in_use();
    let mut memory = Unified::new(config).unwrap();
    {
        let batch = Batch::prompt(SeqId(7), (0..64).map(|_| TokenId(0)));
        let batch = validate(&batch, &rules, |_| None).unwrap();
        let mut steps = memory.begin(&batch, 8).unwrap();
        let mut inputs = MemoryInputs::default();
        while steps.next(&mut inputs).is_some() {}
    }
    let taken = in_use().wrapping_sub(before);
    assert!(memory.positions(SeqId(7)).unwrap().first > Pos(0));
    (memory.bookkeeping_bytes(), taken)
}

#[test]
fn cells_say_how_many_bytes_they_take() {
    let (said, taken) = said_and_taken(|_| {});
    assert_eq!(said, taken, "no cell is used");
    let (said, taken) = said_and_taken(|cells| {
        for i in 0..N_CELLS {
            insert(cells, i, i / N_SEQS, &[i % N_SEQS]);
        }
    });
    assert_eq!(said, taken, "each cell is a run");
    let (said, taken) = said_and_taken(|cells| {
        (0..N_CELLS).for_each(|i| insert(cells, i, i, &[0]));
    });
    assert_eq!(said, taken, "all cells are a run");
    // Room for positions and sets doubles up to the number of cells, and not beyond it.
    let (empty, _) = said_and_taken(|_| {});
    let per_cell = (said - empty) / N_CELLS as usize;
    assert_eq!(per_cell, 8, "a position and a set");
    let (said, taken) = said_and_taken(|cells| {
        for i in 0..N_CELLS {
            let first = i % (N_SEQS - 1);
            insert(cells, i, i, &[first, first + 1]);
        }
    });
    // The table of sets is a hash map, which has some bytes of its own.
    assert!(said.abs_diff(taken) <= 64, "sets: {said}, not {taken}");
    let fill = |cells: &mut KvCells, n_images: u32| {
        for i in 0..N_CELLS {
            insert(cells, i, i, &[0]);
            if i < n_images {
                cells.set_grid(CellIdx(i), GridPos { y: i, x: 0 });
            }
        }
    };
    let (text, _) = said_and_taken(|cells| fill(cells, 0));
    let (said, taken) = said_and_taken(|cells| fill(cells, 2048));
    // Nodes of a tree are half full or more.
    let (said, taken) = (said - text, taken - text);
    let is_near = taken / 2 < said && said < taken * 3 / 2;
    assert!(is_near, "images: {said}, not {taken}");
    let (said, taken) = memory_that_forgot();
    assert_eq!(said, taken, "a memory with a window");
}
