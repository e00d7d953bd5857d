//! [`bounded`]: a template's source with calls where it makes values that may get large, and
//! refused where its expressions are too long to be parsed.
//!
//! Invariant: the text that is rendered is the same, but what `set` and `with` keep, what a
//! namespace holds, what a list, map or tuple is made of and what is added or multiplied went
//! through [`super::values`]. Reads tokens with the engine's own lexer, so that no template is read
//! otherwise here. Knows no values.

use std::cmp::Reverse;
use std::ops::Range;

use minijinja::machinery::{Span, Token, parse, tokenize};
use minijinja::syntax::SyntaxConfig;

use super::arithmetic::{Operand, Operation, operations};
use super::filters::TEXT;
use super::printf::REMAINDER;
use super::values::{KEPT, SETTLED};
use super::variadic::{Macros, VARIADIC};
use super::{ChatTemplateError, NAME};

/// Tokens of a tag or expression: the parser calls itself for each, on a stack of
/// [`super::STACK_BYTES`].
const MAX_TAG_TOKENS: usize = 4_096;

/// `elif`s of a template, each of which is nested in the one before.
const MAX_ELIFS: usize = 4_096;

/// The source with its calls.
///
/// # Errors
/// [`ChatTemplateError::Syntax`] where it is too long to be parsed.
pub(super) fn bounded(source: &str, syntax: &SyntaxConfig) -> Result<String, ChatTemplateError> {
    let mut tag = Tag::default();
    let mut n_elifs = 0;
    let mut insertions = Vec::new();
    let mut operators = Operators::default();
    let mut macros = Macros::default();
    // What the lexer refuses, the parser refuses, too: with the right message.
    for (token, span) in tokenize(source, false, syntax.clone()).map_while(Result::ok) {
        match &token {
            Token::VariableStart | Token::BlockStart => tag = Tag::default(),
            Token::VariableEnd | Token::BlockEnd => tag.end(&mut insertions),
            Token::TemplateData(_) => {}
            _ => tag.take(&token, span, &mut insertions),
        }
        let place = span.start_offset as usize..span.end_offset as usize;
        operators.take(&token, place.clone());
        for (at, text) in macros.take(&token, place, source) {
            insertions.push(Insertion::new(at, Order::Expression, text));
        }
        let line = usize::from(span.start_line);
        if let Token::Ident(name @ (SETTLED | KEPT | TEXT | REMAINDER | VARIADIC)) = token {
            let message = format!("the name '{name}' is taken");
            return Err(ChatTemplateError::Syntax { line, message });
        }
        n_elifs += usize::from(tag.n_tokens == 1 && matches!(token, Token::Ident("elif")));
        let message = match (tag.n_tokens > MAX_TAG_TOKENS, n_elifs > MAX_ELIFS) {
            (true, _) => format!("an expression or tag of more than {MAX_TAG_TOKENS} tokens"),
            (_, true) => format!("more than {MAX_ELIFS} times 'elif'"),
            _ => continue,
        };
        return Err(ChatTemplateError::Syntax { line, message });
    }
    if let Ok(template) = parse(source, NAME, syntax.clone()) {
        for operation in operations(&template) {
            replace(operation, &operators, &mut insertions);
        }
    }
    insertions.sort_by_key(|it| (it.at, it.order, Reverse(it.until)));
    let mut out = String::with_capacity(source.len() + 32 * insertions.len());
    let mut done = 0;
    for insertion in insertions {
        out.push_str(source.get(done..insertion.at).unwrap_or_default());
        out.push_str(&insertion.text);
        done = insertion.at + insertion.n_replaced;
    }
    out.push_str(source.get(done..).unwrap_or_default());
    Ok(out)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OperatorKind {
    Concatenation,
    Remainder,
}

/// `~` or `%`.
struct Operator {
    place: Range<usize>,
    kind: OperatorKind,
    /// Brackets around it.
    depth: usize,
}

/// The operators of a source and its brackets, in order.
#[derive(Default)]
struct Operators {
    all: Vec<Operator>,
    /// The places where the number of open brackets changes, with the new number.
    depths: Vec<(usize, usize)>,
}

impl Operators {
    fn take(&mut self, token: &Token<'_>, place: Range<usize>) {
        let depth = self.depths.last().map_or(0, |&(_, depth)| depth);
        match token {
            Token::BracketOpen | Token::BraceOpen | Token::ParenOpen => {
                self.depths.push((place.end, depth + 1));
            }
            Token::BracketClose | Token::BraceClose | Token::ParenClose => {
                self.depths.push((place.end, depth.saturating_sub(1)));
            }
            Token::VariableStart | Token::BlockStart if depth > 0 => {
                self.depths.push((place.end, 0));
            }
            Token::Tilde => self.all.push(Operator {
                place,
                kind: OperatorKind::Concatenation,
                depth,
            }),
            Token::Mod => self.all.push(Operator {
                place,
                kind: OperatorKind::Remainder,
                depth,
            }),
            _ => {}
        }
    }

    /// The operator of an expression: the last that is in no more brackets than its begin, as what
    /// is on its right binds more strongly.
    fn of(&self, expression: &Range<usize>, kind: OperatorKind) -> Option<Range<usize>> {
        let changes = self
            .depths
            .partition_point(|&(at, _)| at <= expression.start);
        let change = changes.checked_sub(1).and_then(|i| self.depths.get(i));
        let depth = change.map_or(0, |&(_, depth)| depth);
        let end = self
            .all
            .partition_point(|it| it.place.start < expression.end);
        let before = self.all.get(..end).unwrap_or_default().iter().rev();
        let mut inside = before.take_while(|it| it.place.start >= expression.start);
        let found = inside.find(|it| it.depth == depth && it.kind == kind);
        found.map(|it| it.place.clone())
    }
}

/// Calls functions for an operation, or for its operands.
fn replace(operation: Operation, operators: &Operators, insertions: &mut Vec<Insertion>) {
    match operation {
        Operation::Growth(place) => insertions.extend(call(SETTLED, place)),
        Operation::Concatenation { place, left, right } => {
            let Some(operator) = operators.of(&place, OperatorKind::Concatenation) else {
                return;
            };
            if left == Operand::Other {
                insertions.extend(call(TEXT, place.start..operator.start));
            }
            if right == Operand::Other {
                insertions.extend(call(TEXT, operator.end..place.end));
            }
        }
        Operation::Remainder(place) => {
            let Some(operator) = operators.of(&place, OperatorKind::Remainder) else {
                return;
            };
            insertions.extend(call(REMAINDER, place));
            insertions.push(Insertion {
                at: operator.start,
                n_replaced: operator.len(),
                order: Order::Operator,
                until: operator.end,
                text: ",".to_owned(),
            });
        }
    }
}

/// A text for a place in the source.
struct Insertion {
    at: usize,
    /// Bytes of the source that it replaces.
    n_replaced: usize,
    order: Order,
    /// The end of what it begins: what ends last begins first.
    until: usize,
    text: String,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    /// Before a value that is assigned, which may be several expressions.
    Value,
    Expression,
    Operator,
    ValueEnd,
}

impl Insertion {
    fn new(at: usize, order: Order, text: String) -> Self {
        Self {
            at,
            n_replaced: 0,
            order,
            until: at,
            text,
        }
    }
}

/// A call of a function with the expression at a place.
fn call(function: &str, place: Range<usize>) -> [Insertion; 2] {
    let begin = Insertion::new(place.start, Order::Expression, format!("{function}("));
    let end = Insertion::new(place.end, Order::Expression, ")".to_owned());
    [
        Insertion {
            until: place.end,
            ..begin
        },
        end,
    ]
}

/// The part of a tag that was read so far.
#[derive(Default)]
struct Tag {
    n_tokens: usize,
    statement: Statement,
    /// Brackets that are open.
    open: Vec<Bracket>,
    /// The value of an assignment that is being read.
    value: Option<AssignedValue>,
    /// True if the name that is assigned to has a dot: it is an attribute of a namespace.
    has_dot: bool,
    /// True if it is a block whose text goes through filters, which may make any value of it.
    is_filtered_block: bool,
    last: LastToken,
    last_end: usize,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Statement {
    /// An expression follows.
    #[default]
    Other,
    /// The target of an assignment follows: of `set`, `with`, `for`.
    Target(&'static str),
}

struct Bracket {
    start: usize,
    kind: BracketKind,
    /// True if all that is in it is constant.
    is_constant: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum BracketKind {
    /// A list or a map.
    Literal,
    /// Round brackets: a tuple, once there is a comma.
    Group,
    /// Arguments or a subscript.
    Other,
}

struct AssignedValue {
    start: usize,
    is_plain: bool,
    n_tokens: usize,
    is_constant: bool,
}

/// The kind of the last token, which decides what the next one means.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum LastToken {
    /// Something that a bracket behind it calls or subscribes.
    Value,
    Dot,
    /// An operator, a keyword, or nothing.
    #[default]
    Other,
}

/// Words behind which a value begins.
const KEYWORDS: [&str; 15] = [
    "and",
    "autoescape",
    "elif",
    "else",
    "extends",
    "for",
    "from",
    "if",
    "import",
    "in",
    "include",
    "is",
    "not",
    "or",
    "with",
];

impl Tag {
    fn take(&mut self, token: &Token<'_>, span: Span, insertions: &mut Vec<Insertion>) {
        let (start, end) = (span.start_offset as usize, span.end_offset as usize);
        self.n_tokens += 1;
        if self.n_tokens == 1 {
            self.statement = match token {
                Token::Ident("set") => Statement::Target("set"),
                Token::Ident("with") => Statement::Target("with"),
                Token::Ident("for") => Statement::Target("for"),
                _ => Statement::Other,
            };
        } else if let Statement::Target(of) = self.statement {
            match (of, token) {
                (_, Token::Dot) => self.has_dot = true,
                ("for", Token::Ident("in")) => self.statement = Statement::Other,
                ("set", Token::Pipe) => {
                    self.statement = Statement::Other;
                    self.is_filtered_block = true;
                }
                ("set" | "with", Token::Assign) => {
                    self.statement = match of {
                        "with" => Statement::Target("in with"),
                        _ => Statement::Other,
                    };
                    self.value = Some(AssignedValue {
                        start: end,
                        is_plain: true,
                        n_tokens: 0,
                        is_constant: true,
                    });
                }
                ("in with", Token::Comma) if self.open.is_empty() => {
                    self.end(insertions);
                    self.statement = Statement::Target("with");
                }
                ("in with", _) => self.take_expression(token, start, end, insertions),
                _ => {}
            }
        } else {
            self.take_expression(token, start, end, insertions);
        }
        self.last = match token {
            Token::Dot => LastToken::Dot,
            Token::Ident(name) if self.last != LastToken::Dot && KEYWORDS.contains(name) => {
                LastToken::Other
            }
            Token::Ident(_)
            | Token::Str(_)
            | Token::String(_)
            | Token::BracketClose
            | Token::BraceClose
            | Token::ParenClose => LastToken::Value,
            _ => LastToken::Other,
        };
        self.last_end = end;
    }

    fn take_expression(
        &mut self,
        token: &Token<'_>,
        start: usize,
        end: usize,
        insertions: &mut Vec<Insertion>,
    ) {
        let is_constant = match token {
            Token::Str(_) | Token::String(_) | Token::Int(_) | Token::Int128(_) => true,
            Token::Float(_) | Token::Comma | Token::Colon | Token::Minus => true,
            Token::BracketOpen | Token::BraceOpen | Token::BracketClose | Token::BraceClose => true,
            Token::Ident(name) => {
                matches!(*name, "true" | "True" | "false" | "False" | "none" | "None")
            }
            _ => false,
        };
        if !is_constant {
            self.open
                .iter_mut()
                .for_each(|open| open.is_constant = false);
        }
        if let Some(value) = &mut self.value {
            value.n_tokens += 1;
            value.is_constant &= is_constant;
            // Of anything else comes something that was there before, a number or a text.
            value.is_plain &= !matches!(
                token,
                Token::Plus
                    | Token::Mul
                    | Token::Pipe
                    | Token::Comma
                    | Token::BracketOpen
                    | Token::BraceOpen
                    | Token::ParenOpen
            );
        }
        match token {
            Token::BracketOpen | Token::BraceOpen | Token::ParenOpen => {
                let kind = match (token, self.last) {
                    (Token::BraceOpen, _) => BracketKind::Literal,
                    (_, LastToken::Value) => BracketKind::Other,
                    (Token::BracketOpen, _) => BracketKind::Literal,
                    _ => BracketKind::Group,
                };
                self.open.push(Bracket {
                    start,
                    kind,
                    is_constant: true,
                });
            }
            Token::Comma => {
                if let Some(open) = self
                    .open
                    .last_mut()
                    .filter(|o| o.kind == BracketKind::Group)
                {
                    open.kind = BracketKind::Literal;
                }
            }
            Token::BracketClose | Token::BraceClose | Token::ParenClose => {
                let closed = self.open.pop();
                let literal = closed.filter(|o| o.kind == BracketKind::Literal && !o.is_constant);
                if let Some(Bracket { start, .. }) = literal {
                    insertions.extend(call(SETTLED, start..end));
                }
            }
            _ => {}
        }
    }

    /// The value of an assignment is complete.
    fn end(&mut self, insertions: &mut Vec<Insertion>) {
        if self.is_filtered_block {
            let filter = if self.has_dot { KEPT } else { SETTLED };
            let text = format!("|{filter}");
            insertions.push(Insertion::new(self.last_end, Order::ValueEnd, text));
        }
        let Some(value) = self.value.take() else {
            return;
        };
        let (function, is_as_it_is) = if self.has_dot {
            (KEPT, value.is_constant)
        } else {
            (SETTLED, value.is_plain || value.is_constant)
        };
        if value.n_tokens > 0 && !is_as_it_is {
            // Twice, as a value without brackets may be a tuple.
            let before = format!(" {function}((");
            insertions.push(Insertion::new(value.start, Order::Value, before));
            let after = "))".to_owned();
            insertions.push(Insertion::new(self.last_end, Order::ValueEnd, after));
        }
    }
}
