//! `vocab.txt`: the vocabulary of BERT, a token a line, as what a `tokenizer.json` of it would say.
//!
//! Only for directories that say they are BERT's: other models have files of this name too. Knows
//! nothing of algorithms.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::super::{HfConfig, ModelFileError};

/// Tokens that no text is cut into.
const MARKS: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

/// The tokenizer of a directory with a `vocab.txt`, if it is one of BERT.
pub(super) fn as_json(
    directory: &Path,
    config: &HfConfig,
    settings: Option<&HfConfig>,
) -> Result<Option<HfConfig>, ModelFileError> {
    let path = directory.join("vocab.txt");
    let is_bert = matches!(
        config.optional_text("model_type")?,
        Some("bert" | "distilbert")
    );
    if !is_bert || !path.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&path).map_err(|source| ModelFileError::Io {
        attempt: "read",
        path: path.clone(),
        source,
    })?;
    let mut vocab = Map::new();
    for (id, token) in text.lines().enumerate() {
        if vocab.insert(token.to_owned(), json!(id)).is_some() {
            return Err(ModelFileError::Format {
                path,
                reason: format!("line {}: token {token:?} is there twice", id + 1),
            });
        }
    }
    let flag = |key: &str| -> Result<bool, ModelFileError> {
        Ok(match settings {
            Some(settings) => settings.optional_flag(key)?.unwrap_or(true),
            None => true,
        })
    };
    let accents = match settings {
        Some(settings) => settings.optional_flag("strip_accents")?,
        None => None,
    };
    let added = MARKS.iter().filter_map(|&mark| {
        let id = vocab.get(mark)?;
        Some(json!({"id": id, "content": mark, "special": true}))
    });
    let added: Vec<Value> = added.collect();
    let json = json!({
        "added_tokens": added,
        "normalizer": {
            "type": "BertNormalizer",
            "lowercase": flag("do_lower_case")?,
            "strip_accents": accents,
            "handle_chinese_chars": flag("tokenize_chinese_chars")?,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing"},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "vocab": vocab},
    });
    let Value::Object(root) = json else {
        return Ok(None);
    };
    Ok(Some(HfConfig::new(format!("'{}'", path.display()), root)))
}
