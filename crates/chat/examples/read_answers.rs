//! Reads answers of chat models: lines of JSON with `template`, `tools`, `prompt` and `text` in,
//! lines with the `family`, `reasoning`, `text` and `calls` out. `scripts/corpus/calls.py` drives
//! it.
//!
//! Each answer is read whole and character by character; it is an error where the two differ.

use std::error::Error;
use std::io::{self, BufRead, Write};

use cellar_chat::{Arguments, Calls, ChatSplitter, Part, Tool, ToolPaths, family_of};
use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn Error>> {
    let mut out = io::stdout().lock();
    for line in io::stdin().lock().lines() {
        let line: Value = serde_json::from_str(&line?)?;
        let field = |name: &str| line[name].as_str().unwrap_or_default();
        let tools: Vec<Tool> = line["tools"]
            .as_array()
            .into_iter()
            .flatten()
            .map(tool)
            .collect();
        let calls = if tools.is_empty() {
            Calls::None
        } else {
            Calls::Free(tools)
        };
        let splitter = ChatSplitter::new(field("template"), field("prompt"), calls);
        let text = field("text");
        let whole = read(splitter.clone(), [text]);
        let characters: Vec<String> = text.chars().map(String::from).collect();
        let pieces = read(splitter, characters.iter().map(String::as_str));
        if whole != pieces {
            return Err(format!("{text:?} whole: {whole}, in pieces: {pieces}").into());
        }
        let answer = json!({"family": family_of(field("template")), "answer": whole});
        writeln!(out, "{answer}")?;
    }
    Ok(())
}

fn tool(value: &Value) -> Tool {
    Tool {
        name: value["name"].as_str().unwrap_or_default().to_owned(),
        parameters: value["parameters"].clone(),
        arguments: Arguments::Free,
        paths: ToolPaths::default(),
    }
}

fn read<'t>(mut splitter: ChatSplitter, pieces: impl IntoIterator<Item = &'t str>) -> Value {
    let (mut reasoning, mut text) = (String::new(), String::new());
    let mut calls: Vec<(String, Option<String>, String)> = Vec::new();
    let mut take = |parts: Vec<Part>| {
        for part in parts {
            match part {
                Part::Text(more) => text.push_str(&more),
                Part::Reasoning(more) => reasoning.push_str(&more),
                Part::ToolStart { name, id, .. } => calls.push((name, id, String::new())),
                Part::ToolArguments { index, text } => calls[index].2.push_str(&text),
            }
        }
    };
    for piece in pieces {
        take(splitter.push(piece));
    }
    take(splitter.finish());
    let calls = calls.into_iter();
    let calls: Vec<Value> = calls
        .map(|(name, id, arguments)| json!({"name": name, "id": id, "arguments": arguments}))
        .collect();
    json!({"reasoning": reasoning, "text": text, "calls": calls})
}
