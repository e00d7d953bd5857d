//! The Llama family as data over the shared decoder block
