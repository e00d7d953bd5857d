//! Whole models on a GPU backend, whichever device runs it: the simulator, or a GPU.

use kv_core::backend::Backend;
use kv_core::batch::Batch;
use kv_core::{SeqId, TokenId};

use crate::checks::TOLERANCE;
use crate::{Case, Runner, Setup, cpu, distance};

/// Tokens of a prompt that the simulator computes in a second or two.
pub const SHORT: usize = 9;

/// Logits of the beginnings of two prompts, evaluated together in one batch and then a token each,
/// against those of the CPU backend, which are the reference's (`checks::cpu_agrees`): `tolerance`
/// times as far as another order of sums may bring them apart.
///
/// # Panics
/// Where they are further apart.
pub fn logits_agree<B: Backend>(backend: B, case: &Case, tolerance: f32) {
    let prompts = case.reference().prompts();
    let mut gpu = Runner::new(backend, case, &Setup::default());
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
    for (seq, (ours, prompt)) in ours.iter().zip(&prompts).enumerate() {
        let theirs = Runner::new(cpu(), case, &Setup::default()).feed(0, &prompt[..SHORT + 2], 512);
        let off = distance(ours, &theirs);
        let name = case.name;
        assert!(
            off < tolerance * TOLERANCE,
            "{name}, prompt {seq}: off by {off}"
        );
    }
}

/// The reference's logits of whole prompts, for devices that are fast enough.
///
/// # Panics
/// Where they are further apart.
pub fn references_agree<B: Backend>(backend: impl Fn() -> B, case: &Case, tolerance: f32) {
    let reference = case.reference();
    for (prompt, tokens) in reference.prompts().iter().enumerate() {
        let ours = Runner::new(backend(), case, &Setup::default()).feed(0, tokens, 512);
        let off = reference.logits(prompt).distance(&ours);
        let name = case.name;
        assert!(
            off < tolerance * TOLERANCE,
            "{name}, prompt {prompt}: off by {off}"
        );
    }
}
