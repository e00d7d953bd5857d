//! Batches: what may be left out, what is refused, what comes out.

use std::ffi::c_void;

use super::scene::{LoadedModel, N_VOCAB, Scene, tokens_only};
use crate::abi::pooling;
use crate::batch::{
    llama_batch_ext_add_token, llama_batch_ext_free, llama_batch_ext_init,
    llama_batch_ext_set_output_logits, llama_batch_ext_set_pos,
};
use crate::context::{
    llama_free, llama_n_batch, llama_n_ctx, llama_n_ctx_seq, llama_n_seq_max, llama_n_ubatch,
    llama_pooling_type, llama_set_abort_callback,
};
use crate::decode::{llama_decode, llama_process};
use crate::ffi::In;
use crate::memory::{llama_memory_clear, llama_memory_seq_pos_max};
use crate::output::{
    llama_get_embeddings_ith, llama_get_embeddings_seq, llama_get_logits, llama_get_logits_ith,
};
use crate::perf::llama_perf_context;

#[test]
fn sizes_are_settled_as_in_llama_cpp() {
    let sizes = |change: fn(&mut crate::abi::ContextParams)| {
        let scene = Scene::new(change);
        let context = scene.context;
        [
            llama_n_ctx(context),
            llama_n_ctx_seq(context),
            llama_n_batch(context),
            llama_n_ubatch(context),
            llama_n_seq_max(context),
        ]
    };
    assert_eq!(sizes(|_| ()), [512, 512, 512, 512, 1]);
    assert_eq!(sizes(|p| p.n_ctx = 300), [512, 512, 300, 300, 1]);
    let several = |p: &mut crate::abi::ContextParams| {
        (p.n_ctx, p.n_seq_max, p.n_batch, p.n_ubatch) = (700, 3, 64, 0);
    };
    assert_eq!(sizes(several), [768, 256, 64, 64, 3]);
    let unified = |p: &mut crate::abi::ContextParams| {
        (p.n_ctx, p.n_seq_max, p.kv_unified) = (700, 3, true);
    };
    assert_eq!(sizes(unified), [768, 768, 700, 512, 3]);
}

#[test]
fn what_a_batch_leaves_out_is_filled_in() {
    let scene = Scene::new(|_| ());
    let mut tokens = [5, 6, 7];
    assert_eq!(llama_decode(scene.context, tokens_only(&mut tokens)), 0);
    assert_eq!(llama_memory_seq_pos_max(scene.context, 0), 2);
    assert!(
        scene.logits(0).is_none() && scene.logits(1).is_none(),
        "the last alone"
    );
    let last = scene.logits(2).unwrap();
    assert_eq!(scene.logits(-1).unwrap(), last);
    assert!(scene.logits(-2).is_none() && scene.logits(3).is_none());
    assert_eq!(
        llama_get_logits(scene.context),
        llama_get_logits_ith(scene.context, 2)
    );
    // The same tokens as a batch that leaves nothing out.
    llama_memory_clear(scene.context, true);
    assert_eq!(scene.decode(0, 0, &tokens), 0);
    assert_eq!(scene.logits(-1).unwrap(), last);
    let perf = llama_perf_context(scene.context);
    assert_eq!((perf.n_p_eval, perf.n_eval), (6, 0));
}

#[test]
fn an_extended_batch_is_the_same() {
    let scene = Scene::new(|_| ());
    assert_eq!(scene.decode(0, 0, &[5, 6, 7]), 0);
    let wanted = scene.logits(-1).unwrap();
    llama_memory_clear(scene.context, true);
    let batch = llama_batch_ext_init(scene.context);
    for (index, token) in [5, 6, 7].into_iter().enumerate() {
        let index = i32::try_from(index).unwrap();
        assert_eq!(llama_batch_ext_add_token(batch, 0, token), index);
        assert!(llama_batch_ext_set_pos(
            batch,
            index,
            In::of(&raw const index)
        ));
    }
    assert!(llama_batch_ext_set_output_logits(batch, 2, true));
    assert_eq!(llama_process(scene.context, 1, batch), 0);
    assert_eq!(scene.logits(2).unwrap(), wanted);
    assert_eq!(llama_batch_ext_add_token(batch, 0, -1), -2);
    assert_eq!(llama_batch_ext_add_token(batch, 0, N_VOCAB as i32), -2);
    assert_eq!(llama_batch_ext_add_token(batch, 1, 5), -3);
    assert!(!llama_batch_ext_set_output_logits(batch, 3, true));
    llama_batch_ext_free(batch);
}

