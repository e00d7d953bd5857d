//! `/v1/responses`: items in, items and events out, and conversations that are kept.

use std::time::{Duration, Instant};

use cellar_server::ShelfLimits;
use model_tests::http::{Response, open, post, request};
use serde_json::{Value, json};

use crate::support::{Alone, Server, Setup, with};

const PATH: &str = "/v1/responses";

fn ask(server: &Server, extra: Value) -> Response {
    let body = json!({"input": "Once upon a time", "temperature": 0, "max_output_tokens": 12});
    post(server.address, PATH, &with(body, &extra))
}

#[track_caller]
fn answer(server: &Server, extra: Value) -> Value {
    let reply = ask(server, extra);
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.json()
}

#[track_caller]
fn refused(server: &Server, extra: Value, status: u16) -> Value {
    let reply = ask(server, extra);
    assert_eq!(reply.status, status, "{}", reply.body);
    reply.json()["error"].clone()
}

fn text(response: &Value) -> &Value {
    &response["output"][0]["content"][0]["text"]
}

fn send(server: &Server, method: &str, path: &str, headers: &[(&str, &str)]) -> Response {
    open(server.address, &request(method, path, headers, "")).finish()
}

/// The names of events, with neighbours that are the same as one.
fn names(events: &[Value]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().filter_map(|e| e["type"].as_str()).collect();
    names.dedup();
    names
}

/// Follows events as a client does, and checks that they agree with each other and with the last.
#[track_caller]
fn check_events(events: &[Value]) -> Value {
    let mut items: Vec<Value> = Vec::new();
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number, "{event}");
        let at = event["output_index"].as_u64().map(|at| at as usize);
        let mut append = |path: &str| {
            let item = &mut items[at.unwrap()];
            assert_eq!(event["item_id"], item["id"], "{event}");
            let to = item.pointer_mut(path).unwrap();
            *to = json!(to.as_str().unwrap().to_owned() + event["delta"].as_str().unwrap());
        };
        match event["type"].as_str().unwrap() {
            "response.output_item.added" => {
                assert_eq!(at, Some(items.len()));
                assert_eq!(event["item"]["status"], "in_progress");
                items.push(event["item"].clone());
            }
            "response.content_part.added" => {
                assert_eq!(event["content_index"], 0);
                items[at.unwrap()]["content"] = json!([event["part"]]);
            }
            "response.output_text.delta" | "response.reasoning_text.delta" => {
                append("/content/0/text");
            }
            "response.function_call_arguments.delta" => append("/arguments"),
            "response.output_text.done" | "response.reasoning_text.done" => {
                assert_eq!(event["text"], items[at.unwrap()]["content"][0]["text"]);
            }
            "response.function_call_arguments.done" => {
                assert_eq!(event["arguments"], items[at.unwrap()]["arguments"]);
            }
            "response.output_item.done" => {
                let item = &mut items[at.unwrap()];
                for name in ["id", "type", "arguments"] {
                    assert_eq!(event["item"][name], item[name]);
                }
                let text = |item: &Value| item["content"][0]["text"].clone();
                assert_eq!(text(&event["item"]), text(item));
                *item = event["item"].clone();
            }
            _ => {}
        }
    }
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"], json!(items));
    last.clone()
}

#[test]
fn a_response_is_the_text_of_its_rendered_items() {
    let server = Setup::default().start();
    let response = answer(
        &server,
        json!({"instructions": "Be brief.", "metadata": {"a": "b"}}),
    );
    let prompt = "<|system|>Be brief.\n<|user|>Once upon a time\n<|assistant|>";
    assert_eq!(*text(&response), Alone::new().greedy(prompt, 12));
    assert_eq!(response["object"], "response");
    assert_eq!(response["model"], "stories");
    assert_eq!(response["status"], "incomplete");
    assert_eq!(
        response["incomplete_details"],
        json!({"reason": "max_output_tokens"})
    );
    assert_eq!(response["output"][0]["type"], "message");
    assert_eq!(response["output"][0]["status"], "incomplete");
    assert_eq!(response["metadata"], json!({"a": "b"}));
    assert_eq!(response["instructions"], "Be brief.");
    assert_eq!(response["temperature"], 0.0);
    let usage = &response["usage"];
    assert_eq!(usage["output_tokens"], 12);
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], 0);
    let n_prompt = usage["input_tokens"].as_u64().unwrap();
    assert_eq!(usage["total_tokens"], n_prompt + 12);
    let again = answer(&server, json!({"instructions": "Be brief."}));
    assert_eq!(text(&again), text(&response));
    assert_eq!(
        again["usage"]["input_tokens_details"]["cached_tokens"],
        n_prompt - 1
    );
}

