//! Calls in the form of every family, through every API, whole and streamed: a script is the text
//! that the model writes, and the answer has its text, reasoning, calls and end.

use model_tests::http::{Response, post};
use serde_json::{Value, json};

use crate::goldens::{ALL, GoldenAnswer};
use crate::support::{Server, Setup};

/// The content of an answer, whatever the API.
#[derive(Clone, Debug, Default, PartialEq)]
struct Answer {
    text: String,
    reasoning: String,
    /// Names, and arguments as JSON.
    calls: Vec<(String, String)>,
    end: String,
}

/// A chat API.
#[derive(Clone, Copy, Debug)]
enum Api {
    Chat,
    Responses,
    Anthropic,
    Ollama,
}

const APIS: [Api; 4] = [Api::Chat, Api::Responses, Api::Anthropic, Api::Ollama];

/// The delivery of an answer.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Delivery {
    Whole,
    Streamed,
}

const DELIVERIES: [Delivery; 2] = [Delivery::Whole, Delivery::Streamed];

/// A wish of a request besides an answer.
#[derive(Clone, Copy, PartialEq)]
enum Wish {
    Nothing,
    /// At most one call.
    OneCall,
    /// A call of `f`.
    Call,
}

/// The members of a request that say so.
fn wishes(api: Api, wish: Wish) -> Value {
    match (api, wish) {
        (_, Wish::Nothing) | (Api::Ollama, _) => json!({}),
        (Api::Anthropic, Wish::OneCall) => {
            json!({"tool_choice": {"type": "auto", "disable_parallel_tool_use": true}})
        }
        (Api::Anthropic, Wish::Call) => {
            json!({"tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": true}})
        }
        (_, Wish::OneCall) => json!({"parallel_tool_calls": false}),
        (Api::Chat, Wish::Call) => {
            let function = json!({"name": "f"});
            json!({"tool_choice": {"type": "function", "function": function}, "parallel_tool_calls": false})
        }
        (Api::Responses, Wish::Call) => {
            json!({"tool_choice": {"type": "function", "name": "f"}, "parallel_tool_calls": false})
        }
    }
}

impl Api {
    fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Anthropic => "/v1/messages",
            Self::Ollama => "/api/chat",
        }
    }

    fn tool(self, name: &str, schema: &Value) -> Value {
        let function = json!({"name": name, "parameters": schema});
        match self {
            Self::Chat | Self::Ollama => json!({"type": "function", "function": function}),
            Self::Responses => {
                json!({"type": "function", "name": name, "parameters": schema, "strict": false})
            }
            Self::Anthropic => json!({"name": name, "input_schema": schema}),
        }
    }

    /// A request for at most this many tokens.
    fn body(self, n_tokens: usize, delivery: Delivery) -> Value {
        let city = json!({"enum": ["Paris", "Rome"]});
        let days = json!({"type": "integer", "minimum": 1, "maximum": 9});
        let with = json!({"type": "object", "properties": {"city": city, "days": days},
            "required": ["city", "days"], "additionalProperties": false});
        let without = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let tools = json!([self.tool("f", &with), self.tool("g", &without)]);
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let mut body =
            json!({"model": "stories", "stream": delivery == Delivery::Streamed, "tools": tools});
        let more = match self {
            Self::Chat => json!({"messages": messages, "max_tokens": n_tokens, "temperature": 0}),
            Self::Responses => {
                json!({"input": "Hello", "max_output_tokens": n_tokens, "temperature": 0})
            }
            Self::Anthropic => {
                json!({"messages": messages, "max_tokens": n_tokens, "temperature": 0})
            }
            Self::Ollama => {
                json!({"messages": messages, "options": {"num_predict": n_tokens, "temperature": 0}})
            }
        };
        extend(&mut body, &more);
        body
    }

    fn read(self, reply: &Response, delivery: Delivery) -> Answer {
        match (self, delivery) {
            (Self::Chat, Delivery::Whole) => chat(&reply.json()["choices"][0]),
            (Self::Chat, Delivery::Streamed) => streamed_chat(&reply.json_events()),
            (Self::Responses, Delivery::Whole) => response(&reply.json()),
            (Self::Responses, Delivery::Streamed) => {
                response(&reply.json_events().last().unwrap()["response"])
            }
            (Self::Anthropic, Delivery::Whole) => {
                let message = reply.json();
                anthropic(
                    message["content"].as_array().unwrap(),
                    &message["stop_reason"],
                )
            }
            (Self::Anthropic, Delivery::Streamed) => streamed_anthropic(&reply.json_events()),
            (Self::Ollama, _) => {
                let lines = reply.body.lines().filter(|line| !line.is_empty());
                let lines = lines.map(|line| serde_json::from_str(line).unwrap());
                ollama(&lines.collect::<Vec<Value>>())
            }
        }
    }
}

