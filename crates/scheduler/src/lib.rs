//! Decides what each step of an engine for many requests computes, as a pure function.
//!
//! A [`Scheduler`] holds the requests of one model. Events go in ([`Scheduler::handle`]), plans
//! come out ([`Scheduler::next`]): edits of the memory, or the tokens of a step that the memory has
//! room for. It only asks the memory, and nothing in here reads a clock, starts a thread, waits or
//! draws random numbers; so a run is a function of its events, and is tested without a model.
//!
//! - **Continuous batching with chunked prefill.** A step has one token of every text that goes on,
//!   then chunks of prompts, up to [`SchedulerConfig::step_tokens`]. Next to decode rows, chunks
//!   are so small that a step takes about [`SchedulerConfig::step_time`], which is learned from
//!   the times that are reported ([`Event::StepTime`]).
//! - **Admission.** What can never fit is refused at once ([`RequestError`]); a request is admitted
//!   when its whole prompt fits next to the running ones. Of one priority, the tenant goes first
//!   for whom the fewest tokens were computed, divided by its weight ([`TenantLimits`]); of one
//!   tenant, the first.
//! - **Preemption.** Where the memory runs short, the youngest request of the lowest priority gives
//!   its cells back, waits, and is computed again from its tokens: it goes on exactly where it was.
//!   So no request that was taken ends because memory ran short, and the oldest request of the
//!   highest priority always makes progress.
//! - **Swapping.** Where the host has room ([`SchedulerConfig::swap_bytes`]), what the memory holds
//!   of a request is saved before it is preempted ([`Work::SwapOut`]), and comes back when it goes
//!   on. Beyond half of that room, the states that come back last go on to a disk
//!   ([`Outcome::Spilled`]).
//! - **Prefix reuse.** The tokens of requests that have ended stay in the memory while there is
//!   room, as idle sequences. A prompt with the same prefix shares their cells, from any token with
//!   full attention, from a kept end with windows and recurrent states. Each request learns how
//!   many tokens were reused and why not more ([`Reuse`]). Running requests are shared as cached
//!   prefixes are. One that begins like a prompt that is being computed waits for the common part,
//!   where that goes before it; it never waits for one of a lower priority.
//! - **Several texts of one prompt.** A request with siblings is computed once up to the end of its
//!   prompt; then each sibling goes on from a copy that shares its cells.
//! - **Speculative decoding.** Tokens that were drafted for a text ([`Event::Draft`]) are computed
//!   with its last one in what a step has left, and those that were not chosen are taken back.
//! - **Parking.** A request that wants it ([`Retention::Park`]) keeps its sequence when it ends,
//!   and may go on behind more tokens ([`Event::Resume`]), also one whose state was restored
//!   ([`Scheduler::adopt`]).
//! - **Failures.** After a step that failed, its requests are tried one by one, and only one that
//!   fails again, alone, is given up.
//!
//! Four floors, none of which imports from a higher one: data (`data/`), parts that each own what
//! they keep (`parts/`), decisions that look at parts (`decide/`), and the scheduler, which carries
//! decisions out in an order (`scheduler/phases.rs`).
//!
//! Knows no backend, no tokenizer and no sampler. How a token is chosen, and when a text ends, is
//! reported to it.
//!
//! ```
//! use kv_core::batch::BatchRules;
//! use kv_core::memory::{Composite, Memory, MemoryInputs, Streams, UnifiedConfig};
//! use kv_core::{Causality, PartIdx, TokenId, Window};
//! use cellar_scheduler::{
//!     Event, Micros, Progress, Request, RequestId, Scheduler, SchedulerConfig, Work,
//! };
//!
//! let mut memory = Composite::unified(UnifiedConfig {
//!     part: PartIdx(0),
//!     n_seqs: 2,
//!     n_cells: 64,
//!     streams: Streams::Shared,
//!     window: Window::Full,
//!     causality: Causality::Causal,
//! })?;
//! let rules = BatchRules { n_batch: 32, n_seqs: 2, n_vocab: 100, n_embd: 8 };
//! let mut scheduler = Scheduler::new(SchedulerConfig::new(rules, 32, 64), &memory)?;
//! let request = Request {
//!     id: RequestId(1),
//!     prompt: (0..40).map(TokenId).collect(),
//!     ..Request::default()
//! };
//! scheduler.handle(Micros(0), Event::Submit(request));
//!
//! let mut n_rows = 0;
//! for now in 0..4 {
//!     match scheduler.next(Micros(now), &memory).work {
//!         Work::Decode { step, planned } => {
//!             // Here an engine would run the model and sample a token from each row.
//!             let mut inputs = MemoryInputs::default();
//!             let mut steps = memory.begin_planned(planned.plan);
//!             while steps.next(&mut inputs).is_some() {}
//!             let rows = step.report(|_row| Some(Progress::Token(TokenId(7))));
//!             n_rows += rows.len();
//!             scheduler.handle(Micros(now), Event::StepDone(rows));
//!         }
//!         Work::Edit(edits) => {
//!             for edit in edits {
//!                 let _no_row_work = memory.apply(edit)?;
//!             }
//!         }
//!         Work::SwapOut { .. } | Work::SwapIn(_) | Work::Shift(_) | Work::Encode { .. } => {
//!             unreachable!("nothing swaps, shifts or has a source")
//!         }
//!         Work::Fetch(_) | Work::Restore(_) => unreachable!("there is no store"),
//!         Work::Idle => break,
//!     }
//! }
//! assert_eq!(n_rows, 3); // a chunk of 32 tokens, one of 8 with a row, and two tokens of text
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod data;
mod decide;
mod parts;
mod scheduler;
mod speculate;

pub use data::config::{
    EvictionPolicy, PrefixCaching, RowBytes, SchedulerConfig, SwapRows, Waiting,
};
pub use data::counters::Counters;
pub use data::error::RequestError;
pub use data::event::{
    End, Event, Outcome, Progress, RowReport, ShiftResult, StepFailure, StoredRows, SwappedIn,
};
pub use data::ids::{Micros, RequestId, Salt, TenantId};
pub use data::note::{DropReason, Note};
pub use data::request::{
    MAX_PROMPT_ROWS, Overflow, Priority, PromptLimits, PromptRows, Request, Retention, SourceUse,
};
pub use data::reuse::{Missed, PrefixUse, Reuse, n_common};
pub use data::step::{Feed, RowUse, Step, StepRow};
pub use data::stored::{StoredCuts, StoredTokens};
pub use data::tenant::{Tenant, TenantLimits};
pub use data::view::{
    CachedPrefix, EvictedPrefix, ParkedRequest, RestoredPrefix, RunningRequest, WaitingRequest,
};
pub use data::work::{Shift, StepPlan, StoredPrefix, Swap, Work};
pub use scheduler::Scheduler;
pub use speculate::{
    DEFAULT_DRAFT, DraftCosts, DraftLength, DraftedBy, Drafter, HeadLength, MAX_DRAFT,
    MAX_HEAD_DRAFT, NgramLookup, Repetition, Speculated, Speculation, SpeculationOff, USUAL_RATE,
};
