//! `POST /v1/responses`, and `GET` and `DELETE` of a response that is kept.
//!
//! Invariant: a response without `stream` is the one that the stream's last event has. What was
//! said before is in the request, or kept for the tenant that said it.

pub(crate) mod compact;
mod input;
mod kept_response;
mod output;

use axum::extract::{Extension, Path, Request, State};
use axum::response::Response;
use axum::routing::{MethodRouter, delete};
use cellar_engine::Logprobs;
use cellar_engine::serve::Choices;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use self::kept_response::KeptResponse;
use self::output::Writer;
use super::tools::{GivenTool, ToolForm, Tools, parallel, tool_list};
use crate::api::constraints::json_schema;
use crate::api::params::SamplingParams;
use crate::api::{logprobs, on_get, on_post};
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::field_rule::{FieldRule, Neutral};
use crate::generate::{ChatPrompt, Constraint, GenerateRequest, Output, Prompt};
use crate::ids::{now, random_id};
use crate::json::{self, Body};
use crate::model::{Job, ServedModel};
use crate::stream::{self, Encoder};

/// Parameters that are not done.
pub(in crate::api) const LIMITED: [FieldRule; 6] = [
    FieldRule::new(
        "background",
        Neutral::False,
        "the response is complete when it comes",
    )
    .skipped(),
    FieldRule::new("conversation", Neutral::Empty, "use 'previous_response_id'"),
    FieldRule::new(
        "prompt",
        Neutral::Empty,
        "there are no stored prompts: use 'instructions' and 'input'",
    ),
    FieldRule::new(
        "truncation",
        Neutral::Text("disabled"),
        "an input that is too long is refused with the numbers: send a shorter one",
    )
    .skipped(),
    FieldRule::new(
        "context_management",
        Neutral::Empty,
        "the model sees all items; an input that is too long is refused with the numbers",
    )
    .skipped(),
    FieldRule::new("n", Neutral::Number(1.0), "use /v1/chat/completions"),
];

