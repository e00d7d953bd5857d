//! The same calls in the form of each family, in the places where models write them.

use cellar_chat::{CallNumber, Calls, ChatSplitter, Part, family_of};
use serde_json::{Value, json};

use super::goldens::{ALL, GoldenAnswer};
use super::support::{call, check, read, split, text, thought, tool, with, without};

/// Calls with their arguments as values.
#[track_caller]
fn calls(parts: &[Part]) -> Vec<(usize, String, Value)> {
    let mut calls = Vec::new();
    for part in parts {
        match part {
            Part::ToolStart { index, name, .. } => calls.push((*index, name.clone(), Value::Null)),
            Part::ToolArguments { text, .. } => {
                calls.last_mut().unwrap().2 = serde_json::from_str(text).unwrap();
            }
            Part::Text(_) | Part::Reasoning(_) => {}
        }
    }
    calls
}

fn f() -> (usize, String, Value) {
    (0, "f".to_owned(), json!({"city": "Paris", "days": 3}))
}

fn others(parts: Vec<Part>) -> Vec<Part> {
    let is_other = |part: &Part| matches!(part, Part::Text(_) | Part::Reasoning(_));
    parts.into_iter().filter(is_other).collect()
}

fn splitter(golden: &GoldenAnswer) -> ChatSplitter {
    let splitter = with(golden.template);
    assert!(splitter.reads_calls(), "{}", golden.name);
    splitter
}

#[test]
fn one_call_and_two_are_read() {
    for golden in ALL {
        let splitter = splitter(golden);
        let one = read(&splitter, golden.one);
        assert_eq!(calls(&one), [f()], "{}", golden.name);
        assert_eq!(others(one), [], "{}", golden.name);
        let two = read(&splitter, golden.two);
        let both = [f(), (1, "g".to_owned(), json!({}))];
        assert_eq!(calls(&two), both, "{}", golden.name);
        assert_eq!(others(two), [], "{}", golden.name);
        let first = read(&splitter.with_calls(CallNumber::One), golden.two);
        assert_eq!(calls(&first), [f()], "{}", golden.name);
    }
}

#[test]
fn text_stands_around_calls() {
    // These begin an answer, or end it.
    let apart = ["Llama 3"];
    for golden in ALL.iter().filter(|golden| !apart.contains(&golden.name)) {
        let written = format!("I look.\n\n{}\n\nDone.", golden.one);
        let parts = read(&splitter(golden), &written);
        assert_eq!(calls(&parts), [f()], "{}", golden.name);
        assert_eq!(
            others(parts),
            [text("I look."), text("Done.")],
            "{}",
            golden.name
        );
    }
}

#[test]
fn calls_follow_reasoning() {
    for golden in ALL {
        let written = format!("<think>\nHm.\n</think>\n\n{}", golden.one);
        let parts = read(&splitter(golden), &written);
        assert_eq!(calls(&parts), [f()], "{}", golden.name);
        assert_eq!(others(parts), [thought("Hm.")], "{}", golden.name);
    }
}

#[test]
fn a_call_in_reasoning_that_does_not_end_is_one() {
    for golden in ALL {
        let splitter = splitter(golden);
        let parts = read(&splitter, &format!("<think>I call it.\n{}", golden.two));
        assert_eq!(calls(&parts).len(), 2, "{}", golden.name);
        assert_eq!(others(parts), [thought("I call it.")], "{}", golden.name);
        // Where it ends, the model thought of a call.
        let mused = format!("I could write {}\nor not.", golden.one);
        let parts = read(&splitter, &format!("<think>{mused}</think>No."));
        assert_eq!(parts, [thought(&mused), text("No.")], "{}", golden.name);
        let mused = format!("I could write {}", golden.none);
        let parts = read(&splitter, &format!("<think>{mused}"));
        assert_eq!(parts, [thought(&mused)], "{}", golden.name);
    }
}

