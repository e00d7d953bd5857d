//! Matrices that multiply the same rows become one step, with norms and gates before them, and residual sums and (where rows
//! are many, or one) gates of two of their products after.

use kv_core::backend::BackendError;
use kv_core::graph::{Activation, Node, NodeId, Op};

use super::{Resolver, Value, unsupported};
use crate::activations::ActivationKind;
use crate::plan::{Before, Change, Gated, Product, Step};

/// Rows whose products do not stay near until they are gated; fewer are gated where they are rounded, but for a single
/// one, which is rounded where it is gated.
const GATED_FROM: usize = 33;

impl<'a> Resolver<'a> {
    /// The step of a matrix and of all later ones on the same rows.
    pub(super) fn linear(&mut self, id: NodeId, node: &'a Node) -> Result<(), BackendError> {
        let x = self.operand(node, 0)?;
        let graph = self.graph;
        let mut products = self.products(id, node, x)?;
        let reads = |node: &Node| node.operands.first() == Some(&x.id());
        let mut n_readers = usize::from(reads(node));
        for (at, later) in graph.nodes().iter().enumerate().skip(id.as_usize() + 1) {
            let later_id = NodeId(u32::try_from(at).unwrap_or(u32::MAX));
            let is_linear = matches!(later.op, Op::Linear { .. });
            let same = later.operands.first().and_then(|o| self.stands_for.get(o)) == Some(&x);
            if is_linear && same && !self.finished.contains(&later_id) {
                products.extend(self.products(later_id, later, x)?);
                n_readers += usize::from(reads(later));
            }
        }
        let rounded = |p: &Product<Value>| !p.takes(ActivationKind::F32);
        let alone = self.n_uses.get(&x.id()) == Some(&n_readers);
        let (x, before) = match alone && products.iter().all(rounded) {
            true if self.round_gates(x, &products) => (x, Before::Rounded),
            true => self.take_before(x),
            false => (x, Before::Nothing),
        };
        self.out.steps.push(Step::Linear {
            x,
            before,
            products,
        });
        Ok(())
    }

    /// Lets the last step round `x` for these products while it gates it, if it does, and if `x` is one row that they all take
    /// the same way: says whether it will.
    fn round_gates(&mut self, x: Value, products: &[Product<Value>]) -> bool {
        let Some(kind) = products.first().map(|p| p.matrix.activation_kind()) else {
            return false;
        };
        let is_wanted = |p: &Product<Value>| p.matrix.activation_kind() == kind;
        if !products.iter().all(is_wanted) || x.shape(self.graph).0 != 1 {
            return false;
        }
        // There is memory for one such row: it is not read and made at once.
        let Some(Step::Linear {
            before: Before::Nothing | Before::RmsNorm { .. } | Before::Gate(..),
            products: makers,
            ..
        }) = self.out.steps.last_mut()
        else {
            return false;
        };
        let maker = makers.iter_mut().find(|p| p.out == x);
        let Some(gated) = maker.and_then(|p| p.gates.as_mut()) else {
            return false;
        };
        gated.rounded = Some(kind);
        true
    }

    /// Takes back the last step, where it made `x` row by row and can be done while rows are rounded.
    fn take_before(&mut self, x: Value) -> (Value, Before<Value>) {
        let whole = x.shape(self.graph).1;
        match self.out.steps.pop() {
            Some(Step::RmsNorm {
                x: from,
                gain,
                dim,
                eps,
                out,
            }) if out == x && dim == whole && gain.len() == whole => {
                (from, Before::RmsNorm { gain, eps })
            }
            Some(Step::Change {
                x: from,
                change: Change::Gate(activation, other),
                out,
            }) if out == x => (from, Before::Gate(activation, other)),
            step => {
                self.out.steps.extend(step);
                (x, Before::Nothing)
            }
        }
    }

