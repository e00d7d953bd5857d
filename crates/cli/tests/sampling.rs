//! The sampler's flags, and the fields of `batch` for them, with the built-in model.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

use crate::support::{failure, json as report, json_lines};
use serde_json::{Value, json};

/// Ends generation in the built-in model.
const EOS: u32 = 2;

fn run(args: &[&str]) -> Value {
    let fixed = [
        "run",
        "Once upon a time",
        "--json",
        "-c",
        "200",
        "--seed",
        "7",
    ];
    report(&[&fixed[..], args].concat())
}

fn tokens(report: &Value) -> Vec<u64> {
    let tokens = report["tokens"].as_array().unwrap();
    tokens.iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn a_bias_chooses_or_bans_a_token() {
    let greedy = |extra: &[&str]| tokens(&run(&[&["-n", "3", "--temp", "0"], extra].concat()));
    let free = greedy(&[]);
    let banned = greedy(&["--logit-bias", &format!("{}-inf", free[0])]);
    assert_ne!(banned[0], free[0]);
    assert!(!banned.contains(&free[0]), "{banned:?}");
    assert_eq!(greedy(&["--logit-bias", "300+100"]), [300, 300, 300]);
    let both = ["--logit-bias", "300+100", "--logit-bias", "300-100"];
    assert_eq!(greedy(&both), free, "they add up");
}

#[test]
fn a_text_does_not_end_before_it_has_min_tokens() {
    let wants_to_end = format!("{EOS}+100");
    let ends = ["-n", "20", "--temp", "0", "--logit-bias", &wants_to_end];
    let report = run(&ends);
    assert_eq!(tokens(&report).len(), 0);
    let report = run(&[&ends[..], &["--min-tokens", "5"]].concat());
    assert_eq!(tokens(&report).len(), 5);
    assert_eq!(report["finish"]["reason"], "end_of_generation", "{report}");
}

#[test]
fn dry_keeps_three_tokens_from_coming_again() {
    let repeated = |flags: &[&str]| {
        // A bias towards some tokens makes the text repeat itself.
        let mut args = vec!["-n", "80", "--temp", "0", "--top-k", "0"];
        let biases = ["300+9", "301+9", "302+9", "303+9"];
        biases
            .iter()
            .for_each(|bias| args.extend(["--logit-bias", bias]));
        args.extend(flags);
        let report = run(&args);
        let prompt = report["prompt_ids"].as_array().unwrap();
        let prompt = prompt.iter().map(|id| id.as_u64().unwrap());
        let text: Vec<u64> = prompt.chain(tokens(&report)).collect();
        let mut grams: Vec<&[u64]> = text.windows(3).collect();
        let n = grams.len();
        grams.sort_unstable();
        grams.dedup();
        n - grams.len()
    };
    assert!(repeated(&[]) > 0, "else nothing is shown");
    let dry = ["--dry-multiplier", "1000", "--dry-sequence-breaker", "none"];
    assert_eq!(repeated(&dry), 0);
    let off = [&dry[..], &["--dry-penalty-last-n", "0"]].concat();
    assert!(repeated(&off) > 0);
}

#[test]
fn seeded_texts_of_every_step_can_be_repeated_and_differ_from_the_default() {
    let text = |flags: &[&str]| run(&[&["-n", "24"], flags].concat())["text"].clone();
    let free = text(&[]);
    for flags in [
        &["--typical", "0.2"][..],
        &["--xtc-probability", "1", "--xtc-threshold", "0.05"],
        &[
            "--mirostat",
            "2",
            "--mirostat-ent",
            "1.5",
            "--mirostat-lr",
            "0.2",
        ],
    ] {
        let changed = text(flags);
        assert_ne!(changed, free, "{flags:?}");
        assert_eq!(text(flags), changed, "{flags:?}");
    }
    assert_eq!(text(&["--typical", "1", "--mirostat", "0"]), free);
}

#[test]
fn requests_of_a_batch_take_the_same_options() {
    let line = |options: Value| {
        let mut line = json!({"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0});
        line.as_object_mut()
            .unwrap()
            .extend(options.as_object().unwrap().clone());
        line.to_string()
    };
    let input = [
        line(json!({"logit_bias": {"2": 100}})),
        line(json!({"logit_bias": {"2": 100}, "min_tokens": 3})),
        line(
            json!({"dry_multiplier": 0.8, "typical_p": 0.5, "xtc_probability": 0.5,
                    "xtc_threshold": 0.2, "repeat_penalty": 1.1, "presence_penalty": 0.1,
                    "frequency_penalty": 0.1}),
        ),
    ];
    let batch = ["batch", "-c", "300", "-f", "-"];
    let answers = json_lines(&batch, &input.join("\n"));
    let n_tokens: Vec<&Value> = answers.iter().map(|answer| &answer["tokens"]).collect();
    assert_eq!(n_tokens, [&json!(0), &json!(3), &json!(4)]);
}

#[test]
fn what_makes_no_sense_is_refused_by_name() {
    for (args, wanted) in [
        (
            &["--logit-bias", "7"][..],
            "'7' for '--logit-bias <TOKEN(+|-)N>'",
        ),
        (&["--logit-bias", "7+101"], "a number up to 100"),
        (
            &["--logit-bias", "999999+1"],
            "the bias is of token 999999, but the vocabulary has",
        ),
        (
            &["--typical", "1.5"],
            "'--typical <P>': a number between 0 and 1",
        ),
        (
            &["--xtc-probability", "2"],
            "'--xtc-probability <P>': a number between 0 and 1",
        ),
        (
            &["--xtc-threshold", "-1"],
            "'--xtc-threshold <P>': a number between 0 and 1",
        ),
        (
            &["--dry-multiplier", "-1"],
            "'--dry-multiplier <X>': a number of at least 0",
        ),
        (
            &["--dry-base", "0.5"],
            "'--dry-base <BASE>': a number of at least 1",
        ),
        (&["--dry-allowed-length", "0"], "'--dry-allowed-length <N>'"),
        (&["--dry-penalty-last-n", "-2"], "or -1 for the whole text"),
        (
            &["--dry-multiplier", "1", "--dry-sequence-breaker", ""],
            "DRY sequence breaker 0 is empty",
        ),
        (
            &["--mirostat", "1"],
            "2 is needed (Mirostat 2), or 0 for none",
        ),
        (
            &["--mirostat-ent", "0"],
            "'--mirostat-ent <BITS>': a number above 0",
        ),
        (
            &["--mirostat-lr", "1.1"],
            "'--mirostat-lr <RATE>': a number between 0 and 1",
        ),
        (
            &["-n", "3", "--min-tokens", "4"],
            "at least 4 tokens, but may have 3 at most",
        ),
    ] {
        let (code, message) = failure(&[&["run", "-p", "Hi"], args].concat());
        assert_eq!(code, 2, "{message}");
        assert!(message.contains(wanted), "{args:?}: {message}");
    }
}
