//! Every function with random arguments, most of them wrong: each call ends with an answer.
//!
//! What C cannot check is kept true: texts end with a NUL, and arrays are as long as their number
//! says. Handles are of any kind, of nothing, or were freed; numbers are any. `CAPI_CALLS` sets the
//! number of calls; under valgrind or a sanitizer, which see what a call reads, fewer do.

use std::ffi::{CStr, c_char, c_void};

use model_core::gguf::GgufFile;
use model_tests::write_adapter;
use rand_mt::Mt;

use super::scene::{STORIES, Text};
use crate::abi::*;
use crate::adapter::*;
use crate::batch::*;
use crate::chat::*;
use crate::context::*;
use crate::decode::*;
use crate::defaults::*;
use crate::ffi::{CText, Handle, In, Out};
use crate::log::*;
use crate::memory::*;
use crate::meta::*;
use crate::model::*;
use crate::output::*;
use crate::perf::*;
use crate::quantize::*;
use crate::refused::*;
use crate::sampler::chain::*;
use crate::sampler::change::*;
use crate::sampler::grammar::*;
use crate::sampler::narrow::*;
use crate::sampler::pick::*;
use crate::sampler::step::*;
use crate::sampler::*;
use crate::state::*;
use crate::vocab::*;

/// Bytes of the arrays that are read, all zero, and of those that are written.
const ROOM: usize = 1 << 22;
/// The most that a number of things is where there is an array of them.
const MOST: u32 = 64;
/// Handles that calls gave and that stay for later calls.
const KEPT: usize = 12;

/// The values that arguments are taken from.
struct World {
    random: Mt,
    /// True if a call has arrays, and no number above [`MOST`].
    has_arrays: bool,
    zeros: Vec<u64>,
    scratch: Vec<u64>,
    tokens: Vec<TokenData>,
    array: TokenDataArray,
    words: [i32; MOST as usize],
    lists: [*mut i32; MOST as usize],
    flags: [i8; MOST as usize],
    path: Text,
    /// The path of an adapter.
    adapter: Text,
    /// Addresses of objects, and of some that were freed.
    handles: Vec<usize>,
    /// Objects that are freed in the end, the oldest first.
    kept: Vec<usize>,
}

impl World {
    fn new(seed: u32, adapter: &str) -> Self {
        Self {
            random: Mt::new(seed),
            has_arrays: false,
            zeros: vec![0; ROOM / 8],
            scratch: vec![0; ROOM / 8],
            tokens: Vec::new(),
            array: TokenDataArray {
                data: std::ptr::null_mut(),
                size: 0,
                selected: -1,
                sorted: false,
            },
            words: [0; MOST as usize],
            lists: [std::ptr::null_mut(); MOST as usize],
            flags: [0; MOST as usize],
            path: Text::new(STORIES),
            adapter: Text::new(adapter),
            handles: Vec::new(),
            kept: Vec::new(),
        }
    }

    fn below(&mut self, n: u32) -> u32 {
        self.random.next_u32() % n.max(1)
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len() as u32) as usize]
    }

    /// Makes the objects that calls are about, where they are gone.
    fn populate(&mut self) {
        let is_model =
            |address: &usize| Handle::<Model>::of(*address as *mut Model).get().is_some();
        if !self.handles.iter().any(is_model) {
            let model = llama_model_load_from_file(self.path.get(), llama_model_default_params());
            self.keep(model.as_ptr() as usize);
        }
        let is_adapter = |address: &usize| {
            Handle::<LoraAdapter>::of(*address as *mut LoraAdapter)
                .get()
                .is_some()
        };
        if !self.handles.iter().any(is_adapter) {
            let address = self.handles.iter().copied().find(is_model).unwrap();
            let model = Handle::of(address as *mut Model);
            let adapter = llama_adapter_lora_init(model, self.adapter.get());
            assert!(!adapter.is_null());
            self.keep(adapter.as_ptr() as usize);
        }
        let is_context = |address: &usize| {
            Handle::<Context>::of(*address as *mut Context)
                .get()
                .is_some()
        };
        if !self.handles.iter().any(is_context) {
            let address = self.handles.iter().copied().find(is_model).unwrap();
            let mut params = llama_context_default_params();
            (params.n_ctx, params.n_batch, params.n_seq_max) = (256, MOST, 2);
            params.kv_unified = true;
            let context = llama_init_from_model(Handle::of(address as *mut Model), params);
            self.keep(context.as_ptr() as usize);
            self.keep(llama_batch_ext_init(context).as_ptr() as usize);
        }
    }

    fn keep(&mut self, address: usize) {
        if address == 0 || self.kept.contains(&address) {
            return;
        }
        self.handles.push(address);
        self.kept.push(address);
        if self.kept.len() > KEPT {
            let oldest = self.kept.remove(0);
            free(oldest);
        }
        if self.handles.len() > 2 * KEPT {
            self.handles.remove(0);
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.kept.iter().for_each(|&address| free(address));
    }
}

