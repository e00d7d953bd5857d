//! The names of tensors in directories, and in `mmproj` files, of parts that towers share.
//!
//! Knows no class.

use model_core::hf::{Heads, TensorRule, TensorStep, same, with};

pub(super) const PIXTRAL_LAYER: [TensorRule; 9] = [
    same("ln1.weight", "attention_norm.weight"),
    same("ln2.weight", "ffn_norm.weight"),
    with(
        "attn_q.weight",
        "attention.q_proj.weight",
        &[TensorStep::Pairs(Heads::Query)],
    ),
    with(
        "attn_k.weight",
        "attention.k_proj.weight",
        &[TensorStep::Pairs(Heads::Query)],
    ),
    same("attn_v.weight", "attention.v_proj.weight"),
    same("attn_output.weight", "attention.o_proj.weight"),
    same("ffn_gate.weight", "feed_forward.gate_proj.weight"),
    same("ffn_up.weight", "feed_forward.up_proj.weight"),
    same("ffn_down.weight", "feed_forward.down_proj.weight"),
];

pub(super) const PIXTRAL_OUTER: [TensorRule; 2] = [
    same("patch_embd.weight", "patch_conv.weight"),
    same("pre_ln.weight", "ln_pre.weight"),
];

pub(super) const MISTRAL_PROJECTOR: [TensorRule; 6] = [
    same("input_norm.weight", "norm.weight"),
    same("patch_merger.weight", "patch_merger.merging_layer.weight"),
    same("1.weight", "linear_1.weight"),
    same("1.bias", "linear_1.bias"),
    same("2.weight", "linear_2.weight"),
    same("2.bias", "linear_2.bias"),
];

pub(super) const QWEN_ATTENTION: [TensorRule; 8] = [
    same("ln1.weight", "norm1.weight"),
    same("ln1.bias", "norm1.bias"),
    same("ln2.weight", "norm2.weight"),
    same("ln2.bias", "norm2.bias"),
    same("attn_qkv.weight", "attn.qkv.weight"),
    same("attn_qkv.bias", "attn.qkv.bias"),
    same("attn_output.weight", "attn.proj.weight"),
    same("attn_output.bias", "attn.proj.bias"),
];

pub(super) const TWO_MATRICES: [TensorRule; 4] = [
    same("ffn_up.weight", "fc1.weight"),
    same("ffn_up.bias", "fc1.bias"),
    same("ffn_down.weight", "fc2.weight"),
    same("ffn_down.bias", "fc2.bias"),
];

pub(super) const GATED_WITH_BIASES: [TensorRule; 6] = [
    same("ffn_gate.weight", "gate_proj.weight"),
    same("ffn_gate.bias", "gate_proj.bias"),
    same("ffn_up.weight", "up_proj.weight"),
    same("ffn_up.bias", "up_proj.bias"),
    same("ffn_down.weight", "down_proj.weight"),
    same("ffn_down.bias", "down_proj.bias"),
];

pub(super) const QWEN_OUTER: [TensorRule; 7] = [
    same("v.patch_embd.weight", "patch_embed.proj.weight"),
    same("v.post_ln.weight", "merger.ln_q.weight"),
    same("v.post_ln.bias", "merger.ln_q.bias"),
    same("mm.0.weight", "merger.mlp.0.weight"),
    same("mm.0.bias", "merger.mlp.0.bias"),
    same("mm.2.weight", "merger.mlp.2.weight"),
    same("mm.2.bias", "merger.mlp.2.bias"),
];

pub(super) const GLM_LAYER: [TensorRule; 7] = [
    same("ln1.weight", "norm1.weight"),
    same("ln2.weight", "norm2.weight"),
    same("attn_qkv.weight", "attn.qkv.weight"),
    same("attn_output.weight", "attn.proj.weight"),
    same("ffn_gate.weight", "mlp.gate_proj.weight"),
    same("ffn_up.weight", "mlp.up_proj.weight"),
    same("ffn_down.weight", "mlp.down_proj.weight"),
];

pub(super) const GLM_OUTER: [TensorRule; 13] = [
    same("v.patch_embd.weight", "patch_embed.proj.weight"),
    same("v.patch_embd.bias", "patch_embed.proj.bias"),
    same(
        "v.position_embd.weight",
        "embeddings.position_embedding.weight",
    ),
    same("v.norm_embd.weight", "post_conv_layernorm.weight"),
    same("v.post_ln.weight", "post_layernorm.weight"),
    same("mm.patch_merger.weight", "downsample.weight"),
    same("mm.patch_merger.bias", "downsample.bias"),
    same("mm.model.fc.weight", "merger.proj.weight"),
    same("mm.post_norm.weight", "merger.post_projection_norm.weight"),
    same("mm.post_norm.bias", "merger.post_projection_norm.bias"),
    same("mm.gate.weight", "merger.gate_proj.weight"),
    same("mm.up.weight", "merger.up_proj.weight"),
    same("mm.down.weight", "merger.down_proj.weight"),
];

