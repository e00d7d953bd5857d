//! The experts of a plan: how many stay in memory.
//!
//! Invariant: what stays is what a run with the same memory for experts would hold.

use cellar::ExpertPlan;
use serde::Serialize;

use super::BackendReport;
use crate::args::RamArgs;
use crate::failure::usage;
use crate::machine;

/// Experts that are read as they are needed, in bytes.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ExpertReport {
    /// All of them.
    pub(super) total: u64,
    /// Those that stay; a part of what is packed.
    pub(super) held: u64,
    /// Those that a token goes through.
    pub(super) of_token: u64,
    /// Of those, what a token has read where routers have no favourites.
    pub(super) read_by_token: u64,
    /// What --expert-memory is to be, where the plan chose it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) expert_memory: Option<u64>,
}

impl ExpertReport {
    /// Of the backend's plan; `others` is the total with the experts of that plan. With --ram,
    /// experts get what the others leave.
    ///
    /// # Errors
    /// A usage error where --ram leaves too little, or there are no experts to divide it among.
    pub(super) fn new(
        ram: &RamArgs,
        plan: Option<ExpertPlan>,
        others: u64,
    ) -> anyhow::Result<Option<Self>> {
        let plan = plan.filter(|plan| plan.total > 0);
        let Some(ram) = ram.ram else {
            return Ok(plan.map(|plan| Self::of(plan, None)));
        };
        let Some(plan) = plan else {
            return usage(
                "--ram divides memory among the experts of a mixture, and there are none",
            );
        };
        let others = others.saturating_sub(plan.held as u64);
        let room = ram.0.saturating_sub(others);
        let least = plan.largest as u64;
        if room < least {
            let [others, least] = [others, others.saturating_add(least)].map(machine::bytes);
            return usage(format!(
                "--ram {}: {others} are needed beside the experts; with one of them, {least} are the least",
                machine::bytes(ram.0)
            ));
        }
        let held = plan.total.min(usize::try_from(room).unwrap_or(usize::MAX));
        let plan = ExpertPlan { held, ..plan };
        // Where all of them fit, nothing needs to be chosen.
        let chosen = Some(room).filter(|_| held < plan.total);
        Ok(Some(Self::of(plan, chosen)))
    }

    fn of(plan: ExpertPlan, expert_memory: Option<u64>) -> Self {
        Self {
            total: plan.total as u64,
            held: plan.held as u64,
            of_token: plan.of_token as u64,
            read_by_token: plan.read_by_token() as u64,
            expert_memory,
        }
    }
}

/// What the backend takes where these experts stay, of a plan in which all do if --ram chose.
pub(super) fn with_held(
    backend: Option<BackendReport>,
    experts: Option<&ExpertReport>,
) -> Option<BackendReport> {
    let absent = experts
        .filter(|experts| experts.expert_memory.is_some())
        .map_or(0, |experts| experts.total - experts.held);
    backend.map(|backend| BackendReport {
        packed: backend.packed.saturating_sub(absent),
        ..backend
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: ExpertPlan = ExpertPlan {
        total: 1000,
        held: 1000,
        largest: 10,
        of_token: 100,
    };

    fn ram_of(bytes: u64) -> RamArgs {
        let ram = bytes.to_string().parse();
        RamArgs {
            ram: Some(ram.unwrap()),
            vram: None,
        }
    }

    fn report(ram: u64) -> anyhow::Result<Option<ExpertReport>> {
        ExpertReport::new(&ram_of(ram), Some(PLAN), 1500)
    }

    #[test]
    fn experts_get_what_is_left() {
        let some = report(700).unwrap().unwrap();
        assert_eq!((some.held, some.expert_memory), (200, Some(200)));
        assert_eq!(some.read_by_token, 80);
        let all = report(1500).unwrap().unwrap();
        assert_eq!((all.held, all.expert_memory), (1000, None));
        assert_eq!(report(510).unwrap().unwrap().held, 10);
        let few = report(509).unwrap_err().to_string();
        assert!(few.contains("510 bytes are the least"), "{few}");
        let none = ExpertReport::new(&ram_of(9), None, 5)
            .unwrap_err()
            .to_string();
        assert!(none.contains("there are none"), "{none}");
        let none = ExpertReport::new(
            &RamArgs {
                ram: None,
                vram: None,
            },
            None,
            5,
        )
        .unwrap();
        assert!(none.is_none());
    }
}
