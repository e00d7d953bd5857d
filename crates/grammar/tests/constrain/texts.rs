//! Grammars in GBNF, regular expressions and choices.

use cellar_grammar::{Grammar, GrammarCompiler, GrammarError};

use super::{allows, text, tokenizer};

fn compiled(grammar: &str) -> Result<Grammar, GrammarError> {
    GrammarCompiler::new(&tokenizer()).unwrap().grammar(grammar)
}

/// Checks which texts a grammar allows.
fn check(grammar: &str, yes: &[&str], no: &[&str]) {
    let held = compiled(grammar).unwrap_or_else(|error| panic!("{grammar}\n{error}"));
    for text in yes {
        assert!(allows(&held, text), "{grammar}\nallows {text:?}");
    }
    for text in no {
        assert!(!allows(&held, text), "{grammar}\ndoes not allow {text:?}");
    }
}

#[test]
fn each_form_of_gbnf_is_held() {
    check(
        "root ::= \"yes\" | \"no\" # an answer\n",
        &["yes", "no"],
        &["yesno", ""],
    );
    check(
        "root ::= [a-c]+ [^a-c\\n]",
        &["ax", "abc!"],
        &["x", "a\n", "ad d"],
    );
    check(
        "root ::= \"\\x41\\u00e9\\U0001F600\\\"\\\\\\n\"",
        &["Aé😀\"\\\n"],
        &["A"],
    );
    check(
        "root ::= \"ab\"{2,3}",
        &["abab", "ababab"],
        &["ab", "abababab"],
    );
    check("root ::= .{2}", &["ab", "é\n"], &["a", "abc"]);
    check(
        "root ::= [0-9]{,2} \"x\"? \"y\"{1,}",
        &["y", "12xyy"],
        &["123y", "12x"],
    );
    check(
        "root ::= (\n  \"a\" | # first\n  \"b\"\n)* \"c\"",
        &["c", "abbac"],
        &["ab"],
    );
    check("root ::= [-+] | [a\\]-]", &["-", "+", "]", "a"], &["b"]);
    check(
        "root ::=\n  word (\" \" word)*\nword ::= [a-z]+",
        &["ab", "ab cd e"],
        &["ab  c"],
    );
    // What is the beginning of something else, in one regular expression.
    check(
        "root ::= \"if\" \" \" | [a-z]+ \"!\"",
        &["if ", "ifx!", "if!"],
        &["ifx "],
    );
    check("root ::= \"\" | \"a\"", &["", "a"], &["aa"]);
}

