//! [`ExpertMemory`]: memory for the experts of mixtures, whichever backends are built in.

/// Memory for the experts of mixtures, which are read from their model's file as they are needed.
/// Models that are opened with copies of one share it: whose experts are needed last gives them up
/// for the others, and all together never take more.
#[derive(Clone, Debug)]
pub struct ExpertMemory {
    #[cfg(feature = "cpu")]
    pub(super) cpu: kv_cpu::ExpertMemory,
    budget: u64,
}

impl ExpertMemory {
    /// So many bytes.
    pub fn new(budget: u64) -> Self {
        Self {
            #[cfg(feature = "cpu")]
            cpu: kv_cpu::ExpertMemory::new(budget),
            budget,
        }
    }

    /// The most bytes.
    pub fn budget(&self) -> u64 {
        self.budget
    }
}