#[test]
fn a_streamed_response_has_openai_s_events_in_order() {
    let server = Setup::default().start();
    let whole = answer(&server, json!({}));
    let reply = ask(&server, json!({"stream": true}));
    assert_eq!(reply.header("content-type"), Some("text/event-stream"));
    assert!(reply.is_complete);
    let events = reply.json_events();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(names(&events), expected);
    assert_eq!(events[0]["response"]["status"], "in_progress");
    assert_eq!(events[0]["response"]["output"], json!([]));
    let last = check_events(&events);
    assert_eq!(text(&last), text(&whole));
    assert_eq!(last["usage"]["output_tokens"], 12);
    // The name of an event is the type of its data.
    let lines = reply.body.lines().collect::<Vec<_>>();
    for pair in lines.chunks(3) {
        let data: Value = serde_json::from_str(pair[1].strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(pair[0].strip_prefix("event: "), data["type"].as_str());
    }
}

fn tools() -> Value {
    json!([{"type": "function", "name": "weather", "strict": true, "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"], "additionalProperties": false}},
        {"type": "function", "name": "stop", "parameters": {
            "type": "object", "properties": {}, "additionalProperties": false}}])
}

#[test]
fn functions_are_called_and_their_output_goes_on() {
    let server = Setup::default().start();
    let choice = json!({"type": "function", "name": "weather"});
    let call = json!({"tools": tools(), "tool_choice": choice, "max_output_tokens": 100});
    let response = answer(&server, call.clone());
    assert_eq!(response["status"], "completed");
    let item = &response["output"][0];
    assert_eq!(item["type"], "function_call");
    assert_eq!(item["name"], "weather");
    let arguments: Value = serde_json::from_str(item["arguments"].as_str().unwrap()).unwrap();
    assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()));

    let streamed = ask(&server, with(call, &json!({"stream": true}))).json_events();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ];
    assert_eq!(names(&streamed), expected);
    let last = check_events(&streamed);
    assert_eq!(last["output"][0]["arguments"], item["arguments"]);

    let output = json!({"type": "function_call_output", "call_id": item["call_id"],
                        "output": "sunny"});
    // All items sent again, or the response that has them: the same.
    let user = json!({"role": "user", "content": "Once upon a time"});
    let sent = answer(&server, json!({"input": [user, item, output]}));
    let kept = answer(
        &server,
        json!({"input": [output], "previous_response_id": response["id"]}),
    );
    assert_eq!(text(&sent), text(&kept));
    assert_eq!(sent["usage"]["input_tokens"], kept["usage"]["input_tokens"]);
    assert_eq!(kept["previous_response_id"], response["id"]);

    let only = json!({"type": "allowed_tools", "mode": "required",
                      "tools": [{"type": "function", "name": "stop"}]});
    let allowed = json!({"tools": tools(), "tool_choice": only, "max_output_tokens": 100});
    assert_eq!(answer(&server, allowed)["output"][0]["name"], "stop");
}

#[test]
fn reasoning_is_an_item_of_its_own_and_is_counted() {
    let setup = Setup {
        template: Some("{{ messages[0].content }}<think>"),
        ..Setup::default()
    };
    let server = setup.start();
    let response = answer(&server, json!({"reasoning": {"effort": "low"}}));
    let alone = Alone::new().greedy("Once upon a time<think>", 12);
    let item = &response["output"][0];
    assert_eq!(item["type"], "reasoning");
    assert_eq!(item["content"][0]["type"], "reasoning_text");
    assert_eq!(item["content"][0]["text"], alone.trim());
    assert_eq!(response["reasoning"]["effort"], "low");
    let details = &response["usage"]["output_tokens_details"];
    assert_eq!(details["reasoning_tokens"], 12);
    let events = ask(&server, json!({"stream": true})).json_events();
    let expected = [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ];
    assert_eq!(names(&events), expected);
    check_events(&events);
    // A chat counts them, too.
    let chat = json!({"messages": [{"role": "user", "content": "Once upon a time"}],
                      "temperature": 0, "max_tokens": 12});
    let details = |usage: &Value| usage["completion_tokens_details"]["reasoning_tokens"].clone();
    let whole = post(server.address, "/v1/chat/completions", &chat).json();
    assert_eq!(details(&whole["usage"]), 12);
    let chat = with(
        chat,
        &json!({"stream": true, "stream_options": {"include_usage": true}}),
    );
    let events = post(server.address, "/v1/chat/completions", &chat).json_events();
    assert_eq!(details(&events.last().unwrap()["usage"]), 12);
}

