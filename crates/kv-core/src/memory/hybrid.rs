//! Hybrid memory: recurrent states and attention cells in one model.
//!
//! A [`Composite`] with parts and states: Jamba, Falcon-H1, Granite hybrid. Sizes are those of its
//! parts ([`MemoryConfig::part`](super::MemoryConfig::part)) and of its states
//! ([`RecurrentConfig`]). What a state cannot do, the whole cannot: its past cannot be cut, and it
//! moves to other positions only as a whole.

use super::MemoryConfigError;
use super::composite::Composite;
use super::recurrent::{Recurrent, RecurrentConfig};
use super::unified::{Unified, UnifiedConfig};

impl Composite {
    /// An empty memory with these attention parts, which must be causal, and these states.
    ///
    /// # Errors
    /// [`MemoryConfigError`] where sizes are impossible or do not suit each other.
    pub fn hybrid(
        parts: &[UnifiedConfig],
        states: RecurrentConfig,
    ) -> Result<Self, MemoryConfigError> {
        let parts: Result<Vec<Unified>, _> = parts.iter().map(|&part| Unified::new(part)).collect();
        Self::from_parts(parts?, Some(Recurrent::new(states)?))
    }
}
