//! Checks which chat templates show a history with a tool call.
//!
//! `cargo run -p cellar-model-core --example template_history FOLDER` renders, with each `.jinja`
//! file of the folder, a user, an assistant with a call, the result of the tool and a user, as
//! clients send them in OpenAI's words. It prints what a rendering lacks of the tool's name, the
//! argument and the result, and ends with 1 where one lacks any. With `--text` it prints the
//! renderings, with `--shapes` the forms that were found.

use std::path::PathBuf;
use std::process::ExitCode;

use model_core::chat_template::{ChatTemplate, GenerationPrompt, HistoryShape, TemplateTokens};
use serde_json::{Map, Value, json};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let has_flag = |flag: &str| args.iter().any(|arg| arg == flag);
    let Some(folder) = args.iter().find(|arg| !arg.starts_with("--")) else {
        eprintln!("give the folder of the templates");
        return ExitCode::from(2);
    };
    let files = match std::fs::read_dir(folder) {
        Ok(files) => files.flatten().map(|file| file.path()),
        Err(error) => {
            eprintln!("cannot read '{folder}': {error}");
            return ExitCode::from(2);
        }
    };
    let mut files: Vec<PathBuf> = files.collect();
    files.retain(|path| path.extension().is_some_and(|name| name == "jinja"));
    files.sort();
    let mut n_wrong = 0;
    for path in &files {
        let name = path.file_stem().unwrap_or_default().to_string_lossy();
        match check(path) {
            Ok((text, _)) if has_flag("--text") => println!("== {name}\n{text}\n"),
            Ok((_, shape)) if has_flag("--shapes") => println!("{name}: {shape:?}"),
            Ok(_) => {}
            Err(why) => {
                n_wrong += 1;
                println!("{name}: {why}");
            }
        }
    }
    println!(
        "{} templates, {n_wrong} without a part of the history",
        files.len()
    );
    ExitCode::from(u8::from(n_wrong > 0))
}

/// The history as a template renders it; otherwise what it lacks.
fn check(path: &PathBuf) -> Result<(String, HistoryShape), String> {
    let source = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
    let template = ChatTemplate::new(&source).map_err(|error| error.to_string())?;
    let messages = template.history_shape().apply(&history());
    let parameters = json!({
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string", "description": "Where."}},
    });
    let function =
        json!({"name": "look_up", "description": "Looks it up.", "parameters": parameters});
    let tools = json!([{"type": "function", "function": function}]);
    let extra = Map::from_iter([("tools".to_owned(), tools)]);
    let extra = template.history_shape().variables(&extra);
    let tokens = TemplateTokens {
        bos: "<s>",
        eos: "</s>",
    };
    let text = template.render_json(&messages, &extra, GenerationPrompt::Add, tokens);
    let shape = template.history_shape();
    let text = text.map_err(|error| format!("{error} ({shape:?})"))?;
    // The definition has the name once.
    let n_names = text.matches("look_up").count();
    let has_definition = text.contains("Looks it up.");
    let parts = [
        ("the name", n_names > usize::from(has_definition)),
        ("the argument", text.contains("Lisboa")),
        ("the result", text.contains("Sunshine")),
        ("the first question", text.contains("What now?")),
        ("the last question", text.contains("And then?")),
    ];
    let missing = parts.iter().filter(|(_, is_there)| !is_there);
    let missing: Vec<&str> = missing.map(|(part, _)| *part).collect();
    if missing.is_empty() {
        Ok((text, shape.clone()))
    } else {
        Err(format!("lacks {} ({shape:?})", missing.join(", ")))
    }
}

/// Messages as OpenAI's clients send them.
fn history() -> Vec<Value> {
    let function = json!({"name": "look_up", "arguments": "{\"city\": \"Lisboa\"}"});
    let call = json!({"id": "call_k2", "type": "function", "function": function});
    vec![
        json!({"role": "user", "content": "What now?"}),
        json!({"role": "assistant", "content": null, "tool_calls": [call]}),
        json!({"role": "tool", "tool_call_id": "call_k2", "content": "Sunshine"}),
        json!({"role": "user", "content": "And then?"}),
    ]
}
