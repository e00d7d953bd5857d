//! Templates that are nearly right: tokens of templates that use all features are removed,
//! repeated, exchanged and replaced at random. Each ends with a text or an error, in bounded memory
//! and time.
//!
//! `CELLAR_FUZZ_SECONDS=600` runs for as long, and `CELLAR_FUZZ_SEED` chooses what.

use std::time::{Duration, Instant};

use kv_contract::Random;
use model_core::chat_template::{ChatTemplate, GenerationPrompt, TemplateTokens};
use serde_json::{Map, Value, json};

/// The number of templates that are tried where no time is given.
const N_MUTANTS: usize = 300;

/// Tokens that make much of little.
const LARGE: [&str; 12] = [
    "1000000000",
    "-9223372036854775808",
    "1e308",
    "99999",
    "* 99999",
    "|tojson(indent=999)",
    ".center(99999999)",
    "|join('x' * 9999)",
    "% 99999999",
    "'%99999999s'",
    "{% for i in range(99999) %}",
    "varargs",
];

/// One of these, at random.
fn any_of<'t, T: ?Sized>(random: &mut Random, all: &[&'t T]) -> &'t T {
    all[random.below(all.len())]
}

/// Words, numbers, white space, and single signs: `{%` and the like are one.
fn tokens(template: &str) -> Vec<&str> {
    let mut all = Vec::new();
    let mut rest = template;
    while let Some(first) = rest.chars().next() {
        let is_word = |c: char| c.is_alphanumeric() || c == '_';
        let n = match rest.get(..2) {
            Some("{%" | "%}" | "{{" | "}}" | "{#" | "#}") => 2,
            _ if is_word(first) => rest.find(|c| !is_word(c)).unwrap_or(rest.len()),
            _ if first == ' ' => rest.find(|c| c != ' ').unwrap_or(rest.len()),
            _ => first.len_utf8(),
        };
        let (token, after) = rest.split_at(n);
        all.push(token);
        rest = after;
    }
    all
}

fn mutant(of: &[&str], pool: &[&str], random: &mut Random) -> String {
    let mut tokens = of.to_vec();
    for _ in 0..=random.below(4) {
        let at = random.below(tokens.len());
        let end = (at + 1 + random.below(6)).min(tokens.len());
        let part = tokens.get(at..end).unwrap_or_default().to_vec();
        match random.below(7) {
            0 => drop(tokens.drain(at..end)),
            1 => drop(tokens.splice(at..at, part)),
            2 => drop(tokens.splice(at..end, [any_of(random, pool)])),
            3 => tokens.insert(at, any_of(random, pool)),
            4 => drop(tokens.splice(at..at, part.repeat(random.below(40)))),
            5 => tokens.insert(at, any_of(random, &LARGE)),
            _ => {
                let other = random.below(tokens.len());
                if !tokens.is_empty() {
                    tokens.swap(at, other);
                }
            }
        }
    }
    tokens.concat()
}

#[derive(serde::Deserialize)]
struct Expressions {
    variables: Map<String, Value>,
    groups: Map<String, Value>,
}

#[test]
fn templates_that_are_nearly_right_end() {
    let number = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|given| given.parse::<u64>().unwrap())
    };
    let seed = number("CELLAR_FUZZ_SEED").unwrap_or(1);
    println!("seed {seed}");
    let until = number("CELLAR_FUZZ_SECONDS").map(|n| Instant::now() + Duration::from_secs(n));

    let table = include_str!("../../../tests/fixtures/chat_templates/expressions.json");
    let table: Expressions = serde_json::from_str(table).unwrap();
    let cases = table
        .groups
        .values()
        .flat_map(|group| group.as_array().unwrap());
    let mut sources: Vec<&str> = cases.map(|case| case[0].as_str().unwrap()).collect();
    let together = sources.join("\n");
    sources.extend([
        include_str!("../../../tests/fixtures/chat_templates/qwen2.5.jinja"),
        include_str!("../../../tests/fixtures/chat_templates/llama3.jinja"),
    ]);
    let pool = tokens(&together);
    let messages = [json!({"role": "user", "content": "Hi"})];

    let (mut random, mut n, mut n_rendered) = (Random::new(seed), 0, 0);
    while until.map_or(n < N_MUTANTS, |until| Instant::now() < until) {
        let source = any_of(&mut random, &sources);
        let source = mutant(&tokens(source), &pool, &mut random);
        let rendered = super::measured(&source, || {
            let prompt = GenerationPrompt::Add;
            let template = ChatTemplate::new(&source)?;
            template.render_json(
                &messages,
                &table.variables,
                prompt,
                TemplateTokens::default(),
            )
        });
        n += 1;
        match rendered {
            Ok(_) => n_rendered += 1,
            Err(error) => assert!(!error.to_string().contains("panicked"), "{source}: {error}"),
        }
    }
    println!("{n} templates, {n_rendered} of them rendered");
    assert!(0 < n_rendered && n_rendered < n);
}
