//! Default parameters, and what the library says of itself.
//!
//! Invariant: the defaults are llama.cpp's. Holds no state.

use std::ffi::{c_char, c_void};

use crate::abi::{ChainParams, ContextParams, ModelParams, QuantizeParams, ggml_type, pooling};
use crate::context::MAX_SEQ;
use crate::ffi::{CText, Handle, Out, c_api};
use crate::log;

const MODEL: ModelParams = ModelParams {
    devices: std::ptr::null(),
    tensor_buft_overrides: std::ptr::null(),
    n_gpu_layers: -1,
    split_mode: 1,
    load_mode: -1,
    lazy_mode: 1,
    main_gpu: 0,
    tensor_split: std::ptr::null(),
    progress_callback: None,
    progress_callback_user_data: std::ptr::null_mut(),
    kv_overrides: std::ptr::null(),
    vocab_only: false,
    check_tensors: false,
    use_extra_bufts: true,
    no_host: false,
    no_alloc: false,
    load_mtp: false,
};

const CONTEXT: ContextParams = ContextParams {
    n_ctx: 512,
    n_batch: 2048,
    n_ubatch: 512,
    n_seq_max: 1,
    n_rs_seq: 0,
    n_outputs_max: 0,
    n_outputs_max_per_seq: 1,
    n_threads: 4,
    n_threads_batch: 4,
    ctx_type: 0,
    rope_scaling_type: -1,
    pooling_type: pooling::UNSPECIFIED,
    attention_type: -1,
    flash_attn_type: -1,
    rope_freq_base: 0.0,
    rope_freq_scale: 0.0,
    yarn_ext_factor: -1.0,
    yarn_attn_factor: -1.0,
    yarn_beta_fast: -1.0,
    yarn_beta_slow: -1.0,
    yarn_orig_ctx: 0,
    defrag_thold: -1.0,
    cb_eval: std::ptr::null(),
    cb_eval_user_data: std::ptr::null_mut(),
    type_k: ggml_type::F16,
    type_v: ggml_type::F16,
    abort_callback: None,
    abort_callback_data: std::ptr::null_mut(),
    embeddings: false,
    offload_kqv: true,
    no_perf: true,
    op_offload: true,
    swa_full: true,
    kv_unified: false,
    samplers: std::ptr::null(),
    n_samplers: 0,
    ctx_other: Handle::NULL,
};

const QUANTIZE: QuantizeParams = QuantizeParams {
    nthread: 0,
    ftype: 7,
    output_tensor_type: ggml_type::COUNT,
    token_embedding_type: ggml_type::COUNT,
    allow_requantize: false,
    quantize_output_tensor: true,
    only_copy: false,
    pure: false,
    keep_split: false,
    dry_run: false,
    imatrix: std::ptr::null(),
    kv_overrides: std::ptr::null(),
    tt_overrides: std::ptr::null(),
    prune_layers: std::ptr::null(),
    max_buf_size: 8 << 30,
};

const LOAD_MODES: [(i32, &std::ffi::CStr); 6] = [
    (-1, c"auto"),
    (0, c"none"),
    (1, c"mmap"),
    (2, c"mlock"),
    (3, c"mmap+mlock"),
    (4, c"dio"),
];

c_api! {
    fn llama_model_default_params() -> ModelParams = MODEL; {
        MODEL
    }

    fn llama_context_default_params() -> ContextParams = CONTEXT; {
        CONTEXT
    }

    fn llama_model_quantize_default_params() -> QuantizeParams = QUANTIZE; {
        QUANTIZE
    }

    fn llama_sampler_chain_default_params() -> ChainParams = ChainParams { no_perf: true }; {
        ChainParams { no_perf: true }
    }

    fn llama_version() -> *const c_char = std::ptr::null(); {
        c"b11434 (Cellar)".as_ptr()
    }

    fn llama_print_system_info() -> *const c_char = std::ptr::null(); {
        c"Cellar".as_ptr()
    }

    fn llama_backend_init(); {}

    fn llama_backend_free(); {}

    fn llama_numa_init(_strategy: i32); {}

    fn llama_max_devices() -> usize = 16; {
        16
    }

    fn llama_max_parallel_sequences() -> usize = 0; {
        MAX_SEQ as usize
    }

    fn llama_max_tensor_buft_overrides() -> usize = 4096; {
        4096
    }

    fn llama_supports_mmap() -> bool = true; {
        true
    }

    fn llama_supports_mlock() -> bool = false; {
        false
    }

    fn llama_supports_gpu_offload() -> bool = false; {
        cfg!(any(feature = "cuda", feature = "metal"))
    }

    fn llama_supports_rpc() -> bool = false; {
        false
    }

    fn llama_flash_attn_type_name(kind: i32) -> *const c_char = std::ptr::null(); {
        let name = match kind {
            -1 => c"auto",
            0 => c"disabled",
            1 => c"enabled",
            _ => c"unknown",
        };
        name.as_ptr()
    }

    fn llama_load_mode_name(mode: i32) -> *const c_char = std::ptr::null(); {
        let found = LOAD_MODES.iter().find(|(number, _)| *number == mode);
        found.map_or(c"unknown", |(_, name)| *name).as_ptr()
    }

    fn llama_load_mode_from_str(text: CText) -> i32 = -1; {
        let text = text.get().unwrap_or_default();
        let mut all = LOAD_MODES.iter();
        let found = all.find(|(_, name)| name.to_bytes() == text.as_bytes());
        found.map_or(-1, |(number, _)| *number)
    }

    fn llama_split_path(out: Out<c_char>, size: usize, prefix: CText, part: i32, n_parts: i32)
        -> i32 = 0; {
        let Some(prefix) = prefix.get() else {
            return 0;
        };
        // Parts are counted from 0 here and from 1 in names.
        let path = format!("{prefix}-{:05}-of-{n_parts:05}.gguf", i64::from(part) + 1);
        if path.len() >= size {
            log::error(&format!("llama_split_path: '{path}' does not fit {size} bytes"));
            return 0;
        }
        out.write_text(size, &path)
    }

    fn llama_split_prefix(out: Out<c_char>, size: usize, path: CText, part: i32, n_parts: i32)
        -> i32 = 0; {
        let ending = format!("-{:05}-of-{n_parts:05}.gguf", i64::from(part) + 1);
        match path.get().and_then(|path| path.strip_suffix(&ending)) {
            Some(prefix) if !prefix.is_empty() => out.write_text(size, prefix),
            _ => 0,
        }
    }

    fn llama_attach_threadpool(_context: Handle<crate::context::Context>, _pool: *mut c_void, _batch_pool: *mut c_void); {
        log::warn("llama_attach_threadpool: a context has threads of its own");
    }

    fn llama_detach_threadpool(_context: Handle<crate::context::Context>); {}
}
