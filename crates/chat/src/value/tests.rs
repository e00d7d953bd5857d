//! Values of every notation.

use super::*;

fn read(dialect: Dialect, text: &str) -> (String, Step) {
    let (mut reader, mut out) = (ValueReader::new(dialect), String::new());
    for c in text.chars() {
        let step = reader.push(c, &mut out);
        if step != Step::Open {
            return (out, step);
        }
    }
    (out, Step::Open)
}

#[test]
fn json_stays_as_it_is() {
    for json in [
        r#"{"a": "}\"{", "b": [1, {}], "c": [ ], "d": -1.5e3 }"#,
        r#"{"a":"\u00e9\\\n","b":{"c":[true,false,null]}}"#,
        "[\n  1,\n  \"x\"\n]",
        "\"text\"",
    ] {
        assert_eq!(read(Dialect::Json, json), (json.to_owned(), Step::Done));
    }
    assert_eq!(read(Dialect::Json, "12,").1, Step::Behind);
}

#[test]
fn small_faults_are_mended() {
    for (written, json) in [
        ("{\"a\": \"Pa\nr\tis\"}", r#"{"a": "Pa\nr\tis"}"#),
        ("{\"a\": 1,}", r#"{"a": 1}"#),
        ("[1, 2, ]", "[1, 2]"),
        (
            "{'a': 'it's', 'b': True, 'c': None}",
            r#"{"a": "it's", "b": true, "c": null}"#,
        ),
        (r#"{"a": "\d \' \""}"#, r#"{"a": "\\d ' \""}"#),
        (r#"{'a': 'say "x"'}"#, r#"{"a": "say \"x\""}"#),
    ] {
        let (out, step) = read(Dialect::Json, written);
        assert_eq!((out.as_str(), step), (json, Step::Done), "{written}");
        assert!(serde_json::from_str::<Value>(&out).is_ok(), "{out}");
    }
}

#[test]
fn arguments_of_python_are_an_object() {
    for (written, json) in [
        ("()", "{}"),
        ("(a=1, b = 'x')", r#"{"a": 1, "b":  "x"}"#),
        (
            "(a=(1, 2), b={\"c\": None}, d='',)",
            r#"{"a": [1, 2], "b": {"c": null}, "d": ""}"#,
        ),
        (
            "(city='Paris \"x\" it's', note='\\x41')",
            r#"{"city": "Paris \"x\" it's", "note": "\u0041"}"#,
        ),
    ] {
        let (out, step) = read(Dialect::Python, written);
        assert_eq!((out.as_str(), step), (json, Step::Done), "{written}");
    }
    assert_eq!(read(Dialect::Python, "(1, 2)").1, Step::Broken);
}

#[test]
fn gemma_quotes_nothing_in_its_quotes() {
    let written =
        r#"{city:<|"|>a "b" <| \n <|"<|"|>,deep:{a:[1,2]},on:true,<|"|>k<|"|>:<|"|><|"|>}"#;
    let json = r#"{"city":"a \"b\" <| \\n <|\"","deep":{"a":[1,2]},"on":true,"k":""}"#;
    assert_eq!(read(Dialect::Gemma, written), (json.to_owned(), Step::Done));
}

#[test]
fn what_is_no_value_is_broken() {
    let deep = "[".repeat(MAX_DEPTH + 1);
    for text in [
        "hello ",
        "{hello",
        "{\"a\" 1}",
        "{\"a\": 1]",
        "[1 2]",
        "{\"a\": x}",
        "{]",
        &deep,
    ] {
        assert_eq!(read(Dialect::Json, text).1, Step::Broken, "{text}");
    }
    assert_eq!(read(Dialect::Json, "{\"a\": \"x").1, Step::Open);
}
