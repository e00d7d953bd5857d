//! [`HistoryShape`]: earlier messages in the form that a chat template reads.
//!
//! Clients send OpenAI's messages; templates differ in what they read of them: arguments as objects
//! or as JSON, `content: null` or empty next to calls, reasoning under one of five names. The shape
//! is found by rendering chats with known texts (`probe.rs`). Invariant: a template that shows
//! calls and results in some form gets this form; one that shows none gets them as text, as Hermes
//! writes them, so that no call of the history is lost silently.

mod probe;

use std::collections::{BTreeMap, HashMap, VecDeque};

use serde_json::{Map, Value, json};

use super::arguments::{object, python_json};
use super::{ChatTemplate, GenerationPrompt, TemplateTokens};

/// Names under which templates read an assistant's reasoning, and clients send it.
const REASONING: [&str; 5] = [
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
    "tool_plan",
];

/// The form of a history's messages that a chat template wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HistoryShape {
    content: ContentForm,
    system: SystemForm,
    calls: CallForm,
    results: ResultForm,
    call_content: CallContent,
    arguments: ArgumentsForm,
    /// True if a call whose arguments are a text is shown.
    takes_text_arguments: bool,
    text_of_calls: TextOfCalls,
    calls_per_message: CallsPerMessage,
    ids: IdForm,
    reasoning: ReasoningForm,
    text_of_reasoned_calls: TextOfCalls,
    question_after_results: QuestionAfterResults,
    definitions: Definitions,
}

/// The content of all messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentForm {
    Text,
    /// A list of parts: the template does not show a text.
    Parts,
}

/// The place of the first system message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SystemForm {
    OwnMessage,
    /// At the beginning of the first user message.
    InUserMessage,
}

/// The place of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallForm {
    /// `tool_calls`.
    Field,
    /// In the content, as `<tool_call>` and JSON.
    Text,
}

/// The role of results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ResultForm {
    /// `tool`.
    Tool,
    /// `user`, in `<tool_response>`.
    UserText,
}

/// The content of a message with calls and without text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallContent {
    Empty,
    Null,
    Absent,
}

/// The arguments of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ArgumentsForm {
    Object,
    Json,
}

/// The text that an assistant wrote next to calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TextOfCalls {
    /// The content of the message with the calls.
    Content,
    /// The content of a message before it.
    OwnMessage,
    /// Nowhere: the template would leave the calls out, or refuse the message.
    Nowhere,
}

/// The number of calls that a message may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CallsPerMessage {
    Several,
    /// One, and its result before the next one.
    One,
}

/// The ids of calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdForm {
    /// As the client has them, if it has any.
    AsGiven,
    /// As the client has them, and made ones otherwise.
    Required,
    /// Nine letters and digits, as Mistral's.
    Nine,
}

/// A user's message right after results.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum QuestionAfterResults {
    AsGiven,
    /// After an answer with this text, as users and assistants must alternate.
    AfterAnswer(&'static str),
}

/// The variables in which the template looks for definitions of tools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Definitions {
    Tools,
    /// The text `functions`, and `datetime` with it, as Firefunction.
    Functions,
}

/// The place of reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReasoningForm {
    Field(&'static str),
    /// A part of the content of type `thinking`.
    Part,
}

impl Default for HistoryShape {
    /// The form that `transformers` documents: text, objects, `reasoning_content`.
    fn default() -> Self {
        Self {
            content: ContentForm::Text,
            system: SystemForm::OwnMessage,
            calls: CallForm::Field,
            results: ResultForm::Tool,
            call_content: CallContent::Empty,
            arguments: ArgumentsForm::Object,
            takes_text_arguments: true,
            text_of_calls: TextOfCalls::Content,
            calls_per_message: CallsPerMessage::Several,
            ids: IdForm::AsGiven,
            reasoning: ReasoningForm::Field(REASONING[0]),
            text_of_reasoned_calls: TextOfCalls::Content,
            question_after_results: QuestionAfterResults::AsGiven,
            definitions: Definitions::Tools,
        }
    }
}

/// A call that no result has answered yet.
#[derive(Clone, Debug)]
struct OpenCall {
    id: String,
    name: String,
}

