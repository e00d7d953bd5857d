//! Batches: the rules of validation and the worked examples of the splitters.
#![allow(clippy::unwrap_used, clippy::panic)] // a test

use kv_core::batch::{Batch, BatchError, BatchRules, SplitPolicy, ValidBatch, validate};
use kv_core::{Pos, PosRange, SeqId, SeqSet, TokenId};

const RULES: BatchRules = BatchRules {
    n_batch: 16,
    n_seqs: 8,
    n_vocab: 100,
    n_embd: 2,
};

fn set(ids: &[u32]) -> SeqSet {
    ids.iter().copied().map(SeqId).collect()
}

/// A batch of entries `(sequences, position)`.
fn batch(entries: &[(&[u32], Option<u32>)]) -> Batch {
    let mut batch = Batch::new();
    for &(seqs, pos) in entries {
        let entry = batch.push_token(TokenId(1)).in_sequences(&set(seqs));
        if let Some(pos) = pos {
            entry.at(Pos(pos));
        }
    }
    batch
}

fn auto(ids: &[u32]) -> (&[u32], Option<u32>) {
    (ids, None)
}

fn at(ids: &[u32], pos: u32) -> (&[u32], Option<u32>) {
    (ids, Some(pos))
}

/// The contents of the memory of each sequence: `(sequence, first, last)`.
type SeqExtents = [(u32, u32, u32)];

fn check(entries: &[(&[u32], Option<u32>)], held: &SeqExtents) -> Result<Vec<u32>, BatchError> {
    let positions = |seq: SeqId| {
        let found = held.iter().find(|h| h.0 == seq.0);
        found.map(|h| PosRange::new(Pos(h.1), Pos(h.2)))
    };
    let valid = validate(&batch(entries), &RULES, positions)?;
    Ok(valid.entries().iter().map(|e| e.pos.0).collect())
}

fn explicit(entries: &[(u32, u32)], held: &SeqExtents) -> Result<Vec<u32>, BatchError> {
    let ids: Vec<[u32; 1]> = entries.iter().map(|e| [e.0]).collect();
    let entries: Vec<(&[u32], Option<u32>)> = ids
        .iter()
        .zip(entries)
        .map(|(id, e)| (&id[..], Some(e.1)))
        .collect();
    check(&entries, held)
}

