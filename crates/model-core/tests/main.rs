//! Tests of the crate, as one: a test program takes longer to link than most tests to run.
//! `gguf_hostile` is apart, as it counts what its process allocates.

mod chat_template;
mod gguf;
mod hf_tokenizer;
mod pre_tokenizers;
mod rwkv_tokenizer;
mod tokenizer;
mod tokenizer_data;