    /// The product of a matrix, or one for each part of it that is read.
    fn products(
        &mut self,
        id: NodeId,
        node: &'a Node,
        x: Value,
    ) -> Result<Vec<Product<Value>>, BackendError> {
        let Op::Linear { weight, bias } = &node.op else {
            return Err(unsupported(node));
        };
        let &[n, n_out] = &*node.shape else {
            return Err(unsupported(node));
        };
        let (rows, n_in) = x.shape(self.graph);
        if rows != n {
            return Err(unsupported(node));
        }
        let matrix = self.matrix(weight, node, Some([n_out, n_in]))?;
        let bias = bias.as_ref().map(|b| self.vector(b, node)).transpose()?;
        if bias.as_ref().is_some_and(|b| b.len() != n_out) {
            return Err(unsupported(node));
        }
        let parts = self.split(id, (&matrix, bias.as_ref()), node)?;
        if !parts.is_empty() {
            return Ok(parts);
        }
        self.finished.insert(id);
        let (residual, out) = match self.sum_of(id) {
            Some((sum, residual)) => {
                self.finished.insert(sum);
                self.stands_for.insert(sum, Value::Node(sum));
                (Some(residual), Value::Node(sum))
            }
            None => (None, Value::Node(id)),
        };
        self.stands_for.insert(id, out);
        let product = Product {
            matrix,
            bias,
            gates: None,
            residual,
            out,
        };
        Ok(vec![product])
    }

    /// Makes the gate `node` of two products of the same rows a part of the step that computes these, if nothing else reads
    /// them: says whether it did. For a few tokens it is not worth it.
    pub(super) fn gate_products(
        &mut self,
        node: &Node,
        activation: Activation,
        out: Value,
    ) -> Result<bool, BackendError> {
        let values = [self.operand(node, 0)?, self.operand(node, 1)?];
        let is_alone = |(value, id): (&Value, &NodeId)| {
            value.id() == *id
                && self.n_uses.get(id) == Some(&1)
                && matches!(value.shape(self.graph).0, 1 | GATED_FROM..)
        };
        if !values.iter().zip(&node.operands).all(is_alone) {
            return Ok(false);
        }
        for step in self.out.steps.iter_mut().rev() {
            let Step::Linear { products, .. } = step else {
                continue;
            };
            let plain = |value: Value| {
                products
                    .iter()
                    .position(|p| p.out == value && p.residual.is_none() && p.gates.is_none())
            };
            let (Some(gate), Some(up)) = (plain(values[0]), plain(values[1])) else {
                continue;
            };
            if products[gate].matrix.n_rows() != products[up].matrix.n_rows() {
                return Ok(false);
            }
            let Product { matrix, bias, .. } = products[up].clone();
            products[gate].gates = Some(Gated {
                activation,
                matrix,
                bias,
                rounded: None,
            });
            products[gate].out = out;
            products.remove(up);
            return Ok(true);
        }
        Ok(false)
    }

    /// The sum that alone uses the product `id`, and what is added: known already, and itself no
    /// part of the product's step.
    fn sum_of(&self, id: NodeId) -> Option<(NodeId, Value)> {
        if self.n_uses.get(&id) != Some(&1) {
            return None;
        }
        let nodes = self
            .graph
            .nodes()
            .iter()
            .enumerate()
            .skip(id.as_usize() + 1);
        let (at, sum) = nodes.into_iter().find(|(_, n)| n.operands.contains(&id))?;
        let (&[a, b], Op::Add) = (&*sum.operands, &sum.op) else {
            return None;
        };
        let other = if a == id { b } else { a };
        let residual = *self.stands_for.get(&other)?;
        let known = match residual {
            Value::Embeddings(_) => true,
            value => self.out.steps.iter().any(|s| s.values().1.contains(&value)),
        };
        let same = self.graph.node(id).map(|n| &n.shape) == Some(&sum.shape)
            && residual.len(self.graph) == sum.n_values();
        (known && same).then_some((NodeId(u32::try_from(at).ok()?), residual))
    }
}
