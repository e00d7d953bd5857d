//! `POST /tokenize`, `/detokenize` and `/apply-template`.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use axum::routing::MethodRouter;
use kv_core::TokenId;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialPieces, SpecialText, Tokenizer};
use serde::{Deserialize, Serialize, Serializer};
use serde_json::{Map, Value, json};

use crate::api::on_post;
use crate::api::openai::messages::{check_end, messages};
use crate::api::openai::tools::Tools;
use crate::app::App;
use crate::body_worker::run_blocking;
use crate::encode::render_as_text;
use crate::error::ApiError;
use crate::field_rule::{FieldRule, Neutral};
use crate::generate::{ChatPrompt, Prompt};
use crate::json::{self, Body};
use crate::model::Job;
use crate::models::{ModelInUse, n_ctx};

/// Text inside a prompt, whose special tokens are found.
pub(super) const PARSED: EncodeOptions = EncodeOptions {
    add: AddSpecial::Never,
    special: SpecialText::Parse,
};

#[derive(Clone, Debug, Deserialize)]
struct TokenizeFields {
    model: Option<String>,
    /// A text, as llama-server's clients send it.
    content: Option<String>,
    add_special: Option<bool>,
    parse_special: Option<bool>,
    with_pieces: Option<bool>,
    /// A text, as vLLM's clients send it.
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
    /// Messages, as vLLM's clients send them.
    messages: Option<Value>,
    /// Read with the messages.
    #[serde(rename = "tools")]
    _tools: Option<Vec<Value>>,
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// Parameters of vLLM's API that would change the tokens of messages.
pub(in crate::api) const LIMITED: [FieldRule; 1] = [FieldRule::new(
    "chat_template",
    Neutral::Empty,
    "the template is the model's, or the server's --chat-template",
)];

/// The answer without texts, which may be long.
#[derive(Debug, Serialize)]
struct Tokens {
    tokens: Vec<u32>,
}

#[derive(Clone, Debug, Deserialize)]
struct DetokenizeFields {
    model: Option<String>,
    tokens: Vec<u32>,
}

#[derive(Clone, Debug, Deserialize)]
struct TemplateFields {
    model: Option<String>,
    messages: Value,
    chat_template_kwargs: Option<Map<String, Value>>,
}

/// The tokens of a text, or of messages.
pub(crate) fn tokenize() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let mut fields: TokenizeFields = body.get()?;
        let (content, prompt) = (fields.content.take(), fields.prompt.take());
        match (content, prompt, fields.messages.take()) {
            (Some(content), None, None) => tokenize_content(&app, fields, content).await,
            (None, Some(prompt), None) => tokenize_prompt(&app, &fields, prompt).await,
            (None, None, Some(messages)) => tokenize_messages(&app, &body, fields, &messages).await,
            _ => Err(ApiError::invalid_param(
                "content",
                "one of 'content', 'prompt' and 'messages' is needed, and no other of them",
            )),
        }
    })
}

/// llama-server's form.
async fn tokenize_content(
    app: &App,
    fields: TokenizeFields,
    content: String,
) -> Result<Response, ApiError> {
    let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
    let options = EncodeOptions {
        add: match fields.add_special {
            Some(true) => AddSpecial::AsModel,
            _ => AddSpecial::Never,
        },
        special: match fields.parse_special {
            Some(false) => SpecialText::AsText,
            _ => SpecialText::Parse,
        },
    };
    let tokenizer = Arc::clone(model.tokenizer());
    let answer = move || {
        let tokens = tokenizer.encode(&content, options);
        if fields.with_pieces != Some(true) {
            let tokens = tokens.into_iter().map(|id| id.0).collect();
            return json::respond(&Tokens { tokens });
        }
        let pieces = PieceList {
            tokens: &tokens,
            tokenizer: &tokenizer,
        };
        json::respond(&Pieces { tokens: pieces })
    };
    run_blocking(answer).await
}

/// vLLM's form of a text.
async fn tokenize_prompt(
    app: &App,
    fields: &TokenizeFields,
    prompt: String,
) -> Result<Response, ApiError> {
    let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
    let options = EncodeOptions {
        add: match fields.add_special_tokens {
            Some(false) => AddSpecial::Never,
            Some(true) | None => AddSpecial::AsModel,
        },
        special: SpecialText::Parse,
    };
    let tokenizer = Arc::clone(model.tokenizer());
    let tokens = run_blocking(move || tokenizer.encode(&prompt, options)).await?;
    counted(model, tokens, fields.return_token_strs.into()).await
}

