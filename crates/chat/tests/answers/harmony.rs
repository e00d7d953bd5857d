//! Answers of gpt-oss, whole and cut at every place.

use super::support::{call, check, text, thought, with, without};

const TEMPLATE: &str = "<|start|>assistant<|channel|>final<|message|>";

#[test]
fn channels_are_reasoning_and_text() {
    let plain = without(TEMPLATE, "<|start|>assistant");
    let written = "<|channel|>analysis<|message|>Let me < see.<|end|><|start|>assistant<|channel|>final<|message|>Yes.\n";
    check(&plain, written, &[thought("Let me < see."), text("Yes.\n")]);
    check(
        &plain,
        "<|channel|>final<|message|>Yes.<|return|>",
        &[text("Yes.")],
    );
    check(
        &plain,
        "<|channel|>analysis<|message|>cut off",
        &[thought("cut off")],
    );
    // What a schema holds has no channels.
    check(&plain, "{\"a\": 1}", &[text("{\"a\": 1}")]);
    check(&plain, "<b>bold</b>", &[text("<b>bold</b>")]);
}

#[test]
fn messages_to_functions_are_calls() {
    let written = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>\
                   <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": 1}<|call|>";
    let mut expected = vec![thought("Hm."), text("I look.")];
    expected.extend(call(0, "f", "{\"a\": 1}"));
    check(&with(TEMPLATE), written, &expected);
    // The name may stand before the channel.
    let written = " to=functions.g<|channel|>commentary json<|message|><|call|>";
    check(&with(TEMPLATE), written, &call(0, "g", "{}"));
    check(&with(TEMPLATE), "<|channel|>commentary to=functions.f", &[]);
    // A number that is cut off is not lost.
    let written = " to=functions.f<|channel|>commentary json<|message|>{\"days\": 3";
    check(&with(TEMPLATE), written, &call(0, "f", "{\"days\": 3"));
    // Where there are no tools, nothing is called.
    let plain = without(TEMPLATE, "<|start|>assistant");
    let written = "<|channel|>analysis to=python code<|message|>1 + 1<|call|>";
    check(&plain, written, &[thought("1 + 1")]);
    let written = "<|channel|>commentary to=functions.f<|message|>{}<|call|>";
    check(&plain, written, &[text("{}")]);
}

#[test]
fn tokens_of_reasoning_can_be_counted() {
    let mut splitter = without(TEMPLATE, "<|start|>assistant");
    let analysis = "<|channel|>analysis<|message|>Hm.<|end|>";
    let rest = "<|start|>assistant<|channel|>final<|message|>Yes.";
    for piece in [analysis, rest] {
        let _parts = splitter.push(piece);
    }
    let ranges = splitter.reasoning_bytes();
    assert_eq!(ranges.len(), 1);
    assert_eq!(ranges.first().map(|range| range.end), Some(analysis.len()));
    let mut cut = without(TEMPLATE, "<|start|>assistant");
    let _parts = cut.push("<|channel|>analysis<|message|>Hm");
    let end = cut.reasoning_bytes().first().map(|range| range.end);
    assert_eq!(end, Some("<|channel|>analysis<|message|>Hm".len()));
    assert!(splitter.finish().is_empty());
}
