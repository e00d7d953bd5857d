//! The CPU backend of Cellar: own kernels chosen at run time, a thread team, one arena a program.
//!
//! [`CpuBackend`] compiles a graph to a plan of fused steps over one arena and runs it without
//! allocating. In reading order: [`isa`] and [`kernels`] (what the machine can do), [`matrix`] and
//! [`activations`] (the operands of products; `repack` packs weights), then the plan, the team and
//! the steps. Knows nothing of models; nothing here knows a file.

pub mod activations;
mod arena;
mod attend;
mod backend;
mod execute;
mod expert_store;
mod gemm_dequant_f32;
pub mod isa;
pub mod kernels;
mod kv_rows;
mod machine;
pub mod matrix;
mod operands;
pub mod output;
mod plan;
mod program;
mod recurrent;
mod repack;
mod run_memory;
mod storage;
mod store_rows;
mod sync;
mod team;
#[cfg(test)]
mod team_tests;
mod validate;
mod values;
mod weights;

pub use backend::{CpuBackend, CpuConfig, CpuExpertPlan, CpuMemoryPlan, PROGRAM_CAPACITIES};
pub use expert_store::ExpertMemory;
pub use program::{CpuProgram, ProgramMemory};
pub use repack::RepackChoice;
pub use storage::CpuRows;
pub use weights::{ActivationChoice, CpuWeights};
