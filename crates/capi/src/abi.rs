//! The structures of llama.cpp's C API (b11434), laid out as C does.
//!
//! Invariant: sizes, offsets and numbers are those of `llama.h`: `tests/layout.rs` compares them
//! with a table that a C compiler made, and with the header itself where there is one. Holds no
//! behaviour.

use std::ffi::{c_char, c_void};

use crate::context::Context;
use crate::ffi::Handle;
use crate::sampler::Sampler;

/// A callback that is told how far loading is; false ends it.
pub(crate) type ProgressCallback = Option<unsafe extern "C" fn(f32, *mut c_void) -> bool>;
/// A callback that is asked between layers; true ends the computation.
pub(crate) type AbortCallback = Option<unsafe extern "C" fn(*mut c_void) -> bool>;
/// A callback that is given log lines.
pub(crate) type LogCallback = Option<unsafe extern "C" fn(i32, *const c_char, *mut c_void)>;

/// `llama_token_data`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct TokenData {
    pub(crate) id: i32,
    pub(crate) logit: f32,
    pub(crate) p: f32,
}

/// `llama_token_data_array`.
#[repr(C)]
#[derive(Debug)]
pub(crate) struct TokenDataArray {
    pub(crate) data: *mut TokenData,
    pub(crate) size: usize,
    pub(crate) selected: i64,
    pub(crate) sorted: bool,
}

/// `llama_batch`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchArrays {
    pub(crate) n_tokens: i32,
    pub(crate) token: *mut i32,
    pub(crate) embd: *mut f32,
    pub(crate) pos: *mut i32,
    pub(crate) n_seq_id: *mut i32,
    pub(crate) seq_id: *mut *mut i32,
    pub(crate) logits: *mut i8,
}

/// `llama_model_kv_override`: the union is 128 bytes that begin at a multiple of 8.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct KvOverride {
    pub(crate) tag: i32,
    pub(crate) key: [c_char; 128],
    pub(crate) value: OverrideValue,
}

/// The value of a [`KvOverride`].
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(crate) struct OverrideValue(pub(crate) [u8; 128]);

/// `llama_model_tensor_buft_override`.
#[repr(C)]
pub(crate) struct BufferTypeOverride {
    pub(crate) pattern: *const c_char,
    pub(crate) buft: *const c_void,
}

/// `llama_model_params`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ModelParams {
    pub(crate) devices: *const *const c_void,
    pub(crate) tensor_buft_overrides: *const BufferTypeOverride,
    pub(crate) n_gpu_layers: i32,
    pub(crate) split_mode: i32,
    pub(crate) load_mode: i32,
    pub(crate) lazy_mode: i32,
    pub(crate) main_gpu: i32,
    pub(crate) tensor_split: *const f32,
    pub(crate) progress_callback: ProgressCallback,
    pub(crate) progress_callback_user_data: *mut c_void,
    pub(crate) kv_overrides: *const KvOverride,
    pub(crate) vocab_only: bool,
    pub(crate) check_tensors: bool,
    pub(crate) use_extra_bufts: bool,
    pub(crate) no_host: bool,
    pub(crate) no_alloc: bool,
    pub(crate) load_mtp: bool,
}

/// `llama_sampler_seq_config`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct SeqSampler {
    pub(crate) seq_id: i32,
    pub(crate) sampler: Handle<Sampler>,
}

/// `llama_context_params`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct ContextParams {
    pub(crate) n_ctx: u32,
    pub(crate) n_batch: u32,
    pub(crate) n_ubatch: u32,
    pub(crate) n_seq_max: u32,
    pub(crate) n_rs_seq: u32,
    pub(crate) n_outputs_max: u32,
    pub(crate) n_outputs_max_per_seq: u32,
    pub(crate) n_threads: i32,
    pub(crate) n_threads_batch: i32,
    pub(crate) ctx_type: i32,
    pub(crate) rope_scaling_type: i32,
    pub(crate) pooling_type: i32,
    pub(crate) attention_type: i32,
    pub(crate) flash_attn_type: i32,
    pub(crate) rope_freq_base: f32,
    pub(crate) rope_freq_scale: f32,
    pub(crate) yarn_ext_factor: f32,
    pub(crate) yarn_attn_factor: f32,
    pub(crate) yarn_beta_fast: f32,
    pub(crate) yarn_beta_slow: f32,
    pub(crate) yarn_orig_ctx: u32,
    pub(crate) defrag_thold: f32,
    pub(crate) cb_eval: *const c_void,
    pub(crate) cb_eval_user_data: *mut c_void,
    pub(crate) type_k: i32,
    pub(crate) type_v: i32,
    pub(crate) abort_callback: AbortCallback,
    pub(crate) abort_callback_data: *mut c_void,
    pub(crate) embeddings: bool,
    pub(crate) offload_kqv: bool,
    pub(crate) no_perf: bool,
    pub(crate) op_offload: bool,
    pub(crate) swa_full: bool,
    pub(crate) kv_unified: bool,
    pub(crate) samplers: *const SeqSampler,
    pub(crate) n_samplers: usize,
    pub(crate) ctx_other: Handle<Context>,
}

