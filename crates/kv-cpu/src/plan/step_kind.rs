//! The kind that a profile counts a step as.

use kv_core::backend::StepKind;

use super::Step;

impl<V> Step<V> {
    /// The kind of a step and the bytes of the weight matrices that it reads; those of experts are
    /// not counted, as only some of them are read.
    pub(crate) fn kind_and_weight_bytes(&self) -> (StepKind, usize) {
        match self {
            Self::Linear { products, .. } => {
                let gates = products
                    .iter()
                    .filter_map(|p| p.gates.as_ref().map(|g| &g.matrix));
                let matrices = products.iter().map(|p| &p.matrix).chain(gates);
                let n_bytes = matrices.map(|m| m.n_rows() * m.row_bytes()).sum();
                (StepKind::Matmul, n_bytes)
            }
            Self::Attend { .. } | Self::AttendBatch { .. } | Self::Plain { .. } => {
                (StepKind::Attention, 0)
            }
            Self::Store { .. } => (StepKind::StoreKv, 0),
            Self::Conv { .. } | Self::Scan { .. } | Self::ScanHeads { .. } => {
                (StepKind::Recurrent, 0)
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
