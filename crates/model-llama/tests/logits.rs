//! Logits, continuations, keys and values of every member against an independent implementation, on
//! both backends, whichever way the tokens come in.

mod common;

use common::CASES;
use kv_core::KvType;
use model_tests::checks::TOLERANCE;
use model_tests::{Runner, Setup, Source, candle, checks, cpu, distance};

/// Largest difference of a key or value.
const ROW_TOLERANCE: f32 = 5e-5;

model_tests::standard_tests!(CASES);

#[test]
fn keys_and_values_are_the_references() {
    for case in CASES {
        let n_compared = checks::memories_agree(case, ROW_TOLERANCE);
        assert_eq!(n_compared, case.reference().n_recorded(), "{}", case.name);
        // llama.cpp's numbers are logits alone.
        assert!(n_compared >= 4 || case.source != Source::Recipe);
    }
}

/// 11 bits of mantissa in K and V move these logits (spread 3) by up to 0.033 (gemma4_moe), and more
/// where noise of the embeddings does, too.
const F16_TOLERANCE: f32 = 0.04;
/// A value half-way between two f16 may be rounded up by one backend and down by the other, which
/// sum in another order: up to 0.0076 in a logit (phi3).
const F16_TIE_TOLERANCE: f32 = 1e-2;

#[test]
fn f16_rows_stay_near_the_reference() {
    let setup = Setup::with_type(KvType::F16);
    // Rows of latents have tests of their own.
    for case in CASES.iter().filter(|case| !case.keys.is_latent()) {
        let reference = case.reference();
        let (prompt, theirs) = (&reference.prompts()[0], &reference.logits(0));
        let on_cpu = Runner::new(cpu(), case, &setup).feed(0, prompt, 512);
        let on_candle = Runner::new(candle(), case, &setup).feed(0, prompt, 512);
        let off = theirs.distance(&on_cpu);
        let noise = case.tolerance / TOLERANCE;
        assert!(off < noise * F16_TOLERANCE, "{}: off by {off}", case.name);
        let apart = distance(&on_cpu, &on_candle);
        assert!(
            apart < noise * F16_TIE_TOLERANCE,
            "{}: backends apart by {apart}",
            case.name
        );
    }
}
