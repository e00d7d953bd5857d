//! [`classes`]: how directories of encoders are translated. Data over the tables that
//! [`model_core::hf`] shares. Heads that predict tokens are left out: an encoder gives rows, or the
//! scores of a classification head.

mod albert;
mod bart;
mod bert;
mod deberta;
mod gemma;
mod jina;
mod modern;
mod mpnet;
mod nomic;
mod rotated;
mod t5;

use model_core::hf::{HfClass, HfConfig, Key, Keys, ModelFileError, RopeSettings};
use model_core::hyperparameters::{ACTIVATION, activation_named, activation_names};
use model_core::sentence::Pooling;

use crate::head::HEAD_ACTIVATION;

/// All classes.
pub(crate) fn classes() -> impl Iterator<Item = &'static HfClass> {
    let files = [
        bert::CLASSES,
        albert::CLASSES,
        modern::CLASSES,
        jina::CLASSES,
        mpnet::CLASSES,
        deberta::CLASSES,
        nomic::CLASSES,
        rotated::CLASSES,
        gemma::CLASSES,
        t5::CLASSES,
        bart::CLASSES,
    ];
    files.into_iter().flatten()
}

/// Tokens see later ones.
const NOT_CAUSAL: Key = Key::With(|_, keys| {
    keys.set("attention.causal", false);
    Ok(())
});

/// The `eps` of layer norms.
const LAYER_NORM_EPS: Key = Key::Number {
    to: "attention.layer_norm_epsilon",
    from: "layer_norm_eps",
};

/// The bases of rotations of layers without and with a window, which `older` files have under these
/// keys.
fn two_bases(config: &HfConfig, keys: &mut Keys, older: [&str; 2]) -> Result<(), ModelFileError> {
    let layers = ["full_attention", "sliding_attention"];
    let bases = ["rope.freq_base", "rope.freq_base_swa"].into_iter();
    for ((to, layers), old) in bases.zip(layers).zip(older) {
        keys.set(to, RopeSettings::plain_base(config, layers, old)? as f32);
    }
    Ok(())
}

/// The output is the scores of texts.
const RANK: &[Key] = &[Key::Constant {
    to: "pooling_type",
    value: Pooling::Rank.code(),
}];

/// The activation, which must be one that there is.
fn activation(config: &HfConfig, keys: &mut Keys, key: &str) -> Result<(), ModelFileError> {
    let known = || format!("one of: {}", activation_names());
    match config.optional_text(key)? {
        None => Err(config.missing(key, known())),
        Some(name) if activation_named(name).is_some() => {
            keys.set(ACTIVATION, name);
            Ok(())
        }
        Some(_) => Err(config.wrong(key, known())),
    }
}

/// The function after the dense layer of a classification head, by the name that files have for it.
fn head_activation(keys: &mut Keys, name: &str) {
    keys.set(HEAD_ACTIVATION, name);
}

/// The row of the position table that the first token has, where positions begin after that of the
/// padding.
fn first_position(config: &HfConfig) -> Result<usize, ModelFileError> {
    match config.optional_number("pad_token_id")? {
        None => Ok(2),
        Some(id) if id.fract() == 0.0 && (0.0..1e9).contains(&id) => Ok(id as usize + 1),
        Some(_) => Err(config.wrong("pad_token_id", "a token id")),
    }
}

/// The rows before the first position are no positions.
fn length_after_padding(config: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let key = "max_position_embeddings";
    let first = first_position(config)?;
    match config.count(key)?.checked_sub(first) {
        None | Some(0) => Err(config.wrong(key, format!("a number above {first}"))),
        Some(n) => {
            keys.set("context_length", as_u32(n));
            Ok(())
        }
    }
}

fn as_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}