#[test]
fn what_only_looks_like_a_call_is_text_as_it_is() {
    for golden in ALL {
        check(&splitter(golden), golden.none, &[text(golden.none)]);
        let followed = format!("{}\n{}", golden.none, golden.one);
        // A broken list or fence is followed by its own ends.
        let parts = read(&splitter(golden), &followed);
        assert_eq!(calls(&parts), [f()], "{}: {followed}", golden.name);
    }
}

#[test]
fn a_call_that_was_cut_off_is_not_complete() {
    for golden in ALL {
        let splitter = splitter(golden);
        for (at, _) in golden.one.char_indices().skip(1) {
            let cut = &golden.one[..at];
            let parts = split(&splitter, &[cut]);
            match parts.as_slice() {
                [Part::Text(text)] => assert_eq!(text, cut, "{}", golden.name),
                // A mark alone may say nothing.
                [] => assert!(at < 24, "{}: {cut:?}", golden.name),
                [Part::ToolStart { name, .. }, rest @ ..] => {
                    assert_eq!(name, "f");
                    let arguments = match rest {
                        [Part::ToolArguments { text, .. }] => text.as_str(),
                        rest => {
                            assert_eq!(rest, [], "{}: {cut:?}", golden.name);
                            ""
                        }
                    };
                    let value = serde_json::from_str::<Value>(arguments);
                    assert!(
                        value.is_err() || value.unwrap() == f().2,
                        "{cut:?}: {arguments}"
                    );
                }
                other => panic!("{}: {cut:?}: {other:?}", golden.name),
            }
        }
    }
}

/// Broken at any place, an answer is read without a panic, and does not depend on its pieces.
#[test]
fn broken_answers_do_not_depend_on_their_pieces() {
    for golden in ALL {
        let splitter = splitter(golden);
        for (at, c) in golden.two.char_indices().step_by(2) {
            let (before, after) = (&golden.two[..at], &golden.two[at + c.len_utf8()..]);
            for broken in [
                format!("{before}{after}"),
                format!("<think>{before}\n{after}"),
            ] {
                let whole = split(&splitter, &[&broken]);
                let characters: Vec<String> = broken.chars().map(String::from).collect();
                let pieces: Vec<&str> = characters.iter().map(String::as_str).collect();
                assert_eq!(
                    split(&splitter, &pieces),
                    whole,
                    "{}: {broken:?}",
                    golden.name
                );
            }
        }
    }
}

#[test]
fn without_tools_calls_are_text() {
    for golden in ALL.iter().filter(|golden| golden.name != "Solar-Open") {
        let plain = without(golden.template, "");
        check(&plain, golden.one, &[text(golden.one)]);
    }
}

#[test]
fn an_unknown_form_is_text() {
    for template in ["", "{{ messages }}", "<start_of_turn>model"] {
        assert_eq!(family_of(template), None);
        let splitter = with(template);
        assert!(!splitter.reads_calls());
        for golden in ALL {
            check(&splitter, golden.one, &[text(golden.one)]);
        }
    }
}

#[test]
fn models_name_their_calls() {
    for (name, ids) in [
        ("Kimi-K2", ["functions.f:0", "functions.g:1"]),
        ("Mistral Small 3.2", ["abcdefghi", "abcdefghj"]),
        ("Solar-Open", ["abcdefgh0", "abcdefgh1"]),
    ] {
        let golden = ALL.iter().find(|golden| golden.name == name).unwrap();
        let parts = read(&splitter(golden), golden.two);
        let named = parts.iter().filter_map(|part| match part {
            Part::ToolStart { id, .. } => id.as_deref(),
            _ => None,
        });
        assert_eq!(named.collect::<Vec<_>>(), ids);
    }
    // The same name twice is none.
    let twice = "[TOOL_CALLS]f[CALL_ID]a[ARGS]{}[TOOL_CALLS]g[CALL_ID]a[ARGS]{}";
    let parts = read(&with("[TOOL_CALLS] [CALL_ID] [ARGS]"), twice);
    let Some(Part::ToolStart { id, .. }) = parts.get(2) else {
        panic!("{parts:?}");
    };
    assert_eq!(*id, None);
}

