//! [`GrammarCompiler`]: from the text of a schema or grammar to a [`Grammar`] over the tokens of
//! one tokenizer.
//!
//! Invariant: a grammar that was compiled uses nothing that it ignores, and at least one text can
//! begin as it wants. Knows nothing of sampling, and skips nothing unless it is asked to.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kv_core::TokenId;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory, regex_to_lark};
use model_core::tokenizer::{SpecialPieces, TokenKind, Tokenizer};
use serde_json::{Value, json};

use crate::close::close_objects;
use crate::error::GrammarError;
use crate::gbnf::{self, MAX_NESTING, MAX_RULES};
use crate::holdable::{HoldableSchema, Unholdable, holdable};
use crate::locate::locate;
use crate::step::GrammarStep;

/// Compiles grammars for one tokenizer. Making one takes time in proportion to the vocabulary, so
/// keep it where several texts are constrained.
pub struct GrammarCompiler {
    factory: ParserFactory,
    /// Tokens of the vocabulary.
    n_tokens: usize,
    /// Control tokens that do not end a text.
    controls: BTreeSet<TokenId>,
}

/// A compiled grammar.
pub struct Grammar {
    matcher: Matcher,
    n_tokens: usize,
    /// Tokens that pass by the grammar wherever a text may end.
    passing: Arc<BTreeSet<TokenId>>,
}

impl GrammarCompiler {
    /// A compiler for the tokens of this tokenizer.
    ///
    /// # Errors
    /// [`GrammarError::NoEndToken`] and [`GrammarError::Tokenizer`].
    pub fn new(tokenizer: &Tokenizer) -> Result<Self, GrammarError> {
        let cannot = |reason: String| GrammarError::Tokenizer { reason };
        let ends: Vec<u32> = tokenizer.end_of_generation().map(|id| id.0).collect();
        let Some(&end) = ends.first() else {
            return Err(GrammarError::NoEndToken);
        };
        let n_tokens = tokenizer.n_tokens();
        let vocab_size = u32::try_from(n_tokens).map_err(|error| cannot(error.to_string()))?;
        let ids = (0..vocab_size).map(TokenId);
        let words: Vec<Vec<u8>> = ids.map(|id| word(tokenizer, id)).collect();
        let info = TokRxInfo::new(vocab_size, end);
        let factory = guarded(|| {
            let trie = TokTrie::from(&info, &words).with_eos_tokens(&ends);
            let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory =
                ParserFactory::new_simple(&environment).map_err(|error| error.to_string())?;
            factory.quiet();
            factory.limits_mut().verbose_errors = false;
            Ok(factory)
        });
        Ok(Self {
            factory: factory.map_err(cannot)?,
            n_tokens,
            controls: (0..vocab_size)
                .map(TokenId)
                .filter(|id| tokenizer.token_kind(*id) == Some(TokenKind::Control))
                .filter(|id| !ends.contains(&id.0))
                .collect(),
        })
    }

    /// Compiles a JSON schema, given as JSON.
    ///
    /// # Errors
    /// [`GrammarError::NotJson`], or [`GrammarError::Schema`] with a pointer to the part that is
    /// wrong or not supported.
    pub fn json_schema(&self, schema: &str) -> Result<Grammar, GrammarError> {
        let schema: Value =
            serde_json::from_str(schema).map_err(|error| GrammarError::NotJson {
                line: error.line(),
                column: error.column(),
                reason: error.to_string(),
            })?;
        let compile = |schema: &Value| {
            self.compile(TopLevelGrammar::from_json_schema(with_short_spaces(schema)))
        };
        let schema = holdable(&schema, Unholdable::Kept, |_| Ok(())).schema;
        compile(&schema).map_err(|reason| {
            let check = |part: &Value| compile(part).map(drop);
            let (pointer, reason) = locate(&schema, reason, check);
            GrammarError::Schema { pointer, reason }
        })
    }

    /// The schema without keywords that cannot be held, for [`json_schema`](Self::json_schema), and
    /// the list of those. Objects have the properties that they list, and no others
    /// ([`close_objects`]).
    pub fn holdable(&self, schema: &Value) -> HoldableSchema {
        let mut schema = schema.clone();
        close_objects(&mut schema);
        holdable(&schema, Unholdable::Skipped, |part| {
            let grammar = TopLevelGrammar::from_json_schema(part.clone());
            guarded(|| {
                let parser = self.factory.create_parser(grammar);
                let error = parser.err().map(|error| short_reason(&error.to_string()));
                error.map_or(Ok(()), Err)
            })
        })
    }

