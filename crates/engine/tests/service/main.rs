//! A service gives each request the text that it has alone, and frees what it took.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

/// A test for each kind of memory, with `$check` of a [`Case`].
macro_rules! for_each_memory {
    ($check:path) => {
        #[test]
        fn texts_are_the_same_with_full_attention() {
            $check(&$crate::models::stories("stories-llama"));
        }

        #[test]
        fn texts_are_the_same_with_windows() {
            $check(&$crate::models::stories("stories-gemma3"));
        }

        #[test]
        fn texts_are_the_same_with_old_rows() {
            let case = $crate::models::stories("stories-llama");
            $check(&$crate::models::with_old_rows(case));
        }

        #[test]
        fn texts_are_the_same_with_states() {
            $check(&$crate::models::stories("stories-mamba"));
        }

        #[test]
        fn texts_are_the_same_with_a_hybrid() {
            $check(&$crate::models::tiny("jamba"));
        }
    };
}

mod blocks;
mod branches;
mod draft_model;
mod drafted;
mod models;
mod prefixes;
mod requests;
mod speculation;
#[path = "../support/mod.rs"]
mod support;
mod swap;
mod swap_disk;
mod texts;
mod trace;
mod watch;