/// `llama_model_tensor_override`.
#[repr(C)]
pub(crate) struct TensorOverride {
    pub(crate) pattern: *const c_char,
    pub(crate) kind: i32,
}

/// `llama_model_imatrix_data`.
#[repr(C)]
pub(crate) struct ImatrixData {
    pub(crate) name: *const c_char,
    pub(crate) data: *const f32,
    pub(crate) size: usize,
}

/// `llama_model_quantize_params`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct QuantizeParams {
    pub(crate) nthread: i32,
    pub(crate) ftype: i32,
    pub(crate) output_tensor_type: i32,
    pub(crate) token_embedding_type: i32,
    pub(crate) allow_requantize: bool,
    pub(crate) quantize_output_tensor: bool,
    pub(crate) only_copy: bool,
    pub(crate) pure: bool,
    pub(crate) keep_split: bool,
    pub(crate) dry_run: bool,
    pub(crate) imatrix: *const ImatrixData,
    pub(crate) kv_overrides: *const KvOverride,
    pub(crate) tt_overrides: *const TensorOverride,
    pub(crate) prune_layers: *const i32,
    pub(crate) max_buf_size: usize,
}

/// `llama_logit_bias`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TokenBias {
    pub(crate) token: i32,
    pub(crate) bias: f32,
}

/// `llama_sampler_chain_params`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChainParams {
    pub(crate) no_perf: bool,
}

/// `llama_chat_message`.
#[repr(C)]
pub(crate) struct Message {
    pub(crate) role: *const c_char,
    pub(crate) content: *const c_char,
}

/// `llama_embd`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct EmbeddingRows {
    pub(crate) data: *const f32,
    pub(crate) n_rows: usize,
    pub(crate) n_embd: usize,
}

/// `llama_perf_context_data`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ContextPerf {
    pub(crate) t_start_ms: f64,
    pub(crate) t_load_ms: f64,
    pub(crate) t_p_eval_ms: f64,
    pub(crate) t_eval_ms: f64,
    pub(crate) n_p_eval: i32,
    pub(crate) n_eval: i32,
    pub(crate) n_reused: i32,
}

/// `llama_perf_sampler_data`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SamplerPerf {
    pub(crate) t_sample_ms: f64,
    pub(crate) n_sample: i32,
}

/// `llama_opt_params`, of which no field is read: nothing is trained.
#[repr(C)]
pub(crate) struct TrainingParams {
    pub(crate) n_ctx_train: u32,
    pub(crate) param_filter: *const c_void,
    pub(crate) param_filter_ud: *mut c_void,
    pub(crate) get_opt_pars: *const c_void,
    pub(crate) get_opt_pars_ud: *mut c_void,
    pub(crate) optimizer_type: i32,
}

/// `LLAMA_TOKEN_NULL`: no token.
pub(crate) const NO_TOKEN: i32 = -1;
/// `LLAMA_DEFAULT_SEED`: a random seed.
pub(crate) const DEFAULT_SEED: u32 = u32::MAX;

/// `llama_pooling_type`.
pub(crate) mod pooling {
    pub(crate) const UNSPECIFIED: i32 = -1;
    pub(crate) const NONE: i32 = 0;
    pub(crate) const MEAN: i32 = 1;
    pub(crate) const CLS: i32 = 2;
    pub(crate) const LAST: i32 = 3;
    pub(crate) const RANK: i32 = 4;
}

/// `llama_vocab_type`.
pub(crate) mod vocab_type {
    pub(crate) const NONE: i32 = 0;
    pub(crate) const SPM: i32 = 1;
    pub(crate) const BPE: i32 = 2;
    pub(crate) const WPM: i32 = 3;
    pub(crate) const UGM: i32 = 4;
    pub(crate) const RWKV: i32 = 5;
}

/// `llama_token_attr`.
pub(crate) mod attr {
    pub(crate) const UNDEFINED: i32 = 0;
    pub(crate) const UNKNOWN: i32 = 1;
    pub(crate) const UNUSED: i32 = 2;
    pub(crate) const NORMAL: i32 = 4;
    pub(crate) const CONTROL: i32 = 8;
    pub(crate) const USER_DEFINED: i32 = 16;
    pub(crate) const BYTE: i32 = 32;
}

/// `ggml_type`, those that keys and values can have.
pub(crate) mod ggml_type {
    use kv_rows::KvType;

    pub(crate) const F16: i32 = 1;
    /// Their number: no type.
    pub(crate) const COUNT: i32 = 43;

    /// The type of rows with this number.
    pub(crate) fn kv_type(number: i32) -> Option<KvType> {
        Some(match number {
            0 => KvType::F32,
            F16 => KvType::F16,
            2 => KvType::Q4_0,
            3 => KvType::Q4_1,
            6 => KvType::Q5_0,
            7 => KvType::Q5_1,
            8 => KvType::Q8_0,
            20 => KvType::IQ4_NL,
            30 => KvType::BF16,
            _ => return None,
        })
    }
}
