//! Logits, continuations and what layers remember, against an independent implementation
//! (transformers, f32), on both backends, whichever way the tokens come in.

#![allow(clippy::unwrap_used)] // helpers of tests

use crate::common::CASES;
use kv_core::memory::{Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId};
use model_tests::{Runner, Setup, checks, cpu};

/// Largest difference of a state; the reference's own logits, with and without a cache, differ by
/// 7e-5.
const STATE_TOLERANCE: f32 = 1e-4;

model_tests::standard_tests!(CASES);

#[test]
fn what_layers_remember_is_the_references() {
    for case in CASES {
        let n_compared = checks::memories_agree(case, STATE_TOLERANCE);
        // RWKV-4's five tensors hold the states of three layers for each of three blocks.
        let n_recorded = match case.name {
            "rwkv4" => 9,
            _ => case.reference().n_recorded(),
        };
        assert_eq!(n_compared, n_recorded, "{}", case.name);
        // That of xLSTM is one state of three tensors.
        let least = if case.name == "xlstm" { 1 } else { 2 };
        assert!(n_compared >= least, "{}: {n_compared}", case.name);
    }
}

#[test]
fn rolled_back_and_shared_states_go_on_as_if_nothing_had_followed() {
    for case in CASES {
        let prompt = &case.reference().prompts()[0];
        let whole = Runner::new(cpu(), case, &Setup::default()).feed(0, prompt, 512);
        let n_vocab = whole.len() / prompt.len();
        let mut runner = Runner::new(cpu(), case, &Setup::with_snapshots(4));
        runner.feed(0, &prompt[..20], 7);
        // Wrong tokens for two copies and the original; then back, and on with the right ones.
        for seq in [1, 2] {
            let copied = runner.memory.copy(SeqId(0), SeqId(seq), PosRange::ALL);
            assert!(copied.unwrap().row_copies.is_empty());
        }
        runner.feed(0, &[7, 8, 9], 512);
        runner.feed(1, &[10], 512);
        let back = PosRange::from(Pos(20)..);
        for seq in [0, 1, 2] {
            runner.memory.remove(Seqs::One(SeqId(seq)), back).unwrap();
        }
        for seq in [2, 0, 1] {
            let rest = runner.feed(seq, &prompt[20..], 512);
            assert!(
                rest == whole[20 * n_vocab..],
                "{}, sequence {seq}",
                case.name
            );
        }
    }
}
