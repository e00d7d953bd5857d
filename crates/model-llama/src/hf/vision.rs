//! [`CLASSES`]: the text decoders of models that see images (Qwen2-VL: Wang et al., arXiv
//! 2409.12191) or hear. Their towers are read by the crate `model-vision`: what those make comes in
//! as rows.

use kv_graph::rope::SectionOrder;
use model_core::gguf::Array;
use model_core::hf::{
    ATTENTION_TENSORS, ATTENTION_VECTORS, ClassWhen, DECODER_KEYS, EMBEDDING_TENSORS,
    GATED_TENSORS, HfClass, HfConfig, INPUT_NORM, Key, Keys, ModelFileError, NORM_BEFORE_FFN,
    PickedRows, RMS_EPS, RopeSettings, SILU, TensorRule, TensorStep, full_attention, head_dim,
    in_layers, only, same, with,
};

use super::keys::EXPERT_KEYS;
use super::recent::{GLM4_TENSORS, OFF};
use super::routed::{EXPERT_WIDTH, GLM4_MOE, GLM4_MOE_KEYS};
use super::tensors::{GATE_AND_UP_IN_COLUMNS, QWEN3_MOE_ROUTER};
use super::{DEEPSEEK_V3, GEMMA3, LLAMA, LLAMA4, MISTRAL, QWEN2, QWEN3};

/// The classes of this file.
pub(super) const CLASSES: &[HfClass] = &[
    QWEN2_VL,
    QWEN2_AUDIO,
    LLAVA,
    HfClass {
        when: MISTRAL_TEXT,
        name: LLAVA.name,
        ..MISTRAL3
    },
    LLAVA_NEXT,
    HfClass {
        when: MISTRAL_TEXT,
        name: LLAVA_NEXT.name,
        other_parts: LLAVA_NEXT.other_parts,
        ..MISTRAL3
    },
    HfClass {
        when: ClassWhen::Says("text_config.model_type", "llama"),
        ..internvl(LLAMA)
    },
    HfClass {
        when: ClassWhen::Says("text_config.model_type", "qwen2"),
        ..internvl(QWEN2)
    },
    HfClass {
        when: ClassWhen::Says("text_config.model_type", "qwen3"),
        ..internvl(QWEN3)
    },
    IDEFICS3,
    HfClass {
        name: "SmolVLMForConditionalGeneration",
        ..IDEFICS3
    },
    GEMMA3_VL,
    LLAMA4_VL,
    MISTRAL3,
    HfClass {
        name: "Qwen2_5_VLForConditionalGeneration",
        ..QWEN2_VL
    },
    GLM4V,
    GLM4V_MOE,
    KIMI_K25,
    HfClass {
        // As transformers calls it.
        name: "Kimi_K25ForConditionalGeneration",
        ..KIMI_K25
    },
    HfClass {
        name: "KimiVLForConditionalGeneration",
        other_parts: TOWER_AND_PROJECTOR,
        ..KIMI_K25
    },
    QWEN3_VL,
    HfClass {
        name: "Qwen3VLMoeForConditionalGeneration",
        architecture: "qwen3vlmoe",
        keys: &[
            DECODER_KEYS,
            RMS_EPS,
            EXPERT_KEYS,
            EXPERT_WIDTH,
            &[
                SILU,
                only("attention_bias", OFF),
                Key::With(full_attention),
                Key::With(interleaved_sections),
                Key::With(deep_rows),
            ],
        ],
        tensors: &[
            EMBEDDING_TENSORS,
            INPUT_NORM,
            ATTENTION_TENSORS,
            ATTENTION_VECTORS,
            NORM_BEFORE_FFN,
            GATED_TENSORS,
            QWEN3_MOE_ROUTER,
            QWEN3_VL_EXPERTS,
        ],
        ..QWEN3_VL
    },
];

const QWEN3_VL: HfClass = HfClass {
    name: "Qwen3VLForConditionalGeneration",
    architecture: "qwen3vl",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        &[
            SILU,
            Key::With(full_attention),
            Key::With(interleaved_sections),
            Key::With(deep_rows),
        ],
    ],
    section: Some("text_config"),
    text: "language_model.",
    other_parts: VISION,
    defaults: &[("head_dim", 128), ("rope_theta", 500_000)],
    ..QWEN3
};

/// Kimi K2.5 and 2.6, and with another projector Kimi-VL (arXiv 2504.07491): DeepSeek V3's text.
const KIMI_K25: HfClass = HfClass {
    name: "KimiK25ForConditionalGeneration",
    section: Some("text_config"),
    text: "language_model.",
    other_parts: &[
        "vision_tower.",
        "mm_projector.",
        "model.vision_tower.",
        "model.mm_projector.",
    ],
    ..DEEPSEEK_V3
};