    /// Compiles a grammar in GBNF, which has rules with `::=` of which the first one to apply is
    /// `root`, or in the Lark syntax of `llguidance`, whose first rule is called `start`.
    ///
    /// # Errors
    /// [`GrammarError::Grammar`], in GBNF with line and column.
    pub fn grammar(&self, grammar: &str) -> Result<Grammar, GrammarError> {
        let wrong = |reason| GrammarError::Grammar { reason };
        if gbnf::is_gbnf(grammar) {
            let lark = gbnf::to_lark(grammar).map_err(wrong)?;
            return self.deep(TopLevelGrammar::from_lark(lark)).map_err(wrong);
        }
        check_nesting(grammar).map_err(wrong)?;
        self.deep(TopLevelGrammar::from_lark(grammar.to_owned()))
            .map_err(wrong)
    }

    /// Compiles a regular expression of the whole text, in the syntax of Rust's `regex`.
    ///
    /// # Errors
    /// [`GrammarError::Grammar`].
    pub fn regex(&self, pattern: &str) -> Result<Grammar, GrammarError> {
        let compiled = self.deep(TopLevelGrammar::from_regex(pattern));
        compiled.map_err(|reason| GrammarError::Grammar { reason })
    }

    /// Compiles a choice between these texts.
    ///
    /// # Errors
    /// [`GrammarError::Grammar`] where there is none.
    pub fn choice(&self, texts: &[String]) -> Result<Grammar, GrammarError> {
        if texts.is_empty() {
            let reason = "there is no text to choose".to_owned();
            return Err(GrammarError::Grammar { reason });
        }
        let lark = format!("start: {}\n", choice_rule(texts));
        let compiled = self.compile(TopLevelGrammar::from_lark(lark));
        compiled.map_err(|reason| GrammarError::Grammar { reason })
    }

    /// Compiles a grammar in the Lark syntax of `llguidance`, whose first rule is called `start`.
    ///
    /// # Errors
    /// [`GrammarError::Grammar`].
    pub fn lark(&self, grammar: &str) -> Result<Grammar, GrammarError> {
        let compiled = self.compile(TopLevelGrammar::from_lark(grammar.to_owned()));
        compiled.map_err(|reason| GrammarError::Grammar { reason })
    }

    /// As [`lark`](Self::lark), for a grammar of free text with parts that it holds to a form.
    /// Wherever the text may end, control tokens pass by it, but for those that it names.
    ///
    /// # Errors
    /// [`GrammarError::Grammar`].
    pub fn lark_in_text(&self, grammar: &str, named: &[TokenId]) -> Result<Grammar, GrammarError> {
        let others = self.controls.iter().filter(|id| !named.contains(id));
        let compiled = self.deep(TopLevelGrammar::from_lark(grammar.to_owned()));
        Ok(Grammar {
            passing: Arc::new(others.copied().collect()),
            ..compiled.map_err(|reason| GrammarError::Grammar { reason })?
        })
    }

    /// Compiles what others wrote, whose rules may refer to each other in a long chain, on a
    /// stack that has room for it.
    fn deep(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().stack_size(DEEP_STACK);
            let compile = || self.compile(grammar);
            let thread = thread.spawn_scoped(scope, compile);
            let joined = thread.map_err(|error| format!("no thread compiles it: {error}"))?;
            let panicked = |_| Err("the compiler panicked".to_owned());
            joined.join().unwrap_or_else(panicked)
        })
    }

    fn compile(&self, grammar: TopLevelGrammar) -> Result<Grammar, String> {
        guarded(|| {
            let parser = self.factory.create_parser(grammar);
            let matcher = Matcher::new(parser);
            if let Some(error) = matcher.get_error() {
                return Err(short_reason(&error));
            }
            // One that only refers to itself compiles, and no text has its form.
            let first = matcher.deep_clone().compute_mask_or_eos();
            let is_possible = first.is_ok_and(|tokens| !tokens.is_zero());
            let impossible = || "no text has this form".to_owned();
            is_possible
                .then_some(Grammar {
                    matcher,
                    n_tokens: self.n_tokens,
                    passing: Arc::default(),
                })
                .ok_or_else(impossible)
        })
    }
}

impl Grammar {
    /// A sampler step that holds one text to the grammar, for
    /// [`TextRequest::steps`](cellar_engine::session::TextRequest::steps).
    pub fn step(&self) -> GrammarStep {
        GrammarStep::new(
            self.matcher.deep_clone(),
            self.n_tokens,
            Arc::clone(&self.passing),
        )
    }
}

impl std::fmt::Debug for GrammarCompiler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GrammarCompiler")
            .field("n_tokens", &self.n_tokens)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Grammar {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammar")
            .field("n_tokens", &self.n_tokens)
            .finish_non_exhaustive()
    }
}

