//! Calls of tools over OpenAI's chats: ids, limits, forms that are unknown, and those that are held
//! to a schema. `call_matrix.rs` has every form through every API.

use model_tests::http::post;
use serde_json::{Value, json};

use crate::support::{Server, Setup, with};

/// A family's answer, with a template that shows its form.
struct Family {
    template: &'static str,
    /// A call of `weather` for Rome and 3 days.
    call: &'static str,
}

const FAMILIES: [Family; 8] = [
    Family {
        template: "{# <tool_call> #}",
        call: "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\", \"days\": 3}}\n</tool_call>",
    },
    Family {
        template: "{# <tool_call><function=x><parameter=y> #}",
        call: "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    },
    Family {
        template: "{# [TOOL_CALLS] [CALL_ID] [ARGS] #}",
        call: "[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{\"city\": \"Rome\", \"days\": 3}",
    },
    Family {
        template: "{# <arg_key> #}",
        call: "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
    },
    Family {
        template: "{# <|tool_call_begin|> #}",
        call: "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{\"city\": \"Rome\", \"days\": 3}<|tool_call_end|><|tool_calls_section_end|>",
    },
    Family {
        template: "{# <|tool_call>call: #}",
        call: "<|tool_call>call:weather{city:<|\"|>Rome<|\"|>,days:3}<tool_call|>",
    },
    Family {
        template: "{# <|tool_call_start|> #}",
        call: "<|tool_call_start|>[weather(city='Rome', days=3)]<|tool_call_end|>",
    },
    Family {
        template: "{# <minimax:tool_call> #}",
        call: "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Rome</parameter>\n<parameter name=\"days\">3</parameter>\n</invoke>\n</minimax:tool_call>",
    },
];

/// Reads messages.
const MESSAGES: &str = "{% for m in messages %}{{ m.content }}{% endfor %}";

fn start(template: &str) -> Server {
    let setup = Setup {
        template: Some(Box::leak(format!("{template}{MESSAGES}").into_boxed_str())),
        ..Setup::scripted()
    };
    setup.start()
}

fn parameters() -> Value {
    json!({"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
           "required": ["city", "days"], "additionalProperties": false})
}

/// The parts of a call, whatever the API.
#[derive(Debug, PartialEq)]
struct Call {
    name: String,
    arguments: Value,
}

fn call(name: &Value, arguments: &Value) -> Call {
    let arguments = match arguments {
        Value::String(text) => serde_json::from_str(text).unwrap(),
        other => other.clone(),
    };
    let name = name.as_str().unwrap().to_owned();
    Call { name, arguments }
}

/// The text and the calls of an answer.
type Read = (String, Vec<Call>);

fn chat(server: &Server, body: &Value) -> Read {
    let extra = json!({"tools": [{"type": "function", "function":
        {"name": "weather", "parameters": parameters()}}], "max_tokens": 400});
    let body = with(extra, body);
    let reply = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    if body["stream"] != true {
        let message = &reply.json()["choices"][0]["message"];
        let calls = message["tool_calls"].as_array().into_iter().flatten();
        let calls = calls.map(|one| call(&one["function"]["name"], &one["function"]["arguments"]));
        let text = message["content"].as_str().unwrap_or_default();
        return (text.to_owned(), calls.collect());
    }
    let (mut text, mut calls) = (String::new(), Vec::<(Value, String)>::new());
    for event in reply.json_events() {
        let delta = &event["choices"][0]["delta"];
        text += delta["content"].as_str().unwrap_or_default();
        for one in delta["tool_calls"].as_array().into_iter().flatten() {
            let function = &one["function"];
            if function["name"].is_string() {
                assert_eq!(one["index"], calls.len());
                calls.push((function["name"].clone(), String::new()));
            }
            calls.last_mut().unwrap().1 += function["arguments"].as_str().unwrap_or_default();
        }
    }
    let calls = calls.iter();
    let calls = calls.map(|(name, arguments)| call(name, &json!(arguments)));
    (text, calls.collect())
}

#[test]
fn calls_of_an_unknown_form_are_text() {
    let server = start("");
    let ask = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0});
    for family in FAMILIES.iter().take(3) {
        server.script(family.call);
        assert_eq!(chat(&server, &ask), (family.call.to_owned(), Vec::new()));
    }
}

#[test]
fn models_name_their_calls() {
    let server = start("{# [TOOL_CALLS] [CALL_ID] [ARGS] #}");
    server.script("[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{}");
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0,
                      "tools": [{"type": "function", "function": {"name": "weather"}}], "max_tokens": 99});
    let reply = post(server.address, "/v1/chat/completions", &body).json();
    let choice = &reply["choices"][0];
    assert_eq!(
        choice["message"]["tool_calls"][0]["id"], "abcdefghi",
        "{reply}"
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
}

#[test]
fn a_call_that_was_cut_off_says_so() {
    let server = start("{# <tool_call> #}");
    server.script(
        "<tool_call>{\"name\": \"weather\", \"arguments\": {\"city\": \"Rome\"}}</tool_call>",
    );
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0,
                      "tools": [{"type": "function", "function": {"name": "weather"}}], "max_tokens": 57});
    let reply = post(server.address, "/v1/chat/completions", &body).json();
    let choice = &reply["choices"][0];
    assert_eq!(choice["finish_reason"], "length", "{reply}");
    let arguments = &choice["message"]["tool_calls"][0]["function"]["arguments"];
    assert_eq!(arguments, "{\"city\": \"Rom", "{reply}");
}

