//! Refused functions: adapters, control vectors, quantizing, training.
//!
//! Invariant: each says so in a log line that names it, and returns the API's failure. Does
//! nothing.

use std::ffi::{c_char, c_void};

use crate::abi::{QuantizeParams, TrainingParams};
use crate::context::Context;
use crate::ffi::{CText, Handle, In, Out, c_api};
use crate::log;
use crate::model::Model;
use crate::sampler::Sampler;

fn say(name: &str, text: &str) {
    log::error(&format!("{name}: {text}"));
}

const NO_ADAPTERS: &str = "adapters are not supported: merge the adapter into the model";

c_api! {
    fn llama_adapter_lora_init(_model: Handle<Model>, _path: CText)
        -> *mut c_void = std::ptr::null_mut(); {
        say("llama_adapter_lora_init", NO_ADAPTERS);
        std::ptr::null_mut()
    }

    fn llama_adapter_lora_init_from_file_ptr(_model: Handle<Model>, _file: *mut c_void)
        -> *mut c_void = std::ptr::null_mut(); {
        say("llama_adapter_lora_init_from_file_ptr", NO_ADAPTERS);
        std::ptr::null_mut()
    }

    fn llama_adapter_meta_val_str(
        _adapter: *const c_void, _key: CText, out: Out<c_char>, size: usize,
    ) -> i32 = -1; {
        out.write_text(size, "");
        -1
    }

    fn llama_adapter_meta_count(_adapter: *const c_void) -> i32 = 0; {
        0
    }

    fn llama_adapter_meta_key_by_index(
        _adapter: *const c_void, _index: i32, out: Out<c_char>, size: usize,
    ) -> i32 = -1; {
        out.write_text(size, "");
        -1
    }

    fn llama_adapter_meta_val_str_by_index(
        _adapter: *const c_void, _index: i32, out: Out<c_char>, size: usize,
    ) -> i32 = -1; {
        out.write_text(size, "");
        -1
    }

    fn llama_adapter_lora_free(_adapter: *mut c_void); {}

    fn llama_adapter_get_alora_n_invocation_tokens(_adapter: *const c_void) -> u64 = 0; {
        0
    }

    fn llama_adapter_get_alora_invocation_tokens(_adapter: *const c_void)
        -> *const i32 = std::ptr::null(); {
        std::ptr::null()
    }

    fn llama_set_adapters_lora(
        _context: Handle<Context>, _adapters: *const *mut c_void, n: usize, _scales: In<f32>,
    ) -> i32 = -1; {
        // None are what a context has.
        if n == 0 {
            return 0;
        }
        say("llama_set_adapters_lora", NO_ADAPTERS);
        -1
    }

    fn llama_set_adapter_cvec(
        _context: Handle<Context>, data: In<f32>, _n: usize, _n_embd: i32, _first: i32, _last: i32,
    ) -> i32 = -1; {
        if data.is_null() {
            return 0;
        }
        say("llama_set_adapter_cvec", "control vectors are not supported");
        -1
    }

    fn llama_set_sampler(_context: Handle<Context>, _seq_id: i32, sampler: Handle<Sampler>)
        -> bool = false; {
        if sampler.is_null() {
            return true;
        }
        say("llama_set_sampler", "no backend samples: use llama_sampler_sample");
        false
    }

    fn llama_model_quantize(_from: CText, _to: CText, _params: In<QuantizeParams>) -> u32 = 1; {
        say("llama_model_quantize", "use `cellar convert`, which quantizes");
        1
    }

    fn llama_opt_param_filter_all(_tensor: *const c_void, _user_data: *mut c_void) -> bool = true; {
        true
    }

    fn llama_opt_init(_context: Handle<Context>, _model: Handle<Model>, _params: TrainingParams); {
        say("llama_opt_init", "models are not trained here");
    }

    fn llama_opt_epoch(
        _context: Handle<Context>, _dataset: *mut c_void, _result_train: *mut c_void,
        _result_eval: *mut c_void, _idata_split: i64, _callback_train: *const c_void,
        _callback_eval: *const c_void,
    ); {
        say("llama_opt_epoch", "models are not trained here");
    }
}
