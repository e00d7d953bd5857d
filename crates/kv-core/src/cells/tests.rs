//! Tests of [`KvCells`]: whose cells are whose, what is freed, and the room that records take.

use super::*;

fn set(ids: &[u32]) -> SeqSet {
    ids.iter().copied().map(SeqId).collect()
}

/// Positions and sequences of all cells.
fn draw(cells: &KvCells) -> String {
    let cell = |i| match cells.get(CellIdx(i)) {
        Some(Cell { pos, seqs, .. }) => format!("{pos}:{seqs}"),
        None => ".".to_owned(),
    };
    (0..cells.n_cells()).map(cell).collect::<Vec<_>>().join(" ")
}

#[test]
fn c9_c11_worked_example_of_cells() {
    let mut cells = KvCells::new(0..6, 0..2);
    cells.insert(CellIdx(0), &Cell::new(Pos(0), set(&[0])));
    cells.insert(CellIdx(1), &Cell::new(Pos(1), set(&[0])));
    let shared = CellRun {
        cell: CellIdx(0),
        pos: Pos(0),
        len: 1,
    };
    cells.add_run(shared, SeqId(1));
    assert_eq!(draw(&cells), "0:{0,1} 1:{0} . . . .");
    let (freed, _) = cells.remove(SeqId(0), PosRange::from(Pos(0)..Pos(1)));
    assert_eq!((freed.n_tokens, freed.n_cells), (1, 0));
    assert_eq!(draw(&cells), "0:{1} 1:{0} . . . .");
    assert_eq!(
        cells.positions(SeqId(0)),
        Some(PosRange::new(Pos(1), Pos(1)))
    );
    let taken = cells.take(CellIdx(0));
    assert_eq!(taken, Some(Cell::new(Pos(0), set(&[1]))));
    assert_eq!(cells.positions(SeqId(1)), None);
    assert_eq!(cells.n_used(), 1);
}

#[test]
fn cells_differ_by_numbers_sequences_positions_and_images() {
    let text = |seq| {
        let mut cells = KvCells::new(0..4, 0..2);
        cells.insert(CellIdx(0), &Cell::new(Pos(0), set(&[seq])));
        cells
    };
    assert_eq!(text(0), text(0));
    assert_ne!(text(0), text(1));
    assert_ne!(text(0), KvCells::new(0..4, 0..2));
    assert_ne!(KvCells::new(0..4, 0..2), KvCells::new(4..8, 0..2));
    assert_ne!(KvCells::new(0..4, 0..2), KvCells::new(0..4, 2..4));
    let mut image = text(0);
    image.set_grid(CellIdx(0), GridPos { y: 0, x: 1 });
    assert_ne!(image, text(0));
}

#[test]
fn runs_of_owners_end_with_sequences_and_positions() {
    let mut cells = KvCells::new(8..16, 0..3);
    let owners: [&[u32]; 7] = [&[0], &[0], &[0, 1], &[0, 1], &[], &[0, 1], &[1]];
    for (i, owners) in (0..).zip(owners) {
        cells.insert(CellIdx(8 + i), &Cell::new(Pos(i), set(owners)));
    }
    // The next position of the same sequences behind a free cell is not the next cell.
    cells.insert(CellIdx(13), &Cell::new(Pos(4), set(&[0, 1])));
    // The same sequence, but a position is left out.
    cells.insert(CellIdx(15), &Cell::new(Pos(9), set(&[1])));
    let run = |first, n_cells, pos, seqs: &[u32]| OwnedRun {
        first: CellIdx(first),
        n_cells,
        pos: Pos(pos),
        seqs: set(seqs),
    };
    let expected = [
        run(8, 2, 0, &[0]),
        run(10, 2, 2, &[0, 1]),
        run(13, 1, 4, &[0, 1]),
        run(14, 1, 6, &[1]),
        run(15, 1, 9, &[1]),
    ];
    assert_eq!(cells.owned_runs(), expected);
    let mut counted = Vec::new();
    cells.count_by_owners(|seqs, n| counted.push((seqs.clone(), n)));
    assert_eq!(counted, [(set(&[0, 1]), 3), (set(&[0]), 2), (set(&[1]), 2)]);
}