/// What `include` may ask for; all but the first has no effect here.
const INCLUDABLE: [&str; 8] = [
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

/// Members of a request that its response repeats.
const REPEATED: [(&str, Value); 10] = [
    ("instructions", Value::Null),
    ("max_output_tokens", Value::Null),
    ("max_tool_calls", Value::Null),
    ("parallel_tool_calls", Value::Bool(true)),
    ("previous_response_id", Value::Null),
    ("prompt_cache_key", Value::Null),
    ("safety_identifier", Value::Null),
    ("store", Value::Bool(true)),
    ("user", Value::Null),
    ("background", Value::Bool(false)),
];

/// The fields of this endpoint alone.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct Fields {
    pub(super) model: Option<String>,
    input: Option<Value>,
    instructions: Option<String>,
    previous_response_id: Option<String>,
    store: Option<bool>,
    stream: Option<bool>,
    top_logprobs: Option<usize>,
    include: Option<Vec<String>>,
    reasoning: Option<Reasoning>,
    text: Option<TextFields>,
    metadata: Option<Map<String, Value>>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct Reasoning {
    effort: Option<String>,
    summary: Option<String>,
}

#[derive(Clone, Debug, Deserialize)]
struct TextFields {
    format: Option<Value>,
}

/// The route that answers.
pub(crate) fn create() -> MethodRouter<App> {
    on_post(handle)
}

/// The route of a response that is kept.
pub(crate) fn retrieve() -> MethodRouter<App> {
    on_get(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               Path(id): Path<String>| {
            let kept = app.conversations().get(&id, tenant);
            let kept = kept.ok_or_else(|| ApiError::unknown_response(&id))?;
            Ok::<Response, ApiError>(json::respond(&kept.response))
        },
    )
}

/// The route that forgets a response.
pub(crate) fn forget() -> MethodRouter<App> {
    delete(
        async |State(app): State<App>,
               Extension(tenant): Extension<Tenant>,
               Path(id): Path<String>| {
            if app.conversations().forget(&id, tenant) {
                Ok(json::respond(
                    &json!({"id": id, "object": "response", "deleted": true}),
                ))
            } else {
                Err(ApiError::unknown_response(&id))
            }
        },
    )
}

async fn handle(
    State(app): State<App>,
    Extension(tenant): Extension<Tenant>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = Body::read(request).await?;
    let fields: Fields = body.get()?;
    let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
    let previous = previous_messages(&app, tenant, &fields)?;
    let input = fields.input.as_ref().unwrap_or(&Value::Null);
    let messages = input::messages(previous, input, body.skips())?;
    let request = read(&body, &fields, &messages, &model)?;
    let response = response(&body, &fields, &request, &model);
    let is_kept = fields.store != Some(false);
    let kept = is_kept.then(|| KeptResponse::begin(&app, tenant, &response, messages));
    let mut writer = Writer::new(response, &model, kept, body.skips());
    let mut text = app.generate(&model, tenant, request).await?;
    drop(body);
    if fields.stream == Some(true) {
        return Ok(stream::respond(vec![text], writer));
    }
    while let Some(piece) = text.next().await {
        // The writer makes the events of a stream, which this client did not ask for.
        let _events = writer.piece(0, piece?);
    }
    Ok(json::respond(&writer.into_response()))
}

/// The messages before, where the request goes on from a response: from what there is of it, where
/// it is being written.
fn previous_messages(app: &App, tenant: Tenant, fields: &Fields) -> Result<Vec<Value>, ApiError> {
    let Some(id) = &fields.previous_response_id else {
        return Ok(Vec::new());
    };
    let kept = app.conversations().get(id, tenant);
    let kept = kept.ok_or_else(|| ApiError::unknown_previous_response(id))?;
    Ok(kept.messages())
}

/// From the JSON of a request to what is generated, where it stands for itself.
///
/// # Errors
/// [`ApiError`] 400 where a parameter is wrong or not supported, or it goes on from a response.
pub(super) fn read_alone(
    body: &Body,
    fields: &Fields,
    model: &ServedModel,
) -> Result<GenerateRequest, ApiError> {
    if fields.previous_response_id.is_some() {
        let message = "what was said before has to be in 'input' here";
        return Err(ApiError::unsupported("previous_response_id", message));
    }
    let input = fields.input.as_ref().unwrap_or(&Value::Null);
    let messages = input::messages(Vec::new(), input, body.skips())?;
    read(body, fields, &messages, model)
}

/// From the JSON of a request to what is generated.
///
/// # Errors
/// [`ApiError`] 400 where a parameter is wrong or not supported.
fn read(
    body: &Body,
    fields: &Fields,
    messages: &[Value],
    model: &ServedModel,
) -> Result<GenerateRequest, ApiError> {
    let sampling: SamplingParams = body.get()?;
    let tools = tools(body)?;
    let mut variables = fields.chat_template_kwargs.clone().unwrap_or_default();
    if let Some(effort) = fields.reasoning.as_ref().and_then(|r| r.effort.as_ref()) {
        variables.insert("reasoning_effort".to_owned(), json!(effort));
        if effort == "none" {
            variables.insert("enable_thinking".to_owned(), json!(false));
        }
    }
    tools.add_to(&mut variables);
    let messages = input::with_instructions(fields.instructions.as_deref(), messages);
    let format = fields.text.as_ref().and_then(|text| text.format.as_ref());
    Ok(GenerateRequest {
        prompt: Prompt::Chat(ChatPrompt {
            messages,
            variables,
        }),
        sampler: sampling.sampler(model.settings())?,
        max_tokens: body.max_tokens("max_output_tokens")?.or(None),
        stop: sampling.stop(model.settings())?,
        // A format binds the final text, which a response that has to call a function has not.
        constraint: tools.constraint().or(constraint(format)?),
        priority: sampling.priority(),
        cache_salt: sampling.cache_salt(),
        adapters: sampling.adapters(),
        speculate: sampling.speculate(),
        logprobs: wanted_logprobs(fields)?,
        choices: Choices::default(),
        echo: false,
        output: Output::Chat(tools.used()),
        skips: body.skips().clone(),
    })
}

/// `include` and `top_logprobs`.
fn wanted_logprobs(fields: &Fields) -> Result<Logprobs, ApiError> {
    let mut is_included = false;
    for (at, name) in fields.include.iter().flatten().enumerate() {
        if !INCLUDABLE.contains(&name.as_str()) {
            let message = format!("'{name}' cannot be included: what can is {INCLUDABLE:?}");
            return Err(ApiError::invalid_param(format!("include[{at}]"), message));
        }
        is_included |= name == INCLUDABLE[0];
    }
    let wanted = match (is_included, fields.top_logprobs) {
        (false, None | Some(0)) => Logprobs::Off,
        (_, n) => Logprobs::Top(n.unwrap_or(0)),
    };
    logprobs::check(wanted, "top_logprobs")
}

/// `text.format`.
fn constraint(format: Option<&Value>) -> Result<Option<Constraint>, ApiError> {
    let Some(format) = format.filter(|format| !format.is_null()) else {
        return Ok(None);
    };
    match format.get("type").and_then(Value::as_str) {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Constraint::JsonObject)),
        Some("json_schema") => {
            let schema = json_schema(format.get("schema"), "text.format.schema")?;
            Ok(Some(schema.strict_where(format)))
        }
        _ => {
            let message = "'text.format.type' must be text, json_object or json_schema";
            Err(ApiError::invalid_param("text.format.type", message))
        }
    }
}

