//! Whole models on a GPU backend, whichever device runs it: the simulator, or a GPU.

use kv_backend::Backend;
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};

use crate::{Case, Runner, Setup, cpu, distance};

/// Tokens of a prompt that the simulator computes in a second or two.
pub const SHORT: usize = 9;

/// The distance of logits of the beginnings of two prompts, evaluated together in one batch and
/// then a token each, from those of the CPU backend, which are the reference's
/// ([`cpu_agrees`](crate::checks::cpu_agrees)).
pub fn distance_from_cpu<B: Backend>(backend: B, case: &Case) -> f32 {
    distance_from_cpu_with(backend, case, &Setup::default())
}

/// The same with another memory on both.
pub fn distance_from_cpu_with<B: Backend>(backend: B, case: &Case, setup: &Setup) -> f32 {
    let prompts = case.reference().prompts();
    let mut gpu = Runner::new(backend, case, setup);
    let mut ours = vec![Vec::new(); 2];
    let (mut batch, mut owners) = (Batch::new(), Vec::new());
    for at in 0..SHORT {
        for (seq, prompt) in (0..2).zip(&prompts) {
            let entry = batch
                .push_token(TokenId(prompt[at]))
                .in_sequence(SeqId(seq));
            entry.with_output();
            owners.push(seq as usize);
        }
    }
    for (owner, row) in owners.iter().zip(gpu.decode(&batch, 16)) {
        ours[*owner].extend(row);
    }
    for (seq, prompt) in (0..2).zip(&prompts) {
        for token in &prompt[SHORT..SHORT + 2] {
            ours[seq as usize].extend(gpu.feed(seq, &[*token], 16));
        }
    }
    let theirs = prompts.iter().map(|prompt| {
        let tokens = &prompt[..SHORT + 2];
        Runner::new(cpu(), case, setup).feed(0, tokens, 512)
    });
    let distances = ours
        .iter()
        .zip(theirs)
        .map(|(ours, theirs)| distance(ours, &theirs));
    distances.fold(0.0, largest)
}

/// The distance of logits of whole prompts from the reference's, for devices that are fast enough.
pub fn distance_from_reference<B: Backend>(backend: impl Fn() -> B, case: &Case) -> f32 {
    let reference = case.reference();
    let prompts = reference.prompts();
    let distances = prompts.iter().enumerate().map(|(prompt, tokens)| {
        let ours = Runner::new(backend(), case, &Setup::default()).feed(0, tokens, 512);
        reference.logits(prompt).distance(&ours)
    });
    distances.fold(0.0, largest)
}

/// The larger distance; one that is no number is not a small one.
fn largest(a: f32, b: f32) -> f32 {
    if a > b || a.is_nan() { a } else { b }
}