#[test]
fn a_token_takes_the_place_of_what_was_in_its_cell() {
    let mut cells = KvCells::new(0..2, 0..3);
    cells.insert(CellIdx(0), &Cell::new(Pos(0), set(&[0, 1])));
    cells.set_grid(CellIdx(0), GridPos { y: 1, x: 1 });
    cells.insert(CellIdx(0), &Cell::new(Pos(3), set(&[1, 2])));
    let mut fresh = KvCells::new(0..2, 0..3);
    fresh.insert(CellIdx(0), &Cell::new(Pos(3), set(&[1, 2])));
    assert_eq!(cells, fresh);
    // The set that no cell has any more is forgotten.
    let shared: Vec<_> = cells
        .sets
        .shared()
        .map(|(seqs, n)| (seqs.clone(), n))
        .collect();
    assert_eq!(shared, [(set(&[1, 2]), 1)]);
}

#[test]
fn a_run_is_added_to_free_cells_and_shares_used_ones() {
    let mut cells = KvCells::new(0..8, 0..3);
    let run = CellRun {
        cell: CellIdx(4),
        pos: Pos(2),
        len: 2,
    };
    cells.add_run(run, SeqId(1));
    cells.add_run(run, SeqId(2));
    assert_eq!(draw(&cells), ". . . . 2:{1,2} 3:{1,2} . .");
    assert_eq!((cells.n_used(), cells.sets.shared().count()), (2, 1));
    let (freed, _) = cells.remove(SeqId(1), PosRange::ALL);
    assert_eq!((freed.n_tokens, freed.n_cells, freed.lowest), (2, 0, None));
    assert_eq!(cells.sets.shared().count(), 0);
    let (freed, lost) = cells.remove(SeqId(2), PosRange::ALL);
    assert_eq!((freed.n_cells, freed.lowest), (2, Some(CellIdx(4))));
    assert_eq!(lost, [run]);
}

#[test]
fn room_doubles_with_the_cells_in_use() {
    let mut cells = KvCells::new(0..20, 0..1);
    let mut room = Vec::new();
    for i in 0..20 {
        cells.insert(CellIdx(i), &Cell::new(Pos(i), set(&[0])));
        assert_eq!(cells.pos.capacity(), cells.pos.len());
        assert_eq!(cells.set_ids.capacity(), cells.pos.len());
        room.push(cells.pos.len());
    }
    let doubled = (1..=20usize).map(|n| n.next_power_of_two().min(20));
    assert_eq!(room, doubled.collect::<Vec<_>>());
}

#[test]
fn what_is_freed_adds_up() {
    let freed = |n_tokens, n_cells, lowest: Option<u32>| FreedCells {
        n_tokens,
        n_cells,
        lowest: lowest.map(CellIdx),
    };
    let both = freed(3, 1, Some(7)).and(freed(5, 2, Some(4)));
    assert_eq!(both, freed(8, 3, Some(4)));
    assert_eq!(both.and(freed(1, 0, None)), freed(9, 3, Some(4)));
}

#[test]
fn a_free_cell_has_no_owner() {
    let mut cells = KvCells::new(0..2, 0..2);
    cells.insert(CellIdx(0), &Cell::new(Pos(0), set(&[0])));
    cells.set_grid(CellIdx(1), GridPos { y: 0, x: 0 });
    assert!(cells.grids().is_empty());
    assert!(!cells.is_shared(CellIdx(1)));
    assert!(!cells.all_seqs(CellIdx(1), |_, _| true));
    assert_eq!(cells.first_seq_of(CellIdx(1)), None);
    assert_eq!(cells.take(CellIdx(1)), None);
    assert_eq!(cells.n_used(), 1);
}

#[test]
fn cells_and_sequences_of_other_streams_are_left_alone() {
    let mut cells = KvCells::new(8..12, 3..4);
    cells.insert(CellIdx(2), &Cell::new(Pos(0), set(&[3])));
    cells.insert(CellIdx(12), &Cell::new(Pos(0), set(&[3])));
    cells.insert(CellIdx(9), &Cell::new(Pos(0), set(&[1])));
    cells.insert(CellIdx(9), &Cell::new(Pos(0), set(&[4])));
    let run = CellRun {
        cell: CellIdx(9),
        pos: Pos(0),
        len: 1,
    };
    cells.add_run(run, SeqId(4));
    let lost = cells.remove(SeqId(4), PosRange::ALL);
    assert_eq!(lost, (FreedCells::default(), Vec::new()));
    assert_eq!(cells, KvCells::new(8..12, 3..4));
    // Of a token's sequences those of this stream count.
    cells.insert(CellIdx(9), &Cell::new(Pos(0), set(&[3, 4])));
    assert_eq!(cells.get(CellIdx(9)), Some(Cell::new(Pos(0), set(&[3]))));
    cells.take(CellIdx(9));
    assert_eq!(cells.seqs().collect::<Vec<_>>(), [SeqId(3)]);
    assert_eq!(cells.get(CellIdx(12)), None);
}
