//! Grammars: candidates that a GBNF grammar does not allow get the logit minus infinity.
//!
//! A lazy grammar holds from the place on where a pattern or a token begins it. Invariant: after a
//! failure of the grammar no candidate is left, as with llama.cpp's. Compiles nothing itself.

use std::ffi::{CStr, c_char};
use std::sync::Arc;

use cellar_engine::sampler::{Step, TokenOrigin};
use cellar_grammar::{Grammar, GrammarStep};
use fancy_regex::Regex;
use kv_core::TokenId;
use model_core::tokenizer::{AddSpecial, EncodeOptions, SpecialPieces, SpecialText, Tokenizer};

use crate::ffi::{CText, Handle, In, c_api};
use crate::log;
use crate::model::{SharedModel, Vocab};
use crate::sampler::array::Array;
use crate::sampler::step::Row;
use crate::sampler::{Sampler, Sampling, new_sampler};
use crate::vocab::{piece, shared};

/// A text held to a grammar.
struct Held {
    grammar: Arc<Grammar>,
    tokenizer: Arc<Tokenizer>,
    triggers: Arc<Triggers>,
    step: GrammarStep,
    /// The tokens that the step was given.
    given: Vec<TokenId>,
    /// The text so far, while nothing has begun the grammar.
    waiting: Option<String>,
    row: Row,
}

/// What begins a lazy grammar; nothing where it holds from the start.
#[derive(Default)]
struct Triggers {
    patterns: Vec<Regex>,
    tokens: Vec<i32>,
}

impl Triggers {
    fn is_lazy(&self) -> bool {
        !self.patterns.is_empty() || !self.tokens.is_empty()
    }

    /// Where the grammar's text begins in a text that a pattern matches whole: at its first group
    /// that took part.
    fn begin(&self, text: &str) -> Option<usize> {
        self.patterns.iter().find_map(|pattern| {
            let captures = pattern.captures(text).ok()??;
            let groups = (1..captures.len()).filter_map(|group| captures.get(group));
            let mut groups = groups.filter(|group| !group.as_str().is_empty());
            Some(groups.next().map_or(0, |group| group.start()))
        })
    }
}

impl Held {
    fn new(grammar: Arc<Grammar>, tokenizer: Arc<Tokenizer>, triggers: Arc<Triggers>) -> Self {
        Self {
            step: grammar.step(),
            waiting: triggers.is_lazy().then(String::new),
            grammar,
            tokenizer,
            triggers,
            given: Vec::new(),
            row: Row::default(),
        }
    }

    fn give(&mut self, id: TokenId) {
        self.step.accept(id, TokenOrigin::Generated);
        self.given.push(id);
    }
}

impl Sampling for Held {
    fn name(&self) -> &'static CStr {
        c"grammar"
    }

    fn apply(&mut self, array: &mut Array<'_>) {
        if self.waiting.is_none() && !array.is_empty() {
            self.row.apply(&mut self.step, array);
        }
    }

    fn accept(&mut self, token: i32) {
        let Ok(id) = u32::try_from(token).map(TokenId) else {
            return;
        };
        let Some(text) = &mut self.waiting else {
            return self.give(id);
        };
        if self.triggers.tokens.contains(&token) {
            self.waiting = None;
            return self.give(id);
        }
        let bytes = piece(&self.tokenizer, token, SpecialPieces::Render);
        text.push_str(&String::from_utf8_lossy(&bytes));
        if let Some(at) = self.triggers.begin(text) {
            let begun = text[at..].to_owned();
            self.waiting = None;
            let options = EncodeOptions {
                add: AddSpecial::Continuation,
                special: SpecialText::Parse,
            };
            let ids = self.tokenizer.encode(&begun, options);
            ids.into_iter().for_each(|id| self.give(id));
        }
    }

    fn reset(&mut self) {
        self.step.reset();
        self.given.clear();
        self.waiting = self.triggers.is_lazy().then(String::new);
    }

    fn copied(&self) -> Box<dyn Sampling> {
        let mut copy = Self::new(
            Arc::clone(&self.grammar),
            Arc::clone(&self.tokenizer),
            Arc::clone(&self.triggers),
        );
        self.given.iter().for_each(|&id| copy.give(id));
        copy.waiting = self.waiting.clone();
        Box::new(copy)
    }
}

/// No grammar.
#[derive(Clone)]
struct Free;