#[test]
fn a_refused_batch_changes_nothing() {
    let scene = Scene::new(|p| p.n_batch = 8);
    assert_eq!(scene.decode(0, 0, &[5, 6, 7]), 0);
    let before = scene.logits(-1);
    let refused = [
        scene.decode(0, 5, &[8]),              // a gap
        scene.decode(0, 1, &[8]),              // there already
        scene.decode(0, -3, &[8]),             // no position
        scene.decode(1, 0, &[8]),              // no such sequence
        scene.decode(-1, 0, &[8]),             // nor this one
        scene.decode(0, 3, &[N_VOCAB as i32]), // no such token
        scene.decode(0, 3, &[-1]),             // nor this one
        scene.decode(0, 3, &[5; 9]),           // more than a batch
        llama_decode(scene.context, tokens_only(&mut [])),
    ];
    assert_eq!(refused, [-1; 9]);
    assert_eq!(llama_memory_seq_pos_max(scene.context, 0), 2);
    assert_eq!(scene.logits(-1), before);
}

#[test]
fn a_full_memory_is_told_and_left_alone() {
    let scene = Scene::new(|p| p.n_ctx = 256);
    assert_eq!(scene.decode(0, 0, &[5; 250]), 0);
    assert_eq!(scene.decode(0, 250, &[5; 7]), 1);
    assert_eq!(llama_memory_seq_pos_max(scene.context, 0), 249);
    assert_eq!(scene.decode(0, 250, &[5; 6]), 0);
}

extern "C" fn always(_data: *mut c_void) -> bool {
    true
}

extern "C" fn never(_data: *mut c_void) -> bool {
    false
}

#[test]
fn a_program_ends_a_computation() {
    let scene = Scene::new(|_| ());
    llama_set_abort_callback(scene.context, Some(always), std::ptr::null_mut());
    assert_eq!(scene.decode(0, 0, &[5, 6]), 2);
    assert_eq!(llama_memory_seq_pos_max(scene.context, 0), -1);
    llama_set_abort_callback(scene.context, Some(never), std::ptr::null_mut());
    assert_eq!(scene.decode(0, 0, &[5, 6]), 0);
}

#[test]
fn embeddings_are_pooled_by_sequence() {
    let scene = Scene::new(|p| {
        (p.embeddings, p.pooling_type) = (true, pooling::MEAN);
        (p.n_seq_max, p.kv_unified) = (2, true);
    });
    assert_eq!(llama_pooling_type(scene.context), pooling::MEAN);
    assert_eq!(scene.decode(0, 0, &[5, 6]), 0);
    let dim = crate::meta::llama_model_n_embd(scene.model.0) as usize;
    let row = |pointer: *mut f32| In::of(pointer.cast_const()).slice(dim).to_vec();
    let pooled = row(llama_get_embeddings_seq(scene.context, 0));
    let [first, second] = [0, 1].map(|index| row(llama_get_embeddings_ith(scene.context, index)));
    for ((pooled, a), b) in pooled.iter().zip(&first).zip(&second) {
        assert!((pooled - (a + b) / 2.0).abs() < 1e-5);
    }
    assert_eq!(row(llama_get_embeddings_ith(scene.context, -1)), second);
    assert!(llama_get_embeddings_seq(scene.context, 1).is_null());
    assert!(llama_get_logits_ith(scene.context, -1).is_null());
}

#[test]
fn a_context_outlives_its_model() {
    let model = LoadedModel::new();
    let context = model.context(|_| ());
    drop(model);
    let mut tokens = [5, 6];
    assert_eq!(llama_decode(context, tokens_only(&mut tokens)), 0);
    llama_free(context);
}
