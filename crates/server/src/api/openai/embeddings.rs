//! `POST /v1/embeddings`.

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use kv_core::TokenId;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{FieldRule, Neutral};
use crate::api::on_post;
use crate::app::App;
use crate::body_worker::run_blocking;
use crate::error::ApiError;
use crate::json::{self, Body};
use crate::model::{Job, ServedModel};
use crate::texts::{EmbedTexts, Embedded};

/// Texts of one request.
const MAX_TEXTS: usize = 2048;

/// Parameters that are not done.
pub(in crate::api) const LIMITED: [FieldRule; 1] = [FieldRule::new(
    "truncate_prompt_tokens",
    Neutral::Empty,
    "a text that is too long is refused with the numbers: send a shorter one",
)];

/// The fields of `/v1/embeddings`.
#[derive(Clone, Debug, Deserialize)]
struct EmbeddingFields {
    model: Option<String>,
    input: Input,
    encoding_format: Option<Format>,
    dimensions: Option<usize>,
}

/// The texts whose vectors are wanted.
#[derive(Clone, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected a text, a list of texts, a list of tokens, or a list of these"
)]
pub(in crate::api) enum Input {
    One(String),
    Many(Vec<String>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

impl Input {
    pub(in crate::api) fn texts(self) -> EmbedTexts {
        let tokens = |ids: Vec<u32>| ids.into_iter().map(TokenId).collect();
        match self {
            Self::One(text) => EmbedTexts::Texts(vec![text]),
            Self::Many(texts) => EmbedTexts::Texts(texts),
            Self::Tokens(ids) => EmbedTexts::Tokens(vec![tokens(ids)]),
            Self::TokenLists(lists) => EmbedTexts::Tokens(lists.into_iter().map(tokens).collect()),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Format {
    #[default]
    Float,
    Base64,
}

/// The route of vectors.
pub(crate) fn embeddings() -> MethodRouter<App> {
    on_post(embed)
}

async fn embed(State(app): State<App>, request: Request) -> Result<Response, ApiError> {
    let body = Body::read(request).await?;
    let fields: EmbeddingFields = body.get()?;
    let model = app
        .model_for(fields.model.as_deref(), Job::Embeddings)
        .await?;
    app.check_open()?;
    let texts = fields.input.texts();
    check_texts("input", &texts, &model)?;
    drop(body);
    let embedded = model
        .embedder()?
        .embed(texts)
        .await?
        .cut(fields.dimensions)?;
    let format = fields.encoding_format.unwrap_or_default();
    let id = model.id().to_owned();
    let answer = move || embeddings_json(&id, &embedded, format);
    run_blocking(answer).await
}

/// Vectors as OpenAI lists them.
fn embeddings_json(model: &str, embedded: &Embedded, format: Format) -> Response {
    let data = embedded.vectors.iter().enumerate().map(|(index, vector)| {
        json!({"object": "embedding", "index": index, "embedding": vector_json(vector, format)})
    });
    json::respond(&json!({
        "object": "list",
        "model": model,
        "data": data.collect::<Vec<_>>(),
        "usage": {"prompt_tokens": embedded.n_tokens, "total_tokens": embedded.n_tokens},
    }))
}

/// Checks that there are not too many texts, and that the model has all tokens of lists.
///
/// # Errors
/// [`ApiError`] 400.
pub(in crate::api) fn check_texts(
    param: &str,
    texts: &EmbedTexts,
    model: &ServedModel,
) -> Result<(), ApiError> {
    check_number(param, texts.len())?;
    let n_tokens = model.tokenizer().n_tokens();
    match texts.unknown(n_tokens) {
        None => Ok(()),
        Some(TokenId(id)) => {
            let message = format!("the token {id} is not in the vocabulary, which has {n_tokens}");
            Err(ApiError::invalid_param(param, message))
        }
    }
}

/// Checks that there are not too many texts.
///
/// # Errors
/// [`ApiError`] 400.
pub(in crate::api) fn check_number(param: &str, n: usize) -> Result<(), ApiError> {
    match n {
        1..=MAX_TEXTS => Ok(()),
        _ => {
            let message = format!("there are {n} texts: 1 to {MAX_TEXTS} are taken");
            Err(ApiError::invalid_param(param, message))
        }
    }
}

fn vector_json(vector: &[f32], format: Format) -> Value {
    match format {
        Format::Float => json!(vector),
        Format::Base64 => {
            use base64::Engine as _;
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            json!(base64::engine::general_purpose::STANDARD.encode(bytes))
        }
    }
}
