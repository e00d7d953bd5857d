//! OpenAI's endpoints.

use cellar_engine::sampler::SamplerConfig;
use model_tests::http::{get, post};
use serde_json::{Value, json};

use crate::support::{Alone, Server, Setup, TEMPLATE, with};

fn chat(server: &Server, extra: Value) -> Value {
    let body = with(
        json!({
            "model": "stories", "temperature": 0, "max_tokens": 12,
            "messages": [{"role": "user", "content": "Once upon a time"}],
        }),
        &extra,
    );
    let reply = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(reply.header("content-type"), Some("application/json"));
    reply.json()
}

#[test]
fn a_chat_is_the_text_of_its_rendered_messages() {
    let server = Setup::default().start();
    let answer = chat(&server, json!({}));
    let prompt = "<|user|>Once upon a time\n<|assistant|>";
    let alone = Alone::new();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "stories");
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    assert_eq!(
        answer["choices"][0]["message"]["content"],
        alone.greedy(prompt, 12)
    );
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], 12);
    let n_prompt = usage["prompt_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], n_prompt + 12);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    // The same prompt again: all but its last token is cached.
    let again = chat(&server, json!({}));
    assert_eq!(again["choices"], answer["choices"]);
    let cached = again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
    assert_eq!(cached, Some(n_prompt - 1));
    // Another salt shares nothing.
    let salted = chat(&server, json!({"cache_salt": "mine"}));
    assert_eq!(salted["choices"], answer["choices"]);
    assert_eq!(salted["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
}

#[test]
fn a_streamed_chat_is_the_same_text() {
    let server = Setup::default().start();
    let whole = chat(&server, json!({}));
    let body = json!({
        "temperature": 0, "max_completion_tokens": 12, "stream": true,
        "stream_options": {"include_usage": true},
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Once upon a time"}]}],
    });
    let reply = post(server.address, "/v1/chat/completions", &body);
    assert_eq!(reply.status, 200);
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert!(reply.is_complete);
    assert_eq!(reply.events().last().map(String::as_str), Some("[DONE]"));
    let events = reply.json_events();
    let delta = |event: &Value| event["choices"][0]["delta"].clone();
    assert_eq!(
        delta(&events[0]),
        json!({"role": "assistant", "content": ""})
    );
    let texts = events
        .iter()
        .filter_map(|e| e["choices"][0]["delta"]["content"].as_str());
    assert_eq!(
        json!(texts.collect::<String>()),
        whole["choices"][0]["message"]["content"]
    );
    let reasons: Vec<&str> = events
        .iter()
        .filter_map(|event| event["choices"][0]["finish_reason"].as_str())
        .collect();
    assert_eq!(reasons, ["length"]);
    let last = events.last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 12);
    for event in &events[..events.len() - 1] {
        assert_eq!(event["usage"], Value::Null);
        assert_eq!(event["id"], last["id"]);
        assert_eq!(event["object"], "chat.completion.chunk");
    }
}

#[test]
fn completions_take_all_forms_of_prompts() {
    let server = Setup::default().start();
    let alone = Alone::new();
    let complete = |prompt: Value| {
        let body = json!({"prompt": prompt, "temperature": 0, "max_tokens": 9});
        let reply = post(server.address, "/v1/completions", &body);
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()
    };
    let (first, second) = ("Once upon a time", "One day");
    let both = complete(json!([first, second]));
    assert_eq!(both["choices"][0]["text"], alone.greedy(first, 9));
    assert_eq!(both["choices"][1]["text"], alone.greedy(second, 9));
    assert_eq!(both["choices"][1]["index"], 1);
    assert_eq!(both["usage"]["completion_tokens"], 18);
    let tokenize = json!({"content": first, "add_special": true});
    let tokens = post(server.address, "/tokenize", &tokenize).json()["tokens"].clone();
    assert_eq!(
        complete(tokens.clone())["choices"][0]["text"],
        alone.greedy(first, 9)
    );
    assert_eq!(
        complete(json!([tokens]))["choices"][0]["text"],
        alone.greedy(first, 9)
    );
    // OpenAI's default length.
    let body = json!({"prompt": first, "temperature": 0});
    let answer = post(server.address, "/v1/completions", &body).json();
    assert_eq!(answer["usage"]["completion_tokens"], 16);
}

#[test]
fn streamed_completions_of_several_prompts_have_their_index() {
    let server = Setup::default().start();
    let alone = Alone::new();
    let prompts = ["Once upon a time", "One day", "The sun"];
    let body = json!({"prompt": prompts, "temperature": 0, "max_tokens": 9, "stream": true});
    let reply = post(server.address, "/v1/completions", &body);
    assert_eq!(reply.events().last().map(String::as_str), Some("[DONE]"));
    for (index, prompt) in prompts.iter().enumerate() {
        let events = reply.json_events();
        let own = events
            .iter()
            .filter(|event| event["choices"][0]["index"] == index);
        let text = own.filter_map(|event| event["choices"][0]["text"].as_str());
        assert_eq!(text.collect::<String>(), alone.greedy(prompt, 9));
    }
}

#[test]
fn sampling_parameters_reach_the_sampler() {
    let server = Setup::default().start();
    let alone = Alone::new();
    let body = json!({
        "prompt": "Once upon a time", "max_tokens": 20, "seed": 7, "temperature": 1.5, "top_k": 0,
        "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.5, "presence_penalty": 0.25,
        "repeat_penalty": 1.1, "repeat_last_n": 32, "priority": -1, "user": "ada", "n": 1,
    });
    let answer = post(server.address, "/v1/completions", &body).json();
    let mut sampler = SamplerConfig {
        seed: 7,
        temperature: 1.5,
        top_k: None,
        top_p: 0.9,
        min_p: 0.01,
        ..SamplerConfig::default()
    };
    sampler.penalties.frequency = 0.5;
    sampler.penalties.presence = 0.25;
    sampler.penalties.repeat = 1.1;
    sampler.penalties.last_n = 32;
    let expected = alone.text("Once upon a time", sampler.clone(), 20).text;
    assert_eq!(answer["choices"][0]["text"], expected);
    sampler.seed = 8;
    assert_ne!(alone.text("Once upon a time", sampler, 20).text, expected);
}

#[test]
fn stop_strings_end_texts_and_are_not_in_them() {
    let server = Setup::default().start();
    let text = Alone::new().greedy("Once upon a time", 40);
    let word = text.split(' ').nth(4).unwrap();
    let before = text.split(word).next().unwrap();
    for stop in [json!(word), json!(["never in it", word])] {
        let body = json!({
            "prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "stop": stop,
        });
        let answer = post(server.address, "/v1/completions", &body).json();
        assert_eq!(answer["choices"][0]["text"], before);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn schemas_hold_answers() {
    let server = Setup::default().start();
    let schema = json!({
        "type": "object",
        "properties": {"mood": {"enum": ["sad", "happy"]}, "age": {"type": "integer", "maximum": 9, "minimum": 0}},
        "required": ["mood", "age"], "additionalProperties": false,
    });
    let format = json!({"type": "json_schema",
                        "json_schema": {"name": "person", "strict": true, "schema": schema}});
    let answer = chat(
        &server,
        json!({"response_format": format, "max_tokens": 100}),
    );
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    let object: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    assert!(
        ["sad", "happy"].contains(&object["mood"].as_str().unwrap()),
        "{text}"
    );
    assert!(object["age"].as_u64().unwrap() <= 9);
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    // Under vLLM's names it is the same.
    for extra in [
        json!({"guided_json": schema}),
        json!({"structured_outputs": {"json": schema, "regex": null}}),
    ] {
        let extra = with(extra, &json!({"max_tokens": 100}));
        assert_eq!(
            chat(&server, extra)["choices"][0]["message"]["content"],
            text
        );
    }
    let answer = chat(&server, json!({"response_format": {"type": "json_object"}}));
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert!(text.trim_start().starts_with('{'), "{text}");
}

#[test]
fn models_are_listed_with_their_aliases() {
    let server = Setup::default().start();
    for path in ["/v1/models", "/models"] {
        let list = get(server.address, path).json();
        assert_eq!(list["object"], "list");
        assert_eq!(list["data"][0]["id"], "stories");
        assert_eq!(list["data"][0]["max_model_len"], 1024);
    }
    assert_eq!(
        get(server.address, "/v1/models/tiny").json()["id"],
        "stories"
    );
    let body = json!({"model": "tiny", "prompt": "One day", "max_tokens": 1});
    assert_eq!(
        post(server.address, "/v1/completions", &body).json()["model"],
        "stories"
    );
}

#[test]
fn templates_get_the_arguments_of_a_request() {
    let setup = Setup {
        template: Some("{{ mood | default('none') }}:{{ messages[0].content }}"),
        ..Setup::default()
    };
    let server = setup.start();
    let render = |extra: Value| {
        let body = with(
            json!({"messages": [{"role": "user", "content": "Hello"}]}),
            &extra,
        );
        post(server.address, "/apply-template", &body).json()["prompt"].clone()
    };
    assert_eq!(render(json!({})), "none:Hello");
    assert_eq!(
        render(json!({"chat_template_kwargs": {"mood": "glad"}})),
        "glad:Hello"
    );
    assert!(TEMPLATE.contains("add_generation_prompt"));
}

fn tools() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"], "additionalProperties": false,
    });
    json!([
        {"type": "function", "function": {"name": "weather", "parameters": parameters}},
        {"type": "function", "function": {"name": "stop", "parameters": {"type": "object",
            "properties": {}, "additionalProperties": false}}},
    ])
}