/// A matrix and its bias, where the names of both are in the places.
pub(super) const MATRIX: [TensorRule; 2] = [same("weight", "weight"), same("bias", "bias")];

pub(super) const QWEN3_OUTER: [TensorRule; 9] = [
    same("v.patch_embd.weight", "patch_embed.proj.weight"),
    same("v.patch_embd.bias", "patch_embed.proj.bias"),
    same("v.position_embd.weight", "pos_embed.weight"),
    same("v.post_ln.weight", "merger.norm.weight"),
    same("v.post_ln.bias", "merger.norm.bias"),
    same("mm.0.weight", "merger.linear_fc1.weight"),
    same("mm.0.bias", "merger.linear_fc1.bias"),
    same("mm.2.weight", "merger.linear_fc2.weight"),
    same("mm.2.bias", "merger.linear_fc2.bias"),
];

pub(super) const QWEN3_DEEP: [TensorRule; 6] = [
    same("norm.weight", "norm.weight"),
    same("norm.bias", "norm.bias"),
    same("fc1.weight", "linear_fc1.weight"),
    same("fc1.bias", "linear_fc1.bias"),
    same("fc2.weight", "linear_fc2.weight"),
    same("fc2.bias", "linear_fc2.bias"),
];

pub(super) const CLIP_LAYER: [TensorRule; 16] = [
    same("ln1.weight", "layer_norm1.weight"),
    same("ln1.bias", "layer_norm1.bias"),
    same("ln2.weight", "layer_norm2.weight"),
    same("ln2.bias", "layer_norm2.bias"),
    same("attn_q.weight", "self_attn.q_proj.weight"),
    same("attn_q.bias", "self_attn.q_proj.bias"),
    same("attn_k.weight", "self_attn.k_proj.weight"),
    same("attn_k.bias", "self_attn.k_proj.bias"),
    same("attn_v.weight", "self_attn.v_proj.weight"),
    same("attn_v.bias", "self_attn.v_proj.bias"),
    same("attn_output.weight", "self_attn.out_proj.weight"),
    same("attn_output.bias", "self_attn.out_proj.bias"),
    same("ffn_up.weight", "mlp.fc1.weight"),
    same("ffn_up.bias", "mlp.fc1.bias"),
    same("ffn_down.weight", "mlp.fc2.weight"),
    same("ffn_down.bias", "mlp.fc2.bias"),
];

pub(super) const CLIP_OUTER: [TensorRule; 8] = [
    same("patch_embd.weight", "embeddings.patch_embedding.weight"),
    same("patch_embd.bias", "embeddings.patch_embedding.bias"),
    same(
        "position_embd.weight",
        "embeddings.position_embedding.weight",
    ),
    same("class_embd", "embeddings.class_embedding"),
    same("pre_ln.weight", "pre_layrnorm.weight"),
    same("pre_ln.bias", "pre_layrnorm.bias"),
    same("post_ln.weight", "post_layernorm.weight"),
    same("post_ln.bias", "post_layernorm.bias"),
];

pub(super) const LLAVA_LINE_END: [TensorRule; 1] = [same("image_newline", "image_newline")];

pub(super) const LLAVA_PROJECTOR: [TensorRule; 4] = [
    same("0.weight", "linear_1.weight"),
    same("0.bias", "linear_1.bias"),
    same("2.weight", "linear_2.weight"),
    same("2.bias", "linear_2.bias"),
];

pub(super) const GEMMA_PROJECTOR: [TensorRule; 2] = [
    same("input_projection.weight", "mm_input_projection_weight"),
    with(
        "soft_emb_norm.weight",
        "mm_soft_emb_norm.weight",
        &[TensorStep::PlusOne],
    ),
];

pub(super) const GEMMA4_LAYER: [TensorRule; 13] = [
    same("ln1.weight", "input_layernorm.weight"),
    same("attn_post_norm.weight", "post_attention_layernorm.weight"),
    same("ln2.weight", "pre_feedforward_layernorm.weight"),
    same("ffn_post_norm.weight", "post_feedforward_layernorm.weight"),
    same("attn_q_norm.weight", "self_attn.q_norm.weight"),
    same("attn_k_norm.weight", "self_attn.k_norm.weight"),
    same("attn_q.weight", "self_attn.q_proj.linear.weight"),
    same("attn_k.weight", "self_attn.k_proj.linear.weight"),
    same("attn_v.weight", "self_attn.v_proj.linear.weight"),
    same("attn_output.weight", "self_attn.o_proj.linear.weight"),
    same("ffn_gate.weight", "mlp.gate_proj.linear.weight"),
    same("ffn_up.weight", "mlp.up_proj.linear.weight"),
    same("ffn_down.weight", "mlp.down_proj.linear.weight"),
];

