//! Answers of each format, whole and cut at every place.

use serde_json::{Value, json};

use super::{ChatSplitter, Part, ToolFormat};
use crate::generate::{Arguments, CallNumber, Tool, ToolPaths};

const HERMES: &str = "<tool_call>";

/// The parts of an answer, with neighbours of one kind joined.
pub(super) fn join(parts: impl IntoIterator<Item = Part>) -> Vec<Part> {
    let mut joined: Vec<Part> = Vec::new();
    for part in parts {
        match (joined.last_mut(), &part) {
            (Some(Part::Text(last)), Part::Text(more))
            | (Some(Part::Reasoning(last)), Part::Reasoning(more))
            | (
                Some(Part::ToolArguments { text: last, .. }),
                Part::ToolArguments { text: more, .. },
            ) => last.push_str(more),
            _ => joined.push(part),
        }
    }
    joined
}

fn split_at(splitter: &ChatSplitter, pieces: &[&str]) -> Vec<Part> {
    let mut splitter = splitter.clone();
    let mut parts = Vec::new();
    for piece in pieces {
        parts.extend(splitter.push(piece));
    }
    parts.extend(splitter.finish());
    join(parts)
}

/// Whole, cut at every place, and character by character.
#[track_caller]
pub(super) fn check(splitter: &ChatSplitter, text: &str, expected: &[Part]) {
    assert_eq!(split_at(splitter, &[text]), expected, "{text:?}");
    for (at, _) in text.char_indices() {
        let (before, after) = text.split_at(at);
        assert_eq!(
            split_at(splitter, &[before, after]),
            expected,
            "{before:?} | {after:?}"
        );
    }
    let characters: Vec<String> = text.chars().map(String::from).collect();
    let pieces: Vec<&str> = characters.iter().map(String::as_str).collect();
    assert_eq!(
        split_at(splitter, &pieces),
        expected,
        "{text:?} by characters"
    );
}

pub(super) fn with(template: &str) -> ChatSplitter {
    let tool = |name: &str, parameters: Value| Tool {
        name: name.to_owned(),
        parameters,
        arguments: Arguments::Free,
        paths: ToolPaths::default(),
    };
    let properties = json!({
        "text": {"type": "string"}, "n": {"type": "integer"}, "is": {"type": "boolean"},
        "list": {"type": "array"}, "mood": {"enum": ["1", "2"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]}, "some": {"type": ["string", "null"]},
    });
    let tools = vec![
        tool("f", json!({"properties": properties})),
        tool("g", Value::Null),
    ];
    ChatSplitter::new(
        template,
        "",
        Some((ToolFormat::of_template(template), tools)),
    )
}

pub(super) fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

pub(super) fn thought(text: &str) -> Part {
    Part::Reasoning(text.to_owned())
}

pub(super) fn call(index: usize, name: &str, arguments: &str) -> [Part; 2] {
    let (name, text) = (name.to_owned(), arguments.to_owned());
    [
        Part::ToolStart { index, name },
        Part::ToolArguments { index, text },
    ]
}

#[test]
fn plain_texts_stay_as_they_are() {
    for plain in [
        "",
        "Hello <b>, 1 < 2",
        "\n\n Hi\n",
        "a </think> b",
        "<thin",
        "<tool_call>",
    ] {
        let expected: Vec<Part> = (!plain.is_empty())
            .then(|| text(plain))
            .into_iter()
            .collect();
        check(&ChatSplitter::new("", "", None), plain, &expected);
    }
    for plain in ["Hello <tool_cal", "no [TOOL", "x  \n"] {
        check(&with(HERMES), plain, &[text(plain)]);
    }
}

#[test]
fn reasoning_is_apart_from_the_answer() {
    let plain = ChatSplitter::new("", "", None);
    check(
        &plain,
        "<think>\nLet me < see.\n</think>\n\nYes.\n",
        &[thought("Let me < see."), text("Yes.\n")],
    );
    check(&plain, "<think>\n\n</think>\n\nYes.", &[text("Yes.")]);
    check(&plain, " <think>cut off", &[thought("cut off")]);
    let open = ChatSplitter::new("</think>", "<|assistant|>\n<think>\n", None);
    check(
        &open,
        "Hm.</think>Yes. <think>",
        &[thought("Hm."), text("Yes. <think>")],
    );
    let other = ChatSplitter::new("[/THINK]", "", None);
    check(
        &other,
        "[THINK]Hm.[/THINK]Yes.",
        &[thought("Hm."), text("Yes.")],
    );
}

#[test]
fn hermes_calls_are_read() {
    let written = "<think>Hm.</think>\nI look. \n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>\"}}\n\
                   </tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {}}\n</tool_call>";
    let mut expected = vec![thought("Hm."), text("I look.")];
    expected.extend(call(0, "f", "{\"a\": \"</tool_call>\"}"));
    expected.extend(call(1, "g", "{}"));
    check(&with(HERMES), written, &expected);
    let broken = "<tool_call>\nhello</tool_call>";
    check(&with(HERMES), broken, &[text("<tool_call>\nhello")]);
    let cut = "<tool_call>{\"na";
    check(&with(HERMES), cut, &[text(cut)]);
}