#[test]
fn a_required_call_has_the_form_of_the_family() {
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": false});
    let function = json!({"name": "weather", "parameters": schema, "strict": true});
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0,
                      "max_tokens": 400, "tool_choice": "required", "parallel_tool_calls": false,
                      "tools": [{"type": "function", "function": function}]});
    let more = [
        "{# <seed:tool_call><function=<parameter= #}",
        "{# <｜tool▁call▁begin｜> #}",
        "{# [TOOL_CALLS] #}",
        "{# [TOOL_CALLS] [ARGS] #}",
        "{# <|START_ACTION|> #}",
        "{# <|tool_call|> #}",
        "{# <TOOLCALL> #}",
        "{# functools[ #}",
        "{# <|python_tag|> #}",
        "{# <function= #}",
        "{# <function name=\"<param name=\" #}",
        "{# <|tool_call:begin|> #}",
        "{# <|channel|><|message|> #}",
        "{# <tool_call> #}<think>",
        "{# <|open|><|end_of_msg|> #}",
        "{# ]<]minimax[>[ #}",
        "{# DSML invoke function_calls #}",
        "{# DSML invoke tool_calls #}",
        "{# <atem:invoke name= to=self <|message|> #}",
        "{# <tool_sep <arg_key #}",
        "{# <tool_calls>[ #}",
        "{# <tool_calls> #}",
        "{# <|function_call|><|role_sep|><|message_sep|> #}",
        "{# <|role_sep|><|message_sep|> #}",
        "{# <|tools_prefix|> #}",
        "{# >>>all #}>>>",
        "{# List of tools: [ #}",
        "",
    ];
    let templates = FAMILIES.iter().map(|family| family.template);
    for template in templates.chain(more) {
        let mut setup = Setup {
            template: Some(Box::leak(format!("{MESSAGES}{template}").into_boxed_str())),
            ..Setup::default()
        };
        setup.n_seqs = 1;
        let server = setup.start();
        let (text, calls) = chat(&server, &body);
        assert_eq!((text.as_str(), calls.len()), ("", 1), "{template}");
        let Call { name, arguments } = &calls[0];
        assert_eq!(name, "weather", "{template}");
        let (city, days) = (arguments["city"].as_str(), arguments["days"].as_u64());
        assert!(
            ["Rome", "Oslo"].contains(&city.unwrap()),
            "{template}: {arguments}"
        );
        assert!((1..=9).contains(&days.unwrap()), "{template}: {arguments}");
    }
}

#[test]
fn strict_tools_are_taken_where_a_form_can_be_held() {
    let schema = json!({"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]},
        "note": {"type": "string"}, "days": {"type": ["integer", "null"]},
        "deep": {"$ref": "#/$defs/deep"}}, "$defs": {"deep": {"type": "array", "items": {"type": "integer"}}},
        "required": ["city", "deep"], "additionalProperties": false});
    let tools = json!([
        {"type": "function", "function": {"name": "weather", "parameters": schema, "strict": true}},
        {"type": "function", "function": {"name": "stop"}},
    ]);
    let body = json!({"messages": [{"role": "user", "content": "Hello"}], "temperature": 0,
                      "max_tokens": 3, "tools": tools});
    for (template, status) in [
        ("<tool_call>", 200),
        ("<tool_call><function=x><parameter=y>", 200),
        ("<seed:tool_call>", 200),
        ("<arg_key>", 200),
        ("<minimax:tool_call>", 200),
        ("<function name=\"x\"><param name=\"y\">", 200),
        ("[TOOL_CALLS]", 200),
        ("[TOOL_CALLS][ARGS]", 200),
        ("[TOOL_CALLS][CALL_ID][ARGS]", 200),
        ("<｜tool▁call▁begin｜>", 200),
        ("<|tool_call_begin|>", 200),
        ("<|tool_call:begin|>", 200),
        ("<|START_ACTION|>", 200),
        ("<|python_tag|>", 200),
        ("<|tool_call>call:", 200),
        ("<|tool_call_start|>", 200),
        ("<|open|><|end_of_msg|>", 200),
        ("]<]minimax[>[", 200),
        ("DSML invoke function_calls", 200),
        ("DSML invoke tool_calls", 200),
        ("<atem:invoke name= to=self <|message|>", 200),
        ("<tool_sep <arg_key", 200),
        ("<tool_calls>[", 200),
        ("<tool_calls>", 200),
        ("<|function_call|><|role_sep|><|message_sep|>", 200),
        ("<|role_sep|><|message_sep|>", 200),
        ("<|tools_prefix|>", 200),
        (">>>all", 200),
        ("<|channel|><|message|>", 200),
        ("", 400),
    ] {
        let server = start(&format!("{{# {template} #}}"));
        server.script("ok");
        let reply = post(server.address, "/v1/chat/completions", &body);
        assert_eq!(reply.status, status, "{template}: {}", reply.body);
    }
}
