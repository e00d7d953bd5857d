//! Chat templates against what Jinja2, set up as `transformers` sets it up, renders from them.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may fail the test

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use model_core::chat_template::{
    ChatMessage, ChatTemplate, ChatTemplateError, Clock, GenerationPrompt, TemplateTokens,
};
use serde_json::{Map, Value, json};

#[derive(serde::Deserialize)]
struct Golden {
    bos: String,
    eos: String,
    cases: Vec<Case>,
}

#[derive(serde::Deserialize)]
struct Case {
    messages: Vec<ChatMessage>,
    add_generation_prompt: bool,
    expected: Option<String>,
    refused: Option<String>,
}

fn equals_golden(name: &str) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/chat_templates");
    let source = std::fs::read_to_string(dir.join(format!("{name}.jinja"))).unwrap();
    let golden = std::fs::read_to_string(dir.join(format!("{name}.json"))).unwrap();
    let golden: Golden = serde_json::from_str(&golden).unwrap();
    let template = ChatTemplate::new(&source).unwrap();
    let tokens = TemplateTokens {
        bos: &golden.bos,
        eos: &golden.eos,
    };
    assert_eq!(golden.cases.len(), 12);
    for case in golden.cases {
        let prompt = if case.add_generation_prompt {
            GenerationPrompt::Add
        } else {
            GenerationPrompt::Omit
        };
        let rendered = template.render(&case.messages, prompt, tokens);
        match (case.expected, case.refused) {
            (Some(expected), _) => assert_eq!(rendered.unwrap(), expected, "{:?}", case.messages),
            (None, Some(reason)) => match rendered {
                Err(ChatTemplateError::Refused { message, .. }) => assert_eq!(message, reason),
                // Jinja2 also fails where a template reads the first of no messages.
                Err(ChatTemplateError::Render { .. }) => assert!(case.messages.is_empty()),
                other => panic!("{:?} gave {other:?}", case.messages),
            },
            (None, None) => panic!("a case without a result"),
        }
    }
}

#[test]
fn qwen() {
    equals_golden("qwen2.5");
}

#[test]
fn llama_3_style() {
    equals_golden("llama3");
}

#[test]
fn gemma_style() {
    equals_golden("gemma");
}

#[derive(serde::Deserialize)]
struct Expressions {
    variables: Map<String, Value>,
    groups: BTreeMap<String, Vec<Expression>>,
}

/// A template, and what Jinja2 renders if it does not refuse it.
type Expression = (String, Option<String>);

/// Renders every template of a group of `expressions.json`.
fn equals_jinja2(group: &str) {
    let table = include_str!("../../../tests/fixtures/chat_templates/expressions.json");
    let mut table: Expressions = serde_json::from_str(table).unwrap();
    let cases = table.groups.remove(group).unwrap();
    assert!(!cases.is_empty());
    let clock = Clock::Fixed(UNIX_EPOCH + Duration::from_secs(1_709_212_029));
    let messages = [json!({"role": "user", "content": "Hi"})];
    let tokens = TemplateTokens {
        bos: "<b>",
        eos: "<e>",
    };
    for (template, expected) in cases {
        let rendered = ChatTemplate::with_clock(&template, clock).and_then(|template| {
            template.render_json(&messages, &table.variables, GenerationPrompt::Add, tokens)
        });
        match expected {
            Some(expected) => assert_eq!(rendered, Ok(expected), "{template}"),
            None => assert!(rendered.is_err(), "{template}: {rendered:?}"),
        }
    }
}

#[test]
fn dates_are_those_of_python() {
    equals_jinja2("dates");
}

#[test]
fn escapes_in_literals_are_those_of_python() {
    equals_jinja2("escapes");
}

#[test]
fn expressions_are_those_of_jinja2() {
    equals_jinja2("expressions");
}

#[test]
fn filters_are_those_of_jinja2() {
    equals_jinja2("filters");
}

#[test]
fn formats_are_those_of_python() {
    equals_jinja2("formatting");
}

#[test]
fn json_is_that_of_python() {
    equals_jinja2("json");
}

#[test]
fn macros_take_more_arguments() {
    equals_jinja2("macros");
}

#[test]
fn methods_are_those_of_python() {
    equals_jinja2("methods");
}

#[test]
fn tests_and_functions_are_those_of_jinja2() {
    equals_jinja2("tests_and_functions");
}

#[test]
fn values_become_the_texts_of_python() {
    equals_jinja2("texts_of_values");
}

#[test]
fn white_space_is_that_of_jinja2() {
    equals_jinja2("white_space");
}

#[test]
fn what_changes_a_value_is_refused_with_a_way_out() {
    let template = ChatTemplate::new("{% set l = [] %}{{ l.append(1) }}").unwrap();
    let rendered = template.render(&[], GenerationPrompt::Add, TemplateTokens::default());
    let error = rendered.unwrap_err().to_string();
    let wanted = "a template must not change a list: 'append' is refused. Make a new one";
    assert!(error.contains(wanted), "{error}");
}
