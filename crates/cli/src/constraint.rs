//! `--schema` and `--grammar`: what a text is held to.
//!
//! Invariant: where a file is given, the text is held to it or the program fails; a program built
//! without the feature `grammar` refuses the flags. Knows nothing of how texts are generated, only
//! of how they end.

use std::path::PathBuf;

use cellar_engine::FinishReason;
use cellar_engine::sampler::Step;
use clap::Args;
use model_core::tokenizer::Tokenizer;

/// What a text is held to.
#[derive(Debug, Args)]
#[command(next_help_heading = "Constrained texts")]
pub(crate) struct ConstraintArgs {
    /// Generate JSON that this JSON schema allows: a file, or the schema itself, which begins with
    /// {; objects have no other properties than it names, unless "additionalProperties" is true
    #[arg(long, value_name = "FILE", aliases = ["json-schema", "json-schema-file"])]
    pub(crate) schema: Option<PathBuf>,
    /// Generate a text of this grammar, in llama.cpp's GBNF or llguidance's Lark syntax
    #[arg(long, value_name = "FILE", conflicts_with = "schema")]
    pub(crate) grammar: Option<PathBuf>,
}

/// Checks that nothing ended a constrained text before its schema or grammar did. One that was
/// cancelled is as long as its reader wanted.
///
/// # Errors
/// What ended it.
pub(crate) fn check_complete(finish: Option<&FinishReason>) -> anyhow::Result<()> {
    match finish {
        Some(FinishReason::Length) => anyhow::bail!(
            "the text is incomplete: --predict ended it before the schema or grammar did"
        ),
        Some(FinishReason::StopString { text }) => {
            anyhow::bail!("the text is incomplete: the stop string {text:?} ended it")
        }
        Some(FinishReason::ContextFull) => {
            anyhow::bail!("the text is incomplete: the context is full; choose a larger --ctx")
        }
        _ => Ok(()),
    }
}

#[cfg(not(feature = "grammar"))]
pub(crate) use absent::{Constraint, Failure, Schemas};
#[cfg(feature = "grammar")]
pub(crate) use present::{Constraint, Failure, Schemas};

#[cfg(feature = "grammar")]
mod present {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::rc::Rc;

    use anyhow::Context;
    use cellar_grammar::{Grammar, GrammarCompiler, GrammarFailure, close_objects};
    use serde_json::Value;

    use super::{ConstraintArgs, Step, Tokenizer};
    use crate::input;

    /// The schema that stands in the place of a file's name.
    fn inline(path: &Path) -> Option<&str> {
        path.to_str()
            .filter(|text| text.trim_start().starts_with('{'))
    }

    /// The schema, whose objects have the properties that they list and no others. A text that is
    /// not JSON stays as it is.
    fn closed(text: String) -> String {
        match serde_json::from_str::<Value>(&text) {
            Ok(mut schema) => {
                close_objects(&mut schema);
                schema.to_string()
            }
            // The compiler says where it is wrong.
            Err(_) => text,
        }
    }

    /// A compiled schema or grammar.
    #[derive(Debug)]
    pub(crate) struct Constraint(Grammar);

    /// Why no token was left.
    #[derive(Debug)]
    pub(crate) struct Failure(GrammarFailure);

    impl Constraint {
        /// What the flags ask for.
        ///
        /// # Errors
        /// Where the file cannot be read or compiled.
        pub(crate) fn new(
            args: &ConstraintArgs,
            tokenizer: &Tokenizer,
        ) -> anyhow::Result<Option<Self>> {
            let cannot = |path: &Path| match inline(path) {
                Some(_) => "cannot use the schema of the command line".to_owned(),
                None => format!("cannot use '{}'", path.display()),
            };
            let grammar = match (&args.schema, &args.grammar) {
                (Some(path), _) => {
                    let text = match inline(path) {
                        Some(text) => text.to_owned(),
                        None => input::text(path)?,
                    };
                    let compiled = GrammarCompiler::new(tokenizer)
                        .and_then(|compiler| compiler.json_schema(&closed(text)));
                    compiled.with_context(|| cannot(path))?
                }
                (None, Some(path)) => {
                    let text = input::text(path)?;
                    let compiled = GrammarCompiler::new(tokenizer)
                        .and_then(|compiler| compiler.grammar(&text));
                    compiled.with_context(|| cannot(path))?
                }
                (None, None) => return Ok(None),
            };
            Ok(Some(Self(grammar)))
        }

        /// The step that holds one text to it, and what tells why it failed.
        pub(crate) fn step(&self) -> (Box<dyn Step>, Failure) {
            let step = self.0.step();
            let failure = Failure(step.failure());
            (Box::new(step), failure)
        }
    }