/// GLM-4.1V (arXiv 2507.01006).
const GLM4V: HfClass = HfClass {
    name: "Glm4vForConditionalGeneration",
    architecture: "glm4",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        &[SILU, Key::With(consecutive_sections)],
    ],
    tensors: &[EMBEDDING_TENSORS, INPUT_NORM, GLM4V_ATTENTION, GLM4_TENSORS],
    section: Some("text_config"),
    text: "language_model.",
    other_parts: VISION,
    defaults: &[("num_key_value_heads", 2)],
    ..LLAMA
};

/// GLM-4.5V.
const GLM4V_MOE: HfClass = HfClass {
    name: "Glm4vMoeForConditionalGeneration",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        EXPERT_WIDTH,
        &[SILU, Key::With(consecutive_sections)],
        GLM4_MOE_KEYS,
    ],
    section: Some("text_config"),
    text: "language_model.",
    other_parts: VISION,
    ..GLM4_MOE
};

/// Values that rotate together are neighbours in these directories, and half of what rotates apart
/// in files.
const GLM4V_ATTENTION: &[TensorRule] = &in_layers(
    "model.layers.{l}.self_attn.",
    [
        with("attn_q.weight", "q_proj.weight", OF_QUERIES),
        with("attn_q.bias", "q_proj.bias", OF_QUERIES),
        with("attn_k.weight", "k_proj.weight", OF_KEYS),
        with("attn_k.bias", "k_proj.bias", OF_KEYS),
        same("attn_v.weight", "v_proj.weight"),
        same("attn_v.bias", "v_proj.bias"),
        same("attn_output.weight", "o_proj.weight"),
    ],
);

const OF_QUERIES: &[TensorStep] = &[TensorStep::PickedRows(|config| {
    halves(config, "num_attention_heads")
})];
const OF_KEYS: &[TensorStep] = &[TensorStep::PickedRows(|config| {
    halves(config, "num_key_value_heads")
})];

/// Of each head the rows with even numbers among those that rotate, then those with odd ones, and
/// the rest.
fn halves(config: &HfConfig, heads: &str) -> Result<PickedRows, ModelFileError> {
    let (n_heads, width) = (config.count(heads)?, head_dim(config)?);
    let part = RopeSettings::rotated_part(config, None)?;
    let n_rot = (width as f64 * part) as usize;
    let mut rows = Vec::new();
    for start in (0..n_heads).map(|head| head * width) {
        for first in [start, start + 1] {
            let every_second = (first..start + n_rot).step_by(2);
            rows.extend(every_second.map(|row| row..row + 1));
        }
        rows.push(start + n_rot..start + width);
    }
    Ok(PickedRows {
        n_rows: n_heads * width,
        rows,
    })
}

/// Gate and up are the halves of the columns of one matrix `[experts, dim, 2 hidden]`.
const QWEN3_VL_EXPERTS: &[TensorRule] =
    &in_layers("model.layers.{l}.mlp.experts.", GATE_AND_UP_IN_COLUMNS);

/// A decoder that is a Mistral.
const MISTRAL_TEXT: ClassWhen = ClassWhen::Says("text_config.model_type", "mistral");

/// LLaVA 1.5 (Liu et al., arXiv 2310.03744) with a Llama.
const LLAVA: HfClass = HfClass {
    name: "LlavaForConditionalGeneration",
    section: Some("text_config"),
    text: "language_model.",
    other_parts: TOWER_AND_PROJECTOR,
    ..LLAMA
};

/// LLaVA 1.6 with a Llama.
const LLAVA_NEXT: HfClass = HfClass {
    name: "LlavaNextForConditionalGeneration",
    other_parts: &[
        "vision_tower.",
        "multi_modal_projector.",
        "image_newline",
        "model.vision_tower.",
        "model.multi_modal_projector.",
        "model.image_newline",
    ],
    ..LLAVA
};

/// InternVL (Chen et al., arXiv 2312.14238) with the decoder of this class.
const fn internvl(decoder: HfClass) -> HfClass {
    HfClass {
        name: "InternVLForConditionalGeneration",
        section: Some("text_config"),
        text: "language_model.",
        other_parts: TOWER_AND_PROJECTOR,
        ..decoder
    }
}

/// Idefics 3 (Laurençon et al., arXiv 2408.12637) and SmolVLM, with a Llama.
const IDEFICS3: HfClass = HfClass {
    name: "Idefics3ForConditionalGeneration",
    section: Some("text_config"),
    text: "text_model.",
    other_parts: &["model.vision_model.", "model.connector."],
    ..LLAMA
};

