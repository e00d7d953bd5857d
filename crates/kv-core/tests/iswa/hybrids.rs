//! Attention parts with recurrent states, which can do less: what one refuses is done in neither.

use super::*;

fn states(n_seqs: u32) -> Recurrent {
    Recurrent::new(RecurrentConfig::new(n_seqs)).unwrap()
}

fn hybrid(n_cells: u32) -> Composite {
    let attention = part(0, n_cells, Window::Full, Streams::Shared);
    Composite::from_parts(vec![attention], Some(states(N_SEQS))).unwrap()
}

#[test]
fn d18_a_restoration_that_the_second_part_refuses_is_done_in_neither() {
    let mut memory = hybrid(8);
    decode(&mut memory, &[(&[0], 2)]).unwrap();
    let before = memory.clone();
    // The states were not saved.
    let snapshot = memory.parts()[0].snapshot(Seqs::All).unwrap();
    let refused = memory.restore(&snapshot, RestoreInto::All).unwrap_err();
    assert_eq!(refused, Refusal::NoStates);
    assert_eq!(memory, before);
}

#[test]
fn h5_d29_what_one_part_cannot_do_is_done_in_neither() {
    let mut memory = hybrid(16);
    decode(&mut memory, &[(&[0], 6), (&[1], 2)]).unwrap();
    assert_eq!(
        (has(&memory, 0), has(&memory, 1)),
        (Some((0, 5)), Some((0, 1)))
    );
    let before = memory.clone();
    assert!(remove(&mut memory, 0, Pos(3)..).is_err());
    assert!(remove(&mut memory, 0, Pos(2)..Pos(4)).is_err());
    let all = memory.remove(Seqs::All, PosRange::from(Pos(1)..));
    assert!(all.is_err());
    let copied = memory.copy(SeqId(0), SeqId(2), PosRange::from(..Pos(4)));
    assert!(copied.is_err());
    let shifted = memory.shift(SeqId(0), PosRange::from(Pos(2)..), PosDelta(3));
    assert!(matches!(shifted, Err(Refusal::StateMovesWhole { .. })));
    let divided = memory.divide(SeqId(0), PosRange::ALL, Division::by(2));
    assert!(matches!(divided, Err(Refusal::StateMovesWhole { .. })));
    assert_eq!(memory, before);
    let copied = memory.copy(SeqId(0), SeqId(2), PosRange::ALL).unwrap();
    assert_eq!(copied.n_tokens, 6);
    assert_eq!(remove(&mut memory, 0, Pos(0)..).unwrap().0, 6);
    assert_eq!((has(&memory, 0), has(&memory, 2)), (None, Some((0, 5))));
}

#[test]
fn the_stricter_policy_cuts_for_both() {
    let mut config = *part(0, 8, Window::Full, Streams::Shared).config();
    config.causality = Causality::NonCausal;
    let whole = Unified::new(config).unwrap();
    let memory = Composite::from_parts(vec![whole], Some(states(N_SEQS))).unwrap();
    assert_eq!(memory.split_policy(), SplitPolicy::WholeSequences);
}

#[test]
fn parts_that_do_not_suit_each_other_make_no_memory() {
    let config = UnifiedConfig {
        n_seqs: 2,
        ..*part(0, 8, Window::Full, Streams::Shared).config()
    };
    let two = Unified::new(config).unwrap();
    assert_eq!(
        Composite::from_parts(vec![two], Some(states(3))),
        Err(MemoryConfigError::SeqCountsDiffer {
            first: 2,
            second: 3
        })
    );
    let nothing = Composite::from_parts(Vec::new(), None);
    assert_eq!(nothing, Err(MemoryConfigError::SeqCount { n_seqs: 0 }));
}