impl Sampling for Free {
    fn name(&self) -> &'static CStr {
        c"grammar"
    }

    fn apply(&mut self, _array: &mut Array<'_>) {}

    fn copied(&self) -> Box<dyn Sampling> {
        Box::new(self.clone())
    }
}

/// A grammar whose first rule is `root`.
fn rooted(grammar: &str, root: &str) -> Result<String, String> {
    let has = |name: &str| {
        let mut lines = grammar.lines();
        lines.any(|line| {
            line.trim_start()
                .strip_prefix(name)
                .is_some_and(|rest| rest.trim_start().starts_with("::="))
        })
    };
    match root {
        "root" => Ok(grammar.to_owned()),
        root if has("root") => Err(format!(
            "the grammar has a rule 'root' besides '{root}': rename it"
        )),
        root => Ok(format!("root ::= {root}\n{grammar}")),
    }
}

fn compiled(model: &SharedModel, grammar: &str, root: &str) -> Result<Grammar, String> {
    let text = rooted(grammar, root)?;
    let compiled = model.compiler()?.grammar(&text);
    compiled.map_err(|error| error.to_string())
}

fn held(
    name: &str,
    vocab: Handle<Vocab>,
    [grammar, root]: [CText; 2],
    triggers: Result<Triggers, String>,
) -> Handle<Sampler> {
    let Some(model) = shared(name, vocab) else {
        return Handle::NULL;
    };
    let grammar = grammar.get().unwrap_or_default();
    if grammar.is_empty() {
        return new_sampler(Free);
    }
    let root = root.get().unwrap_or("root");
    let made = triggers.and_then(|triggers| {
        let tokenizer = model
            .tokenizer
            .clone()
            .ok_or("the model's tokens are no text")?;
        let grammar = compiled(model, grammar, root)?;
        Ok(Held::new(Arc::new(grammar), tokenizer, Arc::new(triggers)))
    });
    log::or_line(name, made).map_or(Handle::NULL, new_sampler)
}

fn texts<'a>(list: In<*const c_char>, n: usize) -> Vec<&'a str> {
    let all = list.slice(n).iter();
    all.filter_map(|&text| CText::of(text).get()).collect()
}

/// The triggers of patterns that match a text whole.
fn triggers(patterns: &[String], tokens: &[i32]) -> Result<Triggers, String> {
    let compile = |pattern: &String| {
        let whole = format!(r"\A(?:{pattern})\z");
        Regex::new(&whole).map_err(|error| format!("the pattern '{pattern}': {error}"))
    };
    Ok(Triggers {
        patterns: patterns.iter().map(compile).collect::<Result<_, _>>()?,
        tokens: tokens.to_vec(),
    })
}

c_api! {
    fn llama_sampler_init_grammar(vocab: Handle<Vocab>, grammar: CText, root: CText)
        -> Handle<Sampler> = Handle::NULL; {
        held("llama_sampler_init_grammar", vocab, [grammar, root], Ok(Triggers::default()))
    }

    fn llama_sampler_init_grammar_lazy(
        vocab: Handle<Vocab>,
        grammar: CText,
        root: CText,
        words: In<*const c_char>,
        n_words: usize,
        tokens: In<i32>,
        n_tokens: usize,
    ) -> Handle<Sampler> = Handle::NULL; {
        let words = texts(words, n_words);
        let words: Vec<_> = words.iter().map(|word| fancy_regex::escape(word)).collect();
        let pattern = format!(r"[\s\S]*?({})[\s\S]*", words.join("|"));
        let patterns = if words.is_empty() { Vec::new() } else { vec![pattern] };
        let triggers = triggers(&patterns, tokens.slice(n_tokens));
        held("llama_sampler_init_grammar_lazy", vocab, [grammar, root], triggers)
    }

    fn llama_sampler_init_grammar_lazy_patterns(
        vocab: Handle<Vocab>,
        grammar: CText,
        root: CText,
        patterns: In<*const c_char>,
        n_patterns: usize,
        tokens: In<i32>,
        n_tokens: usize,
    ) -> Handle<Sampler> = Handle::NULL; {
        let patterns: Vec<String> = texts(patterns, n_patterns)
            .into_iter()
            .map(str::to_owned)
            .collect();
        let triggers = triggers(&patterns, tokens.slice(n_tokens));
        held("llama_sampler_init_grammar_lazy_patterns", vocab, [grammar, root], triggers)
    }
}
