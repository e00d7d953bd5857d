//! A model and contexts for tests.

use std::ffi::CString;

use crate::abi::{BatchArrays, ContextParams};
use crate::batch::{llama_batch_free, llama_batch_init};
use crate::context::{Context, llama_free, llama_init_from_model};
use crate::decode::llama_decode;
use crate::defaults::{llama_context_default_params, llama_model_default_params};
use crate::ffi::{CText, Handle, In, Out};
use crate::model::{Model, llama_model_free, llama_model_load_from_file};
use crate::output::llama_get_logits_ith;

/// The model of the stories.
pub(super) const STORIES: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../models/stories-llama-f16.gguf"
);
/// Its vocabulary.
pub(super) const N_VOCAB: usize = 1024;
/// A small model with recurrent layers alone.
pub(super) const MAMBA: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/../../tests/fixtures/stories/stories-mamba-f16.gguf"
);

/// A text with a NUL behind it.
pub(super) struct Text(CString);

impl Text {
    pub(super) fn new(text: &str) -> Self {
        Self(CString::new(text).unwrap())
    }

    pub(super) fn get(&self) -> CText {
        CText::of(self.0.as_ptr())
    }

    pub(super) fn as_ptr(&self) -> *const std::ffi::c_char {
        self.0.as_ptr()
    }
}

/// A model that is freed with the test.
pub(super) struct LoadedModel(pub(super) Handle<Model>);

impl LoadedModel {
    pub(super) fn new() -> Self {
        Self::open(STORIES)
    }

    pub(super) fn open(path: &str) -> Self {
        let path = Text::new(path);
        let model = llama_model_load_from_file(path.get(), llama_model_default_params());
        assert!(!model.is_null());
        Self(model)
    }

    pub(super) fn context(&self, change: impl FnOnce(&mut ContextParams)) -> Handle<Context> {
        let mut params = llama_context_default_params();
        params.n_threads = 2;
        change(&mut params);
        llama_init_from_model(self.0, params)
    }
}

impl Drop for LoadedModel {
    fn drop(&mut self) {
        llama_model_free(self.0);
    }
}

/// A context of a model of its own.
pub(super) struct Scene {
    pub(super) model: LoadedModel,
    pub(super) context: Handle<Context>,
}

impl Scene {
    pub(super) fn new(change: impl FnOnce(&mut ContextParams)) -> Self {
        let model = LoadedModel::new();
        let context = model.context(change);
        assert!(!context.is_null());
        Self { model, context }
    }

    /// Decodes tokens of a sequence from a position on; the output of the last is wanted.
    pub(super) fn decode(&self, seq: i32, first: i32, tokens: &[i32]) -> i32 {
        let n = i32::try_from(tokens.len()).unwrap();
        let mut batch = llama_batch_init(n, 0, 1);
        batch.n_tokens = n;
        Out::of(batch.token)
            .slice(tokens.len())
            .copy_from_slice(tokens);
        for i in 0..tokens.len() {
            Out::of(batch.pos).slice(tokens.len())[i] = first + i as i32;
            Out::of(batch.n_seq_id).slice(tokens.len())[i] = 1;
            Out::of(Out::of(batch.seq_id).slice(tokens.len())[i]).set(seq);
            Out::of(batch.logits).slice(tokens.len())[i] = i8::from(i + 1 == tokens.len());
        }
        let code = llama_decode(self.context, batch);
        llama_batch_free(batch);
        code
    }

    /// The logits at an index of the last batch.
    pub(super) fn logits(&self, index: i32) -> Option<Vec<f32>> {
        let row = llama_get_logits_ith(self.context, index);
        (!row.is_null()).then(|| In::of(row.cast_const()).slice(N_VOCAB).to_vec())
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        llama_free(self.context);
    }
}

/// A batch of tokens with nothing else.
pub(super) fn tokens_only(tokens: &mut [i32]) -> BatchArrays {
    crate::batch::llama_batch_get_one(tokens.as_mut_ptr(), i32::try_from(tokens.len()).unwrap())
}
