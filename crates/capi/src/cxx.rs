//! Functions that llama.cpp's own programs link by their C++ names.
//!
//! Invariant: each answers that Cellar has no such thing: no devices of ggml's, no breakdown of its
//! buffers, no rows of multi-token prediction. Only where the C++ names are those of the Itanium
//! ABI with libstdc++.
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

use std::ffi::c_void;

use crate::abi::ggml_type;
use crate::batch::BatchExt;
use crate::context::Context;
use crate::ffi::{Handle, Out};
use crate::log;
use crate::model::Model;

/// An empty `std::map` of libstdc++: a comparison, and the header of a tree whose ends are itself.
#[repr(C)]
pub(crate) struct EmptyMap {
    compare: usize,
    colour: usize,
    root: usize,
    leftmost: usize,
    rightmost: usize,
    n_nodes: usize,
}

/// Exports functions by their C++ names.
macro_rules! cxx_api {
    ($($name:ident = $symbol:literal($($arg:ident: $kind:ty),*) $(-> $result:ty)? $body:block)*) => {$(
        #[unsafe(export_name = $symbol)]
        pub(crate) extern "C" fn $name($($arg: $kind),*) $(-> $result)? $body
    )*};
}

cxx_api! {
    n_devices = "_Z21llama_model_n_devicesPK11llama_model"(_model: Handle<Model>) -> i32 {
        0
    }

    device = "_Z22llama_model_get_devicePK11llama_modeli"(_model: Handle<Model>, _index: i32)
        -> *const c_void {
        std::ptr::null()
    }

    n_expert = "_Z20llama_model_n_expertPK11llama_model"(model: Handle<Model>) -> i32 {
        let n = model.get().and_then(|model| model.shared.number("expert_count"));
        n.map_or(0, |n| i32::try_from(n).unwrap_or(i32::MAX))
    }

    memory_breakdown = "_Z26llama_get_memory_breakdownPK13llama_context"(
        map: Out<EmptyMap>, _context: Handle<Context>
    ) -> Out<EmptyMap> {
        let header = map.address() + std::mem::offset_of!(EmptyMap, colour);
        map.set(EmptyMap {
            compare: 0,
            colour: 0,
            root: 0,
            leftmost: header,
            rightmost: header,
            n_nodes: 0,
        });
        map
    }

    set_embeddings_nextn = "_Z26llama_set_embeddings_nextnP13llama_contextbb"(
        _context: Handle<Context>, value: bool, _masked: bool
    ) {
        if value {
            log::error("llama_set_embeddings_nextn: not supported");
        }
    }

    set_nextn_layer_offset = "_Z28llama_set_nextn_layer_offsetP13llama_contexti"(
        _context: Handle<Context>, _offset: i32
    ) {}

    embeddings_nextn = "_Z26llama_get_embeddings_nextnP13llama_context"(_context: Handle<Context>)
        -> *const f32 {
        std::ptr::null()
    }

    embeddings_nextn_ith = "_Z30llama_get_embeddings_nextn_ithP13llama_contexti"(
        _context: Handle<Context>, _index: i32
    ) -> *const f32 {
        std::ptr::null()
    }

    set_embeddings_layer_inp = "_Z30llama_set_embeddings_layer_inpP13llama_contextjb"(
        _context: Handle<Context>, _layer: u32, value: bool
    ) {
        if value {
            log::error("llama_set_embeddings_layer_inp: not supported");
        }
    }

    embeddings_layer_inp = "_Z30llama_get_embeddings_layer_inpP13llama_contextj"(
        _context: Handle<Context>, _layer: u32
    ) -> *const f32 {
        std::ptr::null()
    }

    other_context = "_Z19llama_get_ctx_otherP13llama_context"(_context: Handle<Context>)
        -> Handle<Context> {
        Handle::NULL
    }

    selector_top_k = "_Z33llama_model_dflash_selector_top_kPK11llama_model"(_model: Handle<Model>)
        -> i32 {
        0
    }

    target_layers = "_Z28llama_model_target_layer_idsPK11llama_model"(_model: Handle<Model>)
        -> *const i32 {
        std::ptr::null()
    }

    n_target_layers = "_Z30llama_model_target_layer_ids_nPK11llama_model"(_model: Handle<Model>)
        -> u32 {
        0
    }

    token_embeddings = "_Z24llama_model_get_tok_embdPK11llama_modelPf"(
        _model: Handle<Model>, _out: Out<f32>
    ) -> u32 {
        0
    }

    decision_order = "_Z34llama_batch_ext_set_decision_orderP15llama_batch_exti20llama_decision_order"(
        _batch: Handle<BatchExt>, _index: i32, order: i32
    ) -> bool {
        order == 0
    }

    graph = "_Z19llama_graph_reserveP13llama_contextjjj"(
        _context: Handle<Context>, _n_tokens: u32, _n_seqs: u32, _n_outputs: u32
    ) -> *const c_void {
        std::ptr::null()
    }

    default_type = "_Z28llama_ftype_get_default_type11llama_ftype"(_ftype: i32) -> i32 {
        ggml_type::COUNT
    }
}
