//! Groups of experts, of which only the best are chosen from.

use kv_graph::{GroupScore, RouteGate, RouteGroups};

use super::Hyperparameters;
use crate::error::ModelError;

/// Key of the number of groups.
const GROUPS: &str = "expert_group_count";

impl Hyperparameters<'_> {
    /// The groups of experts that the file names, where there is more than one. After a softmax a
    /// group is worth its best expert, after a sigmoid its two best.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn route_groups(&self, gate: RouteGate) -> Result<Option<RouteGroups>, ModelError> {
        let n_groups = match self.optional::<u32>(GROUPS)? {
            None | Some(0 | 1) => return Ok(None),
            Some(n) => n as usize,
        };
        let n_experts = self.count("expert_count")?;
        if !n_experts.is_multiple_of(n_groups) {
            let reason = format!("{n_groups} groups do not divide {n_experts} experts");
            return Err(self.wrong(GROUPS, reason));
        }
        Ok(Some(RouteGroups {
            n_groups,
            n_used: self.count("expert_group_used_count")?,
            score: match gate {
                RouteGate::Softmax => GroupScore::Max,
                RouteGate::Sigmoid | RouteGate::Sparsemixer { .. } => GroupScore::TopTwo,
            },
        }))
    }

    /// That the file names no groups of experts, for an architecture that has none.
    ///
    /// # Errors
    /// [`ModelError`] with the key.
    pub fn refuse_groups(&self) -> Result<(), ModelError> {
        match self.optional::<u32>(GROUPS)?.filter(|&n| n > 1) {
            None => Ok(()),
            Some(n) => {
                let reason = format!("{n}; {} has no groups of experts", self.architecture);
                Err(self.wrong(GROUPS, reason))
            }
        }
    }
}
