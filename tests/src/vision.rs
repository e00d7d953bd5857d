//! Tiny models that see pictures or hear sounds, with a tokenizer and a chat template, and the
//! pictures and sounds that their references are about.

use std::path::Path;

use model_core::media::MediaKind;
use serde_json::{Value, json};

use crate::sound::sound;
use crate::{Recipe, fixture};

/// The models, and what their templates write for a picture.
pub const MODELS: [(&str, &str); 20] = [
    ("qwen2_vl", "<|vision_start|><|image_pad|><|vision_end|>"),
    ("qwen2_5_vl", "<|vision_start|><|image_pad|><|vision_end|>"),
    ("qwen3_vl", "<|vision_start|><|image_pad|><|vision_end|>"),
    ("qwen3_5", "<|vision_start|><|image_pad|><|vision_end|>"),
    ("qwen3_5_moe", "<|vision_start|><|image_pad|><|vision_end|>"),
    (
        "qwen3_vl_moe",
        "<|vision_start|><|image_pad|><|vision_end|>",
    ),
    ("glm4v", "<|begin_of_image|><|image|><|end_of_image|>"),
    ("glm4v_moe", "<|begin_of_image|><|image|><|end_of_image|>"),
    ("llava", "<image>"),
    ("llava_next", "<image>"),
    ("gemma3", "<start_of_image>"),
    ("mistral3", "[IMG]"),
    ("internvl", "<IMG_CONTEXT>"),
    ("smolvlm", "<image>"),
    ("pixtral", "[IMG]"),
    ("lfm2_vl", "<image>"),
    ("llama4", "<|image|>"),
    ("gemma4", "<|image|>"),
    ("gemma4_dense", "<|image|>"),
    ("minicpmv4_6", "<|image_pad|>"),
];

/// The models that hear, and what their templates write for a sound.
pub const HEARING: [(&str, &str); 1] = [("qwen2_audio", "<|audio_bos|><|AUDIO|><|audio_eos|>")];

/// The models that see, and those that hear.
pub fn all_models() -> impl Iterator<Item = (&'static str, &'static str)> {
    MODELS.into_iter().chain(HEARING)
}

/// True if this is a model that hears.
fn hears(name: &str) -> bool {
    HEARING.iter().any(|(hearing, _)| *hearing == name)
}

/// The tokens behind those of `tokenizers/spm512`, as in `fixtures/vision/make.py`.
const ADDED: [&str; 8] = [
    "<|image_pad|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<image>",
    "<start_of_image>",
    "<end_of_image>",
    "<image_soft_token>",
    "<pad>",
];