/// Gemma 3 with SigLIP (arXiv 2503.19786).
const GEMMA3_VL: HfClass = HfClass {
    name: "Gemma3ForConditionalGeneration",
    section: Some("text_config"),
    text: "language_model.",
    other_parts: TOWER_AND_PROJECTOR,
    ..GEMMA3
};

/// Llama 4 with its tower.
const LLAMA4_VL: HfClass = HfClass {
    name: "Llama4ForConditionalGeneration",
    section: Some("text_config"),
    text: "language_model.",
    other_parts: &["vision_model.", "multi_modal_projector."],
    ..LLAMA4
};

/// Mistral Small 3.1 with the tower of Pixtral (arXiv 2410.07073).
const MISTRAL3: HfClass = HfClass {
    name: "Mistral3ForConditionalGeneration",
    section: Some("text_config"),
    text: "language_model.",
    other_parts: TOWER_AND_PROJECTOR,
    ..MISTRAL
};

/// Tensors of towers of their own and of what leads from there to the decoder.
const TOWER_AND_PROJECTOR: &[&str] = &[
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
];

const QWEN2_VL: HfClass = HfClass {
    name: "Qwen2VLForConditionalGeneration",
    architecture: "qwen2vl",
    keys: &[
        DECODER_KEYS,
        RMS_EPS,
        &[
            SILU,
            Key::With(full_attention),
            Key::With(consecutive_sections),
        ],
    ],
    section: Some("text_config"),
    text: "language_model.",
    other_parts: VISION,
    defaults: &[("rope_theta", 1_000_000)],
    ..QWEN2
};

/// Qwen2-Audio (Chu et al., arXiv 2407.10759).
const QWEN2_AUDIO: HfClass = HfClass {
    name: "Qwen2AudioForConditionalGeneration",
    section: Some("text_config"),
    text: "language_model.",
    other_parts: &[
        "audio_tower.",
        "multi_modal_projector.",
        "model.audio_tower.",
        "model.multi_modal_projector.",
    ],
    defaults: &[
        ("hidden_size", 4096),
        ("intermediate_size", 22_016),
        ("num_hidden_layers", 32),
        ("num_attention_heads", 32),
        ("num_key_value_heads", 32),
        ("vocab_size", 151_936),
        ("rope_theta", 10_000),
    ],
    ..QWEN2
};

/// Tensors of vision towers.
const VISION: &[&str] = &["visual.", "model.visual."];

/// The rows that Qwen3-VL's tower adds behind the first layers.
fn deep_rows(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "vision_config.deepstack_visual_indexes";
    let listed = config.optional_numbers(key)?.map(|layers| layers.len());
    // Of the tower's layers, transformers takes 8, 16 and 24 where none are listed.
    let n = match (listed, config.value("vision_config")) {
        (Some(n), _) => n,
        (None, Some(_)) => 3,
        (None, None) => 0,
    };
    keys.set("n_deepstack_layers", u32::try_from(n).unwrap_or(u32::MAX));
    Ok(())
}

fn consecutive_sections(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    sections(config, keys, SectionOrder::Consecutive)
}

fn interleaved_sections(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    sections(config, keys, SectionOrder::Interleaved)
}

/// The rotation, with the pairs that rotate with rows and columns.
fn sections(config: &HfConfig, keys: &mut Keys, order: SectionOrder) -> Result<(), ModelFileError> {
    let interleaved = order == SectionOrder::Interleaved;
    let objects = ["rope_parameters", "rope_scaling"];
    let found = objects.into_iter().find(|o| config.value(o).is_some());
    let object = found.unwrap_or("rope_parameters");
    let at = |key: &str| format!("{object}.{key}");
    let flag = at("mrope_interleaved");
    if config
        .optional_flag(&flag)?
        .is_some_and(|flag| flag != interleaved)
    {
        return Err(config.wrong(&flag, interleaved.to_string()));
    }
    let key = at("mrope_section");
    let wanted = "three whole numbers: pairs that rotate with position, row and column";
    let pairs = config.optional_numbers(&key)?;
    let pairs = pairs.ok_or_else(|| config.missing(&key, wanted))?;
    let whole = |&n: &f64| n.fract() == 0.0 && (0.0..65536.0).contains(&n);
    if pairs.len() != 3 || !pairs.iter().all(whole) {
        return Err(config.wrong(&key, wanted));
    }
    // The fourth is of a coordinate that no model has.
    let pairs = pairs.iter().map(|&n| n as i32).chain([0]).collect();
    keys.set("rope.dimension_sections", Array::I32(pairs));
    let mut rest = config.without(&flag).without(&key);
    for kind in [at("rope_type"), at("type")] {
        // What older files call the kind that does not stretch.
        if rest.optional_text(&kind)? == Some("mrope") {
            rest = rest.without(&kind);
        }
    }
    RopeSettings::read(&rest, None)?.write(&rest, keys)
}
