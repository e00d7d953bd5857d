//! What programs ask of a model: sizes, metadata and its chat template.
//!
//! Invariant: a model that does not exist has no sizes (0) and no texts; a text that does not fit
//! is cut as `snprintf` cuts it. Changes nothing.

use std::ffi::c_char;

use kv_core::Window;
use kv_core::layers::LayerMemory;
use kv_graph::rope::{RopeStyle, SectionOrder};
use kv_graph::weights::WeightSource;
use kv_graph::{GraphShape, Op};
use model_core::architecture::OutputKind;
use model_core::gguf::{Metadata, Value};

use crate::abi::NO_TOKEN;
use crate::ffi::{CText, Handle, Out, c_api, count};
use crate::log;
use crate::model::{Model, SharedModel, Vocab};

fn shared<'a>(name: &str, model: Handle<Model>) -> Option<&'a SharedModel> {
    let model = model.get();
    if model.is_none() {
        log::error(&format!("{name}: there is no such model"));
    }
    model.map(|model| &*model.shared)
}

fn number(name: &str, model: Handle<Model>, key: &str) -> i32 {
    let n = shared(name, model).and_then(|model| model.number(key));
    n.map_or(0, |n| i32::try_from(n).unwrap_or(i32::MAX))
}

/// A value as llama.cpp writes it; `None` for lists.
pub(crate) fn text_of(value: &Value) -> Option<String> {
    match value {
        Value::Array(_) => None,
        Value::String(text) => Some(text.clone()),
        Value::F32(number) => Some(format!("{number:.6}")),
        Value::F64(number) => Some(format!("{number:.6}")),
        value => Some(value.to_string()),
    }
}

/// The keys with values that are no lists, in order.
pub(crate) fn scalars(metadata: &Metadata) -> Vec<(&str, String)> {
    let scalar = |(key, value)| text_of(value).map(|text| (key, text));
    let mut all: Vec<(&str, String)> = metadata.iter().filter_map(scalar).collect();
    all.sort_unstable();
    all
}

/// The keys of a model.
fn keys<'a>(name: &str, model: Handle<Model>) -> Vec<(&'a str, String)> {
    shared(name, model).map_or(Vec::new(), |model| scalars(&model.metadata))
}

/// The entry of a number.
pub(crate) fn entry<'a, 'm>(
    all: &'a [(&'m str, String)],
    index: i32,
) -> Option<&'a (&'m str, String)> {
    usize::try_from(index).ok().and_then(|index| all.get(index))
}

pub(crate) fn write_or_fail(buffer: Out<c_char>, size: usize, text: Option<&str>) -> i32 {
    if let Some(text) = text {
        return buffer.write_text(size, text);
    }
    buffer.write_text(size, "");
    -1
}

/// The name of a file type; as llama.cpp shows it.
fn ftype_name(ftype: i32) -> &'static std::ffi::CStr {
    match ftype {
        0 => c"all F32",
        1 => c"F16",
        2 => c"Q4_0",
        3 => c"Q4_1",
        7 => c"Q8_0",
        8 => c"Q5_0",
        9 => c"Q5_1",
        10 => c"Q2_K - Medium",
        11 => c"Q3_K - Small",
        12 => c"Q3_K - Medium",
        13 => c"Q3_K - Large",
        14 => c"Q4_K - Small",
        15 => c"Q4_K - Medium",
        16 => c"Q5_K - Small",
        17 => c"Q5_K - Medium",
        18 => c"Q6_K",
        25 => c"IQ4_NL - 4.5 bpw",
        30 => c"IQ4_XS - 4.25 bpw",
        32 => c"BF16",
        36 => c"TQ1_0 - 1.69 bpw ternary",
        37 => c"TQ2_0 - 2.06 bpw ternary",
        38 => c"MXFP4 MoE",
        39 => c"NVFP4",
        _ => c"unknown, may not work",
    }
}

/// `llama_ftype` of a file that does not say it.
const GUESSED: i32 = 1024;