/// The bounds of the matrices of a layer of Gemma 4.
pub(super) const GEMMA4_BOUNDS: [TensorRule; 28] = [
    same("attn_q.input_min", "self_attn.q_proj.input_min"),
    same("attn_q.input_max", "self_attn.q_proj.input_max"),
    same("attn_q.output_min", "self_attn.q_proj.output_min"),
    same("attn_q.output_max", "self_attn.q_proj.output_max"),
    same("attn_k.input_min", "self_attn.k_proj.input_min"),
    same("attn_k.input_max", "self_attn.k_proj.input_max"),
    same("attn_k.output_min", "self_attn.k_proj.output_min"),
    same("attn_k.output_max", "self_attn.k_proj.output_max"),
    same("attn_v.input_min", "self_attn.v_proj.input_min"),
    same("attn_v.input_max", "self_attn.v_proj.input_max"),
    same("attn_v.output_min", "self_attn.v_proj.output_min"),
    same("attn_v.output_max", "self_attn.v_proj.output_max"),
    same("attn_output.input_min", "self_attn.o_proj.input_min"),
    same("attn_output.input_max", "self_attn.o_proj.input_max"),
    same("attn_output.output_min", "self_attn.o_proj.output_min"),
    same("attn_output.output_max", "self_attn.o_proj.output_max"),
    same("ffn_gate.input_min", "mlp.gate_proj.input_min"),
    same("ffn_gate.input_max", "mlp.gate_proj.input_max"),
    same("ffn_gate.output_min", "mlp.gate_proj.output_min"),
    same("ffn_gate.output_max", "mlp.gate_proj.output_max"),
    same("ffn_up.input_min", "mlp.up_proj.input_min"),
    same("ffn_up.input_max", "mlp.up_proj.input_max"),
    same("ffn_up.output_min", "mlp.up_proj.output_min"),
    same("ffn_up.output_max", "mlp.up_proj.output_max"),
    same("ffn_down.input_min", "mlp.down_proj.input_min"),
    same("ffn_down.input_max", "mlp.down_proj.input_max"),
    same("ffn_down.output_min", "mlp.down_proj.output_min"),
    same("ffn_down.output_max", "mlp.down_proj.output_max"),
];

pub(super) const GEMMA4_OUTER: [TensorRule; 5] = [
    same(
        "v.patch_embd.weight",
        "model.vision_tower.patch_embedder.input_proj.weight",
    ),
    same(
        "v.position_embd.weight",
        "model.vision_tower.patch_embedder.position_embedding_table",
    ),
    same("v.std_bias", "model.vision_tower.std_bias"),
    same("v.std_scale", "model.vision_tower.std_scale"),
    same(
        "mm.input_projection.weight",
        "model.embed_vision.embedding_projection.weight",
    ),
];

pub(super) const INTERNVL_LAYER: [TensorRule; 20] = [
    same("ln1.weight", "layernorm_before.weight"),
    same("ln1.bias", "layernorm_before.bias"),
    same("ln2.weight", "layernorm_after.weight"),
    same("ln2.bias", "layernorm_after.bias"),
    same("ls1.weight", "lambda_1"),
    same("ls2.weight", "lambda_2"),
    same("attn_q.weight", "attention.q_proj.weight"),
    same("attn_q.bias", "attention.q_proj.bias"),
    same("attn_k.weight", "attention.k_proj.weight"),
    same("attn_k.bias", "attention.k_proj.bias"),
    same("attn_v.weight", "attention.v_proj.weight"),
    same("attn_v.bias", "attention.v_proj.bias"),
    same("attn_q_norm.weight", "attention.q_norm.weight"),
    same("attn_k_norm.weight", "attention.k_norm.weight"),
    same("attn_output.weight", "attention.projection_layer.weight"),
    same("attn_output.bias", "attention.projection_layer.bias"),
    same("ffn_up.weight", "mlp.fc1.weight"),
    same("ffn_up.bias", "mlp.fc1.bias"),
    same("ffn_down.weight", "mlp.fc2.weight"),
    same("ffn_down.bias", "mlp.fc2.bias"),
];

pub(super) const INTERNVL_OUTER: [TensorRule; 4] = [
    same(
        "patch_embd.weight",
        "embeddings.patch_embeddings.projection.weight",
    ),
    same(
        "patch_embd.bias",
        "embeddings.patch_embeddings.projection.bias",
    ),
    same("position_embd.weight", "embeddings.position_embeddings"),
    same("class_embd", "embeddings.cls_token"),
];