fn extend(body: &mut Value, more: &Value) {
    let more = more.as_object().unwrap().clone();
    body.as_object_mut().unwrap().extend(more);
}

fn string(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

/// An end by the name that OpenAI's chats have for it.
fn end(reason: &Value) -> String {
    let name = match reason.as_str().unwrap_or_default() {
        "end_turn" => "stop",
        "tool_use" => "tool_calls",
        "max_tokens" | "max_output_tokens" => "length",
        other => other,
    };
    name.to_owned()
}

fn chat(choice: &Value) -> Answer {
    let message = &choice["message"];
    let calls = message["tool_calls"].as_array().into_iter().flatten();
    let calls = calls.map(|call| &call["function"]);
    Answer {
        text: string(&message["content"]),
        reasoning: string(&message["reasoning_content"]),
        calls: calls
            .map(|call| (string(&call["name"]), string(&call["arguments"])))
            .collect(),
        end: end(&choice["finish_reason"]),
    }
}

fn streamed_chat(events: &[Value]) -> Answer {
    let mut answer = Answer::default();
    for choice in events.iter().map(|event| &event["choices"][0]) {
        let delta = &choice["delta"];
        answer.text += &string(&delta["content"]);
        answer.reasoning += &string(&delta["reasoning_content"]);
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            if function["name"].is_string() {
                assert_eq!(call["index"], answer.calls.len());
                assert!(call["id"].is_string(), "{call}");
                let name = string(&function["name"]);
                answer.calls.push((name, String::new()));
            }
            answer.calls.last_mut().unwrap().1 += &string(&function["arguments"]);
        }
        if choice["finish_reason"].is_string() {
            answer.end = end(&choice["finish_reason"]);
        }
    }
    answer
}

fn response(response: &Value) -> Answer {
    let mut answer = Answer::default();
    for item in response["output"].as_array().unwrap() {
        match item["type"].as_str().unwrap() {
            "function_call" => {
                let call = (string(&item["name"]), string(&item["arguments"]));
                answer.calls.push(call);
            }
            "message" => answer.text += &string(&item["content"][0]["text"]),
            "reasoning" => answer.reasoning += &string(&item["content"][0]["text"]),
            other => panic!("{other}"),
        }
    }
    // This API has no name for an end with calls.
    let is_whole = response["status"] == "completed";
    answer.end = match (is_whole, answer.calls.is_empty()) {
        (true, true) => "stop".to_owned(),
        (true, false) => "tool_calls".to_owned(),
        (false, _) => end(&response["incomplete_details"]["reason"]),
    };
    answer
}

fn anthropic(blocks: &[Value], reason: &Value) -> Answer {
    let mut answer = Answer::default();
    for block in blocks {
        match block["type"].as_str().unwrap() {
            "tool_use" => {
                let call = (string(&block["name"]), block["input"].to_string());
                answer.calls.push(call);
            }
            "text" => answer.text += &string(&block["text"]),
            "thinking" => answer.reasoning += &string(&block["thinking"]),
            other => panic!("{other}"),
        }
    }
    answer.end = end(reason);
    answer
}

fn streamed_anthropic(events: &[Value]) -> Answer {
    let (mut blocks, mut inputs, mut reason) = (Vec::new(), Vec::<String>::new(), Value::Null);
    for event in events {
        let at = event["index"].as_u64().unwrap_or_default() as usize;
        match event["type"].as_str().unwrap() {
            "content_block_start" => {
                assert_eq!(at, blocks.len());
                blocks.push(event["content_block"].clone());
                inputs.push(String::new());
            }
            "content_block_delta" => {
                let delta = &event["delta"];
                for part in ["text", "thinking"] {
                    if delta[part].is_string() {
                        blocks[at][part] = json!(string(&blocks[at][part]) + &string(&delta[part]));
                    }
                }
                inputs[at] += &string(&delta["partial_json"]);
            }
            "message_delta" => reason = event["delta"]["stop_reason"].clone(),
            _ => {}
        }
    }
    let mut answer = anthropic(&blocks, &reason);
    let is_call = |(block, _): &(&Value, String)| block["type"] == "tool_use";
    let inputs = blocks.iter().zip(inputs).filter(is_call);
    for (call, (_, input)) in answer.calls.iter_mut().zip(inputs) {
        call.1 = input;
    }
    answer
}

