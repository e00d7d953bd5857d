//! Answers of all families, whole and cut at every place.

#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod families;
mod goldens;
mod harmony;
mod plain;
mod support;
