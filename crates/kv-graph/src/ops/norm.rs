//! Norms over the last dimension.

use crate::op::Op;
use crate::spec::{OpResult, OpSpec};
use crate::{Affine, Claim, GraphBuilder, GraphError, NodeId};

/// The factor of normed values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormGain<'a> {
    /// Nothing.
    None,
    /// A weight of `[dim]`, the same for everything before the last dimension.
    Shared(&'a str),
    /// A weight of `[groups, dim]` for values of `[n, groups, dim]`.
    PerGroup(&'a str),
}

pub(crate) fn rms_norm(weight: Option<&String>, eps: f32) -> OpSpec<'_> {
    let spec = OpSpec::new("rms_norm", 1, move |given| {
        let per_group = given.weight(0).len() == 2;
        match (given.shape(0), per_group) {
            (&[n, groups, dim], true) => {
                let result = OpResult::f32([n, groups, dim]);
                Ok(result.weight_if(weight, [groups, dim]))
            }
            (shape @ [.., dim], false) => Ok(OpResult::f32(shape).weight_if(weight, [*dim])),
            (_, true) => Err("[n, groups, dim]".into()),
            (_, false) => Err("[.., dim]".into()),
        }
    });
    spec.weights_as("w", weight).setting("eps", eps)
}

/// A weight that rows are multiplied with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowGain<'a> {
    /// A weight of `[dim]`, one factor for each value.
    PerValue(&'a str),
    /// A weight of `[1]`, one factor for all values.
    One(&'a str),
    /// A weight of `[groups, dim]` for values of `[n, groups, dim]`.
    PerGroup(&'a str),
}

pub(crate) fn gain(weight: &String) -> OpSpec<'_> {
    let spec = OpSpec::new("gain", 1, |given| match (given.shape(0), given.weight(0)) {
        (shape @ [.., _], [1]) => Ok(OpResult::f32(shape).weight([1])),
        (shape @ [.., dim], [width]) if width == dim => Ok(OpResult::f32(shape).weight([*dim])),
        (shape @ [_, groups, dim], weight @ [_, _]) if weight == [*groups, *dim] => {
            Ok(OpResult::f32(shape).weight([*groups, *dim]))
        }
        _ => Err("[.., dim] and a weight of [dim], [groups, dim] or [1]".into()),
    });
    spec.weights_as("w", [weight])
}

pub(crate) fn layer_norm<'a>(
    weight: Option<&'a String>,
    bias: Option<&'a String>,
    eps: f32,
) -> OpSpec<'a> {
    let spec = OpSpec::new("layer_norm", 1, move |given| match given.shape(0) {
        shape @ [.., dim] => {
            let result = OpResult::f32(shape).weight_if(weight, [*dim]);
            Ok(result.weight_if(bias, [*dim]))
        }
        [] => Err("[.., dim]".into()),
    });
    let spec = spec.weights_as("w", weight).weights_as("b", bias);
    spec.setting("eps", eps)
}

impl GraphBuilder {
    /// RMS norm over the last dimension.
    ///
    /// # Errors
    /// [`GraphError`] where `x` has no dimension.
    pub fn rms_norm(
        &mut self,
        name: &str,
        x: NodeId,
        weight: &str,
        eps: f32,
    ) -> Result<NodeId, GraphError> {
        self.rms_norm_with(name, x, NormGain::Shared(weight), eps)
    }

    /// RMS norm over the last dimension, with any kind of gain.
    ///
    /// # Errors
    /// [`GraphError`] where `x` has no dimension, or no groups for the gain of each.
    pub fn rms_norm_with(
        &mut self,
        name: &str,
        x: NodeId,
        gain: NormGain<'_>,
        eps: f32,
    ) -> Result<NodeId, GraphError> {
        // The number of dimensions distinguishes the kinds of gain.
        let (weight, shape): (_, &[usize]) = match gain {
            NormGain::None => (None, &[]),
            NormGain::Shared(weight) => (Some(weight), &[0]),
            NormGain::PerGroup(weight) => (Some(weight), &[0, 0]),
        };
        let weight = self.optional_weight_name(weight);
        let claim = Claim {
            weights: &[shape],
            ..Claim::default()
        };
        self.push(name, Op::RmsNorm { weight, eps }, &[x], claim)
    }

    /// Every row of `x [.., dim]` times a weight; see [`Op::Gain`].
    ///
    /// # Errors
    /// [`GraphError`] where `x` has no dimension, or no groups for the gain of each.
    pub fn gain(&mut self, name: &str, x: NodeId, gain: RowGain<'_>) -> Result<NodeId, GraphError> {
        let shape = self.shape_of(x);
        let dim = shape.last().copied().unwrap_or(0);
        let groups = shape.iter().nth_back(1).copied().unwrap_or(0);
        let (weight, shape): (_, &[usize]) = match gain {
            RowGain::PerValue(weight) => (weight, &[dim]),
            RowGain::One(weight) => (weight, &[1]),
            RowGain::PerGroup(weight) => (weight, &[groups, dim]),
        };
        let weight = self.weight_name(weight);
        let claim = Claim {
            weights: &[shape],
            ..Claim::default()
        };
        self.push(name, Op::Gain { weight }, &[x], claim)
    }

    /// Layer norm over the last dimension, with a gain `[dim]` and a bias `[dim]`.
    ///
    /// # Errors
    /// [`GraphError`] where `x` has no dimension.
    pub fn layer_norm(
        &mut self,
        name: &str,
        x: NodeId,
        weights: Affine<'_>,
        eps: f32,
    ) -> Result<NodeId, GraphError> {
        let op = Op::LayerNorm {
            weight: Some(self.weight_name(weights.weight)),
            bias: self.optional_weight_name(weights.bias),
            eps,
        };
        self.push(name, op, &[x], Claim::default())
    }

    /// The same without a gain and a bias.
    ///
    /// # Errors
    /// [`GraphError`] where `x` has no dimension.
    pub fn plain_layer_norm(
        &mut self,
        name: &str,
        x: NodeId,
        eps: f32,
    ) -> Result<NodeId, GraphError> {
        let op = Op::LayerNorm {
            weight: None,
            bias: None,
            eps,
        };
        self.push(name, op, &[x], Claim::default())
    }
}
