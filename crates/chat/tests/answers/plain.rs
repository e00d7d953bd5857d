//! Text, reasoning and the forms of calls that the first models had.

use cellar_chat::{CallNumber, Calls, ChatSplitter, Part};

use super::support::{after, call, check, text, thought, with, without};

const HERMES: &str = "<tool_call>";

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
        check(&without("", ""), plain, &expected);
    }
    for plain in ["Hello <tool_cal", "no [TOOL", "x  \n"] {
        check(&with(HERMES), plain, &[text(plain)]);
    }
}

#[test]
fn reasoning_is_apart_from_the_answer() {
    let plain = without("", "");
    check(
        &plain,
        "<think>\nLet me < see.\n</think>\n\nYes.\n",
        &[thought("Let me < see."), text("Yes.\n")],
    );
    check(&plain, "<think>\n\n</think>\n\nYes.", &[text("Yes.")]);
    check(&plain, " <think>cut off", &[thought("cut off")]);
    let open = without("</think>", "<|assistant|>\n<think>\n");
    check(
        &open,
        "Hm.</think>Yes. <think>",
        &[thought("Hm."), text("Yes. <think>")],
    );
    let other = without("[/THINK]", "");
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
    check(&with(HERMES), broken, &[text(broken)]);
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
        &with("<seed:tool_call>"),
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
    let forced = ChatSplitter::new("", "", Calls::Forced);
    let one = "{\"name\": \"f\", \"arguments\": {\"a\": 1}}";
    let both = [call(0, "f", "{\"a\": 1}"), call(1, "f", "{\"a\": 1}")].concat();
    check(&forced, &format!("{one}\n{one}"), &both);
}

#[test]
fn a_forced_answer_is_one_call() {
    let forced = ChatSplitter::new("", "<think>", Calls::Forced);
    check(
        &forced,
        "{\"name\": \"f\", \"arguments\": {\"a\": 1}} \n",
        &call(0, "f", "{\"a\": 1}"),
    );
}

#[test]
fn reasoning_has_the_marks_of_its_family() {
    for (template, written) in [
        (
            "<|channel>thought",
            "<|channel>thought\nHm.\n<channel|>Yes.",
        ),
        (
            "\u{25c1}/think\u{25b7}",
            "\u{25c1}think\u{25b7}Hm.\u{25c1}/think\u{25b7}Yes.",
        ),
        ("</mm:think>", "<mm:think>Hm.</mm:think>Yes."),
        (
            "<think{}></think{}>",
            "<think:opensource>Hm.</think:opensource>Yes.",
        ),
        (
            "<|inner_suffix|>",
            "<|inner_prefix|>Hm.<|inner_suffix|>Yes.",
        ),
        (
            "<|END_THINKING|>",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
        ),
        (
            "</think> <response>",
            "<think>Hm.</think><response>Yes.</response>",
        ),
        (
            "[BEGIN FINAL RESPONSE]",
            "Here are my reasoning steps:\nHm.\n[BEGIN FINAL RESPONSE]\nYes.\n[END FINAL RESPONSE]",
        ),
        (
            "<|think|><|content|>",
            "<|think|>Hm.<|end|><|begin|>assistant<|content|>Yes.<|end|>",
        ),
        (
            "<|open|><|end_of_msg|>",
            "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|>",
        ),
        (
            "to=self <|message|>",
            " to=self<|message|>Hm.<|eom|><|start|>assistant<|message|>Yes.<|eot|>",
        ),
    ] {
        let plain = without(template, "");
        check(&plain, written, &[thought("Hm."), text("Yes.")]);
    }
    // Where the prompt has begun it.
    let open = without("<|channel>thought", "<|turn>model\n<|channel>thought\n");
    check(&open, "Hm.<channel|>Yes.", &[thought("Hm."), text("Yes.")]);
    // A mark may be two tokens, of which one is a control token.
    let gemma = without("<|channel>thought", "");
    assert!(gemma.knows("<|channel>") && gemma.knows("<channel|>"));
    assert!(!gemma.knows("<eos>") && !gemma.knows(""));
    let spaces = without("", "").with_spaces();
    check(
        &spaces,
        "<think>\nHm.\n</think>\n\nYes.",
        &[thought("\nHm.\n"), text("\n\nYes.")],
    );
}

#[test]
fn functionary_begins_its_text_in_the_prompt() {
    let template = ">>>all";
    for splitter in [
        without(template, "assistant\n>>>"),
        after(template, "assistant\n>>>"),
    ] {
        check(&splitter, "all\nYes.", &[text("Yes.")]);
    }
    check(
        &after(template, "assistant\n>>>"),
        "g\n{}",
        &call(0, "g", "{}"),
    );
}

#[test]
fn answers_that_are_json_of_tools_alone_are_calls() {
    let one = "{\"name\": \"f\", \"arguments\": {\"a\": [1, \"```\"]}}";
    let two = "{\"name\": \"g\", \"arguments\": {}}";
    for template in [HERMES, "no form of calls"] {
        for written in [
            one.to_owned(),
            format!("\n {one}\n"),
            format!("```json\n{one}\n```"),
            format!("```json\n{one}"),
            format!("```\n{one}```\n"),
            format!("[{one}]"),
        ] {
            let expected = call(0, "f", "{\"a\": [1, \"```\"]}");
            check(&with(template), &written, &expected);
        }
        let mut both = call(0, "f", "{\"a\": [1, \"```\"]}").to_vec();
        both.extend(call(1, "g", "{}"));
        for written in [
            format!("{one}\n{two}"),
            format!("[{one}, {two}]"),
            format!("```json\n{one}\n```\n```json\n{two}\n```"),
        ] {
            check(&with(template), &written, &both);
        }
    }
    let mut thought_first = vec![thought("Hm.")];
    thought_first.extend(call(0, "g", "{}"));
    let written = format!("<think>Hm.</think>\n\n{two}");
    check(&with(HERMES), &written, &thought_first);
}

#[test]
fn json_that_is_no_call_alone_is_text() {
    let one = "{\"name\": \"f\", \"arguments\": {}}";
    for written in [
        "{\"name\": \"h\", \"arguments\": {}}".to_owned(),
        "{\"name\": \"f\", \"age\": 3}".to_owned(),
        "{\"a\": 1}".to_owned(),
        "[1, 2]".to_owned(),
        "`f`".to_owned(),
        "```json\n{\"a\": 1}\n```".to_owned(),
        "```python\nf()\n```".to_owned(),
        format!("{one} calls f."),
        format!("So: {one}"),
        format!("```json\n{one}\n```\nThis calls f."),
        format!("[{one}"),
        "{\"name\": \"f\", \"argum".to_owned(),
        "``".to_owned(),
    ] {
        check(&with(HERMES), &written, &[text(&written)]);
    }
    check(&without("", ""), one, &[text(one)]);
}

#[test]
fn what_can_be_no_call_is_not_held_back() {
    let mut splitter = with(HERMES);
    assert!(splitter.push("{\"name\": ").is_empty());
    let given = splitter.push("\"h\", ");
    assert_eq!(given, [text("{\"name\": \"h\",")]);
    let mut splitter = with(HERMES);
    assert_eq!(splitter.push("```rust\nfn "), [text("```rust\nfn")]);
}