fn ftype(model: &SharedModel) -> i32 {
    let ftype = model.metadata.optional::<u32>("general.file_type");
    ftype.ok().flatten().map_or(GUESSED, |n| n as i32)
}

fn n_params(model: &SharedModel) -> u64 {
    let tensors = model.file.tensors().iter();
    tensors.map(|tensor| tensor.n_values()).sum()
}

fn n_bytes(model: &SharedModel) -> u64 {
    let of = |name: &str| {
        model
            .file
            .get(name)
            .map_or(0, |weight| weight.info().n_bytes())
    };
    let tensors = model.file.tensors().iter();
    tensors.map(|tensor| of(tensor.name())).sum()
}

/// True for recurrent layers, and for those of attention.
pub(crate) fn has_states(model: &SharedModel) -> [bool; 2] {
    let Some(model) = &model.architecture else {
        return [false; 2];
    };
    let layers = model.layers();
    let recurrent = layers
        .iter()
        .any(|(layer, _)| layers.recurrent(layer).is_some());
    let attention = layers
        .iter()
        .any(|(_, layer)| !matches!(layer, LayerMemory::Recurrent(_) | LayerMemory::Nothing));
    [recurrent, attention]
}

fn window(model: &SharedModel) -> u32 {
    let Some(model) = &model.architecture else {
        return 0;
    };
    let windows = model.layers().parts().into_iter().map(|part| part.window);
    windows
        .filter_map(|window| match window {
            Window::Sliding(n) | Window::Chunked(n) | Window::Symmetric(n) => Some(n),
            _ => None,
        })
        .max()
        .unwrap_or(0)
}

/// `llama_rope_type` of models whose tokens have a row and a column, one section after the other.
pub(crate) const MROPE: i32 = 8;
/// The same, sections in turn.
pub(crate) const IMROPE: i32 = 40;

pub(crate) fn rope_type(model: &SharedModel) -> i32 {
    let one = GraphShape {
        n_tokens: 1,
        n_outputs: 1,
    };
    let graph = model
        .architecture
        .as_ref()
        .and_then(|model| model.graph(one).ok());
    let Some(graph) = graph else {
        return -1;
    };
    let found = graph.nodes().iter().find_map(|node| match &node.op {
        Op::Rope { rope } => Some(match rope.style {
            RopeStyle::Norm => 0,
            RopeStyle::Neox => 2,
        }),
        Op::RopeSections { sections, .. } => Some(match sections.order {
            SectionOrder::Consecutive => MROPE,
            SectionOrder::Interleaved => IMROPE,
        }),
        _ => None,
    });
    found.unwrap_or(-1)
}

