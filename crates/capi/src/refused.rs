//! Refused functions: samplers on the backend, training.
//!
//! Invariant: each says so in a log line that names it, and returns the API's failure. Does
//! nothing.

use std::ffi::c_void;

use crate::abi::TrainingParams;
use crate::context::Context;
use crate::ffi::{Handle, c_api};
use crate::log;
use crate::model::Model;
use crate::sampler::Sampler;

fn say(name: &str, text: &str) {
    log::error(&format!("{name}: {text}"));
}

c_api! {
    fn llama_set_sampler(_context: Handle<Context>, _seq_id: i32, sampler: Handle<Sampler>)
        -> bool = false; {
        if sampler.is_null() {
            return true;
        }
        say("llama_set_sampler", "no backend samples: use llama_sampler_sample");
        false
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
