//! `POST /v1/responses/input_tokens`, which counts the tokens of a response's prompt, and
//! `/v1/responses/compact`, which makes a long conversation short.
//!
//! Invariant: an item `compaction` of this server is read back by it, also after it was started
//! again: the summary is in the item.

use axum::extract::{Extension, Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::{Fields, input, previous_messages, read};
use crate::api::on_post;
use crate::app::App;
use crate::auth::Tenant;
use crate::error::ApiError;
use crate::generate::{GenerateRequest, Output, Prompt, ToolUse};
use crate::ids::{now, random_id};
use crate::json::Body;
use crate::model::{Job, ServedModel};

/// The beginning of the content of an item of this server.
const MARK: &str = "cellar-summary:";

/// The question to the model.
const ASK: &str = "Summarize our conversation so far for the assistant who goes on with it and sees nothing \
                   else of it: the task, what was done and found, names of files and exact values that are \
                   still needed, and what comes next. Write the summary alone.";

/// Tokens of a summary where a request gives no number.
const SUMMARY_TOKENS: usize = 1024;

/// The route that counts.
pub(crate) fn input_tokens() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            let body = Body::read(request).await?;
            let fields: Fields = body.get()?;
            let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
            let request = with_previous(&app, tenant, &body, &fields, &model)?;
            let tokens = app.prompt_tokens(&model, request.prompt, None).await?;
            Ok::<Response, ApiError>(body.skips().respond(json!({
                "object": "response.input_tokens", "input_tokens": tokens.len(),
            })))
        },
    )
}

/// The route that makes a conversation short.
pub(crate) fn compact() -> MethodRouter<App> {
    on_post(
        async |State(app): State<App>, Extension(tenant): Extension<Tenant>, request: Request| {
            let body = Body::read(request).await?;
            let fields: Fields = body.get()?;
            let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
            let mut request = with_previous(&app, tenant, &body, &fields, &model)?;
            if let Prompt::Chat(chat) = &mut request.prompt {
                chat.messages.push(json!({"role": "user", "content": ASK}));
            }
            let request = GenerateRequest {
                max_tokens: request.max_tokens.or(Some(SUMMARY_TOKENS)),
                constraint: None,
                output: Output::Chat(ToolUse::None),
                ..request
            };
            let skips = body.skips().clone();
            drop(body);
            let answer = app
                .generate(&model, tenant, request)
                .await?
                .answer()
                .await?;
            let n_prompt = answer.usage.n_prompt;
            let n_tokens = answer.usage.n_tokens;
            Ok::<Response, ApiError>(skips.respond(json!({
                "id": random_id("resp_"),
                "object": "response.compaction",
                "created_at": now(),
                "output": [{
                    "type": "compaction",
                    "id": random_id("cmp_"),
                    "encrypted_content": STANDARD.encode(format!("{MARK}{}", answer.text.trim())),
                }],
                "usage": {
                    "input_tokens": n_prompt,
                    "input_tokens_details": {"cached_tokens": answer.usage.n_reused()},
                    "output_tokens": n_tokens,
                    "output_tokens_details": {"reasoning_tokens": answer.finish.n_reasoning},
                    "total_tokens": n_prompt + n_tokens,
                },
            })))
        },
    )
}

/// The request with what was said before.
fn with_previous(
    app: &App,
    tenant: Tenant,
    body: &Body,
    fields: &Fields,
    model: &ServedModel,
) -> Result<GenerateRequest, ApiError> {
    let previous = previous_messages(app, tenant, fields)?;
    let input = fields.input.as_ref().unwrap_or(&Value::Null);
    let messages = input::messages(previous, input, body.skips())?;
    read(body, fields, &messages, model)
}

/// The summary in an item; `None` where it is another server's.
pub(super) fn summary_of(item: &Map<String, Value>) -> Option<String> {
    let bytes = STANDARD
        .decode(item.get("encrypted_content")?.as_str()?)
        .ok()?;
    let text = String::from_utf8(bytes).ok()?;
    text.strip_prefix(MARK).map(str::to_owned)
}

/// A summary as a message of the user.
pub(super) fn as_message(summary: &str) -> String {
    format!("Summary of the conversation so far:\n{summary}")
}
