//! As what a step is measured ([`StepTimes`](crate::times::StepTimes)).

use crate::times::StepKind;

use super::Step;

impl<V> Step<V> {
    /// The kind of a step, and bytes of the matrices that it reads, where they are all of one step.
    pub(crate) fn measured_as(&self) -> (StepKind, usize) {
        match self {
            Self::Linear { products, .. } => {
                let gated = products
                    .iter()
                    .filter_map(|p| p.gates.as_ref().map(|g| &g.matrix));
                let matrices = products.iter().map(|p| &p.matrix).chain(gated);
                let n_bytes = matrices.map(|m| m.n_rows() * m.row_bytes()).sum();
                (StepKind::Matrices, n_bytes)
            }
            Self::Attend { .. } | Self::AttendBatch { .. } | Self::Plain { .. } => {
                (StepKind::Attention, 0)
            }
            Self::Store { .. } => (StepKind::Storing, 0),
            Self::Conv { .. } | Self::Scan { .. } | Self::ScanHeads { .. } => {
                (StepKind::Recurrence, 0)
            }
            Self::Route { .. }
            | Self::ExpertLinear { .. }
            | Self::ExpertWeigh { .. }
            | Self::ExpertSum { .. } => (StepKind::Experts, 0),
            Self::Embed { .. } => (StepKind::Embedding, 0),
            Self::AddRow { .. }
            | Self::RmsNorm { .. }
            | Self::LayerNorm { .. }
            | Self::Change { .. }
            | Self::TakeRows { .. }
            | Self::Columns { .. }
            | Self::Copy { .. } => (StepKind::Elementwise, 0),
            Self::Custom { .. } => (StepKind::Custom, 0),
        }
    }
}
