//! [`MemoryBudget`]: whether a model fits next to those that are loaded.
//!
//! Invariant: pure arithmetic over bytes; decides nothing but who is in the way.

use super::entry::ModelBytes;

/// The memory that all models together may take.
#[derive(Clone, Copy, Debug, Default)]
pub struct MemoryBudget {
    /// Bytes of this machine; `None` sets no limit.
    pub host: Option<u64>,
    /// Bytes of the device that computes; `None` sets no limit.
    pub device: Option<u64>,
    /// Bytes that the experts of all models share; `None` where each model has its own.
    pub experts: Option<u64>,
    /// What this machine has free at the moment, where it is to be asked: others may have taken
    /// some since the server began.
    pub free_now: Option<fn() -> Option<u64>>,
}

/// What a model that is to be loaded lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Short {
    Host,
    Device,
}

impl Short {
    /// What counts.
    pub(crate) fn of(self, bytes: ModelBytes) -> u64 {
        match self {
            Self::Host => bytes.host,
            Self::Device => bytes.device,
        }
    }
}

/// Why a model does not fit, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shortage {
    pub(crate) of: Short,
    pub(crate) needed: u64,
    pub(crate) available: u64,
    pub(crate) budget: u64,
}

impl MemoryBudget {
    /// The bytes of models together, whose own bytes add up to this: memory that they share counts
    /// once.
    pub fn shared(&self, sum: ModelBytes) -> ModelBytes {
        let experts = self
            .experts
            .map_or(sum.experts, |most| sum.experts.min(most));
        ModelBytes {
            host: sum.host.saturating_sub(sum.experts - experts),
            experts,
            ..sum
        }
    }

    /// What lacks for `needed` bytes where others hold `held`.
    pub(crate) fn shortage(&self, needed: ModelBytes, held: ModelBytes) -> Option<Shortage> {
        let free_now = self.free_now.and_then(|free| free());
        let (all, held) = (self.shared(needed.plus(held)), self.shared(held));
        let pools = [
            (Short::Host, self.host, free_now),
            (Short::Device, self.device, None),
        ];
        pools.into_iter().find_map(|(of, budget, free)| {
            let left = budget.map(|budget| budget.saturating_sub(of.of(held)));
            let available = match (left, free) {
                (Some(left), Some(free)) => left.min(free),
                (left, free) => left.or(free)?,
            };
            let needed = of.of(all).saturating_sub(of.of(held));
            (needed > available).then(|| Shortage {
                of,
                needed,
                available,
                budget: budget.unwrap_or(available),
            })
        })
    }

    /// The same without asking what is free now: what never fits, whatever is unloaded.
    pub(crate) fn without_machine(&self) -> Self {
        Self {
            free_now: None,
            ..*self
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    fn bytes(host: u64, device: u64) -> ModelBytes {
        ModelBytes {
            host,
            device,
            experts: 0,
        }
    }

    #[test]
    fn both_pools_have_their_own_limit() {
        let budget = MemoryBudget {
            host: Some(100),
            device: Some(50),
            ..MemoryBudget::default()
        };
        assert_eq!(budget.shortage(bytes(60, 50), bytes(40, 0)), None);
        let short = budget.shortage(bytes(61, 0), bytes(40, 0)).unwrap();
        assert_eq!(
            (short.of, short.needed, short.available, short.budget),
            (Short::Host, 61, 60, 100)
        );
        let short = budget.shortage(bytes(0, 20), bytes(0, 40)).unwrap();
        assert_eq!((short.of, short.available), (Short::Device, 10));
        assert_eq!(
            MemoryBudget::default().shortage(bytes(u64::MAX, u64::MAX), bytes(1, 1)),
            None
        );
    }

    #[test]
    fn experts_of_all_models_count_once() {
        let budget = MemoryBudget {
            host: Some(100),
            experts: Some(30),
            ..MemoryBudget::default()
        };
        let mixture = |host, experts| ModelBytes {
            host,
            device: 0,
            experts,
        };
        // 20 and 10 of experts fit into 30, and the second 10 of both are the same.
        assert_eq!(budget.shortage(mixture(50, 10), mixture(50, 20)), None);
        assert_eq!(budget.shortage(mixture(60, 20), mixture(50, 20)), None);
        let short = budget.shortage(mixture(61, 20), mixture(50, 20)).unwrap();
        assert_eq!((short.needed, short.available), (51, 50));
        let alone = MemoryBudget {
            experts: None,
            ..budget
        };
        let short = alone.shortage(mixture(51, 20), mixture(50, 20)).unwrap();
        assert_eq!((short.needed, short.available), (51, 50));
    }

    #[test]
    fn what_others_took_is_not_there() {
        let budget = MemoryBudget {
            host: Some(100),
            free_now: Some(|| Some(30)),
            ..MemoryBudget::default()
        };
        assert_eq!(budget.shortage(bytes(30, 0), bytes(0, 0)), None);
        let short = budget.shortage(bytes(31, 0), bytes(0, 0)).unwrap();
        assert_eq!(short.available, 30);
        let without = budget.without_machine();
        assert_eq!(without.shortage(bytes(31, 0), bytes(0, 0)), None);
    }
}