/// Those behind them, of one model alone.
fn own_tokens(name: &str) -> Vec<String> {
    let own: &[&str] = match name {
        "mistral3" | "pixtral" => &["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "glm4v" | "glm4v_moe" => &["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"],
        "llama4" => &[
            "<|image_start|>",
            "<|image_end|>",
            "<|image|>",
            "<|patch|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
        ],
        "gemma4" | "gemma4_dense" => &["<|image>", "<image|>", "<|image|>"],
        "minicpmv4_6" => &[
            "</image>",
            "<slice>",
            "</slice>",
            "<image_id>",
            "</image_id>",
        ],
        "qwen2_audio" => &["<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"],
        "internvl" => &["<img>", "</img>", "<IMG_CONTEXT>"],
        "smolvlm" => &["<fake_token_around_image>", "<global-img>"],
        "lfm2_vl" => &["<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"],
        _ => &[],
    };
    let mut own: Vec<String> = own.iter().map(|&text| text.to_owned()).collect();
    let [n_rows, before, behind] = match name {
        "smolvlm" => ["3", "<row_", ">"],
        "lfm2_vl" => ["2", "<|img_row_", "|>"],
        _ => return own,
    };
    let n_rows: u32 = n_rows.parse().unwrap();
    let places = (1..=n_rows).flat_map(|row| (1..=3).map(move |column| (row, column)));
    own.extend(places.map(|(row, column)| format!("{before}{row}_col_{column}{behind}")));
    own
}

/// Widths and heights of the pictures of a reference.
pub const SIZES: [[u32; 2]; 2] = [[120, 90], [20, 12]];

/// Width and height of a third picture of some references, and the number of its first rows that
/// come of pixels as they are: the others are of a smaller copy.
pub fn exact_size(name: &str) -> Option<([u32; 2], usize)> {
    match name {
        "glm4v" | "glm4v_moe" | "qwen3_vl" | "qwen3_5" | "qwen3_5_moe" => Some(([32, 16], 8)),
        "internvl" | "lfm2_vl" => Some(([16, 16], 4)),
        "llava_next" => Some(([16, 16], 36)),
        "llama4" => Some(([32, 32], 16)),
        "gemma4" | "gemma4_dense" => Some(([48, 36], 12)),
        "smolvlm" => Some(([54, 54], 36)),
        "minicpmv4_6" => Some(([64, 16], 4)),
        _ => None,
    }
}

/// The recipe of this name in `fixtures/vision`, or in `fixtures/audio`.
pub fn recipe(name: &str) -> Recipe {
    let folder = if hears(name) { "audio" } else { "vision" };
    Recipe::open(&fixture(folder).join(name))
}

/// The bytes of a picture or a sound of this size: [`picture`] or [`sound`].
pub fn media(media: MediaKind, size: [u32; 2]) -> Vec<u8> {
    match media {
        MediaKind::Picture => picture(size),
        MediaKind::Sound => sound(size),
    }
}

/// Writes the directory of a model, whose chat template writes `mark` for a picture or a sound and
/// nothing around messages.
pub fn expand(name: &str, mark: &str, to: &Path) {
    let recipe = recipe(name);
    recipe.expand(to);
    let file = "preprocessor_config.json";
    std::fs::copy(recipe.folder().join(file), to.join(file)).unwrap();
    let spm = fixture("tokenizers/spm512");
    let tokenizer = std::fs::read(spm.join("tokenizer.json")).unwrap();
    let mut tokenizer: Value = serde_json::from_slice(&tokenizer).unwrap();
    let own = own_tokens(name);
    let own = own.iter().map(String::as_str);
    for (id, text) in (512..).zip(ADDED.into_iter().chain(own)) {
        tokenizer["added_tokens"]
            .as_array_mut()
            .unwrap()
            .push(json!({
                "id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": true,
            }));
    }
    std::fs::write(to.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let template = format!(
        "{{% for m in messages %}}{{% if m.content is string %}}{{{{ m.content }}}}{{% else %}}\
         {{% for p in m.content %}}{{% if p.type in ['image', 'audio'] %}}{mark}{{% else %}}{{{{ p.text }}}}\
         {{% endif %}}{{% endfor %}}{{% endif %}}{{% endfor %}}"
    );
    let settings = std::fs::read(spm.join("tokenizer_config.json")).unwrap();
    let mut settings: Value = serde_json::from_slice(&settings).unwrap();
    settings["chat_template"] = json!(template);
    std::fs::write(to.join("tokenizer_config.json"), settings.to_string()).unwrap();
}

/// A picture with slopes in red and green and a pattern in blue, as a BMP file.
pub fn picture([width, height]: [u32; 2]) -> Vec<u8> {
    let row = (3 * width).next_multiple_of(4);
    let n_bytes = 54 + row * height;
    let mut file = b"BM".to_vec();
    for value in [
        n_bytes,
        0,
        54,
        40,
        width,
        height,
        1 | 24 << 16,
        0,
        row * height,
        0,
        0,
        0,
        0,
    ] {
        file.extend(value.to_le_bytes());
    }
    // From the lowest row on, blue first.
    for y in (0..height).rev() {
        let pixels = (0..width).flat_map(|x| [x * y, y * 9, x * 5]);
        file.extend(pixels.map(|value| value as u8));
        file.resize(file.len() + (row - 3 * width) as usize, 0);
    }
    file
}