c_api! {
    fn llama_model_get_vocab(model: Handle<Model>) -> Handle<Vocab> = Handle::NULL; {
        model
    }

    fn llama_model_rope_type(model: Handle<Model>) -> i32 = -1; {
        shared("llama_model_rope_type", model).map_or(-1, rope_type)
    }

    fn llama_model_n_ctx_train(model: Handle<Model>) -> i32 = 0; {
        number("llama_model_n_ctx_train", model, "context_length")
    }

    fn llama_n_ctx_train(model: Handle<Model>) -> i32 = 0; {
        number("llama_n_ctx_train", model, "context_length")
    }

    fn llama_model_n_embd(model: Handle<Model>) -> i32 = 0; {
        shared("llama_model_n_embd", model).map_or(0, |model| count(model.n_embd()))
    }

    fn llama_n_embd(model: Handle<Model>) -> i32 = 0; {
        shared("llama_n_embd", model).map_or(0, |model| count(model.n_embd()))
    }

    fn llama_model_n_embd_inp(model: Handle<Model>) -> i32 = 0; {
        shared("llama_model_n_embd_inp", model).map_or(0, |model| count(model.n_embd_inp()))
    }

    fn llama_model_n_embd_out(model: Handle<Model>) -> i32 = 0; {
        shared("llama_model_n_embd_out", model).map_or(0, |model| count(model.n_embd()))
    }

    fn llama_model_n_layer(model: Handle<Model>) -> i32 = 0; {
        number("llama_model_n_layer", model, "block_count")
    }

    fn llama_n_layer(model: Handle<Model>) -> i32 = 0; {
        number("llama_n_layer", model, "block_count")
    }

    fn llama_model_n_layer_nextn(model: Handle<Model>) -> i32 = 0; {
        number("llama_model_n_layer_nextn", model, "nextn_predict_layers")
    }

    fn llama_model_n_head(model: Handle<Model>) -> i32 = 0; {
        number("llama_model_n_head", model, "attention.head_count")
    }

    fn llama_n_head(model: Handle<Model>) -> i32 = 0; {
        number("llama_n_head", model, "attention.head_count")
    }

    fn llama_model_n_head_kv(model: Handle<Model>) -> i32 = 0; {
        let name = "llama_model_n_head_kv";
        match number(name, model, "attention.head_count_kv") {
            0 => number(name, model, "attention.head_count"),
            n => n,
        }
    }

    fn llama_model_n_swa(model: Handle<Model>) -> i32 = 0; {
        shared("llama_model_n_swa", model).map_or(0, |model| count(window(model) as usize))
    }

    fn llama_model_rope_freq_scale_train(model: Handle<Model>) -> f32 = 1.0; {
        let factor = shared("llama_model_rope_freq_scale_train", model)
            .and_then(|model| {
                let factor = model.real("rope.scaling.factor");
                factor.or_else(|| model.real("rope.scale_linear"))
            });
        factor.filter(|&factor| factor != 0.0).map_or(1.0, |factor| 1.0 / factor)
    }

    fn llama_model_n_cls_out(model: Handle<Model>) -> u32 = 0; {
        let model = shared("llama_model_n_cls_out", model);
        let output = model.and_then(|model| Some(model.architecture.as_ref()?.output()));
        match output {
            Some(OutputKind::Scores { n_labels }) => n_labels as u32,
            _ => 1,
        }
    }

    fn llama_model_cls_label(model: Handle<Model>, index: u32) -> *const c_char = std::ptr::null(); {
        let label = shared("llama_model_cls_label", model).and_then(|model| {
            let architecture: &str = model.metadata.get("general.architecture").ok()?;
            let key = format!("{architecture}.classifier.output_labels");
            let labels: &[String] = model.metadata.optional(&key).ok()??;
            Some(model.hand_out(labels.get(index as usize)?))
        });
        label.unwrap_or(std::ptr::null())
    }

    fn llama_model_meta_val_str(model: Handle<Model>, key: CText, buffer: Out<c_char>, size: usize)
        -> i32 = -1; {
        let model = shared("llama_model_meta_val_str", model);
        let text = model.and_then(|model| text_of(model.metadata.value(key.get()?)?));
        write_or_fail(buffer, size, text.as_deref())
    }

    fn llama_model_meta_count(model: Handle<Model>) -> i32 = 0; {
        count(keys("llama_model_meta_count", model).len())
    }

    fn llama_model_meta_key_str(key: i32) -> *const c_char = std::ptr::null(); {
        let name = match key {
            0 => c"general.sampling.sequence",
            1 => c"general.sampling.top_k",
            2 => c"general.sampling.top_p",
            3 => c"general.sampling.min_p",
            4 => c"general.sampling.xtc_probability",
            5 => c"general.sampling.xtc_threshold",
            6 => c"general.sampling.temp",
            7 => c"general.sampling.penalty_last_n",
            8 => c"general.sampling.penalty_repeat",
            9 => c"general.sampling.mirostat",
            10 => c"general.sampling.mirostat_tau",
            11 => c"general.sampling.mirostat_eta",
            _ => return std::ptr::null(),
        };
        name.as_ptr()
    }

    fn llama_model_meta_key_by_index(
        model: Handle<Model>, index: i32, buffer: Out<c_char>, size: usize,
    ) -> i32 = -1; {
        let all = keys("llama_model_meta_key_by_index", model);
        write_or_fail(buffer, size, entry(&all, index).map(|(key, _)| *key))
    }

    fn llama_model_meta_val_str_by_index(
        model: Handle<Model>, index: i32, buffer: Out<c_char>, size: usize,
    ) -> i32 = -1; {
        let all = keys("llama_model_meta_val_str_by_index", model);
        write_or_fail(buffer, size, entry(&all, index).map(|(_, value)| value.as_str()))
    }

    fn llama_model_desc(model: Handle<Model>, buffer: Out<c_char>, size: usize) -> i32 = -1; {
        let text = shared("llama_model_desc", model).map(|model| {
            let architecture: &str = model.metadata.get("general.architecture").unwrap_or("?");
            let label: Option<&str> = model.metadata.optional("general.size_label").ok().flatten();
            let n_layers = model.number("block_count").unwrap_or(0);
            let size = label.map_or_else(|| format!("{n_layers} layers"), str::to_owned);
            let kind = ftype_name(ftype(model)).to_str().unwrap_or_default();
            format!("{architecture} {size} {kind}")
        });
        write_or_fail(buffer, size, text.as_deref())
    }

    fn llama_model_ftype(model: Handle<Model>) -> i32 = GUESSED; {
        shared("llama_model_ftype", model).map_or(GUESSED, ftype)
    }

    fn llama_ftype_name(ftype: i32) -> *const c_char = std::ptr::null(); {
        ftype_name(ftype).as_ptr()
    }

    fn llama_model_size(model: Handle<Model>) -> u64 = 0; {
        shared("llama_model_size", model).map_or(0, n_bytes)
    }

    fn llama_model_n_params(model: Handle<Model>) -> u64 = 0; {
        shared("llama_model_n_params", model).map_or(0, n_params)
    }

    fn llama_model_chat_template(model: Handle<Model>, name: CText)
        -> *const c_char = std::ptr::null(); {
        let template = shared("llama_model_chat_template", model).and_then(|model| {
            let key = match name.get() {
                None => "tokenizer.chat_template".to_owned(),
                Some(name) => format!("tokenizer.chat_template.{name}"),
            };
            let template: &str = model.metadata.optional(&key).ok()??;
            Some(model.hand_out(template))
        });
        template.unwrap_or(std::ptr::null())
    }

    fn llama_model_has_encoder(model: Handle<Model>) -> bool = false; {
        let model = shared("llama_model_has_encoder", model);
        let architecture = model.and_then(|model| model.architecture.as_ref());
        architecture.is_some_and(|model| model.source_encoder().is_some())
    }

    fn llama_model_has_decoder(model: Handle<Model>) -> bool = false; {
        shared("llama_model_has_decoder", model).is_some()
    }

    fn llama_model_decoder_start_token(model: Handle<Model>) -> i32 = NO_TOKEN; {
        let model = shared("llama_model_decoder_start_token", model);
        let encoder = model.and_then(|model| model.architecture.as_ref()?.source_encoder());
        let start = encoder.and_then(|encoder| encoder.start.first().copied());
        start.map_or(NO_TOKEN, |token| token.0 as i32)
    }

    fn llama_model_is_recurrent(model: Handle<Model>) -> bool = false; {
        shared("llama_model_is_recurrent", model).is_some_and(|m| has_states(m) == [true, false])
    }

    fn llama_model_is_hybrid(model: Handle<Model>) -> bool = false; {
        shared("llama_model_is_hybrid", model).is_some_and(|m| has_states(m) == [true, true])
    }

    fn llama_model_is_diffusion(model: Handle<Model>) -> bool = false; {
        let model = shared("llama_model_is_diffusion", model);
        let output = model.and_then(|model| Some(model.architecture.as_ref()?.output()));
        matches!(output, Some(OutputKind::MaskLogits(_)))
    }
}
