//! Logits, continuations, keys and values of every member against an independent implementation, on
//! both backends, whichever way the tokens come in.

mod common;

use common::CASES;
use kv_core::KvType;
use model_tests::{Runner, Setup, candle, checks, cpu, distance, last_rows};

/// Largest difference of a key or value.
const ROW_TOLERANCE: f32 = 5e-5;

model_tests::standard_tests!(CASES);

#[test]
fn keys_and_values_are_the_references() {
    for case in CASES {
        let n = checks::memories_agree(case, ROW_TOLERANCE);
        // Those of llama.cpp were not recorded.
        let recorded = !["granite", "smollm3", "olmo2"].contains(&case.name);
        assert_eq!(n >= 4, recorded, "{}: {n}", case.name);
    }
}

#[test]
fn f16_rows_stay_near_the_reference() {
    // 11 bits of mantissa in K and V move these logits (spread 3) by a few hundredths.
    let setup = Setup::with_type(KvType::F16);
    for case in CASES {
        let reference = case.reference();
        let (prompt, theirs) = (&reference.prompts()[0], &reference.logits(0));
        let on_cpu = Runner::new(cpu(), case, &setup).feed(0, prompt, 512);
        let on_candle = Runner::new(candle(), case, &setup).feed(0, prompt, 512);
        let off = distance(last_rows(&on_cpu, theirs.len()), theirs);
        assert!(off < 0.05, "{}: off by {off}", case.name);
        assert!(
            distance(&on_cpu, &on_candle) < 5e-3,
            "{}: backends round alike",
            case.name
        );
    }
}