#[test]
fn rules_may_refer_to_themselves() {
    let nested = "root ::= item\nitem ::= \"(\" item? \")\" ws\nws ::= [ ]*";
    check(nested, &["()", "(()  ) "], &["(", "())"]);
    let left = "root ::= root \"+\" [0-9]+ | [0-9]+";
    check(left, &["1", "1+22+3"], &["1+", "+1"]);
    let json = r#"
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"#;
    let texts = [
        r#"{}"#,
        r#"{"a": [1, -2.5e3, "\n\u00e9"], "b":{"c":null} }"#,
    ];
    check(json, &texts, &["{", r#"{"a"}"#, r#"{"a":t}"#]);
    for seed in 1..6 {
        let open = "root ::= \"[\" ( root (\",\" root)? )? \"]\"";
        let text = text(&compiled(open).unwrap(), seed);
        assert_eq!(
            text.matches('[').count(),
            text.matches(']').count(),
            "{text}"
        );
    }
}

#[test]
fn tokens_are_named_by_text_or_id() {
    let held = compiled("root ::= <|mark|> \"a\"");
    assert!(held.is_ok(), "{held:?}");
    assert!(compiled("root ::= <[3]> !<[3]> \"a\"").is_ok());
    assert!(compiled("root ::= <|none|>").is_err());
}

/// Converters of JSON schemas write "at most n digits" as n brackets in each other.
#[test]
fn brackets_of_gbnf_may_be_deep() {
    let deep = |n: usize, inner: &str| {
        let opening = "([a-z] ".repeat(n);
        let closing = ")?".repeat(n);
        format!("root ::= {opening}{inner}{closing} \".\"")
    };
    let long = "a".repeat(61);
    check(&deep(60, "\"!\""), &[".", "a.", "abcde."], &["A.", &long]);
    // The same with a rule that refers to itself.
    let nested = format!("{}\nitem ::= \"(\" item? \")\"", deep(40, "item"));
    check(
        &nested,
        &[".", "ab.", &format!("{}(()).", "a".repeat(40))],
        &["a()."],
    );
}

#[test]
fn errors_of_gbnf_have_a_line_and_a_column() {
    for (grammar, wanted) in [
        (
            "root ::= \"a\"\nitem ::= other\n",
            "line 2, column 10: no rule is called 'other'",
        ),
        ("item ::= \"a\"", "there is no rule 'root'"),
        ("root ::= \"a", "line 1, column 10: this '\"' is not closed"),
        ("root ::= [a", "line 1, column 10: this '[' is not closed"),
        (
            "root ::= [b-a]",
            "line 1, column 11: the range ends before it begins",
        ),
        (
            "root ::= (\"a\"\n | \"b\"",
            "line 1, column 10: this '(' is not closed",
        ),
        (
            "root ::= * \"a\"",
            "line 1, column 10: nothing is before '*'",
        ),
        (
            "root ::= \"a\"{3,2}",
            "line 1, column 13: the most repetitions",
        ),
        ("root ::= \"a\"{x}", "line 1, column 13: repetitions are"),
        (
            "root ::= \"a\"{2001}",
            "line 1, column 13: 2001 repetitions",
        ),
        ("root ::= \"\\q\"", "line 1, column 11: '\\q' is no escape"),
        (
            "root ::= \"a\" )",
            "line 1, column 14: ')' is not expected here",
        ),
        (
            "root ::= \"a\"\nroot = \"b\"",
            "line 2, column 6: '::=' is missing",
        ),
        (
            "root ::= \"é\" $",
            "line 1, column 14: '$' is not expected here",
        ),
    ] {
        let error = compiled(grammar).map(drop).unwrap_err().to_string();
        assert!(error.contains(wanted), "{grammar}\n{error}");
    }
}

#[test]
fn long_chains_are_refused_or_compiled_and_never_end_the_program() {
    let brackets = format!("root ::= {}\"a\"{}", "(".repeat(5000), ")".repeat(5000));
    assert!(compiled(&brackets).is_err());
    let brackets = format!("start: {}\"a\"{}", "(".repeat(5000), ")".repeat(5000));
    assert!(compiled(&brackets).is_err());
    let chain = |n: usize, link: fn(usize) -> String| -> String { (0..n).map(link).collect() };
    let gbnf = |n| {
        format!(
            "root ::= r0\n{}r{n} ::= \"a\"\n",
            chain(n, |at| format!("r{at} ::= r{}\n", at + 1))
        )
    };
    assert!(compiled(&gbnf(1000)).is_ok());
    assert!(compiled(&gbnf(5000)).is_err());
    let lark = |n| {
        format!(
            "start: R0\n{}R{n}: \"a\"\n",
            chain(n, |at| format!("R{at}: R{}\n", at + 1))
        )
    };
    assert!(compiled(&lark(1000)).is_ok());
    assert!(compiled(&lark(5000)).is_err());
}

#[test]
fn regular_expressions_and_choices_are_of_the_whole_text() {
    let compiler = GrammarCompiler::new(&tokenizer()).unwrap();
    let regex = compiler.regex(r"\d{2}/[ab]+|x").unwrap();
    for (text, wanted) in [("12/ab", true), ("x", true), ("12/", false), ("1x", false)] {
        assert_eq!(allows(&regex, text), wanted, "{text}");
    }
    let error = compiler.regex("a(?!b)").map(drop).unwrap_err().to_string();
    assert!(error.contains("look-around"), "{error}");
    assert!(
        compiler
            .regex(&format!("{}a{}", "(".repeat(9000), ")".repeat(9000)))
            .is_err()
    );
    let texts = ["a", "a/b \"c\"", "né\\"].map(str::to_owned);
    let choice = compiler.choice(&texts).unwrap();
    for text in &texts {
        assert!(allows(&choice, text), "{text}");
    }
    assert!(!allows(&choice, "a/") && !allows(&choice, "b"));
    assert!(compiler.choice(&[]).is_err());
}