#[test]
fn llama_calls_are_the_whole_answer() {
    let llama = with("<|python_tag|>");
    let written =
        "{\"name\": \"f\", \"parameters\": {\"a\": [1, 2]}}; {\"name\": \"g\", \"parameters\": {}}";
    let mut expected = call(0, "f", "{\"a\": [1, 2]}").to_vec();
    expected.extend(call(1, "g", "{}"));
    check(&llama, written, &expected);
    check(&llama, &format!("<|python_tag|>{written}"), &expected);
    for plain in ["{\"name\": \"Ada\", \"age\": 36}", "{x}", "The set {1}"] {
        check(&llama, plain, &[text(plain)]);
    }
}

#[test]
fn mistral_calls_are_a_list_or_a_name_with_arguments() {
    let mistral = with("[TOOL_CALLS]");
    let mut expected = call(0, "f", "{\"a\": \"]\"}").to_vec();
    expected.extend(call(1, "g", "{}"));
    let list = "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": \"]\"}}, {\"name\": \"g\", \"arguments\": {}}]";
    check(&mistral, list, &expected);
    let named = "[TOOL_CALLS]f[ARGS]{\"a\": \"]\"}[TOOL_CALLS]g[ARGS]{}";
    check(&mistral, named, &expected);
    check(&mistral, "[TOOL_CALLS]f{\"a\": \"]\"}", &expected[..2]);
}

#[test]
fn deepseek_calls_are_read_with_and_without_type() {
    let deepseek = with("<｜tool▁call▁begin｜>");
    let mut expected = vec![text("I look.")];
    expected.extend(call(0, "f", "{\"a\": 1}"));
    expected.extend(call(1, "g", "{}"));
    let new = "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜>\
               <｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(&deepseek, new, &expected);
    let old = "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": 1}\n```<｜tool▁call▁end｜>\n\
               <｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>";
    check(&deepseek, old, &expected);
}

#[test]
fn xml_calls_have_the_types_of_their_schema() {
    let xml = with("<tool_call><function=x><parameter=y>");
    let written = "I look. \n<tool_call>\n<function=f>\n<parameter=text>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n\
                   <parameter=is>\nTrue\n</parameter>\n<parameter=list>\n[1, \"a\"]\n</parameter>\n<parameter=mood>1</parameter>\n\
                   <parameter=other>\n  a\n<b>\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>";
    let arguments = "{\"text\": \"12\", \"n\": 12, \"is\": true, \"list\": [1,\"a\"], \"mood\": \"1\", \
                     \"other\": \"  a\\n<b>\"}";
    let mut expected = vec![text("I look.")];
    expected.extend(call(0, "f", arguments));
    expected.extend(call(1, "g", "{}"));
    check(&xml, written, &expected);
    check(
        &xml,
        "<seed:tool_call>\n<function=g>\n</function>\n</seed:tool_call>",
        &call(0, "g", "{}"),
    );
    // A text that may be left out is a text, also where it looks like a number.
    check(
        &xml,
        "<function=f><parameter=maybe>12</parameter><parameter=some>True</parameter></function>",
        &call(0, "f", "{\"maybe\": \"12\", \"some\": \"True\"}"),
    );
    check(
        &xml,
        "<function=f><parameter=maybe>null</parameter><parameter=some>None</parameter></function>",
        &call(0, "f", "{\"maybe\": null, \"some\": null}"),
    );
    // Without the mark around it, as models write it at times.
    check(
        &xml,
        "<function=g></function>Done.",
        &[&call(0, "g", "{}")[..], &[text("Done.")]].concat(),
    );
    for plain in ["<function=\nx", "if a <function> b", "<function=f"] {
        check(&xml, plain, &[text(plain)]);
    }
}

#[test]
fn later_calls_are_dropped_where_one_is_wanted() {
    let hermes = with(HERMES);
    let one = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>";
    let answer = format!("Well.{one}\n{one}");
    let first = call(0, "f", "{\"a\": 1}");
    let all = [&[text("Well.")][..], &first, &call(1, "f", "{\"a\": 1}")].concat();
    check(&hermes, &answer, &all);
    let only = [&[text("Well.")][..], &first].concat();
    check(&hermes.with_calls(CallNumber::One), &answer, &only);
}

#[test]
fn a_forced_answer_may_have_several_calls() {
    let forced = ChatSplitter::new("", "", Some((ToolFormat::Forced, Vec::new())));
    let one = "{\"name\": \"f\", \"arguments\": {\"a\": 1}}";
    let both = [call(0, "f", "{\"a\": 1}"), call(1, "f", "{\"a\": 1}")].concat();
    check(&forced, &format!("{one}\n{one}"), &both);
}

#[test]
fn a_forced_answer_is_one_call() {
    let forced = ChatSplitter::new("", "<think>", Some((ToolFormat::Forced, Vec::new())));
    check(
        &forced,
        "{\"name\": \"f\", \"arguments\": {\"a\": 1}} \n",
        &call(0, "f", "{\"a\": 1}"),
    );
}
