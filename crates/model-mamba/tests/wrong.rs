//! Files that would come out wrong are refused by the key or the tensor.

mod common;

use common::CASES;
use model_tests::{Case, refusal, remove_key};

#[test]
fn settings_that_cannot_be_are_refused_by_their_key() {
    for (case, key, value) in [
        ("mamba", "mamba.ssm.conv_kernel", 0u32),
        ("mamba", "mamba.ssm.state_size", 0),
        ("mamba2", "mamba2.ssm.time_step_rank", 7),
        ("mamba2", "mamba2.ssm.group_count", 3),
        ("bamba", "granitehybrid.attention.head_count", 3),
        ("jamba", "jamba.expert_used_count", 99),
        ("falcon_h1", "falcon-h1.attention.head_count_kv", 3),
        ("falcon_h1", "falcon-h1.rope.dimension_count", 5),
        ("rwkv4", "rwkv4.time_mix.inner_size", 0),
    ] {
        let case = Case::named(CASES, case);
        let error = refusal(case, |metadata| drop(metadata.insert(key, value)), "");
        assert!(error.contains(key), "{}: {error}", case.name);
    }
}

#[test]
fn missing_keys_are_named() {
    for (case, key) in [
        ("mamba", "mamba.ssm.inner_size"),
        ("mamba2", "mamba2.ssm.group_count"),
        ("jamba", "jamba.feed_forward_length"),
        ("granitemoehybrid", "granitehybrid.block_count"),
        ("falcon_h1", "falcon-h1.embedding_length"),
        ("rwkv4", "rwkv4.attention.layer_norm_epsilon"),
    ] {
        let case = Case::named(CASES, case);
        let error = refusal(case, |metadata| remove_key(metadata, key), "");
        assert!(error.contains(key), "{}: {error}", case.name);
    }
}

#[test]
fn missing_tensors_are_named_and_so_are_those_of_another_shape() {
    for (case, tensor) in [
        ("mamba", "blk.1.ssm_x.weight"),
        ("mamba2", "blk.0.ssm_dt.bias"),
        ("jamba", "blk.0.ssm_b_norm.weight"),
        ("bamba", "blk.2.attn_k.weight"),
        ("falcon_h1", "blk.1.ffn_norm"),
        ("granitemoehybrid", "blk.1.ffn_down_exps.weight"),
        ("rwkv4", "blk.2.time_mix_decay.weight"),
        ("rwkv4", "token_embd_norm.bias"),
    ] {
        let case = Case::named(CASES, case);
        let error = refusal(case, |_| (), tensor);
        assert!(error.contains(tensor), "{}: {error}", case.name);
    }
    let case = Case::named(CASES, "mamba");
    let error = refusal(
        case,
        |metadata| drop(metadata.insert("mamba.ssm.state_size", 8u32)),
        "",
    );
    assert!(
        error.contains("'blk.0.ssm_x.weight' has shape [36, 128]") && error.contains("[20, 128]"),
        "{error}"
    );
}
