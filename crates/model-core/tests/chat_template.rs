//! Chat templates against what Jinja2, set up as `transformers` sets it up, renders from them.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests may fail the test

use std::path::Path;

use model_core::chat_template::{
    ChatMessage, ChatTemplate, ChatTemplateError, GenerationPrompt, TemplateTokens,
};

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
        let prompt = match case.add_generation_prompt {
            true => GenerationPrompt::Add,
            false => GenerationPrompt::Omit,
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