/// Frees an object of whichever kind: the other functions refuse it.
fn free(address: usize) {
    llama_sampler_free(Handle::of(address as *mut Sampler));
    llama_batch_ext_free(Handle::of(address as *mut BatchExt));
    llama_free(Handle::of(address as *mut Context));
    llama_adapter_lora_free(Handle::of(address as *mut LoraAdapter));
    llama_model_free(Handle::of(address as *mut Model));
}

/// A kind of argument.
trait Argument {
    fn any(world: &mut World) -> Self;
}

/// A kind of result.
trait Answer {
    fn seen(self, world: &mut World);
}

/// Arguments that are `$value`, with the world as `$world`.
macro_rules! arguments {
    ($([$($parameter:tt)*] $kind:ty = |$world:ident| $value:expr;)*) => {$(
        impl<$($parameter)*> Argument for $kind {
            fn any($world: &mut World) -> Self {
                $value
            }
        }
    )*};
}

arguments! {
    [T: 'static] Handle<T> = |world| {
        let known = world.below(world.handles.len() as u32 + 2) as usize;
        // Nothing, or an address at which nothing is.
        let nothing = world.one_of(&[0, 12345]);
        Handle::of(world.handles.get(known).copied().unwrap_or(nothing) as *mut T)
    };
    [T] In<T> = |world| {
        let is_given = world.has_arrays && world.below(4) > 0;
        In::of(if is_given { world.zeros.as_ptr().cast() } else { std::ptr::null() })
    };
    [] i32 = |world| {
        let small = world.below(MOST) as i32;
        let large = [i32::MIN, i32::MAX, -100, 1000, 12345];
        let few = [0, 1, 2, -1, small];
        if world.has_arrays { world.one_of(&few) } else { world.one_of(&[few, large].concat()) }
    };
    [] i64 = |world| i32::any(world).into();
    [] u32 = |world| {
        let value = i32::any(world);
        if world.has_arrays { value.unsigned_abs() } else { value as u32 }
    };
    [] usize = |world| u32::any(world) as usize;
    [] bool = |world| world.below(2) == 0;
    [] f32 = |world| {
        world.one_of(&[0.0, 1.0, -1.0, 0.5, 1e9, f32::NAN, f32::INFINITY, f32::NEG_INFINITY])
    };
    [] CText = |world| {
        let texts: [&CStr; 8] = [
            c"", c"root ::= \"a\"", c"root", c"root ::= (", c"chatml", c"/no/such/file",
            c"general.architecture", c"tokenizer.ggml.tokens",
        ];
        let text = world.one_of(&texts);
        CText::of(if world.below(6) == 0 { std::ptr::null() } else { text.as_ptr() })
    };
    [] *mut i32 = |world| world.words.as_mut_ptr();
    [] *mut c_void = |_world| std::ptr::null_mut();
    [] *const c_void = |_world| std::ptr::null();
    [] *const *mut c_void = |_world| std::ptr::null();
    [] *mut libc::FILE = |_world| std::ptr::null_mut();
    [] AbortCallback = |_world| None;
    [] Out<TokenDataArray> = |world| {
        let n = world.below(MOST) as usize;
        world.tokens = (0..n).map(|id| TokenData {
            id: if world.below(40) == 0 { i32::any(world) } else { id as i32 },
            logit: f32::any(world),
            p: f32::any(world),
        }).collect();
        world.array = TokenDataArray {
            data: world.tokens.as_mut_ptr(),
            size: n,
            selected: world.one_of(&[-1, 0, 3, i64::MAX, i64::MIN]),
            sorted: bool::any(world),
        };
        if world.below(8) == 0 { Out::of(std::ptr::null_mut()) } else { Out::of(&raw mut world.array) }
    };
    [] EmbeddingRows = |world| EmbeddingRows {
        data: if bool::any(world) { world.zeros.as_ptr().cast() } else { std::ptr::null() },
        n_rows: world.below(3) as usize,
        n_embd: world.one_of(&[0, 1, 64, 128]),
    };
    [] ChainParams = |world| ChainParams { no_perf: bool::any(world) };
    [] ModelParams = |world| ModelParams {
        n_gpu_layers: i32::any(world),
        split_mode: i32::any(world),
        main_gpu: i32::any(world),
        vocab_only: bool::any(world),
        ..llama_model_default_params()
    };
    [] ContextParams = |world| {
        let mut params = ContextParams {
            n_ctx: world.one_of(&[0, 1, 64, 256, u32::MAX]),
            n_batch: world.one_of(&[0, 1, 32, u32::MAX]),
            n_ubatch: world.one_of(&[0, 1, 32, u32::MAX]),
            n_seq_max: world.one_of(&[0, 1, 3, 300]),
            n_threads: world.one_of(&[i32::MIN, 0, 1, i32::MAX]),
            embeddings: world.below(4) == 0,
            kv_unified: bool::any(world),
            swa_full: bool::any(world),
            ..llama_context_default_params()
        };
        let wrong = i32::any(world);
        match world.below(12) {
            0 => params.type_k = wrong,
            1 => params.type_v = wrong,
            2 => params.pooling_type = wrong,
            3 => params.attention_type = wrong,
            4 => params.rope_scaling_type = wrong,
            5 => params.ctx_type = wrong,
            6 => params.rope_freq_base = f32::any(world),
            7 => params.rope_freq_scale = f32::any(world),
            8 => params.yarn_ext_factor = f32::any(world),
            _ => {}
        }
        params
    };
    [] TrainingParams = |_world| TrainingParams {
        n_ctx_train: 0,
        param_filter: std::ptr::null(),
        param_filter_ud: std::ptr::null_mut(),
        get_opt_pars: std::ptr::null(),
        get_opt_pars_ud: std::ptr::null_mut(),
        optimizer_type: 0,
    };
    [] BatchArrays = |world| {
        let n = MOST as usize;
        for i in 0..n {
            let token = i32::any(world);
            world.words[i] = if world.below(4) == 0 { token } else { world.below(600) as i32 };
            world.lists[i] = if world.below(20) == 0 {
                std::ptr::null_mut()
            } else {
                world.words[i..].as_mut_ptr()
            };
            world.flags[i] = world.below(2) as i8;
        }
        let mut batch = BatchArrays {
            n_tokens: world.one_of(&[-1, 0, 1, 2, 7, MOST as i32]),
            token: world.words.as_mut_ptr(),
            embd: std::ptr::null_mut(),
            pos: std::ptr::null_mut(),
            n_seq_id: std::ptr::null_mut(),
            seq_id: std::ptr::null_mut(),
            logits: std::ptr::null_mut(),
        };
        match world.below(8) {
            0 => batch.token = std::ptr::null_mut(),
            1 => (batch.token, batch.embd) = (std::ptr::null_mut(), world.scratch.as_mut_ptr().cast()),
            2 => batch.pos = world.words.as_mut_ptr(),
            3 => batch.seq_id = world.lists.as_mut_ptr(),
            4 => batch.logits = world.flags.as_mut_ptr(),
            _ => {}
        }
        batch
    };
}