fn ollama(lines: &[Value]) -> Answer {
    let mut answer = Answer::default();
    for line in lines {
        let message = &line["message"];
        answer.text += &string(&message["content"]);
        answer.reasoning += &string(&message["thinking"]);
        for call in message["tool_calls"].as_array().into_iter().flatten() {
            let function = &call["function"];
            let call = (string(&function["name"]), function["arguments"].to_string());
            answer.calls.push(call);
        }
        if line["done"] == true {
            answer.end = end(&line["done_reason"]);
        }
    }
    // This API, too.
    if answer.end == "stop" && !answer.calls.is_empty() {
        answer.end = "tool_calls".to_owned();
    }
    answer
}

/// The answers of all APIs, whole and streamed, next to what they should be.
struct Matrix<'a> {
    server: &'a Server,
    family: &'a GoldenAnswer,
    wrong: Vec<String>,
}

impl Matrix<'_> {
    fn check(&mut self, case: &str, written: &str, wish: Wish, expected: &Answer) {
        for api in APIS {
            let mut expected = expected.clone();
            if wish == Wish::OneCall && !matches!(api, Api::Ollama) {
                expected.calls.truncate(1);
            }
            for delivery in DELIVERIES {
                self.server.script(written);
                let answer = self.ask(api, delivery, 600, wish);
                let mut answer = answer.unwrap_or_else(|error| Answer {
                    text: error,
                    ..Answer::default()
                });
                for call in &mut answer.calls {
                    let arguments = serde_json::from_str::<Value>(&call.1);
                    call.1 = arguments.map_or_else(|_| call.1.clone(), |value| value.to_string());
                }
                if answer != expected {
                    self.wrong.push(format!(
                        "{}, {case}, {api:?} {delivery:?}: {answer:?} for {expected:?}",
                        self.family.name
                    ));
                }
            }
        }
    }

    fn ask(
        &self,
        api: Api,
        delivery: Delivery,
        n_tokens: usize,
        wish: Wish,
    ) -> Result<Answer, String> {
        let mut body = api.body(n_tokens, delivery);
        extend(&mut body, &wishes(api, wish));
        let reply = post(self.server.address, api.path(), &body);
        if reply.status != 200 {
            return Err(reply.body);
        }
        Ok(api.read(&reply, delivery))
    }

    /// A call that is cut off by the limit says so, and is no other call.
    fn check_cut(&mut self, written: &str) {
        // The script writes a byte with each token.
        let n_tokens = written.len() - 2;
        for api in APIS {
            for delivery in DELIVERIES {
                self.server.script(written);
                let answer = self.ask(api, delivery, n_tokens, Wish::Nothing);
                let is_right = answer.as_ref().is_ok_and(|answer| {
                    let is_call = answer.calls.iter().all(|(name, _)| name == "f");
                    answer.end == "length" && is_call && answer.calls.len() <= 1
                });
                if !is_right {
                    let found = format!("{}, cut off, {api:?}: {answer:?}", self.family.name);
                    self.wrong.push(found);
                }
            }
        }
    }

    /// A call that is required comes, whatever the model would write.
    fn check_required(&mut self) {
        self.server.no_script();
        for api in [Api::Chat, Api::Responses, Api::Anthropic] {
            for delivery in DELIVERIES {
                let answer = self.ask(api, delivery, 600, Wish::Call);
                let is_right = answer.as_ref().is_ok_and(|answer| {
                    let [(name, arguments)] = answer.calls.as_slice() else {
                        return false;
                    };
                    let arguments = serde_json::from_str::<Value>(arguments).unwrap_or_default();
                    let city = string(&arguments["city"]);
                    name == "f"
                        && ["Paris", "Rome"].contains(&city.as_str())
                        && arguments["days"].is_i64()
                        && answer.end == "tool_calls"
                });
                if !is_right {
                    let found = format!("{}, required, {api:?}: {answer:?}", self.family.name);
                    self.wrong.push(found);
                }
            }
        }
    }
}

fn f() -> (String, String) {
    let arguments = json!({"city": "Paris", "days": 3});
    ("f".to_owned(), arguments.to_string())
}

