//! Logits, continuations, keys and values of every member against an independent implementation, on
//! both backends, whichever way the tokens come in.

use crate::common::CASES;
use kv_rows::KvType;
use model_core::gguf::Metadata;
use model_tests::checks::{ONE, TOLERANCE};
use model_tests::{Case, Runner, Setup, Source, candle, checks, cpu, distance, remove_key};

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

/// 11 bits of mantissa in K and V move these logits (spread 3) by up to 0.033 (gemma4_moe), and
/// more where noise of the embeddings does, too.
const F16_TOLERANCE: f32 = 0.04;
/// A value half-way between two f16 may be rounded up by one backend and down by the other, which
/// sum in another order: up to 0.0076 in a logit (phi3).
const F16_TIE_TOLERANCE: f32 = 1e-2;
/// Sparsemixer gives an expert a share at once where it comes near enough to another: rounding by
/// f16 moves some of phimoe's logits by 0.24.
const F16_JUMP: f32 = 0.5;

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
        let limits = match case.name {
            "phimoe" => [F16_JUMP; 2],
            _ => [F16_TOLERANCE, F16_TIE_TOLERANCE].map(|limit| noise * limit),
        };
        assert!(off < limits[0], "{}: off by {off}", case.name);
        let apart = distance(&on_cpu, &on_candle);
        assert!(
            apart < limits[1],
            "{}: backends apart by {apart}",
            case.name
        );
    }
}

/// llama.cpp's converter writes neither a jitter nor a second factor, and the `eps` of norms under
/// the key of RMS norms: the model is that of published files all the same.
#[test]
fn phimoe_without_keys_of_our_own_is_the_published_model() {
    let case = Case::named(CASES, "phimoe");
    let (weights, mut metadata) = case.open();
    remove_key(&mut metadata, "phimoe.expert_router_jitter");
    let model = |metadata: &Metadata| case.registry().model(metadata, &*weights).unwrap();
    assert_eq!(
        model(&metadata).graph(ONE).unwrap(),
        model(&case.open().1).graph(ONE).unwrap()
    );
    remove_key(&mut metadata, "phimoe.rope.scaling.attn_factor_short");
    let short = model(&metadata).for_context(256).unwrap();
    let text = short.graph(ONE).unwrap().text().to_string();
    assert!(text.contains("attention_factor=1.240000"), "{text}");
}