/// vLLM's form of messages.
async fn tokenize_messages(
    app: &App,
    body: &Body,
    fields: TokenizeFields,
    given: &Value,
) -> Result<Response, ApiError> {
    let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
    let mut variables = fields.chat_template_kwargs.unwrap_or_default();
    Tools::read(body)?.add_to(&mut variables);
    let chat = ChatPrompt {
        messages: messages(given, body.skips())?,
        variables,
    };
    check_end(body, &chat)?;
    let texts = fields.return_token_strs;
    let tokens = app.prompt_tokens(&model, Prompt::Chat(chat), None).await?;
    counted(model, tokens, texts.into()).await
}

/// vLLM's answer: the tokens, how many there are, and how many there can be.
async fn counted(
    model: ModelInUse,
    tokens: Vec<TokenId>,
    texts: TokenTexts,
) -> Result<Response, ApiError> {
    let answer = move || {
        let texts = (texts == TokenTexts::Given).then(|| PieceTexts {
            tokens: &tokens,
            tokenizer: model.tokenizer(),
        });
        json::respond(&TokenCount {
            count: tokens.len(),
            max_model_len: n_ctx(&model),
            tokens: tokens.iter().map(|id| id.0).collect(),
            token_strs: texts,
        })
    };
    run_blocking(answer).await
}

/// The texts of tokens in an answer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenTexts {
    Given,
    LeftOut,
}

impl From<Option<bool>> for TokenTexts {
    fn from(wanted: Option<bool>) -> Self {
        match wanted {
            Some(true) => Self::Given,
            Some(false) | None => Self::LeftOut,
        }
    }
}

#[derive(Serialize)]
struct TokenCount<'a> {
    count: usize,
    max_model_len: Option<usize>,
    tokens: Vec<u32>,
    token_strs: Option<PieceTexts<'a>>,
}

/// The texts of tokens, each of which is made when it is written.
struct PieceTexts<'a> {
    tokens: &'a [TokenId],
    tokenizer: &'a Tokenizer,
}

impl Serialize for PieceTexts<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let text = |&id| {
            let bytes = self.tokenizer.piece(id, SpecialPieces::Render);
            String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned()
        };
        serializer.collect_seq(self.tokens.iter().map(text))
    }
}

/// The answer with texts.
#[derive(Serialize)]
struct Pieces<'a> {
    tokens: PieceList<'a>,
}

/// Tokens with texts, each of which is made when it is written: all at once would take many times
/// the memory of the request.
struct PieceList<'a> {
    tokens: &'a [TokenId],
    tokenizer: &'a Tokenizer,
}

/// A token with its text, or its bytes where these are none.
#[derive(Serialize)]
struct Piece {
    id: u32,
    piece: PieceText,
}

#[derive(Serialize)]
#[serde(untagged)]
enum PieceText {
    Text(String),
    Bytes(Vec<u8>),
}

impl Serialize for PieceList<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let tokens = self.tokens.iter();
        serializer.collect_seq(tokens.map(|&id| piece(self.tokenizer, id)))
    }
}

fn piece(tokenizer: &Tokenizer, id: TokenId) -> Piece {
    let bytes = tokenizer
        .piece(id, SpecialPieces::Render)
        .unwrap_or_default();
    let piece = match String::from_utf8(bytes) {
        Ok(text) => PieceText::Text(text),
        Err(error) => PieceText::Bytes(error.into_bytes()),
    };
    Piece { id: id.0, piece }
}

/// The text of tokens.
pub(crate) fn detokenize() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: DetokenizeFields = body.get()?;
        let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
        let tokens: Vec<TokenId> = fields.tokens.into_iter().map(TokenId).collect();
        let tokenizer = Arc::clone(model.tokenizer());
        let answer = move || {
            let text = tokenizer.decode(&tokens, SpecialPieces::Render);
            let text = text.map_err(|e| ApiError::invalid_param("tokens", e.to_string()))?;
            Ok::<Response, ApiError>(json::respond(&json!({"content": text})))
        };
        run_blocking(answer).await?
    })
}

/// Messages as the model reads them.
pub(crate) fn apply_template() -> MethodRouter<App> {
    on_post(async |State(app): State<App>, request: Request| {
        let body = Body::read(request).await?;
        let fields: TemplateFields = body.get()?;
        let model = app.model_for(fields.model.as_deref(), Job::Texts).await?;
        let mut variables = fields.chat_template_kwargs.unwrap_or_default();
        Tools::read(&body)?.add_to(&mut variables);
        let chat = ChatPrompt {
            messages: messages(&fields.messages, body.skips())?,
            variables,
        };
        let render = {
            let model = model.shared();
            move || render_as_text(&model, &chat)
        };
        let prompt = run_blocking(render).await??;
        Ok::<Response, ApiError>(json::respond(&json!({"prompt": prompt})))
    })
}
