//! Null pointers, freed objects, objects of another kind, foreign numbers: each is an answer and a
//! log line.

use std::ffi::{CStr, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use super::scene::{LoadedModel, Scene, Text};
use crate::abi::TokenDataArray;
use crate::batch::{llama_batch_ext_add, llama_batch_ext_free, llama_batch_free, llama_batch_init};
use crate::context::{
    Context, llama_free, llama_get_memory, llama_get_model, llama_init_from_model, llama_n_ctx,
};
use crate::decode::{llama_decode, llama_encode, llama_process};
use crate::defaults::{llama_context_default_params, llama_model_default_params};
use crate::ffi::{CText, Handle, In, Out};
use crate::log::llama_log_set;
use crate::memory::{llama_memory_seq_cp, llama_memory_seq_pos_max, llama_memory_seq_rm};
use crate::meta::{llama_model_desc, llama_model_n_embd};
use crate::model::{Model, llama_model_free, llama_model_load_from_file};
use crate::output::{llama_get_embeddings_seq, llama_get_logits_ith};
use crate::sampler::{llama_sampler_apply, llama_sampler_free, llama_sampler_sample};
use crate::state::{llama_state_get_size, llama_state_set_data};
use crate::vocab::llama_tokenize;

#[test]
fn null_is_an_answer_everywhere() {
    let (model, context) = (Handle::<Model>::NULL, Handle::<Context>::NULL);
    let text = CText::of(std::ptr::null());
    let model_params = llama_model_default_params();
    assert!(llama_model_load_from_file(text, model_params).is_null());
    assert!(llama_init_from_model(model, llama_context_default_params()).is_null());
    assert_eq!(llama_model_n_embd(model), 0);
    assert_eq!(
        llama_model_desc(model, Out::of(std::ptr::null_mut()), 0),
        -1
    );
    assert_eq!(llama_n_ctx(context), 0);
    assert!(llama_get_model(context).is_null() && llama_get_memory(context).is_null());
    assert!(
        llama_memory_seq_rm(context, 0, -1, -1),
        "a model without a memory"
    );
    assert_eq!(llama_memory_seq_pos_max(context, 0), -1);
    let batch = llama_batch_init(-5, -5, -5);
    assert_eq!(
        [llama_decode(context, batch), llama_encode(context, batch)],
        [-1, -1]
    );
    llama_batch_free(batch);
    assert!(
        llama_batch_init(i32::MAX, 0, 5).token.is_null(),
        "too large"
    );
    assert_eq!(llama_process(context, 7, Handle::NULL), -1);
    assert!(llama_get_logits_ith(context, 0).is_null());
    assert!(llama_get_embeddings_seq(context, 0).is_null());
    assert_eq!(llama_state_get_size(context), 0);
    assert_eq!(llama_sampler_sample(Handle::NULL, context, 0), -1);
    llama_sampler_apply(
        Handle::NULL,
        Out::of(std::ptr::null_mut::<TokenDataArray>()),
    );
    let none = Out::of(std::ptr::null_mut());
    assert_eq!(
        llama_tokenize(model, In::of(std::ptr::null()), 9, none, 9, true, true),
        0
    );
    llama_free(context);
    llama_model_free(model);
    llama_sampler_free(Handle::NULL);
    llama_batch_ext_free(Handle::NULL);
}

#[test]
fn what_was_freed_or_is_another_kind_is_nothing() {
    let scene = Scene::new(|_| ());
    let context = scene.model.context(|_| ());
    llama_free(context);
    llama_free(context);
    assert_eq!(llama_n_ctx(context), 0);
    assert_eq!(llama_memory_seq_pos_max(context, 0), -1);
    let as_model = Handle::<Model>::of(scene.context.as_ptr().cast());
    assert_eq!(llama_model_n_embd(as_model), 0);
    llama_model_free(as_model);
    assert_eq!(llama_n_ctx(scene.context), 512);
    let as_batch = Handle::of(scene.context.as_ptr().cast());
    assert_eq!(llama_batch_ext_add(as_batch, 0), -1);
}

#[test]
fn numbers_out_of_range_are_refused() {
    let model = LoadedModel::new();
    let refused = |change: fn(&mut crate::abi::ContextParams)| model.context(change).is_null();
    assert!(refused(|p| p.n_seq_max = 300));
    assert!(refused(|p| p.type_k = 12));
    assert!(refused(|p| p.type_v = -1));
    assert!(refused(|p| (p.type_v, p.flash_attn_type) = (8, 0)));
    assert!(refused(|p| p.pooling_type = 9));
    assert!(refused(|p| p.rope_scaling_type = 9));
    assert!(refused(|p| p.ctx_type = 1));
    assert!(refused(|p| (p.n_batch, p.n_ubatch) = (0, 0)));
    assert!(refused(|p| p.n_ctx = u32::MAX));
    assert!(
        refused(|p| p.n_ctx = 1 << 30),
        "more than there is memory for"
    );
    let scene = Scene {
        context: model.context(|_| ()),
        model,
    };
    llama_memory_seq_cp(scene.context, 0, i32::MAX, -1, -1);
    llama_memory_seq_cp(scene.context, i32::MIN, 0, -1, -1);
    let bytes = [7_u8; 64];
    assert_eq!(
        llama_state_set_data(scene.context, In::of(bytes.as_ptr()), 64),
        0
    );
    assert!(llama_get_logits_ith(scene.context, i32::MIN).is_null());
}

static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

extern "C" fn keep(_level: i32, text: *const c_char, _data: *mut c_void) {
    // SAFETY: the library gives a text with a NUL behind it.
    let text = unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned();
    LINES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .push(text);
}

#[test]
fn a_program_gets_the_reasons() {
    llama_log_set(Some(keep), std::ptr::null_mut());
    let path = Text::new("/no/such/model.gguf");
    assert!(llama_model_load_from_file(path.get(), llama_model_default_params()).is_null());
    llama_log_set(None, std::ptr::null_mut());
    let lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    let reason = lines
        .iter()
        .find(|line| line.contains("/no/such/model.gguf"));
    assert!(reason.is_some_and(|line| line.ends_with('\n')), "{lines:?}");
}

#[test]
fn two_threads_share_a_context() {
    let scene = Scene::new(|p| (p.n_seq_max, p.kv_unified) = (2, true));
    std::thread::scope(|scope| {
        for seq in 0..2 {
            let context = scene.context.as_ptr() as usize;
            scope.spawn(move || {
                let context = Handle::<Context>::of(context as *mut Context);
                for pos in 0..20 {
                    let mut token = 5 + seq;
                    let [mut at, mut n, mut id] = [pos, 1, seq];
                    let mut list = &raw mut id;
                    let batch = crate::abi::BatchArrays {
                        n_tokens: 1,
                        token: &raw mut token,
                        embd: std::ptr::null_mut(),
                        pos: &raw mut at,
                        n_seq_id: &raw mut n,
                        seq_id: &raw mut list,
                        logits: std::ptr::null_mut(),
                    };
                    assert_eq!(llama_decode(context, batch), 0);
                }
            });
        }
    });
    assert_eq!(
        [0, 1].map(|seq| llama_memory_seq_pos_max(scene.context, seq)),
        [19, 19]
    );
}
