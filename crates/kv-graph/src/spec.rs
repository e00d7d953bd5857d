//! [`OpSpec`]: the description of one operation, from which everything else about it derives.
//!
//! A description has the operation's name, its number of operands, its attributes (weights among
//! them) and the rule that infers shape and element type of its result. The builder adds nodes by
//! it, [`check`](crate::check) compares graphs from outside with it, and text, DOT and diff print
//! it. Does not know how an operation is computed.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::op::{Input, Op};
use crate::{GraphShape, Node};

/// Element type of a node's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 32-bit floats.
    F32,
    /// 32-bit unsigned integers: tokens, positions, row numbers, cells.
    U32,
    /// No values: the node is there for its effect or for its order.
    None,
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::F32 => "f32",
            Self::U32 => "u32",
            Self::None => "()",
        })
    }
}

/// The description of one operation with its attributes.
pub struct OpSpec<'a> {
    name: &'static str,
    n_operands: Option<usize>,
    attributes: Vec<Attribute<'a>>,
    scope: OpScope,
    infer: Box<Infer<'a>>,
}

/// Infers the result, or returns what the operation wants.
type Infer<'a> = dyn Fn(&OpContext<'_>) -> Result<OpResult, String> + 'a;

/// One attribute of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute<'a> {
    /// Its name as in text form; empty where the value stands alone.
    pub key: &'a str,
    /// Its value.
    pub value: AttributeValue<'a>,
}

/// The value of an attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttributeValue<'a> {
    /// A setting, as text.
    Setting(String),
    /// The name of a weight.
    Weight(&'a str),
}

/// The dependencies of the result of an operation besides its operands and weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpScope {
    /// The caller hands it in.
    Input,
    /// Each row depends on the same row of its operands.
    Row,
    /// Rows depend on other tokens, or on what a layer remembers of them.
    Tokens,
}

impl fmt::Display for Attribute<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.key.is_empty() {
            write!(f, "{}=", self.key)?;
        }
        match &self.value {
            AttributeValue::Setting(value) => f.write_str(value),
            AttributeValue::Weight(name) => f.write_str(name),
        }
    }
}

impl fmt::Debug for OpSpec<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpSpec")
            .field("name", &self.name)
            .field("n_operands", &self.n_operands)
            .field("attributes", &self.attributes)
            .field("scope", &self.scope)
            .finish_non_exhaustive()
    }
}

impl<'a> OpSpec<'a> {
    /// An operation on rows with so many operands and no attributes.
    pub(super) fn new(
        name: &'static str,
        n_operands: usize,
        infer: impl Fn(&OpContext<'_>) -> Result<OpResult, String> + 'a,
    ) -> Self {
        Self {
            name,
            n_operands: Some(n_operands),
            attributes: Vec::new(),
            scope: OpScope::Row,
            infer: Box::new(infer),
        }
    }

    /// With a setting.
    pub(super) fn setting(self, key: &'a str, value: impl fmt::Display) -> Self {
        self.attribute(key, AttributeValue::Setting(value.to_string()))
    }

    /// With a setting, where there is one.
    pub(super) fn optional(self, key: &'a str, value: Option<impl fmt::Display>) -> Self {
        match value {
            Some(value) => self.setting(key, value),
            None => self,
        }
    }

    /// With weights of these names, all by the same key.
    pub(super) fn weights_as(
        self,
        key: &'a str,
        names: impl IntoIterator<Item = &'a String>,
    ) -> Self {
        let weight = |spec: Self, name: &'a String| {
            spec.attribute(key, AttributeValue::Weight(name.as_str()))
        };
        names.into_iter().fold(self, weight)
    }

    /// With another scope than its rows.
    pub(super) fn scope_of(mut self, scope: OpScope) -> Self {
        self.scope = scope;
        self
    }

    /// With any number of operands.
    pub(super) fn any_operands(mut self) -> Self {
        self.n_operands = None;
        self
    }

