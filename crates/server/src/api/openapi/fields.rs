//! The fields of requests: which are done, which have no effect, and which are skipped or refused.
//! Bodies are checked by this table, and `/openapi.json` and the documentation show it.
//!
//! Invariant: a field that is done is read by its endpoint, which refuses a value of another type
//! by the name of the field (a test sends one of each).

use serde_json::{Value, json};

use crate::field_rule::FieldRule;
use crate::skips::SkipPolicy;

/// The type of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Number,
    Integer,
    Flag,
    Text,
    Texts,
    TextOrTexts,
    Tokens,
    Prompt,
    Mixed,
    Object,
    Objects,
    Messages,
    Input,
    Choice,
    Bias,
    /// Ollama's `options`.
    Options,
    Priority,
    Speculate,
    Any,
}

impl Kind {
    pub(super) fn schema(self) -> Value {
        let list = |items: Value| json!({"type": "array", "items": items});
        let (text, object) = (json!({"type": "string"}), json!({"type": "object"}));
        match self {
            Self::Number => json!({"type": "number"}),
            Self::Integer => json!({"type": "integer"}),
            Self::Flag => json!({"type": "boolean"}),
            Self::Text => text,
            Self::Texts => list(text),
            Self::TextOrTexts => json!({"oneOf": [text, list(text.clone())]}),
            Self::Tokens => list(json!({"type": "integer"})),
            Self::Prompt => json!({"oneOf": [
                text, list(text.clone()), list(json!({"type": "integer"})),
                list(list(json!({"type": "integer"}))),
            ]}),
            Self::Mixed => {
                let parts = json!({"oneOf": [{"type": "integer"}, text]});
                let nested = json!({"oneOf": [{"type": "integer"}, text, list(parts)]});
                json!({"oneOf": [text, list(nested)]})
            }
            Self::Object => object,
            Self::Objects => list(object),
            Self::Messages => list(json!({
                "type": "object",
                "required": ["role"],
                "properties": {
                    "role": {"type": "string"},
                    "content": {"oneOf": [text, list(object)]},
                },
            })),
            Self::Input => json!({"oneOf": [text, list(object)]}),
            Self::Choice => json!({"oneOf": [text, object]}),
            Self::Bias => json!({"oneOf": [
                {"type": "object", "additionalProperties": {"type": "number"}},
                list(json!({"type": "array"})),
            ]}),
            Self::Options => json!({"allOf": [
                super::object(OPTIONS.fields), {"$ref": "#/components/schemas/Sampling"},
            ]}),
            Self::Priority => json!({"oneOf": [
                {"type": "integer"},
                {"type": "string", "enum": ["interactive", "normal", "batch"]},
            ]}),
            Self::Speculate => {
                json!({"type": "string", "enum": ["auto", "off", "lookup", "draft", "head"]})
            }
            Self::Any => json!({}),
        }
    }
}

/// A field of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Field {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    pub(super) is_required: bool,
}

const fn field(name: &'static str, kind: Kind) -> Field {
    Field {
        name,
        kind,
        is_required: false,
    }
}

const fn required(name: &'static str, kind: Kind) -> Field {
    Field {
        name,
        kind,
        is_required: true,
    }
}

