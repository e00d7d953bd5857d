//! Logits, continuations and what layers remember, against an independent implementation
//! (transformers, f32), on both backends, whichever way the tokens come in.

#![allow(clippy::unwrap_used)] // helpers of tests

mod common;

use common::{CASES, Case, KeyOrder, Reference, Runner, candle, cpu, cpu_with, distance};
use kv_core::backend::{Backend, RowKind};
use kv_core::batch::Batch;
use kv_core::memory::{Memory, Seqs};
use kv_core::{Pos, PosRange, SeqId, TokenId};

/// Largest difference from the reference: llama.cpp's own is up to 1.5e-4 for these models.
const TOLERANCE: f32 = 2e-4;
/// The same for states; the reference's own logits, with and without a cache, differ by 7e-5.
const STATE_TOLERANCE: f32 = 1e-4;

/// Each prompt alone, cut into pieces.
fn in_pieces<B: Backend>(
    backend: impl Fn() -> B,
    case: &Case,
    (piece, n_ubatch): (usize, u32),
) -> Vec<Vec<f32>> {
    let one = |prompt: &Vec<u32>| {
        let mut runner = Runner::new(backend(), case, 0);
        let pieces = prompt.chunks(piece);
        pieces
            .flat_map(|tokens| runner.feed(0, tokens, n_ubatch))
            .collect()
    };
    case.reference().prompts().iter().map(one).collect()
}

fn alone<B: Backend>(backend: impl Fn() -> B, case: &Case) -> Vec<Vec<f32>> {
    in_pieces(backend, case, (512, 512))
}

/// All three prompts in one batch, their tokens interleaved: groups of different lengths.
fn together<B: Backend>(backend: B, case: &Case, n_ubatch: u32) -> Vec<Vec<f32>> {
    let prompts = case.reference().prompts();
    let mut runner = Runner::new(backend, case, 1);
    let (mut batch, mut owners) = (Batch::new(), Vec::new());
    for at in 0..prompts.iter().map(Vec::len).max().unwrap() {
        for (seq, prompt) in prompts.iter().enumerate().filter(|(_, p)| at < p.len()) {
            batch
                .push_token(TokenId(prompt[at]))
                .in_sequence(SeqId(u32::try_from(seq).unwrap()))
                .with_output();
            owners.push(seq);
        }
    }
    let mut logits = vec![Vec::new(); 3];
    for (owner, row) in owners.into_iter().zip(runner.decode(&batch, n_ubatch)) {
        logits[owner].extend(row);
    }
    logits
}

fn assert_close(case: &Case, how: &str, logits: &[Vec<f32>]) {
    let reference = case.reference();
    for (prompt, ours) in logits.iter().enumerate() {
        let theirs = reference.logits(prompt);
        let off = distance(&ours[ours.len() - theirs.len()..], &theirs);
        assert!(
            off < TOLERANCE,
            "{}, prompt {prompt}, {how}: off by {off}",
            case.name
        );
    }
}

#[test]
fn cpu_agrees_with_the_reference_and_bit_for_bit_with_itself() {
    for case in CASES {
        let whole = alone(cpu, case);
        assert_close(case, "alone", &whole);
        for n_ubatch in [512, 7] {
            let mixed = together(cpu(), case, n_ubatch);
            assert!(mixed == whole, "{}: together, ubatch {n_ubatch}", case.name);
        }
        for pieces in [(1, 512), (27, 512), (48, 7)] {
            let in_pieces = in_pieces(cpu, case, pieces);
            assert!(in_pieces == whole, "{}: pieces of {pieces:?}", case.name);
        }
    }
}

#[test]
fn threads_do_not_change_a_bit() {
    for case in CASES {
        let one = alone(|| cpu_with(1), case);
        assert!(alone(|| cpu_with(3), case) == one, "{}", case.name);
    }
}

#[test]
fn candle_agrees_with_the_reference() {
    for case in CASES {
        assert_close(case, "alone", &alone(candle, case));
        assert_close(case, "together", &together(candle(), case, 512));
        assert_close(case, "in two", &in_pieces(candle, case, (27, 512)));
        assert_close(case, "token by token", &in_pieces(candle, case, (1, 512)));
    }
}

#[test]
fn the_likeliest_continuations_are_the_references() {
    for case in CASES {
        let reference = case.reference();
        for (prompt, tokens) in reference.prompts().iter().enumerate() {
            let wanted = reference.greedy(prompt);
            assert!(wanted.len() > 20);
            let ours = Runner::new(cpu(), case, 0).greedy(tokens, wanted.len());
            assert_eq!(ours, wanted, "{}, prompt {prompt}", case.name);
        }
        let ours = Runner::new(candle(), case, 0).greedy(&reference.prompts()[2], 8);
        assert_eq!(ours, reference.greedy(2)[..8], "{}, candle", case.name);
    }
}

/// The last inputs of a convolution, `[width - 1, channels]`: the reference keeps one more, as
/// `[channels, width]`.
fn conv_state(reference: &Reference, layer: u32) -> Option<Vec<f32>> {
    let (shape, values) = reference.values(&format!("conv_state_l{layer}_0"))?;
    let &[channels, width] = &*shape else {
        return None;
    };
    let at = (1..width).flat_map(|k| (0..channels).map(move |c| c * width + k));
    Some(at.map(|at| values[at]).collect())
}

/// Keys of every token, `[tokens, heads, dim]`, in the order of the file.
fn keys(case: &Case, reference: &Reference, layer: u32) -> Option<Vec<f32>> {
    let (shape, mut values) = reference.values(&format!("k_l{layer}_0"))?;
    if let KeyOrder::Pairs(n) = case.keys {
        for head in values.chunks_exact_mut(shape[2]) {
            let halves = head.to_vec();
            for i in 0..n / 2 {
                (head[2 * i], head[2 * i + 1]) = (halves[i], halves[i + n / 2]);
            }
        }
    }
    Some(values)
}

fn memories_agree<B: Backend>(backend: B, case: &Case) {
    let reference = case.reference();
    let mut runner = Runner::new(backend, case, 3);
    runner.feed(0, &reference.prompts()[0], 512);
    let mut n_compared = 0;
    for (layer, _) in runner.model.layers().iter() {
        let layer = layer.0;
        let values = |what: &str| Some(reference.values(&format!("{what}_l{layer}_0"))?.1);
        for (kind, wanted) in [
            (RowKind::Conv, conv_state(&reference, layer)),
            (RowKind::State, values("ssm_state")),
            (RowKind::K, keys(case, &reference, layer)),
            (RowKind::V, values("v")),
        ] {
            let Some(wanted) = wanted else { continue };
            let off = distance(&runner.rows(layer, kind), &wanted);
            let name = case.name;
            assert!(
                off < STATE_TOLERANCE,
                "{name}, layer {layer}, {kind:?}: off by {off}"
            );
            n_compared += 1;
        }
    }
    assert!(n_compared >= 6, "{}: {n_compared}", case.name);
}

#[test]
fn what_layers_remember_is_the_references() {
    for case in CASES {
        memories_agree(cpu(), case);
        memories_agree(candle(), case);
    }
}

#[test]
fn rolled_back_and_shared_states_go_on_as_if_nothing_had_followed() {
    for case in CASES {
        let prompt = &case.reference().prompts()[0];
        let whole = Runner::new(cpu(), case, 0).feed(0, prompt, 512);
        let n_vocab = whole.len() / prompt.len();
        let mut runner = Runner::new(cpu(), case, 4);
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
