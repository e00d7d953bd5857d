//! Structures and numbers are those of `llama.h`.
//!
//! `tests/layout.txt` holds what a C compiler says of the header, and is compared always. With
//! `LLAMA_HEADERS=FOLDER:FOLDER` (where `llama.h` and `ggml.h` are) a probe is compiled and
//! compared with the table, too; `UPDATE_LAYOUT=1` writes it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::mem::{align_of, offset_of, size_of};
use std::process::Command;

use crate::abi::*;
use crate::sampler::{Interface, Sampler};

/// For each structure its size, and the offset of each field.
type Layout = BTreeMap<String, usize>;

macro_rules! layouts {
    ($($c:literal $rust:ty { $($field:ident $(= $c_field:literal)?),* $(,)? })*) => {{
        let mut layout = Layout::new();
        $(
            layout.insert(format!("sizeof {}", $c), size_of::<$rust>());
            layout.insert(format!("alignof {}", $c), align_of::<$rust>());
            $(
                #[allow(unused_mut, unused_assignments)]
                let mut name = stringify!($field);
                $(name = $c_field;)?
                layout.insert(format!("offsetof {} {name}", $c), offset_of!($rust, $field));
            )*
        )*
        layout
    }};
}

fn ours() -> Layout {
    layouts! {
        "llama_token_data" TokenData { id, logit, p }
        "llama_token_data_array" TokenDataArray { data, size, selected, sorted }
        "llama_batch" BatchArrays { n_tokens, token, embd, pos, n_seq_id, seq_id, logits }
        "struct llama_model_kv_override" KvOverride { tag, key, value = "val_i64" }
        "struct llama_model_tensor_buft_override" BufferTypeOverride { pattern, buft }
        "struct llama_model_params" ModelParams {
            devices, tensor_buft_overrides, n_gpu_layers, split_mode, load_mode, lazy_mode,
            main_gpu, tensor_split, progress_callback, progress_callback_user_data, kv_overrides,
            vocab_only, check_tensors, use_extra_bufts, no_host, no_alloc, load_mtp,
        }
        "struct llama_sampler_seq_config" SeqSampler { seq_id, sampler }
        "struct llama_context_params" ContextParams {
            n_ctx, n_batch, n_ubatch, n_seq_max, n_rs_seq, n_outputs_max, n_outputs_max_per_seq,
            n_threads, n_threads_batch, ctx_type, rope_scaling_type, pooling_type, attention_type,
            flash_attn_type, rope_freq_base, rope_freq_scale, yarn_ext_factor, yarn_attn_factor,
            yarn_beta_fast, yarn_beta_slow, yarn_orig_ctx, defrag_thold, cb_eval,
            cb_eval_user_data, type_k, type_v, abort_callback, abort_callback_data, embeddings,
            offload_kqv, no_perf, op_offload, swa_full, kv_unified, samplers, n_samplers,
            ctx_other,
        }
        "struct llama_model_tensor_override" TensorOverride { pattern, kind = "type" }
        "struct llama_model_imatrix_data" ImatrixData { name, data, size }
        "llama_model_quantize_params" QuantizeParams {
            nthread, ftype, output_tensor_type, token_embedding_type, allow_requantize,
            quantize_output_tensor, only_copy, pure, keep_split, dry_run, imatrix, kv_overrides,
            tt_overrides, prune_layers, max_buf_size,
        }
        "llama_logit_bias" TokenBias { token, bias }
        "llama_sampler_chain_params" ChainParams { no_perf }
        "llama_chat_message" Message { role, content }
        "struct llama_embd" EmbeddingRows { data, n_rows, n_embd }
        "struct llama_perf_context_data" ContextPerf {
            t_start_ms, t_load_ms, t_p_eval_ms, t_eval_ms, n_p_eval, n_eval, n_reused,
        }
        "struct llama_perf_sampler_data" SamplerPerf { t_sample_ms, n_sample }
        "struct llama_opt_params" TrainingParams {
            n_ctx_train, param_filter, param_filter_ud, get_opt_pars, get_opt_pars_ud,
            optimizer_type,
        }
        "struct llama_sampler_i" Interface {
            name, accept, apply, reset, clone, free, backend_init, backend_accept, backend_apply,
            backend_set_input, backend_reset, copy_state,
        }
        "struct llama_sampler" Sampler { iface, ctx }
    }
}

