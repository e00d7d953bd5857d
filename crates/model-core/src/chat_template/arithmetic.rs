//! [`operations`]: where a template adds or multiplies, which makes lists and texts longer, and
//! where it writes values as text or formats them, which the engine does otherwise than Python.
//!
//! Invariant: no expression is left out. Calls itself for expressions in expressions: it needs a
//! stack as the parser does. Knows nothing of tokens.

use std::ops::Range;

use minijinja::machinery::ast::{BinOp, BinOpKind, Call, CallArg, Expr, Macro, Spanned, Stmt};

/// Sums are looked at whole, so that calls do not nest, but no more than so many operands of one.
const MAX_OPERANDS: usize = 8;

/// Operations that the engine must not do alone.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    /// A sum or product, none of which overlaps another but as a whole.
    Growth(Range<usize>),
    /// `left ~ right`
    Concatenation {
        place: Range<usize>,
        left: Operand,
        right: Operand,
    },
    /// `left % right`
    Remainder(Range<usize>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operand {
    /// It is a text, or was made one.
    Text,
    Other,
}

/// The operations of a template, at their places in the source.
pub(super) fn operations(template: &Stmt<'_>) -> Vec<Operation> {
    let mut places = Vec::new();
    statement(template, &mut places);
    places
}

type Places = Vec<Operation>;

fn statements(all: &[Stmt<'_>], to: &mut Places) {
    all.iter().for_each(|each| statement(each, to));
}

fn statement(of: &Stmt<'_>, to: &mut Places) {
    match of {
        Stmt::Template(it) => statements(&it.children, to),
        Stmt::EmitExpr(it) => expression(&it.expr, to),
        Stmt::EmitRaw(_) | Stmt::Continue(_) | Stmt::Break(_) => {}
        Stmt::ForLoop(it) => {
            expression(&it.iter, to);
            it.filter_expr.iter().for_each(|each| expression(each, to));
            statements(&it.body, to);
            statements(&it.else_body, to);
        }
        Stmt::IfCond(it) => {
            expression(&it.expr, to);
            statements(&it.true_body, to);
            statements(&it.false_body, to);
        }
        Stmt::WithBlock(it) => {
            let values = it.assignments.iter();
            values.for_each(|(_, value)| expression(value, to));
            statements(&it.body, to);
        }
        Stmt::Set(it) => expression(&it.expr, to),
        Stmt::SetBlock(it) => {
            it.filter.iter().for_each(|each| expression(each, to));
            statements(&it.body, to);
        }
        Stmt::AutoEscape(it) => {
            expression(&it.enabled, to);
            statements(&it.body, to);
        }
        Stmt::FilterBlock(it) => {
            expression(&it.filter, to);
            statements(&it.body, to);
        }
        Stmt::Block(it) => statements(&it.body, to),
        Stmt::Import(it) => expression(&it.expr, to),
        Stmt::FromImport(it) => expression(&it.expr, to),
        Stmt::Extends(it) => expression(&it.name, to),
        Stmt::Include(it) => expression(&it.name, to),
        Stmt::Macro(it) => definition(it, to),
        Stmt::CallBlock(it) => {
            call(&it.call, to);
            definition(&it.macro_decl, to);
        }
        Stmt::Do(it) => call(&it.call, to),
    }
}

fn definition(of: &Macro<'_>, to: &mut Places) {
    of.defaults.iter().for_each(|each| expression(each, to));
    statements(&of.body, to);
}

fn call(of: &Call<'_>, to: &mut Places) {
    expression(&of.expr, to);
    arguments(&of.args, to);
}

fn arguments(all: &[CallArg<'_>], to: &mut Places) {
    for each in all {
        match each {
            CallArg::Pos(it) | CallArg::Kwarg(_, it) => expression(it, to),
            CallArg::PosSplat(it) | CallArg::KwargSplat(it) => expression(it, to),
        }
    }
}

fn expression(of: &Expr<'_>, to: &mut Places) {
    match of {
        Expr::Var(_) | Expr::Const(_) => {}
        Expr::Slice(it) => {
            expression(&it.expr, to);
            let parts = [&it.start, &it.stop, &it.step].into_iter().flatten();
            parts.for_each(|each| expression(each, to));
        }
        Expr::UnaryOp(it) => expression(&it.expr, to),
        Expr::BinOp(it) => operation(it, to),
        Expr::Compare(it) => {
            expression(&it.expr, to);
            it.ops.iter().for_each(|each| expression(&each.expr, to));
        }
        Expr::IfExpr(it) => {
            expression(&it.test_expr, to);
            expression(&it.true_expr, to);
            it.false_expr.iter().for_each(|each| expression(each, to));
        }
        Expr::Filter(it) => {
            it.expr.iter().for_each(|each| expression(each, to));
            arguments(&it.args, to);
        }
        Expr::Test(it) => {
            expression(&it.expr, to);
            arguments(&it.args, to);
        }
        Expr::GetAttr(it) => expression(&it.expr, to),
        Expr::GetItem(it) => {
            expression(&it.expr, to);
            expression(&it.subscript_expr, to);
        }
        Expr::Call(it) => call(it, to),
        Expr::List(it) => it.items.iter().for_each(|each| expression(each, to)),
        Expr::Tuple(it) => it.items.iter().for_each(|each| expression(each, to)),
        Expr::Map(it) => {
            let parts = it.keys.iter().chain(&it.values);
            parts.for_each(|each| expression(each, to));
        }
    }
}

/// A chain of operations, and the operands of all.
fn operation(of: &Spanned<BinOp<'_>>, to: &mut Places) {
    let (mut at, mut n) = (of, 0);
    loop {
        if n % MAX_OPERANDS == 0 && grows(at) {
            to.push(Operation::Growth(place(at)));
        }
        n += 1;
        to.extend(unlike_python(at));
        expression(&at.right, to);
        match &at.left {
            Expr::BinOp(left) if is_chained(at, left) => at = left,
            left => return expression(left, to),
        }
    }
}

fn place(of: &Spanned<BinOp<'_>>) -> Range<usize> {
    let span = of.span();
    span.start_offset as usize..span.end_offset as usize
}

/// True if they are of one chain: so that it is long and not deep.
fn is_chained(at: &BinOp<'_>, left: &BinOp<'_>) -> bool {
    (grows(at) && grows(left)) || matches!((at.op, left.op), (BinOpKind::Concat, BinOpKind::Concat))
}

/// An operation that the engine does otherwise than Python.
fn unlike_python(of: &Spanned<BinOp<'_>>) -> Option<Operation> {
    let kind = |side: &Expr<'_>| match side {
        Expr::Const(constant) if constant.value.as_str().is_some() => Operand::Text,
        _ => Operand::Other,
    };
    match (of.op, &of.left) {
        (BinOpKind::Concat, left) => Some(Operation::Concatenation {
            place: place(of),
            left: match left {
                // In brackets, it begins behind them.
                Expr::BinOp(it)
                    if matches!(it.op, BinOpKind::Concat) && place(it).start == place(of).start =>
                {
                    Operand::Text
                }
                _ => kind(left),
            },
            right: kind(&of.right),
        }),
        (BinOpKind::Rem, Expr::Const(left)) if left.value.is_number() => None,
        (BinOpKind::Rem, _) => Some(Operation::Remainder(place(of))),
        _ => None,
    }
}

/// True if it may make a list longer. A text that is added or multiplied is paid for by the engine.
fn grows(of: &BinOp<'_>) -> bool {
    let is_constant = |side: &Expr<'_>| matches!(side, Expr::Const(_));
    match of.op {
        BinOpKind::Mul => true,
        BinOpKind::Add => !is_constant(&of.right) && !is_constant(&of.left),
        _ => false,
    }
}