#[track_caller]
fn check_weather(arguments: &str) {
    let arguments: Value = serde_json::from_str(arguments).unwrap();
    assert!(
        ["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()),
        "{arguments}"
    );
    assert!(
        (1..=9).contains(&arguments["days"].as_u64().unwrap()),
        "{arguments}"
    );
}

#[test]
fn an_answer_that_has_to_call_a_tool_does() {
    let server = Setup::default().start();
    let named = json!({"type": "function", "function": {"name": "weather"}});
    let extra = json!({"tools": tools(), "tool_choice": named, "max_tokens": 200});
    let answer = chat(&server, extra.clone());
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
    assert_eq!(choice["message"]["content"], Value::Null);
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    assert_eq!(calls.len(), 1);
    assert_eq!(
        (&calls[0]["type"], &calls[0]["function"]["name"]),
        (&json!("function"), &json!("weather"))
    );
    assert!(calls[0]["id"].as_str().unwrap().starts_with("call_"));
    check_weather(calls[0]["function"]["arguments"].as_str().unwrap());

    let required = json!({"tools": tools(), "tool_choice": "required", "max_tokens": 200});
    let answer = chat(&server, required);
    let name = &answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"];
    assert!(
        ["weather", "stop"].contains(&name.as_str().unwrap()),
        "{answer}"
    );

    let body = with(
        json!({"messages": [{"role": "user", "content": "Once upon a time"}],
                          "temperature": 0, "stream": true}),
        &extra,
    );
    let reply = post(server.address, "/v1/chat/completions", &body);
    let events = reply.json_events();
    let deltas = events
        .iter()
        .filter_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array());
    let deltas: Vec<&Value> = deltas.flatten().collect();
    assert!(deltas.iter().all(|delta| delta["index"] == 0));
    let names: Vec<&str> = deltas
        .iter()
        .filter_map(|d| d["function"]["name"].as_str())
        .collect();
    assert_eq!(names, ["weather"]);
    assert_eq!(
        deltas
            .iter()
            .filter(|delta| delta["id"].is_string())
            .count(),
        1
    );
    let parts = deltas
        .iter()
        .map(|delta| delta["function"]["arguments"].as_str().unwrap());
    assert_eq!(
        json!(parts.collect::<String>()),
        calls[0]["function"]["arguments"]
    );
    let reasons = events
        .iter()
        .filter_map(|e| e["choices"][0]["finish_reason"].as_str());
    assert_eq!(reasons.collect::<Vec<_>>(), ["tool_calls"]);
}