/// An assistant's message in parts.
struct Answer {
    message: Map<String, Value>,
    reasoning: Option<String>,
    calls: Vec<Value>,
}

impl Answer {
    /// A message with nothing but a call.
    fn of_call(call: Value) -> Self {
        let members = [("role", "assistant"), ("content", "")];
        let members = members.map(|(name, text)| (name.to_owned(), json!(text)));
        Self {
            message: Map::from_iter(members),
            reasoning: None,
            calls: vec![call],
        }
    }
}

/// The messages as they are written.
struct Writer<'s> {
    shape: &'s HistoryShape,
    out: Vec<Value>,
    /// Calls without results, in their order.
    open: BTreeMap<usize, OpenCall>,
    /// Those of them to which clients gave ids.
    numbers: HashMap<String, usize>,
    n_calls: usize,
    /// Calls that follow the results of those before them.
    waiting: VecDeque<Value>,
    /// True if the last message is a result.
    ends_with_result: bool,
}

impl HistoryShape {
    /// These messages of OpenAI's chat in the form that the template wants.
    pub fn apply(&self, messages: &[Value]) -> Vec<Value> {
        let mut writer = Writer {
            shape: self,
            out: Vec::with_capacity(messages.len()),
            open: BTreeMap::new(),
            numbers: HashMap::new(),
            n_calls: 0,
            waiting: VecDeque::new(),
            ends_with_result: false,
        };
        for message in messages {
            match (message, message["role"].as_str()) {
                (Value::Object(members), Some("assistant")) => writer.assistant(members.clone()),
                (Value::Object(members), Some("tool")) => writer.result(members.clone()),
                _ => {
                    writer.end_calls();
                    writer.other(message);
                }
            }
        }
        writer.end_calls();
        let mut out = writer.out;
        if self.system == SystemForm::InUserMessage {
            merge_system(&mut out);
        }
        if self.content == ContentForm::Parts {
            for message in &mut out {
                if let Some(Value::String(text)) = message.get("content") {
                    message["content"] = json!([{"type": "text", "text": text}]);
                }
            }
        }
        out
    }

    /// The variables of a rendering with those that the template reads under other names.
    pub fn variables(&self, given: &Map<String, Value>) -> Map<String, Value> {
        let mut variables = given.clone();
        if self.definitions == Definitions::Functions {
            let tools = given.get("tools").filter(|tools| !tools.is_null());
            let text = tools.map(python_json).unwrap_or_default();
            variables.entry("functions").or_insert_with(|| json!(text));
            let today = ChatTemplate::new("{{ strftime_now('%b %d %Y') }}");
            let today = today.and_then(|today| {
                today.render(&[], GenerationPrompt::Omit, TemplateTokens::default())
            });
            let today = json!(today.unwrap_or_default());
            variables.entry("datetime").or_insert(today);
        }
        variables
    }
}

