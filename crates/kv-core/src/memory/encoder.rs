//! Memory of encoders: none.
//!
//! A [`Composite`] without parts and states. Every batch is evaluated as if it were the first, and
//! a sequence's tokens are in one ubatch, since they see each other there and nowhere else:
//! [`batch_visibility`] writes what they see.

use super::composite::Composite;
use super::visible::{self, Reach};
use crate::batch::UBatch;
use crate::memory::BatchVisibility;
use crate::window::Causality;

impl Composite {
    /// A memory of nothing, for sequences with ids below `n_seqs`.
    pub fn encoder(n_seqs: u32) -> Self {
        Self::without_parts(n_seqs)
    }
}

/// Writes what the rows of `ubatch` see of each other through the window of `to`: all of their own
/// sequence that is within it, later ones too.
pub fn batch_visibility(ubatch: &UBatch, to: &mut BatchVisibility) {
    let reach = Reach {
        window: to.window,
        causality: Causality::NonCausal,
    };
    visible::write_within(ubatch, reach, &mut to.visibility);
}
