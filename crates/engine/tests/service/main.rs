//! A service gives each request the text that it has alone, and frees what it took.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

mod blocks;
mod draft_model;
mod drafted;
mod models;
mod prefixes;
mod requests;
mod speculation;
#[path = "../support/mod.rs"]
mod support;
mod swap;
mod texts;
mod trace;
mod watch;
