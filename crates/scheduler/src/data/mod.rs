//! What a scheduler is given, what it keeps of a request, and what it returns.
//!
//! Invariant: plain data; nothing in here decides anything, or knows a part of a scheduler.

pub(crate) mod active;
pub(crate) mod config;
pub(crate) mod counters;
pub(crate) mod edits;
pub(crate) mod error;
pub(crate) mod event;
pub(crate) mod ids;
pub(crate) mod note;
pub(crate) mod request;
pub(crate) mod reuse;
pub(crate) mod state;
pub(crate) mod step;
pub(crate) mod stored;
pub(crate) mod tenant;
pub(crate) mod view;
pub(crate) mod work;
