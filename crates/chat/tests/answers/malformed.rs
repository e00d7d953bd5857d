//! Calls that are broken as models break them: each is mended, or comes out whole as it is.

use cellar_chat::Part;
use serde_json::{Value, json};

use super::goldens::{ALL, GoldenAnswer};
use super::support::{read, with};

/// The reading of an answer.
#[derive(Debug, PartialEq)]
struct Answer {
    text: String,
    /// Names and arguments.
    calls: Vec<(String, String)>,
}

impl Answer {
    /// The same whole, cut at every place, and character by character.
    #[track_caller]
    fn of(golden: &GoldenAnswer, written: &str) -> Self {
        let mut answer = Self {
            text: String::new(),
            calls: Vec::new(),
        };
        for part in read(&with(golden.template), written) {
            match part {
                Part::Text(text) | Part::Reasoning(text) => answer.text += &text,
                Part::ToolStart { name, .. } => answer.calls.push((name, String::new())),
                Part::ToolArguments { text, .. } => answer.calls.last_mut().unwrap().1 += &text,
            }
        }
        answer
    }

    /// True if it is the call of a tool, with these arguments.
    fn is_call(&self, name: &str, arguments: &Value) -> bool {
        let [(called, text)] = self.calls.as_slice() else {
            return false;
        };
        let value = serde_json::from_str::<Value>(text);
        self.text.is_empty() && called == name && value.is_ok_and(|value| value == *arguments)
    }
}

fn arguments() -> Value {
    json!({"city": "Paris", "days": 3})
}

/// The place of the tool's name.
fn name_at(golden: &GoldenAnswer) -> usize {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let is_alone = |at: &usize| {
        let (before, after) = (&golden.one[..*at], &golden.one[at + 1..]);
        !before.ends_with(is_word) && !after.starts_with(is_word)
    };
    let mut places = golden.one.match_indices('f').map(|(at, _)| at);
    places.find(is_alone).unwrap()
}

/// The answer with a part of its arguments changed; `None` where it does not have that part.
fn changed(golden: &GoldenAnswer, part: &str, other: &str) -> Option<String> {
    let at = golden.one.rfind(part)?;
    let (before, after) = (&golden.one[..at], &golden.one[at + part.len()..]);
    Some(format!("{before}{other}{after}"))
}

const ARGUMENTS: &str = "{\"city\": \"Paris\", \"days\": 3}";

#[test]
fn a_comma_at_the_end_is_dropped() {
    let mut n = 0;
    for golden in ALL {
        for close in ["}", ")"] {
            let last = format!("3{close}");
            let Some(written) = changed(golden, &last, &format!("3,{close}")) else {
                continue;
            };
            let answer = Answer::of(golden, &written);
            assert!(answer.is_call("f", &arguments()), "{written}: {answer:?}");
            n += 1;
        }
    }
    assert!(n >= 22, "{n}");
}

#[test]
fn single_quotes_are_quotes() {
    let mut n = 0;
    for golden in ALL {
        let single = ARGUMENTS.replace('"', "'");
        let Some(written) = changed(golden, ARGUMENTS, &single) else {
            continue;
        };
        let answer = Answer::of(golden, &written);
        assert!(answer.is_call("f", &arguments()), "{written}: {answer:?}");
        n += 1;
    }
    assert!(n >= 20, "{n}");
}

#[test]
fn marks_behind_a_call_may_be_missing() {
    for golden in ALL {
        // The last argument, and the marks without which nothing says that it is the last.
        let mut end = golden.one.rfind('3').unwrap() + 1;
        let rest = &golden.one[end..];
        end += match rest.find(['}', ')', '>']) {
            Some(at) => at + 1,
            None => 0,
        };
        let cut = golden.one[..end].to_owned();
        let answer = Answer::of(golden, &cut);
        let [(name, text)] = answer.calls.as_slice() else {
            // Elements are read as a whole.
            assert_eq!(answer.text, cut, "{}", golden.name);
            assert_eq!(golden.name, "MiniMax-M3");
            continue;
        };
        assert_eq!((name.as_str(), answer.text.as_str()), ("f", ""), "{cut}");
        let begun = text.trim_end_matches('}').replace(' ', "");
        assert!(
            ["{\"city\":\"Paris\",\"days\":3", "{\"city\":\"Paris\""].contains(&&*begun),
            "{cut}: {text}"
        );
    }
}