/// A bias makes the model begin as calls of Llama begin; the rest is its own, or held to the
/// schema.
#[test]
fn a_strict_call_has_arguments_of_its_schema() {
    let setup = Setup {
        template: Some("{# <|python_tag|> #}{% for m in messages %}{{ m.content }}{% endfor %}"),
        ..Setup::default()
    };
    let server = setup.start();
    let open = post(server.address, "/tokenize", &json!({"content": "{"})).json();
    let open = open["tokens"].as_array().unwrap().last().unwrap().clone();
    let ask = |strict: bool, more: Value| {
        let mut tools = tools();
        for tool in tools.as_array_mut().unwrap() {
            tool["function"]["strict"] = json!(strict);
        }
        let messages = json!([{"role": "user", "content": "Once upon a time"}]);
        let body = json!({"messages": messages, "tools": tools, "temperature": 0,
                          "max_tokens": 120, "logit_bias": {open.to_string(): 30}});
        let reply = post(server.address, "/v1/chat/completions", &with(body, &more));
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.json()["choices"][0]["message"].clone()
    };
    assert_eq!(ask(false, json!({})).get("tool_calls"), None);
    let several = ask(true, json!({}));
    let calls = several["tool_calls"].as_array().unwrap();
    let call = &calls[0]["function"];
    match call["name"].as_str().unwrap() {
        "weather" => check_weather(call["arguments"].as_str().unwrap()),
        name => {
            let arguments = call["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            assert_eq!((name, arguments), ("stop", json!({})));
        }
    }
    let one = ask(true, json!({"parallel_tool_calls": false}));
    assert_eq!(one["tool_calls"].as_array().unwrap().len(), 1);
    assert_eq!(one["tool_calls"][0]["function"], *call);
}

#[test]
fn a_tool_s_schema_that_cannot_be_compiled_is_named() {
    let setup = Setup {
        template: Some("{# <tool_call> #}{% for m in messages %}{{ m.content }}{% endfor %}"),
        ..Setup::default()
    };
    let server = setup.start();
    let mut tools = tools();
    tools[1]["function"]["strict"] = json!(true);
    tools[1]["function"]["parameters"]["properties"] = json!({"a": {"not": {}}});
    for choice in ["auto", "required"] {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let body = json!({"messages": messages, "tools": tools, "tool_choice": choice});
        let reply = post(server.address, "/v1/chat/completions", &body);
        assert_eq!(reply.status, 400, "{}", reply.body);
        let error = reply.json()["error"].clone();
        assert_eq!(error["param"], "tools[1].function.parameters", "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("'/properties/a/not'"), "{message}");
    }
}

#[test]
fn strict_is_refused_where_a_model_cannot_be_held_to_it() {
    let setup = Setup {
        template: Some("{% for m in messages %}{{ m.content }}{% endfor %}"),
        ..Setup::default()
    };
    let server = setup.start();
    let mut tools = tools();
    tools[1]["function"]["strict"] = json!(true);
    let ask = |more: Value| {
        let messages = json!([{"role": "user", "content": "Hello"}]);
        let body = json!({"messages": messages, "tools": tools, "max_tokens": 4});
        post(server.address, "/v1/chat/completions", &with(body, &more))
    };
    let refused = ask(json!({}));
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert_eq!(refused.json()["error"]["param"], "tools[1].function.strict");
    assert_eq!(ask(json!({"tool_choice": "required"})).status, 200);
    assert_eq!(ask(json!({"tool_choice": "none"})).status, 200);
    let wrong = ask(json!({"parallel_tool_calls": "no"}));
    assert_eq!(wrong.json()["error"]["param"], "parallel_tool_calls");
}

#[test]
fn templates_see_tools_and_their_results() {
    let setup = Setup {
        template: Some(
            "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}{% for m in messages %}\
             [{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}\
             {{ c.function.name }}({{ c.function.arguments | tojson }}){% endfor %}{% endfor %}",
        ),
        ..Setup::default()
    };
    let server = setup.start();
    let call = json!({"id": "call_1", "type": "function",
                      "function": {"name": "weather", "arguments": "{\"city\":\"Rome\"}"}});
    let messages = json!([
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]);
    let render = |extra: Value| {
        let body = with(json!({"messages": messages}), &extra);
        post(server.address, "/apply-template", &body).json()["prompt"].clone()
    };
    let text = "[user]How is it?[assistant]weather({\"city\": \"Rome\"})[tool]sunny";
    assert_eq!(render(json!({})), text);
    assert_eq!(
        render(json!({"tools": tools()})),
        format!("weather;stop;{text}")
    );
    assert_eq!(
        render(json!({"tools": tools(), "tool_choice": "none"})),
        text
    );
}

#[test]
fn reasoning_is_apart_from_the_answer() {
    let setup = Setup {
        template: Some("{{ messages[0].content }}<think>"),
        ..Setup::default()
    };
    let server = setup.start();
    let answer = chat(&server, json!({}));
    let message = &answer["choices"][0]["message"];
    let alone = Alone::new().greedy("Once upon a time<think>", 12);
    assert_eq!(message["reasoning_content"], alone.trim());
    assert_eq!(message["content"], "");
    let body = json!({"messages": [{"role": "user", "content": "Once upon a time"}],
                      "temperature": 0, "max_tokens": 12, "stream": true});
    let reply = post(server.address, "/v1/chat/completions", &body);
    let events = reply.json_events();
    let delta = |name: &str| -> String {
        let deltas = events
            .iter()
            .map(|event| &event["choices"][0]["delta"][name]);
        deltas.filter_map(Value::as_str).collect()
    };
    assert_eq!(delta("reasoning_content"), alone.trim());
    assert_eq!(delta("content"), "");
}