/// Arrays of these kinds are written by functions, never read.
macro_rules! outputs {
    ($($kind:ty)*) => {
        arguments! {$(
            [] Out<$kind> = |world| {
                let is_given = world.has_arrays && world.below(4) > 0;
                Out::of(if is_given { world.scratch.as_mut_ptr().cast() } else { std::ptr::null_mut() })
            };
        )*}
    };
}

outputs! { i32 u8 usize c_char *const c_char *mut c_void LogCallback }

/// Answers that are not looked at.
macro_rules! answers {
    ($($kind:ty)*) => {$(
        impl Answer for $kind {
            fn seen(self, _world: &mut World) {}
        }
    )*};
}

answers! {
    () i32 i64 u32 u64 usize bool f32 *const c_char *const i32 *mut i32 *mut f32 *mut c_void
    BatchArrays ChainParams ContextParams ModelParams QuantizeParams ContextPerf SamplerPerf
}

impl<T: 'static> Answer for Handle<T> {
    fn seen(self, world: &mut World) {
        world.keep(self.as_ptr() as usize);
    }
}

/// A function by its name.
type Named = (&'static str, fn(&mut World));

/// Functions in brackets, by the number of their arguments.
macro_rules! functions {
    ($($arguments:tt [$($name:ident)*])*) => {
        &[$($(function!($arguments $name)),*),*]
    };
}

macro_rules! function {
    (($($argument:tt)*) $name:ident) => {
        (stringify!($name), |world| $name($(argument!($argument world)),*).seen(world))
    };
}

macro_rules! argument {
    (_ $world:ident) => {
        Argument::any($world)
    };
}

/// All but those of [`APART`].
const FUNCTIONS: &[Named] = functions! {
    () [
        llama_backend_free llama_backend_init llama_context_default_params llama_max_devices
        llama_max_parallel_sequences llama_max_tensor_buft_overrides llama_model_default_params
        llama_model_quantize_default_params llama_print_system_info
        llama_sampler_chain_default_params llama_sampler_init_greedy llama_supports_gpu_offload
        llama_supports_mlock llama_supports_mmap llama_supports_rpc llama_time_us llama_version
    ]
    (_) [
        llama_adapter_get_alora_invocation_tokens llama_adapter_get_alora_n_invocation_tokens
        llama_adapter_lora_free llama_adapter_meta_count llama_add_bos_token llama_add_eos_token
        llama_batch_ext_clear llama_batch_ext_free llama_batch_ext_init llama_detach_threadpool
        llama_flash_attn_type_name llama_free llama_free_model llama_ftype_name
        llama_get_causal_attn llama_get_embeddings llama_get_logits llama_get_memory llama_get_model
        llama_get_state_size llama_load_mode_from_str llama_load_mode_name llama_memory_can_shift
        llama_model_decoder_start_token llama_model_free llama_model_ftype llama_model_get_vocab
        llama_model_has_decoder llama_model_has_encoder llama_model_is_diffusion
        llama_model_is_hybrid llama_model_is_recurrent llama_model_meta_count
        llama_model_meta_key_str llama_model_n_cls_out llama_model_n_ctx_train llama_model_n_embd
        llama_model_n_embd_inp llama_model_n_embd_out llama_model_n_head llama_model_n_head_kv
        llama_model_n_layer llama_model_n_layer_nextn llama_model_n_params llama_model_n_swa
        llama_model_rope_freq_scale_train llama_model_rope_type llama_model_size llama_n_batch
        llama_n_ctx llama_n_ctx_seq llama_n_ctx_train llama_n_embd llama_n_head llama_n_layer
        llama_n_rs_seq llama_n_seq_max llama_n_threads llama_n_threads_batch llama_n_ubatch
        llama_n_vocab llama_numa_init llama_perf_context llama_perf_context_print
        llama_perf_context_reset llama_perf_sampler llama_perf_sampler_print
        llama_perf_sampler_reset llama_pooling_type llama_sampler_chain_init llama_sampler_chain_n
        llama_sampler_clone llama_sampler_free llama_sampler_get_seed llama_sampler_init_dist
        llama_sampler_init_infill llama_sampler_init_temp llama_sampler_init_top_k
        llama_sampler_init_top_n_sigma llama_sampler_name llama_sampler_reset llama_state_get_size
        llama_synchronize llama_token_bos llama_token_cls llama_token_eos llama_token_eot
        llama_token_fim_mid llama_token_fim_pad llama_token_fim_pre llama_token_fim_rep
        llama_token_fim_sep llama_token_fim_suf llama_token_nl llama_token_pad llama_token_sep
        llama_vocab_bos llama_vocab_cls llama_vocab_eos llama_vocab_eot llama_vocab_fim_mid
        llama_vocab_fim_pad llama_vocab_fim_pre llama_vocab_fim_rep llama_vocab_fim_sep
        llama_vocab_fim_suf llama_vocab_get_add_bos llama_vocab_get_add_eos llama_vocab_get_add_sep
        llama_vocab_mask llama_vocab_n_tokens llama_vocab_nl llama_vocab_pad llama_vocab_sep
        llama_vocab_type
    ]
    (_ _) [
        llama_adapter_lora_init llama_adapter_lora_init_from_file_ptr llama_batch_ext_add
        llama_batch_get_one llama_chat_builtin_templates llama_copy_state_data llama_decode
        llama_encode llama_get_embeddings_ith llama_get_embeddings_seq llama_get_logits_ith
        llama_get_sampled_candidates_count_ith llama_get_sampled_candidates_ith
        llama_get_sampled_logits_count_ith llama_get_sampled_logits_ith
        llama_get_sampled_probs_count_ith llama_get_sampled_probs_ith llama_get_sampled_token_ith
        llama_init_from_model llama_load_model_from_file llama_log_get llama_memory_clear
        llama_memory_seq_keep llama_memory_seq_pos_max llama_memory_seq_pos_min
        llama_model_chat_template llama_model_cls_label llama_model_load_from_file
        llama_model_load_from_file_ptr llama_new_context_with_model llama_opt_param_filter_all
        llama_sampler_accept llama_sampler_apply llama_sampler_chain_add
        llama_sampler_chain_get llama_sampler_chain_remove llama_sampler_copy
        llama_sampler_init_min_p llama_sampler_init_top_p llama_sampler_init_typical
        llama_set_causal_attn llama_set_embeddings llama_set_state_data llama_set_warmup
        llama_state_seq_get_size llama_token_get_attr llama_token_get_score llama_token_get_text
        llama_token_is_control llama_token_is_eog llama_vocab_get_attr llama_vocab_get_score
        llama_vocab_get_suppress_tokens llama_vocab_get_text llama_vocab_is_control
        llama_vocab_is_eog
    ]
    (_ _ _) [
        llama_attach_threadpool llama_batch_ext_add_embd llama_batch_ext_add_seq
        llama_batch_ext_add_token llama_batch_ext_set_embd_state llama_batch_ext_set_embd_token
        llama_batch_ext_set_output_embd llama_batch_ext_set_output_logits llama_batch_ext_set_pos
        llama_model_desc llama_model_load_from_splits llama_model_quantize llama_opt_init
        llama_process llama_sampler_init_adaptive_p llama_sampler_init_grammar
        llama_sampler_init_logit_bias llama_sampler_init_mirostat_v2 llama_sampler_init_temp_ext
        llama_sampler_sample llama_set_abort_callback llama_set_n_threads llama_set_sampler
        llama_state_get_data llama_state_seq_get_size_ext llama_state_set_data
    ]
    (_ _ _ _) [
        llama_adapter_meta_key_by_index llama_adapter_meta_val_str
        llama_adapter_meta_val_str_by_index llama_memory_seq_rm llama_model_init_from_user
        llama_model_meta_key_by_index llama_model_meta_val_str llama_model_meta_val_str_by_index
        llama_sampler_init_xtc llama_set_adapters_lora llama_state_seq_get_data
        llama_state_seq_set_data
    ]
    (_ _ _ _ _) [
        llama_load_session_file llama_memory_seq_add llama_memory_seq_cp llama_memory_seq_div
        llama_sampler_init_mirostat llama_sampler_init_penalties llama_split_path llama_split_prefix
        llama_state_load_file llama_state_seq_get_data_ext llama_state_seq_set_data_ext
    ]
    (_ _ _ _ _ _) [
        llama_chat_apply_template llama_set_adapter_cvec llama_state_seq_load_file
        llama_token_to_piece
    ]
    (_ _ _ _ _ _ _) [
        llama_detokenize llama_opt_epoch llama_sampler_init_dry llama_sampler_init_grammar_lazy
        llama_sampler_init_grammar_lazy_patterns llama_tokenize
    ]
};

/// They write files wherever a text says, take what the other allocated, or keep function pointers.
const APART: [&str; 8] = [
    "llama_batch_free",
    "llama_batch_init",
    "llama_log_set",
    "llama_model_save_to_file",
    "llama_sampler_init",
    "llama_save_session_file",
    "llama_state_save_file",
    "llama_state_seq_save_file",
];

#[test]
fn every_function_is_called() {
    let names = FUNCTIONS.iter().map(|(name, _)| *name).chain(APART);
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    let all: Vec<&str> = include_str!("../../tests/names.txt").lines().collect();
    assert_eq!(names, all);
}

#[test]
fn random_calls_end_with_an_answer() {
    let calls = std::env::var("CAPI_CALLS").ok();
    let calls: u32 = calls.map_or(4000, |calls| calls.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let adapter = folder.path().join("adapter.gguf");
    write_adapter(&adapter, "llama", &GgufFile::open(STORIES).unwrap(), 1);
    let mut world = World::new(1, adapter.to_str().unwrap());
    for _ in 0..calls {
        world.populate();
        world.has_arrays = world.below(2) == 0;
        let (_, call) = world.one_of(FUNCTIONS);
        call(&mut world);
    }
    // The library still works.
    world.populate();
    assert!(!world.kept.is_empty());
}
