//! Answers of all families, whole and cut at every place.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

#[path = "answers/families.rs"]
mod families;
#[path = "answers/goldens.rs"]
mod goldens;
#[cfg(feature = "grammar")]
#[path = "answers/grammars.rs"]
mod grammars;
#[path = "answers/harmony.rs"]
mod harmony;
#[path = "answers/malformed.rs"]
mod malformed;
#[path = "answers/plain.rs"]
mod plain;
#[path = "answers/support.rs"]
mod support;
