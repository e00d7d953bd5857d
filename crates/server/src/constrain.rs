//! From what a text is held to, to the [`Grammar`] that does it.
//!
//! Invariant: what cannot be compiled is refused with the path of its schema and a pointer into it,
//! and keywords that cannot be held are left out by name, or refused where all of the schema is
//! asked for. Knows no API.

use cellar_chat::grammar::{self, AnswerContext};
use cellar_chat::{Arguments, CallNumber, Calls, Tool};
use cellar_grammar::{
    Grammar, GrammarCompiler, GrammarError, SkippedKeyword, choice_rule, grammar_rule, json_rule,
    regex_rule,
};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::generate::{Constraint, Form, Output, ToolUse, UnheldKeywords};
use crate::model::ServedModel;
use crate::skips::Skips;

/// The largest schema that is compiled, in bytes.
const MAX_SCHEMA: usize = 1 << 18;

/// The constraint of a text.
pub(crate) struct Held {
    pub(crate) grammar: Grammar,
    /// The form of its calls, where it is nothing but calls.
    pub(crate) calls: Option<Calls>,
    /// True if the model may think before it.
    pub(crate) may_think: bool,
}

/// What a request says of the form of its text.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'r> {
    pub(crate) constraint: Option<&'r Constraint>,
    pub(crate) output: &'r Output,
    /// The prompt before the text.
    pub(crate) prompt: &'r str,
    /// Takes the names of keywords that cannot be held.
    pub(crate) skips: &'r Skips,
}

/// The constraint of a text; `None` where it is free.
pub(crate) fn held_to(model: &ServedModel, wanted: Wanted<'_>) -> Result<Option<Held>, ApiError> {
    let tools: &[Tool] = match wanted.output {
        Output::Chat(ToolUse::Auto { tools, .. }) => tools,
        _ => &[],
    };
    match wanted.constraint {
        Some(Constraint::Calls { tools, number }) => {
            required(model, tools, *number, wanted).map(Some)
        }
        Some(constraint) => {
            let form = HeldForm::new(model, constraint, wanted.skips)?;
            of_form(model, &form, tools, wanted).map(Some)
        }
        None => {
            let mut strict_tools = tools
                .iter()
                .filter(|tool| tool.arguments == Arguments::Strict);
            let first = strict_tools.next();
            let held = |grammar| Held {
                grammar,
                calls: None,
                may_think: true,
            };
            first
                .map(|first| strict(model, tools, first).map(held))
                .transpose()
        }
    }
}

/// The form of a text, of which every part can be held.
struct HeldForm<'r> {
    /// Its path in the request.
    param: &'r str,
    kind: FormKind<'r>,
}

enum FormKind<'r> {
    Schema(Value),
    Text(&'r Form),
}

impl<'r> HeldForm<'r> {
    /// The form that this constraint says.
    fn new(
        model: &ServedModel,
        constraint: &'r Constraint,
        skips: &Skips,
    ) -> Result<Self, ApiError> {
        Ok(match constraint {
            Constraint::JsonSchema {
                schema,
                param,
                unheld,
            } => {
                check_size(schema.to_string().len(), param)?;
                let mut schema = schema.clone();
                if *unheld == UnheldKeywords::Skipped {
                    let held = compiler(model, param)?.holdable(&schema);
                    skip(skips, param, &held.skipped)?;
                    schema = held.schema;
                }
                let kind = FormKind::Schema(schema);
                Self { param, kind }
            }
            Constraint::Text { form, param } => {
                check_size(form.len(), param)?;
                let kind = FormKind::Text(form);
                Self { param, kind }
            }
            Constraint::JsonObject | Constraint::Calls { .. } => Self {
                param: "response_format",
                kind: FormKind::Schema(json!({"type": "object"})),
            },
        })
    }

    /// The grammar of a text that is nothing else.
    fn alone(&self, compiler: &GrammarCompiler) -> Result<Grammar, GrammarError> {
        match &self.kind {
            FormKind::Schema(schema) => compiler.json_schema(&schema.to_string()),
            FormKind::Text(Form::Grammar(text)) => compiler.grammar(text),
            FormKind::Text(Form::Regex(pattern)) => compiler.regex(pattern),
            FormKind::Text(Form::Choice(texts)) => compiler.choice(texts),
        }
    }

    /// The rule of it in a grammar of more.
    fn rule(&self, compiler: &GrammarCompiler) -> Result<String, GrammarError> {
        Ok(match &self.kind {
            // What compiles alone has nothing that is left out.
            FormKind::Schema(schema) => json_rule(&compiler.holdable(schema).schema),
            FormKind::Text(Form::Grammar(text)) => grammar_rule(text)?,
            FormKind::Text(Form::Regex(pattern)) => regex_rule(pattern),
            FormKind::Text(Form::Choice(texts)) => choice_rule(texts),
        })
    }
}

