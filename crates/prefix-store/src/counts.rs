//! [`TierCounts`]: what a tier did. Plain data.

/// The work of a tier so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierCounts {
    /// Groups that were fetched.
    pub n_fetched: u64,
    /// Their bytes.
    pub fetched_bytes: u64,
    /// Groups that were stored.
    pub n_stored: u64,
    /// Their bytes.
    pub stored_bytes: u64,
    /// Groups that were to be stored and were there already.
    pub n_known: u64,
    /// Groups that could not be stored, or not be taken.
    pub n_not_stored: u64,
    /// Of these, those that were taken and could not be stored.
    pub n_lost: u64,
    /// Groups that were refused: damaged, cut off, of another version or name.
    pub n_refused: u64,
    /// Of these, those that somebody without the key made.
    pub n_forged: u64,
    /// Jobs that failed.
    pub n_failed: u64,
    /// The number of times that the store was down.
    pub n_down: u64,
}

impl std::ops::Add for TierCounts {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            n_fetched: self.n_fetched + other.n_fetched,
            fetched_bytes: self.fetched_bytes + other.fetched_bytes,
            n_stored: self.n_stored + other.n_stored,
            stored_bytes: self.stored_bytes + other.stored_bytes,
            n_known: self.n_known + other.n_known,
            n_not_stored: self.n_not_stored + other.n_not_stored,
            n_lost: self.n_lost + other.n_lost,
            n_refused: self.n_refused + other.n_refused,
            n_forged: self.n_forged + other.n_forged,
            n_failed: self.n_failed + other.n_failed,
            n_down: self.n_down + other.n_down,
        }
    }
}