/// The numbers that this library knows by name.
fn numbers() -> BTreeMap<String, i64> {
    let all = [
        ("LLAMA_TOKEN_NULL", i64::from(NO_TOKEN)),
        ("LLAMA_DEFAULT_SEED", i64::from(DEFAULT_SEED)),
        (
            "LLAMA_POOLING_TYPE_UNSPECIFIED",
            pooling::UNSPECIFIED.into(),
        ),
        ("LLAMA_POOLING_TYPE_NONE", pooling::NONE.into()),
        ("LLAMA_POOLING_TYPE_MEAN", pooling::MEAN.into()),
        ("LLAMA_POOLING_TYPE_CLS", pooling::CLS.into()),
        ("LLAMA_POOLING_TYPE_LAST", pooling::LAST.into()),
        ("LLAMA_POOLING_TYPE_RANK", pooling::RANK.into()),
        ("LLAMA_VOCAB_TYPE_NONE", vocab_type::NONE.into()),
        ("LLAMA_VOCAB_TYPE_SPM", vocab_type::SPM.into()),
        ("LLAMA_VOCAB_TYPE_BPE", vocab_type::BPE.into()),
        ("LLAMA_VOCAB_TYPE_WPM", vocab_type::WPM.into()),
        ("LLAMA_VOCAB_TYPE_UGM", vocab_type::UGM.into()),
        ("LLAMA_VOCAB_TYPE_RWKV", vocab_type::RWKV.into()),
        ("LLAMA_TOKEN_ATTR_UNDEFINED", attr::UNDEFINED.into()),
        ("LLAMA_TOKEN_ATTR_UNKNOWN", attr::UNKNOWN.into()),
        ("LLAMA_TOKEN_ATTR_UNUSED", attr::UNUSED.into()),
        ("LLAMA_TOKEN_ATTR_NORMAL", attr::NORMAL.into()),
        ("LLAMA_TOKEN_ATTR_CONTROL", attr::CONTROL.into()),
        ("LLAMA_TOKEN_ATTR_USER_DEFINED", attr::USER_DEFINED.into()),
        ("LLAMA_TOKEN_ATTR_BYTE", attr::BYTE.into()),
        ("GGML_TYPE_F16", ggml_type::F16.into()),
        ("GGML_TYPE_COUNT", ggml_type::COUNT.into()),
        ("LLAMA_PROCESS_TYPE_ENCODE", 0),
        ("LLAMA_PROCESS_TYPE_DECODE", 1),
        ("LLAMA_KV_OVERRIDE_TYPE_INT", 0),
        ("LLAMA_KV_OVERRIDE_TYPE_FLOAT", 1),
        ("LLAMA_KV_OVERRIDE_TYPE_BOOL", 2),
        ("LLAMA_KV_OVERRIDE_TYPE_STR", 3),
        ("LLAMA_ROPE_SCALING_TYPE_LINEAR", 1),
        ("LLAMA_ROPE_SCALING_TYPE_YARN", 2),
        ("LLAMA_ROPE_SCALING_TYPE_LONGROPE", 3),
        ("LLAMA_FLASH_ATTN_TYPE_DISABLED", 0),
        ("LLAMA_FTYPE_GUESSED", 1024),
        ("LLAMA_FTYPE_MOSTLY_Q8_0", 7),
        ("LLAMA_FTYPE_MOSTLY_Q4_K_M", 15),
        ("GGML_LOG_LEVEL_ERROR", 4),
    ];
    all.map(|(name, number)| (name.to_owned(), number)).into()
}

fn table() -> String {
    let mut text = String::new();
    for (name, number) in ours() {
        writeln!(text, "{name} {number}").unwrap();
    }
    for (name, number) in numbers() {
        writeln!(text, "number {name} {number}").unwrap();
    }
    text
}

/// A C program that prints the same table of the header.
fn probe() -> String {
    let mut code =
        "#include <stddef.h>\n#include <stdio.h>\n#include \"llama.h\"\nint main(void) {\n"
            .to_owned();
    for name in ours().keys() {
        let (kind, rest) = name.split_once(' ').unwrap();
        let value = match kind {
            "sizeof" => format!("sizeof({rest})"),
            "alignof" => format!("_Alignof({rest})"),
            _ => {
                let (name, field) = rest.rsplit_once(' ').unwrap();
                format!("offsetof({name}, {field})")
            }
        };
        writeln!(code, "printf(\"{name} %zu\\n\", (size_t) {value});").unwrap();
    }
    for name in numbers().keys() {
        writeln!(
            code,
            "printf(\"number {name} %lld\\n\", (long long) {name});"
        )
        .unwrap();
    }
    code.push_str("return 0; }\n");
    code
}

#[test]
fn structures_are_those_of_the_header() {
    assert_eq!(table(), include_str!("../../tests/layout.txt"));
}

#[test]
fn the_table_is_what_a_c_compiler_says() {
    let Some(folders) = std::env::var_os("LLAMA_HEADERS") else {
        println!("SKIPPED: LLAMA_HEADERS names no folders with llama.h and ggml.h");
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let [source, program] = ["probe.c", "probe"].map(|name| folder.path().join(name));
    std::fs::write(&source, probe()).unwrap();
    let mut compiler = Command::new("cc");
    compiler.arg("-w").arg(&source).arg("-o").arg(&program);
    for folder in std::env::split_paths(&folders) {
        compiler.arg("-I").arg(folder);
    }
    assert!(compiler.status().unwrap().success());
    let printed = Command::new(&program).output().unwrap().stdout;
    let printed = String::from_utf8(printed).unwrap();
    if std::env::var_os("UPDATE_LAYOUT").is_some() {
        std::fs::write("tests/layout.txt", &printed).unwrap();
    }
    assert_eq!(table(), printed);
}
