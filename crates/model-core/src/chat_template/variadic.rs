//! Macros that read `varargs` or `kwargs`: what they are called with beyond their parameters.
//!
//! Invariant: [`Macros`] gives such a macro two more parameters, and hands it to [`variadic`],
//! which fills them; other macros stay as they are. Knows no expressions.

use std::ops::Range;
use std::sync::Arc;

use minijinja::machinery::Token;
use minijinja::value::{Kwargs, Object, ObjectRepr, Rest, Tuple, from_args};
use minijinja::{Error, State, Value};

/// The function that makes such a macro.
pub(super) const VARIADIC: &str = "__variadic";

/// The macros of a template, while its tokens are read.
#[derive(Default)]
pub(super) struct Macros {
    open: Vec<Macro>,
    /// Tokens of the tag that was read last, and brackets that are open in it.
    n_tokens: usize,
    depth: usize,
    is_definition: bool,
    /// The macro that the tag ends.
    ended: Option<Macro>,
    is_attribute: bool,
}

struct Macro {
    name: String,
    has_parameters: bool,
    /// The end of its parameters.
    end: usize,
    is_variadic: bool,
}

impl Macros {
    /// Reads a token at its place in the source: texts for places in that.
    pub(super) fn take(
        &mut self,
        token: &Token<'_>,
        place: Range<usize>,
        source: &str,
    ) -> Vec<(usize, String)> {
        let Range { start, end } = place;
        match token {
            Token::BlockStart | Token::VariableStart => {
                self.n_tokens = 0;
                self.depth = 0;
                self.is_definition = false;
                return Vec::new();
            }
            Token::BlockEnd => {
                return self.end_tag(source.get(start..end).unwrap_or_default(), end);
            }
            _ => self.n_tokens += 1,
        }
        match (token, self.n_tokens) {
            (Token::Ident("macro"), 1) => self.is_definition = true,
            (Token::Ident("endmacro"), 1) => self.ended = self.open.pop(),
            (Token::Ident(name), 2) if self.is_definition => self.open.push(Macro {
                name: (*name).to_owned(),
                has_parameters: false,
                end: 0,
                is_variadic: false,
            }),
            (Token::ParenOpen | Token::BracketOpen | Token::BraceOpen, _) => self.depth += 1,
            (Token::ParenClose | Token::BracketClose | Token::BraceClose, _) => {
                self.depth = self.depth.saturating_sub(1);
                if self.is_definition
                    && self.depth == 0
                    && let Some(open) = self.open.last_mut()
                {
                    open.end = start;
                }
            }
            (Token::Ident("varargs" | "kwargs"), _)
                if !self.is_definition && !self.is_attribute =>
            {
                self.open
                    .iter_mut()
                    .for_each(|open| open.is_variadic = true);
            }
            _ if self.is_definition && self.depth > 0 => {
                self.open
                    .iter_mut()
                    .for_each(|open| open.has_parameters |= open.end == 0);
            }
            _ => {}
        }
        self.is_attribute = matches!(token, Token::Dot);
        Vec::new()
    }

    fn end_tag(&mut self, tag_end: &str, at: usize) -> Vec<(usize, String)> {
        let Some(ended) = self.ended.take().filter(|ended| ended.is_variadic) else {
            return Vec::new();
        };
        let comma = if ended.has_parameters { ", " } else { "" };
        let parameters = format!("{comma}varargs=(), kwargs={{}}");
        // What follows is trimmed as it was.
        let name = ended.name;
        let set = format!("{{% set {name} = {VARIADIC}({name}) {tag_end}");
        vec![(ended.end, parameters), (at, set)]
    }
}

/// A macro whose last two parameters are what it is called with beyond the others.
#[derive(Debug)]
struct Variadic {
    inner: Value,
    names: Vec<Value>,
}

/// Makes a macro one.
pub(super) fn variadic(inner: Value) -> Result<Value, Error> {
    let mut names: Vec<Value> = inner.get_attr("arguments")?.try_iter()?.collect();
    names.truncate(names.len().saturating_sub(2));
    Ok(Value::from_object(Variadic { inner, names }))
}

impl Object for Variadic {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_str() {
            Some("arguments") => Some(Value::from(Tuple::from(self.names.clone()))),
            _ => self.inner.get_item(key).ok(),
        }
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let (given, named): (Rest<Value>, Kwargs) = from_args(args)?;
        let (known, more) = given.split_at(given.len().min(self.names.len()));
        let mut all = vec![("varargs", Value::from(Tuple::from(more)))];
        let mut others = Vec::new();
        for name in named.args() {
            let value: Value = named.peek(name)?;
            let is_known = self.names.iter().any(|known| known.as_str() == Some(name));
            if is_known || name == "caller" {
                all.push((name, value));
            } else {
                others.push((name, value));
            }
        }
        all.push(("kwargs", Value::from_pairs(others)));
        let mut values = known.to_vec();
        values.push(Kwargs::from_iter(all).into());
        self.inner.call(state, &values)
    }
}
