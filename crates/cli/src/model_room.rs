//! [`ModelRoom`]: the memory of a model whose size the user did not give.
//!
//! Invariant: what is free is looked at once, so it is the same whenever a model is looked at.
//! Knows no models.

/// The memory that the models may take, as of the start.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ModelRoom {
    host: Option<u64>,
    device: Option<u64>,
    /// The models that share it.
    n_models: u64,
}

impl ModelRoom {
    /// The room of so many models. Without a budget none is known.
    pub(crate) fn new(host: Option<u64>, device: Option<u64>, n_models: usize) -> Self {
        Self {
            host,
            device,
            n_models: n_models as u64,
        }
    }

    /// Bytes that the memory of a model may have whose weights have so many: half of what is left
    /// of its share on the host and on the device. The other half is for what else is computed, for
    /// what prompts need for a moment, and for other programs.
    pub(crate) fn memory_bytes(&self, n_weights: u64) -> Option<u64> {
        let pools = [self.host, self.device].into_iter().flatten();
        let left = pools.map(|pool| (pool / self.n_models.max(1)).saturating_sub(n_weights) / 2);
        left.min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn a_model_gets_half_of_what_its_weights_leave_of_its_share() {
        assert_eq!(
            ModelRoom::new(Some(16 * GIB), None, 1).memory_bytes(4 * GIB),
            Some(6 * GIB)
        );
        assert_eq!(
            ModelRoom::new(Some(16 * GIB), None, 2).memory_bytes(4 * GIB),
            Some(2 * GIB)
        );
        assert_eq!(
            ModelRoom::new(Some(64 * GIB), Some(8 * GIB), 1).memory_bytes(4 * GIB),
            Some(2 * GIB)
        );
        assert_eq!(
            ModelRoom::new(Some(2 * GIB), None, 1).memory_bytes(4 * GIB),
            Some(0)
        );
        assert_eq!(ModelRoom::new(None, None, 1).memory_bytes(4 * GIB), None);
    }
}