/// How tokens are sampled; of most endpoints.
pub(super) const SAMPLING: &[Field] = &[
    field("temperature", Kind::Number),
    field("top_p", Kind::Number),
    field("top_k", Kind::Integer),
    field("min_p", Kind::Number),
    field("top_n_sigma", Kind::Number),
    field("reasoning_budget", Kind::Integer),
    field("thinking_budget_tokens", Kind::Integer),
    field("thinking_token_budget", Kind::Integer),
    field("typical_p", Kind::Number),
    field("seed", Kind::Integer),
    field("presence_penalty", Kind::Number),
    field("frequency_penalty", Kind::Number),
    field("repeat_penalty", Kind::Number),
    field("repetition_penalty", Kind::Number),
    field("repeat_last_n", Kind::Integer),
    field("min_tokens", Kind::Integer),
    field("stop_token_ids", Kind::Tokens),
    field("include_stop_str_in_output", Kind::Flag),
    field("ignore_eos", Kind::Flag),
    field("logit_bias", Kind::Bias),
    field("dry_multiplier", Kind::Number),
    field("dry_base", Kind::Number),
    field("dry_allowed_length", Kind::Integer),
    field("dry_penalty_last_n", Kind::Integer),
    field("dry_sequence_breakers", Kind::Texts),
    field("xtc_probability", Kind::Number),
    field("xtc_threshold", Kind::Number),
    field("mirostat", Kind::Integer),
    field("mirostat_tau", Kind::Number),
    field("mirostat_eta", Kind::Number),
    field("cache_salt", Kind::Text),
    field("lora", Kind::Objects),
    field("priority", Kind::Priority),
    field("speculate", Kind::Speculate),
];

/// Fields for accounts, and hints of speed: no text depends on them.
pub(super) const WITHOUT_EFFECT: &[&str] = &[
    "betas",
    "cache_control",
    "cache_prompt",
    "client_metadata",
    "detokenize",
    "dynatemp_exponent",
    "id_slot",
    "inference_geo",
    "max_tool_calls",
    "metadata",
    "n_keep",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "provider",
    "request_id",
    "return_tokens",
    "return_tokens_as_token_ids",
    "safety_identifier",
    "service_tier",
    "speed",
    "stream_options",
    "t_max_prompt_ms",
    "store",
    "timings_per_token",
    "transforms",
    "usage",
    "user",
    "user_id",
];

/// Ollama's options. Those of loading and of the machine are the server's.
pub(in crate::api) const OPTIONS: RequestBody = RequestBody {
    without_effect: &[
        "f16_kv",
        "logits_all",
        "low_vram",
        "main_gpu",
        "num_batch",
        "num_ctx",
        "num_gpu",
        "num_keep",
        "num_thread",
        "numa",
        "use_mlock",
        "use_mmap",
        "vocab_only",
    ],
    ..sampled(&[
        field("num_predict", Kind::Integer),
        field("stop", Kind::TextOrTexts),
    ])
};

/// The treatment of a field by an endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FieldUse {
    /// It is read.
    Done,
    /// Nothing, as nothing depends on it.
    WithoutEffect,
    /// It is skipped or refused.
    Limited(FieldRule),
    /// Nothing is known of it.
    Unknown,
}

/// The fields of a request's endpoint, as the router gives them to who reads the body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestFields {
    pub(crate) body: RequestBody,
    pub(crate) policy: SkipPolicy,
}

/// The body of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestBody {
    /// The fields of its endpoint alone.
    pub(super) fields: &'static [Field],
    /// Whether it has those of [`SAMPLING`] too. Ollama has them in `options`.
    pub(super) has_sampling: bool,
    /// Those that are skipped or refused. Of two rules for a name the first one counts.
    pub(super) limited: &'static [&'static [FieldRule]],
    /// Those without effect here, besides [`WITHOUT_EFFECT`].
    without_effect: &'static [&'static str],
    /// The form in which they are written.
    pub(super) form: Form,
}

impl RequestBody {
    /// The same with fields that are skipped or refused.
    pub(in crate::api) const fn limited(self, limited: &'static [&'static [FieldRule]]) -> Self {
        Self { limited, ..self }
    }

    /// The treatment of the field of this name.
    pub(crate) fn field_use(&self, name: &str) -> FieldUse {
        let mut limited = self.limited_fields();
        let sampling = SAMPLING.iter().filter(|_| self.has_sampling);
        let mut done = self.fields.iter().chain(sampling);
        if done.any(|field| field.name == name) {
            FieldUse::Done
        } else if let Some(limited) = limited.find(|limited| limited.name == name) {
            FieldUse::Limited(*limited)
        } else if WITHOUT_EFFECT.contains(&name) || self.without_effect.contains(&name) {
            FieldUse::WithoutEffect
        } else {
            FieldUse::Unknown
        }
    }

    /// The fields that are skipped or refused.
    pub(super) fn limited_fields(&self) -> impl Iterator<Item = &'static FieldRule> {
        self.limited.iter().copied().flatten()
    }
}

