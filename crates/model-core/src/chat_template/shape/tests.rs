//! Forms of small templates.

use super::*;

/// The rendering of a history in the form that a template wants.
fn rendered(source: &str, messages: &Value) -> String {
    let template = ChatTemplate::new(source).unwrap();
    let shape = template.history_shape();
    let messages = shape.apply(messages.as_array().unwrap());
    let tools = json!([{"function": {"name": "f"}}]);
    let variables = shape.variables(&Map::from_iter([("tools".to_owned(), tools)]));
    let tokens = TemplateTokens::default();
    let text = template.render_json(&messages, &variables, GenerationPrompt::Omit, tokens);
    text.unwrap()
}

fn call(id: &str, arguments: &str) -> Value {
    let function = json!({"name": "f", "arguments": arguments});
    json!({"id": id, "type": "function", "function": function})
}

fn history(assistant: Value) -> Value {
    json!([
        {"role": "user", "content": "Hi"},
        assistant,
        {"role": "tool", "tool_call_id": "call_long_1", "content": "R"},
    ])
}

fn calling(content: &Value) -> Value {
    let calls = [call("call_long_1", "{\"a\":  \"é\"}")];
    json!({"role": "assistant", "content": content, "tool_calls": calls})
}

const OBJECTS: &str = "{% for m in messages %}{{ m.role }}:{{ m.content }}\
    {% for c in m.tool_calls %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]\
    {% endfor %};{% endfor %}";

#[test]
fn arguments_are_objects_by_default() {
    let expected = "user:Hi;assistant:[f {\"a\": \"é\"}];tool:R;";
    assert_eq!(rendered(OBJECTS, &history(calling(&Value::Null))), expected);
}

/// As Functionary 3.2 and DeepSeek's older templates.
#[test]
fn a_template_that_adds_arguments_to_a_text_gets_json() {
    let source = OBJECTS.replace(
        "{{ c.function.arguments | tojson }}",
        "{{ '' + c.function.arguments }}",
    );
    let expected = "user:Hi;assistant:[f {\"a\":  \"é\"}];tool:R;";
    assert_eq!(rendered(&source, &history(calling(&json!("")))), expected);
    let source = OBJECTS.replace("arguments | tojson", "arguments");
    assert_eq!(rendered(&source, &history(calling(&json!("")))), expected);
}

/// As DeepSeek-R1-Distill.
#[test]
fn a_template_that_looks_for_null_gets_it() {
    let source = "{% for m in messages %}{{ m.role }}:\
        {% if m.content is none %}{% for c in m.tool_calls %}[{{ c.function.arguments | tojson }}]\
        {% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}";
    let expected = "user:Hi;assistant:[{\"a\": \"é\"}];tool:R;";
    for content in [json!(""), Value::Null] {
        assert_eq!(rendered(source, &history(calling(&content))), expected);
    }
    // The text is a message of its own: with it, the call would be left out.
    let expected = "user:Hi;assistant:T;assistant:[{\"a\": \"é\"}];tool:R;";
    assert_eq!(rendered(source, &history(calling(&json!("T")))), expected);
}

#[test]
fn a_template_without_calls_gets_them_as_text() {
    let source = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let text = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"é\"}}\n</tool_call>";
    let expected = format!("user:Hi;assistant:T\n{text};tool:R;");
    assert_eq!(rendered(source, &history(calling(&json!("T")))), expected);
    let source = source.replace(
        "{{ m.role }}",
        "{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}{{ m.role }}",
    );
    let result = "<tool_response>\nR\n</tool_response>";
    let expected = format!("user:Hi;assistant:{text};user:{result}\nNext;");
    let mut messages = history(calling(&Value::Null));
    let next = json!({"role": "user", "content": "Next"});
    messages.as_array_mut().unwrap().push(next);
    assert_eq!(rendered(&source, &messages), expected);
}

#[test]
fn reasoning_comes_under_the_name_that_is_read() {
    for name in REASONING {
        let source = OBJECTS.replace(
            "{{ m.content }}",
            &format!("({{{{ m.{name} }}}}){{{{ m.content }}}}"),
        );
        for given in REASONING {
            let answer = json!({"role": "assistant", "content": "T", given: "R"});
            let messages = json!([{"role": "user", "content": "Hi"}, answer]);
            let text = rendered(&source, &messages);
            assert_eq!(text, "user:()Hi;assistant:(R)T;", "{name} {given}");
        }
    }
}

