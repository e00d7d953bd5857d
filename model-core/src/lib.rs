//! GGUF, weights, tokenizer, chat templates, and the blocks that architectures share