fn both() -> Vec<(String, String)> {
    vec![f(), ("g".to_owned(), "{}".to_owned())]
}

fn answer(text: &str, reasoning: &str, calls: Vec<(String, String)>) -> Answer {
    let end = if calls.is_empty() {
        "stop"
    } else {
        "tool_calls"
    };
    Answer {
        text: text.to_owned(),
        reasoning: reasoning.to_owned(),
        calls,
        end: end.to_owned(),
    }
}

/// All cases of a family.
fn check_family(family: &GoldenAnswer) -> Vec<String> {
    let messages = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let template = format!("{{# {} #}}{messages}", family.template);
    let setup = Setup {
        template: Some(Box::leak(template.into_boxed_str())),
        ..Setup::scripted()
    };
    let server = setup.start();
    let mut matrix = Matrix {
        server: &server,
        family,
        wrong: Vec::new(),
    };
    let GoldenAnswer { one, two, none, .. } = family;
    let nothing = Wish::Nothing;
    matrix.check("one", one, nothing, &answer("", "", vec![f()]));
    matrix.check("two", two, nothing, &answer("", "", both()));
    matrix.check("at most one", two, Wish::OneCall, &answer("", "", both()));
    // A call of Llama 3 is the whole answer.
    if family.name != "Llama 3" {
        let written = format!("I look.\n\n{one}");
        let expected = answer("I look.", "", vec![f()]);
        matrix.check("behind a text", &written, nothing, &expected);
    }
    let written = format!("<think>\nHm.\n</think>\n\n{one}");
    let expected = answer("", "Hm.", vec![f()]);
    matrix.check("behind a thought", &written, nothing, &expected);
    let written = format!("<think>I call it.\n{two}");
    let expected = answer("", "I call it.", both());
    matrix.check("in a thought", &written, nothing, &expected);
    matrix.check("malformed", none, nothing, &answer(none, "", Vec::new()));
    matrix.check_cut(one);
    matrix.check_required();
    matrix.wrong
}

#[test]
fn calls_of_every_family_reach_every_api() {
    let wrong: Vec<String> = std::thread::scope(|scope| {
        // A server each, as many as usual machines have cores.
        let parts = ALL.chunks(ALL.len().div_ceil(2));
        let parts = parts.map(|families| {
            let check = || families.iter().flat_map(check_family).collect::<Vec<_>>();
            scope.spawn(check)
        });
        let parts: Vec<_> = parts.collect();
        let ended = parts.into_iter().map(|part| part.join().unwrap());
        ended.flatten().collect()
    });
    assert!(
        wrong.is_empty(),
        "{} wrong:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// gpt-oss answers in messages on channels.
#[test]
fn calls_of_gpt_oss_reach_every_api() {
    let call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"city\": \"Paris\", \"days\": 3}<|call|>";
    let next = "<|start|>assistant<|channel|>commentary to=functions.g <|constrain|>json<|message|>{}<|call|>";
    let family = GoldenAnswer {
        name: "gpt-oss",
        template: "<|start|>assistant<|channel|>final<|message|>",
        one: "",
        two: "",
        none: "",
    };
    let messages = "{% for m in messages %}{{ m.content }}{% endfor %}";
    let template = format!("{{# {} #}}{messages}", family.template);
    let setup = Setup {
        template: Some(Box::leak(template.into_boxed_str())),
        ..Setup::scripted()
    };
    let server = setup.start();
    let mut matrix = Matrix {
        server: &server,
        family: &family,
        wrong: Vec::new(),
    };
    let nothing = Wish::Nothing;
    matrix.check("one", call, nothing, &answer("", "", vec![f()]));
    let two = format!("{call}{next}");
    matrix.check("two", &two, nothing, &answer("", "", both()));
    matrix.check("at most one", &two, Wish::OneCall, &answer("", "", both()));
    let thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant";
    let written = format!("{thought}{call}");
    let expected = answer("", "Hm.", vec![f()]);
    matrix.check("behind a thought", &written, nothing, &expected);
    let text = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant";
    let written = format!("{text}{call}");
    let expected = answer("I look.", "", vec![f()]);
    matrix.check("behind a text", &written, nothing, &expected);
    matrix.check_cut(call);
    matrix.check_required();
    assert!(matrix.wrong.is_empty(), "{}", matrix.wrong.join("\n"));
}
