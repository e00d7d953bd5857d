//! Finds the [`HistoryShape`] of a template: renders short chats in each form and looks for their
//! texts.
//!
//! Invariant: at most [`MAX_RENDERINGS`] renderings, each within the limits of a template. Where no
//! form shows what it should, the default stays.

use std::cell::Cell;

use serde_json::{Map, Value, json};

use super::{
    ArgumentsForm, CallContent, CallForm, CallsPerMessage, ContentForm, Definitions, HistoryShape,
    IdForm, QuestionAfterResults, REASONING, ReasoningForm, ResultForm, SystemForm, TextOfCalls,
    python_json,
};
use crate::chat_template::{ChatTemplate, GenerationPrompt, TemplateTokens};

/// Texts that no template has.
const USER: &str = "probe-user";
const SYSTEM: &str = "probe-system";
const TEXT: &str = "probe-text";
const THOUGHT: &str = "probe-thought";
const VALUE: &str = "probe-value";
const RESULT: &str = "probe-result";
const TOOL: &str = "probe_tool";
/// A second call.
const OTHER_VALUE: &str = "probe-other";
const OTHER_RESULT: &str = "probe-second";

/// Ids as servers make them, which are not as Mistral's.
const IDS: [&str; 2] = ["call_00000000000000000001", "call_00000000000000000002"];

/// More than any template needs.
const MAX_RENDERINGS: usize = 100;

/// Renders chats of one template.
struct Probe<'t> {
    template: &'t ChatTemplate,
    tools: Map<String, Value>,
    shape: HistoryShape,
    n_renderings: Cell<usize>,
}

impl HistoryShape {
    /// The shape that this template wants.
    pub(in crate::chat_template) fn of(template: &ChatTemplate) -> Self {
        let parameters = json!({
            "type": "object",
            "properties": {
                "probe_key": {"type": "string", "description": "A text."},
                "probe_flag": {"type": "boolean", "description": "A switch."},
            },
            "required": ["probe_key"],
        });
        let function = json!({"name": TOOL, "description": "A tool.", "parameters": parameters});
        let tool = json!({"type": "function", "function": function});
        let mut probe = Probe {
            template,
            tools: Map::from_iter([("tools".to_owned(), json!([tool]))]),
            shape: Self::default(),
            n_renderings: Cell::new(0),
        };
        probe.find_content();
        let has_calls = probe.find_calls();
        if has_calls {
            probe.find_ids();
            probe.find_number();
            probe.shape.text_of_calls = probe.find_text(None);
        }
        probe.find_reasoning();
        if has_calls {
            probe.shape.text_of_reasoned_calls = probe.find_text(Some(THOUGHT));
            probe.find_question();
        }
        probe.shape
    }
}

fn user() -> Value {
    json!({"role": "user", "content": USER})
}

fn arguments(value: &str) -> Value {
    json!({"probe_key": value, "probe_flag": true})
}

fn call(number: usize, value: &str) -> Value {
    let function = json!({"name": TOOL, "arguments": arguments(value)});
    json!({"id": IDS.get(number), "type": "function", "function": function})
}

fn result(number: usize, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": IDS.get(number), "name": TOOL, "content": text})
}

/// A chat with one call and its result.
fn called(assistant: Value) -> [Value; 3] {
    [user(), assistant, result(0, RESULT)]
}

fn has_all(text: &str, parts: &[&str]) -> bool {
    parts.iter().all(|part| text.contains(part))
}

