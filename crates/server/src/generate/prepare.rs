//! From a [`GenerateRequest`] to what a service computes: its prompt as tokens, its constraint
//! compiled, and the readers of its texts. It takes the time that it takes, on a thread for that.

use std::sync::Arc;

use cellar_chat::{Calls, ChatSplitter};
use cellar_engine::sampler::{Bias, LogitBias};
use cellar_engine::serve::{PrefixUse, TextRequest};
use cellar_engine::{CompletionOptions, Logprobs};
use model_core::tokenizer::SpecialPieces;

use super::form::{AnswerForm, HeldText};
use super::reasoning::reasoning_budget;
use super::{CallNumber, EchoedPrompt, GenerateRequest, Output, Prompt, ToolUse};
use crate::adapters;
use crate::auth::Tenant;
use crate::constrain::{Wanted, held_to};
use crate::encode::encode;
use crate::error::ApiError;
use crate::model::ServedModel;

/// A request that is ready to be computed.
pub(super) struct PreparedRequest {
    pub(super) request: TextRequest,
    pub(super) form: Arc<AnswerForm>,
    pub(super) texts: Vec<PreparedText>,
    pub(super) echo: Option<EchoedPrompt>,
}

/// What one of the texts of a request has of its own.
pub(super) struct PreparedText {
    pub(super) held: HeldText,
    pub(super) splitter: Option<ChatSplitter>,
}

/// Renders and encodes a prompt, and compiles what the answer is held to.
///
/// # Errors
/// As [`App::generate_texts`](crate::app::App::generate_texts).
pub(super) fn prepare(
    model: &ServedModel,
    tenant: Tenant,
    request: GenerateRequest,
) -> Result<PreparedRequest, ApiError> {
    let speculation = match request.speculate {
        Some(speculate) => speculate.of(model)?,
        None => model.settings().speculation,
    };
    let (prompt, max_tokens) = (request.prompt, request.max_tokens);
    let text = match &prompt {
        Prompt::Text(text) if request.echo => Some(text.clone()),
        _ => None,
    };
    let encoded = encode(model, prompt, max_tokens)?;
    let echo = request
        .echo
        .then(|| EchoedPrompt::new(model.tokenizer(), text, &encoded.tokens));
    let checkpoints = encoded.checkpoints(model)?;
    let rendered = encoded.rendered();
    let held = held_to(
        model,
        Wanted {
            constraint: request.constraint.as_ref(),
            output: &request.output,
            prompt: rendered.map_or("", String::as_str),
            skips: &request.skips,
        },
    )?;
    if held.is_some() && request.stop.ignore_eos {
        let message = "'ignore_eos' is not supported for an answer that is held to a schema, which the model \
                       has to end: use 'min_tokens'";
        return Err(ApiError::unsupported("ignore_eos", message));
    }
    // What is held to a form from its first token on has no reasoning.
    let may_think = held.as_ref().is_none_or(|held| held.may_think);
    let budget = match (request.stop.reasoning_tokens, rendered) {
        (Some(n_tokens), Some(prompt)) if may_think => {
            Some(reasoning_budget(model, n_tokens, prompt))
        }
        _ => None,
    };
    let calls = held.as_ref().and_then(|held| held.calls.clone());
    let form = Arc::new(AnswerForm {
        grammar: held.map(|held| held.grammar),
        budget,
    });
    let text = |_| PreparedText {
        held: form.hold(),
        splitter: rendered
            .and_then(|text| splitter_of(model, text, request.output.clone(), calls.clone())),
    };
    let texts: Vec<PreparedText> = (0..request.choices.n_computed().get()).map(text).collect();
    let first = texts.first().and_then(|text| text.splitter.as_ref());
    let logprobs = match request.logprobs {
        // What ranks the texts.
        Logprobs::Off if request.choices.are_ranked() => Logprobs::Top(0),
        wanted => wanted,
    };
    let mut sampler = request.sampler;
    if request.stop.ignore_eos {
        let ban = |token| LogitBias {
            token,
            bias: Bias::Ban,
        };
        let ends = model.tokenizer().end_of_generation();
        sampler.logit_bias.extend(ends.map(ban));
    }
    let request = TextRequest {
        prompt: encoded.tokens,
        pictures: encoded.pictures,
        priority: tenant.priority(request.priority),
        tenant: tenant.id(),
        tenant_limits: Some(tenant.limits()),
        prefix: PrefixUse::Within(tenant.salt(request.cache_salt.as_deref())),
        adapters: adapters::scales_of(&request.adapters, model.adapters(), model.id())?,
        checkpoints,
        options: CompletionOptions {
            sampler,
            n_predict: max_tokens,
            stop: request.stop.strings,
            includes_stop: request.stop.is_included,
            stop_tokens: request.stop.tokens,
            logprobs,
            prompt_logprobs: if request.echo {
                request.logprobs
            } else {
                Logprobs::Off
            },
            special: first.map_or(SpecialPieces::Skip, |splitter| {
                special_pieces(model, splitter)
            }),
        },
        steps: Vec::new(),
        speculation,
        long_context: None,
        ..TextRequest::default()
    };
    Ok(PreparedRequest {
        request,
        form,
        texts,
        echo,
    })
}

/// True if control tokens are text: some models write them around reasoning and calls.
pub(super) fn special_pieces(model: &ServedModel, splitter: &ChatSplitter) -> SpecialPieces {
    if splitter.reads_calls() || model.control_marks().any(|mark| splitter.knows(mark)) {
        SpecialPieces::Render
    } else {
        SpecialPieces::Skip
    }
}

/// The reader of the answer to a prompt; `forced` is the form of one that is nothing but calls.
fn splitter_of(
    model: &ServedModel,
    prompt: &str,
    output: Output,
    forced: Option<Calls>,
) -> Option<ChatSplitter> {
    let Output::Chat(tools) = output else {
        return None;
    };
    let template = model.template_source().unwrap_or_default();
    let (calls, number) = match tools {
        ToolUse::None => (Calls::None, CallNumber::Several),
        ToolUse::Auto { tools, number } => (Calls::Free(tools), number),
        ToolUse::Forced => (forced.unwrap_or(Calls::Forced), CallNumber::Several),
    };
    let wants_calls = calls != Calls::None;
    let splitter = ChatSplitter::new(template, prompt, calls).with_calls(number);
    if wants_calls && !splitter.reads_calls() {
        model.warn_of_unknown_calls();
    }
    Some(splitter)
}