/// The form of the fields of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// As a JSON object.
    Object,
    /// As a JSON list of objects.
    List,
    /// As the parts of a form.
    Multipart,
}

/// A body with these fields.
pub(in crate::api) const fn body(fields: &'static [Field]) -> RequestBody {
    RequestBody {
        fields,
        has_sampling: false,
        limited: &[],
        without_effect: &[],
        form: Form::Object,
    }
}

/// A list of bodies with these fields.
pub(in crate::api) const fn list(fields: &'static [Field]) -> RequestBody {
    RequestBody {
        form: Form::List,
        ..body(fields)
    }
}

/// A form with these fields.
pub(in crate::api) const fn form(fields: &'static [Field]) -> RequestBody {
    RequestBody {
        form: Form::Multipart,
        ..body(fields)
    }
}

/// A body with these fields and those of [`SAMPLING`].
pub(in crate::api) const fn sampled(fields: &'static [Field]) -> RequestBody {
    RequestBody {
        has_sampling: true,
        ..body(fields)
    }
}

pub(in crate::api) const CHAT: &[Field] = &[
    field("model", Kind::Text),
    required("messages", Kind::Messages),
    field("max_tokens", Kind::Integer),
    field("max_completion_tokens", Kind::Integer),
    field("stream", Kind::Flag),
    field("stream_options", Kind::Object),
    field("stop", Kind::TextOrTexts),
    field("n", Kind::Integer),
    field("logprobs", Kind::Flag),
    field("top_logprobs", Kind::Integer),
    field("response_format", Kind::Object),
    field("guided_json", Kind::Any),
    field("guided_regex", Kind::Text),
    field("guided_choice", Kind::Texts),
    field("guided_grammar", Kind::Text),
    field("structured_outputs", Kind::Object),
    field("json_schema", Kind::Any),
    field("grammar", Kind::Text),
    field("tools", Kind::Objects),
    field("tool_choice", Kind::Choice),
    field("parallel_tool_calls", Kind::Flag),
    field("reasoning_effort", Kind::Text),
    field("chat_template_kwargs", Kind::Object),
    field("continue_final_message", Kind::Flag),
    field("add_generation_prompt", Kind::Flag),
    field("return_progress", Kind::Flag),
    field("kv_transfer_params", Kind::Object),
];

pub(in crate::api) const COMPLETIONS: &[Field] = &[
    field("model", Kind::Text),
    required("prompt", Kind::Prompt),
    field("suffix", Kind::Text),
    field("echo", Kind::Flag),
    field("max_tokens", Kind::Integer),
    field("stream", Kind::Flag),
    field("stream_options", Kind::Object),
    field("stop", Kind::TextOrTexts),
    field("n", Kind::Integer),
    field("best_of", Kind::Integer),
    field("logprobs", Kind::Integer),
    field("response_format", Kind::Object),
    field("guided_json", Kind::Any),
    field("guided_regex", Kind::Text),
    field("guided_choice", Kind::Texts),
    field("guided_grammar", Kind::Text),
    field("structured_outputs", Kind::Object),
    field("json_schema", Kind::Any),
    field("grammar", Kind::Text),
    field("kv_transfer_params", Kind::Object),
];

pub(in crate::api) const RESPONSES: &[Field] = &[
    field("model", Kind::Text),
    required("input", Kind::Input),
    field("instructions", Kind::Text),
    field("previous_response_id", Kind::Text),
    field("store", Kind::Flag),
    field("stream", Kind::Flag),
    field("max_output_tokens", Kind::Integer),
    field("stop", Kind::TextOrTexts),
    field("top_logprobs", Kind::Integer),
    field("include", Kind::Texts),
    field("reasoning", Kind::Object),
    field("text", Kind::Object),
    field("tools", Kind::Objects),
    field("tool_choice", Kind::Choice),
    field("parallel_tool_calls", Kind::Flag),
    field("metadata", Kind::Object),
    field("chat_template_kwargs", Kind::Object),
];