/// A text of a form; in a chat with thoughts before it and calls in its place, where the model
/// writes such.
fn of_form(
    model: &ServedModel,
    form: &HeldForm<'_>,
    tools: &[Tool],
    wanted: Wanted<'_>,
) -> Result<Held, ApiError> {
    let compiler = compiler(model, form.param)?;
    let of_param = |error| ApiError {
        param: Some(form.param.to_owned()),
        ..ApiError::from(error)
    };
    let alone = form.alone(compiler).map_err(of_param)?;
    let number = match wanted.output {
        Output::Chat(ToolUse::Auto { number, .. }) => *number,
        _ => CallNumber::Several,
    };
    let chat = match wanted.output {
        Output::Chat(_) => {
            let rule = form.rule(compiler).map_err(of_param)?;
            grammar::of_format(context(model, wanted.prompt), tools, number, &rule)
        }
        Output::Text => None,
    };
    let Some(chat) = chat else {
        return Ok(Held {
            grammar: alone,
            calls: None,
            may_think: false,
        });
    };
    let grammar = of_tools(model, tools, &chat.lark, |compiler| {
        compiler.lark_in_text(&chat.lark, &chat.named)
    })?;
    Ok(Held {
        grammar,
        calls: None,
        may_think: true,
    })
}

/// The model and the prompt of an answer.
fn context<'r>(model: &'r ServedModel, prompt: &'r str) -> AnswerContext<'r> {
    AnswerContext {
        template: model.template_source().unwrap_or_default(),
        prompt,
        tokenizer: model.tokenizer(),
    }
}

/// A text that is nothing but calls: in the model's own form, or where it has none that a grammar
/// can say, as JSON.
fn required(
    model: &ServedModel,
    tools: &[Tool],
    number: CallNumber,
    wanted: Wanted<'_>,
) -> Result<Held, ApiError> {
    let held = holdable(compiler(model, "tools")?, tools, wanted.skips)?;
    let may_think = false;
    let own = grammar::of_required(context(model, wanted.prompt), &held, number);
    if let Some(own) = own.filter(|own| own.lark.len() <= MAX_SCHEMA)
        && let Ok(compiler) = model.grammars()
        && let Ok(grammar) = compiler.lark_in_text(&own.lark, &own.named)
    {
        return Ok(Held {
            grammar,
            calls: Some(Calls::Free(tools.to_vec())),
            may_think,
        });
    }
    let lark = grammar::of_forced(&held, number);
    let grammar = of_tools(model, &held, &lark, |compiler| compiler.lark(&lark))?;
    Ok(Held {
        grammar,
        calls: Some(Calls::Forced),
        may_think,
    })
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

/// The compiler of the model, for what this parameter asks for.
fn compiler<'m>(model: &'m ServedModel, param: &str) -> Result<&'m GrammarCompiler, ApiError> {
    model.grammars().map_err(|error| ApiError {
        param: Some(param.to_owned()),
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
    let compiler = compiler(model, "tools")?;
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

/// The tools, of which those that do not ask for all of their schema have what of it can be held.
fn holdable(
    compiler: &GrammarCompiler,
    tools: &[Tool],
    skips: &Skips,
) -> Result<Vec<Tool>, ApiError> {
    let mut tools = tools.to_vec();
    let free = |tool: &&mut Tool| tool.arguments == Arguments::Free && tool.parameters.is_object();
    for tool in tools.iter_mut().filter(free) {
        let held = compiler.holdable(&tool.parameters);
        skip(skips, &tool.paths.parameters, &held.skipped)?;
        tool.parameters = held.schema;
    }
    Ok(tools)
}

/// Names what texts are not held to of the schema at this path.
fn skip(skips: &Skips, param: &str, skipped: &[SkippedKeyword]) -> Result<(), ApiError> {
    let mut skipped = skipped.iter();
    skipped.try_for_each(|keyword| {
        let param = format!("{param}#{}", keyword.pointer);
        skips.skip(&param, &keyword.reason)
    })
}

fn check_size(n_bytes: usize, param: &str) -> Result<(), ApiError> {
    if n_bytes > MAX_SCHEMA {
        let message = format!("the schema has {n_bytes} bytes, of at most {MAX_SCHEMA}");
        return Err(ApiError::invalid_param(param, message));
    }
    Ok(())
}
