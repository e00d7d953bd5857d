//! Grammars of answers whose text has a form: the text, or calls in its place, and thoughts before
//! either.
//!
//! Invariant: an answer is a text of the form, or calls of the given tools; free text is
//! impossible. Thoughts are free, and come only where the template shows them.

use crate::family::{Family, Start};
use crate::grammar::{
    AnswerContext, CallGrammar, CallRules, CallsAsked, allowed, forced, of_family,
};
use crate::harmony;
use crate::harmony_grammar;
use crate::mark_rules::Marks;
use crate::style::{self, Style};
use crate::tool::{CallNumber, Tool};

/// An answer that is a text of this form, the right side of a rule, or calls of these tools where
/// there are any; with a thought first where the model thinks. `None` where the answer is the text
/// and nothing else.
pub fn of_format(
    context: AnswerContext<'_>,
    tools: &[Tool],
    number: CallNumber,
    format: &str,
) -> Option<CallGrammar> {
    let AnswerContext {
        template,
        prompt,
        tokenizer,
    } = context;
    if harmony::calls_by(template) {
        let marks = Marks::new(tokenizer);
        return Some(harmony_grammar::of_format(marks, tools, format));
    }
    let prompt = prompt.trim_end();
    let family = Family::of_template(template);
    let asked = CallsAsked {
        prompt,
        tools,
        number,
        schema_of: allowed,
    };
    let mut marks = Marks::new(tokenizer);
    let own = family.filter(|_| !tools.is_empty());
    let own = own.and_then(|family| of_family(family, &mut marks, asked));
    let calls = match own {
        Some(calls) => Some(calls),
        None => {
            marks = Marks::new(tokenizer);
            (!tools.is_empty()).then(|| forced(tools, number, allowed))
        }
    };
    let thought = Thought::before(&mut marks, template, prompt);
    if calls.is_none() && thought.is_none() {
        return None;
    }
    let Thought { first, rules } = thought.unwrap_or_default();
    let head = head(&mut marks, template, prompt);
    let (call, call_rules) = match calls {
        Some(CallRules { all, rules }) => (format!(" | {all}"), rules),
        None => Default::default(),
    };
    let start = format!("start: {first} answer\nanswer: {head} format{call}\nformat: {format}\n");
    Some(marks.grammar(start + &rules + &call_rules))
}

/// The header before the text of an answer, which names its recipient.
fn head(marks: &mut Marks<'_>, template: &str, prompt: &str) -> String {
    if harmony::has_recipients(template) {
        return format!("({})?", marks.mark(" to=user<|message|>"));
    }
    let family = Family::of_template(template);
    match family.map(|family| (family.start, family.open)) {
        Some((Start::Recipient { user }, [open, ..])) => {
            let open = if prompt.ends_with(open) {
                String::new()
            } else {
                marks.mark(open)
            };
            format!("{open} {}", marks.mark(user))
        }
        _ => String::new(),
    }
}

/// A thought before an answer.
#[derive(Default)]
struct Thought {
    /// The pattern at the beginning of an answer.
    first: String,
    /// The rules that it refers to.
    rules: String,
}

impl Thought {
    /// The thought that the prompt has begun, or that the model may begin; `None` where there is
    /// none.
    fn before(marks: &mut Marks<'_>, template: &str, prompt: &str) -> Option<Self> {
        if harmony::has_recipients(template) {
            let (open, rules) = (marks.mark(" to=self<|message|>"), "<|eom|>");
            let next = marks.mark("<|start|>assistant");
            let first = format!("({open} thought {next})?");
            let has_end = marks.has_an_end(rules);
            let rules = marks.until("thought", rules);
            return (!has_end).then_some(Self { first, rules });
        }
        let pairs = Style::of_template(template).pairs;
        if let Some(begun) = pairs.iter().find(|pair| prompt.ends_with(pair.open)) {
            return Some(Self {
                first: "thought SPACES?".to_owned(),
                rules: marks.until("thought", begun.close),
            });
        }
        let (mut ways, mut rules) = (Vec::new(), String::new());
        let shown = pairs.iter().filter(|pair| style::shows(template, pair));
        for (at, pair) in shown.enumerate() {
            if prompt.ends_with(pair.close) {
                return None;
            }
            if marks.has_an_end(pair.open) || marks.has_an_end(pair.close) {
                continue;
            }
            ways.push(format!(
                "SPACES? {} thought_{at} SPACES?",
                marks.mark(pair.open)
            ));
            rules += &marks.until(&format!("thought_{at}"), pair.close);
        }
        let first = format!("({})?", ways.join(" | "));
        (!ways.is_empty()).then_some(Self { first, rules })
    }
}
