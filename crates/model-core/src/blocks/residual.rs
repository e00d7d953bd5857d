//! [`Residual`]: which rows the blocks of a layer add to. Does not know the blocks.

use kv_graph::{GraphBuilder, GraphError, NodeId};

use super::decoder::scaled;

/// The rows that the blocks of a layer add to.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Residual {
    /// The rows before their norms, as the decoder arranges them.
    #[default]
    Rows,
    /// The rows behind their norms (MiniMax-Text-01).
    Normed {
        /// Factors for the mixer.
        mixer: ResidualFactors,
        /// Factors for the feed-forward block.
        feed_forward: ResidualFactors,
    },
    /// The rows that blocks read, which have no norm before them: the sums are normed (OPT-350m,
    /// arXiv 2205.01068).
    SumsNormed,
}

/// Factors of a sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ResidualFactors {
    /// On the rows that a block adds to.
    pub residual: f32,
    /// On what it adds.
    pub added: f32,
}

impl ResidualFactors {
    /// No factors.
    pub const NONE: Self = Self {
        residual: 1.0,
        added: 1.0,
    };

    /// The sum of `[x, added]`, with the factors that are not 1.
    pub(super) fn sum(
        self,
        b: &mut GraphBuilder,
        name: &str,
        [x, added]: [NodeId; 2],
    ) -> Result<NodeId, GraphError> {
        let factor = |factor: f32| (factor != 1.0).then_some(factor);
        let x = scaled(b, &format!("{name}_residual"), x, factor(self.residual))?;
        let added = scaled(b, &format!("{name}_added"), added, factor(self.added))?;
        b.add(name, added, x)
    }
}
