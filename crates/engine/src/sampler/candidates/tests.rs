//! Candidates, their bounds and their order.

use proptest::prelude::*;

use super::*;

fn tokens(candidates: &Candidates<'_>) -> Vec<u32> {
    candidates.iter().map(|c| c.token.0).collect()
}

#[test]
fn bad_logits_are_errors_with_the_token() {
    let refusal = |logits: &[f32]| {
        let mut buffers = CandidateBuffers::default();
        let refused = Candidates::new(logits, &mut buffers);
        refused.unwrap_err().to_string()
    };
    assert_eq!(refusal(&[0.0, f32::NAN]), "the logit of token 1 is NaN");
    assert_eq!(refusal(&[f32::INFINITY]), "the logit of token 0 is inf");
    assert_eq!(
        refusal(&[f32::NEG_INFINITY; 2]),
        "none of 2 tokens can be chosen"
    );
    assert_eq!(refusal(&[]), "none of 0 tokens can be chosen");
}

#[test]
fn ties_go_to_the_smaller_id() {
    let mut buffers = CandidateBuffers::default();
    let logits = [1.0, 3.0, -0.0, 3.0, 0.0];
    let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
    assert_eq!(candidates.best().map(|c| c.token), Some(TokenId(1)));
    candidates.keep_top(4);
    assert_eq!(tokens(&candidates), [1, 3, 0, 2]);
    assert_eq!(candidates.order(), Order::ByLogit);
}

#[test]
fn selecting_the_top_of_a_vocabulary_copies_twice_as_many_candidates_at_most() {
    let logits: Vec<f32> = (0..150_000u32)
        .map(|i| (i * 7919 % 150_001) as f32)
        .collect();
    let mut buffers = CandidateBuffers::default();
    let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
    candidates.adjust(TokenId(17), |l| l / 2.0);
    candidates.keep_top(40);
    assert_eq!(candidates.iter().count(), 40);
    for buffer in [&buffers.selected, &buffers.spare, &buffers.changed] {
        assert!(buffer.capacity() <= 128, "{}", buffer.capacity());
    }
}

#[test]
fn the_top_of_a_row_comes_by_id_with_one_zero() {
    let mut buffers = CandidateBuffers::default();
    // What is left of another row does not count.
    Candidates::new(&[1.0, 2.0], &mut buffers)
        .unwrap()
        .keep_top(1);
    let mut row = [0.0; TopK::row_len(3)];
    TopK::of(&[-0.0, 2.0, 0.0, -5.0], &mut row);
    let mut top = Candidates::of_top(TopK::read(&row).unwrap(), &mut buffers).unwrap();
    assert_eq!(tokens(&top), [0, 1, 2]);
    let logits: Vec<f32> = top.iter().map(|c| c.logit).collect();
    assert_eq!(logits, [0.0, 2.0, 0.0]);
    top.keep_top(2);
    assert_eq!(tokens(&top), [1, 0]);
    TopK::of(&[f32::NAN, 1.0, 2.0], &mut row);
    let refused = Candidates::of_top(TopK::read(&row).unwrap(), &mut buffers);
    assert_eq!(refused.unwrap_err(), SampleError::NotNumbers);
}

#[test]
fn more_changes_than_a_list_holds_are_made_in_a_copy() {
    let (logits, mut buffers) = ([0.0; 2000], CandidateBuffers::default());
    let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
    (0..MAX_CHANGED as u32).for_each(|i| candidates.adjust(TokenId(i), |l| l + 1.0));
    assert_eq!(candidates.stage, Stage::Logits);
    candidates.adjust(TokenId(1999), |l| l + 2.0);
    assert_eq!(candidates.stage, Stage::Selected);
    let got: Vec<f32> = candidates.iter().map(|c| c.logit).collect();
    let mut wanted = logits;
    wanted[..MAX_CHANGED].fill(1.0);
    wanted[1999] = 2.0;
    assert_eq!(got, wanted);
}

