//! From what a text is held to, to the [`Grammar`] that does it.
//!
//! Invariant: what cannot be compiled is refused with the path of its schema and a pointer into it; a
//! tool that asks to be held to its schema is, or the request is refused. Knows no API.

use cellar_chat::grammar::{self, AnswerContext};
use cellar_chat::{Arguments, CallNumber, Calls, Tool};
use cellar_grammar::{Grammar, GrammarCompiler};
use serde_json::json;

use crate::error::ApiError;
use crate::generate::{Constraint, Output, ToolUse};
use crate::model::ServedModel;

/// The largest schema that is compiled, in bytes.
const MAX_SCHEMA: usize = 1 << 18;

/// The constraint of a text.
pub(crate) struct Held {
    pub(crate) grammar: Grammar,
    /// The form of its calls, where it is nothing but calls.
    pub(crate) calls: Option<Calls>,
}

/// The constraint of a text that follows this prompt; `None` where it is free.
pub(crate) fn held_to(
    model: &ServedModel,
    constraint: Option<&Constraint>,
    output: &Output,
    prompt: &str,
) -> Result<Option<Held>, ApiError> {
    let grammar = match (constraint, output) {
        (Some(Constraint::JsonObject), _) => {
            let schema = json!({"type": "object"}).to_string();
            json_schema(model, &schema, "response_format")?
        }
        (Some(Constraint::JsonSchema { schema, param }), _) => {
            json_schema(model, &schema.to_string(), param)?
        }
        (Some(Constraint::Calls { tools, number }), _) => {
            return required(model, tools, *number, prompt).map(Some);
        }
        (None, Output::Chat(ToolUse::Auto { tools, .. })) => {
            let is_strict = |tool: &&Tool| tool.arguments == Arguments::Strict;
            match tools.iter().find(is_strict) {
                Some(first) => strict(model, tools, first)?,
                None => return Ok(None),
            }
        }
        (None, _) => return Ok(None),
    };
    let calls = None;
    Ok(Some(Held { grammar, calls }))
}

/// A text that is nothing but calls: in the model's own form, or where it has none that a grammar
/// can say, as JSON.
fn required(
    model: &ServedModel,
    tools: &[Tool],
    number: CallNumber,
    prompt: &str,
) -> Result<Held, ApiError> {
    let context = AnswerContext {
        template: model.template_source().unwrap_or_default(),
        prompt,
        tokenizer: model.tokenizer(),
    };
    let own = grammar::of_required(context, tools, number);
    if let Some(own) = own.filter(|own| own.lark.len() <= MAX_SCHEMA)
        && let Ok(compiler) = model.grammars()
        && let Ok(grammar) = compiler.lark_in_text(&own.lark, &own.named)
    {
        let calls = Some(Calls::Free(tools.to_vec()));
        return Ok(Held { grammar, calls });
    }
    let lark = grammar::of_forced(tools, number);
    let grammar = of_tools(model, tools, &lark, |compiler| compiler.lark(&lark))?;
    let calls = Some(Calls::Forced);
    Ok(Held { grammar, calls })
}

/// The grammar of free text in which calls are held to schemas, as at least this tool asks for.
fn strict(model: &ServedModel, tools: &[Tool], first: &Tool) -> Result<Grammar, ApiError> {
    let template = model.template_source().unwrap_or_default();
    let Some(grammar) = grammar::of_free(template, model.tokenizer(), tools) else {
        let param = first.paths.strict.clone();
        let message = format!(
            "'{param}' is not supported for this model, which writes calls in a form that cannot be \
             held to a schema in the middle of a text: leave it out, or use 'tool_choice' required"
        );
        return Err(ApiError::unsupported(param, message));
    };
    of_tools(model, tools, &grammar.lark, |compiler| {
        compiler.lark_in_text(&grammar.lark, &grammar.named)
    })
}

/// Compiles a grammar of calls; an error is in the parameters of one of the tools.
fn of_tools(
    model: &ServedModel,
    tools: &[Tool],
    lark: &str,
    compile: impl FnOnce(&GrammarCompiler) -> Result<Grammar, cellar_grammar::GrammarError>,
) -> Result<Grammar, ApiError> {
    check_size(lark.len(), "tools")?;
    let of = |param: String| {
        move |error| ApiError {
            param: Some(param),
            ..ApiError::from(error)
        }
    };
    let compiler = model.grammars().map_err(of("tools".to_owned()))?;
    compile(compiler).map_err(|error| {
        let wrong = tools.iter().filter(|tool| tool.parameters.is_object());
        let mut wrong = wrong.filter_map(|tool| {
            let error = compiler.json_schema(&tool.parameters.to_string()).err()?;
            Some(of(tool.paths.parameters.clone())(error))
        });
        let first = wrong.next();
        first.unwrap_or_else(|| of("tools".to_owned())(error))
    })
}

fn json_schema(model: &ServedModel, schema: &str, param: &str) -> Result<Grammar, ApiError> {
    check_size(schema.len(), param)?;
    let wrong = |error| ApiError {
        param: Some(param.to_owned()),
        ..ApiError::from(error)
    };
    let grammar = model.grammars().map_err(wrong)?.json_schema(schema);
    grammar.map_err(wrong)
}

fn check_size(n_bytes: usize, param: &str) -> Result<(), ApiError> {
    match n_bytes > MAX_SCHEMA {
        true => {
            let message = format!("the schema has {n_bytes} bytes, of at most {MAX_SCHEMA}");
            Err(ApiError::invalid_param(param, message))
        }
        false => Ok(()),
    }
}
