//! Rotary position embedding: by positions, and by rows and columns of images.

use crate::op::{Input, Op};
use crate::rope::{RopeScaling, RopeSections, RopeSpec, YarnRamp};
use crate::spec::{OpContext, OpResult, OpSpec};
use crate::{Claim, GraphBuilder, GraphError, NodeId};

/// The result of a rotation: the shape of the heads.
fn rotated(given: &OpContext<'_>, rope: &RopeSpec) -> Result<OpResult, String> {
    let [x, by] = given.shapes();
    match *x {
        [n, heads, dim]
            if by.first() == Some(&n) && rope.n_rot <= dim && rope.n_rot.is_multiple_of(2) =>
        {
            let result = OpResult::f32([n, heads, dim]);
            Ok(result.weight_if(rope.factors.as_ref(), [rope.n_rot / 2]))
        }
        _ => Err(format!(
            "[tokens, heads, dim >= {} (even)], [tokens]",
            rope.n_rot
        )),
    }
}

/// The attributes of a rotation.
fn with_rope<'a>(spec: OpSpec<'a>, rope: &'a RopeSpec) -> OpSpec<'a> {
    let RopeSpec {
        style,
        n_rot,
        base,
        scaling,
        factors,
    } = rope;
    let spec = spec
        .setting("style", format!("{style:?}").to_lowercase())
        .setting("n_rot", n_rot)
        .setting("base", base);
    let spec = match scaling {
        RopeScaling::None => spec,
        RopeScaling::Linear { factor } => spec.setting("linear", factor),
        RopeScaling::Yarn {
            factor,
            original_context,
            beta_fast,
            beta_slow,
            attention_factor,
            ramp,
        } => {
            let spec = spec
                .setting("yarn", factor)
                .setting("original_context", original_context)
                .setting("beta", format!("{beta_fast}/{beta_slow}"))
                .setting("attention_factor", format!("{attention_factor:.6}"));
            match ramp {
                YarnRamp::Whole => spec,
                YarnRamp::Exact => spec.setting("ramp", "exact"),
            }
        }
        RopeScaling::LongRope { attention_factor } => {
            spec.setting("attention_factor", format!("{attention_factor:.6}"))
        }
    };
    spec.weights_as("factors", factors)
}

pub(crate) fn rope(rope: &RopeSpec) -> OpSpec<'_> {
    let spec = OpSpec::new("rope", 2, |given| match given.shape(1) {
        [_] => rotated(given, rope),
        _ => Err("[tokens, heads, dim], [tokens]".into()),
    });
    with_rope(spec, rope)
}

pub(crate) fn rope_sections(rope: &RopeSpec, sections: RopeSections) -> OpSpec<'_> {
    let [a, b, c] = sections.pairs;
    let spec = OpSpec::new("rope_sections", 2, move |given| {
        let of_tokens = given.is_input(1, Input::Coordinates);
        if of_tokens && 2 * sections.n_pairs() == rope.n_rot {
            rotated(given, rope)
        } else {
            Err(format!(
                "{a} + {b} + {c} = {} pairs, coordinates",
                rope.n_rot / 2
            ))
        }
    });
    with_rope(spec, rope)
        .setting("sections", format!("{a}/{b}/{c}"))
        .setting("order", format!("{:?}", sections.order).to_lowercase())
}

impl GraphBuilder {
    /// Rotates every head of `x [n, heads, dim]` by its token's position. The divisors that `rope`
    /// names belong to the whole model: their name gets no layer.
    ///
    /// # Errors
    /// [`GraphError::Shape`] where `x` has no heads, or heads are narrower than the rotated part.
    pub fn rope(
        &mut self,
        name: &str,
        x: NodeId,
        positions: NodeId,
        rope: &RopeSpec,
    ) -> Result<NodeId, GraphError> {
        let op = Op::Rope { rope: rope.clone() };
        self.push(name, op, &[x, positions], Claim::default())
    }

    /// Rotates every head of `x [n, heads, dim]` by its token's position, row and column, which
    /// `coordinates` ([`Input::Coordinates`]) holds.
    ///
    /// # Errors
    /// [`GraphError::Shape`] as [`GraphBuilder::rope`], and where the sections are not as many
    /// pairs as are rotated.
    pub fn rope_sections(
        &mut self,
        name: &str,
        [x, coordinates]: [NodeId; 2],
        rope: &RopeSpec,
        sections: RopeSections,
    ) -> Result<NodeId, GraphError> {
        let op = Op::RopeSections {
            rope: rope.clone(),
            sections,
        };
        self.push(name, op, &[x, coordinates], Claim::default())
    }
}