pub(super) const INTERNVL_PROJECTOR: [TensorRule; 6] = [
    same("0.weight", "layer_norm.weight"),
    same("0.bias", "layer_norm.bias"),
    same("1.weight", "linear_1.weight"),
    same("1.bias", "linear_1.bias"),
    same("3.weight", "linear_2.weight"),
    same("3.bias", "linear_2.bias"),
];

pub(super) const LLAMA4_LAYER: [TensorRule; 16] = [
    same("ln1.weight", "input_layernorm.weight"),
    same("ln1.bias", "input_layernorm.bias"),
    same("ln2.weight", "post_attention_layernorm.weight"),
    same("ln2.bias", "post_attention_layernorm.bias"),
    same("attn_q.weight", "self_attn.q_proj.weight"),
    same("attn_q.bias", "self_attn.q_proj.bias"),
    same("attn_k.weight", "self_attn.k_proj.weight"),
    same("attn_k.bias", "self_attn.k_proj.bias"),
    same("attn_v.weight", "self_attn.v_proj.weight"),
    same("attn_v.bias", "self_attn.v_proj.bias"),
    same("attn_output.weight", "self_attn.o_proj.weight"),
    same("attn_output.bias", "self_attn.o_proj.bias"),
    same("ffn_up.weight", "mlp.fc1.weight"),
    same("ffn_up.bias", "mlp.fc1.bias"),
    same("ffn_down.weight", "mlp.fc2.weight"),
    same("ffn_down.bias", "mlp.fc2.bias"),
];

pub(super) const LLAMA4_OUTER: [TensorRule; 10] = [
    same(
        "v.patch_embd.weight",
        "vision_model.patch_embedding.linear.weight",
    ),
    same("v.class_embd", "vision_model.class_embedding"),
    same(
        "v.position_embd.weight",
        "vision_model.positional_embedding_vlm",
    ),
    same("v.pre_ln.weight", "vision_model.layernorm_pre.weight"),
    same("v.pre_ln.bias", "vision_model.layernorm_pre.bias"),
    same("v.post_ln.weight", "vision_model.layernorm_post.weight"),
    same("v.post_ln.bias", "vision_model.layernorm_post.bias"),
    same(
        "mm.model.mlp.1.weight",
        "vision_model.vision_adapter.mlp.fc1.weight",
    ),
    same(
        "mm.model.mlp.2.weight",
        "vision_model.vision_adapter.mlp.fc2.weight",
    ),
    same(
        "mm.model.fc.weight",
        "multi_modal_projector.linear_1.weight",
    ),
];

/// The merger between layers of MiniCPM-V 4.6.
pub(super) const MINICPM_MERGER: [TensorRule; 16] = [
    same("ln1.weight", "layer_norm1.weight"),
    same("ln1.bias", "layer_norm1.bias"),
    same("attn_q.weight", "self_attn.q_proj.weight"),
    same("attn_q.bias", "self_attn.q_proj.bias"),
    same("attn_k.weight", "self_attn.k_proj.weight"),
    same("attn_k.bias", "self_attn.k_proj.bias"),
    same("attn_v.weight", "self_attn.v_proj.weight"),
    same("attn_v.bias", "self_attn.v_proj.bias"),
    same("attn_out.weight", "self_attn.out_proj.weight"),
    same("attn_out.bias", "self_attn.out_proj.bias"),
    same("ds_ln.weight", "pre_norm.weight"),
    same("ds_ln.bias", "pre_norm.bias"),
    same("ds_ffn_up.weight", "linear_1.weight"),
    same("ds_ffn_up.bias", "linear_1.bias"),
    same("ds_ffn_down.weight", "linear_2.weight"),
    same("ds_ffn_down.bias", "linear_2.bias"),
];

/// The projector of MiniCPM-V 4.6.
pub(super) const MINICPM_PROJECTOR: [TensorRule; 6] = [
    same("input_norm.weight", "pre_norm.weight"),
    same("input_norm.bias", "pre_norm.bias"),
    same("up.weight", "linear_1.weight"),
    same("up.bias", "linear_1.bias"),
    same("down.weight", "linear_2.weight"),
    same("down.bias", "linear_2.bias"),
];

/// The one matrix between the tower of Idefics 3 and its decoder.
pub(super) const CONNECTOR: [TensorRule; 1] = [same("weight", "proj.weight")];

pub(super) const LFM2_PROJECTOR: [TensorRule; 6] = [
    same("input_norm.weight", "layer_norm.weight"),
    same("input_norm.bias", "layer_norm.bias"),
    same("1.weight", "linear_1.weight"),
    same("1.bias", "linear_1.bias"),
    same("2.weight", "linear_2.weight"),
    same("2.bias", "linear_2.bias"),
];