#[test]
fn small_faults_in_arguments_are_mended() {
    for (template, written, arguments) in [
        (
            "<tool_call>",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"city\": \"Pa\nris\",}}</tool_call>",
            "{\"city\": \"Pa\\nris\"}",
        ),
        (
            "[TOOL_CALLS] [ARGS]",
            "[TOOL_CALLS]f[ARGS]{'city': 'it's', 'days': None}",
            "{\"city\": \"it's\", \"days\": null}",
        ),
        (
            "<|channel|><|message|>",
            " to=functions.f<|channel|>commentary json<|message|>{\"city\": \"a\tb\",}<|call|>",
            "{\"city\": \"a\\tb\"}",
        ),
    ] {
        check(&with(template), written, &call(0, "f", arguments));
    }
}

#[test]
fn arguments_that_cannot_be_read_stay_as_they_are() {
    for (template, written, arguments) in [
        (
            "<tool_call>",
            "<tool_call>{\"name\": \"f\", \"arguments\": {\"city\": Paris}}\n</tool_call>",
            "{\"city\": Paris}}",
        ),
        (
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"city\" \"Paris\"}<｜tool▁call▁end｜>",
            "{\"city\" \"Paris\"}",
        ),
        (
            "[TOOL_CALLS] [ARGS]",
            "[TOOL_CALLS]f[ARGS]{\"days\": 3, \"city\": Paris}",
            "{\"days\": 3, \"city\": Paris}",
        ),
        (
            "<|channel|><|message|>",
            " to=functions.f<|channel|>commentary json<|message|>{\"city\": Paris}<|call|>",
            "{\"city\": Paris}",
        ),
    ] {
        check(&with(template), written, &call(0, "f", arguments));
    }
}

#[test]
fn types_are_found_behind_references() {
    let tools = vec![tool(
        "f",
        json!({
            "properties": {"mood": {"$ref": "#/$defs/mood"}, "deep": {"allOf": [{"$ref": "#/$defs/deep"}]},
                           "round": {"$ref": "#/properties/round"}},
            "$defs": {"mood": {"enum": ["1", "2"]}, "deep": {"type": "object"}},
        }),
    )];
    let template = "<function=x><parameter=y>";
    let splitter = ChatSplitter::new(template, "", Calls::Free(tools));
    let written = "<function=f><parameter=mood>1</parameter><parameter=deep>{'a': 1}</parameter>\
                   <parameter=round>3</parameter></function>";
    let arguments = "{\"mood\": \"1\", \"deep\": {\"a\":1}, \"round\": 3}";
    check(&splitter, written, &call(0, "f", arguments));
}

#[test]
fn long_texts_of_marks_come_as_they_are() {
    let splitter = with("<function=x><parameter=y>");
    let file = "fn main() {\n    // </param <parameter=x> {\"a\"}\n}\n";
    let written = format!(
        "<tool_call>\n<function=f>\n<parameter=text>\n{file}\n</parameter>\n</function>\n</tool_call>"
    );
    let arguments = format!("{{\"text\": {}}}", Value::from(file));
    check(&splitter, &written, &call(0, "f", &arguments));
    // A text is given out before it ends.
    let mut stream = splitter.clone();
    let parts = stream.push("<function=f><parameter=text>Once upon a time");
    let given = parts.last().unwrap();
    let text = "{\"text\": \"Once upon a time".to_owned();
    assert_eq!(*given, Part::ToolArguments { index: 0, text });
}

#[test]
fn an_answer_of_one_letter_a_piece_takes_linear_time() {
    let splitter = with("<tool_call> <arg_key>");
    let text = "x < y ".repeat(20_000);
    let written = format!(
        "{text}<tool_call>f<arg_key>list</arg_key><arg_value>[\"{text}\"]</arg_value></tool_call>"
    );
    let mut stream = splitter.clone();
    let mut n_parts = 0;
    for c in written.chars() {
        n_parts += stream.push(c.encode_utf8(&mut [0; 4])).len();
    }
    n_parts += stream.finish().len();
    assert!(n_parts > 20_000);
    assert!(stream.has_calls());
    let forced = ChatSplitter::new("", "", Calls::Forced);
    assert!(forced.reads_calls());
}