#[test]
fn a_zero_has_no_sign() {
    let (logits, mut buffers) = ([-0.0, 0.0, -1.0], CandidateBuffers::default());
    let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
    let positive = |c: Option<Candidate>| c.unwrap().logit.is_sign_positive();
    assert!(positive(candidates.best()));
    candidates.adjust(TokenId(0), |logit| {
        assert!(logit.is_sign_positive());
        -logit
    });
    assert!(positive(candidates.best()));
    candidates.keep_top(2);
    assert_eq!(tokens(&candidates), [0, 1]);
}

#[test]
fn selections_of_selections_shorten_them() {
    let (logits, mut buffers) = ([1.0, 5.0, 3.0, 4.0], CandidateBuffers::default());
    let mut candidates = Candidates::new(&logits, &mut buffers).unwrap();
    candidates.keep_top(4);
    assert_eq!(candidates.order(), Order::ById);
    candidates.keep_top(3);
    candidates.keep_top(2);
    assert_eq!(tokens(&candidates), [1, 3]);
    let mut prefix = Candidates::new(&logits, &mut buffers).unwrap();
    prefix.keep_prefix(|c| c.logit < 4.0);
    assert_eq!(prefix.order(), Order::ByLogit);
    assert_eq!(tokens(&prefix), [1, 3, 2]);
    // What is left of the other selections does not count.
    for keep_all in [false, true] {
        let mut used = Candidates::new(&logits, &mut buffers).unwrap();
        used.scale(|logit| logit);
        used.keep_top(2);
        let mut next = Candidates::new(&logits, &mut buffers).unwrap();
        if keep_all {
            next.scale(|logit| logit);
        } else {
            next.retain(|_| true);
        }
        assert_eq!(tokens(&next), [0, 1, 2, 3]);
    }
}

proptest! {
    #[test]
    fn selections_agree_with_a_full_sort(
        logits in prop::collection::vec(-4i8..4, 1..600),
        k in 1usize..700,
    ) {
        let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
        let mut buffers = CandidateBuffers::default();
        let all = Candidates::new(&logits, &mut buffers).unwrap();
        let mut sorted: Vec<Candidate> = all.iter().collect();
        sorted.sort_by(likeliest_first);
        let mut top = Candidates::new(&logits, &mut buffers).unwrap();
        top.keep_top(k);
        if k < logits.len() {
            prop_assert_eq!(&top.iter().collect::<Vec<_>>(), &sorted[..k]);
        } else {
            prop_assert_eq!(top.order(), Order::ById);
        }
        let mut prefix = Candidates::new(&logits, &mut buffers).unwrap();
        let mut seen = Vec::new();
        prefix.keep_prefix(|c| { seen.push(*c); seen.len() == k });
        let prefix: Vec<Candidate> = prefix.iter().collect();
        prop_assert_eq!(&prefix, &sorted[..k.min(sorted.len())]);
        prop_assert_eq!(prefix, seen);
    }

    /// Reading logits where they are gives what a copy of all of them gives.
    #[test]
    fn changed_logits_agree_with_a_copy(
        logits in prop::collection::vec(-4i8..4, 1..300),
        changes in prop::collection::vec((0u32..350, -3i8..3), 0..40),
        k in 0usize..320,
        at_least in -6i8..3,
    ) {
        let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
        let (mut read, mut copied) = (CandidateBuffers::default(), CandidateBuffers::default());
        let mut read = Candidates::new(&logits, &mut read).unwrap();
        let mut copied = Candidates::new(&logits, &mut copied).unwrap();
        copied.select_all();
        for &(token, change) in &changes {
            read.adjust(TokenId(token), |l| l + f32::from(change));
            copied.adjust(TokenId(token), |l| l + f32::from(change));
        }
        let both = |read: &Candidates<'_>, copied: &Candidates<'_>| {
            prop_assert_eq!(read.best(), copied.best());
            prop_assert_eq!(read.order(), copied.order());
            let read: Vec<_> = read.iter().collect();
            prop_assert_eq!(read, copied.iter().collect::<Vec<_>>());
            Ok(())
        };
        both(&read, &copied)?;
        if k % 2 == 0 {
            read.retain(|c| c.logit >= f32::from(at_least));
            copied.retain(|c| c.logit >= f32::from(at_least));
            both(&read, &copied)?;
        }
        read.keep_top(k);
        copied.keep_top(k);
        both(&read, &copied)?;
    }
}