impl Writer<'_> {
    /// A message of a user or the system.
    fn other(&mut self, message: &Value) {
        let last = self.out.last_mut();
        match (self.shape.results, self.shape.question_after_results) {
            _ if message["role"] != "user" || !self.ends_with_result => {}
            (ResultForm::UserText, _) => {
                let text = last.as_ref().and_then(|last| last["content"].as_str());
                if let (Some(text), Some(new)) = (text, message["content"].as_str()) {
                    let text = format!("{text}\n{new}");
                    if let Some(last) = last {
                        last["content"] = json!(text);
                    }
                    self.ends_with_result = false;
                    return;
                }
            }
            (ResultForm::Tool, QuestionAfterResults::AfterAnswer(text)) => {
                self.out.push(json!({"role": "assistant", "content": text}));
            }
            (ResultForm::Tool, QuestionAfterResults::AsGiven) => {}
        }
        self.ends_with_result = false;
        self.out.push(message.clone());
    }

    /// An earlier answer, or the beginning of one.
    fn assistant(&mut self, mut message: Map<String, Value>) {
        self.end_calls();
        self.open.clear();
        self.numbers.clear();
        let reasoning = take_reasoning(&mut message);
        let calls = match message.remove("tool_calls") {
            Some(Value::Array(calls)) => calls,
            _ => Vec::new(),
        };
        if message.get("content").is_none_or(Value::is_null) {
            message.insert("content".to_owned(), json!(""));
        }
        let calls = calls.into_iter().map(|call| self.call(call)).collect();
        self.answer(Answer {
            message,
            reasoning,
            calls,
        });
    }

    /// A call with its arguments and its id as the template wants them.
    fn call(&mut self, mut call: Value) -> Value {
        let given = call.get("id").and_then(Value::as_str).unwrap_or_default();
        let given = given.to_owned();
        let number = self.n_calls;
        self.n_calls += 1;
        let id = match self.shape.ids {
            IdForm::AsGiven => given.clone(),
            IdForm::Required if given.is_empty() => format!("call_{number}"),
            IdForm::Required => given.clone(),
            IdForm::Nine => nine(&given, number),
        };
        if !id.is_empty() {
            call["id"] = json!(id);
        }
        // Some clients leave `function` out.
        let is_nested = call.get("function").is_some_and(Value::is_object);
        let function = if is_nested {
            &mut call["function"]
        } else {
            &mut call
        };
        let name = function["name"].as_str().unwrap_or_default().to_owned();
        let arguments = function.get("arguments").cloned().unwrap_or_default();
        function["arguments"] = self.shape.arguments(arguments);
        self.open.insert(number, OpenCall { id, name });
        if !given.is_empty() {
            self.numbers.entry(given).or_insert(number);
        }
        call
    }

    fn answer(&mut self, mut answer: Answer) {
        let shape = self.shape;
        if shape.calls_per_message == CallsPerMessage::One && answer.calls.len() > 1 {
            self.waiting = answer.calls.split_off(1).into();
        }
        if answer.calls.is_empty() {
            return self.push(answer);
        }
        if shape.calls == CallForm::Text {
            let calls = std::mem::take(&mut answer.calls);
            let texts = text_of(&answer.message).into_iter().map(str::to_owned);
            let texts = texts.chain(calls.iter().map(call_text));
            let texts: Vec<String> = texts.filter(|text| !text.is_empty()).collect();
            answer.message["content"] = json!(texts.join("\n"));
            return self.push(answer);
        }
        let has_text = answer.message["content"] != "";
        let place = match answer.reasoning {
            Some(_) => shape.text_of_reasoned_calls,
            None => shape.text_of_calls,
        };
        match place {
            TextOfCalls::OwnMessage if has_text => {
                let message = answer.message.clone();
                let text = Answer {
                    message,
                    reasoning: answer.reasoning.take(),
                    calls: Vec::new(),
                };
                self.push(text);
                answer.message["content"] = json!("");
            }
            TextOfCalls::Nowhere => answer.message["content"] = json!(""),
            TextOfCalls::OwnMessage | TextOfCalls::Content => {}
        }
        if answer.message["content"] == "" {
            match shape.call_content {
                CallContent::Empty => {}
                CallContent::Null => answer.message["content"] = Value::Null,
                CallContent::Absent => {
                    answer.message.remove("content");
                }
            }
        }
        self.push(answer);
    }

    fn push(&mut self, answer: Answer) {
        self.ends_with_result = false;
        let mut message = answer.message;
        match (answer.reasoning, self.shape.reasoning) {
            (None, _) => {}
            (Some(text), ReasoningForm::Field(name)) => {
                message.insert(name.to_owned(), json!(text));
            }
            (Some(text), ReasoningForm::Part) => {
                let mut parts = vec![json!({"type": "thinking", "thinking": text})];
                if let Some(text) = text_of(&message).filter(|text| !text.is_empty()) {
                    parts.push(json!({"type": "text", "text": text}));
                }
                message.insert("content".to_owned(), json!(parts));
            }
        }
        if !answer.calls.is_empty() {
            message.insert("tool_calls".to_owned(), json!(answer.calls));
        }
        self.out.push(Value::Object(message));
    }

    /// The result of a call, with the name of the tool and the id of the call.
    fn result(&mut self, mut message: Map<String, Value>) {
        if message.get("content").is_none_or(Value::is_null) {
            message.insert("content".to_owned(), json!(""));
        }
        let given = message.get("tool_call_id").and_then(Value::as_str);
        let number = match given {
            Some(id) => self.numbers.remove(id),
            None => self.open.keys().next().copied(),
        };
        if let Some(call) = number.and_then(|number| self.open.remove(&number)) {
            message.entry("name").or_insert_with(|| json!(call.name));
            if !call.id.is_empty() {
                message.insert("tool_call_id".to_owned(), json!(call.id));
            }
        }
        match self.shape.results {
            ResultForm::Tool => self.out.push(Value::Object(message)),
            ResultForm::UserText => {
                let text = text_of(&message).unwrap_or_default();
                let text = format!("<tool_response>\n{text}\n</tool_response>");
                self.other(&json!({"role": "user", "content": text}));
            }
        }
        self.ends_with_result = true;
        if let Some(next) = self.waiting.pop_front() {
            self.answer(Answer::of_call(next));
        }
    }

    /// Writes calls whose results never came, before the next message.
    fn end_calls(&mut self) {
        for call in std::mem::take(&mut self.waiting) {
            self.answer(Answer::of_call(call));
        }
    }
}