#[test]
fn schemas_hold_responses() {
    let server = Setup::default().start();
    let schema = json!({"type": "object", "properties": {"mood": {"enum": ["sad", "happy"]}},
                        "required": ["mood"], "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "mood", "strict": true, "schema": schema});
    let extra = json!({"text": {"format": format}, "max_output_tokens": 100});
    let response = answer(&server, extra);
    let object: Value = serde_json::from_str(text(&response).as_str().unwrap()).unwrap();
    assert!(["sad", "happy"].contains(&object["mood"].as_str().unwrap()));
    assert_eq!(response["status"], "completed");
    assert_eq!(response["text"]["format"], format);
}

#[test]
fn log_probabilities_are_in_the_text() {
    let server = Setup::default().start();
    let extra = json!({"include": ["message.output_text.logprobs"], "top_logprobs": 2});
    let response = answer(&server, extra.clone());
    let places = response["output"][0]["content"][0]["logprobs"].as_array();
    assert_eq!(places.unwrap().len(), 12);
    assert_eq!(
        places.unwrap()[0]["top_logprobs"].as_array().unwrap().len(),
        2
    );
    let events = ask(&server, with(extra, &json!({"stream": true}))).json_events();
    let deltas = events
        .iter()
        .filter(|e| e["type"] == "response.output_text.delta");
    let streamed: Vec<&Value> = deltas
        .flat_map(|e| e["logprobs"].as_array().unwrap())
        .collect();
    assert_eq!(json!(streamed), json!(places.unwrap()));
}

#[test]
fn conversations_go_on_from_a_response_that_is_kept() {
    let server = Setup::default().start();
    let first = answer(&server, json!({"instructions": "Be brief."}));
    let id = first["id"].as_str().unwrap();
    let extra = json!({"previous_response_id": id, "input": "And then?", "instructions": "Sing."});
    let second = answer(&server, extra);
    let said = text(&first).as_str().unwrap();
    // Instructions are those of the request alone.
    let prompt = format!(
        "<|system|>Sing.\n<|user|>Once upon a time\n<|assistant|>{said}\n<|user|>And then?\n<|assistant|>"
    );
    assert_eq!(*text(&second), Alone::new().greedy(&prompt, 12));

    let path = format!("{PATH}/{id}");
    assert_eq!(send(&server, "GET", &path, &[]).json(), first);
    let gone = send(&server, "DELETE", &path, &[]).json();
    assert_eq!(
        gone,
        json!({"id": id, "object": "response", "deleted": true})
    );
    for method in ["GET", "DELETE"] {
        assert_eq!(send(&server, method, &path, &[]).status, 404);
    }
    let wrong = send(&server, "PUT", &path, &[]);
    assert_eq!(wrong.status, 405);
    assert_eq!(wrong.header("allow"), Some("GET, DELETE"));
    let error = refused(&server, json!({"previous_response_id": id}), 400);
    assert_eq!(error["code"], "previous_response_not_found");
    assert_eq!(error["param"], "previous_response_id");

    let unkept = answer(&server, json!({"store": false}));
    let extra = json!({"previous_response_id": unkept["id"]});
    refused(&server, extra, 400);
}

#[test]
fn streamed_responses_are_kept_too() {
    let server = Setup::default().start();
    let events = ask(&server, json!({"stream": true})).json_events();
    let response = &events.last().unwrap()["response"];
    let path = format!("{PATH}/{}", response["id"].as_str().unwrap());
    assert_eq!(send(&server, "GET", &path, &[]).json(), *response);
}

/// Another response goes on from one that is being written, and computes nothing of it again; the
/// one whose client leaves is gone.
#[test]
fn a_response_that_is_being_written_is_gone_on_from() {
    let server = Setup::default().start();
    let long = json!({"input": "Once upon a time", "temperature": 0, "max_output_tokens": 400,
                      "stream": true});
    let body = long.to_string();
    let headers = [("Content-Type", "application/json")];
    let mut running = open(server.address, &request("POST", PATH, &headers, &body));
    let mut events = String::new();
    while events.matches("output_text.delta").count() < 20 {
        events += &running.next_chunk().unwrap().unwrap();
    }
    let (_, id) = events.split_once("\"id\":\"resp_").unwrap();
    let id = format!("resp_{}", id.split('"').next().unwrap());
    let path = format!("{PATH}/{id}");
    let so_far = send(&server, "GET", &path, &[]).json();
    assert_eq!(so_far["status"], "in_progress", "{so_far}");

    let next = answer(
        &server,
        json!({"previous_response_id": id, "input": "And then?"}),
    );
    let n_input = next["usage"]["input_tokens"].as_u64().unwrap();
    let n_cached = &next["usage"]["input_tokens_details"]["cached_tokens"];
    let first = ["Once upon a time", "And then?"];
    let alone = first.map(|text| json!({"role": "user", "content": text}));
    let without = answer(&server, json!({"input": alone, "store": false}));
    let n_without = without["usage"]["input_tokens"].as_u64().unwrap();
    assert!(n_input > n_without + 5, "{next} {without}");
    // All but the end of its turn, and what comes then.
    assert!(n_cached.as_u64().unwrap() + 24 > n_input, "{next}");

    drop(running);
    let until = Instant::now() + Duration::from_secs(20);
    while send(&server, "GET", &path, &[]).status != 404 {
        assert!(Instant::now() < until, "it is there still");
    }
    let id = next["id"].as_str().unwrap();
    assert_eq!(
        send(&server, "GET", &format!("{PATH}/{id}"), &[]).json(),
        next
    );
}

#[test]
fn a_response_is_of_the_key_that_asked_for_it() {
    let server = Setup::with_keys("first\nsecond").start();
    let body = json!({"input": "Hello", "max_output_tokens": 2}).to_string();
    let ask = |key: &str, body: &str| {
        let key = format!("Bearer {key}");
        let request = request("POST", PATH, &[("Authorization", &key)], body);
        open(server.address, &request).finish()
    };
    let id = ask("first", &body).json()["id"].clone();
    let next = json!({"input": "More", "max_output_tokens": 2, "previous_response_id": id});
    assert_eq!(ask("first", &next.to_string()).status, 200);
    let other = ask("second", &next.to_string());
    assert_eq!(other.status, 400);
    let never = with(next, &json!({"previous_response_id": "resp_never"}));
    let never = ask("second", &never.to_string()).body;
    // Whether it exists cannot be told.
    assert_eq!(
        other.body,
        never.replace("resp_never", id.as_str().unwrap())
    );
}

#[test]
fn kept_responses_make_room() {
    let mut setup = Setup::default();
    setup.server.conversations = ShelfLimits {
        n_entries: 2,
        ..ShelfLimits::default()
    };
    let server = setup.start();
    let ids: Vec<Value> = (0..3)
        .map(|_| answer(&server, json!({}))["id"].clone())
        .collect();
    let statuses = ids
        .iter()
        .map(|id| ask(&server, json!({"previous_response_id": id, "store": false})));
    let statuses: Vec<u16> = statuses.map(|reply| reply.status).collect();
    assert_eq!(statuses, [400, 200, 200]);
}

#[test]
fn wrong_fields_are_named() {
    let server = Setup::default().start();
    for (extra, param) in [
        (json!({"input": 1}), "input"),
        (
            json!({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
            "input[0].content[0].image_url",
        ),
        (json!({"max_output_tokens": -2}), "max_output_tokens"),
        (json!({"temperature": -1}), "temperature"),
        (json!({"conversation": "conv_1"}), "conversation"),
        (json!({"tools": [{"type": "function"}]}), "tools[0].name"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (
            json!({"text": {"format": {"type": "xml"}}}),
            "text.format.type",
        ),
        (
            json!({"text": {"format": {"type": "json_schema"}}}),
            "text.format.schema",
        ),
        (
            json!({"text": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}),
            "text.format.schema",
        ),
        (json!({"include": ["everything"]}), "include[0]"),
        (json!({"top_logprobs": 21}), "top_logprobs"),
    ] {
        let error = refused(&server, extra.clone(), 400);
        assert_eq!(error["param"], param, "{extra}: {error}");
    }
    // Fields without their names, as a list.
    let unnamed = answer(&server, json!({"text": [null]}));
    assert_eq!(unnamed["text"], json!({"format": {"type": "text"}}));
    let error = refused(&server, json!({"input": "word ".repeat(3000)}), 400);
    assert_eq!(error["code"], "context_length_exceeded");
}