/// `tools` and `tool_choice`, in the words of a chat.
///
/// # Errors
/// [`ApiError`] 400 with the path of what is wrong.
fn tools(body: &Body) -> Result<Tools, ApiError> {
    let list = tool_list(body)?;
    let mut tools = Vec::with_capacity(list.len());
    for (at, tool) in list.iter().enumerate() {
        let kind = tool.get("type").and_then(Value::as_str);
        if kind != Some("function") {
            let kind = kind.unwrap_or("none");
            let why = format!("tools of type '{kind}' are not known here: 'function' is");
            body.skips().skip(&format!("tools[{at}]"), &why)?;
            continue;
        }
        let name = tool.get("name").and_then(Value::as_str).unwrap_or_default();
        if name.is_empty() {
            let param = format!("tools[{at}].name");
            let message = format!("'{param}' is missing, or not a text");
            return Err(ApiError::invalid_param(param, message));
        }
        let mut function = json!({"name": name});
        for member in ["description", "parameters", "strict"] {
            if let Some(value) = tool.get(member).filter(|value| !value.is_null()) {
                function[member] = value.clone();
            }
        }
        let function = json!({"type": "function", "function": function});
        tools.push(GivenTool { at, function });
    }
    let choice = body.field("tool_choice").map(|choice| {
        let kind = choice.get("type").and_then(Value::as_str);
        match kind {
            Some("function") => {
                let name = choice.get("name").cloned().unwrap_or_default();
                json!({"type": "function", "function": {"name": name}})
            }
            Some("allowed_tools") => {
                let allowed = choice.get("tools").and_then(Value::as_array);
                let is_allowed = |tool: &GivenTool| {
                    let mut names = allowed.into_iter().flatten().map(|tool| tool.get("name"));
                    names.any(|name| name == tool.function.pointer("/function/name"))
                };
                tools.retain(is_allowed);
                choice.get("mode").cloned().unwrap_or_else(|| json!("auto"))
            }
            _ => choice.clone(),
        }
    });
    // An `allowed_tools` whose mode is null leaves the choice to the model.
    let choice = choice.filter(|choice| !choice.is_null());
    let tools = Tools::new(tools, choice.as_ref(), ToolForm::Flat)?;
    Ok(tools.with_number(parallel(body)?))
}

/// What a response has before there is any output.
fn response(body: &Body, fields: &Fields, request: &GenerateRequest, model: &ServedModel) -> Value {
    let given = |name: &str, default: Value| body.field(name).cloned().unwrap_or(default);
    // The shortest decimal of a number: 0.8 and not 0.800000012.
    let short = |number: f32| json!(number.to_string().parse::<f64>().unwrap_or_default());
    let reasoning = fields.reasoning.clone().unwrap_or_default();
    // A list of its fields is read as well, but has no names.
    let text = body.field("text").filter(|text| text.is_object());
    let mut text = text.cloned().unwrap_or_else(|| json!({}));
    if text.get("format").is_none_or(Value::is_null) {
        text["format"] = json!({"type": "text"});
    }
    let mut response = json!({
        "id": random_id("resp_"),
        "object": "response",
        "created_at": now(),
        "completed_at": null,
        "status": "in_progress",
        "error": null,
        "incomplete_details": null,
        "model": model.id(),
        "output": [],
        "usage": null,
        "metadata": fields.metadata.clone().unwrap_or_default(),
        "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
        "service_tier": "default",
        "temperature": short(request.sampler.temperature),
        "top_p": short(request.sampler.top_p),
        "top_logprobs": fields.top_logprobs.unwrap_or(0),
        "text": text,
        "tools": given("tools", json!([])),
        "tool_choice": given("tool_choice", json!("auto")),
        "truncation": "disabled",
    });
    for (name, default) in REPEATED {
        response[name] = given(name, default);
    }
    response
}