/// The bytes of a token for the grammar. Those of control tokens begin with a byte that no text
/// has, so that only a grammar that names them allows them; tokens without text have none.
fn word(tokenizer: &Tokenizer, id: TokenId) -> Vec<u8> {
    match tokenizer.token_kind(id) {
        Some(TokenKind::Control) => {
            let text = tokenizer.token_text(id).unwrap_or_default();
            [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat()
        }
        Some(TokenKind::Normal | TokenKind::UserDefined | TokenKind::Byte) => {
            tokenizer.piece(id, SpecialPieces::Skip).unwrap_or_default()
        }
        _ => Vec::new(),
    }
}

/// White space between the parts of JSON: small models would write it for ever.
const SPACES: &str = r" |\n[ \t]{0,20}";

/// The schema with limited white space, unless it has options of `llguidance` itself.
fn with_short_spaces(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(members) = &mut schema {
        let options = json!({ "whitespace_pattern": SPACES });
        members.entry("x-guidance").or_insert(options);
    }
    schema
}

/// The JSON of a schema, as a rule of a grammar for [`GrammarCompiler::lark`].
pub fn json_rule(schema: &Value) -> String {
    format!("%json {}", with_short_spaces(schema))
}

/// A choice between these texts, as a rule of a grammar for [`GrammarCompiler::lark`].
pub fn choice_rule(texts: &[String]) -> String {
    let texts: Vec<String> = texts.iter().map(|text| gbnf::quoted(text)).collect();
    texts.join(" | ")
}

/// A regular expression, as a rule of a grammar for [`GrammarCompiler::lark`].
pub fn regex_rule(pattern: &str) -> String {
    format!("/{}/", regex_to_lark(pattern, ""))
}

/// A grammar as [`GrammarCompiler::grammar`] takes it, as a rule of another for
/// [`GrammarCompiler::lark`].
///
/// # Errors
/// [`GrammarError::Grammar`].
pub fn grammar_rule(grammar: &str) -> Result<String, GrammarError> {
    let lark = if gbnf::is_gbnf(grammar) {
        gbnf::to_lark(grammar)
    } else {
        check_nesting(grammar).map(|()| grammar.to_owned())
    };
    let lark = lark.map_err(|reason| GrammarError::Grammar { reason })?;
    Ok(format!("%lark {{\n{lark}\n}}"))
}

/// Runs code of `llguidance`, which may panic where a grammar surprises it.
fn guarded<T>(run: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| Err("the compiler panicked".to_owned()))
}

/// The stack on which the grammars of others are compiled, in bytes.
const DEEP_STACK: usize = 64 << 20;

/// Checks that no chain of rules or brackets is longer than the compiler's stack.
fn check_nesting(grammar: &str) -> Result<(), String> {
    let n_rules = grammar.lines().filter(|line| line.contains(':')).count();
    if n_rules > MAX_RULES {
        return Err(format!(
            "it has {n_rules} rules: {MAX_RULES} are taken at most"
        ));
    }
    let (mut depth, mut deepest) = (0usize, 0);
    // What a literal or a regular expression ends with, where one is open.
    let mut quote = None;
    let mut chars = grammar.chars();
    while let Some(c) = chars.next() {
        match (c, quote) {
            ('\n', _) => quote = None,
            ('\\', Some(_)) => drop(chars.next()),
            (c, Some(end)) if c == end => quote = None,
            (_, Some(_)) => {}
            ('"' | '/', None) => quote = Some(c),
            ('(' | '[' | '{', None) => depth += 1,
            (')' | ']' | '}', None) => depth = depth.saturating_sub(1),
            _ => {}
        }
        deepest = deepest.max(depth);
    }
    if deepest > MAX_NESTING {
        return Err(format!(
            "it has {deepest} brackets in each other: {MAX_NESTING} are taken at most"
        ));
    }
    Ok(())
}

/// The message without the grammar that `llguidance` appends to it, and without its own options.
/// Errors in regular expressions have the reason in their last line.
fn short_reason(message: &str) -> String {
    let line = message.lines().next().unwrap_or_default();
    if let Some((before, _)) = line.split_once("Enable 'coerce_one_of'") {
        return format!(
            "{before}write anyOf, which also allows what several of the alternatives match"
        );
    }
    let reason = message
        .lines()
        .find_map(|line| line.strip_prefix("error: "));
    match reason.filter(|_| line.ends_with("regex parse error:")) {
        Some(reason) => format!("{line} {reason}"),
        None => line.to_owned(),
    }
}
