//! Unigram vocabularies of `tokenizer.json`: which steps come before the pieces, in the keys of
//! GGUF.
//!
//! Invariant: a step that would change tokens and that is not known is an error that names it.
//! Knows no vocabulary.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::super::{HfConfig, Keys, ModelFileError};
use super::pre::parts;
use crate::gguf::Array;

/// Checks that every step is one that there is.
pub(super) fn check(json: &HfConfig) -> Result<(), ModelFileError> {
    if json.optional_flag("model.byte_fallback")? == Some(true) {
        return Err(json.wrong("model.byte_fallback", "false"));
    }
    for part in parts(json, "normalizer", "normalizers") {
        let key = format!("{part}.type");
        match json.optional_text(&key)? {
            Some("Precompiled" | "NFKC" | "Strip") => {}
            Some("Replace") => {
                let pattern = format!("{part}.pattern.Regex");
                let content = format!("{part}.content");
                // Runs of spaces become one.
                if json.optional_text(&pattern)? != Some(" {2,}") {
                    return Err(json.wrong(&pattern, "\" {2,}\""));
                }
                if !matches!(json.optional_text(&content)?, Some(" " | "\u{2581}")) {
                    return Err(json.wrong(&content, "a space"));
                }
            }
            _ => return Err(json.wrong(&key, "one of: Precompiled, NFKC, Replace, Strip")),
        }
    }
    for part in parts(json, "pre_tokenizer", "pretokenizers") {
        let key = format!("{part}.type");
        match json.optional_text(&key)? {
            Some("WhitespaceSplit" | "Metaspace") => {}
            _ => return Err(json.wrong(&key, "one of: WhitespaceSplit, Metaspace")),
        }
    }
    Ok(())
}

/// The way texts are normalised.
pub(super) fn text_form(json: &HfConfig, keys: &mut Keys) -> Result<(), ModelFileError> {
    let (mut removes_spaces, mut has_table, mut step) = (false, false, None);
    for part in parts(json, "normalizer", "normalizers") {
        match json.optional_text(&format!("{part}.type"))? {
            Some("Precompiled") => {
                let key = format!("{part}.precompiled_charsmap");
                let text = json.optional_text(&key)?.unwrap_or_default();
                let table = STANDARD.decode(text);
                let table = table.map_err(|_| json.wrong(&key, "base64"))?;
                if !table.is_empty() {
                    has_table = true;
                    let key = "tokenizer.ggml.precompiled_charsmap";
                    keys.set_whole(key, Array::U8(table));
                }
            }
            Some("NFKC") => step = Some(r#"{"type":"NFKC"}"#.to_owned()),
            Some("Replace") => removes_spaces = true,
            _ => {}
        }
    }
    for part in parts(json, "pre_tokenizer", "pretokenizers") {
        let split = json.optional_text(&format!("{part}.type"))?;
        removes_spaces |= split == Some("WhitespaceSplit");
    }
    // What the table does not say of a text, it leaves as it is.
    if let Some(step) = step.filter(|_| !has_table) {
        keys.set_whole("tokenizer.ggml.normalizers", Array::String(vec![step]));
    }
    keys.set_whole("tokenizer.ggml.remove_extra_whitespaces", removes_spaces);
    Ok(())
}