impl HistoryShape {
    /// Arguments, which clients send as JSON or as objects.
    fn arguments(&self, given: Value) -> Value {
        let value = match &given {
            Value::String(text) => object(text),
            Value::Null => Some(json!({})),
            Value::Object(_) => Some(given.clone()),
            _ => None,
        };
        match (self.arguments, value, given) {
            (ArgumentsForm::Object, Some(value), _) => value,
            // No object, and a template that would fail with a text, or leave it out.
            (ArgumentsForm::Object, None, given) if !self.takes_text_arguments => {
                json!({ "arguments": given })
            }
            (ArgumentsForm::Object, None, given) => given,
            // As the client has it, also in its spaces.
            (ArgumentsForm::Json, Some(_), Value::String(text))
                if serde_json::from_str::<Map<String, Value>>(&text).is_ok() =>
            {
                json!(text)
            }
            (ArgumentsForm::Json, Some(value), _) => json!(python_json(&value)),
            (ArgumentsForm::Json, None, Value::String(text)) => json!(text),
            (ArgumentsForm::Json, None, given) => json!(python_json(&given)),
        }
    }
}

/// Takes the reasoning of a message, whichever name the client gave it.
fn take_reasoning(message: &mut Map<String, Value>) -> Option<String> {
    let given = REASONING.map(|name| match message.get(name) {
        // Other values are a template's own, such as switches.
        Some(Value::String(_) | Value::Null) => message.remove(name),
        _ => None,
    });
    let texts = given.into_iter().flatten();
    let mut texts = texts.filter_map(|text| text.as_str().map(str::to_owned));
    texts.find(|text| !text.is_empty())
}

/// A call as Hermes writes it.
fn call_text(call: &Value) -> String {
    let function = call.get("function").unwrap_or(call);
    let arguments = match &function["arguments"] {
        Value::String(text) => object(text).unwrap_or_else(|| json!(text)),
        value => value.clone(),
    };
    let (name, arguments) = (python_json(&function["name"]), python_json(&arguments));
    format!("<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>")
}

fn text_of(message: &Map<String, Value>) -> Option<&str> {
    message.get("content").and_then(Value::as_str)
}

/// Puts the first system message before the text of the user's first message.
fn merge_system(messages: &mut Vec<Value>) {
    let is_system = messages
        .first()
        .is_some_and(|message| message["role"] == "system");
    let Some(text) = messages
        .first()
        .and_then(|message| message["content"].as_str())
    else {
        return;
    };
    let user = messages.get(1).filter(|message| message["role"] == "user");
    let content = user.and_then(|message| message["content"].as_str());
    let (true, Some(content)) = (is_system, content) else {
        return;
    };
    let merged = format!("{text}\n{content}");
    messages.remove(0);
    messages[0]["content"] = json!(merged);
}

/// An id of nine letters and digits for the call of this number.
fn nine(given: &str, number: usize) -> String {
    let is_nine = given.len() == 9 && given.chars().all(|c| c.is_ascii_alphanumeric());
    if is_nine {
        given.to_owned()
    } else {
        format!("call{:05}", number % 100_000)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests;