pub(in crate::api) const EMBEDDINGS: &[Field] = &[
    field("model", Kind::Text),
    required("input", Kind::Prompt),
    field("encoding_format", Kind::Text),
    field("dimensions", Kind::Integer),
];

pub(in crate::api) const LLAMA_EMBEDDINGS: &[Field] = &[
    field("model", Kind::Text),
    required("input", Kind::Prompt),
    field("dimensions", Kind::Integer),
];

pub(in crate::api) const TEI_EMBED: &[Field] = &[
    field("model", Kind::Text),
    required("inputs", Kind::Prompt),
    field("truncate", Kind::Flag),
    field("dimensions", Kind::Integer),
];

pub(in crate::api) const TEI_RERANK: &[Field] = &[
    field("model", Kind::Text),
    required("query", Kind::Text),
    field("texts", Kind::Texts),
    field("top_n", Kind::Integer),
    field("raw_scores", Kind::Flag),
    field("return_text", Kind::Flag),
    field("truncate", Kind::Flag),
    field("documents", Kind::Texts),
    field("return_documents", Kind::Flag),
];

pub(in crate::api) const SCORE: &[Field] = &[
    field("model", Kind::Text),
    required("text_1", Kind::TextOrTexts),
    required("text_2", Kind::TextOrTexts),
];

pub(in crate::api) const SLOT: &[Field] =
    &[field("filename", Kind::Text), field("model", Kind::Text)];

pub(in crate::api) const FILE: &[Field] =
    &[required("file", Kind::Text), field("purpose", Kind::Text)];

pub(in crate::api) const BATCH: &[Field] = &[
    required("input_file_id", Kind::Text),
    required("endpoint", Kind::Text),
    field("completion_window", Kind::Text),
    field("metadata", Kind::Object),
];

pub(in crate::api) const ADAPTERS: &[Field] = &[
    required("id", Kind::Integer),
    required("scale", Kind::Number),
];

pub(in crate::api) const RERANK: &[Field] = &[
    field("model", Kind::Text),
    required("query", Kind::Text),
    required("documents", Kind::Texts),
    field("top_n", Kind::Integer),
    field("return_documents", Kind::Flag),
];

pub(in crate::api) const MESSAGES: &[Field] = &[
    field("model", Kind::Text),
    required("messages", Kind::Messages),
    field("system", Kind::Input),
    field("max_tokens", Kind::Integer),
    field("stop_sequences", Kind::Texts),
    field("stream", Kind::Flag),
    field("thinking", Kind::Object),
    field("output_config", Kind::Object),
    field("output_format", Kind::Object),
    field("tools", Kind::Objects),
    field("tool_choice", Kind::Object),
];

pub(in crate::api) const COMPLETION: &[Field] = &[
    field("model", Kind::Text),
    required("prompt", Kind::Mixed),
    field("fork_of", Kind::Text),
    field("n_predict", Kind::Integer),
    field("max_tokens", Kind::Integer),
    field("stream", Kind::Flag),
    field("stop", Kind::TextOrTexts),
    field("return_tokens", Kind::Flag),
    field("return_progress", Kind::Flag),
    field("response_format", Kind::Object),
    field("guided_json", Kind::Any),
    field("guided_regex", Kind::Text),
    field("guided_choice", Kind::Texts),
    field("guided_grammar", Kind::Text),
    field("structured_outputs", Kind::Object),
    field("json_schema", Kind::Any),
    field("grammar", Kind::Text),
    field("n_probs", Kind::Integer),
    field("t_max_predict_ms", Kind::Integer),
    field("response_fields", Kind::Texts),
];