    /// The schemas of many texts, each compiled once.
    pub(crate) struct Schemas<'t> {
        tokenizer: &'t Tokenizer,
        /// Made for the first schema.
        compiler: Option<GrammarCompiler>,
        compiled: BTreeMap<String, Rc<Constraint>>,
    }

    impl<'t> Schemas<'t> {
        pub(crate) fn new(tokenizer: &'t Tokenizer) -> Self {
            Self {
                tokenizer,
                compiler: None,
                compiled: BTreeMap::new(),
            }
        }

        /// The constraint of texts to this schema.
        ///
        /// # Errors
        /// It cannot be compiled.
        pub(crate) fn constraint(&mut self, schema: &Value) -> anyhow::Result<Rc<Constraint>> {
            let text = closed(schema.to_string());
            if let Some(constraint) = self.compiled.get(&text) {
                return Ok(Rc::clone(constraint));
            }
            let compiler = match self.compiler.take() {
                Some(compiler) => compiler,
                None => GrammarCompiler::new(self.tokenizer)?,
            };
            let grammar = self.compiler.insert(compiler).json_schema(&text)?;
            let constraint = Rc::new(Constraint(grammar));
            self.compiled.insert(text, Rc::clone(&constraint));
            Ok(constraint)
        }
    }

    impl Failure {
        /// The reason; `None` where there was no failure.
        pub(crate) fn reason(&self) -> Option<String> {
            let reason = self.0.reason()?;
            Some(format!("the schema or grammar cannot go on: {reason}"))
        }
    }

    #[cfg(test)]
    mod tests {
        use serde_json::json;

        use super::*;

        #[test]
        fn objects_that_say_nothing_are_closed() {
            let closed = |schema: Value| -> Value {
                serde_json::from_str(&super::closed(schema.to_string())).unwrap()
            };
            let inner = json!({"properties": {"b": {"type": "string"}}});
            let shut =
                json!({"properties": {"b": {"type": "string"}}, "additionalProperties": false});
            assert_eq!(closed(inner.clone()), shut);
            let around = |part: &Value| {
                json!({
                    "properties": {"a": {"items": part}, "properties": {"const": {"properties": {}}}},
                    "$defs": {"d": {"anyOf": [part, {"type": "null"}]}},
                    "additionalProperties": true
                })
            };
            assert_eq!(closed(around(&inner)), around(&shut));
            for open in [
                json!({"properties": {}, "patternProperties": {"x": {}}}),
                json!({"type": "object"}),
                json!({"allOf": [{"$ref": "#/$defs/d"}, inner], "$defs": {"d": inner}}),
                json!({"enum": [{"properties": {}}]}),
            ] {
                assert_eq!(closed(open.clone()), open);
            }
            assert_eq!(
                super::closed("{".to_owned()),
                "{",
                "the compiler refuses it"
            );
        }
    }
}

/// A program without grammars.
#[cfg(not(feature = "grammar"))]
mod absent {
    use std::convert::Infallible;
    use std::marker::PhantomData;
    use std::rc::Rc;

    use serde_json::Value;

    use super::{ConstraintArgs, Step, Tokenizer};
    use crate::failure::usage;

    /// There is none.
    #[derive(Debug)]
    pub(crate) struct Constraint(Infallible);

    /// There is none.
    #[derive(Debug)]
    pub(crate) struct Failure;

    impl Constraint {
        /// Nothing.
        ///
        /// # Errors
        /// A usage error where the flags ask for something.
        pub(crate) fn new(args: &ConstraintArgs, _: &Tokenizer) -> anyhow::Result<Option<Self>> {
            match (&args.schema, &args.grammar) {
                (None, None) => Ok(None),
                _ => {
                    usage("--schema and --grammar need a program built with the feature 'grammar'")
                }
            }
        }

        /// Nothing.
        pub(crate) fn step(&self) -> (Box<dyn Step>, Failure) {
            match self.0 {}
        }
    }

    /// There are none.
    pub(crate) struct Schemas<'t>(PhantomData<&'t Tokenizer>);

    impl<'t> Schemas<'t> {
        pub(crate) fn new(_: &'t Tokenizer) -> Self {
            Self(PhantomData)
        }

        /// Nothing.
        ///
        /// # Errors
        /// A usage error.
        pub(crate) fn constraint(&mut self, _: &Value) -> anyhow::Result<Rc<Constraint>> {
            usage("\"schema\" needs a program built with the feature 'grammar'")
        }
    }

    impl Failure {
        /// Nothing.
        pub(crate) fn reason(&self) -> Option<String> {
            None
        }
    }
}