    fn attribute(mut self, key: &'a str, value: AttributeValue<'a>) -> Self {
        self.attributes.push(Attribute { key, value });
        self
    }

    /// The operation's name, as in text form and JSON.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The number of operands it has; `None` for any number.
    pub fn n_operands(&self) -> Option<usize> {
        self.n_operands
    }

    /// Its attributes in the order of the text form.
    pub fn attributes(&self) -> &[Attribute<'a>] {
        &self.attributes
    }

    /// Its weights by name, in the order of its attributes.
    pub fn weights(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.attributes.iter().filter_map(|a| match a.value {
            AttributeValue::Weight(name) => Some(name),
            AttributeValue::Setting(_) => None,
        })
    }

    /// The dependencies of its result.
    pub fn scope(&self) -> OpScope {
        self.scope
    }

    /// Shape and element type of the result and the shapes of weights.
    ///
    /// # Errors
    /// The operands that the operation wants, as text.
    pub(super) fn infer(&self, given: &OpContext<'_>) -> Result<OpResult, String> {
        (self.infer)(given)
    }
}

/// The operands from which a result is inferred.
#[derive(Clone, Copy, Debug)]
pub(super) struct OpContext<'a> {
    /// Rows in and out of the graph.
    pub(super) graph: GraphShape,
    pub(super) operands: &'a [&'a Node],
    /// The result's shape as far as operands and attributes do not determine it: the last
    /// dimensions.
    pub(super) result: &'a [usize],
    /// Shapes of weights as far as operands and attributes do not determine them, in the order of
    /// the description's weights.
    pub(super) weights: &'a [&'a [usize]],
}

impl<'a> OpContext<'a> {
    /// Shapes of the first operands, empty where there is none.
    pub(super) fn shapes<const N: usize>(&self) -> [&'a [usize]; N] {
        std::array::from_fn(|at| self.shape(at))
    }

    /// Shape of an operand; empty where there is none.
    pub(super) fn shape(&self, at: usize) -> &'a [usize] {
        self.operands.get(at).map_or(&[], |node| &node.shape)
    }

    /// The operation that an operand is the result of.
    pub(super) fn op(&self, at: usize) -> Option<&'a Op> {
        self.operands.get(at).map(|node| &node.op)
    }

    /// True if an operand is this input.
    pub(super) fn is_input(&self, at: usize, input: Input) -> bool {
        self.op(at) == Some(&Op::Input(input))
    }

    /// The result's last dimension, where operands do not determine it.
    pub(super) fn width(&self) -> usize {
        self.result.last().copied().unwrap_or(0)
    }

    /// The given shape of a weight; empty where there is none.
    pub(super) fn weight(&self, at: usize) -> &'a [usize] {
        self.weights.get(at).copied().unwrap_or_default()
    }
}

/// The result of an operation on given operands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OpResult {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: DType,
    /// Shapes of the weights, in the order of the description's.
    pub(super) weights: Vec<Vec<usize>>,
}

impl OpResult {
    /// Floats of this shape, without weights.
    pub(super) fn f32(shape: impl Into<Vec<usize>>) -> Self {
        Self {
            shape: shape.into(),
            dtype: DType::F32,
            weights: Vec::new(),
        }
    }

    /// No values.
    pub(super) fn none() -> Self {
        Self {
            dtype: DType::None,
            ..Self::f32([])
        }
    }

    /// With the shape of the next weight.
    pub(super) fn weight(mut self, shape: impl Into<Vec<usize>>) -> Self {
        self.weights.push(shape.into());
        self
    }

    /// With the shape of the next weight, where the operation has it.
    pub(super) fn weight_if<T>(self, name: Option<&T>, shape: impl Into<Vec<usize>>) -> Self {
        match name {
            Some(_) => self.weight(shape),
            None => self,
        }
    }
}

/// The number of values of a shape; `None` where it is above `usize::MAX`.
pub(super) fn n_values(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |n, &dim| n.checked_mul(dim))
}
