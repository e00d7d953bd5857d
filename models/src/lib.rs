//! A Llama of 1.2 million parameters that tells children's stories, as the bytes of a GGUF file:
//! for programs and tests that must run without a download. How it was made: the package's README.

/// The GGUF file: architecture `llama`, F16, with its tokenizer.
pub static STORIES_LLAMA: &[u8] = include_bytes!("../stories-llama-f16.gguf");

/// A prompt that it continues well.
pub const PROMPT: &str = "Once upon a time";