impl Probe<'_> {
    /// The rendering of these messages in the shape found so far.
    fn render(&self, messages: &[Value], prompt: GenerationPrompt) -> Option<String> {
        let n = self.n_renderings.get();
        if n == MAX_RENDERINGS {
            return None;
        }
        self.n_renderings.set(n + 1);
        let messages = self.shape.apply(messages);
        let variables = self.shape.variables(&self.tools);
        let tokens = TemplateTokens::default();
        let text = self
            .template
            .render_json(&messages, &variables, prompt, tokens);
        text.ok()
    }

    fn shows(&self, messages: &[Value], parts: &[&str]) -> bool {
        let text = self.render(messages, GenerationPrompt::Add);
        text.is_some_and(|text| has_all(&text, parts))
    }

    /// Finds if content is a text or parts, and if the system has messages.
    fn find_content(&mut self) {
        let forms = [
            (ContentForm::Text, Definitions::Tools),
            (ContentForm::Parts, Definitions::Tools),
            (ContentForm::Text, Definitions::Functions),
        ];
        let is_shown = forms.into_iter().any(|(content, definitions)| {
            self.shape.content = content;
            self.shape.definitions = definitions;
            self.shows(&[user()], &[USER])
        });
        if !is_shown {
            self.shape = HistoryShape::default();
        }
        let messages = [json!({"role": "system", "content": SYSTEM}), user()];
        if !self.shows(&messages, &[SYSTEM, USER]) {
            self.shape.system = SystemForm::InUserMessage;
            if !self.shows(&messages, &[SYSTEM, USER]) {
                self.shape.system = SystemForm::OwnMessage;
            }
        }
    }

    /// Finds the form in which a call and its result are shown; false where there is none.
    fn find_calls(&mut self) -> bool {
        let before = self.shape.clone();
        let forms = [
            (CallForm::Field, ResultForm::Tool),
            (CallForm::Field, ResultForm::UserText),
            (CallForm::Text, ResultForm::Tool),
            (CallForm::Text, ResultForm::UserText),
        ];
        for (calls, results) in forms {
            self.shape.calls = calls;
            self.shape.results = results;
            let found = match calls {
                CallForm::Field => self.find_fields(),
                CallForm::Text => self.shows_call(),
            };
            if found {
                return true;
            }
        }
        self.shape = before;
        false
    }

    /// Of the contents with which a call is shown, the one with the shortest text: others have
    /// `None` in it, or an answer without a text.
    fn find_fields(&mut self) -> bool {
        let before = self.shape.clone();
        for ids in [IdForm::AsGiven, IdForm::Nine] {
            let mut best: Option<(usize, HistoryShape)> = None;
            for content in [CallContent::Empty, CallContent::Null, CallContent::Absent] {
                self.shape.ids = ids;
                self.shape.call_content = content;
                let n_bytes = self.find_arguments();
                let is_better = |n| best.as_ref().is_none_or(|(best, _)| n < *best);
                if let Some(n) = n_bytes.filter(|&n| is_better(n)) {
                    best = Some((n, self.shape.clone()));
                }
            }
            if let Some((_, shape)) = best {
                self.shape = shape;
                return true;
            }
        }
        self.shape = before;
        false
    }

    fn shows_call(&self) -> bool {
        self.rendered_call().is_some()
    }

    /// The text of a call and its result, where both are in it.
    fn rendered_call(&self) -> Option<String> {
        let calls = json!([call(0, VALUE)]);
        let assistant = json!({"role": "assistant", "content": null, "tool_calls": calls});
        let text = self.render(&called(assistant), GenerationPrompt::Add)?;
        // The name is in the definition of the tool as well: only the value can be looked for.
        has_all(&text, &[USER, VALUE, RESULT]).then_some(text)
    }

    /// Objects, unless the template prints them as Python does and JSON as it is. Gives the bytes
    /// of the text, where the call is shown.
    fn find_arguments(&mut self) -> Option<usize> {
        self.shape.arguments = ArgumentsForm::Json;
        let of_json = self.rendered_call();
        self.shape.arguments = ArgumentsForm::Object;
        let of_object = self.rendered_call();
        self.shape.takes_text_arguments = of_json.is_some();
        let json = python_json(&arguments(VALUE));
        let is_python = |text: &String| printed().is_some_and(|object| text.contains(&object));
        let is_as_given = |text: &String| text.contains(&json);
        match (of_object, of_json) {
            (Some(object), Some(json)) if is_python(&object) && is_as_given(&json) => {
                self.shape.arguments = ArgumentsForm::Json;
                Some(json.len())
            }
            (Some(object), _) => Some(object.len()),
            (None, Some(json)) => {
                self.shape.arguments = ArgumentsForm::Json;
                Some(json.len())
            }
            (None, None) => None,
        }
    }

    /// Finds if a call needs an id.
    fn find_ids(&mut self) {
        if self.shape.ids == IdForm::Nine || self.shape.calls == CallForm::Text {
            return;
        }
        let mut call = call(0, VALUE);
        let mut result = result(0, RESULT);
        for value in [&mut call, &mut result] {
            if let Value::Object(members) = value {
                members.remove("id");
                members.remove("tool_call_id");
            }
        }
        let assistant = json!({"role": "assistant", "content": null, "tool_calls": [call]});
        if !self.shows(&[user(), assistant, result], &[VALUE, RESULT]) {
            self.shape.ids = IdForm::Required;
        }
    }

    /// Finds if a message may have two calls.
    fn find_number(&mut self) {
        let calls = json!([call(0, VALUE), call(1, OTHER_VALUE)]);
        let messages = [
            user(),
            json!({"role": "assistant", "content": null, "tool_calls": calls}),
            result(0, RESULT),
            result(1, OTHER_RESULT),
        ];
        let parts = [VALUE, OTHER_VALUE, RESULT, OTHER_RESULT];
        if !self.shows(&messages, &parts) {
            self.shape.calls_per_message = CallsPerMessage::One;
            if !self.shows(&messages, &parts) {
                self.shape.calls_per_message = CallsPerMessage::Several;
            }
        }
    }

    /// Finds if a user may ask again right after results.
    fn find_question(&mut self) {
        let calls = json!([call(0, VALUE)]);
        let assistant = json!({"role": "assistant", "content": null, "tool_calls": calls});
        let mut messages = called(assistant).to_vec();
        messages.push(json!({"role": "user", "content": TEXT}));
        let answers = ["", " "].map(QuestionAfterResults::AfterAnswer);
        let forms = [QuestionAfterResults::AsGiven].into_iter().chain(answers);
        for form in forms {
            self.shape.question_after_results = form;
            if self.shows(&messages, &[VALUE, RESULT, TEXT]) {
                return;
            }
        }
        self.shape.question_after_results = QuestionAfterResults::AsGiven;
    }

    /// Finds the place of the text next to a call, with this reasoning or without any.
    fn find_text(&mut self, reasoning: Option<&str>) -> TextOfCalls {
        let calls = json!([call(0, VALUE)]);
        let message = |content: &str| {
            json!({
                "role": "assistant", "content": content, "reasoning_content": reasoning,
                "tool_calls": calls,
            })
        };
        let is_reasoning_shown =
            reasoning.is_some_and(|text| self.shows(&called(message("")), &[text, VALUE]));
        let mut parts = vec![VALUE, RESULT];
        parts.extend(reasoning.filter(|_| is_reasoning_shown));
        let with_text = [&[TEXT], parts.as_slice()].concat();
        let chat = called(message(TEXT));
        if self.shows(&chat, &with_text) {
            return TextOfCalls::Content;
        }
        let is_call_shown = self.shows(&chat, &parts);
        let before = self.shape.clone();
        self.shape.text_of_calls = TextOfCalls::OwnMessage;
        self.shape.text_of_reasoned_calls = TextOfCalls::OwnMessage;
        // Some templates want users and assistants to alternate, which the next question shows.
        let mut longer = chat.to_vec();
        longer.push(json!({"role": "assistant", "content": "probe-answer"}));
        longer.push(json!({"role": "user", "content": "probe-question"}));
        let is_text_shown = self.shows(&chat, &with_text) && self.shows(&longer, &[TEXT, VALUE]);
        self.shape = before;
        if is_text_shown {
            TextOfCalls::OwnMessage
        } else if is_call_shown {
            // The template leaves the text out itself.
            TextOfCalls::Content
        } else {
            TextOfCalls::Nowhere
        }
    }

    /// The name under which reasoning is read: before a call of the last answer, where most
    /// templates show it, or in an answer.
    fn find_reasoning(&mut self) {
        let names = REASONING.map(ReasoningForm::Field);
        let forms = names.into_iter().chain([ReasoningForm::Part]);
        let calls = json!([call(0, VALUE)]);
        let calling = json!({
            "role": "assistant", "content": null, "reasoning_content": THOUGHT,
            "tool_calls": calls,
        });
        let saying = json!({"role": "assistant", "content": TEXT, "reasoning_content": THOUGHT});
        for form in forms {
            self.shape.reasoning = form;
            let call = self.render(&called(calling.clone()), GenerationPrompt::Add);
            let answer = self.render(&[user(), saying.clone()], GenerationPrompt::Omit);
            let is_shown = |text: Option<String>, parts: &[&str]| {
                // A template that prints a list of parts does not read it.
                let is_printed =
                    |text: &str| text.contains("thinking'") || text.contains("thinking\"");
                text.is_some_and(|text| has_all(&text, parts) && !is_printed(&text))
            };
            if is_shown(call, &[THOUGHT, VALUE]) || is_shown(answer, &[THOUGHT, TEXT]) {
                return;
            }
        }
        self.shape.reasoning = ReasoningForm::Field(REASONING[0]);
    }
}

/// The arguments of the probe as a template prints an object that it does not convert.
fn printed() -> Option<String> {
    let template = ChatTemplate::new("{{ messages[0] }}").ok()?;
    let messages = [arguments(VALUE)];
    let prompt = GenerationPrompt::Omit;
    let tokens = TemplateTokens::default();
    template
        .render_json(&messages, &Map::new(), prompt, tokens)
        .ok()
}