pub(in crate::api) const INFILL: &[Field] = &[
    field("model", Kind::Text),
    required("input_prefix", Kind::Text),
    required("input_suffix", Kind::Text),
    field("input_extra", Kind::Objects),
    field("prompt", Kind::Text),
    field("n_predict", Kind::Integer),
    field("max_tokens", Kind::Integer),
    field("stream", Kind::Flag),
    field("stop", Kind::TextOrTexts),
    field("return_tokens", Kind::Flag),
    field("response_format", Kind::Object),
    field("guided_json", Kind::Any),
    field("guided_regex", Kind::Text),
    field("guided_choice", Kind::Texts),
    field("guided_grammar", Kind::Text),
    field("structured_outputs", Kind::Object),
    field("json_schema", Kind::Any),
    field("grammar", Kind::Text),
    field("n_probs", Kind::Integer),
    field("t_max_predict_ms", Kind::Integer),
    field("response_fields", Kind::Texts),
];

pub(in crate::api) const TOKENIZE: &[Field] = &[
    field("model", Kind::Text),
    field("content", Kind::Text),
    field("add_special", Kind::Flag),
    field("parse_special", Kind::Flag),
    field("with_pieces", Kind::Flag),
    field("prompt", Kind::Text),
    field("add_special_tokens", Kind::Flag),
    field("return_token_strs", Kind::Flag),
    field("messages", Kind::Messages),
    field("tools", Kind::Objects),
    field("chat_template_kwargs", Kind::Object),
    field("continue_final_message", Kind::Flag),
    field("add_generation_prompt", Kind::Flag),
];

pub(in crate::api) const DETOKENIZE: &[Field] =
    &[field("model", Kind::Text), required("tokens", Kind::Tokens)];

pub(in crate::api) const LOAD: &[Field] = &[
    required("model", Kind::Text),
    field("keep_alive", Kind::Any),
];

pub(in crate::api) const UNLOAD: &[Field] = &[required("model", Kind::Text)];

pub(in crate::api) const TEMPLATE: &[Field] = &[
    field("model", Kind::Text),
    required("messages", Kind::Messages),
    field("tools", Kind::Objects),
    field("tool_choice", Kind::Choice),
    field("chat_template_kwargs", Kind::Object),
];

pub(in crate::api) const OLLAMA_CHAT: &[Field] = &[
    required("model", Kind::Text),
    field("messages", Kind::Messages),
    field("tools", Kind::Objects),
    field("tool_choice", Kind::Choice),
    field("parallel_tool_calls", Kind::Flag),
    field("format", Kind::Choice),
    field("options", Kind::Options),
    field("stream", Kind::Flag),
    field("think", Kind::Any),
    field("keep_alive", Kind::Any),
    field("logprobs", Kind::Flag),
    field("top_logprobs", Kind::Integer),
];

pub(in crate::api) const OLLAMA_GENERATE: &[Field] = &[
    required("model", Kind::Text),
    field("prompt", Kind::Text),
    field("suffix", Kind::Text),
    field("system", Kind::Text),
    field("images", Kind::Texts),
    field("raw", Kind::Flag),
    field("format", Kind::Choice),
    field("options", Kind::Options),
    field("stream", Kind::Flag),
    field("think", Kind::Any),
    field("keep_alive", Kind::Any),
    field("logprobs", Kind::Flag),
    field("top_logprobs", Kind::Integer),
];

pub(in crate::api) const OLLAMA_EMBED: &[Field] = &[
    required("model", Kind::Text),
    required("input", Kind::TextOrTexts),
    field("truncate", Kind::Flag),
    field("dimensions", Kind::Integer),
    field("options", Kind::Any),
    field("keep_alive", Kind::Any),
];

pub(in crate::api) const OLLAMA_EMBEDDINGS: &[Field] = &[
    required("model", Kind::Text),
    required("prompt", Kind::Text),
    field("keep_alive", Kind::Any),
    field("options", Kind::Any),
];

pub(in crate::api) const OLLAMA_SHOW: &[Field] = &[
    field("model", Kind::Text),
    field("name", Kind::Text),
    field("verbose", Kind::Any),
];