#[test]
fn calls_of_unknown_tools_have_their_name() {
    for golden in ALL {
        let at = name_at(golden);
        let (before, after) = (&golden.one[..at], &golden.one[at + 1..]);
        let written = format!("{before}nothing{after}");
        let answer = Answer::of(golden, &written);
        let [(name, text)] = answer.calls.as_slice() else {
            panic!("{written}: {answer:?}");
        };
        assert_eq!(name, "nothing", "{written}");
        // Without a schema, a value between marks is a text.
        let value: Value = serde_json::from_str(text).unwrap();
        assert_eq!(value["city"], "Paris", "{written}");
        assert!(
            value["days"] == 3 || value["days"] == "3",
            "{written}: {value}"
        );
        assert_eq!(answer.text, "", "{written}");
    }
    // Without a mark, only what names a tool is a call.
    let llama = ALL.iter().find(|golden| golden.name == "Llama 3").unwrap();
    let bare = "{\"name\": \"nothing\", \"parameters\": {\"city\": \"Paris\"}}";
    let answer = Answer::of(llama, bare);
    assert_eq!((answer.text.as_str(), answer.calls.len()), (bare, 0));
}

/// A fault beyond that comes out: nothing that the model wrote of its arguments is lost.
#[test]
fn broken_arguments_are_not_lost() {
    for golden in ALL {
        let mut broken: Vec<String> = Vec::new();
        for (part, others) in [
            // A text without its end.
            ("Paris\"", &["Paris"][..]),
            ("Paris'", &["Paris"]),
            ("Paris<|\"|>", &["Paris"]),
            ("Paris</", &["Paris<", "Paris"]),
            ("Paris\n</", &["Paris<", "Paris"]),
            ("Paris<|close|>", &["Paris<", "Paris"]),
            ("Paris]<]minimax", &["Paris]<", "Paris"]),
            // Without its beginning, and without quotes.
            ("\"Paris\"", &["Paris\"", "Paris"]),
            ("'Paris'", &["Paris'", "Paris"]),
            // Brackets.
            ("3}", &["3", "3]", "3}}"]),
            ("3)", &["3", "3]", "3))"]),
            // No colon, no comma, no key.
            ("\"city\": ", &["\"city\" ", "city: ", "\"city\" = "]),
            (", \"days\"", &[" \"days\"", "; \"days\""]),
            ("city=", &["city:", "city "]),
            // Not an object.
            (
                ARGUMENTS,
                &[
                    "\"Paris 3\"",
                    "[\"Paris\", 3]",
                    "Paris 3",
                    "(\"Paris\", 3)",
                    "{Paris, 3}",
                ],
            ),
            ("(city='Paris', days=3)", &["('Paris', 3)", " Paris 3"]),
        ] {
            broken.extend(
                others
                    .iter()
                    .filter_map(|other| changed(golden, part, other)),
            );
        }
        assert!(!broken.is_empty(), "{}", golden.name);
        for written in broken {
            let answer = Answer::of(golden, &written);
            let all: String = answer
                .calls
                .iter()
                .map(|(_, arguments)| arguments.as_str())
                .chain([answer.text.as_str()])
                .collect();
            assert!(
                all.contains("Paris") && all.contains('3'),
                "{}: {written:?} is {answer:?}",
                golden.name
            );
            // What is no call is text as it was.
            if answer.calls.is_empty() {
                assert_eq!(answer.text, written, "{}", golden.name);
            }
        }
    }
}
