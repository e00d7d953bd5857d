//! Rotations of [`GraphBuilder`]: by positions, and by rows and columns of images.

use super::{GraphBuilder, GraphError};
use crate::graph::{DType, Input, NodeId, Op};
use crate::rope::{RopeSections, RopeSpec};

impl GraphBuilder {
    /// Rotates every head of `x [n, heads, dim]` by its token's position.
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
        self.rotation(name, op, [x, positions], rope)
    }

    /// Rotates every head of `x [n, heads, dim]` by its token's position, row and column, which
    /// `coordinates` ([`Input::Coordinates`]) says.
    ///
    /// # Errors
    /// [`GraphError::Shape`] as [`GraphBuilder::rope`], and where the sections are not as many pairs
    /// as are rotated.
    pub fn rope_sections(
        &mut self,
        name: &str,
        (x, coordinates): (NodeId, NodeId),
        rope: &RopeSpec,
        sections: RopeSections,
    ) -> Result<NodeId, GraphError> {
        let op = Op::RopeSections {
            rope: rope.clone(),
            sections,
        };
        let node = self.graph.node(coordinates);
        let of_tokens = node.is_some_and(|node| node.op == Op::Input(Input::Coordinates));
        if !of_tokens || 2 * sections.n_pairs() != rope.n_rot {
            let [a, b, c] = sections.pairs;
            let wanted = format!("{a} + {b} + {c} = {} pairs, coordinates", rope.n_rot / 2);
            return Err(self.misfit(name, &op, &wanted, &[x, coordinates]));
        }
        self.rotation(name, op, [x, coordinates], rope)
    }

    fn rotation(
        &mut self,
        name: &str,
        op: Op,
        [x, by]: [NodeId; 2],
        rope: &RopeSpec,
    ) -> Result<NodeId, GraphError> {
        let shape = self.shape_of(x).to_vec();
        let per_token = match op {
            Op::Rope { .. } => self.shape_of(by).len() == 1,
            _ => true,
        };
        let fits = matches!(*shape, [n, _, dim]
            if per_token && self.shape_of(by).first() == Some(&n)
                && rope.n_rot <= dim && rope.n_rot.is_multiple_of(2));
        if !fits {
            let wanted = format!("[tokens, heads, dim >= {} (even)], [tokens]", rope.n_rot);
            return Err(self.misfit(name, &op, &wanted, &[x, by]));
        }
        if let Some(factors) = &rope.factors {
            self.declare(factors, &[rope.n_rot / 2])?;
        }
        self.push(name, op, vec![x, by], (shape, DType::F32))
    }
}