fn text<T: std::fmt::Debug>(result: Result<T, BatchError>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn b13_b14_the_number_of_entries_is_limited() {
    assert_eq!(text(check(&[], &[])), "the batch has no entries");
    let many = Batch::prompt(SeqId(0), (0..17).map(TokenId));
    let error = validate(&many, &RULES, |_| None);
    assert_eq!(text(error), "the batch has 17 entries; one call takes 16");
}

#[test]
fn b18_b19_b33_tokens_and_sequences_are_in_range() {
    let mut batch = Batch::new();
    batch.push_token(TokenId(100));
    let error = validate(&batch, &RULES, |_| None);
    assert_eq!(
        text(error),
        "entry 0: token 100 is not below the vocabulary's 100"
    );
    for seq in [8, 4095, 4096, u32::MAX] {
        let mut batch = Batch::new();
        batch.push_token(TokenId(1));
        batch.push_token(TokenId(1)).in_sequence(SeqId(seq));
        let error = validate(&batch, &RULES, |_| None).unwrap_err();
        assert_eq!(
            error,
            BatchError::SeqOutOfRange {
                entry: 1,
                seq: SeqId(seq),
                n_seqs: 8
            }
        );
    }
    assert_eq!(
        text(check(&[(&[], None)], &[])),
        "entry 0 belongs to no sequence"
    );
}

#[test]
fn b17_tokens_and_embeddings_are_not_mixed() {
    let mut batch = Batch::new();
    batch.push_token(TokenId(1));
    batch.push_embedding(&[1.0, 2.0]);
    assert_eq!(
        text(validate(&batch, &RULES, |_| None)),
        "entry 1 is an embedding, but the batch began with a token: it must be all the same"
    );
    let mut batch = Batch::new();
    batch.push_embedding(&[1.0, 2.0, 3.0]);
    let error = validate(&batch, &RULES, |_| None);
    assert_eq!(
        text(error),
        "entry 0: an embedding of 3 values; the model takes 2"
    );
}

#[test]
fn b20_d38_embedding_rows_follow_their_entries() {
    let mut batch = Batch::new();
    for (i, seq) in [0u32, 1, 0, 1].into_iter().enumerate() {
        batch
            .push_embedding(&[i as f32, 10.0 + i as f32])
            .in_sequence(SeqId(seq))
            .with_output();
    }
    let valid = validate(&batch, &RULES, |_| None).unwrap();
    let ubatches = SplitPolicy::InOrder.split(&valid, 3).unwrap();
    assert_eq!(ubatches[0].embeddings, [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]);
    assert_eq!(ubatches[1].embeddings, [3.0, 13.0]);
    assert!(ubatches[0].tokens.is_empty());
}

#[test]
fn b2_automatic_positions_follow_the_batch_and_the_memory() {
    assert_eq!(
        check(&[auto(&[0]), auto(&[1]), auto(&[0])], &[(0, 0, 4)]).unwrap(),
        [5, 0, 6]
    );
    assert_eq!(check(&[(&[0], Some(7)), auto(&[0])], &[]).unwrap(), [7, 8]);
    // All sequences of an entry advance, so they can go on alone.
    assert_eq!(
        check(&[auto(&[0, 1]), auto(&[1]), auto(&[0])], &[]).unwrap(),
        [0, 1, 1]
    );
    let at_the_end = [(0, 0, i32::MAX as u32)];
    assert_eq!(
        text(check(&[auto(&[0])], &at_the_end)),
        "entry 0: position 2147483648 is beyond 2147483647"
    );
}

#[test]
fn b28_b31_positions_are_consecutive() {
    assert!(explicit(&[(0, 0), (0, 1), (0, 2)], &[]).is_ok());
    assert!(explicit(&[(0, 7), (0, 8)], &[]).is_ok());
    assert_eq!(
        text(explicit(&[(0, 5)], &[(0, 0, 3)])),
        "entry 0: sequence 0 is remembered up to 3, so 5 cannot follow"
    );
    assert_eq!(
        text(explicit(&[(0, 0), (0, 2)], &[])),
        "entry 1: sequence 0 jumps from position 0 to 2"
    );
    assert!(explicit(&[(0, 0), (0, 0), (0, 1)], &[]).is_ok());
    assert_eq!(
        text(explicit(&[(0, 1), (0, 0)], &[])),
        "entry 1: sequence 0 goes back from position 1 to 0"
    );
    let interleaved = [(0, 4), (0, 5), (1, 0), (1, 1), (0, 6), (1, 2), (1, 3)];
    assert!(explicit(&interleaved, &[(0, 0, 3)]).is_ok());
    let repeated = [(0, 4), (0, 5), (1, 0), (1, 1), (0, 6), (1, 1)];
    assert!(explicit(&repeated, &[(0, 0, 3)]).is_ok());
}

#[test]
fn b30_coupled_sequences_have_the_same_positions() {
    let both: &[(&[u32], Option<u32>)] = &[(&[0, 1], Some(3))];
    assert!(check(both, &[(0, 0, 2), (1, 0, 2)]).is_ok());
    assert_eq!(
        text(check(both, &[(0, 0, 2), (1, 1, 2)])),
        "entry 0 couples sequence 0 (positions 0..=2) with 1 (1..=2)"
    );
    assert_eq!(
        text(check(both, &[(0, 0, 2)])),
        "entry 0 couples sequence 0 (positions 0..=2) with 1 (no positions)"
    );
}

#[test]
fn b32_d7_sequences_part_for_good() {
    assert!(
        check(
            &[at(&[0, 1], 0), at(&[0, 1], 1), at(&[0], 2), at(&[1], 2)],
            &[]
        )
        .is_ok()
    );
    let shrinking = [at(&[0, 1, 2], 0), at(&[0, 1], 1), at(&[1, 2], 1)];
    assert_eq!(
        text(check(&shrinking, &[])),
        "entry 2: sequences {1,2} cannot join, 1 was in {0,1} before"
    );
    let rejoined = [at(&[0, 1], 0), at(&[0], 1), at(&[1], 1), at(&[0, 1], 2)];
    assert_eq!(
        text(check(&rejoined, &[])),
        "entry 3: sequences {0,1} cannot join, 0 was in {0} before"
    );
}

/// Automatic positions for entries of these sequence sets.
fn valid(sets: &[&[u32]]) -> ValidBatch {
    let entries: Vec<(&[u32], Option<u32>)> = sets.iter().map(|&s| (s, None)).collect();
    validate(&batch(&entries), &RULES, |_| None).unwrap()
}

/// The entries of each ubatch.
fn split(sets: &[&[u32]], policy: SplitPolicy, n_ubatch: u32) -> String {
    let ubatches = policy.split(&valid(sets), n_ubatch).unwrap();
    let piece = |u: &kv_core::batch::UBatch| {
        let entries: Vec<String> = u.entries.iter().map(u32::to_string).collect();
        format!("[{}]", entries.join(" "))
    };
    ubatches.iter().map(piece).collect::<Vec<_>>().join(", ")
}

const BLOCKS: &[&[u32]] = &[&[0], &[0], &[0], &[0], &[0], &[1], &[1], &[1], &[1]];

#[test]
fn b40_in_order() {
    assert_eq!(
        split(BLOCKS, SplitPolicy::InOrder, 4),
        "[0 1 2 3], [4 5 6 7], [8]"
    );
    assert_eq!(
        split(BLOCKS, SplitPolicy::InOrder, 512),
        "[0 1 2 3 4 5 6 7 8]"
    );
}

#[test]
fn b40_d8_a_ubatch_is_never_larger_than_n_ubatch() {
    let five: &[&[u32]] = &[&[0], &[1], &[2], &[3], &[4]];
    for policy in [SplitPolicy::InOrder, SplitPolicy::WholeSequences] {
        assert_eq!(split(five, policy, 4), "[0 1 2 3], [4]");
    }
}

#[test]
fn whole_sequences_are_never_cut() {
    let whole = |sets, n| split(sets, SplitPolicy::WholeSequences, n);
    assert_eq!(whole(BLOCKS, 512), "[0 1 2 3 4 5 6 7 8]");
    assert_eq!(whole(BLOCKS, 8), "[0 1 2 3 4], [5 6 7 8]");
    // Sequences that share tokens stay together; rows keep the caller's order.
    let woven: &[&[u32]] = &[&[2], &[0, 1], &[2], &[0], &[3], &[1], &[3]];
    assert_eq!(whole(woven, 5), "[0 1 2 3 5], [4 6]");
    assert_eq!(whole(woven, 3), "[0 2], [1 3 5], [4 6]");
    let error = SplitPolicy::WholeSequences
        .split(&valid(woven), 2)
        .unwrap_err();
    let text = "the batch has 3 tokens of sequences {0,1}, which see each other and must be in one \
                ubatch: it takes 2";
    assert_eq!(error.to_string(), text);
}

#[test]
fn ubatches_need_rows() {
    let policies = [SplitPolicy::InOrder, SplitPolicy::WholeSequences];
    for policy in &policies[..] {
        assert!(policy.split(&valid(BLOCKS), 0).is_err(), "{policy:?}");
    }
    assert_eq!(
        SplitPolicy::InOrder.split(&valid(BLOCKS), 0),
        Err(BatchError::NoRows)
    );
}

#[test]
fn outputs_are_named_by_row() {
    let mut batch = Batch::new();
    for i in 0..4 {
        let entry = batch.push_token(TokenId(i)).in_sequence(SeqId(i % 2));
        if i >= 2 {
            entry.with_output();
        }
    }
    let valid = validate(&batch, &RULES, |_| None).unwrap();
    assert_eq!(valid.n_outputs(), 2);
    let ubatches = SplitPolicy::InOrder.split(&valid, 3).unwrap();
    assert_eq!(ubatches[0].tokens, [0, 1, 2]);
    assert_eq!(ubatches[0].output_rows, [2]);
    assert_eq!(ubatches[1].output_rows, [0]);
    assert_eq!(ubatches[1].positions, [1]);
}

/// Names of rows with tokens around them; the rows see each other up to the last one.
fn named(n_rows: u32, sees_to: Option<u32>) -> ValidBatch {
    let mut batch = Batch::new();
    batch.push_token(TokenId(1));
    for row in 0..n_rows {
        let entry = batch.push_token(TokenId(TokenId::FIRST_ROW_NAME + row));
        if let Some(last) = sees_to {
            entry.seeing_to(Pos(last));
        }
    }
    batch.push_token(TokenId(2)).with_output();
    validate(&batch, &RULES, |_| None).unwrap()
}

fn sizes(valid: &ValidBatch, n_ubatch: u32) -> Vec<u32> {
    let ubatches = SplitPolicy::InOrder.split(valid, n_ubatch).unwrap();
    assert_eq!(valid.n_pieces(n_ubatch), ubatches.len());
    ubatches
        .iter()
        .map(kv_core::batch::UBatch::n_tokens)
        .collect()
}

#[test]
fn names_of_rows_are_in_ubatches_of_their_own() {
    assert_eq!(sizes(&named(5, None), 16), [1, 5, 1]);
    assert_eq!(sizes(&named(5, None), 2), [1, 2, 2, 1, 1]);
}

#[test]
fn what_sees_each_other_is_in_one_ubatch() {
    let valid = named(5, Some(5));
    assert_eq!(sizes(&valid, 5), [1, 5, 1]);
    let ubatches = SplitPolicy::InOrder.split(&valid, 8).unwrap();
    assert_eq!(ubatches[1].sees_to, [Some(Pos(5)); 5]);
    let error = SplitPolicy::InOrder.split(&valid, 4).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the batch has 5 tokens of sequences {0}, which see each other and must be in one ubatch: it takes 4"
    );
}
