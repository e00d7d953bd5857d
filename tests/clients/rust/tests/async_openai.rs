//! The client async-openai against the program that `CELLAR` names.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

use async_openai::Client;
use async_openai::config::OpenAIConfig;
use async_openai::error::OpenAIError;
use async_openai::types::chat::{
    ChatCompletionMessageToolCalls, CreateChatCompletionRequest, FinishReason,
};
use async_openai::types::completions::CreateCompletionRequest;
use async_openai::types::embeddings::CreateEmbeddingRequest;
use futures::StreamExt;
use serde::Deserialize;
use serde_json::{Value, json};

const TEMPLATE: &str = "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}\
    {% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}<|assistant|>";

/// A server that ends with the test.
struct Server {
    process: Child,
    client: Client<OpenAIConfig>,
    _template: tempfile::NamedTempFile,
}

impl Server {
    fn start(arguments: &[&str]) -> Self {
        let mut template = tempfile::NamedTempFile::new().unwrap();
        template.write_all(TEMPLATE.as_bytes()).unwrap();
        let program = std::env::var("CELLAR").expect("CELLAR names the program");
        let mut command = Command::new(program);
        command.args(["serve", "--port", "0"]).args(arguments);
        if arguments.is_empty() {
            command.args(["-c", "4096", "--alias", "stories", "--chat-template"]);
            command.arg(template.path());
        }
        let mut process = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        let mut stderr = BufReader::new(process.stderr.take().unwrap());
        stderr.read_line(&mut line).unwrap();
        // What it says later is read, so that it never waits.
        std::thread::spawn(move || std::io::copy(&mut stderr, &mut std::io::sink()));
        let address = line
            .split_whitespace()
            .find(|word| word.starts_with("http://"));
        let address = address.unwrap_or_else(|| panic!("{line}"));
        let config = OpenAIConfig::new()
            .with_api_base(format!("{address}/v1"))
            .with_api_key("none");
        Self {
            process,
            client: Client::with_config(config),
            _template: template,
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _gone = self.process.kill();
        let _status = self.process.wait();
    }
}

fn chat(more: Value) -> CreateChatCompletionRequest {
    let mut body = json!({"model": "stories", "temperature": 0, "max_completion_tokens": 200,
        "messages": [{"role": "user", "content": "Once upon a time"}]});
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
    serde_json::from_value(body).unwrap()
}

fn refusal(error: OpenAIError) -> (Option<String>, Option<String>) {
    match error {
        OpenAIError::ApiError(error) => (error.api_error.code, error.api_error.param),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_chat_whole_and_streamed() {
    let server = Server::start(&[]);
    let request = chat(json!({"max_completion_tokens": 16}));
    let whole = server.client.chat().create(request).await.unwrap();
    assert_eq!(whole.choices[0].finish_reason, Some(FinishReason::Length));
    assert_eq!(whole.usage.unwrap().completion_tokens, 16);
    let text = whole.choices[0].message.content.clone().unwrap();

    let request = chat(json!({"max_completion_tokens": 16, "stream": true,
        "stream_options": {"include_usage": true}}));
    let mut stream = server.client.chat().create_stream(request).await.unwrap();
    let (mut streamed, mut usage) = (String::new(), None);
    while let Some(chunk) = stream.next().await {
        let chunk = chunk.unwrap();
        usage = chunk.usage.or(usage);
        for choice in chunk.choices {
            streamed += &choice.delta.content.unwrap_or_default();
        }
    }
    assert_eq!(streamed, text);
    let usage = usage.unwrap();
    assert_eq!(usage.completion_tokens, 16);
    assert!(usage.prompt_tokens_details.unwrap().cached_tokens.unwrap() > 0);
}

#[tokio::test]
async fn a_schema_gives_a_typed_object() {
    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Mood {
        Sad,
        Happy,
    }
    #[derive(Debug, Deserialize)]
    struct Animal {
        mood: Mood,
        legs: u8,
    }
    let server = Server::start(&[]);
    let schema = json!({"type": "object", "required": ["mood", "legs"], "additionalProperties": false,
        "properties": {"mood": {"enum": ["sad", "happy"]}, "legs": {"enum": [2, 4]}}});
    let request = chat(json!({"response_format": {"type": "json_schema",
        "json_schema": {"name": "animal", "strict": true, "schema": schema}}}));
    let answer = server.client.chat().create(request).await.unwrap();
    let text = answer.choices[0].message.content.as_ref().unwrap();
    let animal: Animal = serde_json::from_str(text).unwrap();
    assert!(matches!(animal.mood, Mood::Sad | Mood::Happy));
    assert!([2, 4].contains(&animal.legs));
}

#[tokio::test]
async fn a_tool_round_trip() {
    let server = Server::start(&[]);
    let parameters = json!({"type": "object", "required": ["city"], "additionalProperties": false,
        "properties": {"city": {"enum": ["Rome", "Oslo"]}}});
    let tools = json!([{"type": "function",
        "function": {"name": "weather", "parameters": parameters}}]);
    let choice = json!({"type": "function", "function": {"name": "weather"}});
    let request = chat(json!({"tools": tools, "tool_choice": choice}));
    let answer = server.client.chat().create(request).await.unwrap();
    let finish = answer.choices[0].finish_reason;
    assert_eq!(finish, Some(FinishReason::ToolCalls));
    let message = &answer.choices[0].message;
    let [ChatCompletionMessageToolCalls::Function(call)] =
        &message.tool_calls.as_ref().unwrap()[..]
    else {
        panic!("{message:?}");
    };
    assert_eq!(call.function.name, "weather");
    let arguments: Value = serde_json::from_str(&call.function.arguments).unwrap();
    assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()));

    let call = json!([{"id": call.id, "type": "function",
        "function": {"name": "weather", "arguments": call.function.arguments}}]);
    let messages = json!([
        {"role": "user", "content": "Once upon a time"},
        {"role": "assistant", "tool_calls": call},
        {"role": "tool", "tool_call_id": call[0]["id"], "content": "sunny"},
    ]);
    let request = chat(json!({"messages": messages, "tools": tools, "max_completion_tokens": 8}));
    let answer = server.client.chat().create(request).await.unwrap();
    assert_eq!(answer.usage.unwrap().completion_tokens, 8);
}

#[tokio::test]
async fn models_and_errors() {
    let server = Server::start(&[]);
    let models = server.client.models().list().await.unwrap();
    assert_eq!(models.data[0].id, "stories");
    let ask = async |more| server.client.chat().create(chat(more)).await;
    let unknown = server.client.models().retrieve("gpt-4").await;
    let (code, _) = refusal(unknown.unwrap_err());
    assert_eq!(code.as_deref(), Some("model_not_found"));
    // The only model has every name in requests.
    let answer = ask(json!({"model": "gpt-4", "max_completion_tokens": 1})).await;
    assert_eq!(answer.unwrap().model, "stories");
    let (_, param) = refusal(ask(json!({"temperature": -1})).await.unwrap_err());
    assert_eq!(param.as_deref(), Some("temperature"));
    let request = json!({"model": "stories", "prompt": "word ".repeat(20_000)});
    let request: CreateCompletionRequest = serde_json::from_value(request).unwrap();
    let refused = server.client.completions().create(request).await;
    let (code, _) = refusal(refused.unwrap_err());
    assert_eq!(code.as_deref(), Some("context_length_exceeded"));
}

#[tokio::test]
async fn a_stream_that_is_dropped_frees_its_place() {
    let server = Server::start(&["--alias", "stories", "--parallel", "1", "-c", "8192"]);
    let schema = json!({"type": "string", "minLength": 3000});
    let long = json!({"model": "stories", "prompt": "Once upon a time", "max_tokens": 5000,
        "stream": true, "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "long", "schema": schema}}});
    let long: CreateCompletionRequest = serde_json::from_value(long).unwrap();
    let mut stream = server
        .client
        .completions()
        .create_stream(long)
        .await
        .unwrap();
    assert!(stream.next().await.unwrap().is_ok());
    drop(stream);
    // The only place is free.
    let short = json!({"model": "stories", "prompt": "One day", "max_tokens": 3});
    let short: CreateCompletionRequest = serde_json::from_value(short).unwrap();
    let answer = server.client.completions().create(short).await.unwrap();
    assert_eq!(answer.usage.unwrap().completion_tokens, 3);
}

#[tokio::test]
async fn embeddings() {
    let model = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../fixtures/encoders/bert_tiny"
    );
    let server = Server::start(&["-m", model]);
    let request = json!({"model": "bert_tiny", "input": ["How is it?", "It rains."]});
    let request: CreateEmbeddingRequest = serde_json::from_value(request).unwrap();
    let answer = server.client.embeddings().create(request).await.unwrap();
    assert_eq!(answer.data.len(), 2);
    assert_eq!(
        answer.data[0].embedding.len(),
        answer.data[1].embedding.len()
    );
    assert_ne!(answer.data[0].embedding, answer.data[1].embedding);
}