/// As gpt-oss.
#[test]
fn text_gives_way_to_reasoning_where_a_call_has_one_of_them() {
    let source = OBJECTS.replace(
        "{{ m.content }}",
        "{% if m.thinking and m.content and m.tool_calls %}{{ raise_exception('both') }}\
         {% endif %}{{ m.thinking if m.tool_calls and m.thinking else m.content }}",
    );
    let mut answer = calling(&json!("T"));
    let call = "[f {\"a\": \"é\"}]";
    let expected = format!("user:Hi;assistant:T{call};tool:R;");
    assert_eq!(rendered(&source, &history(answer.clone())), expected);
    answer["reasoning"] = json!("W");
    let expected = format!("user:Hi;assistant:W{call};tool:R;");
    assert_eq!(rendered(&source, &history(answer)), expected);
}

/// As Mistral's, which want ids of nine characters.
#[test]
fn ids_are_those_that_the_template_takes() {
    let source = OBJECTS.replace(
        "[{{",
        "{% if c.id | length != 9 %}{{ raise_exception('id') }}{% endif %}[{{ c.id }} {{",
    );
    let source = source.replace("m.content }}", "m.content }}{{ m.tool_call_id }}");
    let expected = "user:Hi;assistant:[call00000 f {\"a\": \"é\"}];tool:Rcall00000;";
    assert_eq!(rendered(&source, &history(calling(&Value::Null))), expected);
}

/// As Llama 3.1, which refuses two calls.
#[test]
fn calls_are_one_by_one_where_the_template_takes_one() {
    let source = OBJECTS.replace(
        "{% for c in",
        "{% if m.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}{% for c in",
    );
    let calls = json!([call("x", "{\"n\": 1}"), call("y", "{\"n\": 2}")]);
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": null, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "x", "content": "1"},
        {"role": "tool", "tool_call_id": "y", "content": "2"},
    ]);
    let expected = "user:Hi;assistant:[f {\"n\": 1}];tool:1;assistant:[f {\"n\": 2}];tool:2;";
    assert_eq!(rendered(&source, &messages), expected);
}

#[test]
fn results_have_the_name_of_their_call() {
    let source = OBJECTS.replace("m.content }}", "m.content }}{{ m.name }}");
    let mut messages = history(calling(&Value::Null));
    messages[2]["content"] = Value::Null;
    let expected = "user:Hi;assistant:[f {\"a\": \"é\"}];tool:f;";
    assert_eq!(rendered(&source, &messages), expected);
}

#[test]
fn a_system_message_goes_to_the_user_where_there_is_no_place() {
    let source = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}\
                  {% endif %}{{ m.role }}:{{ m.content }};{% endfor %}";
    let system = json!({"role": "system", "content": "S"});
    let messages = json!([system, {"role": "user", "content": "Hi"}]);
    assert_eq!(rendered(source, &messages), "user:S\nHi;");
}

#[test]
fn content_is_parts_where_the_template_shows_no_text() {
    let source = "{% for m in messages %}{{ m.role }}:{% for p in m.content %}{{ p.text }}\
                  {% endfor %};{% endfor %}";
    let messages = json!([{"role": "user", "content": "Hi"}]);
    assert_eq!(rendered(source, &messages), "user:Hi;");
}

/// As Firefunction.
#[test]
fn tools_are_a_text_where_the_template_reads_one() {
    let source = "{{ functions + ' ' + datetime[7:9] }};".to_owned() + OBJECTS;
    let text = rendered(&source, &history(calling(&Value::Null)));
    let tools = "[{\"function\": {\"name\": \"f\"}}] 20;";
    assert_eq!(
        text,
        format!("{tools}user:Hi;assistant:[f {{\"a\": \"é\"}}];tool:R;")
    );
}

/// Arguments that are no JSON are mended, or stay a text.
#[test]
fn broken_arguments_are_shown() {
    let broken = |arguments: &str| {
        let calls = [call("call_long_1", arguments)];
        history(json!({"role": "assistant", "content": null, "tool_calls": calls}))
    };
    let of = |arguments: &str| rendered(OBJECTS, &broken(arguments));
    let mended = "user:Hi;assistant:[f {\"city\": \"Pa\\nris\"}];tool:R;";
    assert_eq!(of("{\"city\": \"Pa\nris\",}"), mended);
    assert_eq!(of("Paris"), "user:Hi;assistant:[f \"Paris\"];tool:R;");
    let items = OBJECTS.replace(
        "{{ c.function.arguments | tojson }}",
        "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}",
    );
    let expected = "user:Hi;assistant:[f arguments=Paris];tool:R;";
    assert_eq!(rendered(&items, &broken("Paris")), expected);
}
