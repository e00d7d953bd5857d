//! From what a text is held to, to the [`Grammar`] that does it.
//!
//! Invariant: what cannot be compiled is refused with the path of its schema and a pointer into it,
//! and keywords that cannot be held are named in the log, or refused where all of the schema is
//! asked for. Knows no API.

use cellar_chat::grammar::{self, AnswerContext};
use cellar_chat::{Arguments, CallNumber, Calls, Tool};
use cellar_grammar::{Grammar, GrammarCompiler, GrammarError, SkippedKeyword};
use serde_json::json;

use crate::error::ApiError;
use crate::generate::{Constraint, Form, Output, ToolUse, UnheldKeywords};
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
            of_text(model, schema.len(), "response_format", |c| {
                c.json_schema(&schema)
            })?
        }
        (
            Some(Constraint::JsonSchema {
                schema,
                param,
                unheld,
            }),
            _,
        ) => {
            let text = schema.to_string();
            of_text(model, text.len(), param, |compiler| match unheld {
                UnheldKeywords::Refused => compiler.json_schema(&text),
                UnheldKeywords::Skipped => {
                    let held = compiler.holdable(schema);
                    log_skipped(param, &held.skipped);
                    compiler.json_schema(&held.schema.to_string())
                }
            })?
        }
        (Some(Constraint::Text { form, param }), _) => text_form(model, form, param)?,
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
    let held = holdable(compiler_of_tools(model)?, tools);
    let own = grammar::of_required(context, &held, number);
    if let Some(own) = own.filter(|own| own.lark.len() <= MAX_SCHEMA)
        && let Ok(compiler) = model.grammars()
        && let Ok(grammar) = compiler.lark_in_text(&own.lark, &own.named)
    {
        let calls = Some(Calls::Free(tools.to_vec()));
        return Ok(Held { grammar, calls });
    }
    let lark = grammar::of_forced(&held, number);
    let grammar = of_tools(model, &held, &lark, |compiler| compiler.lark(&lark))?;
    let calls = Some(Calls::Forced);
    Ok(Held { grammar, calls })
}

/// The grammar of free text in which calls are held to schemas, as at least this tool asks for.
fn strict(model: &ServedModel, tools: &[Tool], first: &Tool) -> Result<Grammar, ApiError> {
    let template = model.template_source().unwrap_or_default();
    let tools = holdable(compiler_of_tools(model)?, tools);
    let Some(grammar) = grammar::of_free(template, model.tokenizer(), &tools) else {
        let param = first.paths.strict.clone();
        let message = format!(
            "'{param}' is not supported for this model, which writes calls in a form that cannot be \
             held to a schema in the middle of a text: leave it out, or use 'tool_choice' required"
        );
        return Err(ApiError::unsupported(param, message));
    };
    of_tools(model, &tools, &grammar.lark, |compiler| {
        compiler.lark_in_text(&grammar.lark, &grammar.named)
    })
}

/// The compiler of the model, for what `tools` ask for.
fn compiler_of_tools(model: &ServedModel) -> Result<&GrammarCompiler, ApiError> {
    model.grammars().map_err(|error| ApiError {
        param: Some("tools".to_owned()),
        ..ApiError::from(error)
    })
}

/// Compiles a grammar of calls; an error is in the parameters of one of the tools.
fn of_tools(
    model: &ServedModel,
    tools: &[Tool],
    lark: &str,
    compile: impl FnOnce(&GrammarCompiler) -> Result<Grammar, GrammarError>,
) -> Result<Grammar, ApiError> {
    check_size(lark.len(), "tools")?;
    let of = |param: String| {
        move |error| ApiError {
            param: Some(param),
            ..ApiError::from(error)
        }
    };
    let compiler = compiler_of_tools(model)?;
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

/// A grammar that is compiled from a text of so many bytes, which stands at this path.
fn of_text(
    model: &ServedModel,
    n_bytes: usize,
    param: &str,
    compile: impl FnOnce(&GrammarCompiler) -> Result<Grammar, GrammarError>,
) -> Result<Grammar, ApiError> {
    check_size(n_bytes, param)?;
    let compiled = model.grammars().and_then(compile);
    compiled.map_err(|error| ApiError {
        param: Some(param.to_owned()),
        ..ApiError::from(error)
    })
}

fn text_form(model: &ServedModel, form: &Form, param: &str) -> Result<Grammar, ApiError> {
    match form {
        Form::Grammar(text) => of_text(model, text.len(), param, |c| c.grammar(text)),
        Form::Regex(pattern) => of_text(model, pattern.len(), param, |c| c.regex(pattern)),
        Form::Choice(texts) => {
            let n_bytes = texts.iter().map(String::len).sum();
            of_text(model, n_bytes, param, |compiler| compiler.choice(texts))
        }
    }
}

/// The tools, of which those that do not ask for all of their schema have what of it can be held.
fn holdable(compiler: &GrammarCompiler, tools: &[Tool]) -> Vec<Tool> {
    let mut tools = tools.to_vec();
    let free = |tool: &&mut Tool| tool.arguments == Arguments::Free && tool.parameters.is_object();
    for tool in tools.iter_mut().filter(free) {
        let held = compiler.holdable(&tool.parameters);
        log_skipped(&tool.paths.parameters, &held.skipped);
        tool.parameters = held.schema;
    }
    tools
}

/// Names in the log what texts are not held to.
fn log_skipped(param: &str, skipped: &[SkippedKeyword]) {
    if let Some(first) = skipped.first() {
        let n_skipped = skipped.len();
        tracing::warn!(param, n_skipped, %first, "keywords of a schema are skipped");
    }
}

fn check_size(n_bytes: usize, param: &str) -> Result<(), ApiError> {
    if n_bytes > MAX_SCHEMA {
        let message = format!("the schema has {n_bytes} bytes, of at most {MAX_SCHEMA}");
        return Err(ApiError::invalid_param(param, message));
    }
    Ok(())
}
