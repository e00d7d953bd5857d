//! [`Xielu`]: xIELU, an activation with learnt slopes, out of operations that every backend has.
//!
//! Huang, arXiv 2411.13010. Does not know the block around.

use kv_graph::{Activation, GraphBuilder, GraphError, NodeId};

/// `beta x`, and above 0 `positive x^2`, below `negative (e^x - 1 - x)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Xielu {
    /// Factor on the square.
    pub positive: f32,
    /// Factor on what is below 0.
    pub negative: f32,
    /// Slope at 0.
    pub beta: f32,
}

/// `e^-r` is `e^SHIFT sigmoid(-r - SHIFT)` but for a part of `e^-SHIFT`: 3e-7, as much as the sum
/// `r + SHIFT` is rounded.
const SHIFT: f32 = 15.0;

impl Xielu {
    /// Adds it: `x` in, the same shape out, in a node of this name.
    ///
    /// With `r = max(-x, 0)` it is `beta x + positive max(x, 0)^2 + negative (e^-r - (1 - r))`.
    /// Graphs have no exponential and no constants. The sigmoid of `0 x`, which is a half, makes
    /// constants; the sigmoid far below 0 is the exponential.
    ///
    /// # Errors
    /// [`GraphError`] where sizes do not fit.
    pub fn build(&self, b: &mut GraphBuilder, name: &str, x: NodeId) -> Result<NodeId, GraphError> {
        let named = |what: &str| format!("{name}_{what}");
        let nothing = b.scale(&named("zero"), x, 0.0)?;
        let half = b.activate(&named("half"), Activation::Sigmoid, nothing)?;
        let below = b.scale(&named("negated"), x, -1.0)?;
        let below = b.activate(&named("below"), Activation::Relu, below)?;
        // -(r + SHIFT), whose sigmoid times 1 + e^SHIFT is exactly 1 where r is 0.
        let shift = b.scale(&named("shift"), half, 2.0 * SHIFT)?;
        let shifted = b.add(&named("shifted"), below, shift)?;
        let shifted = b.scale(&named("exponent"), shifted, -1.0)?;
        let tail = b.activate(&named("tail"), Activation::Sigmoid, shifted)?;
        let decay = b.scale(&named("decay"), tail, self.negative * (1.0 + SHIFT.exp()))?;
        // negative (r - 1)
        let one = b.scale(&named("one"), half, -2.0)?;
        let line = b.add(&named("line"), below, one)?;
        let line = b.scale(&named("line_scaled"), line, self.negative)?;
        let curve = b.add(&named("curve"), decay, line)?;
        let square = b.activate(&named("square"), Activation::ReluSquared, x)?;
        let square = b.scale(&named("square_scaled"), square, self.positive)?;
        let slope = b.scale(&named("slope"), x, self.beta)?;
        let above = b.add(&named("above"), slope, square)?;
        b.add(name, above, curve)
    }
}
