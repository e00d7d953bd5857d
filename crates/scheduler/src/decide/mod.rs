//! Decisions: functions that look at the parts of a scheduler and say what comes next.
//!
//! Invariant: a decision changes no part; only [`admit`](admit::Admitter) may note for whom a
//! request waits. What was decided is carried out in `scheduler/`.

pub(crate) mod admit;
pub(crate) mod checkpoint;
pub(crate) mod compose;
pub(crate) mod fit;
pub(crate) mod fork;
pub(crate) mod restore;
pub(crate) mod room;
pub(crate) mod save;
pub(crate) mod share;
pub(crate) mod shift;
pub(crate) mod store;
pub(crate) mod view;
