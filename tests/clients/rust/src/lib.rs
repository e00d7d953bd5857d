//! Tests of a client alone: see `tests/async_openai.rs`.
