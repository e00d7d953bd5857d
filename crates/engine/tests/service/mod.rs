//! A service gives each request the text that it has alone, and frees what it took.

#![allow(clippy::unwrap_used, clippy::panic)] // a panic is how a test fails

/// A test for each kind of memory, with `$check` of a [`Case`].
macro_rules! for_each_memory {
    ($check:path) => {
        #[test]
        fn texts_are_the_same_with_full_attention() {
            $check(&$crate::service::models::stories("stories-llama"));
        }

        #[test]
        fn texts_are_the_same_with_windows() {
            $check(&$crate::service::models::stories("stories-gemma3"));
        }

        #[test]
        fn texts_are_the_same_with_old_rows() {
            let case = $crate::service::models::stories("stories-llama");
            $check(&$crate::service::models::with_old_rows(case));
        }

        #[test]
        fn texts_are_the_same_with_states() {
            $check(&$crate::service::models::stories("stories-mamba"));
        }

        #[test]
        fn texts_are_the_same_with_a_hybrid() {
            $check(&$crate::service::models::tiny("jamba"));
        }
    };
}

mod blocks;
mod draft_model;
mod draft_speed;
mod drafted;
mod each_call;
mod fleet;
mod heads;
pub(crate) mod models;
mod not_a_number;
mod prefixes;
mod requests;
mod session;
mod speculation;
mod stored;
mod swap;
mod swap_disk;
mod texts;
mod trace;
mod watch;
