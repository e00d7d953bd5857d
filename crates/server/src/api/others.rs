//! [`OTHERS`]: addresses that other servers have, for what this one has at its usual address or in
//! another form.
//!
//! Invariant: an address that is here is in no other list.

use super::openapi::fields;
use super::{Endpoint, GET, endpoint, llama, lm_studio, openai, post_endpoint, rerank, tei};

/// The endpoints.
pub(super) const OTHERS: [Endpoint; 22] = [
    post_endpoint(
        "/chat/completions",
        "as /v1/chat/completions (llama-server)",
        openai::chat::route,
        fields::sampled(fields::CHAT).limited(&[&openai::chat::LIMITED, &openai::LIMITED]),
    ),
    post_endpoint(
        "/completions",
        "as /completion (llama-server)",
        llama::completion::route,
        fields::sampled(fields::COMPLETION).limited(&[&llama::completion::LIMITED]),
    ),
    post_endpoint(
        "/responses",
        "as /v1/responses (llama-server)",
        openai::responses::create,
        fields::sampled(fields::RESPONSES)
            .limited(&[&openai::responses::LIMITED, &openai::LIMITED]),
    ),
    post_endpoint(
        "/embeddings",
        "vectors of texts (llama-server)",
        llama::embeddings::route,
        fields::body(fields::LLAMA_EMBEDDINGS).limited(&[&llama::embeddings::LIMITED]),
    ),
    post_endpoint(
        "/embedding",
        "as /embeddings (llama-server)",
        llama::embeddings::route,
        fields::body(fields::LLAMA_EMBEDDINGS).limited(&[&llama::embeddings::LIMITED]),
    ),
    post_endpoint(
        "/embed",
        "vectors of texts (text-embeddings-inference)",
        tei::embed,
        fields::body(fields::TEI_EMBED).limited(&[&tei::LIMITED]),
    ),
    post_endpoint(
        "/rerank",
        "scores texts (text-embeddings-inference), or as /v1/rerank",
        rerank::tei_or_jina,
        fields::body(fields::TEI_RERANK).limited(&[&rerank::TEI_LIMITED]),
    ),
    post_endpoint(
        "/reranking",
        "as /v1/rerank (llama-server)",
        rerank::jina,
        fields::body(fields::RERANK),
    ),
    post_endpoint(
        "/v1/reranking",
        "as /v1/rerank (llama-server)",
        rerank::jina,
        fields::body(fields::RERANK),
    ),
    post_endpoint(
        "/v2/rerank",
        "scores documents (Cohere)",
        rerank::cohere,
        fields::body(fields::RERANK).limited(&[&rerank::COHERE_LIMITED]),
    ),
    post_endpoint(
        "/v1/score",
        "scores pairs of texts (vLLM)",
        rerank::score,
        fields::body(fields::SCORE),
    ),
    post_endpoint(
        "/score",
        "as /v1/score (vLLM)",
        rerank::score,
        fields::body(fields::SCORE),
    ),
    endpoint(
        GET,
        "/lora-adapters",
        "the adapters with their scales (llama-server)",
        llama::adapters::list,
    ),
    post_endpoint(
        "/lora-adapters",
        "sets the scales of adapters (llama-server)",
        llama::adapters::set,
        fields::list(fields::ADAPTERS),
    ),
    post_endpoint(
        "/slots/{id}",
        "cached prefixes to a file and back (llama-server)",
        llama::slots::change,
        fields::body(fields::SLOT),
    ),
    endpoint(
        GET,
        "/v1/health",
        "as /health (llama-server)",
        llama::status::health,
    ),
    endpoint(
        GET,
        "/api/v0/models",
        "the models (LM Studio)",
        lm_studio::list_v0,
    ),
    endpoint(
        GET,
        "/api/v0/models/{*id}",
        "one model (LM Studio)",
        lm_studio::one_v0,
    ),
    post_endpoint(
        "/api/v0/chat/completions",
        "as /v1/chat/completions (LM Studio)",
        openai::chat::route,
        fields::sampled(fields::CHAT).limited(&[&openai::chat::LIMITED, &openai::LIMITED]),
    ),
    post_endpoint(
        "/api/v0/completions",
        "as /v1/completions (LM Studio)",
        openai::completions::route,
        fields::sampled(fields::COMPLETIONS).limited(&[&openai::LIMITED]),
    ),
    post_endpoint(
        "/api/v0/embeddings",
        "as /v1/embeddings (LM Studio)",
        openai::embeddings::embeddings,
        fields::body(fields::EMBEDDINGS).limited(&[&openai::embeddings::LIMITED]),
    ),
    endpoint(
        GET,
        "/api/v1/models",
        "the models (LM Studio)",
        lm_studio::list_v1,
    ),
];
